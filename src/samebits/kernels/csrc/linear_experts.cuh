// Routed experts: each token is multiplied with the experts that a router has chosen for it, out of one packed tensor [experts, rows, columns]. Who is
// chosen the host does not know, so each block finds for itself what is its own: the launch is the same whatever the router says, and graphs can have it.
//
//   pair       a token and one of its experts; y has a row for each, in the order in which the router gives them
//   unit       up to eight or sixteen pairs of one expert, no more than there are tokens: what one mma multiplies a row group with
//   item       a row group of a unit: all of K, one chain (walk.cuh)
//
// Units are numbered, items unit by unit; each block has as many items as any other, each of its warps as many as any other warp. All blocks have to
// number pairs and units alike. See linear.cuh; linear/experts.py.
#pragma once
#include "walk.cuh"

constexpr int kMaxWarps = 20, kFewWarps = 16;   // for units of eight pairs, and of sixteen

struct Routing {
    const void* ids;       // [pairs], i64 each if `wide`, else i32: which experts
    const float* scales;   // [pairs]: what a pair's sums are multiplied with before they are rounded; or null
    int wide, pairs, experts;
    int groups;            // row groups of an expert
    int sharing;           // pairs behind each other that have one row of x
    int units;             // that a block has room for: as many as it can have
    int unit_pairs;        // that a unit has at most
    u32 by_groups, by_sharing, by_unit_pairs;   // for `divide`
};

// A unit in shared memory: its expert, how many pairs it has, and which.
template <int octets>
struct Unit {
    u32 expert, count, pairs[8 * octets];
};
static_assert(sizeof(Unit<1>) == 40 && sizeof(Unit<2>) == 72, "linear/experts.py: _UNIT_WORDS");
constexpr int kIdBits = 16;              // of a pair in shared memory: its expert, and above how many pairs of that there are in front of it
constexpr u32 kNoExpert = (1u << kIdBits) - 1;

template <Kind kind, int octets>
struct Experts {
    static constexpr bool has_all_of_x = false, copies_table = true, has_short_turns = true;
    using Unit = ::Unit<octets>;
    const Geometry& geometry;
    const Job& job;
    const Routing& routing;
    const int lane;
    const u32 x;                         // shared address
    Unit* const units;                   // in shared memory: the block's
    int first_unit, own_units, first_item, end_item;   // of this block; of this warp
    Columns<kind, octets> columns;

    __device__ __forceinline__ Experts(const Geometry& geometry, const Job& job, const Routing& routing, const WalkMemory& at, int lane)
        : geometry(geometry), job(job), routing(routing), lane(lane), x(at.x), units(reinterpret_cast<Unit*>(at.words + at.behind)),
          columns(job.x, at.x, 1, geometry.columns, lane, 0) {}

