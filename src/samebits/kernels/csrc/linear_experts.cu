#include "linear_experts.cuh"

#define EXPERTS_KERNEL(name, max_warps, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__((max_warps) * 32, 1)                                          \
    name(const __grid_constant__ Geometry geometry, const __grid_constant__ Packed packed, const __grid_constant__ Job job, const __grid_constant__ Routing routing) { \
        __VA_ARGS__(geometry, packed, job, routing);                                                           \
    }
EXPERTS_KERNEL(linear_experts_8_shared, kMaxWarps, linear<1>)
EXPERTS_KERNEL(linear_experts_8_in_step, kMaxWarps, linear_in_step<1>)
EXPERTS_KERNEL(linear_experts_16_shared, kFewWarps, linear<2>)
EXPERTS_KERNEL(linear_experts_16_in_step, kFewWarps, linear_in_step<2>)
