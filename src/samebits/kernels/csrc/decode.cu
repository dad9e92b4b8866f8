// samebits::decode: a packed tensor to row-major BF16.
//
//   block: builds the decode table in shared memory, then every warp on its own, chunk after chunk:
//   1. stage     copy the next chunk's streams to shared memory while the present one is decoded
//   2. load      a stage's raw bytes and sign words, kAhead stages before they are needed
//   3. decode    each lane: two codewords of each of its two streams (quad code), or eight (single code)
//   4. patch     rare
//   5. store     four words of each step as 8 bytes; four neighbouring lanes fill a sector
#include "streams.cuh"

constexpr int kAhead = 4;
constexpr int kMaxThreads = 768;   // kernels/decode.py launches at most so many

struct Packed {
    const u8* data;
    u64 code, row_shifts, offsets, planes, streams;   // byte offsets of the sections
    u32 stream_words;
    int max_chunk_words, width, symbols, window, shift, has_row_shifts;
};

// Takes a row's shift off two words (4.3), without a carry between them whatever they hold.
__device__ __forceinline__ u32 unshift(u32 words, u32 minus_shift) {
    const u32 fields = words & 0x7f807f80u;
    const u32 nonzero = (fields + 0x7f807f80u) >> 15 & 0x00010001u;
    return (words & ~0x7f807f80u) | ((fields + nonzero * minus_shift) & 0x7f807f80u);
}

// Walks the planes of a chunk's stages in order (5.3).
template <bool quad>
struct PlaneCursor {
    const u8* slab;       // quad code: the slab of the stage at hand; single code: its raw bytes
    int stage, end;

    __device__ __forceinline__ PlaneCursor(const u8* planes, int stages, const Chunk& extent)
        : slab(planes + (quad ? slab_offset(stages, extent.row_group, extent.first_stage)
                              : raw_offset<false>(stages, extent.row_group, extent.first_stage))),
          stage(extent.first_stage), end(extent.first_stage + extent.stages) {}
    __device__ __forceinline__ bool is_odd() const { return stage & 1; }
    __device__ __forceinline__ const u8* raw() const { return quad ? slab + kSignBytes + (stage & 1) * kStageBytes : slab; }
    __device__ __forceinline__ void advance() {
        if (!quad) { slab += kStageBytes; return; }
        if (stage & 1) slab += kSlabBytes;
        if (++stage < end) return;
        if (stage & 1) slab += kSignBytes + kStageBytes;   // the row group ends with half a slab
        stage = 0;
    }
};

template <bool quad>
struct Decoder {
    const Geometry& geometry;
    const Packed& packed;
    const u32* table;
    u16* output;
    int lane;
    u32 byte_mask, common;

    // Steps 3 and 4: the four quads' upper bytes (quad: sign and top7; single: exponents).
    __device__ __forceinline__ void decode_stage(StagedChunk& chunk, Stream streams[2], int stage, u32 signs, u32 tops[4]) {
        if (chunk.raw) {
            const u32* bytes = chunk.words + 1 + 128 * stage + 4 * lane;
#pragma unroll
            for (int q = 0; q < 4; ++q) tops[q] = bytes[q];
        } else if (quad) {
            decode_two(streams[0], table, byte_mask, tops[0], tops[1]);
            decode_two(streams[1], table, byte_mask, tops[2], tops[3]);
#pragma unroll
            for (int q = 0; q < 4; ++q) tops[q] = (tops[q] & 0x0f0f0f0fu) | common;
        } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                u32 e[4];
                decode_two(streams[q >> 1], table, byte_mask, e[0], e[1]);
                decode_two(streams[q >> 1], table, byte_mask, e[2], e[3]);
                tops[q] = __byte_perm(__byte_perm(e[0], e[1], 0x0040), __byte_perm(e[2], e[3], 0x0040), 0x5410);
            }
        }
        if (!quad) return;
        chunk.apply_patches(stage, lane, tops);
