// One weight: linear_relay.cuh.
#include "linear_relay.cuh"

RELAY_KERNEL(linear_relay_256, Product, 256, 3, 2)
RELAY_KERNEL(linear_relay_240, Product, 240, 3, 2)
RELAY_KERNEL(linear_relay_224, Product, 224, 3, 2)
RELAY_KERNEL(linear_relay_208, Product, 208, 3, 2)
RELAY_KERNEL(linear_relay_192, Product, 192, 7, 1)
RELAY_KERNEL(linear_relay_176, Product, 176, 7, 1)
RELAY_KERNEL(linear_relay_160, Product, 160, 7, 1)
RELAY_KERNEL(linear_relay_144, Product, 144, 7, 1)
RELAY_KERNEL(linear_relay_128, Product, 128, 7, 1)