    __device__ __forceinline__ u32 expert_of(int pair) const {
        const u64 id = routing.wide ? static_cast<const u64*>(routing.ids)[pair] : static_cast<const u32*>(routing.ids)[pair];
        return id < u64(routing.experts) ? u32(id) : kNoExpert;
    }
    // Finds the block's units and the warp's items. By the whole block; returns before all of the units are there for other warps.
    __device__ __forceinline__ void route() {
        await_kernel_before();
        if (routing.pairs <= kLanes) route_few();
        else route_many();
        clear_rows();
    }
    // Each warp for itself, with a pair for each lane; what they write is the same.
    __device__ __forceinline__ void route_few() {
        const u32 expert = lane < routing.pairs ? expert_of(lane) : kNoExpert;
        const u32 alike = __match_any_sync(kFull, expert), below = (1u << lane) - 1;
        const int rank = __popc(alike & below), place = in_unit(rank);
        const bool opens = expert != kNoExpert && place == 0;
        const u32 opening = __ballot_sync(kFull, opens);
        take_share(__popc(opening));
        // The one that opens this lane's unit is the last of those alike, up to this lane, that open one.
        const int opener = 31 - __clz((alike & opening & (below | 1u << lane)) | 1);
        const int unit = __popc(opening & ((1u << opener) - 1)) - first_unit;
        if (expert == kNoExpert || unit < 0 || unit >= own_units) return;
        Unit& own = units[unit];
        own.pairs[place] = lane;
        if (opens) own.expert = expert, own.count = min(__popc(alike) - rank, routing.unit_pairs);
    }
    __device__ __forceinline__ void route_many() {
        u32* const counts = reinterpret_cast<u32*>(units + routing.units);   // of each expert: pairs, then its first unit
        u32* const pairs = counts + routing.experts;
        const int threads = blockDim.x;
        __shared__ int all_units;
        for (int i = threadIdx.x; i < routing.experts; i += threads) counts[i] = 0;
        for (int pair = threadIdx.x; pair < routing.pairs; pair += threads) pairs[pair] = expert_of(pair);
        __syncthreads();
        if (threadIdx.x < kLanes) {
            for (int first = 0; first < routing.pairs; first += kLanes) {
                const int pair = first + lane;
                const u32 expert = pair < routing.pairs ? pairs[pair] : kNoExpert, alike = __match_any_sync(kFull, expert);
                const int before = __popc(alike & ((1u << lane) - 1));
                if (expert != kNoExpert) {
                    const u32 rank = counts[expert] + before;
                    pairs[pair] = rank << kIdBits | expert;
                }
                __syncwarp();
                if (expert != kNoExpert && before == 0) counts[expert] += __popc(alike);
                __syncwarp();
            }
            int before = 0;
            for (int first = 0; first < routing.experts; first += kLanes) {
                const int expert = first + lane, count = expert < routing.experts ? int(counts[expert]) : 0;
                int total;
                const int place = before + sum_before(divide(count + routing.unit_pairs - 1, routing.by_unit_pairs), lane, total);
                if (expert < routing.experts) counts[expert] = u32(place) << kIdBits | u32(count);
                before += total;
            }
            if (lane == 0) all_units = before;
        }
        __syncthreads();
        take_share(all_units);
        for (int pair = threadIdx.x; pair < routing.pairs; pair += threads) {
            const u32 expert = pairs[pair] & kNoExpert, rank = pairs[pair] >> kIdBits;
            if (expert == kNoExpert) continue;
            const u32 found = counts[expert];
            const int unit = int(found >> kIdBits) + divide(int(rank), routing.by_unit_pairs) - first_unit, place = in_unit(int(rank));
            if (unit < 0 || unit >= own_units) continue;
            Unit& own = units[unit];
            own.pairs[place] = pair;
            if (place == 0) own.expert = expert, own.count = min((found & kNoExpert) - rank, u32(routing.unit_pairs));
        }
        __syncthreads();
    }
    __device__ __forceinline__ void take_share(int all_units) {
        const u64 items = u64(all_units) * u32(routing.groups);
        const int begin = int(items * blockIdx.x / gridDim.x), own = int(items * (blockIdx.x + 1) / gridDim.x) - begin, warps = blockDim.x >> 5, warp = own_warp();
        first_unit = divide(begin, routing.by_groups);
        own_units = own > 0 ? min(divide(begin + own - 1, routing.by_groups) - first_unit + 1, routing.units) : 0;
        first_item = begin + int(uniform(u32(own * warp / warps)));
        end_item = begin + int(uniform(u32(own * (warp + 1) / warps)));
    }
    // Of pairs without an expert, block by block.
    __device__ __forceinline__ void clear_rows() const {
        for (int pair = blockIdx.x; pair < routing.pairs; pair += gridDim.x)
            if (expert_of(pair) == kNoExpert)
                for (int row = threadIdx.x; row < 8 * routing.groups; row += blockDim.x) job.y[size_t(pair) * u32(8 * routing.groups) + row] = 0;
    }
    __device__ __forceinline__ int in_unit(int rank) const { return rank - divide(rank, routing.by_unit_pairs) * routing.unit_pairs; }
    __device__ __forceinline__ int unit_of(int item) const { return divide(item, routing.by_groups) - first_unit; }
    __device__ __forceinline__ int group_in_expert(int item) const { return item - divide(item, routing.by_groups) * routing.groups; }
    __device__ __forceinline__ u32 x_of(int unit) const { return x + unit * routing.unit_pairs * (geometry.columns * 2); }
    __device__ __forceinline__ const u16* row_of(u32 pair) const { return job.x + size_t(divide(int(pair), routing.by_sharing)) * geometry.columns; }

