// The decoder of a packed tensor: everything between a chunk of it and words in memory. all_chunks.cuh and rows.cu say which chunks,
// and where their words go.
//
//   block: builds the decode table in shared memory, then every warp on its own, task after task:
//   1. stage     copy the next task's chunk to shared memory while the present one is decoded
//   2. load      raw bytes and sign words of four stages, four stages before they are needed, also those of the next chunk
//   3. decode    each lane: two codewords of each of its two streams (quad code), or eight (single code)
//   4. patch     rare
//   5. store     four words of each step as 8 bytes; four neighbouring lanes fill a sector
#pragma once
#include "packed.cuh"
#include "streams.cuh"

constexpr int kMaxThreads = 512;   // kernels/decode.py launches at most so many
constexpr int kMinBlocks = 1;      // of a multiprocessor: left to itself, the compiler spills registers so that two fit

// Which words of what is decoded are stored.
enum Clip {
    kAll,     // every one: there is no padding
    kRows,    // whole rows: there is no padding but rows; the columns are a multiple of 64
    kWords,   // each word is looked at
};

// The words of the tensor that a task stores, counted from the tensor's first; and where they go.
struct Window {
    u16* output;   // where the tensor's first word would go
    i64 begin, end;

    // A row's first word, counted from there.
    __device__ __forceinline__ i64 start_of(i64 row, int columns) const { return row * columns; }
};

// Where a lane's words of a stage go.
struct Place {
    i64 position;         // of its first word in the tensor
    int column;
    bool row_inside;      // kRows: of the window
    u32 scale;            // 2^-shift of the row, as BF16, twice

    __device__ __forceinline__ void next_stage() { position += 64; column += 64; }
};

// A lane's raw bytes and sign words of four stages, two slabs.
//
// Loads to registers are waited for all at once, whichever was asked for last. So four stages are asked for together, when the four before have come:
// behind the first of these.
struct LoadedTurn {
    Vec4 raw[4];
    u32 signs[2];

    // Not ld.global.nc: that the compiler would move.
    __device__ __forceinline__ void load(const u8* slab, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(signs[i]) : "l"(slab + i * kSlabBytes + 4 * lane) : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(raw[i].x), "=r"(raw[i].y), "=r"(raw[i].z), "=r"(raw[i].w)
                         : "l"(slab + (i >> 1) * kSlabBytes + kSignBytes + (i & 1) * kStageBytes + 16 * lane) : "memory");
    }
};

template <bool quad, class Window>
struct Decoder {
    const Geometry& geometry;
    const Packed& packed;
    u32 table;   // shared address
    int lane;
    u32 byte_mask, common;
    Window window;

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
    template <Clip clip>
    __device__ __forceinline__ void store(const Place& place, int step, Vec2 words) const {
        u16* target = window.output + place.position + 16 * step;
        if (clip == kAll || (clip == kRows && place.row_inside)) return store_once(target, words.x, words.y);
        if (clip == kRows) return;
        const u16 single[4] = {u16(words.x), u16(words.x >> 16), u16(words.y), u16(words.y >> 16)};
        const int column = place.column + 16 * step;
        const i64 offset = place.position + 16 * step - window.begin;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (column + i < geometry.columns && u64(offset + i) < u64(window.end - window.begin)) target[i] = single[i];
    }

