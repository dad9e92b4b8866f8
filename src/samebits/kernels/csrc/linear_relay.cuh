// The fused linear layer for many tokens, on Hopper. Some warps of all blocks decode the weight to memory, whence all blocks copy it, through the L2
// cache, to multiply tiles of 128 tokens by so many of its rows with wgmma, in which x is the left matrix: a weight is decoded once, however many
// tokens there are, and while tensor cores multiply what was decoded before. See linear.cuh.
//
// What is decoded lies in memory as wgmma takes it (hopper.cuh), tile by tile, stage by stage. A unit of decoding is a chunk of one or two row groups;
// warps claim units one after another, in the order in which tiles are multiplied, so that blocks that run never wait for one that does not. Behind
// each run of kSignal stages row groups are counted at their tile's flag for that run. Two blocks of a cluster multiply two tiles of tokens by the
// same rows, an item, and each copies half of these to both.
//
// Decoding is done long before the last tile is multiplied, so the warps that decode go on with weights of products to come: these need but be multiplied
// then, by cuBLAS.
//
// All clusters have as many whole items. Of what is left over, the first items, each may be shared by some clusters: the first one leaves its sums in
// memory, and the next one goes on with them, after whole items of its own, when they have long been left. Who has had its part ends its items at
// other times than who has not, and all the results of a round do not go to memory at once: so parts are as far from each other as they can.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"

constexpr int kTileTokens = 128;
constexpr int kMultipliers = 8;                // warps; of the others one brings what is multiplied, the rest decode
constexpr int kSignal = 8;                     // stages

// A tile of rows. Where few slots of the ring fit, they are for half a stage.
template <int rows_>
struct Tile {
    static constexpr int rows = rows_, groups = rows / 8, parts = rows >= 224 ? 2 : 1;
    static constexpr u32 row_bytes = 128 / parts, atom_bytes = 8 * row_bytes;                      // of a part of a stage; an atom is a row group's
    static constexpr u32 x_bytes = kTileTokens * row_bytes, part_bytes = rows * row_bytes, slot_bytes = x_bytes + part_bytes, bias_bytes = 2 * rows;
};

__device__ __forceinline__ u32 claim(u32* counter, u32 count) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
    return before;
}

__device__ __forceinline__ void count_more(u32* flag, u32 more) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(more) : "memory"); }

__device__ __forceinline__ u32 read_count(const u32* flag) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Between what threads write and what copies in bulk read.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <class Tile>
struct Relay {
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    u32 ring, full, empty;         // shared addresses: slots, and barriers of each
    int tiles, runs;
    u8* decoded;                   // in memory
    u32* flags;                    // of each tile, one for each run; behind them, for each warp that multiplies, whether it has left its sums

    __device__ __forceinline__ Relay(const Geometry& geometry, const Packed& packed, const Job& job, u32 ring, u32 full)
        : geometry(geometry), packed(packed), job(job), ring(ring), full(full), empty(full + 8 * job.ring),
          tiles((geometry.row_groups + Tile::groups - 1) / Tile::groups), runs((geometry.stages + kSignal - 1) / kSignal),
          decoded(reinterpret_cast<u8*>(job.parts)), flags(job.done + 1) {}
    __device__ __forceinline__ u32* claimed() const { return job.done; }
    __device__ __forceinline__ u8* stage(int tile, int stage) const { return decoded + (size_t(tile) * geometry.stages + stage) * (Tile::parts * Tile::part_bytes); }
    __device__ __forceinline__ u8* map() const { return stage(tiles, 0) + job.block() * kMapBytes; }
    __device__ __forceinline__ int groups_of(int tile) const { return min(Tile::groups, geometry.row_groups - tile * Tile::groups); }
    // What a warp that multiplies leaves for the same one of the cluster behind.
    using Sums = Meeting<1, Tile::rows / 2>;
    __device__ __forceinline__ Sums left(int warp, int lane) const {
        return {reinterpret_cast<float*>(stage(tiles, 0) + job.blocks * kMapBytes) + size_t(warp) * (Sums::all * kLanes), lane};
    }
    __device__ __forceinline__ u32* is_left(int warp) const { return flags + tiles * runs + warp; }
};

// What a cluster multiplies at a time: a tile of rows and two of tokens, of which each block has one, all stages or some. So many tokens are multiplied by all
// rows before others are that x stays in the cache; in such a pass, one tile of rows follows another.
struct Part {
    int tile, token_tile, first, last;      // first, last: stages
    bool takes, gives;                      // the sums at its start, those at its end
};

