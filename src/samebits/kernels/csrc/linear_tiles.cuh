// The fused linear layer for up to 128 tokens, on Hopper. A block multiplies a segment of K, one range or all, of up to 16 row groups at once, batch
// after batch. Some of its warps decode: a task is a chunk of one row group, and what comes out goes to a ring in shared memory. One warp has x copied
// to a second ring. One or two warpgroups do nothing but multiply what is in the two with wgmma, which adds like mma.m16n8k16, and write y, or have a
// range's sums meet those of the others. See linear.cuh.
//
// With 33 to 64 tokens these are the left matrix, and all row groups the right one: wgmma reads both once. With more tokens and more than eight row
// groups, each of two warpgroups has 64 of the tokens so. Otherwise 64 rows of the weight (eight row groups, a tile) are the left matrix, tokens the right
// one. The ring of weights has a slot for each *pair* of stages: for each row group two atoms (atoms.cuh), one a stage. Rows of a matrix that belong to no
// row group hold what follows in shared memory, and nobody reads their sums. Where a tile has no more than four row groups, each of the four warps has
// one: behind it stands what is decoded of it for the other stage.
// The ring of x has slots of a pair of stages, too: of each, the tokens in their order. Rows behind the last token hold anything. Where a segment
// begins or ends inside a pair, all of the pair is brought.
#pragma once
#include "atoms.cuh"

constexpr int kMaxDecoders = 16;
constexpr int kPairBytes = 2 * kAtomBytes;
constexpr int kTileBytes = 8 * kPairBytes;
constexpr int kTileGroups = 8;
constexpr int kLeftTokens = 64;           // of a warpgroup, where tokens are the left matrix

// Leaves 96 registers to each, or 80.
__host__ __device__ constexpr int max_threads(int warpgroups) { return 32 * (warpgroups == 1 ? 20 : 21); }

// A slot of the ring of x is there, and given back, as a whole or stage by stage, which are as many parts (linear/tiles.py: x_parts).
__host__ __device__ constexpr int x_parts(int wide) { return wide <= 32 ? 1 : 2; }
__host__ __device__ constexpr int x_bytes(int wide) { return 2 * wide * 128; }   // of a slot

// What of the weight a block multiplies: one segment of K, and every `blocks`-th row group from `place` on, `own` in all, in batches.
struct Share {
    int place, blocks, own, batches;
    int stage, end;              // of stages; of a chunk or pair, all are decoded from the first on
    int chunk, chunks, pair, pairs;

    __device__ __forceinline__ Share(const Geometry& geometry, const Job& job)
        : place(job.block() / job.segments), blocks(job.blocks / job.segments), own(job.row_groups_of(place)) {
        batches = (own + job.slots - 1) / job.slots;
        stage = (job.block() - place * job.segments) * job.segment_stages;
        end = min(stage + job.segment_stages, geometry.stages);
        chunk = stage / kChunkStages;
        chunks = (end - 1) / kChunkStages + 1 - chunk;
        pair = stage >> 1;
        pairs = (end + 1 >> 1) - pair;
    }
    __device__ __forceinline__ int row_group(int number) const { return number * blocks + place; }
};

// Which tasks a warp has, in the order of their numbers: chunk by chunk through a batch's row groups.
struct Task { int batch, chunk, slot, group; };   // chunk: of the segment's

struct Tasks {
    const Share& share;
    int slots, chunk_step, slot_step;         // steps from one task of a warp to its next
    u32 by_slots;

    __device__ __forceinline__ bool has(const Task& task) const { return task.batch < share.batches; }
    __device__ __forceinline__ Task first(int warp) const {
        const int chunk = divide(warp, by_slots);
        return settled({0, chunk, warp - chunk * slots, 0});
    }
    __device__ __forceinline__ Task behind(Task task) const {
        task.slot += slot_step;
        task.chunk += chunk_step;
        if (task.slot >= slots) {
            task.slot -= slots;
            ++task.chunk;
        }
        return settled(task);
    }
    // In its batch; in place of a row group that does not exist, the block's last: the ring needs every row group of a batch, and a barrier's parity
    // suffices only if no warp leaves out tasks.
    __device__ __forceinline__ Task settled(Task task) const {
        while (task.chunk >= share.chunks) {
            task.chunk -= share.chunks;
            ++task.batch;
        }
        task.group = share.row_group(min(task.batch * slots + task.slot, share.own - 1));
        return task;
    }
};