    // Steps 3 to 5 for one stage: `signs` has the stage's half of the sign word on top.
    template <Clip clip, bool raw_chunk>
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
            store<clip>(place, q, words);
        }
    }

    // The common case: quad code, a coded chunk within one row group that starts with a slab.
    static __device__ __forceinline__ bool has_run(const Chunk& extent) {
        return quad && extent.row_groups == 1 && extent.first_stage % 2 == 0 && extent.stages >= 4;
    }
    __device__ __forceinline__ const u8* slab_of(const Chunk& extent) const {
        return packed.data + packed.planes + slab_offset(geometry.stages, extent.row_group, extent.first_stage);
    }

    // Of such a chunk as many stages as make up whole turns of four; it has `skipped` more in front. `loaded`: its first turn, and then what is at
    // `behind`.
    template <Clip clip>
    __device__ __forceinline__ int decode_run(const Chunk& extent, int skipped, StagedChunk& chunk, Stream streams[2], Place& place, LoadedTurn& loaded, const u8* behind) {
        const u8* slab = slab_of(extent);
        const int turns = extent.stages >> 2;
        for (int turn = 0; turn < turns; ++turn) {
            slab = turn + 1 < turns ? slab + 2 * kSlabBytes : behind;
            LoadedTurn next;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                decode_stage<clip, false>(chunk, streams, skipped + 4 * turn + i, loaded.raw[i], loaded.signs[i >> 1] << (4 * (i & 1)), place);
                if (i == 0) next.load(slab, lane);
                place.next_stage();
            }
            loaded = next;
        }
        return 4 * turns;
    }

    // Any chunk, from its stage `done` on; it has `skipped` more in front.
    template <Clip clip, bool raw_chunk>
    __device__ __forceinline__ void decode_rest(const Chunk& extent, int skipped, StagedChunk& chunk, Stream streams[2], Place place, int done) {
        int stage = skipped + done;
        for (int group = extent.row_group; group < extent.row_group + extent.row_groups; ++group) {
            if (group > extent.row_group) place = place_at(group, 0);
            for (int s = extent.first_stage + done; s < extent.first_stage + extent.stages; ++s) {
                const u8* planes = packed.data + packed.planes;
                const Vec4 raw = load_once(planes + raw_offset<quad>(geometry.stages, group, s) + 16 * lane);
                const u32 signs = quad ? load_once_u32(planes + slab_offset(geometry.stages, group, s) + 4 * lane) << (4 * (s & 1)) : 0;
                decode_stage<clip, raw_chunk>(chunk, streams, stage++, raw, signs, place);
                place.next_stage();
            }
            done = 0;
        }
    }

    // Goes past a chunk's first stages.
    __device__ __forceinline__ void skip(int stages, StagedChunk& chunk, Stream streams[2]) const {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            u32 tops[4];
            decode_tops(streams, tops);
        }
        chunk.skip_patches(stages);
    }

    // `loaded` as in decode_run, if there is a run in this chunk, and then in the next.
    template <Clip clip>
    __device__ __forceinline__ void decode_chunk(const Chunk& extent, int skipped, const Chunk& next, StagedChunk& chunk, Stream streams[2], LoadedTurn& loaded) {
        Place place = place_at(extent.row_group, extent.first_stage);
        int done = 0;
        if (!chunk.raw && has_run(extent))
            done = decode_run<clip>(extent, skipped, chunk, streams, place, loaded, slab_of(has_run(next) ? next : extent));
        else if (has_run(next))
            loaded.load(slab_of(next), lane);
        if (chunk.raw) return decode_rest<clip, true>(extent, skipped, chunk, streams, place, 0);
        decode_rest<clip, false>(extent, skipped, chunk, streams, place, done);
    }

    __device__ __forceinline__ Place place_at(int row_group, int stage) const {
        const i64 row = i64(row_group) * 8 + (lane >> 2);
        const int column = 64 * stage + 4 * (lane & 3);
        const i64 start = window.start_of(row, geometry.columns);
        return {start + column, column, window.begin <= start && start < window.end, scale_of(row)};
    }

    // 2^-shift of the row, as BF16, twice.
    __device__ __forceinline__ u32 scale_of(i64 row) const {
        int shift = packed.shift;
        if (packed.has_row_shifts && row < geometry.rows) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[row];
        return ::scale_of(shift);
    }
};

// How the launch divides a block's shared memory, in 32-bit words: decode table, its entries, two staging buffers for each warp. Filled by
// kernels/decode.py.
struct Division { int table_words, entry_words, buffer_words; };

// The blocks that share tasks: the one at hand, and how many there are.
struct Blocks {
    int index, count;

    static __device__ __forceinline__ Blocks of_launch() { return {int(blockIdx.x), int(gridDim.x)}; }
};

