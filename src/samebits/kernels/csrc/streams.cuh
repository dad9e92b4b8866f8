// Section 3 and 6 on the device: the decode table in shared memory, chunks staged from global memory, and their streams.
#pragma once
#include "packed.cuh"

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

// What a thread takes of the code section, loaded some time before the table is built.
struct CodeSection {
    const u16* symbols;
    u32 count;          // lane L: codewords of length L
    u32 early[2];       // the thread's first symbols

    __device__ __forceinline__ CodeSection(const void* section, int symbol_count) {
        const u16* words = reinterpret_cast<const u16*>(section);
        symbols = words + kCounts;
        count = (threadIdx.x & 31) < kCounts ? load_u16(words + (threadIdx.x & 31)) : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int index = threadIdx.x + i * blockDim.x;
            early[i] = index < symbol_count ? load_u16(symbols + index) : 0;
        }
    }
};

// Builds the table for windows of `width` bits (first bit lowest) from the code section, by the whole block. `entries` is shared memory
// for one word for each symbol.
//
// Windows are walked in the order of the code (first bit highest), in which code lengths only grow. A lane's windows share their five
// highest bits of that order, the lowest of the table index: neighbouring lanes write to neighbouring banks. Four windows in a row
// have codewords of one length, or the last two have one bit more (`width`) than the first.
template <bool quad>
__device__ void build_table(u32* table, u32* entries, const CodeSection& section, int width, int symbol_count, u32 window) {
    __shared__ u32 ends[kCounts], skips[kCounts];   // [L]: the first window behind the codewords of length L; a window's codeword to its symbol
    const int lane = threadIdx.x & 31, warp = own_warp(), warps = blockDim.x >> 5;
    u32 behind[kMaxLength];                         // [L]: symbols of lengths up to L
    u32 next_code = 0, next_symbol = 0;
    behind[0] = 0;
#pragma unroll
    for (int length = 1; length <= kMaxLength; ++length) {
        next_code <<= 1;
        const u32 here = length <= width ? __shfl_sync(kFull, section.count, length) : 0;
        if (threadIdx.x == 0) skips[length] = next_symbol - next_code;
        next_code += here;
        next_symbol += here;
        if (length < kMaxLength) behind[length] = next_symbol;
        if (threadIdx.x == 0) ends[length] = length < width ? next_code << (width - length) : kFull;
    }
    auto enter = [&](int i, u32 symbol) {
        int length = 1;
#pragma unroll
        for (int shorter = 1; shorter < kMaxLength; ++shorter) length += u32(i) >= behind[shorter];
        entries[i] = table_entry<quad>(min(length, width), symbol, window);
    };
    int i = threadIdx.x;
#pragma unroll
    for (int early = 0; early < 2; ++early, i += blockDim.x)
        if (i < symbol_count) enter(i, section.early[early]);
    for (; i < symbol_count; i += blockDim.x) enter(i, section.symbols[i]);
    __syncthreads();
    const int lane_windows = max(1 << width >> 5, 1), warp_windows = ((lane_windows + 4 * warps - 1) / (4 * warps)) * 4;
    const int first = lane * lane_windows + warp * warp_windows;
    const int stop = min(min(first + warp_windows, (lane + 1) * lane_windows), 1 << width);
    int length = 1;
#pragma unroll 1
    for (int value = first; value < stop; value += 4) {
        while (u32(value) >= ends[length]) ++length;
        const u32 end = ends[length];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 window = value + i;
            if (int(window) < stop) {
                const int own = length + (window >= end);
                const u32 symbol = (window >> (width - own)) + skips[own];
                table[__brev(window) >> (32 - width)] = entries[min(symbol, u32(symbol_count - 1))];   // one symbol alone has but half the windows
            }
        }
    }
    __syncthreads();
}

// Starts copying a decode table from memory to a shared address, by so many threads.
__device__ __forceinline__ void copy_table(const Packed& packed, u32 target, u32 thread, u32 threads) {
    for (u32 unit = thread; unit < max(1u << packed.width >> 2, 1u); unit += threads) copy_async(target + 16 * unit, packed.table + 4 * unit);
}

// The decode table on its way to shared memory, by the whole block: copied, or built from the code section.
template <bool quad>
struct Table {
    const Packed& packed;
    u32 *table, *entries;            // entries: shared memory for one word for each symbol
    const CodeSection section;

    // Starts copies, which belong to the next group that is committed.
    __device__ __forceinline__ Table(const Packed& packed, u32* table, u32* entries, bool copies = true)
        : packed(packed), table(table), entries(entries), section(packed.data + packed.code, packed.table ? 0 : packed.symbols) {
        if (copies && packed.table) copy_table(packed, u32(__cvta_generic_to_shared(table)), threadIdx.x, blockDim.x);
    }
    // Where there is nothing to copy. The entries' memory is free from here on.
    __device__ __forceinline__ void build() const {
        if (!packed.table) build_table<quad>(table, entries, section, packed.width, packed.symbols, packed.window);
    }
    __device__ __forceinline__ void finish() const {
        build();
        copy_wait<0>();
        __syncthreads();
    }
};