struct Rings {
    u32 weights, slot_bytes;              // shared addresses
    int slots;                            // of the ring of weights
    u32 by_slots;
    u32 x;
    int x_slots;
    u32 full, empty, x_full, x_empty;     // barriers, one for each slot, of x for each part
    u32 idle;                             // a barrier that nobody waits for
};

// Brings x to its ring, slot after slot, as often as there are batches; by a warp. map: the tensor map of x, in memory.
template <int wide>
__device__ __forceinline__ void bring(const Rings& rings, const Share& share, const void* map, int lane) {
    constexpr int parts = x_parts(wide), part_bytes = x_bytes(wide) / parts;
    RingPlace place{0, 0};
#pragma unroll 1
    for (int batch = 0; batch < share.batches; ++batch)
#pragma unroll 1
        for (int pair = share.pair; pair < share.pair + share.pairs; ++pair) {
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                const u32 barrier = 8 * (parts * place.slot + part);
                await(rings.x_empty + barrier, place.parity ^ 1);
                if (lane == 0) {
                    const u32 full = rings.x_full + barrier, at = rings.x + place.slot * x_bytes(wide) + part * part_bytes;
                    expect(full, part_bytes);
#pragma unroll
                    for (int i = 0; i < 2 / parts; ++i) copy_box(at + i * (wide * 128), map, 64 * (2 * pair + part + i), 0, full);
                }
                __syncwarp();
            }
            place.advance(rings.x_slots);
        }
}

// describe's two words. Slots of a ring lie in the first 256 KB, so that going from one to another changes the lower word by a sixteenth of the way.
struct Matrix {
    const u32 low, high;

    __device__ __forceinline__ Matrix(u32 address, u32 stride) : low(u32(describe(address, stride))), high(describe(address, stride) >> 32) {}
    __device__ __forceinline__ u64 with_low(u32 other) const { return u64(high) << 32 | other; }
};

// How many tokens, or rows of the weight, wgmma multiplies by how many of the others.
template <int wide, int groups, int warpgroups>
struct Matrices {
    static constexpr bool x_left = wide == kLeftTokens * warpgroups;
    static_assert(x_left || warpgroups == 1);
    static constexpr int tiles = x_left ? 1 : groups / kTileGroups, count = x_left ? 4 * groups : wide / 2;   // count: sums of a lane and tile
};

// A warp's sums to y where rows are the left matrix: two lanes swap, so that each has one token of two rows.
template <int tiles, int count>
__device__ __forceinline__ void write_rows(const Geometry& geometry, const Job& job, const Share& share, int batch, int warp, int lane, float (&sums)[tiles][count]) {
    const bool narrow = job.slots <= kTileGroups / 2;
    const int p = lane >> 2, g = (p >> 1) + 4 * (p & 1), odd = g & 1;   // p: the lane's row of an atom; g: of a row group
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int atom = 2 * warp + half, slot = narrow ? atom >> 1 : tile * kTileGroups + atom;
            const int mine = batch * job.slots + slot;
            if (slot >= job.slots || mine >= share.own || (narrow && half)) continue;
            const int row = 8 * share.row_group(mine) + g;
            const float bias = job.bias ? __uint_as_float(u32(job.bias[row]) << 16) : 0;
            u32 words[count / 4];
#pragma unroll
            for (int j = 0; j < count / 4; ++j) {
                float low = sums[tile][4 * j + 2 * half], high = sums[tile][4 * j + 2 * half + 1];
                if (job.bias) low += bias, high += bias;
                const float other = __shfl_xor_sync(kFull, odd ? low : high, 8);
                words[j] = odd ? to_bf16x2(other, high) : to_bf16x2(low, other);
            }
            const int token = 2 * (lane & 3) + odd;
            u16* target = job.y + size_t(token) * geometry.rows + (row & ~1);
#pragma unroll
            for (int j = 0; j < count / 4; ++j, target += 8 * size_t(geometry.rows))
                if (8 * j + token < job.tokens) *reinterpret_cast<u32*>(target) = words[j];
        }
}

