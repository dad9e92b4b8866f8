// One weight: linear_tiles.cuh.
#include "linear_tiles.cuh"

TILES_KERNEL(linear_tiles_16_8, Product, 16, 8, 1)
TILES_KERNEL(linear_tiles_16_16, Product, 16, 16, 1)
TILES_KERNEL(linear_tiles_32_8, Product, 32, 8, 1)
TILES_KERNEL(linear_tiles_32_16, Product, 32, 16, 1)
TILES_KERNEL(linear_tiles_64_4, Product, 64, 4, 1)
TILES_KERNEL(linear_tiles_64_8, Product, 64, 8, 1)
TILES_KERNEL(linear_tiles_64_12, Product, 64, 12, 1)
TILES_KERNEL(linear_tiles_64_16, Product, 64, 16, 1)
TILES_KERNEL(linear_tiles_128_8, Product, 128, 8, 1)
TILES_KERNEL(linear_tiles_128_16, Product, 128, 16, 2)
