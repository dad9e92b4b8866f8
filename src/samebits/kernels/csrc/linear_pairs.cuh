// The fused linear layer on Hopper where warps decode what they multiply: two row groups each, a whole left matrix of 16 rows, or one. See linear.cuh.
//
// A unit of work is 16 or 8 rows for each warp of a cluster of blocks, a tile of tokens and a range of stages. A warp decodes stage after stage in
// registers; while a stage is multiplied, the next one's codewords are looked up. Whatever else there is to do, other warps do for it, ahead: they
// bring slabs and x to rings in shared memory, where x is as arrange.cu arranges it, and open chunks. Sums of several ranges meet in memory. There are two
// ways to multiply: each warp for itself with mma, and for more tokens four warps together with wgmma, which wait for each other at every stage.
//
// With mma each block has a share of all stages, which linear/pairs.py has cut. Where a cut lies inside a range, the block behind goes on with the sums. So a
// block starts with its last unit and goes back to its first: what it takes over there has long been left for it.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"

constexpr int kOthers = 4;                // warps that bring slabs, bring x, or open chunks

// For so many tokens at once. Numbers that linear/pairs.py knows too: kOthers, wide, multipliers, pairs, cluster, x_parts, arranged.
template <int tokens, int row_groups>
struct WithMma {
    static constexpr bool wgmma = false;
    static constexpr int wide = tokens < 8 ? 8 : tokens;    // of a tile
    static constexpr int groups = row_groups;   // of a warp; with one the lower half of mma's left matrix is anything
    static constexpr int multipliers = wide == 64 ? 8 : groups == 1 ? 16 : wide == 32 ? 11 : 12;   // warps, at most; leaves at least 96 or 128 registers to each thread
    static constexpr int openers = 3;     // of kOthers; one brings slabs and x
    static constexpr int cluster = 1;     // blocks
    static constexpr int x_parts = 1;
    static constexpr bool arranged = tokens > 4;   // x, by arrange.cu; fewer tokens are on their way to shared memory, four columns by four
};
template <int tokens>
struct WithWgmma {
    static constexpr bool wgmma = true;
    static constexpr int wide = tokens;
    static constexpr int groups = 2;
    static constexpr int multipliers = 8;
    static constexpr int openers = 2;     // one brings slabs, one x
    static constexpr int cluster = 2;
    static constexpr int pairs = wide > 64 ? 2 : 4;     // of stages, whose slabs are in shared memory or on their way there
    static constexpr int x_parts = wide == 256 ? 2 : 1;   // slots of the ring of x that a stage takes: a whole one would leave it too few
    static constexpr bool arranged = true;
    // Of a thread that multiplies and of one that does not, together what the block was given.
    static constexpr int registers = 216, few_registers = 72;
    static_assert(multipliers * registers + kOthers * few_registers <= (multipliers + kOthers) * 168);
};

template <int tokens> using WithMmaOne = WithMma<tokens, 1>;
template <int tokens> using WithMmaTwo = WithMma<tokens, 2>;

template <class Way>
__host__ __device__ constexpr u32 stage_bytes() { return Way::wide * 128; }                 // of x
template <class Way>
__host__ __device__ constexpr u32 slot_bytes() { return stage_bytes<Way>() / Way::x_parts; }   // of the ring of x

struct Unit {
    int tile, tokens, range, first, last;   // first, last: stages
    bool takes, gives;                      // the sums at its start, those at its end
    int matrix;                             // linear_routed.cuh has many: the row group that its own begins with
    u32 octet, octets;                      // and x for each: the first of its octets of rows, and how many
};

// Units of a cluster of blocks; with mma those of the block's share, from the last to the first.
template <class Way>
struct Units {
    const Job& job;
    const int stages;