#pragma unroll
        for (int q = 0; q < 4; ++q) tops[q] |= (signs << q) & kSignMask;
    }

    // Two words each from the raw bytes and upper bytes of a quad.
    __device__ __forceinline__ Vec2 join(u32 raw, u32 top) const {
        u32 low = raw, high = top;
        if (!quad) {
            low = (raw & 0x7f7f7f7fu) | (top << 7 & kSignMask);
            high = (raw & kSignMask) | (top >> 1 & 0x7f7f7f7fu);
        }
        return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
    }

    // The lane's four words of step `step`; `position` and `column` are those of its words in step 0.
    template <bool whole>
    __device__ __forceinline__ void store(i64 position, int column, bool row_exists, int step, Vec2 words) const {
        u16* target = output + position + 16 * step;
        if (whole) return store_once(target, words.x, words.y);
        const u16 single[4] = {u16(words.x), u16(words.x >> 16), u16(words.y), u16(words.y >> 16)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (row_exists && column + 16 * step + i < geometry.columns && position + 16 * step + i < geometry.words) target[i] = single[i];
    }

    template <bool whole>
    __device__ __forceinline__ void decode_chunk(const Chunk& extent, StagedChunk& chunk, Stream streams[2]) {
        const int count = extent.row_groups * extent.stages;
        Vec4 raw[kAhead];
        u32 sign[kAhead];
        PlaneCursor<quad> cursor(packed.data + packed.planes, geometry.stages, extent);
        int loaded = 0;
        auto load = [&](int slot) {
            if (loaded++ >= count) return;
            raw[slot] = load_once(cursor.raw() + 16 * lane);
            if (quad) sign[slot] = cursor.is_odd() && loaded > 1 ? sign[(slot + kAhead - 1) % kAhead] : load_once_u32(cursor.slab + 4 * lane);
            cursor.advance();
        };
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(i);
        int stage_in_group = extent.first_stage;
        i64 row = i64(extent.row_group) * 8 + (lane >> 2);
        i64 position = row * geometry.columns + 64 * stage_in_group + 4 * (lane & 3);
        u32 minus_shift = shift_of(row);
        for (int first = 0; first < count; first += kAhead) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int stage = first + i;
                if (stage >= count) break;
                const u32 bytes[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
                const u32 signs = quad ? sign[i] << (4 * (stage_in_group & 1)) : 0;
                load(i);
                u32 tops[4];
                decode_stage(chunk, streams, stage, signs, tops);
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    Vec2 words = join(bytes[q], tops[q]);
                    if (minus_shift) words = {unshift(words.x, minus_shift), unshift(words.y, minus_shift)};
                    store<whole>(position, 64 * stage_in_group + 4 * (lane & 3), row < geometry.rows, q, words);
                }
                position += 64;
                if (++stage_in_group == extent.first_stage + extent.stages && stage + 1 < count) {   // a chunk of several row groups
                    stage_in_group = 0;
                    row += 8;
                    position = row * geometry.columns + 4 * (lane & 3);
                    minus_shift = shift_of(row);
                }
            }
        }
    }

    // The row's negated shift, placed at the exponent; 0 if there is none.
    __device__ __forceinline__ u32 shift_of(i64 row) const {
        int shift = packed.shift;
        if (packed.has_row_shifts && row < geometry.rows) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[row];
        return u32(-shift & 255) << 7;
    }
};

template <bool quad, bool whole>
__device__ __forceinline__ void decode_tensor(const Geometry& geometry, const Packed& packed, u16* output, int table_words, int symbol_words, int buffer_words) {
    extern __shared__ __align__(16) u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int stride = gridDim.x * warps;
    u32* buffers = shared + table_words + symbol_words + warp * 2 * buffer_words;
    const u32* offsets = reinterpret_cast<const u32*>(packed.data + packed.offsets);
    const u32* streams_section = reinterpret_cast<const u32*>(packed.data + packed.streams);

    // Step 1. Copies whole 16-byte units, so the chunk starts up to three words into its buffer. Never beyond buffer or section.
    auto stage_chunk = [&](int index, int slot, int& begin, int& size) {
        if (index < geometry.chunks) {
            const u32 start = min(offsets[index], packed.stream_words), stop = min(offsets[index + 1], packed.stream_words);
            size = min(stop > start ? int(stop - start) : 0, packed.max_chunk_words);
            begin = start & 3;
            const u32 shared_address = u32(__cvta_generic_to_shared(buffers + slot * buffer_words));
            const int units = (begin + size + 3) >> 2;
            for (int unit = lane; unit < units; unit += kLanes)
                copy_async(shared_address + 16 * unit, streams_section + (start - begin) + 4 * unit);
        }
        copy_commit();
    };

    int index = warp * gridDim.x + blockIdx.x, slot = 0, begin = 0, size = 0;
    stage_chunk(index, 0, begin, size);
    build_table<quad>(shared, reinterpret_cast<u16*>(shared + table_words), reinterpret_cast<const u16*>(packed.data + packed.code),
                      packed.width, packed.symbols, packed.window);
    Decoder<quad> decoder{geometry, packed, shared, output, lane, ((1u << packed.width) - 1) << 2, u32(packed.window >> 4) * 0x10101010u};
    for (; index < geometry.chunks; index += stride) {
        int next_begin = 0, next_size = 0;
        stage_chunk(index + stride, slot ^ 1, next_begin, next_size);
        copy_wait<1>();
        __syncwarp();
        StagedChunk chunk;
        Stream streams[2];
        const Chunk extent = chunk_at(geometry, index);
        chunk.open(buffers + slot * buffer_words + begin, size, extent.row_groups * extent.stages, lane, streams);
        decoder.template decode_chunk<whole>(extent, chunk, streams);
        __syncwarp();
        slot ^= 1;
        begin = next_begin;
        size = next_size;
    }
}

#define DECODE_KERNEL(name, quad, whole)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kMaxThreads) name(const Geometry geometry, const Packed packed, u16* output, \
                                                                         int table_words, int symbol_words, int buffer_words) { \
        decode_tensor<quad, whole>(geometry, packed, output, table_words, symbol_words, buffer_words);                                              \
    }
DECODE_KERNEL(decode_quad_whole, true, true)
DECODE_KERNEL(decode_quad_clipped, true, false)
DECODE_KERNEL(decode_single_whole, false, true)
DECODE_KERNEL(decode_single_clipped, false, false)
