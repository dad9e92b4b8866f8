// The fused linear layer on Hopper where warps decode what they multiply, two row groups each: a whole left matrix of 16 rows. See linear.cuh.
//
// A unit of work is 16 rows for each warp of a cluster of blocks, a tile of tokens and a range of stages. A warp decodes stage after stage in
// registers; while a stage is multiplied, the next one's codewords are looked up. Whatever else there is to do, other warps do for it, ahead: they
// bring slabs and x, which arrange.cu has arranged, to rings in shared memory, and open chunks. Sums of several ranges meet in memory. There are two
// ways to multiply: each warp for itself with mma, and for more tokens four warps together with wgmma, which wait for each other at every stage.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"

constexpr int kGroups = 2;                // row groups of a warp
constexpr int kMultipliers = 8;           // warps that multiply, at most
constexpr int kOthers = 4;                // warps that bring slabs, bring x, or open chunks
constexpr int kThreads = (kMultipliers + kOthers) * kLanes;   // leaves 168 registers to each

// For tiles of so many tokens. Numbers that linear_launch.py knows too: kMultipliers, kOthers, pairs, cluster, x_parts.
template <int tokens>
struct WithMma {
    static constexpr bool wgmma = false;
    static constexpr int wide = tokens;
    static constexpr int openers = 3;     // of kOthers; one brings slabs and x
    static constexpr int cluster = 1;     // blocks
    static constexpr int x_parts = 1;
};
template <int tokens>
struct WithWgmma {
    static constexpr bool wgmma = true;
    static constexpr int wide = tokens;
    static constexpr int openers = 2;     // one brings slabs, one x
    static constexpr int cluster = 2;
    static constexpr int pairs = wide >= 128 ? 2 : 4;     // of stages, whose slabs are in shared memory or on their way there
    static constexpr int x_parts = wide == 256 ? 2 : 1;   // slots of the ring of x that a stage takes: a whole one would leave it too few
    // Of a thread that multiplies and of one that does not, together what the block was given.
    static constexpr int registers = 216, few_registers = 72;
    static_assert(kMultipliers * registers + kOthers * few_registers <= (kMultipliers + kOthers) * 168);
};

template <class Way>
__host__ __device__ constexpr u32 stage_bytes() { return Way::wide * 128; }                 // of x
template <class Way>
__host__ __device__ constexpr u32 slot_bytes() { return stage_bytes<Way>() / Way::x_parts; }   // of the ring of x

struct Unit { int tile, tokens, range, first, last; };   // first, last: stages

template <int cluster>
struct Units {
    const Job& job;
    const int stages;

    // Units of this cluster: their numbers.
    __device__ __forceinline__ int first() const { return job.block() / cluster; }
    __device__ __forceinline__ int step() const { return job.blocks / cluster; }
    __device__ __forceinline__ bool has(int index) const { return index < job.units; }
    __device__ __forceinline__ Unit at(int index) const {
        Unit unit;
        const int rest = divide(index, job.by_token_tiles);
        unit.tokens = index - rest * job.token_tiles;
        const int tiles = divide(rest, job.by_ranges);
        unit.tile = tiles * cluster + job.block() % cluster;
        unit.range = rest - tiles * job.ranges;
        unit.first = unit.range * job.stages_per_range;
        unit.last = min(unit.first + job.stages_per_range, stages);
        return unit;
    }
};

__device__ __forceinline__ int first_chunk(const Unit& unit) { return unit.first / kChunkStages; }

// Shared addresses of a block's memory. The ring of pairs of stages has, of each, x where it is multiplied with mma, and each warp's slabs; wgmma's x
// has a ring of its own, since it is read until later.
struct Places {
    u32 pairs, full, empty;      // the ring of pairs, and its barriers
    u32 pair_bytes;
    u32 x, x_full, x_empty;      // the ring of x
    u32 streams;                 // two sides, each with a staging buffer for every row group
    u32 openings;                // two sides of each warp
    u32 ready, free;             // their barriers
    u32 scratch;                 // of an opener: kDealing bytes
};

// How a row group's chunk is opened, in shared memory: for each lane where its streams start (16 bits each), scale_of its row's shift, and its first
// two patches; then, for all of them, where the chunk is, Opened's next_patch and patch, and the stages that have patches, a bit each.
constexpr u32 kOpeningBytes = kLanes * 16 + 16;
constexpr u32 kDealing = kGroups * kLanes * 8;

