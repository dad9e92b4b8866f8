#include "linear_routed.cuh"

#define ROUTED_KERNEL(name, tokens)                                                                                                             \
    extern "C" __global__ void __cluster_dims__(WithRoutes<tokens>::cluster)                                                                    \
        __launch_bounds__((WithRoutes<tokens>::multipliers + kOthers) * kLanes, 1)                                                              \
    name(const __grid_constant__ Geometry geometry, const __grid_constant__ Packed packed, const __grid_constant__ Job job, const __grid_constant__ Routing routing) { \
        linear_routed<tokens>(geometry, packed, job, routing);                                                                                  \
    }
ROUTED_KERNEL(linear_routed_64, 64)
ROUTED_KERNEL(linear_routed_96, 96)
ROUTED_KERNEL(linear_routed_128, 128)
ROUTED_KERNEL(linear_routed_192, 192)
ROUTED_KERNEL(linear_routed_256, 256)
