// Routed experts: each token is multiplied with the experts that a router has chosen for it, out of one packed tensor [experts, rows, columns]. Who is
// chosen the host does not know, so each block finds for itself what is its own: the launch is the same whatever the router says, and graphs can have it.
//
//   unit       up to eight or sixteen pairs of one expert, no more than there are tokens (routing.cuh); many more in linear_routed.cuh
//   item       a row group of a unit: all of K, one chain (walk.cuh)
//
// Units are numbered, items unit by unit; each block has as many items as any other. All blocks have to number pairs and units alike. x is in shared memory
// (Experts), or comes turn by turn for warps that walk in step (InStep), where it is large. See linear.cuh; linear/experts.py.
#pragma once
#include "routing.cuh"
#include "walk.cuh"

constexpr int kMaxWarps = 20, kFewWarps = 16;   // for units of eight pairs, and of sixteen

// A unit in shared memory: its expert, how many pairs it has, and which.
template <int octets>
struct Unit {
    u32 expert, count, pairs[8 * octets];
};
static_assert(sizeof(Unit<1>) == 40 && sizeof(Unit<2>) == 72, "linear/experts.py: _UNIT_WORDS");
constexpr int kIdBits = 16;              // of a pair in shared memory: its expert, and above how many pairs of that there are in front of it
static_assert(kNoExpert == (1u << kIdBits) - 1, "kIdBits");

// A block's units and items, and the warp at hand.
template <int octets>
struct Routes {
    static constexpr bool has_all_of_x = false, copies_table = true, has_short_turns = true;
    using Unit = ::Unit<octets>;
    const Geometry& geometry;
    const Job& job;
    const Routing& routing;
    const int lane;
    const u32 x;                         // shared address
    Unit* const units;                   // in shared memory: the block's
    int first_unit, own_units, first_item, end_item;   // of the block

    __device__ __forceinline__ Routes(const Geometry& geometry, const Job& job, const Routing& routing, const WalkMemory& at, int lane)
        : geometry(geometry), job(job), routing(routing), lane(lane), x(at.x), units(reinterpret_cast<Unit*>(at.words + at.behind)) {}

    // Finds the block's units and items. By the whole block; returns before all of the units are there for other warps.
    __device__ __forceinline__ void route() {
        await_kernel_before();
        if (routing.pairs <= kLanes) route_few();
        else route_many();
        clear_rows();
    }
    // Each warp for itself, with a pair for each lane; what they write is the same.
    __device__ __forceinline__ void route_few() {
        const u32 expert = lane < routing.pairs ? routing.expert_of(lane) : kNoExpert;
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
        for (int pair = threadIdx.x; pair < routing.pairs; pair += threads) pairs[pair] = routing.expert_of(pair);
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
        first_item = int(items * blockIdx.x / gridDim.x), end_item = int(items * (blockIdx.x + 1) / gridDim.x);
        first_unit = divide(first_item, routing.by_groups);
        own_units = end_item > first_item ? min(divide(end_item - 1, routing.by_groups) - first_unit + 1, routing.units) : 0;
    }
    // Of pairs without an expert, block by block.
    __device__ __forceinline__ void clear_rows() const {
        for (int pair = blockIdx.x; pair < routing.pairs; pair += gridDim.x)
            if (routing.expert_of(pair) == kNoExpert)
                for (int row = threadIdx.x; row < 8 * routing.groups; row += blockDim.x) job.y[size_t(pair) * u32(8 * routing.groups) + row] = 0;
    }
    __device__ __forceinline__ int in_unit(int rank) const { return rank - divide(rank, routing.by_unit_pairs) * routing.unit_pairs; }
    __device__ __forceinline__ int unit_of(int item) const { return divide(item, routing.by_groups) - first_unit; }
    __device__ __forceinline__ int group_in_expert(int item) const { return item - divide(item, routing.by_groups) * routing.groups; }
    __device__ __forceinline__ const u16* row_of(u32 pair) const { return job.x + size_t(divide(int(pair), routing.by_sharing)) * geometry.columns; }