// The table comes first in shared memory.
__device__ __forceinline__ u32* table_words() {
    extern __shared__ __align__(128) u32 shared_words[];
    return shared_words;
}
__device__ __forceinline__ u32 table_address() { return u32(__cvta_generic_to_shared(table_words())); }

// 8 x 8 words: lane (g, t) has 2 t and 2 t + 1 of row g, and gets them of column g.
__device__ __forceinline__ u32 transposed(u32 words) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(words));
    return result;
}

// A lane's own patches (6.4) of an open chunk, in their order: the next and the one behind it, never both of one pair of stages. The few chunks that
// have more for a lane are left to Opened::mend, as raw ones are.
struct OwnPatches {
    u32 place, change, later;      // place: 4 * stage + step

    __device__ __forceinline__ void apply(Vec4& upper, int stage) const {
        const u32 here = 4 * stage;
        change_if(upper.x, place, here, change);
        change_if(upper.y, place, here + 1, change);
        change_if(upper.z, place, here + 2, change);
        change_if(upper.w, place, here + 3, change);
    }
    __device__ __forceinline__ void go_on(int stage) {
        if (place >= u32(4 * (stage + 1))) return;
        take(later);
        later = kNoPatch;
    }
    __device__ __forceinline__ void take(u32 patch) {
        place = patch >> 14;
        change = (patch & 127) << (8 * (patch >> 7 & 3));
    }
};

// Opens a warp's staged chunks. 6.2, 6.3; as Opened::open.
__device__ __forceinline__ void prepare_openings(const u32 (&at)[kGroups], const int (&size)[kGroups], const u32 (&scale)[kGroups], int stages, u32 opening,
                                                 u32 scratch, int lane) {
    u32 start[kGroups], first[kGroups], end[kGroups], list[kGroups], patch[kGroups], place[kGroups];
    int count[kGroups];
    bool raw[kGroups], is_second[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        const u32 head = load_shared(at[i]), steps = load_shared(at[i] + 4 + (lane & ~3)) >> (8 * (lane & 3));
        if (lane == 0) store_shared(at[i] + 4 * size[i], kNoPatch);   // ends the patches
        store_shared(scratch + (i * kLanes + lane) * 8, Vec2{kNoPatch, kNoPatch});
        const u32 base = head & 8191, unit = head >> 13 & 63;
        first[i] = base + unit * (steps & 15);
        end[i] = min(u32(max(size[i], 1)) * 32, 0xffffu);            // longer ones are raw
        int total;
        start[i] = kHeadWords * 32 + sum_before(int(first[i] + base + unit * (steps >> 4 & 15)), lane, total);
        raw[i] = head == 0 && size[i] >= 1 + 128 * stages;
        count[i] = raw[i] ? 0 : min(int(head >> 19), max(size[i] - kHeadWords, 0));
        list[i] = at[i] + 4 * u32(size[i] - count[i]);
        patch[i] = lane < count[i] ? load_shared(list[i] + 4 * lane) : kNoPatch;
        place[i] = scratch + (i * kLanes + (patch[i] >> 9 & 31)) * 8;
    }
    // Patches find their lanes: the lane writes where its target looks, first come in the first word, else in the second. The chunk is left to
    // Opened::mend where that does not suffice.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
        if (lane < count[i]) store_shared(place[i], u32(lane));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        is_second[i] = lane < count[i] && load_shared(place[i]) != u32(lane);
        if (is_second[i]) store_shared(place[i] + 4, u32(lane));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        bool left = count[i] > kLanes || (is_second[i] && load_shared(place[i] + 4) != u32(lane));
        const Vec2 both = load_shared_vec2(scratch + (i * kLanes + lane) * 8);   // numbers in the list; kNoPatch is the largest
        u32 one = __shfl_sync(kFull, patch[i], min(both.x, both.y) & 31), two = __shfl_sync(kFull, patch[i], max(both.x, both.y) & 31);
        if (both.x == kNoPatch) one = kNoPatch;
        if (both.y == kNoPatch) two = kNoPatch;
        left |= two != kNoPatch && two >> 17 <= one >> 17;
        const bool mended = raw[i] || __any_sync(kFull, left);
        const u32 patched = mended ? kFull : __reduce_or_sync(kFull, lane < count[i] ? 1u << (patch[i] >> 16 & 15) : 0);
        if (mended) one = two = kNoPatch;
        const u32 own = opening + i * kOpeningBytes;
        store_shared(own + 16 * lane, Vec4{min(start[i], end[i]) | min(start[i] + first[i], end[i]) << 16, scale[i], one, two});
        if (lane == 0)
            store_shared(own + 16 * kLanes, Vec4{at[i], raw[i] ? 0 : list[i], raw[i] ? 0 : mended ? load_shared(list[i]) : kNoPatch, patched});
    }
    __syncwarp();
}

