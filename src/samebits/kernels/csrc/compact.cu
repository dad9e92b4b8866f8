// samebits::decode for the compact code: a warp decodes 32 runs, one a lane, then puts their words together.
//
//   1. table     what each of the 256 states means, from the code section
//   2. decode    each lane: the exponents of its run, into shared memory
//   3. store     raw bytes and exponents of all runs, four neighbouring words a lane
#include "common.cuh"

constexpr int kStates = 256;
constexpr int kExponents = 256;
constexpr u32 kEscape = kExponents;   // the symbol of exponents without states of their own
constexpr int kRunWords = 256;
constexpr int kBlockWords = kLanes * kRunWords;
constexpr int kRunQuads = kRunWords / 4 + 1;   // of a run in shared memory; the odd one spreads the lanes over the banks

struct Compact {
    const u8* data;
    u64 code, lengths, raw, streams;   // byte offsets of the sections
    int words, code_bytes, runs, stream_words;
};

// An entry of the table (3.7):   24..16 symbol   11..8 n   7..0 2^n y - 256
__device__ __forceinline__ void place_symbol(u32* table, u32 symbol, u32 first, u32 frequency, int lane) {
    for (u32 i = lane; i < frequency; i += kLanes) {
        const u32 state = __brev(first + i) >> 24;
        u32 y = frequency;   // and the number of the symbol's smaller states
        for (u32 other = first; other < first + frequency; ++other) y += (__brev(other) >> 24) < state;
        const int n = max(__clz(y) - 23, 0);
        table[state] = symbol << 16 | u32(n) << 8 | ((y << n) - kStates);
    }
}

// 3.6. Whatever the section holds, all states are given, each to one symbol.
__device__ void build_states(u32* table, const u8* code, int code_bytes, int lane) {
    u32 exponent = 0, first = 0;
    for (int i = 0; i < code_bytes && exponent < kExponents; ++i) {
        const u32 byte = code[i];
        const u32 frequency = min(byte, kStates - first);
        place_symbol(table, exponent, first, frequency, lane);
        first += frequency;
        if (byte == 0 && ++i < code_bytes) {
            exponent += code[i];
        } else {
            ++exponent;
        }
    }
    place_symbol(table, kEscape, first, kStates - first, lane);
    __syncwarp();
}

// The bits of a run: 64 of them in registers, the next word on its way. Behind the streams' end, their last word repeats.
struct Bits {
    const u32* streams;
    u32 last, next, low, high, ahead;
    int bit;

    __device__ __forceinline__ Bits(const u32* words, int count, u32 position)
        : streams(words), last(count - 1), next(position >> 5), bit(position & 31) {
        low = load();
        high = load();
        ahead = load();
    }
    __device__ __forceinline__ u32 load() { return streams[min(next++, last)]; }
    __device__ __forceinline__ u32 window() const { return __funnelshift_r(low, high, bit); }
    // Skips at most 31 bits.
    __device__ __forceinline__ void skip(int bits) {
        bit += bits;
        if (bit >= 32) {
            bit -= 32;
            low = high;
            high = ahead;
            ahead = load();
        }
    }
};

// One word's exponent; the next state (6.7).
__device__ __forceinline__ u32 decode_exponent(const u32* table, Bits& bits, u32& state) {
    const u32 entry = table[state], n = entry >> 8 & 15;
    u32 window = bits.window(), exponent = entry >> 16;
    int used = n;
    if (exponent == kEscape) {
        exponent = window & 255;
        window >>= 8;
        used += 8;
    }
    state = (entry & 255) + (window & ((1u << n) - 1));
    bits.skip(used);
    return exponent;
}

// The first bit of the lane's run: the sum of all lengths before it.
__device__ __forceinline__ u32 run_start(const u16* lengths, int first_run, int runs, int lane) {
    int bits = 0, before_block, block;
    for (int run = lane; run < first_run; run += kLanes) bits += lengths[run];
    sum_before(bits, lane, before_block);
    return before_block + sum_before(first_run + lane < runs ? lengths[first_run + lane] : 0, lane, block);
}

extern "C" __global__ void __launch_bounds__(kLanes) decode_compact(const Compact packed, u16* output) {
    __shared__ u32 table[kStates];
    __shared__ u32 exponents[kLanes][kRunQuads];   // four bytes each
    const int lane = threadIdx.x, first_run = blockIdx.x * kLanes;
    build_states(table, packed.data + packed.code, packed.code_bytes, lane);

    const u16* lengths = reinterpret_cast<const u16*>(packed.data + packed.lengths);
    const u32 start = run_start(lengths, first_run, packed.runs, lane);
    if (first_run + lane < packed.runs) {
        Bits bits(reinterpret_cast<const u32*>(packed.data + packed.streams), packed.stream_words, start);
        u32 state = bits.window() & (kStates - 1);
        bits.skip(8);
        for (int quad = 0; quad < kRunWords / 4; ++quad) {   // the last run may be shorter: the rest is not stored
            u32 four = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) four |= decode_exponent(table, bits, state) << 8 * i;
            exponents[lane][quad] = four;
        }
    }
    __syncwarp();

    const int base = first_run * kRunWords, count = min(kBlockWords, packed.words - base);
    const u32* raw = reinterpret_cast<const u32*>(packed.data + packed.raw + base);   // ends before the streams, at a multiple of 4
    for (int i = 4 * lane; i < count; i += 4 * kLanes) {
        const u32 byte = raw[i >> 2], exponent = exponents[i / kRunWords][i % kRunWords >> 2];
        const u32 low = (byte & ~kSignMask) | (exponent << 7 & kSignMask);
        const u32 high = (byte & kSignMask) | (exponent >> 1 & ~kSignMask);
        const Vec2 words = {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
        u16* target = output + base + i;
        if (i + 4 <= count) {
            store_once(target, words.x, words.y);
        } else {
            const u16 single[4] = {u16(words.x), u16(words.x >> 16), u16(words.y), u16(words.y >> 16)};
            for (int j = 0; j < count - i; ++j) target[j] = single[j];
        }
    }
}