    __device__ __forceinline__ int first() const { return Way::wgmma ? job.block() / Way::cluster : int(end() - 1) >> kInRangeBits; }
    __device__ __forceinline__ int step() const { return Way::wgmma ? job.blocks / Way::cluster : -1; }
    __device__ __forceinline__ bool has(int index) const { return Way::wgmma ? index < job.units : index >= int(begin() >> kInRangeBits); }
    __device__ __forceinline__ Unit at(int index) const {
        Unit unit{};
        int number = index;
        if constexpr (Way::wgmma) {
            number = divide(index, job.by_token_tiles);
            unit.tokens = index - number * job.token_tiles;
        }
        const int tile = divide(number, job.by_ranges);
        unit.tile = tile * Way::cluster + job.block() % Way::cluster;
        unit.range = number - tile * job.ranges;
        unit.first = unit.range * job.stages_per_range;
        unit.last = min(unit.first + job.stages_per_range, stages);
        if constexpr (!Way::wgmma) {
            constexpr u32 mask = (1u << kInRangeBits) - 1;
            unit.gives = index == int(end() >> kInRangeBits);   // else that unit is the next block's
            if (unit.gives) unit.last = unit.first + (end() & mask);
            unit.takes = index == int(begin() >> kInRangeBits) && begin() & mask;
            if (unit.takes) unit.first += begin() & mask;
        }
        return unit;
    }
    __device__ __forceinline__ int row_groups(const Geometry& geometry) const { return geometry.row_groups; }   // of a matrix
    // Of x at a unit's first column, and bytes of a stage of it.
    __device__ __forceinline__ const u8* x_of(const Unit& unit) const {
        return reinterpret_cast<const u8*>(job.x) + size_t(unit.tokens) * stages * stage_bytes<Way>();
    }
    static __device__ __forceinline__ constexpr u32 x_stage_bytes(const Unit&) { return stage_bytes<Way>(); }

   private:
    // Cuts around the share.
    __device__ __forceinline__ u32 begin() const { return uniform(job.cuts[job.block()]); }
    __device__ __forceinline__ u32 end() const { return uniform(job.cuts[job.block() + 1]); }
};

__device__ __forceinline__ int first_chunk(const Unit& unit) { return unit.first / kChunkStages; }

// Shared addresses of a block's memory. The ring of pairs of stages has, of each, x where it is multiplied with mma, and each warp's slabs; wgmma's x
// has a ring of its own, since it is read until later.
struct Places {
    u32 pairs, full, empty;      // the ring of pairs, and its barriers
    u32 pair_bytes;
    int slots;                   // of the ring of pairs
    u32 x, x_full, x_empty;      // the ring of x
    u32 streams;                 // two sides, each with a staging buffer for every row group
    u32 openings;                // two sides of each warp
    u32 ready, free;             // their barriers
    u32 scratch;                 // dealing_bytes of each opener

    __device__ __forceinline__ Places in_uniform_registers() const {
        return {uniform(pairs), uniform(full), uniform(empty), uniform(pair_bytes), int(uniform(slots)), uniform(x), uniform(x_full), uniform(x_empty),
                uniform(streams), uniform(openings), uniform(ready), uniform(free), uniform(scratch)};
    }
};

// How a row group's chunk is opened, in shared memory: for each lane where its streams start (16 bits each), scale_of its row's shift, and its first
// two patches; then, for all of them, where the chunk is, Opened's next_patch and patch, and the stages that have patches, a bit each.
constexpr u32 kOpeningBytes = kLanes * 16 + 16;
template <class Way>
__host__ __device__ constexpr u32 dealing_bytes() { return Way::groups * kLanes * 8; }

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
template <int groups>
__device__ __forceinline__ void prepare_openings(const u32 (&at)[groups], const int (&size)[groups], const u32 (&scale)[groups], int stages, u32 opening,
                                                 u32 scratch, int lane) {
    u32 start[groups], first[groups], end[groups], list[groups], patch[groups], place[groups];
    int count[groups];
    bool raw[groups], is_second[groups];
#pragma unroll
    for (int i = 0; i < groups; ++i) {
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
    for (int i = 0; i < groups; ++i)
        if (lane < count[i]) store_shared(place[i], u32(lane));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        is_second[i] = lane < count[i] && load_shared(place[i]) != u32(lane);
        if (is_second[i]) store_shared(place[i] + 4, u32(lane));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < groups; ++i) {
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
            store_shared(own + 16 * kLanes, Vec4{at[i], raw[i] ? Opened::raw_chunk(at[i], stages) : list[i], raw[i] ? 0 : mended ? load_shared(list[i]) : kNoPatch, patched});
    }
    __syncwarp();
}

// The row groups of a block's warps.
template <int groups>
struct Rows {
    const int block_groups, row_groups;   // row_groups: of a matrix

    // In place of a row group that does not exist, the last one.
    __device__ __forceinline__ int group(const Unit& unit, int warp, int i) const {
        return unit.matrix + min(unit.tile * block_groups + groups * warp + i, row_groups - 1);
    }
};

// What a block's warps have in common.
template <class Way>
struct Block {
    const Units<Way> units;
    const Rows<Way::groups> rows;
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    const Places at;
    const int warps, lane;         // warps: that multiply
};

// What becomes of a warp's sums at a unit's end. Where there is but one range they are the product. Else they meet with those of the other ranges, in
// memory, and who brings the last adds them all in order; or they are left for the block behind, with a flag. Behind the ranges' meetings there is a place
// of that kind for each warp of each block.
template <class Way>
struct Endings {
    static constexpr int wide = Way::wide, count = wide / 2, groups = Way::groups;
    using Met = Meeting<1, count>;
    const Block<Way>& block;

