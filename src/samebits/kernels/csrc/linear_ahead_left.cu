// Warps decode ahead of others that multiply, more than eight tokens: on Hopper.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_16, Product, kMaxTwoWarps, linear<2, 2>)
LINEAR_KERNEL(linear_ahead_16_apart, Product, kMaxWarps, linear<2, 1, true>)
LINEAR_KERNEL(linear_ahead_16_together, Together, kMaxTwoWarps, linear<2, 2>)
LINEAR_KERNEL(linear_ahead_16_apart_together, Together, kMaxWarps, linear<2, 1, true>)
