// Each warp for itself: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_pairs_8, Product, WithMma, 8)
PAIRS_KERNEL(linear_pairs_16, Product, WithMma, 16)
PAIRS_KERNEL(linear_pairs_32, Product, WithMma, 32)
PAIRS_KERNEL(linear_pairs_64, Product, WithMma, 64)
