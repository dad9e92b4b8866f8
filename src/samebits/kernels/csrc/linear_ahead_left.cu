// Warps decode ahead of others that multiply, more than eight tokens: on Hopper.
#include "linear_ahead.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_ahead_16_two, Product, kMaxTwoWarps, linear<2, 2>)
LINEAR_KERNEL(linear_ahead_16_apart, Product, kMaxWarps, linear<2, 1, true>)
LINEAR_KERNEL(linear_ahead_32_two, Product, kMaxTwoWarps, linear<4, 2>)
LINEAR_KERNEL(linear_ahead_32_apart, Product, kMaxWarps, linear<4, 1, true>)
LINEAR_KERNEL(linear_ahead_32_two_apart, Product, kMaxTwoWarps, linear<4, 2, true>)
LINEAR_KERNEL(linear_ahead_48_two, Product, kMaxTwoWarps, linear<6, 2>)

// Several weights of one input.
LINEAR_KERNEL(linear_ahead_16_two_together, Together, kMaxTwoWarps, linear<2, 2>)
LINEAR_KERNEL(linear_ahead_16_apart_together, Together, kMaxWarps, linear<2, 1, true>)
LINEAR_KERNEL(linear_ahead_32_two_together, Together, kMaxTwoWarps, linear<4, 2>)
LINEAR_KERNEL(linear_ahead_32_apart_together, Together, kMaxWarps, linear<4, 1, true>)
LINEAR_KERNEL(linear_ahead_32_two_apart_together, Together, kMaxTwoWarps, linear<4, 2, true>)
LINEAR_KERNEL(linear_ahead_48_two_together, Together, kMaxTwoWarps, linear<6, 2>)