// Multiplies; `warp` counts those of all warpgroups that do.
//
// One warp of each scheduler does, so a stage takes as long as its instructions, wgmma's or not: pairs of stages follow each other without branches but
// for waiting, and matrices are described by one sum of 32 bits.
template <int wide, int groups, int warpgroups>
__device__ __forceinline__ void multiply_tiles(const Rings& rings, const Geometry& geometry, const Job& job, const Share& share, int warp, int lane) {
    using Own = Matrices<wide, groups, warpgroups>;
    constexpr int tiles = Own::tiles, count = Own::count, parts = x_parts(wide);
    const Matrix first_rows(rings.weights, Own::x_left || job.slots > kTileGroups / 2 ? kPairBytes : kAtomBytes);
    const Matrix first_tokens(rings.x + (Own::x_left ? (warp >> 2) * kLeftTokens * 128 : 0), kAtomBytes);
    float sums[tiles][count];
    RingPlace pair{0, 0}, x{0, 0};
    u32 used = rings.idle, used_x = rings.idle;     // barriers of what the last wgmma is the last to read
    auto give_back = [&](u32 barrier) {
        if (lane == 0) arrive(barrier);
    };
    auto give_back_used = [&] {
        give_back(used);
        give_back(used_x);
        used = used_x = rings.idle;
    };
    auto x_barrier = [&](int part) { return 8 * (parts * x.slot + part); };
    auto await_first = [&] {
        await_both(rings.full + 8 * pair.slot, pair.parity, rings.x_full + x_barrier(0), x.parity);
    };
    auto await_second = [&] {
        if (parts == 2) await(rings.x_full + x_barrier(1), x.parity);
    };
    auto advance = [&] {
        used = rings.empty + 8 * pair.slot;
        used_x = rings.x_empty + x_barrier(parts - 1);
        pair.advance(rings.slots);
        x.advance(rings.x_slots);
    };
    auto pin_all = [&] {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) pin(sums[tile]);
    };
    auto multiply = [&](int stage) {   // of the pair
        const u32 rows = first_rows.low + pair.slot * (rings.slot_bytes / 16) + stage * (kAtomBytes / 16);
        const u32 tokens = first_tokens.low + x.slot * (x_bytes(wide) / 16) + stage * (wide * 128 / 16);
        pin_all();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const u64 own_rows = first_rows.with_low(rows + (tile * kTileBytes + step * 32) / 16), own_tokens = first_tokens.with_low(tokens + step * 32 / 16);
                if constexpr (Own::x_left) multiply_add(sums[tile], own_tokens, own_rows);
                else multiply_add(sums[tile], own_rows, own_tokens);
            }
        wgmma_commit();
        pin_all();
    };
    auto multiply_first = [&] {
        await_first();
        multiply(0);
        wgmma_wait<1>();
        give_back_used();
    };
    auto multiply_second = [&] {
        await_second();
        multiply(1);
        const u32 first_x = rings.x_empty + x_barrier(0);
        advance();
        if (parts == 2) {
            wgmma_wait<1>();
            give_back(first_x);
        }
    };
    await_kernel_before();
