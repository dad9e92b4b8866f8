// Several weights: linear_relay.cuh.
#include "linear_relay.cuh"

RELAY_KERNEL(linear_relay_256_together, Together, 256, 3, 2)
RELAY_KERNEL(linear_relay_240_together, Together, 240, 3, 2)
RELAY_KERNEL(linear_relay_224_together, Together, 224, 3, 2)
RELAY_KERNEL(linear_relay_208_together, Together, 208, 3, 2)
RELAY_KERNEL(linear_relay_192_together, Together, 192, 7, 1)
RELAY_KERNEL(linear_relay_176_together, Together, 176, 7, 1)
RELAY_KERNEL(linear_relay_160_together, Together, 160, 7, 1)
RELAY_KERNEL(linear_relay_144_together, Together, 144, 7, 1)
RELAY_KERNEL(linear_relay_128_together, Together, 128, 7, 1)
