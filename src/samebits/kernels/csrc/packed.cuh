// A packed tensor as kernels take it, and the shifts of its rows.
#pragma once
#include "common.cuh"

struct Packed {
    const u8* data;
    const u32* table;     // the decode table, as tables.cu left it in memory; or null: every block builds it
    u64 code, row_shifts, offsets, planes, streams;   // byte offsets of the sections
    u32 stream_words;
    int max_chunk_words, width, symbols, window, shift, has_row_shifts;
};

constexpr u32 kNoShift = 0x3f803f80u;   // 1.0 twice

// Takes a row's shift off two words (4.3): exact, and keeps the sign of zeros, because of the addend -0.
__device__ __forceinline__ u32 unshift(u32 words, u32 scale) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(words), "r"(scale), "r"(0x80008000u));
    return result;
}

// 2^-shift, as BF16, twice.
__device__ __forceinline__ u32 scale_of(int shift) { return (u32(127 - shift) << 7) * 0x00010001u; }
