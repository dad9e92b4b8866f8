// Several weights of one input in a launch; compiled only where a model has them.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8_together, Together, kMaxWarps, linear<1>)
LINEAR_KERNEL(linear_ahead_16_together, Together, kMaxWarps, linear<2>)
