// samebits::decode: a packed tensor to row-major BF16.
#include "all_chunks.cuh"

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
