// Each warp for itself, one row group, several weights: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_singles_4_together, Together, WithMmaOne, 4)
PAIRS_KERNEL(linear_singles_8_together, Together, WithMmaOne, 8)
PAIRS_KERNEL(linear_singles_16_together, Together, WithMmaOne, 16)
PAIRS_KERNEL(linear_singles_32_together, Together, WithMmaOne, 32)
