// samebits::decode: a packed tensor to row-major BF16.
//
//   block: builds the decode table in shared memory, then every warp on its own, chunk after chunk:
//   1. stage     copy the next chunk's streams to shared memory while the present one is decoded
//   2. load      a stage's raw bytes and sign words, four stages before they are needed
//   3. decode    each lane: two codewords of each of its two streams (quad code), or eight (single code)
//   4. patch     rare
//   5. store     four words of each step as 8 bytes; four neighbouring lanes fill a sector
#include "packed.cuh"
#include "streams.cuh"

constexpr int kMaxThreads = 512;   // kernels/decode.py launches at most so many

// Where a lane's words of a stage go.
struct Place {
    i64 position;         // of its first word in the tensor
    int column;
    bool row_exists;
    u32 scale;            // 2^-shift of the row, as BF16, twice

    __device__ __forceinline__ void next_stage() { position += 64; column += 64; }
};

template <bool quad>
struct Decoder {
    const Geometry& geometry;
    const Packed& packed;
    u32 table;   // shared address
    u16* output;
    int lane;
    u32 byte_mask, common;

    // A stage's upper bytes of four quads (quad code: top7; single code: the shifted exponents).
    __device__ __forceinline__ void decode_tops(Stream streams[2], u32 tops[4]) const {
        if constexpr (quad) {
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
    }

    // The same from a raw chunk (6.5).
    __device__ __forceinline__ void read_tops(const StagedChunk& chunk, int stage, u32 tops[4]) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) tops[q] = chunk.words[1 + 128 * stage + 4 * lane + q];
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

    // The lane's four words of a step.
    template <bool whole>
    __device__ __forceinline__ void store(const Place& place, int step, Vec2 words) const {
        u16* target = output + place.position + 16 * step;
        if (whole) return store_once(target, words.x, words.y);
        const u16 single[4] = {u16(words.x), u16(words.x >> 16), u16(words.y), u16(words.y >> 16)};
        const int column = place.column + 16 * step;
        const i64 left = geometry.words - place.position - 16 * step;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (place.row_exists && column + i < geometry.columns && i < left) target[i] = single[i];
    }

    // Steps 3 to 5 for one stage: `signs` has the stage's half of the sign word on top.
    template <bool whole, bool raw_chunk>
    __device__ __forceinline__ void decode_stage(StagedChunk& chunk, Stream streams[2], int stage, Vec4 raw, u32 signs,
                                                 const Place& place) {
        u32 tops[4];
        if (raw_chunk) {
            read_tops(chunk, stage, tops);
        } else {
            decode_tops(streams, tops);
        }
        if (quad) {
            if (!raw_chunk && chunk.patches_stage(stage)) chunk.apply_patches(stage, lane, tops);
#pragma unroll
            for (int q = 0; q < 4; ++q) tops[q] |= (signs << q) & kSignMask;
        }
        const u32 bytes[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            Vec2 words = join(bytes[q], tops[q]);
            // A scale of 1.0 would change NaN payloads.
            if (place.scale != kNoShift) words = {unshift(words.x, place.scale), unshift(words.y, place.scale)};
            store<whole>(place, q, words);
        }
    }

    // The common case: quad code, a coded chunk within one row group that starts with a slab. Four stages a turn, the next four on
    // their way.
    template <bool whole>
    __device__ __forceinline__ int decode_run(const Chunk& extent, StagedChunk& chunk, Stream streams[2], Place& place) {
        const u8* slab = packed.data + packed.planes + slab_offset(geometry.stages, extent.row_group, extent.first_stage);
        Vec4 raw[4];
        u32 signs[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = load_once(slab + (i >> 1) * kSlabBytes + kSignBytes + (i & 1) * kStageBytes + 16 * lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) signs[i] = load_once_u32(slab + i * kSlabBytes + 4 * lane);
        const int turns = extent.stages >> 2;
        for (int turn = 0; turn < turns; ++turn) {
            const u8* next = turn + 1 < turns ? slab + 2 * kSlabBytes : slab;   // the last turn reads its own stages again, from the cache
            slab = next;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Vec4 bytes = raw[i];
                const u32 sign = i & 1 ? signs[i >> 1] << 4 : signs[i >> 1];
                raw[i] = load_once(next + (i >> 1) * kSlabBytes + kSignBytes + (i & 1) * kStageBytes + 16 * lane);
                if (i & 1) signs[i >> 1] = load_once_u32(next + (i >> 1) * kSlabBytes + 4 * lane);
                decode_stage<whole, false>(chunk, streams, 4 * turn + i, bytes, sign, place);
                place.next_stage();
            }
        }
        return 4 * turns;
    }