// The row groups of a block's warps.
struct Rows {
    const int block_groups, row_groups;

    // In place of a row group that does not exist, the last one.
    __device__ __forceinline__ int group(const Unit& unit, int warp, int i) const {
        return min(unit.tile * block_groups + kGroups * warp + i, row_groups - 1);
    }
};

// Stages and opens chunks, one behind the other, for some of a block's warps: `first`, and then each Way::openers further.
template <class Way>
struct Opener {
    const Units<Way::cluster>& units;
    const Rows& rows;
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    const Places& at;
    const int first, served, warps, lane;
    Unit unit;
    int index, chunk;              // of the chunks at hand, later of those that come next
    bool more;                     // whether there are any
    u32 offsets = 0;               // of these, lanes 4 k to 4 k + 3: start and stop of both row groups of the k-th warp

    __device__ __forceinline__ Opener(const Units<Way::cluster>& units, const Rows& rows, const Geometry& geometry, const Packed& packed, const Job& job,
                                      const Places& at, int first, int warps, int lane)
        : units(units), rows(rows), geometry(geometry), packed(packed), job(job), at(at), first(first),
          served(first < warps ? (warps - 1 - first) / Way::openers + 1 : 0), warps(warps), lane(lane), index(units.first()), more(served > 0 && units.has(index)) {
        if (!more) return;
        unit = units.at(index);
        chunk = first_chunk(unit);
        load_offsets();
        stage(0);
    }
    // The first chunks, before the barriers are open.
    __device__ __forceinline__ void begin() {
        if (more) open(0, false);
    }
    __device__ __forceinline__ void run() {
        if (served > 0 && units.has(units.first())) arrive_for_all();
#pragma unroll 1
        for (u32 number = 1; more; ++number) {
            const u32 side = number & 1;
#pragma unroll 1
            for (int k = 0; k < served; ++k) await(at.free + 16 * warp(k) + 8 * side, (number >> 1 & 1) ^ 1);
            stage(side);
            open(side, true);
        }
    }

   private:
    __device__ __forceinline__ int warp(int k) const { return first + k * Way::openers; }
    __device__ __forceinline__ u32 buffer(int k, u32 side, int i) const { return at.streams + ((side * warps + warp(k)) * kGroups + i) * 4 * job.buffer_words; }
    __device__ __forceinline__ void arrive_for_all() const {
        if (lane < served) arrive(at.ready + 16 * warp(lane));
    }
    __device__ __forceinline__ void load_offsets() {
        if (lane >= 4 * served) return;
        const size_t place = size_t(rows.group(unit, warp(lane >> 2), lane >> 1 & 1)) * geometry.chunks_per_row_group + chunk + (lane & 1);
        offsets = load_u32(packed.data + packed.offsets + 4 * place);
    }
    __device__ __forceinline__ void stage(u32 side) const {
#pragma unroll 1
        for (int k = 0; k < served; ++k)
#pragma unroll
            for (int i = 0; i < kGroups; ++i)
                stage_streams(packed, buffer(k, side, i), __shfl_sync(kFull, offsets, 4 * k + 2 * i), __shfl_sync(kFull, offsets, 4 * k + 2 * i + 1), lane);
        copy_commit();
    }
    // The chunks that are staged; meanwhile the offsets of those behind them are loaded.
    __device__ __forceinline__ void open(u32 side, bool arrives) {
        const u32 present = offsets;
        const Unit here = unit;
        const int stages = min(kChunkStages, geometry.stages - chunk * kChunkStages);
        if (++chunk * kChunkStages >= unit.last) {
            index += units.step();
            more = units.has(index);
            if (more) {
                unit = units.at(index);
                chunk = first_chunk(unit);
            }
        }
        if (more) load_offsets();
        int shift[2] = {packed.shift, packed.shift};   // of the first warp's row groups
        auto load_shifts = [&](int k) {
            if (packed.has_row_shifts)
#pragma unroll
                for (int i = 0; i < kGroups; ++i)
                    shift[i] = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[rows.group(here, warp(k), i) * 8 + (lane >> 2)];
        };
        load_shifts(0);
        copy_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < served; ++k) {
            u32 chunks[kGroups], scales[kGroups];
            int sizes[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const StagedPlace place = StreamUnits(packed, __shfl_sync(kFull, present, 4 * k + 2 * i), __shfl_sync(kFull, present, 4 * k + 2 * i + 1)).place;
                chunks[i] = buffer(k, side, i) + 4 * place.begin;
                sizes[i] = place.size;
                scales[i] = scale_of(shift[i]);
            }
            if (k + 1 < served) load_shifts(k + 1);
            prepare_openings(chunks, sizes, scales, stages, at.openings + (warp(k) * 2 + side) * (kGroups * kOpeningBytes), at.scratch, lane);
            if (arrives && lane == 0) arrive(at.ready + 16 * warp(k) + 8 * side);
        }
    }
};

