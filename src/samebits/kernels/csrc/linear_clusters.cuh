// The fused linear layer for some hundred tokens, on Hopper: a weight is decoded into shared memory, once for all tokens that a cluster of two blocks has.
// A cluster multiplies a tile of rows by two tiles of tokens, one in each block, with wgmma, in which tokens are the left matrix. Each block decodes
// half of the tile's row groups, a warp one of them, to its ring; one warp, the carrier, copies them to the other block's ring too, and brings x.
// See linear.cuh.
//
// A slot of the ring has a stage: x, 64 tokens after 64 tokens, and behind it an atom (atoms.cuh) of each row group of the tile. It is
//
//   full      when x, this block's row groups and those of the other block are there
//   decoded   when this block's row groups are: then the carrier sends them
//   empty     when both blocks have multiplied: what one of them decodes goes to both
//
// Row groups behind the matrix's last one hold what is decoded of that, tokens behind the last one zeros, and nobody writes their sums.
#pragma once
#include "atoms.cuh"

constexpr int kMultipliers = 8;                // warps; behind them the carrier, and then those that decode
constexpr int kWarps = 16;
constexpr int kTokenAtoms = 64;                // tokens that wgmma takes at once

template <int tokens_, int rows_>
struct Tile {
    static constexpr int tokens = tokens_, rows = rows_, groups = rows / 8, own_groups = groups / kCluster;
    static constexpr int parts = tokens / kTokenAtoms / 2;   // of a warpgroup's tokens
    static constexpr u32 x_bytes = tokens * 128, own_bytes = own_groups * kAtomBytes, slot_bytes = x_bytes + kCluster * own_bytes;
    static_assert(own_groups <= kWarps - kMultipliers - 1, "a warp for each row group that a block decodes");
};

// What a cluster multiplies at a time, tile of rows after tile of rows.
template <class Tile>
struct Items {
    const int step, units, pairs;              // clusters of the launch; of both tiles; pairs of tiles of tokens
    int index;

    __device__ __forceinline__ explicit Items(const Job& job) : step(job.blocks / kCluster), units(job.units), pairs(job.token_tiles), index(job.block() / kCluster) {}
    __device__ __forceinline__ bool has() const { return index < units; }
    __device__ __forceinline__ void advance() { index += step; }
    __device__ __forceinline__ int count() const { return index < units ? (units - 1 - index) / step + 1 : 0; }
    __device__ __forceinline__ int tile() const { return index / pairs; }
    __device__ __forceinline__ int first_group() const { return tile() * Tile::groups; }
    __device__ __forceinline__ int first_token() const { return Tile::tokens * (kCluster * (index - tile() * pairs) + int(block_of_cluster())); }
};

struct Ring {
    u32 slots, full, decoded, empty;           // shared addresses: of slots and of barriers, one for each slot
    int count;
};

// Whether a phase is over, for all lanes alike.
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) { return __shfl_sync(kFull, test(barrier, parity), 0); }

// The carrier. map: the tensor map of x, in memory.
template <class Tile>
__device__ __forceinline__ void carry(const Ring& ring, const Geometry& geometry, const Job& job, const void* map, int lane) {
    const u32 rank = block_of_cluster(), own = Tile::x_bytes + rank * Tile::own_bytes;
    Items<Tile> items(job);
    int to_bring = items.count() * geometry.stages, to_send = to_bring, stage = 0;
    RingPlace brought{0, 0}, sent{0, 0};
    while (to_bring || to_send) {   // either may be done first
        bool idle = true;
        if (to_bring && is_over(ring.empty + 8 * brought.slot, brought.parity ^ 1)) {
            if (lane == 0) {
                const u32 full = ring.full + 8 * brought.slot;
                expect(full, Tile::slot_bytes - Tile::own_bytes);
                copy_box(ring.slots + brought.slot * Tile::slot_bytes, map, 64 * stage, items.first_token(), full);
            }
            __syncwarp();
            brought.advance(ring.count);
            --to_bring;
            if (++stage == geometry.stages) stage = 0, items.advance();
            idle = false;
        }
        if (to_send && is_over(ring.decoded + 8 * sent.slot, sent.parity)) {
            if (lane == 0) copy_to_block(rank ^ 1, ring.slots + sent.slot * Tile::slot_bytes + own, Tile::own_bytes, ring.full + 8 * sent.slot);
            __syncwarp();
            sent.advance(ring.count);
            --to_send;
            idle = false;
        }
        if (idle) __nanosleep(32);
    }
}

