// Several weights of one input in a launch; compiled only where a model has them.
#include "linear_chains.cuh"

LINEAR_KERNEL(linear_chains_8_shared_together, Together, kMaxWarps, linear<shared, 1>)
LINEAR_KERNEL(linear_chains_8_shared_borders_together, Together, kMaxWarps, linear<shared, 1, true>)
LINEAR_KERNEL(linear_chains_8_global_together, Together, kMaxWarps, linear<global, 1>)
LINEAR_KERNEL(linear_chains_8_global_borders_together, Together, kMaxWarps, linear<global, 1, true>)
LINEAR_KERNEL(linear_chains_16_shared_together, Together, kFewWarps, linear<shared, 2>)
LINEAR_KERNEL(linear_chains_16_shared_borders_together, Together, kFewWarps, linear<shared, 2, true>)
LINEAR_KERNEL(linear_chains_16_global_together, Together, kFewWarps, linear<global, 2>)
LINEAR_KERNEL(linear_chains_16_global_borders_together, Together, kFewWarps, linear<global, 2, true>)
