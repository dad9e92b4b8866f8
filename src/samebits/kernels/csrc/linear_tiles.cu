#include "linear_tiles.cuh"

// One weight in a launch.
TILES_KERNEL(linear_tiles_16_8, Product, 16, 8, 1)
TILES_KERNEL(linear_tiles_16_16, Product, 16, 16, 1)
TILES_KERNEL(linear_tiles_32_8, Product, 32, 8, 1)
TILES_KERNEL(linear_tiles_32_16, Product, 32, 16, 1)
TILES_KERNEL(linear_tiles_64_4, Product, 64, 4, 1)
TILES_KERNEL(linear_tiles_64_8, Product, 64, 8, 1)
TILES_KERNEL(linear_tiles_64_12, Product, 64, 12, 1)
TILES_KERNEL(linear_tiles_64_16, Product, 64, 16, 1)
TILES_KERNEL(linear_tiles_128_8, Product, 128, 8, 1)
TILES_KERNEL(linear_tiles_128_12, Product, 128, 12, 2)

// Several weights of one input.
TILES_KERNEL(linear_tiles_16_8_together, Together, 16, 8, 1)
TILES_KERNEL(linear_tiles_16_16_together, Together, 16, 16, 1)
TILES_KERNEL(linear_tiles_32_8_together, Together, 32, 8, 1)
TILES_KERNEL(linear_tiles_32_16_together, Together, 32, 16, 1)
TILES_KERNEL(linear_tiles_64_4_together, Together, 64, 4, 1)
TILES_KERNEL(linear_tiles_64_8_together, Together, 64, 8, 1)
TILES_KERNEL(linear_tiles_64_12_together, Together, 64, 12, 1)
TILES_KERNEL(linear_tiles_64_16_together, Together, 64, 16, 1)
TILES_KERNEL(linear_tiles_128_8_together, Together, 128, 8, 1)
TILES_KERNEL(linear_tiles_128_12_together, Together, 128, 12, 2)