template <class Tile>
__device__ __forceinline__ void multiply_tiles(const Ring& ring, const Geometry& geometry, const Job& job, int warp, int lane) {
    constexpr int count = Tile::rows / 2;
    const u32 left_offset = (warp >> 2) * Tile::parts * kTokenAtoms * 128;
    RingPlace place{0, 0};
    float sums[Tile::parts][count];
    u32 used = 0;
    auto release = [&] {
        if (used && lane < kCluster) arrive_at(used, lane);
    };
    auto pin_all = [&] {
#pragma unroll
        for (int part = 0; part < Tile::parts; ++part) pin(sums[part]);
    };
    await_kernel_before();
#pragma unroll 1
    for (Items<Tile> items(job); items.has(); items.advance()) {
#pragma unroll
        for (int part = 0; part < Tile::parts; ++part)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[part][i] = 0;
#pragma unroll 1
        for (int stage = 0; stage < geometry.stages; ++stage) {
            await(ring.full + 8 * place.slot, place.parity);
            const u32 slot = ring.slots + place.slot * Tile::slot_bytes;
            const u64 left = describe(slot + left_offset, kAtomBytes), right = describe(slot + Tile::x_bytes, kAtomBytes);
            pin_all();
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
                for (int part = 0; part < Tile::parts; ++part)
                    multiply_add(sums[part], left + (part * kTokenAtoms * 128 + step * 32) / 16, right + step * 32 / 16);
            wgmma_commit();
            pin_all();
            wgmma_wait<1>();
            release();
            used = ring.empty + 8 * place.slot;
            place.advance(ring.count);
        }
        wgmma_wait<0>();
        pin_all();
        release();
        used = 0;
        const int first = items.first_group(), there = min(Tile::groups, geometry.row_groups - first);
#pragma unroll
        for (int part = 0; part < Tile::parts; ++part) {
            const int token = items.first_token() + ((warp >> 2) * Tile::parts + part) * kTokenAtoms + 16 * (warp & 3) + (lane >> 2);
            write_tokens(geometry, job, token, there, lane, sums[part], [&](int slot) { return first + slot; });
        }
    }
}

// Decodes a row group of each item; `number` is the warp's among those that do.
template <class Tile>
struct Decoder : ChunkReader {
    const int number;                          // of the row group in the tile
    Items<Tile> items;
    int chunk = 0;

    __device__ __forceinline__ Decoder(const Geometry& geometry, const Packed& packed, const Job& job, int number, int lane, u32* buffers, u32 copied)
        : ChunkReader(geometry, packed, job, lane, buffers, copied), number(int(block_of_cluster()) * Tile::own_groups + number), items(job) {}

    __device__ __forceinline__ int group() const { return min(items.first_group() + number, geometry.row_groups - 1); }
    __device__ __forceinline__ void advance() {
        if (++chunk == geometry.chunks_per_row_group) chunk = 0, items.advance();
    }
    // Before the table is there.
    __device__ __forceinline__ void begin() {
        open_copied();
        if (items.has()) ChunkReader::begin(group(), chunk);
    }

