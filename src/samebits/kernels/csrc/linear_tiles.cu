// One weight: linear_tiles.cuh.
#include "linear_tiles.cuh"

TILES_KERNEL(linear_tiles_16_1, Product, 16, 1, 1)
TILES_KERNEL(linear_tiles_16_2, Product, 16, 2, 1)
TILES_KERNEL(linear_tiles_32_1, Product, 32, 1, 1)
TILES_KERNEL(linear_tiles_32_2, Product, 32, 2, 1)
TILES_KERNEL(linear_tiles_64_1, Product, 64, 1, 1)
TILES_KERNEL(linear_tiles_64_2, Product, 64, 2, 1)
TILES_KERNEL(linear_tiles_128_1, Product, 128, 1, 1)
TILES_KERNEL(linear_tiles_128_2, Product, 128, 2, 2)
