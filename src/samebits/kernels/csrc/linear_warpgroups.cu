// Warpgroups: linear_pairs.cuh.
#include "linear_pairs.cuh"

PAIRS_KERNEL(linear_warpgroups_64, Product, WithWgmma, 64)
PAIRS_KERNEL(linear_warpgroups_128, Product, WithWgmma, 128)
PAIRS_KERNEL(linear_warpgroups_256, Product, WithWgmma, 256)
