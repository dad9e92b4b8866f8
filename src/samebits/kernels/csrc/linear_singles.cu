// Each warp for itself, one row group: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_singles_4, Product, WithMmaOne, 4)
PAIRS_KERNEL(linear_singles_8, Product, WithMmaOne, 8)
PAIRS_KERNEL(linear_singles_16, Product, WithMmaOne, 16)
PAIRS_KERNEL(linear_singles_32, Product, WithMmaOne, 32)