    __device__ __forceinline__ u32 group_of_item(int item) const { return units[unit_of(item)].expert * u32(routing.groups) + u32(group_in_expert(item)); }
    // A chunk of what is at a slot of a warp's.
    __device__ __forceinline__ Vec2 at(int index) const {
        const int slot = divide(index, job.by_chunks), chunk = index - slot * geometry.chunks_per_row_group;
        return describe_piece(geometry, job, slot, chunk, 0, min(geometry.stages - chunk * kChunkStages, kChunkStages), false, false);
    }
    __device__ __forceinline__ void hand_on(const Sums<octets>&) const {}
    __device__ __forceinline__ void store(const Sums<octets>& sums, int item) const {
        const int g = lane >> 2, t = lane & 3, row = 8 * group_in_expert(item);
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

// Each warp has items that lie behind each other, x is in shared memory, that of all units.
template <int octets>
struct Experts : Routes<octets> {
    using Base = Routes<octets>;
    using Base::geometry, Base::job, Base::lane, Base::units, Base::unit_of, Base::row_of, Base::own_units;
    int begin_item, behind_item;         // of this warp
    Columns<shared, octets> columns;

    __device__ __forceinline__ Experts(const Geometry& geometry, const Job& job, const Routing& routing, const WalkMemory& at, int lane)
        : Base(geometry, job, routing, at, lane), columns(job.x, at.x, 1, geometry.columns, lane, 0) {
        Base::route();
        const int warps = blockDim.x >> 5, warp = own_warp(), own = Base::end_item - Base::first_item;
        begin_item = Base::first_item + int(uniform(u32(own * warp / warps)));
        behind_item = Base::first_item + int(uniform(u32(own * (warp + 1) / warps)));
    }
    __device__ __forceinline__ u32 x_of(int unit) const { return Base::x + unit * Base::routing.unit_pairs * (geometry.columns * 2); }
    __device__ __forceinline__ int count() const { return (behind_item - begin_item) * geometry.chunks_per_row_group; }
    __device__ __forceinline__ u32 group_of(u32 place) const {   // of the place behind the last one that is asked, too
        return Base::group_of_item(min(begin_item + int(place >> 16), behind_item - 1));
    }
    __device__ __forceinline__ void fetch_x() const {
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
        const int number = unit_of(begin_item + int(piece.x >> 16)), count = int(units[number].count);
        columns.move_to(job.x, x_of(number), count, geometry.columns, lane, 0);
        sums = {};
    }
    __device__ __forceinline__ void close(const Sums<octets>& sums, int slot, int) const { Base::store(sums, begin_item + slot); }
};

// All warps have items of one unit at a time, a round, and go through K in step: another warp brings x turn by turn into a ring for all of them.
constexpr int kColumnBytes = kTurn * 128;                          // of a pair in a turn of x
template <int octets> constexpr int kPlaces = octets == 1 ? 4 : 3;   // turns that are in the ring, or on their way
static_assert(kColumnBytes == 1024 && kPlaces<1> == 4 && kPlaces<2> == 3, "linear/experts.py: _COLUMN_WORDS, _PLACES");

template <int octets>
struct InStep : Routes<octets> {
    using Base = Routes<octets>;
    using Base::geometry, Base::job, Base::lane, Base::units, Base::unit_of;
    struct Found { int item, round; };
    const int warp, warps;               // warps: that walk
    const u32 come, taken;               // shared addresses of flags: turns that have come; [warps] turns that a warp does not need any more
    int turn = 0;                        // that comes next
    struct TurnColumns {
        u32 steps[4];                    // of the turn at hand and token g: for each token and stage 128 bytes, those of step q where 32 (q ^ (token & 3)) says
        bool any[octets];                // as Columns

        __device__ __forceinline__ void load(Vec4 (&x)[octets], int stage, int half) const {
            Vec4 words[octets];
#pragma unroll
            for (int octet = 0; octet < octets; ++octet) {
                const u32 own = 8 * octet * kColumnBytes + stage * 128;
                const Vec2 first = load_shared_vec2_if(any[octet], steps[2 * half] + own), second = load_shared_vec2_if(any[octet], steps[2 * half + 1] + own);
                words[octet] = {first.x, first.y, second.x, second.y};
            }
            operands_of(words, x);
        }
    } columns;
    int own = 0;                         // items of this warp
    int rows = 1;                        // of the unit at hand

    __device__ __forceinline__ InStep(const Geometry& geometry, const Job& job, const Routing& routing, const WalkMemory& at, int warps, int lane)
        : Base(geometry, job, routing, at, lane), warp(own_warp()), warps(warps), come(flags_of(Base::units, routing)), taken(come + 4) {
        Base::route();
        for (int unit = 0; unit < Base::own_units; ++unit) own += own_of(unit);
    }
    static __device__ __forceinline__ u32 flags_of(const typename Base::Unit* units, const Routing& routing) {
        return u32(__cvta_generic_to_shared(units + routing.units)) + 4 * (routing.experts + routing.pairs);
    }
    __device__ __forceinline__ int turns() const { return (geometry.stages + kTurn - 1) / kTurn; }   // of a round
    __device__ __forceinline__ int begin_of(int unit) const { return max(Base::first_item, (Base::first_unit + unit) * Base::routing.groups); }
    __device__ __forceinline__ int items_of(int unit) const { return min(Base::end_item, (Base::first_unit + unit + 1) * Base::routing.groups) - begin_of(unit); }
    __device__ __forceinline__ int rounds_of(int unit) const { return divide(items_of(unit) + warps - 1, job.by_slots); }
    __device__ __forceinline__ int own_of(int unit) const { return divide(items_of(unit) + warps - 1 - warp, job.by_slots); }   // of this warp
    // A slot's item, and in which of the block's rounds it is.
    __device__ __forceinline__ Found find(int slot) const {
        int unit = 0, rounds = 0;
        for (; unit + 1 < Base::own_units && slot >= own_of(unit); ++unit) slot -= own_of(unit), rounds += rounds_of(unit);
        return {begin_of(unit) + slot * warps + warp, rounds + slot};
    }
    __device__ __forceinline__ int count() const { return own * geometry.chunks_per_row_group; }
    __device__ __forceinline__ u32 group_of(u32 place) const { return Base::group_of_item(find(min(int(place >> 16), own - 1)).item); }

    __device__ __forceinline__ void fetch_x() const {}
    __device__ __forceinline__ void clear_flags() const {
        for (int i = threadIdx.x; i < 1 + warps; i += kLanes * warps) store_shared(come + 4 * i, 0u);
    }
    // Goes on with a turn, whatever is in front of it.
    __device__ __forceinline__ void move_to(int next) {
        turn = next;
        __syncwarp();
        if (lane == 0) set_flag(taken + 4 * warp, u32(turn));
        const u32 place = Base::x + (turn - divide(turn, job.by_ring) * kPlaces<octets>) * (Base::routing.unit_pairs * kColumnBytes);
        const int g = lane >> 2;
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) columns.any[octet] = g + 8 * octet < rows;
#pragma unroll
        for (int q = 0; q < 4; ++q) columns.steps[q] = place + g * kColumnBytes + 32 * (q ^ (g & 3)) + 8 * (lane & 3);
    }
    __device__ __forceinline__ void begin(const Vec2& piece, Sums<octets>& sums) {
        const Found found = find(int(piece.x >> 16));
        rows = int(units[unit_of(found.item)].count);
        move_to(found.round * turns());
        sums = {};
    }
    __device__ __forceinline__ void await_turn() const { wait_until(come, u32(turn) + 1); }
    __device__ __forceinline__ void end_turn() { move_to(turn + 1); }
    __device__ __forceinline__ void skip_turn() { move_to(turn + 1); }
    __device__ __forceinline__ void pass() const {
        __syncwarp();
        if (lane == 0) set_flag(taken + 4 * warp, ~0u >> 1);
    }
    __device__ __forceinline__ void close(const Sums<octets>& sums, int slot, int) const { Base::store(sums, find(slot).item); }

    // What the warp does that brings x.
    __device__ __forceinline__ void bring(const Packed& packed, const WalkMemory& at) const {
        let_kernel_behind_start();
        const Table<true> table(packed, at.words, at.words + job.table_words, false);
        table.build();
        copy_wait<0>();                  // its part of the table
        __syncthreads();
        auto publish = [&](int turns) {
            __syncwarp();
            if (lane == 0) set_flag(come, u32(turns));
        };
        auto is_needed = [&](int turn) { return __any_sync(kFull, lane < warps && int(read_flag(taken + 4 * min(lane, warps - 1))) <= turn); };
        const int stage = lane >> 3, part = lane & 7, count = turns();   // of a turn's 64 units of 16 bytes each lane brings two, four stages apart
        int turn = 0;
        for (int unit = 0; unit < Base::own_units; ++unit)
            for (int round = rounds_of(unit); round > 0; --round)
#pragma unroll 1
                for (int own = 0; own < count; ++own, ++turn) {
                    const int before = turn - kPlaces<octets>;           // that was in its place
                    if (before >= 0 && is_needed(before)) {
                        copy_wait<0>();
                        publish(turn);
                        while (is_needed(before)) __nanosleep(40);
                    }
                    const int first = own * kTurn + stage, number = turn - divide(turn, job.by_ring) * kPlaces<octets>;
                    const u32 place = Base::x + number * (Base::routing.unit_pairs * kColumnBytes) + stage * 128;
#pragma unroll 4
                    for (int row = 0; row < int(units[unit].count); ++row) {
                        const u16* from = Base::row_of(units[unit].pairs[row]) + 64 * first + 8 * part;
                        const u32 to = place + row * kColumnBytes + 16 * (part ^ 2 * (row & 3));
                        if (first < geometry.stages) copy_async(to, from);
                        if (first + 4 < geometry.stages) copy_async(to + 512, from + 256);
                    }
                    copy_commit();
                    constexpr int kFlying = kPlaces<octets> - 1;
                    copy_wait<kFlying - 1>();
                    if (turn >= kFlying - 1) publish(turn - kFlying + 2);
                }
        copy_wait<0>();
        publish(turn);
    }
};

// Starts copying the decode table, while the kernel in front ends.
__device__ __forceinline__ void copy_table_early(const Packed& packed, u32* memory) {
    if (packed.table) copy_table(packed, u32(__cvta_generic_to_shared(memory)), threadIdx.x, blockDim.x);
    copy_commit();
}

template <int octets>
__device__ __forceinline__ void linear_in_step(const Geometry& geometry, const Packed& packed, const Job& job, const Routing& routing) {
    extern __shared__ __align__(128) u32 memory[];
    int lane = threadIdx.x & 31;
    keep(lane);
    const int warps = (blockDim.x >> 5) - 1;
    const WalkMemory at = walk_memory(job, memory, own_warp(), warps);
    copy_table_early(packed, memory);
    InStep<octets> way(geometry, job, routing, at, warps, lane);
    __syncwarp();
    if (own_warp() == warps) return way.bring(packed, at);
    walk<InStep<octets>, octets, kNowhere>(geometry, packed, job, at, way, lane);
}

template <int octets>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job, const Routing& routing) {
    extern __shared__ __align__(128) u32 memory[];
    int lane = threadIdx.x & 31;
    keep(lane);
    const WalkMemory at = walk_memory(job, memory, own_warp(), blockDim.x >> 5);
    copy_table_early(packed, memory);
    Experts<octets> way(geometry, job, routing, at, lane);
    __syncwarp();
    walk<Experts<octets>, octets, kNowhere>(geometry, packed, job, at, way, lane);
}