    // Any chunk, from its stage `done` on.
    template <bool whole, bool raw_chunk>
    __device__ __forceinline__ void decode_rest(const Chunk& extent, StagedChunk& chunk, Stream streams[2], Place place, int done) {
        int stage = done;
        for (int group = extent.row_group; group < extent.row_group + extent.row_groups; ++group) {
            if (group > extent.row_group) place = place_at(group, 0);
            for (int s = extent.first_stage + done; s < extent.first_stage + extent.stages; ++s) {
                const u8* planes = packed.data + packed.planes;
                const Vec4 raw = load_once(planes + raw_offset<quad>(geometry.stages, group, s) + 16 * lane);
                const u32 signs = quad ? load_once_u32(planes + slab_offset(geometry.stages, group, s) + 4 * lane) << (4 * (s & 1)) : 0;
                decode_stage<whole, raw_chunk>(chunk, streams, stage++, raw, signs, place);
                place.next_stage();
            }
            done = 0;
        }
    }

    template <bool whole>
    __device__ __forceinline__ void decode_chunk(const Chunk& extent, StagedChunk& chunk, Stream streams[2]) {
        Place place = place_at(extent.row_group, extent.first_stage);
        if (chunk.raw) return decode_rest<whole, true>(extent, chunk, streams, place, 0);
        int done = 0;
        if (quad && extent.row_groups == 1 && extent.first_stage % 2 == 0 && extent.stages >= 4)
            done = decode_run<whole>(extent, chunk, streams, place);
        decode_rest<whole, false>(extent, chunk, streams, place, done);
    }

    __device__ __forceinline__ Place place_at(int row_group, int stage) const {
        const i64 row = i64(row_group) * 8 + (lane >> 2);
        const int column = 64 * stage + 4 * (lane & 3);
        return {row * geometry.columns + column, column, row < geometry.rows, scale_of(row)};
    }

    // 2^-shift of the row, as BF16, twice.
    __device__ __forceinline__ u32 scale_of(i64 row) const {
        int shift = packed.shift;
        if (packed.has_row_shifts && row < geometry.rows) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[row];
        return ::scale_of(shift);
    }
};

template <bool quad, bool whole>
__device__ __forceinline__ void decode_tensor(const Geometry& geometry, const Packed& packed, u16* output, int table_words,
                                              int symbol_words, int buffer_words) {
    extern __shared__ __align__(16) u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    // All blocks together move along the tensor, so that what is read and written at a time lies together. Where chunks are few, some
    // warps have none.
    const int decoders = min(warps, (geometry.chunks + int(gridDim.x) - 1) / int(gridDim.x)), stride = gridDim.x * decoders;
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

    let_kernel_behind_start();
    int index = warp < decoders ? blockIdx.x * decoders + warp : geometry.chunks, slot = 0, begin = 0, size = 0;
    const CodeSection section(packed.data + packed.code, packed.symbols);
    stage_chunk(index, 0, begin, size);
    build_table<quad>(shared, shared + table_words, section, packed.width, packed.symbols, packed.window);
    await_kernel_before();
    Decoder<quad> decoder{geometry, packed, u32(__cvta_generic_to_shared(shared)), output, lane, ((1u << packed.width) - 1) << 2, u32(packed.window >> 4) * 0x10101010u};
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
    extern "C" __global__ void __launch_bounds__(kMaxThreads) name(                                                       \
        const Geometry geometry, const Packed packed, u16* output, int table_words, int symbol_words, int buffer_words) { \
        decode_tensor<quad, whole>(geometry, packed, output, table_words, symbol_words, buffer_words);                    \
    }
DECODE_KERNEL(decode_quad_whole, true, true)
DECODE_KERNEL(decode_quad_clipped, true, false)
DECODE_KERNEL(decode_single_whole, false, true)
DECODE_KERNEL(decode_single_clipped, false, false)
