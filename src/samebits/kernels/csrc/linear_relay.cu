#include "linear_relay.cuh"

// One weight in a launch.
RELAY_KERNEL(linear_relay_256, Product, 256, 3, 2)
RELAY_KERNEL(linear_relay_240, Product, 240, 3, 2)
RELAY_KERNEL(linear_relay_224, Product, 224, 3, 2)
RELAY_KERNEL(linear_relay_208, Product, 208, 3, 2)
RELAY_KERNEL(linear_relay_192, Product, 192, 7, 1)
RELAY_KERNEL(linear_relay_176, Product, 176, 7, 1)
RELAY_KERNEL(linear_relay_160, Product, 160, 7, 1)
RELAY_KERNEL(linear_relay_144, Product, 144, 7, 1)
RELAY_KERNEL(linear_relay_128, Product, 128, 7, 1)

// Several weights of one input.
RELAY_KERNEL(linear_relay_256_together, Together, 256, 3, 2)
RELAY_KERNEL(linear_relay_240_together, Together, 240, 3, 2)
RELAY_KERNEL(linear_relay_224_together, Together, 224, 3, 2)
RELAY_KERNEL(linear_relay_208_together, Together, 208, 3, 2)
RELAY_KERNEL(linear_relay_192_together, Together, 192, 7, 1)
RELAY_KERNEL(linear_relay_176_together, Together, 176, 7, 1)
RELAY_KERNEL(linear_relay_160_together, Together, 160, 7, 1)
RELAY_KERNEL(linear_relay_144_together, Together, 144, 7, 1)
RELAY_KERNEL(linear_relay_128_together, Together, 128, 7, 1)
