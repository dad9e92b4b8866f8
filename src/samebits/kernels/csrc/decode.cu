// samebits::decode: a packed tensor to row-major BF16.
#include "decoder.cuh"

// Every chunk, all of it. Where chunks are few, two warps share one: the second goes past what is the first's.
template <int own_parts>
struct AllChunks {
    const Geometry& geometry;
    u16* output;

    static constexpr bool sparse = false;
    static constexpr int parts = own_parts;
    __device__ __forceinline__ int count() const { return geometry.chunks * parts; }
    __device__ __forceinline__ bool wanted(int) const { return true; }
    __device__ __forceinline__ int chunk(int task) const { return task / parts; }
    __device__ __forceinline__ Window window(int) const { return {output, 0, geometry.words}; }
};

#define DECODE_KERNEL(name, quad, clip, parts)                                                                         \
    extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)                                              \
    name(const Geometry geometry, const Packed packed, u16* output, const Division division) {                         \
        decode_tasks<quad, clip>(geometry, packed, AllChunks<parts>{geometry, output}, division, Blocks::of_launch()); \
    }
DECODE_KERNEL(decode_quad_whole, true, kAll, 1)
DECODE_KERNEL(decode_quad_clipped, true, kWords, 1)
DECODE_KERNEL(decode_single_whole, false, kAll, 1)
DECODE_KERNEL(decode_single_clipped, false, kWords, 1)
DECODE_KERNEL(decode_quad_whole_shared, true, kAll, 2)
