// Several weights: linear_tiles.cuh.
#include "linear_tiles.cuh"

TILES_KERNEL(linear_tiles_16_1_together, Together, 16, 1, 1)
TILES_KERNEL(linear_tiles_16_2_together, Together, 16, 2, 1)
TILES_KERNEL(linear_tiles_32_1_together, Together, 32, 1, 1)
TILES_KERNEL(linear_tiles_32_2_together, Together, 32, 2, 1)
TILES_KERNEL(linear_tiles_64_1_together, Together, 64, 1, 1)
TILES_KERNEL(linear_tiles_64_2_together, Together, 64, 2, 1)
TILES_KERNEL(linear_tiles_128_1_together, Together, 128, 1, 1)
TILES_KERNEL(linear_tiles_128_2_together, Together, 128, 2, 2)