    template <bool shifted>
    __device__ __forceinline__ void run(const Ring& ring, u32 table) {
        const u32 place = ring.slots + Tile::x_bytes + number * kAtomBytes + atom_place(lane);
        RingPlace at{0, 0};
#pragma unroll 1
        while (items.has()) {
            const int count = stages_of(chunk);
            const u32 scale = shifted ? ChunkReader::scale(group()) : kNoShift;
            advance();
            const Next next = look_ahead(items.has(), group(), chunk);
            Opened opened = open(count);
            decode<true>(opened, count, next, table, [&](int set, int run, const Vec4 (&upper)[kRun]) {
#pragma unroll
                for (int s = 0; s < kRun; ++s) {
                    if (run + s >= count) continue;
                    await(ring.empty + 8 * at.slot, at.parity ^ 1);
                    store_atom<shifted>(place + at.slot * Tile::slot_bytes, raw[set][s], upper[s], scale);
                    fence_async();
                    __syncwarp();
                    if (lane == 0) {
                        arrive(ring.full + 8 * at.slot);
                        arrive(ring.decoded + 8 * at.slot);
                    }
                    at.advance(ring.count);
                }
            });
        }
    }
};

template <int tokens, int rows>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    using OwnTile = Tile<tokens, rows>;
    const int lane = threadIdx.x & 31, warp = own_warp(), decoding = warp - kMultipliers - 1;
    const bool decodes = decoding >= 0 && decoding < OwnTile::own_groups;

    // Shared memory: the ring (first of all, there, the table's entries), the tensor map of x, barriers, table, for each decoding warp two staging buffers.
    const u32 start = u32(__cvta_generic_to_shared(shared_bytes)), base = (start + kAtomBytes - 1) & ~u32(kAtomBytes - 1);
    u8* shared = shared_bytes + (base - start);
    Ring ring;
    ring.slots = base;
    ring.count = job.ring;
    const u32 map = base + ring.count * OwnTile::slot_bytes;
    ring.full = map + kMapBytes;
    ring.decoded = ring.full + 8 * ring.count;
    ring.empty = ring.decoded + 8 * ring.count;
    const u32 copied = ring.empty + 8 * ring.count;   // one for each decoding warp, and place for kMultipliers
    u32* table = reinterpret_cast<u32*>(shared + ((copied + 8 * kMultipliers + 15 & ~15u) - base));

    let_kernel_behind_start();
    Decoder<OwnTile> decoder(geometry, packed, job, max(decoding, 0), lane, table + job.table_words + max(decoding, 0) * 2 * job.buffer_words,
                             copied + 8 * max(decoding, 0));
    if (decodes) decoder.begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < ring.count; ++i) {
            open_barrier(ring.full + 8 * i, 1 + OwnTile::own_groups);
            open_barrier(ring.decoded + 8 * i, OwnTile::own_groups);
            open_barrier(ring.empty + 8 * i, kCluster * kMultipliers);
        }
        show_barrier();
    }
    if (decoding == -1) store_shared(map + 4 * lane, job.x_map[lane]);
    const Table<true> decode_table(packed, table, reinterpret_cast<u32*>(shared));
    copy_commit();
    decode_table.finish();
    fence_async();   // x may come to where the entries were
    await_cluster();

    if (warp < kMultipliers) {
        if constexpr (OwnTile::parts > 1) take_registers<152>();
        multiply_tiles<OwnTile>(ring, geometry, job, warp, lane);
    } else {
        if constexpr (OwnTile::parts > 1) give_registers<104>();
        if (decoding == -1) {
            void* placed = reinterpret_cast<u8*>(job.parts) + job.block() * kMapBytes;
            await_kernel_before();
            place_map(placed, map, job.x, lane);
            carry<OwnTile>(ring, geometry, job, placed, lane);
        } else if (decodes) {
            const u32 table_address = u32(__cvta_generic_to_shared(table));
            if (packed.shift || packed.has_row_shifts) decoder.template run<true>(ring, table_address);
            else decoder.template run<false>(ring, table_address);
        }
    }
    leave_cluster();
}

// For so many tokens of a block, and rows of a tile.
#define CLUSTERS_KERNEL(name, Argument, tokens, rows)                                                              \
    extern "C" __global__ void __cluster_dims__(kCluster) __launch_bounds__(kWarps * kLanes, 1) name(           \
        const __grid_constant__ Argument argument) {                                                              \
        const Product& product = own_product(argument);                                                           \
        linear<tokens, rows>(product.geometry, product.packed, product.job);                                      \
    }
