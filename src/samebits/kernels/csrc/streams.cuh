// Section 3 and 6 on the device: the decode table in shared memory, chunks staged from global memory, and their streams.
#pragma once
#include "common.cuh"

constexpr int kCounts = 16;          // entries of the code section's count array
constexpr int kMaxLength = 13;
constexpr u32 kNoPatch = 0xffffffffu;

// An entry of the decode table:   31..28 length   27..0 quad: four bytes, the low nibble of each top7; single: the exponent
template <bool quad>
__device__ __forceinline__ u32 table_entry(int length, u32 symbol, u32 window) {
    if (!quad) return u32(length) << 28 | symbol;
    const u32 classes = (symbol & 7) | (symbol & 0x38) << 5 | (symbol & 0x1c0) << 10 | (symbol & 0xe00) << 15;
    return u32(length) << 28 | (classes + (window & 15) * 0x01010101u);   // 3.4: window & 15 <= 8, so no nibble overflows
}

// Builds the table for windows of `width` bits (first bit lowest) from the code section, by the whole block. `symbols` is shared
// memory for the section's symbols.
//
// Windows are walked in the order of the code (first bit highest), where a codeword of length L covers 2^(width - L) in a row; a thread
// takes eight. Neighbouring lanes take windows that differ in the highest bits of that order, the lowest of the table index: no bank
// conflicts.
template <bool quad>
__device__ void build_table(u32* table, u16* symbols, const u16* __restrict__ code, int width, int symbol_count, u32 window) {
    __shared__ u32 first_code[kCounts], first_symbol[kCounts];
    u32 ends[kMaxLength];   // [L]: the first window behind the codewords of length L; one length more for each that a window has reached
    for (int i = threadIdx.x; i < symbol_count; i += blockDim.x) symbols[i] = code[kCounts + i];
    const int lane = threadIdx.x & 31;
    const u32 count = lane < kCounts ? code[lane] : 0;
    u32 next_code = 0, next_symbol = 0;
#pragma unroll
    for (int length = 1; length < kMaxLength; ++length) {
        next_code <<= 1;
        if (threadIdx.x == 0) {
            first_code[length] = next_code;
            first_symbol[length] = next_symbol;
        }
        const u32 here = __shfl_sync(kFull, count, length);
        next_code += here;
        next_symbol += here;
        ends[length] = length < width ? next_code << (width - length) : kFull;
    }
    if (threadIdx.x == 0) {
        first_code[kMaxLength] = next_code << 1;
        first_symbol[kMaxLength] = next_symbol;
    }
    __syncthreads();
    const int run_bits = width >= 8 ? 3 : 0;
    for (int item = threadIdx.x; item < (1 << (width - run_bits)); item += blockDim.x) {
        u32 value = run_bits ? u32(item & 31) << (width - 5) | u32(item >> 5) << 3 : u32(item);
        const u32 end = value + (1u << run_bits);
        while (value < end) {
            int length = 1;
#pragma unroll
            for (int shorter = 1; shorter < kMaxLength; ++shorter) length += value >= ends[shorter];
            const u32 index = (value >> (width - length)) - first_code[length];
            const u32 entry = table_entry<quad>(length, symbols[min(first_symbol[length] + index, u32(symbol_count - 1))], window);
            const u32 stop = min(end, ((value >> (width - length)) + 1) << (width - length));
            do table[__brev(value) >> (32 - width)] = entry; while (++value < stop);
        }
    }
    __syncthreads();
}

// One stream: 64 bits of it in registers, the next word on its way. The codeword at hand starts at bit 2 of the window, so that
// masking the window gives a byte offset into the table.
struct Stream {
    const u32* next;
    u32 low, high, ahead;
    int bit;

    __device__ __forceinline__ void start(const u32* words, u32 position) {
        position -= 2;   // at least kHeadWords words precede a stream
        next = words + (position >> 5);
        low = next[0];
        high = next[1];
        ahead = next[2];
        next += 3;
        bit = position & 31;
    }
    __device__ __forceinline__ u32 window() const { return __funnelshift_r(low, high, bit); }
    // Skips at most 31 bits. The words behind a chunk's end that this may read belong to the staging buffer (6.6).
    __device__ __forceinline__ void skip(u32 bits) {
        const int end = bit + bits;
        if ((end ^ bit) & 32) {
            low = high;
            high = ahead;
            ahead = *next++;
        }
        bit = end;
    }
};

__device__ __forceinline__ u32 look_up(const u32* table, u32 window, u32 byte_mask) {
    return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(table) + (window & byte_mask));
}

// Two codewords of at most 13 bits.
__device__ __forceinline__ void decode_two(Stream& stream, const u32* table, u32 byte_mask, u32& first, u32& second) {
    const u32 window = stream.window();
    first = look_up(table, window, byte_mask);
    second = look_up(table, window >> (first >> 28), byte_mask);
    stream.skip((first >> 28) + (second >> 28));
}

// A chunk in shared memory, ready to decode.
struct StagedChunk {
    const u32* words;     // its first word
    u32 patches, patch;   // patches left, and the next one (kNoPatch if none)
    bool raw;             // 6.5

    // Reads the head (6.2, 6.3), starts the lane's two streams. Whatever the contents, nothing behind the chunk's end starts a stream
    // or a patch.
    __device__ __forceinline__ void open(const u32* chunk, int size, int stages, int lane, Stream streams[2]) {
        words = chunk;
        const u32 head = chunk[0];
        raw = head == 0 && size >= 1 + 128 * stages;
        const int base = head & 8191, unit = head >> 13 & 63;
        patches = min(head >> 19, u32(max(size - kHeadWords, 0)));
        if (raw) patches = 0;
        const u32 steps = reinterpret_cast<const u8*>(chunk + 1)[lane];
        const int first = base + unit * int(steps & 15), second = base + unit * int(steps >> 4);
        int total;
        const int before = sum_before(first + second, lane, total);
        const u32 start = kHeadWords * 32, end = u32(size) * 32;
        streams[0].start(chunk, min(start + before, end));
        streams[1].start(chunk, min(start + before + first, end));
        next_patch = chunk + size - patches;
        patch = patches ? *next_patch : kNoPatch;
    }
    __device__ __forceinline__ bool patches_stage(int stage) const { return (patch >> 16) == u32(stage); }
    // 6.4, for the stage at hand: each patch changes one byte of one lane's four quads.
    __device__ __forceinline__ void apply_patches(int stage, int lane, u32 tops[4]) {
        while (patches && patches_stage(stage)) {
            const u32 change = lane == (patch >> 9 & 31) ? (patch & 127) << (8 * (patch >> 7 & 3)) : 0;
            const u32 step = patch >> 14 & 3;
#pragma unroll
            for (u32 q = 0; q < 4; ++q) tops[q] ^= q == step ? change : 0;
            patch = --patches ? *++next_patch : kNoPatch;
        }
    }
    const u32* next_patch;
};