// Bring what warps multiply to shared memory, pair of stages by pair, unit after unit. By a warp each.
template <class Way>
struct Supply {
    const Units<Way::cluster>& units;
    const Rows& rows;
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    const Places& at;
    const int lane, slots;

    // Slabs for the whole ring of pairs, while x may not be there yet.
    __device__ __forceinline__ void begin() const {
        int number = 0;
        for_each_pair([&](const Unit& unit, int pair) {
            if (number == slots) return false;
            bring_slabs(unit, pair, number++);
            return true;
        });
    }
    // The slabs behind those; with mma x too.
    __device__ __forceinline__ void run() const {
        if constexpr (!Way::wgmma) await_kernel_before();
        RingPlace place{0, 0};
        int number = 0;
        for_each_pair([&](const Unit& unit, int pair) {
            if (number >= slots) {
                await(at.empty + 8 * place.slot, place.parity ^ 1);
                bring_slabs(unit, pair, place.slot);
            }
            ++number;
            if constexpr (!Way::wgmma) {
                const XStages x(*this, unit, pair);
                if (lane == 0)
                    copy_bulk(at.pairs + place.slot * at.pair_bytes + (x.first & 1) * stage_bytes<Way>(), x.source, x.count * stage_bytes<Way>(),
                              at.full + 8 * place.slot);
                __syncwarp();
            }
            place.advance(slots);
            return true;
        });
    }
    // For wgmma; each block of a cluster brings a part to all of them. All lanes wait, so that the warp stays together.
    __device__ __forceinline__ void run_x() const {
        constexpr u32 bytes = slot_bytes<Way>(), part = bytes / Way::cluster;
        await_kernel_before();
        RingPlace place{0, 0};
        const u32 own = block_of_cluster() * part;
        for_each_pair([&](const Unit& unit, int pair) {
            const XStages x(*this, unit, pair);
            for (int i = 0; i < x.count * Way::x_parts; ++i) {
                await(at.x_empty + 8 * place.slot, place.parity ^ 1);
                if (lane == 0) {
                    const u32 full = at.x_full + 8 * place.slot;
                    expect(full, bytes);
                    copy_bulk_to(at.x + place.slot * bytes + own, x.source + i * bytes + own, part, full, (1 << Way::cluster) - 1);
                }
                __syncwarp();
                place.advance(job.ring);
            }
            return true;
        });
    }

   private:
    // Those of a pair that belong to its unit, as arrange.cu has left them.
    struct XStages {
        int first, count;
        const u8* source;