    __device__ __forceinline__ void begin(const Unit&) const {}
    __device__ __forceinline__ void end(const Unit& unit, int warp, float (&sums)[count]) const {
        const Job& job = block.job;
        auto& own = reinterpret_cast<float (&)[1][count]>(sums);
        if (unit.gives) {
            const Met left = handed(job.block(), warp);
            left.bring(0, own);
            left.raise(flag(job.block(), warp));
            return;
        }
        if (job.ranges > 1) {
            const int meeting = (unit.tile * block.warps + warp) * job.token_tiles + unit.tokens;   // of a warp's row groups
            const Met met{job.parts + size_t(meeting) * job.ranges * (count * kLanes), block.lane};
            met.bring(unit.range, own);
            if (!met.is_last(job.done + meeting, job.ranges)) return;
            met.add(job.ranges, own);
        }
        finish(unit, warp, sums);
    }
    // What the block in front has left, or will: it has begun, for blocks begin in the order of their numbers.
    __device__ __forceinline__ void take(int warp, float (&sums)[count]) const {
        const int before = block.job.block() - 1;
        Met::await_flag(flag(before, warp));
        handed(before, warp).add(1, reinterpret_cast<float (&)[1][count]>(sums));
    }
    // To y. With two row groups two lanes swap, so that each has four rows of a token, lanes with even t of the first row group and others of the second.
    // With one, each has two rows of a token.
    __device__ __forceinline__ void finish(const Unit& unit, int warp, const float (&sums)[count]) const {
        const Geometry& geometry = block.geometry;
        const Job& job = block.job;
        const int g = block.lane >> 2, t = block.lane & 3, odd = groups == 2 ? t & 1 : 0;
        const int first_group = unit.tile * block.rows.block_groups + groups * warp;
        float bias[groups] = {};
        if (job.bias)
#pragma unroll
            for (int h = 0; h < groups; ++h)
                bias[h] = __uint_as_float(u32(job.bias[8 * min(first_group + h, geometry.row_groups - 1) + g]) << 16);
        const bool exists = first_group + odd < geometry.row_groups;
        const int token = unit.tokens * wide + g;
        u16* target = job.y + size_t(token) * geometry.rows + 8 * (first_group + odd) + (groups == 2 ? 4 * (t >> 1) : 2 * t);
#pragma unroll
        for (int j = 0; j < wide / 8; ++j, target += 8 * size_t(geometry.rows)) {
            u32 words[groups];
#pragma unroll
            for (int h = 0; h < groups; ++h) {
                float low = sums[4 * j + 2 * h], high = sums[4 * j + 2 * h + 1];
                if (job.bias) low += bias[h], high += bias[h];
                words[h] = transposed(to_bf16x2(low, high));
            }
            const bool stores = exists && token + 8 * j < job.tokens;
            if constexpr (groups == 2) {
                const u32 other = __shfl_xor_sync(kFull, odd ? words[0] : words[1], 1);
                const Vec2 own = odd ? Vec2{other, words[1]} : Vec2{words[0], other};
                if (stores) *reinterpret_cast<Vec2*>(target) = own;
            } else if (stores) {
                *reinterpret_cast<u32*>(target) = words[0];
            }
        }
    }

   private:
    // With mma: the parts of all meetings.
    __device__ __forceinline__ int all_parts() const { return block.job.ranges > 1 ? block.job.units * block.warps : 0; }
    __device__ __forceinline__ Met handed(int number, int warp) const {
        return {block.job.parts + size_t(all_parts() + number * block.warps + warp) * (count * kLanes), block.lane};
    }
    __device__ __forceinline__ u32* flag(int number, int warp) const { return block.job.done + divide(all_parts(), block.job.by_ranges) + number * block.warps + warp; }
};

// Stages and opens chunks, one behind the other, for some of a block's warps: `first`, and then each `step` further. Warps that multiply have their own
// first chunks to open, since they have nothing else to do then, openers the others.
template <class Way>
struct Opener {
    const Block<Way>& block;
    const int first, step, served, lane;
    Unit unit;
    int index, chunk;              // of the chunks at hand, or those that come next
    bool more;                     // whether there are any
    u32 offsets = 0;               // of these, 2 * groups lanes for each of the warps: start and stop of each row group