template <class Tile>
struct Parts {
    const Relay<Tile>& relay;
    const int rank = block_of_cluster(), clusters = relay.job.blocks / kCluster;
    int index = relay.job.block() / kCluster;      // of the whole item that comes next
    int shared = 0, number = 0, whole_before = -1;   // the item of which the cluster has a part, which, and behind how many whole ones; then -1

    __device__ __forceinline__ Parts(const Relay<Tile>& relay) : relay(relay) {
        if (relay.job.segment_stages == 0) return;
        const int cluster = index, items = relay.job.units % clusters, parts = (relay.geometry.stages - 1) / relay.job.segment_stages + 1;
        index += items;
        if (cluster >= items * parts) return;
        shared = cluster / parts;
        number = cluster - shared * parts;
        whole_before = number * (relay.job.units / clusters / (parts - 1));
    }
    __device__ __forceinline__ bool has() const { return whole_before >= 0 || index < relay.job.units; }
    __device__ __forceinline__ void advance() {
        if (--whole_before != -1) index += clusters;
    }
    __device__ __forceinline__ Part at() const {
        const int stages = relay.geometry.stages, first = number * relay.job.segment_stages, last = min(first + relay.job.segment_stages, stages);
        if (whole_before == 0) return part(shared, first, last);
        return part(index, 0, stages);
    }

   private:
    __device__ __forceinline__ Part part(int item, int first, int last) const {
        const Job& job = relay.job;
        const int pass = item / (job.segments * relay.tiles), first_pair = pass * job.segments;
        const int inside = item - first_pair * relay.tiles, pairs = min(job.segments, job.token_tiles - first_pair), tile = inside / pairs;
        return {tile, kCluster * (first_pair + inside - tile * pairs) + rank, first, last, first > 0, last < relay.geometry.stages};
    }
};

// -- Decoding --

// A chunk of some row groups, from the first; of which the last may not be there, and then is decoded all the same, but not stored.
struct Unit { int group, chunk; };

// Where units of so many row groups come from and go to: of the weight that is multiplied, in the order of its tiles, for which flags count them.
template <class Tile, int groups>
struct ToTiles {
    static constexpr u32 steps = 4 / Tile::parts, stage_bytes = Tile::parts * Tile::part_bytes;
    static constexpr bool forgets_payloads = true;   // of NaNs, as products do
    const Relay<Tile>& relay;
    const Packed& packed;
    u32* const claimed;
    const int row_groups, stages, chunks;
    const int band_groups, band_units;

    __device__ __forceinline__ ToTiles(const Relay<Tile>& relay)
        : relay(relay), packed(relay.packed), claimed(relay.claimed()), row_groups(relay.geometry.row_groups), stages(relay.geometry.stages),
          chunks(relay.geometry.chunks_per_row_group), band_groups(relay.job.batches * Tile::groups), band_units(band_groups / groups * chunks) {}
    __device__ __forceinline__ Unit unit_at(int index) const {
        const int band = index / band_units, inside = index - band * band_units, first = band * band_groups;
        const int of_chunk = (min(band_groups, row_groups - first) + groups - 1) / groups, chunk = inside / of_chunk;
        return {first + groups * (inside - chunk * of_chunk), chunk};
    }
    __device__ __forceinline__ static int tile_of(const Unit& unit) { return unit.group / Tile::groups; }
    // Of the lane's place in an atom: four words of each step.
    __device__ __forceinline__ u8* place(const Unit& unit, int lane) const {
        const u32 g = lane >> 2, t = lane & 3, swizzle = Tile::parts == 2 ? g >> 1 & 3 : g, tile = tile_of(unit);
        return relay.stage(tile, unit.chunk * kChunkStages) + (unit.group - tile * Tile::groups) * Tile::atom_bytes + g * Tile::row_bytes +
               (((t >> 1) ^ swizzle) << 4) + ((t & 1) << 3);
    }
    __device__ __forceinline__ u32 group_bytes() const { return Tile::atom_bytes; }
    __device__ __forceinline__ static u8* step(u8* place, u32 q) { return reinterpret_cast<u8*>((u64(place) ^ (q % steps << 5)) + q / steps * Tile::part_bytes); }
    // Stages up to `stage`, of the chunk's, are stored, of so many row groups.
    __device__ __forceinline__ void stored(const Unit& unit, int stage, bool is_last, int valid, int lane) const {
        if (stage % kSignal && !is_last) return;
        fence_copies();
        __syncwarp();
        if (lane == 0) count_more(relay.flags + tile_of(unit) * relay.runs + unit.chunk * (kChunkStages / kSignal) + (stage - 1) / kSignal, valid);
    }
};

