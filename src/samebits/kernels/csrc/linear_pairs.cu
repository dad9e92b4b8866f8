// Each warp for itself, two row groups.
#include "linear_pairs.cuh"

// One weight in a launch.
PAIRS_KERNEL(linear_pairs_4, Product, WithMmaTwo, 4)
PAIRS_KERNEL(linear_pairs_8, Product, WithMmaTwo, 8)
PAIRS_KERNEL(linear_pairs_16, Product, WithMmaTwo, 16)
PAIRS_KERNEL(linear_pairs_32, Product, WithMmaTwo, 32)
PAIRS_KERNEL(linear_pairs_64, Product, WithMmaTwo, 64)

// Several weights of one input.
PAIRS_KERNEL(linear_pairs_4_together, Together, WithMmaTwo, 4)
PAIRS_KERNEL(linear_pairs_8_together, Together, WithMmaTwo, 8)
PAIRS_KERNEL(linear_pairs_16_together, Together, WithMmaTwo, 16)
PAIRS_KERNEL(linear_pairs_32_together, Together, WithMmaTwo, 32)
PAIRS_KERNEL(linear_pairs_64_together, Together, WithMmaTwo, 64)