        __device__ __forceinline__ XStages(const Supply& supply, const Unit& unit, int pair)
            : first(max(2 * pair, unit.first)), count(max(min(2 * pair + 2, unit.last) - first, 0)),
              source(reinterpret_cast<const u8*>(supply.job.x) + (size_t(unit.tokens) * supply.units.stages + first) * stage_bytes<Way>()) {}
    };
    // From a chunk's start, even where a unit starts later. Until one returns false.
    template <class Bring>
    __device__ __forceinline__ void for_each_pair(const Bring& bring) const {
        for (int index = units.first(); units.has(index); index += units.step()) {
            const Unit unit = units.at(index);
            for (int pair = first_chunk(unit) * (kChunkStages / 2); 2 * pair < unit.last; ++pair)
                if (!bring(unit, pair)) return;
        }
    }
    // Of the row groups that exist.
    __device__ __forceinline__ void bring_slabs(const Unit& unit, int pair, int slot) const {
        const int first = unit.tile * rows.block_groups, count = min(rows.block_groups, geometry.row_groups - first);
        const size_t group_bytes = slab_offset(geometry.stages, 1, 0);
        const u8* source = packed.data + packed.planes + first * group_bytes + pair * kSlabBytes + 16 * lane;
        u32 target = at.pairs + slot * at.pair_bytes + (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + 16 * lane;
#pragma unroll 4
        for (int i = 0; i < count; ++i, source += group_bytes, target += kSlabBytes) {
            if (lane < kSlabBytes / 16 - 2 * kLanes) copy_async(target + 32 * kLanes, source + 32 * kLanes);
            copy_async(target, source);
            copy_async(target + 16 * kLanes, source + 16 * kLanes);
        }
        copies_arrive(at.full + 8 * slot);
    }
};

// A warp's sums of a unit to y, or to where those of the other ranges are; who brings the last adds them, in order.
template <int wide>
__device__ __forceinline__ void finish_unit(const Geometry& geometry, const Job& job, const Unit& unit, int first_group, int lane, float (&sums)[wide / 2]) {
    constexpr int count = wide / 2;
    if (job.ranges > 1) {
        const int meeting = first_group / kGroups * job.token_tiles + unit.tokens;
        float* parts = job.parts + size_t(meeting) * job.ranges * (count * kLanes) + lane;
        float* own = parts + unit.range * (count * kLanes);
#pragma unroll
        for (int i = 0; i < count; ++i) __stcg(own + i * kLanes, sums[i]);
        __threadfence();
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = atomicAdd(job.done + meeting, 1);
        if (int(__shfl_sync(kFull, before, 0)) + 1 < job.ranges) return;
        __threadfence();
#pragma unroll
        for (int i = 0; i < count; ++i) sums[i] = __ldcg(parts + i * kLanes);
#pragma unroll 1
        for (int range = 1; range < job.ranges; ++range)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] += __ldcg(parts + (range * count + i) * kLanes);
    }
    // Two lanes swap, so that each has four rows of a token, lanes with even t of the first row group and others of the second.
    const int g = lane >> 2, t = lane & 3, odd = t & 1;
    float bias[kGroups] = {};
    if (job.bias)
#pragma unroll
        for (int h = 0; h < kGroups; ++h)
            bias[h] = __uint_as_float(u32(job.bias[8 * min(first_group + h, geometry.row_groups - 1) + g]) << 16);
    const bool exists = first_group + odd < geometry.row_groups;
    const int token = unit.tokens * wide + g;
    u16* target = job.y + size_t(token) * geometry.rows + 8 * (first_group + odd) + 4 * (t >> 1);
#pragma unroll
    for (int j = 0; j < wide / 8; ++j, target += 8 * size_t(geometry.rows)) {
        u32 words[kGroups];
#pragma unroll
        for (int h = 0; h < kGroups; ++h) {
            float first = sums[4 * j + 2 * h], second = sums[4 * j + 2 * h + 1];
            if (job.bias) first += bias[h], second += bias[h];
            words[h] = transposed(to_bf16x2(first, second));
        }
        const u32 other = __shfl_xor_sync(kFull, odd ? words[0] : words[1], 1);
        const Vec2 own = odd ? Vec2{other, words[1]} : Vec2{words[0], other};
        if (exists && token + 8 * j < job.tokens) *reinterpret_cast<Vec2*>(target) = own;
    }
}

// Keeps a number in its register: the compiler would rather load or compute it again at every stage.
template <class Number>
__device__ __forceinline__ void keep(Number& number) { asm volatile("" : "+r"(number)); }

