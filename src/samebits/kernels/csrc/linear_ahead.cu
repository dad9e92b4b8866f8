// One weight in a launch.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8_halves, Product, kHalves, 1)
LINEAR_KERNEL(linear_ahead_8_global, Product, kGlobal, 1)
LINEAR_KERNEL(linear_ahead_16_pairs, Product, kPairs, 2)
LINEAR_KERNEL(linear_ahead_16_global, Product, kGlobal, 2)