// The same of a weight for a product to come.
template <int groups>
struct ToRows {
    static constexpr u32 stage_bytes = 128;
    static constexpr bool forgets_payloads = false;
    const Packed& packed;
    u8* const output;
    u32* const claimed;
    const int row_groups, stages, chunks;

    __device__ __forceinline__ ToRows(const Prefetched& prefetched)
        : packed(prefetched.packed), output(reinterpret_cast<u8*>(prefetched.output)), claimed(prefetched.claimed), row_groups(prefetched.row_groups),
          stages(prefetched.stages), chunks((stages + kChunkStages - 1) / kChunkStages) {}
    __device__ __forceinline__ Unit unit_at(int index) const {
        const int first = index / chunks;
        return {groups * first, index - first * chunks};
    }
    __device__ __forceinline__ u8* place(const Unit& unit, int lane) const {
        return output + (size_t(8 * unit.group + (lane >> 2)) * stages + unit.chunk * kChunkStages) * stage_bytes + 8 * (lane & 3);
    }
    __device__ __forceinline__ u32 group_bytes() const { return 8 * stages * stage_bytes; }
    __device__ __forceinline__ static u8* step(u8* place, u32 q) { return place + 32 * q; }
    __device__ __forceinline__ void stored(const Unit&, int, bool, int, int) const {}
};

template <class Target, int groups>
struct UnitDecoder {
    const Target target;
    const int lane;
    const u32 table;               // a shared address
    u32* const buffers;
    const int buffer_words, units;
    Vec4 raw[groups][kRun];
    u32 signs[groups][kRun / 2];
    const u8* slabs[groups];
    StagedPlace staged[groups];

    __device__ __forceinline__ UnitDecoder(const Target& target, int lane, u32 table, u32* buffers, int buffer_words)
        : target(target), lane(lane), table(table), buffers(buffers), buffer_words(buffer_words), units((target.row_groups + groups - 1) / groups * target.chunks) {}
    __device__ __forceinline__ int group_of(const Unit& unit, int i) const { return min(unit.group + i, target.row_groups - 1); }
    __device__ __forceinline__ int stages_of(const Unit& unit) const { return min(kChunkStages, target.stages - unit.chunk * kChunkStages); }
    __device__ __forceinline__ const u8* slab_of(const Unit& unit, int i) const {
        return target.packed.data + target.packed.planes + slab_offset(target.stages, group_of(unit, i), unit.chunk * kChunkStages);
    }
    __device__ __forceinline__ void load_stage(int i, int s) {
        raw[i][s] = load_raw(slabs[i], s, lane);
        if (s & 1) signs[i][s / 2] = load_once_u32(slabs[i] + (s >> 1) * kSlabBytes + 4 * lane);
    }
    __device__ __forceinline__ u32 claim_one() const { return lane == 0 ? claim(target.claimed, 1) : 0; }
    __device__ __forceinline__ u32* buffer_at(int side, int i) const { return buffers + (side * groups + i) * buffer_words; }