    __device__ __forceinline__ Opener(const Block<Way>& block, int first, int step)
        : block(block), first(first), step(step), served(first < block.warps ? (block.warps - 1 - first) / step + 1 : 0), lane(block.lane), index(block.units.first()),
          more(served > 0 && block.units.has(index)) {
        if (!more) return;
        unit = block.units.at(index);
        chunk = first_chunk(unit);
    }
    // The first chunks, before the barriers are open: two steps.
    __device__ __forceinline__ void stage_first() {
        if (!more) return;
        load_offsets();
        stage(0);
    }
    __device__ __forceinline__ void open_first(u32 scratch) const {
        if (more) open(offsets, unit, chunk, 0, scratch, true);
    }
    // From the first chunks to the second.
    __device__ __forceinline__ void pass_first() {
        if (more) advance();
    }
    __device__ __forceinline__ void run(u32 scratch) {
#pragma unroll 1
        for (u32 number = 1; more; ++number) {
            const u32 side = number & 1, present = offsets;
#pragma unroll 1
            for (int k = 0; k < served; ++k) await(block.at.free + 16 * warp(k) + 8 * side, (number >> 1 & 1) ^ 1);
            stage(side);
            const Unit here = unit;
            const int opened = chunk;
            advance();
            open(present, here, opened, side, scratch, false);
        }
    }

   private:
    __device__ __forceinline__ int warp(int k) const { return first + k * step; }
    __device__ __forceinline__ u32 buffer(int k, u32 side, int i) const { return block.at.streams + ((side * block.warps + warp(k)) * Way::groups + i) * 4 * block.job.buffer_words; }
    __device__ __forceinline__ void load_offsets() {
        constexpr int each = 2 * Way::groups;
        if (lane >= each * served) return;
        const size_t place = size_t(block.rows.group(unit, warp(lane / each), lane % each >> 1)) * block.geometry.chunks_per_row_group + chunk + (lane & 1);
        offsets = load_u32(block.packed.data + block.packed.offsets + 4 * place);
    }
    __device__ __forceinline__ void stage(u32 side) const {
#pragma unroll 1
        for (int k = 0; k < served; ++k)
#pragma unroll
            for (int i = 0; i < Way::groups; ++i)
                stage_streams(block.packed, buffer(k, side, i), __shfl_sync(kFull, offsets, 2 * (Way::groups * k + i)), __shfl_sync(kFull, offsets, 2 * (Way::groups * k + i) + 1), lane);
        copy_commit();
    }
    __device__ __forceinline__ void advance() {
        if (++chunk * kChunkStages >= unit.last) {
            index += block.units.step();
            more = block.units.has(index);
            if (more) {
                unit = block.units.at(index);
                chunk = first_chunk(unit);
            }
        }
        if (more) load_offsets();
    }
    // The chunks that are staged.
    __device__ __forceinline__ void open(u32 present, const Unit& here, int chunk, u32 side, u32 scratch, bool is_first) const {
        const int stages = min(kChunkStages, block.geometry.stages - chunk * kChunkStages);
        int shift[Way::groups];   // of the first warp's row groups
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) shift[i] = block.packed.shift;
        auto load_shifts = [&](int k) {
            if (block.packed.has_row_shifts)
#pragma unroll
                for (int i = 0; i < Way::groups; ++i)
                    shift[i] = reinterpret_cast<const i8*>(block.packed.data + block.packed.row_shifts)[block.rows.group(here, warp(k), i) * 8 + (lane >> 2)];
        };
        load_shifts(0);
        if (is_first) copy_wait<1>();   // not for the table
        else copy_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < served; ++k) {
            u32 chunks[Way::groups], scales[Way::groups];
            int sizes[Way::groups];
#pragma unroll
            for (int i = 0; i < Way::groups; ++i) {
                const StagedPlace place = StreamUnits(block.packed, __shfl_sync(kFull, present, 2 * (Way::groups * k + i)), __shfl_sync(kFull, present, 2 * (Way::groups * k + i) + 1)).place;
                chunks[i] = buffer(k, side, i) + 4 * place.begin;
                sizes[i] = place.size;
                scales[i] = scale_of(shift[i]);
            }
            if (k + 1 < served) load_shifts(k + 1);
            prepare_openings(chunks, sizes, scales, stages, block.at.openings + (warp(k) * 2 + side) * (Way::groups * kOpeningBytes), scratch, lane);
            if (!is_first && lane == 0) arrive(block.at.ready + 16 * warp(k) + 8 * side);
        }
    }
};

// Bring what warps multiply to shared memory, pair of stages by pair, unit after unit. By a warp each.
template <class Way>
struct Supply {
    const Block<Way>& block;
    const int lane = block.lane;

