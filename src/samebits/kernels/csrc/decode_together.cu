// Several packed tensors to row-major BF16 by one launch: kernels/decode_together.py.
#include "all_chunks.cuh"

// Each tensor has blocks of its own.
struct Decoded {
    Geometry geometry;
    Packed packed;
    u16* output;
    int first_block, blocks, is_quad;
};
constexpr int kMaxDecoded = 9;
struct DecodedTogether {
    Decoded tensors[kMaxDecoded];

    __device__ __forceinline__ const Decoded& own() const {
        return tensors[own_number<kMaxDecoded>([&](int i) { return tensors[i].first_block; })];
    }
};

extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
decode_together(const __grid_constant__ DecodedTogether together, const Division division) {
    const Decoded& own = together.own();
    const AllChunks<1> tasks{own.geometry, own.output};
    const Blocks blocks{int(blockIdx.x) - own.first_block, own.blocks};
    if (own.is_quad) return decode_tasks<true, kAll>(own.geometry, own.packed, tasks, division, blocks);
    decode_tasks<false, kAll>(own.geometry, own.packed, tasks, division, blocks);
}
