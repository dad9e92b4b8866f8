// Each warp for itself, two row groups: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_pairs_4, Product, WithMmaTwo, 4)
PAIRS_KERNEL(linear_pairs_8, Product, WithMmaTwo, 8)
PAIRS_KERNEL(linear_pairs_16, Product, WithMmaTwo, 16)
PAIRS_KERNEL(linear_pairs_32, Product, WithMmaTwo, 32)
PAIRS_KERNEL(linear_pairs_64, Product, WithMmaTwo, 64)