    // Slabs for the whole ring of pairs, while x may not be there yet.
    __device__ __forceinline__ void begin() const {
        int number = 0;
        for_each_pair([&](const Unit& unit, int pair) {
            if (number == block.at.slots) return false;
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
            if (number >= block.at.slots) {
                await(block.at.empty + 8 * place.slot, place.parity ^ 1);
                bring_slabs(unit, pair, place.slot);
            }
            ++number;
            if constexpr (!Way::arranged) {
                bring_x(pair, place.slot);
            } else if constexpr (!Way::wgmma) {
                const XStages x(*this, unit, pair);
                if (lane == 0)
                    copy_bulk(block.at.pairs + place.slot * block.at.pair_bytes + (x.first & 1) * stage_bytes<Way>(), x.source, x.count * stage_bytes<Way>(),
                              block.at.full + 8 * place.slot);
                __syncwarp();
            }
            place.advance(block.at.slots);
            return true;
        });
    }
    // For wgmma; each block of a cluster brings a part to all of them. All lanes wait, so that the warp stays together.
    __device__ __forceinline__ void run_x() const {
        await_kernel_before();
        RingPlace place{0, 0};
        const u32 number = block_of_cluster();
        for_each_pair([&](const Unit& unit, int pair) {
            const XStages x(*this, unit, pair);
            const u32 bytes = Units<Way>::x_stage_bytes(unit) / Way::x_parts, part = bytes / Way::cluster, own = number * part;
            for (int i = 0; i < x.count * Way::x_parts; ++i) {
                await(block.at.x_empty + 8 * place.slot, place.parity ^ 1);
                if (lane == 0) {
                    const u32 full = block.at.x_full + 8 * place.slot;
                    expect(full, bytes);
                    copy_bulk_to(block.at.x + place.slot * slot_bytes<Way>() + own, x.source + i * bytes + own, part, full, (1 << Way::cluster) - 1);
                }
                __syncwarp();
                place.advance(block.job.ring);
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
              source(supply.block.units.x_of(unit) + size_t(first) * supply.block.units.x_stage_bytes(unit)) {}
    };
    // From a chunk's start, even where a unit starts later. Until one returns false.
    template <class Bring>
    __device__ __forceinline__ void for_each_pair(const Bring& bring) const {
        for (int index = block.units.first(); block.units.has(index); index += block.units.step()) {
            const Unit unit = block.units.at(index);
            for (int pair = first_chunk(unit) * (kChunkStages / 2); 2 * pair < unit.last; ++pair)
                if (!bring(unit, pair)) return;
        }
    }
    // A pair of stages of x that is not arranged: each lane has four columns of each token.
    __device__ __forceinline__ void bring_x(int pair, int slot) const {
        const int stage = lane >> 4, step = lane >> 2 & 3, columns = block.geometry.columns;
        if (2 * pair + stage < block.units.stages) {
            const u16* source = block.job.x + 2 * 64 * pair + 4 * lane;
            u32 target = block.at.pairs + slot * block.at.pair_bytes + stage * stage_bytes<Way>() + ((step & 2) << 5) + ((lane & 3) << 4) + ((step & 1) << 3);
#pragma unroll 2
            for (int token = 0; token < block.job.tokens; ++token, source += columns, target = (target + 128) ^ 64) copy_async_8(target, source);
        }
        copies_arrive(block.at.full + 8 * slot);
    }
    // Of the row groups that exist.
    __device__ __forceinline__ void bring_slabs(const Unit& unit, int pair, int slot) const {
        const int first = unit.tile * block.rows.block_groups, count = min(block.rows.block_groups, block.units.row_groups(block.geometry) - first);
        const size_t group_bytes = slab_offset(block.geometry.stages, 1, 0);
        const u8* source = block.packed.data + block.packed.planes + (unit.matrix + first) * group_bytes + size_t(pair) * kSlabBytes + 16 * lane;
        u32 target = block.at.pairs + slot * block.at.pair_bytes + (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + 16 * lane;
#pragma unroll 4
        for (int i = 0; i < count; ++i, source += group_bytes, target += kSlabBytes) {
            if (lane < kSlabBytes / 16 - 2 * kLanes) copy_async(target + 32 * kLanes, source + 32 * kLanes);
            copy_async(target, source);
            copy_async(target + 16 * kLanes, source + 16 * kLanes);
        }
        copies_arrive(block.at.full + 8 * slot);
    }
};

template <class Way>
__device__ __forceinline__ void decode_and_multiply(const Block<Way>& block, int warp) {
    constexpr int wide = Way::wide, count = wide / 2;
    const int lane = block.lane;
    u32 byte_mask = ((1u << block.packed.width) - 1) << 2, common = u32(block.packed.window >> 4) * 0x10101010u;
    const u32 table = uniform(table_address());   // which loads add to another register
    u32 slabs = (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + warp * (Way::groups * kSlabBytes), sign_at = slabs + 4 * lane, raw_at = slabs + kSignBytes + 16 * lane;
    u32 right_at[2] = {u32(lane >> 2) * 128 + ((lane & 7) << 4), u32(lane >> 2) * 128 + (((lane & 7) ^ 4) << 4)};   // mma's, in a stage of x
    int slots = block.at.slots, ring = block.job.ring;
    keep(common), keep(sign_at), keep(raw_at), keep(right_at[0]), keep(right_at[1]), keep(slots), keep(ring);
    float sums[count];
    u32 weights[4][4];                   // left matrices, by step
    Vec4 right[wide / 8];
    RingPlace pairs{0, 0}, x{0, 0};
    u32 used[2] = {};                    // barriers of the slots of x that wgmma reads
    auto release_x = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (used[i] && lane < Way::cluster) arrive_at(used[i], lane);
            used[i] = 0;
        }
    };

    // The chunk at the streams, which in its last stage is the one behind already; but not with wgmma, which gains nothing and lacks the registers.
    constexpr bool opens_ahead = !Way::wgmma;
    Opened chunk[Way::groups];
    OwnPatches patches[Way::groups];
    u32 scale_ahead[Way::groups];
    u32 patched[Way::groups];            // stages that have patches, a bit each; see `complete`
    u32 opening = 0, chunks = 0;         // opening: shared address; chunks: that were opened
    auto open_chunk = [&] {
        const u32 side = chunks & 1;
        opening = block.at.openings + (2 * warp + side) * (Way::groups * kOpeningBytes);
        await(block.at.ready + 16 * warp + 8 * side, chunks >> 1 & 1);
        ++chunks;
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) {
            const Vec4 own = load_shared_vec4(opening + i * kOpeningBytes + 16 * lane), all = load_shared_vec4(opening + i * kOpeningBytes + 16 * kLanes);
            chunk[i].streams[0].start(all.x, own.x & 0xffff);
            chunk[i].streams[1].start(all.x, own.x >> 16);
            scale_ahead[i] = own.y;
            chunk[i].next_patch = all.y, chunk[i].patch = all.z, patched[i] = all.w;
            patches[i].take(own.z);
            patches[i].later = own.w;
        }
    };
    auto leave_chunk = [&] {
        __syncwarp();
        if (lane == 0) arrive(block.at.free + 16 * warp + 8 * ((chunks - 1) & 1));
    };

    // A stage is looked up, and its upper bytes completed, while the one before is multiplied.
    Vec4 upper[Way::groups];
    LookUps begun[Way::groups];
    auto begin = [&] {
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) begun[i] = chunk[i].begin(table, byte_mask);
    };
    auto go_on = [&] {
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) upper[i] = chunk[i].go_on(begun[i], table, byte_mask);
    };
    // stage: of the chunk; bit: the stage's in `patched`.
    auto complete = [&](int stage, u32 bit) {
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) chunk[i].complete(upper[i], common);
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) {
            if (!(patched[i] & bit)) continue;
            patches[i].apply(upper[i], stage);
            patches[i].go_on(stage);
            chunk[i].template mend<(Way::cluster > 1)>(upper[i], stage, lane);
        }
    };

    // What is not looked up of a stage is loaded while the one before is completed.
    u32 pair, signs[Way::groups];
    Vec4 raw[Way::groups];
    const bool has_token = wide > 8 || (lane >> 2) < block.job.tokens;   // else a lane leaves the memory's time to others, and nobody reads its sums
    auto load_right = [&](int half, int h) {
#pragma unroll
        for (int j = 0; j < wide / 8; ++j) {
            const u32 place = pair + right_at[h] + half * stage_bytes<Way>() + j * 1024;
            right[j] = wide > 8 ? load_shared_vec4(place) : load_shared_vec4_if(has_token, place);
        }
    };
    auto load_stage = [&](int half) {
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) raw[i] = load_shared_vec4(pair + raw_at + i * kSlabBytes + half * kStageBytes);
        if constexpr (!Way::wgmma) load_right(half, 0);
    };
    auto open_pair = [&] {
        pair = block.at.pairs + pairs.slot * block.at.pair_bytes;
        await(block.at.full + 8 * pairs.slot, pairs.parity);
#pragma unroll
        for (int i = 0; i < Way::groups; ++i) signs[i] = load_shared(pair + sign_at + i * kSlabBytes);
        load_stage(0);
    };
    auto leave_pair = [&] {
        __syncwarp();
        if (lane == 0) arrive(block.at.empty + 8 * pairs.slot);
        pairs.advance(slots);
    };

    auto begin_chunk = [&] {
        open_chunk();
        begin();
        go_on();
        open_pair();
        complete(0, 1);
    };

    if (!block.units.has(block.units.first())) return;
    Endings<Way> endings{block};
    if (opens_ahead) begin_chunk();
    bool x_is_there = Way::wgmma && test(block.at.x_full + 8 * x.slot, x.parity);