template <class Way>
__device__ __forceinline__ void decode_and_multiply(const Units<Way::cluster>& units, const Rows& rows, const Geometry& geometry, const Packed& packed, const Job& job,
                                                    const Places& at, int warp, int lane) {
    constexpr int wide = Way::wide, count = wide / 2;
    u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    const u32 table = __reduce_or_sync(kFull, table_address());   // in a uniform register, which loads add to another
    u32 slabs = (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + warp * (kGroups * kSlabBytes), sign_at = slabs + 4 * lane, raw_at = slabs + kSignBytes + 16 * lane;
    u32 right_at[2] = {u32(lane >> 2) * 128 + ((lane & 7) << 4), u32(lane >> 2) * 128 + (((lane & 7) ^ 4) << 4)};   // mma's, in a stage of x
    int slots, ring = job.ring;
    if constexpr (Way::wgmma) slots = Way::pairs;
    else slots = job.ring;
    keep(common), keep(sign_at), keep(raw_at), keep(right_at[0]), keep(right_at[1]), keep(slots), keep(ring);
    float sums[count];
    u32 weights[4][4];                   // left matrices, by step
    Opened chunk[kGroups];
    OwnPatches patches[kGroups];
    RingPlace pairs{0, 0}, x{0, 0};
    u32 used[2] = {};                    // barriers of the slots of x that wgmma reads
    u32 chunks = 0;
    auto release_x = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (used[i] && lane < Way::cluster) arrive_at(used[i], lane);
            used[i] = 0;
        }
    };
#pragma unroll 1
    for (int index = units.first(); units.has(index); index += units.step()) {
        const Unit unit = units.at(index);
        const int first_group = unit.tile * rows.block_groups + kGroups * warp;
        u32 add = 0;
        if constexpr (!Way::wgmma)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] = 0;
#pragma unroll 1
        for (int from = first_chunk(unit) * kChunkStages; from < unit.last; from += kChunkStages) {
            const int stages = min(kChunkStages, geometry.stages - from), stop = min(stages, unit.last - from), start = unit.first - from;
            const u32 side = chunks & 1, opening = at.openings + (2 * warp + side) * (kGroups * kOpeningBytes);
            await(at.ready + 16 * warp + 8 * side, chunks >> 1 & 1);
            ++chunks;
            u32 scale[kGroups];
            u32 patched[kGroups];        // stages that have patches, from the next pair on
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const Vec4 own = load_shared_vec4(opening + i * kOpeningBytes + 16 * lane), all = load_shared_vec4(opening + i * kOpeningBytes + 16 * kLanes);
                chunk[i].streams[0].start(all.x, own.x & 0xffff);
                chunk[i].streams[1].start(all.x, own.x >> 16);
                scale[i] = own.y;
                chunk[i].next_patch = all.y, chunk[i].patch = all.z, patched[i] = all.w;
                patches[i].take(own.z);
                patches[i].later = own.w;
            }
            Vec4 upper[kGroups];
            LookUps begun[kGroups];
            auto begin = [&] {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) begun[i] = chunk[i].begin(table, byte_mask);
            };
            auto go_on = [&] {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) upper[i] = chunk[i].go_on(begun[i], table, byte_mask);
            };
            // bit: the stage's in `patched`.
            auto complete = [&](int stage, u32 bit) {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) chunk[i].complete(upper[i], common);
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    if (!(patched[i] & bit)) continue;
                    patches[i].apply(upper[i], stage);
                    patches[i].go_on(stage);
                    chunk[i].mend(upper[i], stage, lane, [&] {
                        int count = stages;
                        keep(count);     // here, in rare work
                        return RawChunk{load_shared(opening + i * kOpeningBytes + 16 * kLanes), count};
                    });
                }
            };
            // What is not looked up of a stage is loaded while the one before is completed.
            u32 pair, signs[kGroups];
            Vec4 raw[kGroups];
            auto load_raw = [&](int half) {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) raw[i] = load_shared_vec4(pair + raw_at + i * kSlabBytes + half * kStageBytes);
            };
            auto open_pair = [&] {
                pair = at.pairs + pairs.slot * at.pair_bytes;
                await(at.full + 8 * pairs.slot, pairs.parity);
#pragma unroll
                for (int i = 0; i < kGroups; ++i) signs[i] = load_shared(pair + sign_at + i * kSlabBytes);
                load_raw(0);
            };
            auto leave_pair = [&] {
                __syncwarp();
                if (lane == 0) arrive(at.empty + 8 * pairs.slot);
                pairs.advance(slots);
            };
            begin();
            go_on();
            open_pair();
            complete(0, 1);
            bool x_is_there = Way::wgmma && test(at.x_full + 8 * x.slot, x.parity);