    // Where a unit's streams are, in the section.
    struct Bounds { u32 start[groups], stop[groups]; };
    __device__ __forceinline__ Bounds bounds_of(const Unit& unit) const {
        Bounds bounds;
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            const u32* offset = reinterpret_cast<const u32*>(target.packed.data + target.packed.offsets) + size_t(group_of(unit, i)) * target.chunks + unit.chunk;
            bounds.start[i] = load_u32(offset);
            bounds.stop[i] = load_u32(offset + 1);
        }
        return bounds;
    }
    __device__ __forceinline__ void stage(int side, const Bounds& bounds) {
#pragma unroll
        for (int i = 0; i < groups; ++i) staged[i] = stage_streams(target.packed, u32(__cvta_generic_to_shared(buffer_at(side, i))), bounds.start[i], bounds.stop[i], lane);
    }
    template <bool shifted>
    __device__ __forceinline__ void store_stage(u8* place, Vec4 bytes, Vec4 upper, u32 scale) const {
        auto store = [&](u32 q, u32 raw, u32 upper) {
            u32 low = __byte_perm(raw, upper, 0x5140), high = __byte_perm(raw, upper, 0x7362);
            if (shifted && (Target::forgets_payloads || scale != kNoShift)) low = unshift(low, scale), high = unshift(high, scale);
            *reinterpret_cast<Vec2*>(Target::step(place, q)) = {low, high};
        };
        store(0, bytes.x, upper.x);
        store(1, bytes.y, upper.y);
        store(2, bytes.z, upper.z);
        store(3, bytes.w, upper.w);
    }

    template <bool shifted>
    __device__ __forceinline__ void run(int index) {
        const Packed& packed = target.packed;
        const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
        if (index >= units) return;
        Unit unit = target.unit_at(index);
        u32 claims = claim_one();
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            slabs[i] = slab_of(unit, i);
#pragma unroll
            for (int s = 0; s < kRun; ++s) load_stage(i, s);
        }
        stage(0, bounds_of(unit));
        copy_commit();
        int next_index = __shfl_sync(kFull, claims, 0);
        claims = claim_one();
        bool more = next_index < units;
        Unit next = target.unit_at(more ? next_index : index);
        Bounds bounds = bounds_of(next);
        int side = 0;
#pragma unroll 1
        for (;;) {
            StagedPlace present[groups];
#pragma unroll
            for (int i = 0; i < groups; ++i) present[i] = staged[i];
            __syncwarp();  // all lanes have read what was staged there
            if (more) stage(side ^ 1, bounds);
            copy_commit();
            const int after_index = __shfl_sync(kFull, claims, 0);
            claims = claim_one();
            const bool still_more = after_index < units;
            const Unit after = target.unit_at(still_more ? after_index : index);
            bounds = bounds_of(after);
            const int count = stages_of(unit);
            u32 scales[groups];
            if (shifted)
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    int shift = packed.shift;
                    if (packed.has_row_shifts) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[group_of(unit, i) * 8 + (lane >> 2)];
                    scales[i] = scale_of(shift);
                }
            copy_wait<1>();
            __syncwarp();
            Opened opened[groups];
#pragma unroll
            for (int i = 0; i < groups; ++i)
                opened[i].open(u32(__cvta_generic_to_shared(buffer_at(side, i) + present[i].begin)), present[i].size, count, lane);
            side ^= 1;
            const int valid = min(groups, target.row_groups - unit.group);
            u8* place = target.place(unit, lane);
#pragma unroll 1
            for (int run = 0; run < count; run += kRun) {
#pragma unroll
                for (int i = 0; i < groups; ++i) slabs[i] = run + kRun < count || !more ? slabs[i] + kRun / 2 * kSlabBytes : slab_of(next, i);
#pragma unroll
                for (int s = 0; s < kRun; ++s) {
                    LookUps begun[groups];
                    Vec4 upper[groups];
#pragma unroll
                    for (int i = 0; i < groups; ++i) begun[i] = opened[i].begin(table, byte_mask);
#pragma unroll
                    for (int i = 0; i < groups; ++i) upper[i] = opened[i].go_on(begun[i], table, byte_mask);
#pragma unroll
                    for (int i = 0; i < groups; ++i) {
                        const Vec4 bytes = raw[i][s];
                        const u32 sign = signs[i][s / 2] << (4 * (s & 1));
                        load_stage(i, s);
                        opened[i].complete(upper[i], common);
                        opened[i].template mend<true>(upper[i], run + s, lane);
                        const Vec4 whole = with_signs(sign, upper[i]);
                        if (run + s < count && i < valid) store_stage<shifted>(place + i * target.group_bytes(), bytes, whole, shifted ? scales[i] : kNoShift);
                    }
                    place += Target::stage_bytes;
                }
                target.stored(unit, run + kRun, run + kRun >= count, valid, lane);
            }
            if (!more) break;
            unit = next;
            next = after;
            more = still_more;
        }
    }
};

template <int decoders>
__device__ __forceinline__ void await_decoders() { asm volatile("bar.sync 1, %0;" ::"n"(decoders * kLanes) : "memory"); }