#pragma unroll 1
    for (int index = block.units.first(); block.units.has(index);) {
        const Unit unit = block.units.at(index);
        index += block.units.step();
        endings.begin(unit);
        u32 add = 0, scale[Way::groups];
        if constexpr (!Way::wgmma) {
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] = 0;
            if (unit.takes) endings.take(warp, sums);
        }
#pragma unroll 1
        for (int from = first_chunk(unit) * kChunkStages; from < unit.last; from += kChunkStages) {
            if (!opens_ahead) begin_chunk();
#pragma unroll
            for (int i = 0; i < Way::groups; ++i) scale[i] = scale_ahead[i];
            const bool ends = from + kChunkStages >= unit.last, more = !ends || block.units.has(index);
            int stop = min(kChunkStages, unit.last - from), start = unit.first - from, stage = 0;
            if (opens_ahead) keep(stop), keep(start);
            // A pair of stages. whole: both are there and count.
            auto multiply_pair = [&](const bool whole) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (!whole && half && stage + 1 >= stop) break;
                    const bool counts = whole || stage + half >= start, last = (whole && half == 0) ? false : stage + half + 1 >= stop;
                    auto assemble = [&](int i, int q, u32 raw, u32 top) {
                        top = and_or(signs[i] << (4 * half + q), kSignMask, top);
                        weights[q][i] = unshift(__byte_perm(raw, top, 0x5140), scale[i]);
                        weights[q][2 + i] = unshift(__byte_perm(raw, top, 0x7362), scale[i]);
                    };
                    int behind = stage + half + 1;
                    if (opens_ahead && last) {
                        leave_chunk();
                        if (more) {
                            open_chunk();
#pragma unroll
                            for (int i = 0; i < Way::groups; ++i) patched[i] <<= 1 + half;
                            behind = 0;
                        }
                    }
                    begin();             // the stage behind; where there is none that is anything, and nobody reads it
                    Vec4 tops[Way::groups];
#pragma unroll
                    for (int i = 0; i < Way::groups; ++i) tops[i] = upper[i];
                    auto assemble_step = [&](int q) {
#pragma unroll
                        for (int i = 0; i < Way::groups; ++i) {
                            if (q == 0) assemble(i, 0, raw[i].x, tops[i].x);
                            if (q == 1) assemble(i, 1, raw[i].y, tops[i].y);
                            if (q == 2) assemble(i, 2, raw[i].z, tops[i].z);
                            if (q == 3) assemble(i, 3, raw[i].w, tops[i].w);
                        }
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
                            if (counts && (part || !x_is_there)) await(block.at.x_full + 8 * next.slot, next.parity);
                            right[part] = describe<128 / Way::x_parts>(block.at.x + next.slot * slot_bytes<Way>(), 1024 / Way::x_parts);
                            if (counts) used[part] = block.at.x_empty + 8 * next.slot;
                            next.advance(ring);
                        }
                        wgmma_fence();
#pragma unroll
                        for (int q = 0; q < 4; ++q)
                            multiply_add(sums, weights[q], right[q * Way::x_parts / 4] + q % (4 / Way::x_parts) * 32 / 16, q || add);
                        wgmma_commit();
                        if (counts) add = 1, x = next;   // else these sums are of anything, and forgotten at the next stage
                        x_is_there = test(block.at.x_full + 8 * x.slot, x.parity);
                    } else if (counts) {
                        auto step = [&](int q) {
                            assemble_step(q);
#pragma unroll
                            for (int j = 0; j < wide / 8; ++j)
                                multiply(sums + 4 * j, weights[q], q & 1 ? right[j].z : right[j].x, q & 1 ? right[j].w : right[j].y);
                        };
                        step(0);
                        go_on();
                        step(1);
                        load_right(half, 1);
                        step(2);
                        step(3);
                    } else {
                        go_on();
                    }
                    if (half == 1 || (!whole && last)) {
                        leave_pair();
                        if (!last || (opens_ahead && more)) open_pair();
                    } else {
                        load_stage(1);
                    }
                    complete(behind, 2 << half);
                    if (opens_ahead && !whole && half == 0 && last)
