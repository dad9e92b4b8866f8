// Several weights of one input in a launch; compiled only where a model has them.
#include "linear_ahead.cuh"

LINEAR_KERNEL(linear_ahead_8_shared_together, Together, shared, 1)
LINEAR_KERNEL(linear_ahead_8_global_together, Together, global, 1)
LINEAR_KERNEL(linear_ahead_16_shared_together, Together, shared, 2)
LINEAR_KERNEL(linear_ahead_16_global_together, Together, global, 2)