// Weights for products to come, one after another: each has a table of its own.
template <int decoders, int groups>
__device__ __forceinline__ void decode_prefetched(const Job& job, int decoding, int lane, u32 table, u32* buffers) {
#pragma unroll 1
    for (int i = 0; i < kMaxPrefetched && job.prefetched[i].output; ++i) {
        const Prefetched& own = job.prefetched[i];
        await_decoders<decoders>();   // nobody needs the table of the one before
        copy_table(own.packed, table, decoding * kLanes + lane, decoders * kLanes);
        copy_commit();
        copy_wait<0>();
        await_decoders<decoders>();
        UnitDecoder<ToRows<groups>, groups> decoder(ToRows<groups>(own), lane, table, buffers, job.buffer_words);
        decoder.template run<true>(__shfl_sync(kFull, decoder.claim_one(), 0));
    }
}

// -- Bringing --

template <class Tile>
__device__ __forceinline__ void bring(const Relay<Tile>& relay, int lane) {
    constexpr u32 share = Tile::part_bytes / kCluster;
    RingPlace place{0, 0};
#pragma unroll 1
    for (Parts<Tile> all(relay); all.has(); all.advance()) {
        const auto [tile, token_tile, first, last, takes, gives] = all.at();
        const u8* source = relay.stage(tile, first) + all.rank * share;
        const u32* flags = relay.flags + tile * relay.runs;
        const u32 wanted = relay.groups_of(tile);
        int ready = first / kSignal;   // runs
#pragma unroll 1
        for (int part = Tile::parts * first; part < Tile::parts * last; ++part) {
            if (part / (Tile::parts * kSignal) >= ready) {
                u32 unready;
                do {
                    const bool counts = ready + lane < relay.runs;
                    unready = __ballot_sync(kFull, !counts || read_count(flags + ready + lane) < wanted);
                } while (unready & 1);
                ready += unready ? __ffs(unready) - 1 : kLanes;
                __syncwarp();
                if (lane == 0) fence_copies();
            }
            await(relay.empty + 8 * place.slot, place.parity ^ 1);
            if (lane == 0) {
                const u32 full = relay.full + 8 * place.slot, slot = relay.ring + place.slot * Tile::slot_bytes;
                expect(full, Tile::slot_bytes);
                copy_box(slot, relay.map(), 64 / Tile::parts * part, kTileTokens * token_tile, full);
                copy_bulk_to(slot + Tile::x_bytes + all.rank * share, source, share, full, (1 << kCluster) - 1);
            }
            __syncwarp();
            source += Tile::part_bytes;
            place.advance(relay.job.ring);
        }
    }
}

// -- Multiplying --

template <class Tile>
__device__ __forceinline__ void multiply_tiles(const Relay<Tile>& relay, u32 biases, int warp, int lane) {
    const Job& job = relay.job;
    const Geometry& geometry = relay.geometry;
    const int g = lane >> 2, t = lane & 3;
    RingPlace place{0, 0};
    float sums[Tile::rows / 2];
    u32 used = 0;
    auto release = [&] {
        if (used && lane < kCluster) arrive_at(used, lane);
    };
#pragma unroll 1
    for (Parts<Tile> all(relay); all.has(); all.advance()) {
        const auto [tile, token_tile, first, last, takes, gives] = all.at();
        const int first_row = tile * Tile::rows, groups = relay.groups_of(tile), own = job.block() * kMultipliers + warp;   // own: of all warps that multiply
        __syncwarp();
        if (job.bias && !gives && lane < groups) copy_async(biases + 16 * lane, job.bias + first_row + 8 * lane);   // long before it is needed
        copy_commit();
        const int before = own - kCluster * kMultipliers;
        if (takes) Relay<Tile>::Sums::await_flag(relay.is_left(before));
        relay.left(before, lane).take_if(takes, reinterpret_cast<float (&)[1][Tile::rows / 2]>(sums));
#pragma unroll 1
        for (int part = Tile::parts * first; part < Tile::parts * last; ++part) {
            await(relay.full + 8 * place.slot, place.parity);
            const u32 slot = relay.ring + place.slot * Tile::slot_bytes;
            const u64 left = describe<Tile::row_bytes>(slot + (warp >> 2) * (64 * Tile::row_bytes), Tile::atom_bytes);
            const u64 right = describe<Tile::row_bytes>(slot + Tile::x_bytes, Tile::atom_bytes);
            pin(sums);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4 / Tile::parts; ++step) multiply_add(sums, left + step * 32 / 16, right + step * 32 / 16);
            wgmma_commit();
            pin(sums);
            wgmma_wait<1>();
            release();
            used = relay.empty + 8 * place.slot;
            place.advance(job.ring);
        }
        wgmma_wait<0>();
        pin(sums);
        release();
        used = 0;
        if (gives) {
            const auto left = relay.left(own, lane);
            left.bring(0, reinterpret_cast<float (&)[1][Tile::rows / 2]>(sums));
            left.raise(relay.is_left(own));
            continue;
        }
        copy_wait<0>();
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = kTileTokens * token_tile + 16 * warp + 8 * half + g;
            u16* y = job.y + size_t(token) * geometry.rows + first_row + 8 * t;
#pragma unroll
            for (int j = 0; j < Tile::groups; j += 4) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    words[i] = 0;
                    if (j + i >= Tile::groups) continue;
                    float low = sums[4 * (j + i) + 2 * half], high = sums[4 * (j + i) + 2 * half + 1];
                    if (job.bias) {
                        const u32 bias = load_shared(biases + 16 * (j + i) + 4 * t);
                        low += __uint_as_float(bias << 16), high += __uint_as_float(bias & 0xffff0000u);
                    }
                    words[i] = to_bf16x2(low, high);
                }
                const Vec4 whole = transpose(words, t);
                if (token < job.tokens && j + t < groups) *reinterpret_cast<Vec4*>(y + 8 * j) = whole;
            }
        }
    }
}

