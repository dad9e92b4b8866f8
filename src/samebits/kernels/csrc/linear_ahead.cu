// One weight in a launch.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8_shared, Product, shared, 1)
LINEAR_KERNEL(linear_ahead_8_global, Product, global, 1)
LINEAR_KERNEL(linear_ahead_16_shared, Product, shared, 2)
LINEAR_KERNEL(linear_ahead_16_global, Product, global, 2)
