// The fused linear layer where x is too large for a block's memory: warps walk (walk.cuh) row groups of their own, all in step, and another warp brings x turn
// by turn into a ring for all of them. See linear.cuh.
//
//   segment    whole ranges of K behind each other, of which a block has one
//   round      a row group for each warp, through the block's segment
//
// Sums of several ranges meet in memory.
#pragma once
#include "hopper.cuh"
#include "walk.cuh"

constexpr int kMaxWarps = 19, kFewWarps = 14;   // that walk, for 8 tokens, and for 16; with one that brings x, and one of arrange.cu, which finds a place beside
                                                // them before the next launch, whole fours, each of a scheduler's registers
constexpr int kColumnBytes = kTurn * 128;       // of a token in a turn of x, up to eight of them

// The turns of x in shared memory and on their way there; the one at hand.
template <int octets>
struct Turns {
    u32 full, empty;              // shared addresses of the places' barriers
    u32 place_bytes;
    int places;
    RingPlace at_hand{0, 0};

    __device__ __forceinline__ Turns(const Job& job, const WalkMemory& at)
        : full(u32(__cvta_generic_to_shared(at.words + at.behind))), empty(full + 8 * job.x_places), place_bytes(octets == 1 ? job.tokens * kColumnBytes : kTurn * kLeftStageBytes), places(job.x_places) {}
    __device__ __forceinline__ void await_full() const { await(full + 8 * at_hand.slot, at_hand.parity); }
    __device__ __forceinline__ void await_empty() const { await(empty + 8 * at_hand.slot, at_hand.parity ^ 1); }
};

// What of the weight a block multiplies: one segment of K, and every `blocks`-th row group from `place` on.
struct Share {
    int place, begin, end;        // begin, end: stages

    __device__ __forceinline__ Share(const Geometry& geometry, const Job& job) : place(job.block()), begin(0) {
        while (place >= job.blocks) place -= job.blocks, begin += job.segment_stages;
        end = min(begin + job.segment_stages, geometry.stages);
    }
    __device__ __forceinline__ int first_turn() const { return begin / kTurn; }
    __device__ __forceinline__ int turns() const { return (end - 1) / kTurn - first_turn() + 1; }
    __device__ __forceinline__ int first_chunk() const { return begin / kChunkStages; }
    __device__ __forceinline__ int chunks() const { return (end - 1) / kChunkStages - first_chunk() + 1; }
};

// A lane's part of x.
template <int octets>
struct TurnColumns;

// As it comes: for each token and stage 128 bytes, those of step q where 32 (q ^ (token & 3)) says, free of bank conflicts.
template <>
struct TurnColumns<1> {
    u32 steps[4];                 // of the turn at hand
    bool any;                     // as Columns

    __device__ __forceinline__ TurnColumns(u32 ring, int tokens, int lane) : any(lane >> 2 < tokens) {
        const int own = lane >> 2, t = lane & 3;
#pragma unroll
        for (int q = 0; q < 4; ++q) steps[q] = ring + min(own, tokens - 1) * kColumnBytes + 32 * (q ^ (own & 3)) + 8 * t;
    }
    __device__ __forceinline__ void advance(u32 bytes) {
#pragma unroll
        for (int q = 0; q < 4; ++q) steps[q] += bytes;
    }
    __device__ __forceinline__ void load(Vec4 (&x)[1], int stage, int half) const {
        const Vec2 first = load_shared_vec2_if(any, steps[2 * half] + stage * 128), second = load_shared_vec2_if(any, steps[2 * half + 1] + stage * 128);
        x[0] = {first.x, first.y, second.x, second.y};
    }
};

template <>
struct TurnColumns<2> : LeftColumns<2> {
    __device__ __forceinline__ TurnColumns(u32 ring, int, int lane) : LeftColumns<2>(ring, lane) {}
};

template <int octets>
struct Rounds {
    static constexpr bool copies_table = false, has_short_turns = false;
    static constexpr bool has_all_of_x = true;    // a turn's stages behind it are anything, and no sum keeps them
    const Geometry& geometry;
    const Job& job;
    const Share share;
    const int warp, warps, lane, rounds;          // rounds: in which this warp has a row group
    Turns<octets> turns;
    TurnColumns<octets> columns;

    __device__ __forceinline__ Rounds(const Geometry& geometry, const Job& job, const WalkMemory& at, int warp, int warps, int lane)
        : geometry(geometry), job(job), share(geometry, job), warp(warp), warps(warps), lane(lane),
          rounds(divide(job.row_groups_of(share.place) + warps - 1 - warp, job.by_slots)), turns(job, at), columns(at.x, job.tokens, lane) {}
    __device__ __forceinline__ int count() const { return rounds * share.chunks(); }
    __device__ __forceinline__ Vec2 at(int index) const {
        const int chunks = share.chunks();
        int slot = warp;
        while (index >= chunks) index -= chunks, slot += warps;
        const int chunk = share.first_chunk() + index, passed = chunk * kChunkStages;
        return describe_piece(geometry, job, slot, chunk, max(share.begin - passed, 0), min(share.end - passed, kChunkStages), index == 0, index + 1 == chunks);
    }
    __device__ __forceinline__ u32 group_of(u32 place) const { return (place >> 16) * job.blocks + share.place; }

