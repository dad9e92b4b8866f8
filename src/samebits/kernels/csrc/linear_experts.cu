#include "linear_experts.cuh"

#define EXPERTS_KERNEL(name, max_warps, kind, octets)                                                          \
    extern "C" __global__ void __launch_bounds__((max_warps) * 32, 1)                                          \
    name(const __grid_constant__ Geometry geometry, const __grid_constant__ Packed packed, const __grid_constant__ Job job, const __grid_constant__ Routing routing) { \
        linear<kind, octets>(geometry, packed, job, routing);                                                  \
    }
EXPERTS_KERNEL(linear_experts_8_shared, kMaxWarps, shared, 1)
EXPERTS_KERNEL(linear_experts_8_global, kMaxWarps, global, 1)
EXPERTS_KERNEL(linear_experts_16_shared, kFewWarps, shared, 2)
EXPERTS_KERNEL(linear_experts_16_global, kFewWarps, global, 2)
