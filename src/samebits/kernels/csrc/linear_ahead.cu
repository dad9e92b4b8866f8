// One weight in a launch.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8, Product, kMaxWarps, linear<1>)
LINEAR_KERNEL(linear_ahead_16, Product, kMaxWarps, linear<2>)
