// Each warp for itself, several weights: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_pairs_8_together, Together, WithMma, 8)
PAIRS_KERNEL(linear_pairs_16_together, Together, WithMma, 16)
PAIRS_KERNEL(linear_pairs_32_together, Together, WithMma, 32)
PAIRS_KERNEL(linear_pairs_64_together, Together, WithMma, 64)
