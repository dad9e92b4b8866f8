#include "linear_ahead.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_ahead_8, Product, kMaxWarps, linear<1, kRawRuns>)
LINEAR_KERNEL(linear_ahead_8_many, Product, kManyWarps, linear<1, kFewRawRuns>)
LINEAR_KERNEL(linear_ahead_16, Product, kMaxWarps, linear<2, kRawRuns>)
LINEAR_KERNEL(linear_ahead_16_many, Product, kManyWarps, linear<2, kFewRawRuns>)

// Several weights of one input.
LINEAR_KERNEL(linear_ahead_8_together, Together, kMaxWarps, linear<1, kRawRuns>)
LINEAR_KERNEL(linear_ahead_8_many_together, Together, kManyWarps, linear<1, kFewRawRuns>)
LINEAR_KERNEL(linear_ahead_16_together, Together, kMaxWarps, linear<2, kRawRuns>)
LINEAR_KERNEL(linear_ahead_16_many_together, Together, kManyWarps, linear<2, kFewRawRuns>)
