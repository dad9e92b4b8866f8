// The fused linear layer by mma: x, from shared or straight from global memory, and the sums. Of up to eight tokens x is the right matrix, and eight or all of
// the left one's sixteen rows are weights; more are the left matrix, and a row group is the right one, so that there is one mma for both octets.
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

// Of two steps the operands, of which own has each octet's words: a step's x, y or z, w.
__device__ __forceinline__ void operands_of(const Vec4 (&own)[1], Vec4 (&x)[1]) { x[0] = own[0]; }
__device__ __forceinline__ void operands_of(const Vec4 (&own)[2], Vec4 (&x)[2]) {
    x[0] = {own[0].x, own[1].x, own[0].y, own[1].y};
    x[1] = {own[0].z, own[1].z, own[0].w, own[1].w};
}

// A lane's part of x: tokens g (and g + 8).
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
    // The operands of steps 2 half and 2 half + 1.
    __device__ __forceinline__ void load(Vec4 (&x)[octets], int stage, int half) const {
        Vec4 own[octets];
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
            if (kind == shared) {
                own[octet] = load_shared_vec4_if(any[octet], halves[octet][half] + stage * 128);
            } else {
                const u16* words = source[octet] + stage * 64 + 32 * half;
                const Vec2 first = *reinterpret_cast<const Vec2*>(words), second = *reinterpret_cast<const Vec2*>(words + 16);
                own[octet] = {first.x, first.y, second.x, second.y};
            }
        }
        operands_of(own, x);
    }
};

// x of more than eight tokens in shared memory, as arrange.cu writes it: for each stage, 16 tokens and step 512 bytes, in which each lane's left operand is
// where left_place says, free of bank conflicts for who reads and who writes.
constexpr int kLeftStageBytes = 2048;   // of 16 tokens
__device__ __forceinline__ const u16* left_stage(const u16* x, int stage) { return x + size_t(stage) * (kLeftStageBytes / 2); }

template <int octets>
struct LeftColumns {
    u32 steps[4];                 // of the stage at hand

    __device__ __forceinline__ LeftColumns(u32 x, int lane) {
#pragma unroll
        for (int q = 0; q < 4; ++q) steps[q] = x + 512 * q + left_place(lane, q);
    }
    __device__ __forceinline__ void advance(u32 bytes) {
#pragma unroll
        for (int q = 0; q < 4; ++q) steps[q] += bytes;
    }
    // Of each 16 tokens, the operands of both steps of a half.
    __device__ __forceinline__ void load(Vec4 (&x)[octets], int stage, int half) const {
#pragma unroll
        for (int i = 0; i < octets; ++i) x[i] = load_shared_vec4(steps[2 * half + (i & 1)] + (stage * (octets / 2) + (i >> 1)) * kLeftStageBytes);
    }
};

// A row group's. Of up to eight tokens two: of row g tokens 2 t and 2 t + 1; of more two for each octet: of rows 2 t and 2 t + 1 token g, then g + 8 and so on.
template <int octets>
struct Sums { float of[octets == 1 ? 4 : 2 * octets]; };

// A quad's words, shifted back (4.3), of its raw bytes and its upper bytes (sign and top7): columns 4 t and 4 t + 1, then the others.
__device__ __forceinline__ Vec2 quad_words(u32 raw, u32 upper, u32 scale) {
    return {unshift(__byte_perm(raw, upper, 0x5140), scale), unshift(__byte_perm(raw, upper, 0x7362), scale)};
}

// A step of up to eight tokens: a quad of each row of one row group, or of two.
template <int groups>
__device__ __forceinline__ void multiply_rows(float (&sums)[4], int q, const u32 (&raw)[groups], const u32 (&upper)[groups], const u32 (&scale)[groups], const Vec4& x) {
    u32 weights[4];                     // the lower rows of the left matrix hold anything if there is one, and nobody reads their sums
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        const Vec2 words = quad_words(raw[i], upper[i], scale[i]);
        weights[i] = words.x, weights[2 + i] = words.y;
    }
    multiply(sums, weights, q & 1 ? x.z : x.x, q & 1 ? x.w : x.y);
}