#pragma unroll 1
            for (int stage = 0; stage < stop; stage += 2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (half && stage + 1 >= stop) break;
                    const bool counts = stage + half >= start;
                    auto assemble = [&](int q, u32 raw0, u32 top0, u32 raw1, u32 top1) {
                        top0 = and_or(signs[0] << (4 * half + q), kSignMask, top0);
                        top1 = and_or(signs[1] << (4 * half + q), kSignMask, top1);
                        weights[q][0] = unshift(__byte_perm(raw0, top0, 0x5140), scale[0]);
                        weights[q][1] = unshift(__byte_perm(raw1, top1, 0x5140), scale[1]);
                        weights[q][2] = unshift(__byte_perm(raw0, top0, 0x7362), scale[0]);
                        weights[q][3] = unshift(__byte_perm(raw1, top1, 0x7362), scale[1]);
                    };
                    begin();             // the stage behind; behind a chunk's last there is nothing, and nobody reads it
                    const Vec4 tops[kGroups] = {upper[0], upper[1]};
                    auto assemble_step = [&](int q) {
                        if (q == 0) assemble(0, raw[0].x, tops[0].x, raw[1].x, tops[1].x);
                        if (q == 1) assemble(1, raw[0].y, tops[0].y, raw[1].y, tops[1].y);
                        if (q == 2) assemble(2, raw[0].z, tops[0].z, raw[1].z, tops[1].z);
                        if (q == 3) assemble(3, raw[0].w, tops[0].w, raw[1].w, tops[1].w);
                    };
                    if constexpr (Way::wgmma) {
                        wgmma_wait<0>();     // nobody reads the weights any longer
                        release_x();
                        assemble_step(0);
                        assemble_step(1);
                        go_on();
                        assemble_step(2);
                        assemble_step(3);
                        RingPlace next = x;
                        u64 right[Way::x_parts];
#pragma unroll
                        for (int part = 0; part < Way::x_parts; ++part) {
                            if (counts && (part || !x_is_there)) await(at.x_full + 8 * next.slot, next.parity);
                            right[part] = describe<128 / Way::x_parts>(at.x + next.slot * slot_bytes<Way>(), 1024 / Way::x_parts);
                            if (counts) used[part] = at.x_empty + 8 * next.slot;
                            next.advance(ring);
                        }
                        wgmma_fence();
#pragma unroll
                        for (int q = 0; q < 4; ++q)
                            multiply_add(sums, weights[q], right[q * Way::x_parts / 4] + q % (4 / Way::x_parts) * 32 / 16, q || add);
                        wgmma_commit();
                        if (counts) add = 1, x = next;   // else these sums are of anything, and forgotten at the next stage
                        x_is_there = test(at.x_full + 8 * x.slot, x.parity);
                    } else if (__builtin_expect(counts, true)) {
                        Vec4 right[wide / 8];
                        auto load_right = [&](int h) {
#pragma unroll
                            for (int j = 0; j < wide / 8; ++j) right[j] = load_shared_vec4(pair + right_at[h] + half * stage_bytes<Way>() + j * 1024);
                        };
                        auto step = [&](int q) {
                            assemble_step(q);
#pragma unroll
                            for (int j = 0; j < wide / 8; ++j)
                                multiply(sums + 4 * j, weights[q], q & 1 ? right[j].z : right[j].x, q & 1 ? right[j].w : right[j].y);
                        };
                        load_right(0);
                        step(0);
                        go_on();
                        step(1);
                        load_right(1);
                        step(2);
                        step(3);
                    } else {
                        go_on();
                    }
                    if (half == 0) load_raw(1);
                    if (half == 1 || stage + 1 >= stop) leave_pair();
                    if (half == 1 && stage + 2 < stop) open_pair();
                    complete(stage + half + 1, 2 << half);
                }
