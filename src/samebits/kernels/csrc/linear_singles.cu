// Each warp for itself, one row group.
#include "linear_pairs.cuh"

// One weight in a launch.
PAIRS_KERNEL(linear_singles_4, Product, WithMmaOne, 4)
PAIRS_KERNEL(linear_singles_8, Product, WithMmaOne, 8)
PAIRS_KERNEL(linear_singles_16, Product, WithMmaOne, 16)
PAIRS_KERNEL(linear_singles_32, Product, WithMmaOne, 32)

// Several weights of one input.
PAIRS_KERNEL(linear_singles_4_together, Together, WithMmaOne, 4)
PAIRS_KERNEL(linear_singles_8_together, Together, WithMmaOne, 8)
PAIRS_KERNEL(linear_singles_16_together, Together, WithMmaOne, 16)
PAIRS_KERNEL(linear_singles_32_together, Together, WithMmaOne, 32)