// Where a chunk's streams are, in whole 16-byte units, so that the chunk starts up to three words into a staging buffer; never beyond buffer or
// section.
struct StagedPlace { int begin, size; };
struct StreamUnits {
    StagedPlace place;
    const u32* source;
    int units;

    __device__ __forceinline__ StreamUnits(const Packed& packed, u32 start, u32 stop) {
        start = min(start, packed.stream_words);
        stop = min(stop, packed.stream_words);
        place.begin = start & 3;
        place.size = stop > start ? int(min(stop - start, u32(packed.max_chunk_words))) : 0;
        units = (place.begin + place.size + 3) >> 2;
        source = reinterpret_cast<const u32*>(packed.data + packed.streams) + (start - place.begin);
    }
};

// Starts copying a chunk's streams to a staging buffer, a shared address, by a warp.
__device__ __forceinline__ StagedPlace stage_streams(const Packed& packed, u32 buffer, u32 start, u32 stop, int lane) {
    const StreamUnits streams(packed, start, stop);
    const u32* source = streams.source + 4 * lane;
    asm("" : "+l"(source));                                    // or each copy's address is worked out anew
    const u32 target = buffer + 16 * lane;
#pragma unroll
    for (int i = 0; i < 4 * kLanes; i += kLanes)               // as long as chunks usually are
        if (lane + i < streams.units) copy_async(target + 16 * i, source + 4 * i);
#pragma unroll 1
    for (int i = 4 * kLanes; lane + i < streams.units; i += kLanes) copy_async(target + 16 * i, source + 4 * i);
    return streams.place;
}

// One stream: 64 bits of it in registers, the next word on its way. The codeword at hand starts at bit 2 of the window, so that
// masking the window gives a byte offset into the table.
struct Stream {
    u32 next;   // shared address of the word behind `ahead`
    u32 low, high, ahead;
    int bit;

    __device__ __forceinline__ void start(u32 words, u32 position) {
        position -= 2;   // at least kHeadWords words precede a stream
        next = words + (position >> 5) * 4;
        low = load_shared(next);
        high = load_shared(next + 4);
        ahead = load_shared(next + 8);
        next += 12;
        bit = position & 31;
    }
    __device__ __forceinline__ u32 window() const { return __funnelshift_r(low, high, bit); }
    // Moves to bit `end`, at most 31 further. The words behind a chunk's end that this may read belong to the staging buffer (6.6).
    // In assembly, because the compiler turns the four conditional assignments into twice as many instructions.
    __device__ __forceinline__ void move_to(int end) {
        asm volatile("{ .reg .pred crossed;\n"
                     "  setp.ne.u32 crossed, %5, 0;\n"
                     "  @crossed mov.u32 %0, %1;\n"
                     "  @crossed mov.u32 %1, %2;\n"
                     "  @crossed ld.shared.u32 %2, [%3];\n"
                     "  @crossed add.u32 %3, %3, 4; }"
                     : "+r"(low), "+r"(high), "+r"(ahead), "+r"(next), "+r"(bit) : "r"((end ^ bit) & 32));
        bit = end;
    }
};

__device__ __forceinline__ u32 look_up(u32 table, u32 window, u32 byte_mask) { return load_shared(table + (window & byte_mask)); }

// Two codewords of at most 13 bits.
__device__ __forceinline__ void decode_two(Stream& stream, u32 table, u32 byte_mask, u32& first, u32& second) {
    const u32 window = stream.window();
    first = look_up(table, window, byte_mask);
    second = look_up(table, window >> (first >> 28), byte_mask);
    stream.move_to(stream.bit + (first >> 28) + (second >> 28));
}

// 6.4: a patch changes one byte of one lane's four quads.
__device__ __forceinline__ void apply_patch(u32 patch, int lane, u32 tops[4]) {
    const u32 change = lane == (patch >> 9 & 31) ? (patch & 127) << (8 * (patch >> 7 & 3)) : 0;
    const u32 step = patch >> 14 & 3;
#pragma unroll
    for (u32 q = 0; q < 4; ++q) tops[q] ^= q == step ? change : 0;
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
        const u32 start = kHeadWords * 32, end = u32(max(size, 1)) * 32;
        const u32 address = u32(__cvta_generic_to_shared(chunk));
        streams[0].start(address, min(start + before, end));
        streams[1].start(address, min(start + before + first, end));
        next_patch = chunk + size - patches;
        patch = patches ? *next_patch : kNoPatch;
    }
    __device__ __forceinline__ bool patches_stage(int stage) const { return (patch >> 16) == u32(stage); }
    // For the stage at hand.
    __device__ __forceinline__ void apply_patches(int stage, int lane, u32 tops[4]) {
        while (patches && patches_stage(stage)) {
            apply_patch(patch, lane, tops);
            patch = --patches ? *++next_patch : kNoPatch;
        }
    }
    // Those of the first stages.
    __device__ __forceinline__ void skip_patches(int stages) {
        while (patches && patch >> 16 < u32(stages)) patch = --patches ? *++next_patch : kNoPatch;
    }
    const u32* next_patch;
};
