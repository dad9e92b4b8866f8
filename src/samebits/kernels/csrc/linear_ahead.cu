// One weight in a launch.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8, Product, kMaxWarps<1>, linear<1>)
LINEAR_KERNEL(linear_ahead_16, Product, kMaxWarps<2>, linear<2>)