template <int rows, int decoders, int groups>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    __shared__ u32 first_unit;
    using OwnTile = Tile<rows>;
    const int lane = threadIdx.x & 31, warp = own_warp(), decoding = warp - kMultipliers - 1;

    // Shared memory: the ring (first of all, there, the table's entries), the tensor map, for each multiplying warp a tile's bias, barriers, table, for
    // each decoding warp two staging buffers for each row group of a unit.
    const u32 start = u32(__cvta_generic_to_shared(shared_bytes)), base = (start + 1023) & ~1023u;
    u8* shared = shared_bytes + (base - start);
    const u32 map = base + job.ring * OwnTile::slot_bytes, biases = map + kMapBytes, barriers = biases + kMultipliers * OwnTile::bias_bytes;
    u32* table = reinterpret_cast<u32*>(shared + (barriers + 16 * job.ring - base));
    const Relay<OwnTile> relay(geometry, packed, job, base, barriers);

    let_kernel_behind_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < job.ring; ++i) {
            open_barrier(relay.full + 8 * i, 1);
            open_barrier(relay.empty + 8 * i, kCluster * kMultipliers);
        }
        show_barrier();
    }
    const Table<true> decode_table(packed, table, reinterpret_cast<u32*>(shared));
    copy_commit();
    if (warp == kMultipliers) store_shared(map + 4 * lane, job.x_map[lane]);
    await_kernel_before();
    if (threadIdx.x == kMultipliers * kLanes) first_unit = claim(relay.claimed(), decoders);
    decode_table.finish();
    fence_async();   // nobody needs the entries any longer
    await_cluster();

    if (warp < kMultipliers) {
        multiply_tiles(relay, biases + warp * OwnTile::bias_bytes, warp, lane);
    } else if (decoding < 0) {
        place_map(relay.map(), map, job.x, lane);
        bring(relay, lane);
    } else {
        u32* buffers = table + job.table_words + decoding * 2 * groups * job.buffer_words;
        const u32 table_address = u32(__cvta_generic_to_shared(table));
        UnitDecoder<ToTiles<OwnTile, groups>, groups> decoder(ToTiles<OwnTile, groups>(relay), lane, table_address, buffers, job.buffer_words);
        if (packed.shift || packed.has_row_shifts) decoder.template run<true>(first_unit + decoding);
        else decoder.template run<false>(first_unit + decoding);
        decode_prefetched<decoders, groups>(job, decoding, lane, table_address, buffers);
    }
    leave_cluster();
}

// For so many rows of a tile. As many warps decode as leave each thread the registers that the sums need.
#define RELAY_KERNEL(name, Argument, rows, decoders, groups)                                                                      \
    extern "C" __global__ void __cluster_dims__(kCluster) __launch_bounds__((kMultipliers + 1 + decoders) * kLanes, 1) name(    \
        const __grid_constant__ Argument argument) {                                                                              \
        const Product& product = own_product(argument);                                                                           \
        linear<rows, decoders, groups>(product.geometry, product.packed, product.job);                                            \
    }
