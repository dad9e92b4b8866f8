// The tokens' side of the fused linear layer where weights are mma's rows: x as the B operand, from shared or straight from global memory.
#pragma once
#include "common.cuh"

// shared: for each token and stage 128 bytes, [half ^ (token & 1)][t] 16 bytes, four words of step 2 half, four of the next: free of bank
// conflicts. global: where x does not fit.
enum Kind { shared, global };

// Starts copying x [tokens, columns] by the whole block.
template <Kind kind>
__device__ __forceinline__ void stage_columns(const u16* x, u32 target, int tokens, int columns) {
    if (kind == global) return;
    for (int token = 0; token < tokens; ++token)
        for (int quad = threadIdx.x; quad < columns >> 2; quad += blockDim.x) {
            const int stage = quad >> 4, q = quad >> 2 & 3, t = quad & 3;
            const u32 place = token * (columns * 2) + stage * 128 + (((q >> 1) ^ (token & 1)) << 6) + (t << 4) + ((q & 1) << 3);
            copy_async_8(target + place, x + size_t(token) * columns + 4 * quad);
        }
}

// A lane's part of x: token g (and g + 8) is a column of B.
template <Kind kind, int octets>
struct Columns {
    u32 halves[octets][2];        // in shared memory, of the stage at hand
    const u16* source[octets];    // in x
    bool any[octets];             // without a token of its own, a lane leaves the memory's time to others, and nobody reads its sums

    __device__ __forceinline__ Columns(const u16* x, u32 staged, int tokens, int columns, int lane, int stage) {
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
            const int own = (lane >> 2) + 8 * octet, t = lane & 3, token = min(own, tokens - 1);
            const u32 place = staged + token * (columns * 2) + 16 * t + 128 * stage;
            halves[octet][0] = place + ((token & 1) << 6);
            halves[octet][1] = place + ((~token & 1) << 6);
            source[octet] = x + size_t(token) * columns + 4 * t + 64 * stage;
            any[octet] = own < tokens;
        }
    }
    __device__ __forceinline__ void advance(int stages) {
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
            halves[octet][0] += 128 * stages, halves[octet][1] += 128 * stages;
            source[octet] += 64 * stages;
        }
    }
    // The B operands of steps 2 half (x, y) and 2 half + 1 (z, w).
    __device__ __forceinline__ Vec4 load(int stage, int half, int octet) const {
        Vec4 v;
        if (kind == shared) {
            v = load_shared_vec4_if(any[octet], halves[octet][half] + stage * 128);
        } else {
            const u16* words = source[octet] + stage * 64 + 32 * half;
            const Vec2 first = *reinterpret_cast<const Vec2*>(words), second = *reinterpret_cast<const Vec2*>(words + 16);
            v = {first.x, first.y, second.x, second.y};
        }
        return v;
    }
};
