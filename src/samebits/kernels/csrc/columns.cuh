// The fused linear layer by mma whose rows are weights, eight of its sixteen: x as the B operand, from shared or straight from global memory,
// and the sums.
#pragma once
#include "linear.cuh"

// shared: for each token and stage 128 bytes, [half ^ (token & 1)][t] 16 bytes, four words of step 2 half, four of the next: free of bank
// conflicts. global: where x does not fit.
enum Kind { shared, global };

// Starts copying x [tokens, columns] by the block's first threads.
template <Kind kind>
__device__ __forceinline__ void stage_columns(const u16* x, u32 target, int tokens, int columns, int threads) {
    if (kind == global) return;
    for (int token = 0; token < tokens; ++token)
        for (int quad = threadIdx.x; quad < columns >> 2; quad += threads) {
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

    __device__ __forceinline__ Columns(const u16* x, u32 staged, int tokens, int columns, int lane, int stage) { move_to(x, staged, tokens, columns, lane, stage); }
    __device__ __forceinline__ void move_to(const u16* x, u32 staged, int tokens, int columns, int lane, int stage) {
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

template <int octets>
struct Sums { float of[octets][4]; };   // of each four the first two are a row's

// A step: a quad of each of eight rows, its raw bytes and its upper bytes (sign and top7), shifted back (4.3).
template <int octets>
__device__ __forceinline__ void multiply_quad(Sums<octets>& sums, int q, u32 raw, u32 upper, u32 scale, const Vec4 (&x)[octets]) {
    u32 weights[4];                     // the lower rows of A hold anything, and nobody reads their sums
    weights[0] = unshift(__byte_perm(raw, upper, 0x5140), scale);
    weights[2] = unshift(__byte_perm(raw, upper, 0x7362), scale);
#pragma unroll
    for (int octet = 0; octet < octets; ++octet)
        multiply(sums.of[octet], weights, q & 1 ? x[octet].z : x[octet].x, q & 1 ? x[octet].w : x[octet].y);
}

// Where the ranges' sums of a row group meet: the warp that brings the last gets their total.
template <int octets>
__device__ __forceinline__ bool join(Sums<octets>& sums, float* parts, u32 done, int range, int ranges, int lane) {
    constexpr int count = 2 * octets;
#pragma unroll
    for (int i = 0; i < count; ++i) parts[(range * count + i) * kLanes + lane] = sums.of[i >> 1][i & 1];
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = add_to_flag(done, 1);
    if (__shfl_sync(kFull, before, 0) + 1 < u32(ranges)) return false;
#pragma unroll
    for (int i = 0; i < count; ++i) sums.of[i >> 1][i & 1] = parts[i * kLanes + lane];
#pragma unroll 1
    for (int part = 1; part < ranges; ++part)
#pragma unroll
        for (int i = 0; i < count; ++i) sums.of[i >> 1][i & 1] += parts[(part * count + i) * kLanes + lane];
    return true;
}

// A row group's sums to y: lane (g, t) holds tokens 2 t and 2 t + 1 (and 8 more) of row g.
template <int octets>
__device__ __forceinline__ void finish(const Geometry& geometry, const Job& job, int group, int lane, const Sums<octets>& sums) {
    const int row = 8 * group + (lane >> 2);
    const float bias = job.bias ? __uint_as_float(u32(job.bias[row]) << 16) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * octets; ++i) {
        const int token = 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
        float sum = sums.of[i >> 1][i & 1];
        if (job.bias) sum += bias;
        if (token < job.tokens) job.y[size_t(token) * geometry.rows + row] = u16(to_bf16x2(sum, 0.0f));
    }
}
