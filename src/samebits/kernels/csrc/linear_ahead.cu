#include "linear_ahead.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_ahead_8, Product, kMaxWarps, linear<1>)
LINEAR_KERNEL(linear_ahead_16, Product, kMaxWarps, linear<2>)

// Several weights of one input.
LINEAR_KERNEL(linear_ahead_8_together, Together, kMaxWarps, linear<1>)
LINEAR_KERNEL(linear_ahead_16_together, Together, kMaxWarps, linear<2>)