// A step: a quad of each of eight rows.
template <int octets>
__device__ __forceinline__ void multiply_quad(Sums<octets>& sums, int q, u32 raw, u32 upper, u32 scale, const Vec4 (&x)[octets]) {
    if constexpr (octets == 1) {
        multiply_rows<1>(sums.of, q, {raw}, {upper}, {scale}, x[0]);
    } else {
        const Vec2 words = quad_words(raw, upper, scale);
#pragma unroll
        for (int i = 0; i < octets / 2; ++i) {
            const Vec4& own = x[2 * i + (q & 1)];
            const u32 tokens[4] = {own.x, own.y, own.z, own.w};
            multiply(sums.of + 4 * i, tokens, words.x, words.y);
        }
    }
}

// Where the ranges' sums of a row group meet: the warp that brings the last gets their total.
template <int octets>
__device__ __forceinline__ bool join(Sums<octets>& sums, float* parts, u32 done, int range, int ranges, int lane) {
    constexpr int count = 2 * octets;
#pragma unroll
    for (int i = 0; i < count; ++i) parts[(range * count + i) * kLanes + lane] = sums.of[i];
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = add_to_flag(done, 1);
    if (__shfl_sync(kFull, before, 0) + 1 < u32(ranges)) return false;
#pragma unroll
    for (int i = 0; i < count; ++i) sums.of[i] = parts[i * kLanes + lane];
#pragma unroll 1
    for (int part = 1; part < ranges; ++part)
#pragma unroll
        for (int i = 0; i < count; ++i) sums.of[i] += parts[(part * count + i) * kLanes + lane];
    return true;
}

// A row group's sums to y.
template <int octets>
__device__ __forceinline__ void finish(const Geometry& geometry, const Job& job, int group, int lane, const Sums<octets>& sums) {
    const int g = lane >> 2, t = lane & 3;
    auto bias_of = [&](int row) { return job.bias ? __uint_as_float(u32(job.bias[row]) << 16) : 0.0f; };
    auto with_bias = [&](float sum, float bias) { return job.bias ? sum + bias : sum; };   // a sum of -0 stays as it is without one
    if constexpr (octets == 1) {
        const int row = 8 * group + g;
        const float bias = bias_of(row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 2 * t + i;
            if (token < job.tokens) job.y[size_t(token) * geometry.rows + row] = u16(to_bf16x2(with_bias(sums.of[i], bias), 0.0f));
        }
    } else {
        const int row = 8 * group + 2 * t;
        const float bias = bias_of(row), next_bias = bias_of(row + 1);
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
            const int token = g + 8 * octet;
            const u32 words = to_bf16x2(with_bias(sums.of[2 * octet], bias), with_bias(sums.of[2 * octet + 1], next_bias));
            if (token < job.tokens) *reinterpret_cast<u32*>(job.y + size_t(token) * geometry.rows + row) = words;
        }
    }
}

// A range's sums, where ranges meet in memory with those of other blocks: the warp that brings the last of a row group finishes it. end: of the warp's segment,
// whose ranges come one after another.
template <int octets>
__device__ __forceinline__ void finish_range(const Geometry& geometry, const Job& job, int group, int range, int end, int lane, Sums<octets>& sums) {
    if (job.ranges > 1) {
        using Met = Meeting<octets, 2>;
        typename Met::Sums own;
        const Met met{job.parts + size_t(group) * job.ranges * (Met::all * kLanes), lane};
#pragma unroll
        for (int i = 0; i < Met::all; ++i) own[i >> 1][i & 1] = sums.of[i];
        met.bring(range, own);
        if ((range + 1) * job.stages_per_range < end) return;             // another one of this warp's is to come
        if (job.segments > 1 && !met.is_last(job.done + group, job.segments)) return;
        met.add(job.ranges, own);
#pragma unroll
        for (int i = 0; i < Met::all; ++i) sums.of[i] = own[i >> 1][i & 1];
    }
    finish(geometry, job, group, lane, sums);
}