#pragma unroll
                for (int i = 0; i < kGroups; ++i) patched[i] = u32(int(patched[i]) >> 2);
            }
            __syncwarp();
            if (lane == 0) arrive(at.free + 16 * warp + 8 * side);
        }
        if constexpr (Way::wgmma) {
            wgmma_wait<0>();
            pin(sums);
            release_x();
        }
        finish_unit<wide>(geometry, job, unit, first_group, lane, sums);
    }
}

template <class Way>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    int lane = threadIdx.x & 31;
    keep(lane);
    const int warp = __shfl_sync(kFull, threadIdx.x >> 5, 0), warps = (blockDim.x >> 5) - kOthers;
    const int opener = max(warp - warps - (kOthers - Way::openers), -1);   // its number; those of other warps are negative
    int slots;
    if constexpr (Way::wgmma) slots = Way::pairs;
    else slots = job.ring;

    // Shared memory: table, the ring of x, the ring of pairs, two sides of streams (in the second, first of all, the table's entries), openings of each
    // warp, openers' scratch, barriers.
    const u32 side_bytes = warps * kGroups * 4 * job.buffer_words;
    Places at;
    at.x = (table_address() + 4 * job.table_words + 1023) & ~1023u;
    at.pairs = at.x + 4 * job.x_words;
    at.pair_bytes = (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + warps * (kGroups * kSlabBytes);
    at.streams = at.pairs + slots * at.pair_bytes;
    at.openings = at.streams + side_bytes + max(side_bytes, u32(4 * packed.symbols + 15) & ~15u);
    at.scratch = at.openings + warps * (2 * kGroups * kOpeningBytes) + max(opener, 0) * kDealing;
    at.full = at.scratch + (Way::openers - max(opener, 0)) * kDealing;
    at.empty = at.full + 8 * slots;
    at.ready = at.empty + 8 * slots;
    at.free = at.ready + 16 * warps;
    at.x_full = at.free + 16 * warps;
    at.x_empty = at.x_full + 8 * job.ring;

    let_kernel_behind_start();
    const Units<Way::cluster> units{job, geometry.stages};
    const Rows rows{kGroups * warps, geometry.row_groups};
    const Supply<Way> supply{units, rows, geometry, packed, job, at, lane, slots};
    Opener<Way> chunks(units, rows, geometry, packed, job, at, opener >= 0 ? opener : warps, warps, lane);
    const Table<true> decode_table(packed, table_words(), table_words() + (at.streams + side_bytes - table_address()) / 4);
    copy_commit();
    if (warp == warps) {
        if (lane == 0) {
            for (int i = 0; i < slots; ++i) {
                open_barrier(at.full + 8 * i, kLanes + !Way::wgmma);
                open_barrier(at.empty + 8 * i, warps);
            }
            for (int i = 0; i < 4 * warps; ++i) open_barrier(at.ready + 8 * i, 1);   // and those of `free`
            if constexpr (Way::wgmma)
                for (int i = 0; i < job.ring; ++i) {
                    open_barrier(at.x_full + 8 * i, 1);
                    open_barrier(at.x_empty + 8 * i, Way::cluster * warps);
                }
            show_barrier();
        }
        __syncwarp();
        supply.begin();
        copy_commit();
    }
    chunks.begin();
    decode_table.build();
    if (warp == warps) copy_wait<1>();                 // not for slabs
    else copy_wait<0>();
    __syncthreads();
    if constexpr (Way::cluster > 1) await_cluster();   // their barriers are open
    if (warp < warps) {
        if constexpr (Way::wgmma) take_registers<Way::registers>();
        decode_and_multiply<Way>(units, rows, geometry, packed, job, at, warp, lane);
    } else {
        if constexpr (Way::wgmma) give_registers<Way::few_registers>();
        if (warp == warps) supply.run();
        else if (opener >= 0) chunks.run();
        else if constexpr (Way::wgmma) supply.run_x();
        __syncwarp();
    }
    if constexpr (Way::cluster > 1) await_cluster();   // nothing comes from the others any longer
}

#define PAIRS_KERNEL(name, Argument, Way, wide)                                                                                           \
    extern "C" __global__ void __cluster_dims__(Way<wide>::cluster) __launch_bounds__(kThreads, 1) name(                                 \
        const __grid_constant__ Argument argument) {                                                                                      \
        const Product& product = own_product(argument);                                                                                   \
        linear<Way<wide>>(product.geometry, product.packed, product.job);                                                                  \
    }