#pragma unroll
                        for (int i = 0; i < Way::groups; ++i) patched[i] <<= 1;   // the pair has but one stage
                }
#pragma unroll
                for (int i = 0; i < Way::groups; ++i) patched[i] = u32(int(patched[i]) >> 2);
            };
#pragma unroll 1
            for (; stage < stop; stage += 2) {
                if (opens_ahead && __builtin_expect(stage >= start && stage + 1 < stop, true)) multiply_pair(true);
                else multiply_pair(false);
            }
            if (!opens_ahead) leave_chunk();
        }
        if constexpr (Way::wgmma) {
            wgmma_wait<0>();
            pin(sums);
            release_x();
        }
        endings.end(unit, warp, sums);
    }
}

// routing: linear_routed.cuh's, whose units depend on it.
template <class Way, class... Routing>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job, const Routing&... routing) {
    int lane = threadIdx.x & 31;
    keep(lane);
    const int warp = own_warp(), warps = (blockDim.x >> 5) - kOthers;
    const int opener = max(warp - warps - (kOthers - Way::openers), -1);   // its number; those of other warps are negative

    // Shared memory: table, the ring of x, the ring of pairs, two sides of streams (in the second, first of all, the table's entries), openings of each
    // warp, openers' scratch, barriers.
    const u32 side_bytes = warps * Way::groups * 4 * job.buffer_words;
    Places at;
    if constexpr (Way::wgmma) at.slots = Way::pairs;
    else at.slots = job.ring;
    at.x = (table_address() + 4 * job.table_words + 1023) & ~1023u;
    at.pairs = at.x + 4 * job.x_words;
    at.pair_bytes = (Way::wgmma ? 0 : 2 * stage_bytes<Way>()) + warps * (Way::groups * kSlabBytes);
    at.streams = at.pairs + at.slots * at.pair_bytes;
    at.openings = at.streams + side_bytes + max(side_bytes, u32(4 * packed.symbols + 15) & ~15u);
    at.scratch = at.openings + warps * (2 * Way::groups * kOpeningBytes);
    at.full = at.scratch + Way::openers * dealing_bytes<Way>();
    at.empty = at.full + 8 * at.slots;
    at.ready = at.empty + 8 * at.slots;
    at.free = at.ready + 16 * warps;
    at.x_full = at.free + 16 * warps;
    at.x_empty = at.x_full + 8 * job.ring;
    if constexpr (!Way::wgmma && Way::groups == 2 && Way::wide == 8) at = at.in_uniform_registers();   // where that is faster: benchmarks/NOTES.md

    let_kernel_behind_start();
    const Block<Way> block{{job, geometry.stages, routing...}, {Way::groups * warps, Units<Way>{job, geometry.stages, routing...}.row_groups(geometry)}, geometry, packed, job, at, warps, lane};
    const Supply<Way> supply{block};
    const bool multiplies = warp < warps;
    Opener<Way> chunks(block, multiplies ? warp : opener >= 0 ? opener : warps, multiplies ? warps : Way::openers);
    if (multiplies) chunks.stage_first();
    else chunks.pass_first();
    const Table<true> decode_table(packed, table_words(), table_words() + (at.streams + side_bytes - table_address()) / 4);
    copy_commit();
    if (warp == warps) {
        if (lane == 0) {
            for (int i = 0; i < at.slots; ++i) {
                open_barrier(at.full + 8 * i, Way::wgmma ? kLanes : Way::arranged ? kLanes + 1 : 2 * kLanes);
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
    if (multiplies) chunks.open_first(at.openings + (2 * warp + 1) * (Way::groups * kOpeningBytes));   // scratch, for there is no other side yet
    decode_table.build();
    if (warp == warps) copy_wait<1>();                 // not for slabs
    else copy_wait<0>();
    __syncthreads();
    if constexpr (Way::cluster > 1) await_cluster();   // their barriers are open
    if (multiplies) {
        if (lane == 0) arrive(at.ready + 16 * warp);
        if constexpr (Way::wgmma) take_registers<Way::registers>();
        decode_and_multiply<Way>(block, warp);
    } else {
        if constexpr (Way::wgmma) give_registers<Way::few_registers>();
        if (warp == warps) supply.run();
        else if (opener >= 0) chunks.run(at.scratch + opener * dealing_bytes<Way>());
        else if constexpr (Way::wgmma) supply.run_x();
    }
    if constexpr (Way::cluster > 1) leave_cluster();
}

#define PAIRS_KERNEL(name, Argument, Way, tokens)                                                                                               \
    extern "C" __global__ void __cluster_dims__(Way<tokens>::cluster) __launch_bounds__((Way<tokens>::multipliers + kOthers) * kLanes, 1) name( \
        const __grid_constant__ Argument argument) {                                                                                            \
        const Product& product = own_product(argument);                                                                                         \
        linear<Way<tokens>>(product.geometry, product.packed, product.job);                                                                     \
    }