#pragma unroll 1
    for (int batch = 0; batch < share.batches; ++batch) {
        const int meeting = (share.place * job.batches + batch) * (4 * warpgroups) + warp;
        const Meeting<tiles, count> met{job.parts + job.blocks * (kMapBytes / 4) + size_t(meeting) * job.ranges * (tiles * count * kLanes), lane};
        if (share.stage & 1) await_first();
        int range = share.stage / job.stages_per_range;
#pragma unroll 1
        for (int first = share.stage; first < share.end; first += job.stages_per_range, ++range) {
            const int range_end = min(first + job.stages_per_range, share.end);
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
                for (int i = 0; i < count; ++i) sums[tile][i] = 0;
            int stage = first;
            if (stage & 1) multiply_second(), ++stage;
#pragma unroll 1
            for (; stage + 1 < range_end; stage += 2) {
                multiply_first();
                multiply_second();
            }
            if (stage < range_end) multiply_first();
            wgmma_wait<0>();
            pin_all();
            give_back_used();
            if (job.ranges > 1) met.bring(range, sums);
        }
        if (share.end & 1) {
            await_second();
            if (parts == 2) give_back(rings.x_empty + x_barrier(0));
            advance();
            give_back_used();
        }
        if (Own::x_left && 16 * warp >= job.tokens) continue;
        if (job.segments > 1 && !met.is_last(job.done + meeting, job.segments)) continue;
        if (job.ranges > 1) met.add(job.ranges, sums);
        const int first = batch * job.slots;
        if constexpr (Own::x_left)
            write_tokens(geometry, job, 16 * warp + (lane >> 2), min(job.slots, share.own - first), lane, sums[0], [&](int slot) { return share.row_group(first + slot); });
        else write_rows(geometry, job, share, batch, warp, lane, sums);
    }
}

// Decodes; `warp` is the number among the decoding warps.
struct Decoder : ChunkReader {
    const Share& share;
    const Tasks tasks;
    Task task;

    __device__ __forceinline__ Decoder(const Geometry& geometry, const Packed& packed, const Job& job, const Share& share, int warp, int lane,
                                       u32* buffers, u32 copied)
        : ChunkReader(geometry, packed, job, lane, buffers, copied), share(share), tasks{share, job.slots, job.chunk_step, job.slot_step, job.by_slots},
          task(tasks.first(warp)) {}

    __device__ __forceinline__ int chunk_of(const Task& task) const { return share.chunk + task.chunk; }
    // Before the table is there.
    __device__ __forceinline__ void begin() {
        open_copied();
        if (tasks.has(task)) ChunkReader::begin(task.group, chunk_of(task));
    }

    template <bool shifted>
    __device__ __forceinline__ void run(const Rings& rings, u32 table) {
        const u32 lane_place = rings.weights + atom_place(lane);
#pragma unroll 1
        while (tasks.has(task)) {
            const int first_stage = chunk_of(task) * kChunkStages, count = min(kChunkStages, share.end - first_stage);
            const int before = max(0, 2 * share.pair - first_stage);   // stages of pairs that belong to the segment before
            const u32 atoms = lane_place + task.slot * kPairBytes;
            RingPlace pair = RingPlace::of(task.batch * share.pairs + (first_stage + before) / 2 - share.pair, rings.slots, rings.by_slots);
            const Task behind = tasks.behind(task);
            const Next next = look_ahead(tasks.has(behind), behind.group, chunk_of(behind));
            const u32 scale = shifted ? ChunkReader::scale(task.group) : kNoShift;
            Opened chunk = open(stages_of(chunk_of(task)));
            decode<false>(chunk, count, next, table, [&](int set, int run, const Vec4 (&upper)[kRun]) {
                const u32 first = rings.full + 8 * pair.slot;
                auto store_pair = [&](int s) {
                    await(rings.empty + 8 * pair.slot, pair.parity ^ 1);
                    const u32 atom = atoms + pair.slot * rings.slot_bytes;
                    store_atom<shifted>(atom, raw[set][s], upper[s], scale);
                    store_atom<shifted>(atom + kAtomBytes, raw[set][s + 1], upper[s + 1], scale);
                };
                const bool has_first = run >= before, has_second = run + 2 >= before && run + 2 < count;
                if (has_first) {
                    store_pair(0);
                    pair.advance(rings.slots);
                }
                const u32 second = rings.full + 8 * pair.slot;
                if (has_second) {
                    store_pair(2);
                    pair.advance(rings.slots);
                }
                fence_async();
                __syncwarp();
                if (lane == 0) {
                    if (has_first) arrive(first);
                    if (has_second) arrive(second);
                }
            });
            task = behind;
        }
    }
};

