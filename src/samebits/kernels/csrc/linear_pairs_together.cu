// Each warp for itself, two row groups, several weights: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_pairs_4_together, Together, WithMmaTwo, 4)
PAIRS_KERNEL(linear_pairs_8_together, Together, WithMmaTwo, 8)
PAIRS_KERNEL(linear_pairs_16_together, Together, WithMmaTwo, 16)
PAIRS_KERNEL(linear_pairs_32_together, Together, WithMmaTwo, 32)
PAIRS_KERNEL(linear_pairs_64_together, Together, WithMmaTwo, 64)
