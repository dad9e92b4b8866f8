// Several weights of one input in a launch; compiled only where a model has them.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8_halves_together, Together, kHalves, 1)
LINEAR_KERNEL(linear_ahead_8_global_together, Together, kGlobal, 1)
LINEAR_KERNEL(linear_ahead_16_pairs_together, Together, kPairs, 2)
LINEAR_KERNEL(linear_ahead_16_global_together, Together, kGlobal, 2)