// Tasks number what blocks decode:
//   count()       how many there are
//   sparse        whether some of them may turn out not to be wanted
//   wanted(task)  whether this one is
//   chunk(task)   the chunk it decodes
//   parts         how many tasks share a chunk, each with as many stages; of one row group if they are several
//   window(task)  what it stores of that
template <bool quad, Clip clip, class Tasks>
__device__ __forceinline__ void decode_tasks(const Geometry& geometry, const Packed& packed, const Tasks& tasks, const Division& division,
                                             const Blocks& blocks) {
    extern __shared__ __align__(16) u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, count = tasks.count();
    // All blocks together move along the tensor, so that what is read and written at a time lies together; where the last tasks are too few for all
    // warps, every block has some of them. Where tasks are few, some warps have none.
    const int decoders = min(warps, (count + blocks.count - 1) / blocks.count), stride = blocks.count * decoders;
    u32* buffers = shared + division.table_words + division.entry_words + warp * 2 * division.buffer_words;
    const u32* offsets = reinterpret_cast<const u32*>(packed.data + packed.offsets);

    auto next_wanted = [&](int task) {
        while (Tasks::sparse && task < count && !tasks.wanted(task)) task += stride;
        return task;
    };
    auto behind = [&](int task) { return task < count ? next_wanted(task + stride) : task; };
    auto extent_of = [&](int task) {
        Chunk extent = chunk_at(geometry, tasks.chunk(task));
        if (Tasks::parts > 1) {
            extent.stages /= Tasks::parts;
            extent.first_stage += task % Tasks::parts * extent.stages;
        }
        return extent;
    };
    u32 start = 0, stop = 0;   // of the streams that come next
    auto find = [&](int task) {
        if (task >= count) return;
        const u32* offset = offsets + tasks.chunk(task);
        start = load_u32(offset);
        stop = load_u32(offset + 1);
    };
    auto stage_chunk = [&](int task, int slot) {   // step 1
        StagedPlace place{};
        if (task < count) place = stage_streams(packed, u32(__cvta_generic_to_shared(buffers + slot * division.buffer_words)), start, stop, lane);
        copy_commit();
        return place;
    };

    let_kernel_behind_start();
    if (Tasks::sparse) await_kernel_before();   // which tasks are wanted may have just been written
    int task = next_wanted(warp < decoders ? warp * blocks.count + blocks.index : count), slot = 0;
    if (Tasks::sparse && !__syncthreads_or(task < count)) return;   // before the table is built for nothing
    find(task);
    const Table<quad> table(packed, shared, shared + division.table_words);
    Decoder<quad, decltype(tasks.window(0))> decoder{geometry, packed, u32(__cvta_generic_to_shared(shared)), lane, ((1u << packed.width) - 1) << 2, u32(packed.window >> 4) * 0x10101010u, {}};
    StagedPlace staged = stage_chunk(task, 0);
    Chunk extent{};
    LoadedTurn loaded;
    if (task < count) {
        extent = extent_of(task);
        if (decoder.has_run(extent)) loaded.load(decoder.slab_of(extent), lane);
    }
    int next = behind(task);
    find(next);
    table.finish();
    await_kernel_before();
    while (task < count) {
        const StagedPlace next_staged = stage_chunk(next, slot ^ 1);
        const Chunk next_extent = next < count ? extent_of(next) : extent;
        const int after = behind(next);
        find(after);
        copy_wait<1>();
        __syncwarp();
        StagedChunk chunk;
        Stream streams[2];
        decoder.window = tasks.window(task);
        chunk.open(buffers + slot * division.buffer_words + staged.begin, staged.size, extent.row_groups * extent.stages * Tasks::parts, lane, streams);
        const int skipped = task % Tasks::parts * extent.stages;
        if (Tasks::parts > 1 && !chunk.raw) decoder.skip(skipped, chunk, streams);
        decoder.template decode_chunk<clip>(extent, skipped, next_extent, chunk, streams, loaded);
        __syncwarp();
        slot ^= 1;
        task = next, next = after, staged = next_staged, extent = next_extent;
    }
}