// wide: tokens, rounded up; groups: row groups that a block multiplies at once, rounded up; warpgroups: that multiply.
template <int wide, int groups, int warpgroups>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const int lane = threadIdx.x & 31, warp = own_warp(), decoding = warp - 4 * warpgroups - 1;
    const Share share(geometry, job);

    // Shared memory: both rings (first of all, there, the table's entries), the tensor map of x, barriers, table, for each decoding warp two staging
    // buffers.
    const u32 start = u32(__cvta_generic_to_shared(shared_bytes)), base = (start + kAtomBytes - 1) & ~u32(kAtomBytes - 1);
    u8* shared = shared_bytes + (base - start);
    Rings rings;
    rings.weights = base;
    rings.by_slots = job.by_ring;
    rings.slot_bytes = job.slots * kPairBytes;
    rings.slots = job.ring;
    rings.x = base + rings.slots * rings.slot_bytes;
    rings.x_slots = job.x_places;
    const u32 map = rings.x + rings.x_slots * x_bytes(wide);
    rings.full = map + kMapBytes;
    rings.empty = rings.full + 8 * rings.slots;
    rings.x_full = rings.empty + 8 * rings.slots;
    const int x_barriers = x_parts(wide) * rings.x_slots;
    rings.x_empty = rings.x_full + 8 * x_barriers;
    rings.idle = rings.x_empty + 8 * x_barriers;
    const u32 copied = rings.idle + 16;   // one for each decoding warp, and place for kMaxDecoders
    u32* table = reinterpret_cast<u32*>(shared + (copied + 8 * kMaxDecoders - base));

    let_kernel_behind_start();
    Decoder decoder(geometry, packed, job, share, max(decoding, 0), lane, table + job.table_words + max(decoding, 0) * 2 * job.buffer_words,
                    copied + 8 * max(decoding, 0));
    if (decoding >= 0) decoder.begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < rings.slots; ++i) {
            open_barrier(rings.full + 8 * i, job.slots);
            open_barrier(rings.empty + 8 * i, 4 * warpgroups);
        }
        for (int i = 0; i < x_barriers; ++i) {
            open_barrier(rings.x_full + 8 * i, 1);
            open_barrier(rings.x_empty + 8 * i, 4 * warpgroups);
        }
        open_barrier(rings.idle, 1);
        show_barrier();
    }
    if (decoding == -1) store_shared(map + 4 * lane, job.x_map[lane]);
    const Table<true> decode_table(packed, table, reinterpret_cast<u32*>(shared));
    copy_commit();
    decode_table.build();
    fence_async();   // x may come to where the entries were
    copy_wait<0>();
    __syncthreads();

    if (decoding >= 0) {
        const u32 table_address = u32(__cvta_generic_to_shared(table));
        if (packed.shift || packed.has_row_shifts) decoder.run<true>(rings, table_address);
        else decoder.run<false>(rings, table_address);
    } else if (decoding == -1) {
        void* placed = reinterpret_cast<u8*>(job.parts) + job.block() * kMapBytes;
        await_kernel_before();
        place_map(placed, map, job.x, lane);
        bring<wide>(rings, share, placed, lane);
    } else {
        multiply_tiles<wide, groups, warpgroups>(rings, geometry, job, share, warp, lane);
    }
}

#define TILES_KERNEL(name, Argument, wide, groups, warpgroups)                                                      \
    extern "C" __global__ void __launch_bounds__(max_threads(warpgroups), 1) name(const __grid_constant__ Argument argument) { \
        const Product& product = own_product(argument);                                                             \
        linear<wide, groups, warpgroups>(product.geometry, product.packed, product.job);                            \
    }
