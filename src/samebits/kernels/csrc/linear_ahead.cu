#include "linear_ahead.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_ahead_8, Product, kMaxWarps, linear<1, 1>)
LINEAR_KERNEL(linear_ahead_8_two, Product, kMaxTwoWarps, linear<1, 2>)

// Several weights of one input.
LINEAR_KERNEL(linear_ahead_8_together, Together, kMaxWarps, linear<1, 1>)
LINEAR_KERNEL(linear_ahead_8_two_together, Together, kMaxTwoWarps, linear<1, 2>)