    __device__ __forceinline__ int count() const { return (end_item - first_item) * geometry.chunks_per_row_group; }
    __device__ __forceinline__ Vec2 at(int index) const {
        const int slot = divide(index, job.by_chunks), chunk = index - slot * geometry.chunks_per_row_group;
        return describe_piece(geometry, job, slot, chunk, 0, min(geometry.stages - chunk * kChunkStages, kChunkStages), false, false);
    }
    __device__ __forceinline__ u32 group_of(u32 place) const {
        const int item = min(first_item + int(place >> 16), end_item - 1);   // of the place behind the last one that is asked, too
        return units[unit_of(item)].expert * u32(routing.groups) + u32(group_in_expert(item));
    }
    __device__ __forceinline__ void fetch_x() const {
        if (kind == global) return;
        for (int unit = 0; unit < own_units; ++unit)
            for (int row = 0; row < int(units[unit].count); ++row) {
                const u16* from = row_of(units[unit].pairs[row]);
                const u32 to = x_of(unit) + row * (geometry.columns * 2);
                for (int quad = threadIdx.x; quad < geometry.columns >> 2; quad += blockDim.x) {   // as stage_columns
                    const int stage = quad >> 4, q = quad >> 2 & 3, t = quad & 3;
                    copy_async_8(to + stage * 128 + (((q >> 1) ^ (row & 1)) << 6) + (t << 4) + ((q & 1) << 3), from + 4 * quad);
                }
            }
    }
    __device__ __forceinline__ void clear_flags() const {}
    __device__ __forceinline__ void await_turn() const {}
    __device__ __forceinline__ void end_turn() { columns.advance(kTurn); }
    __device__ __forceinline__ void skip_turn() { columns.advance(kTurn); }
    __device__ __forceinline__ void pass() const {}
    __device__ __forceinline__ void begin(const Vec2& piece, Sums<octets>& sums) {
        const int number = unit_of(first_item + int(piece.x >> 16));
        const Unit& unit = units[number];
        const int count = int(unit.count);
        columns.move_to(job.x, x_of(number), count, geometry.columns, lane, 0);
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) columns.source[octet] = row_of(unit.pairs[min((lane >> 2) + 8 * octet, count - 1)]) + 4 * (lane & 3);
        sums = {};
    }
    __device__ __forceinline__ void hand_on(const Sums<octets>&) const {}
    __device__ __forceinline__ void close(const Sums<octets>& sums, int slot, int) const {
        const int item = first_item + slot, g = lane >> 2, t = lane & 3, row = 8 * group_in_expert(item);
        const Unit& unit = units[unit_of(item)];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = octets == 1 ? 2 * t + i : g + 8 * i;
            if (own >= int(unit.count)) continue;
            const u32 pair = unit.pairs[own];
            u16* const y = job.y + size_t(pair) * u32(8 * routing.groups) + row;
            auto scaled = [&](float sum) { return routing.scales ? sum * routing.scales[pair] : sum; };
            if constexpr (octets == 1) y[g] = u16(to_bf16x2(scaled(sums.of[i]), 0.0f));
            else *reinterpret_cast<u32*>(y + 2 * t) = to_bf16x2(scaled(sums.of[2 * i]), scaled(sums.of[2 * i + 1]));
        }
    }
};

template <Kind kind, int octets>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job, const Routing& routing) {
    extern __shared__ __align__(128) u32 memory[];
    int lane = threadIdx.x & 31;
    keep(lane);
    const WalkMemory at = walk_memory(job, memory, own_warp(), blockDim.x >> 5);
    if (packed.table) copy_table(packed, u32(__cvta_generic_to_shared(memory)), threadIdx.x, blockDim.x);   // while the kernel in front ends
    copy_commit();
    Experts<kind, octets> way(geometry, job, routing, at, lane);
    way.route();
    __syncwarp();
    walk<Experts<kind, octets>, octets, kNowhere>(geometry, packed, job, at, way, lane);
}
