// The decode table in memory, for kernels that would otherwise build it in every block of every launch. One block.
#include "streams.cuh"

template <bool quad>
__device__ __forceinline__ void make_table(const Packed& packed, u32* output) {
    extern __shared__ __align__(16) u32 shared[];
    const u32 words = 1u << packed.width;
    const Table<quad> table(packed, shared, shared + words);
    table.finish();
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) output[i] = shared[i];
}

extern "C" __global__ void __launch_bounds__(512) make_table_quad(const Packed packed, u32* output) { make_table<true>(packed, output); }
extern "C" __global__ void __launch_bounds__(512) make_table_single(const Packed packed, u32* output) { make_table<false>(packed, output); }
