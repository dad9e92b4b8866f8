// The tokens' side of the fused linear layer: x as mma's A operand, from shared memory or straight from global memory.
#pragma once
#include "linear.cuh"

// kHalves, up to eight tokens: for each token and stage 128 bytes of shared memory, [half ^ (token & 1)][t] 16 bytes, {step 2 half low,
// step 2 half + 1 low, step 2 half high, step 2 half + 1 high}. kPairs, more tokens: for each g and stage 256 bytes, [q ^ (g & 1)][t] 16
// bytes, {token g low, token g + 8 low, token g high, token g + 8 high}. Both are free of bank conflicts. kGlobal: where x does not fit.
constexpr int kPairs = 0, kHalves = 1, kGlobal = 2;

// Starts copying x [tokens, columns] by the whole block.
template <int kind>
__device__ __forceinline__ void stage_x(const u16* x, u32 target, int tokens, int columns) {
    if (kind == kGlobal) return;
    for (int token = 0; token < tokens; ++token)
        for (int pair = threadIdx.x; pair < columns >> 1; pair += blockDim.x) {
            const int stage = pair >> 5, q = pair >> 3 & 3, t = pair >> 1 & 3, high = pair & 1;
            const u32 place = kind == kHalves
                ? token * (columns * 2) + stage * 128 + (((q >> 1) ^ (token & 1)) << 6) + (t << 4) + (high << 3) + ((q & 1) << 2)
                : (token & 7) * (columns * 4) + stage * 256 + ((q ^ (token & 1)) << 6) + (t << 4) + (high << 3) + ((token >> 3) << 2);
            copy_async_4(target + place, x + size_t(token) * columns + 2 * pair);
        }
}

// A lane's part of x. With octets 1, the lower rows of A hold anything, and nobody reads their sums.
template <int kind, int octets>
struct Tokens {
    u32 place;            // shared address, of the first stage
    const u16* source;    // in x
    size_t eight;         // elements from a token to the one eight behind, or to the last
    u32 parity;
    bool any;             // without tokens of its own, a lane leaves the memory's time to others

    __device__ __forceinline__ Tokens(const u16* x, u32 shared, int tokens, int columns, int lane) {
        const int g = lane >> 2, t = lane & 3, token = min(g, tokens - 1);
        place = shared + (kind == kHalves ? token * (columns * 2) : g * (columns * 4)) + 16 * t;
        source = x + size_t(token) * columns + 4 * t;
        eight = size_t(min(8, tokens - 1 - token)) * columns;
        parity = (kind == kHalves ? token : g) & 1;
        any = g < tokens;
    }
    // The same from a later stage on.
    __device__ __forceinline__ Tokens from(int stage) const {
        Tokens later = *this;
        later.place += stage * (kind == kHalves ? 128 : 256);
        later.source += stage * 64;
        return later;
    }
    __device__ __forceinline__ Vec4 load_any(u32 address) const { return load_shared_vec4_if(any, address); }
    // The A operands of steps 2 half and 2 half + 1.
    __device__ __forceinline__ void load(int stage, int half, u32 x[2][4]) const {
        if (kind == kHalves) {
            const Vec4 v = load_any(place + stage * 128 + ((half ^ parity) << 6));
            x[0][0] = v.x, x[0][1] = v.y, x[0][2] = v.z, x[0][3] = v.w;
            x[1][0] = v.y, x[1][2] = v.w;
            asm("" : "=r"(x[1][1]), "=r"(x[1][3]));   // anything
            return;
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            if (kind == kPairs) {
                const Vec4 v = load_any(place + stage * 256 + (((2 * half + step) ^ parity) << 6));
                x[step][0] = v.x, x[step][1] = v.y, x[step][2] = v.z, x[step][3] = v.w;
            } else {
                const u16* words = source + stage * 64 + 32 * half + 16 * step;
                const Vec2 v = *reinterpret_cast<const Vec2*>(words);
                const Vec2 w = octets == 1 ? v : *reinterpret_cast<const Vec2*>(words + eight);
                x[step][0] = v.x, x[step][1] = w.x, x[step][2] = v.y, x[step][3] = w.y;
            }
        }
    }
};

// Two words of the B operand: raw bytes and upper bytes (sign and top7) of a quad, shifted back (4.3).
__device__ __forceinline__ void multiply_quad(float sums[4], const u32 x[4], u32 raw, u32 upper, u32 scale) {
    multiply(sums, x, unshift(__byte_perm(raw, upper, 0x5140), scale), unshift(__byte_perm(raw, upper, 0x7362), scale));
}

// A stage: four quads.
template <int kind, int octets>
__device__ __forceinline__ void multiply_stage(float sums[4], const Tokens<kind, octets>& tokens, int stage, Vec4 raw, Vec4 upper, u32 scale) {
    u32 x[2][4];
    tokens.load(stage, 0, x);
    multiply_quad(sums, x[0], raw.x, upper.x, scale);
    multiply_quad(sums, x[1], raw.y, upper.y, scale);
    tokens.load(stage, 1, x);
    multiply_quad(sums, x[0], raw.z, upper.z, scale);
    multiply_quad(sums, x[1], raw.w, upper.w, scale);
}