    __device__ __forceinline__ void fetch_x() const {}
    __device__ __forceinline__ void clear_flags() const {}
    __device__ __forceinline__ void await_turn() const { turns.await_full(); }
    __device__ __forceinline__ void end_turn() {
        __syncwarp();
        if (lane == 0) arrive(turns.empty + 8 * turns.at_hand.slot);
        turns.at_hand.advance(turns.places);
        columns.advance(turns.at_hand.slot ? turns.place_bytes : turns.place_bytes - turns.places * turns.place_bytes);
    }
    __device__ __forceinline__ void skip_turn() const {}
    // Turns of rounds in which this warp has no row group.
    __device__ __forceinline__ void pass() {
#pragma unroll 1
        for (int left = (job.batches - rounds) * share.turns(); left > 0; --left) {
            await_turn();
            end_turn();
        }
    }
    __device__ __forceinline__ void begin(const Vec2&, Sums<octets>& sums) const { sums = {}; }
    __device__ __forceinline__ void hand_on(const Sums<octets>&) const {}
    __device__ __forceinline__ void close(Sums<octets>& sums, int slot, int range) const {
        finish_range(geometry, job, group_of(slot << 16), range, share.end, lane, sums);
    }
};

// The warp that brings x, as TurnColumns reads it: for each turn and token kColumnBytes; or, of more than eight tokens, by bulk copies.
template <int octets>
__device__ __forceinline__ void bring_x(const Geometry& geometry, const Packed& packed, const Job& job, const WalkMemory& at, int warps, int lane) {
    const Share share(geometry, job);
    Turns<octets> turns(job, at);
    let_kernel_behind_start();
    if (lane == 0) {
        for (int i = 0; i < job.x_places; ++i) open_barrier(turns.full + 8 * i, octets == 1 ? kLanes : 1), open_barrier(turns.empty + 8 * i, warps);
        if (octets > 1) show_barrier();
    }
    __syncwarp();
    const Table<true> table(packed, at.words, at.words + job.table_words);
    copy_commit();
    table.build();
    if (octets > 1) fence_async();   // x may come to where the entries were
    await_kernel_before();
    // Of a turn's 64 units of a token each lane brings two, four stages apart.
    const int stage = lane >> 3, unit = lane & 7;
    const u32 own_place = at.x + (octets == 1 ? stage * 128 : 0);
    auto bring = [&](int turn) {
        const int first = (share.first_turn() + turn) * kTurn;
        u32 to = own_place + turns.at_hand.slot * turns.place_bytes;
        const u32 full = turns.full + 8 * turns.at_hand.slot;
        turns.at_hand.advance(turns.places);
        if constexpr (octets > 1) {
            if (lane == 0) copy_bulk(to, left_stage(job.x, first), min(kTurn, geometry.stages - first) * kLeftStageBytes, full);
            __syncwarp();
            return;
        }
        const u16* from = job.x + 64 * first + 8 * lane;
#pragma unroll 4
        for (int token = 0; token < job.tokens; ++token) {
            const u32 there = to + 16 * (unit ^ 2 * (token & 3));
            if (first + stage < geometry.stages) copy_async(there, from);
            if (first + stage + 4 < geometry.stages) copy_async(there + 512, from + 256);
            to += kColumnBytes;
            from += geometry.columns;
        }
        copies_arrive(full);
    };
    bring(0);
    copy_commit();
    copy_wait<1>();                       // the table
    __syncthreads();
    const int count = share.turns();
    int turn = 1;
#pragma unroll 1
    for (int round = 0; round < job.batches; ++round, turn = 0)
#pragma unroll 1
        for (; turn < count; ++turn) {
            turns.await_empty();
            bring(turn);
        }
    copy_commit();
    copy_wait<0>();                       // nothing may be on its way when the block ends
}

template <int octets, Borders borders = kNowhere>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 memory[];
    int lane = threadIdx.x & 31;
    keep(lane);
    const int warp = own_warp(), warps = (blockDim.x >> 5) - 1;
    const WalkMemory at = walk_memory(job, memory, warp, warps);
    if (warp == warps) return bring_x<octets>(geometry, packed, job, at, warps, lane);
    Rounds<octets> way(geometry, job, at, warp, warps, lane);
    walk<Rounds<octets>, octets, borders>(geometry, packed, job, at, way, lane);
}
