// The fused linear layer where chains are many: each warp walks its own (walk.cuh). See linear.cuh, and linear_ahead.cuh for few chains.
//
//   walk       a warp's stages, as many as any other warp's; a block's stages are numbered row group after row group
//
// Where a walk ends inside a chain, the walk behind goes on with its sums. So a warp starts with its last chain, goes on with whole ones, and
// ends with its first: what it takes over there has long been left for it. A chunk in which a chain ends and another begins is decoded once, unless
// walks or their parts meet in it. linear/chains.py has worked out the walks.
#pragma once
#include "walk.cuh"

constexpr int kMaxWarps = kWalks, kFewWarps = 16;   // for 8 tokens, and for 16

template <Kind kind, int octets>
struct Chains {
    static constexpr bool has_all_of_x = kind == shared, copies_table = false, has_short_turns = false;
    static constexpr int kSums = 2 * octets;
    const Geometry& geometry;
    const Job& job;
    const Walk& own;
    const int block, number, lane;    // number: of the walk
    const u32 x;                      // shared address
    float *handed, *parts;            // shared memory: sums for the walk behind, of each warp; of all ranges
    u32 ready, done;                  // shared addresses of flags: [walks] sums handed to the one behind; [slots] ranges finished
    Columns<kind, octets> columns;

    __device__ __forceinline__ Chains(const Geometry& geometry, const Job& job, const WalkMemory& at, int block, const Walk& own, int lane)
        : geometry(geometry), job(job), own(own), block(block), number(own.edges >> 24), lane(lane), x(at.x), columns(job.x, at.x, job.tokens, geometry.columns, lane, 0) {
        const int warps = blockDim.x >> 5;
        handed = reinterpret_cast<float*>(at.words + at.behind);
        parts = handed + warps * kSums * kLanes;
        ready = u32(__cvta_generic_to_shared(parts + (job.ranges > 1 ? job.slots * job.ranges * kSums * kLanes : 0)));
        done = ready + 4 * warps;
    }
    __device__ __forceinline__ int count() const { return int((own.parts[0] >> 16) + (own.parts[1] >> 16) + (own.parts[2] >> 16)); }
    __device__ __forceinline__ Vec2 at(int index) const {
        u32 part = own.parts[0], edges = own.edges;
#pragma unroll
        for (int next = 1; next < 3; ++next)
            if (index >= int(part >> 16)) {
                index -= part >> 16;
                part = own.parts[next];
                edges >>= 8;
            }
        const bool first = index == 0, last = index + 1 == int(part >> 16);
        const int number = int(part & 0xffff) + index, slot = divide(number, job.by_chunks), chunk = number - slot * geometry.chunks_per_row_group;
        const int begin = first ? edges & 15 : 0, end = last ? (edges >> 4 & 15) + 1 : min(geometry.stages - chunk * kChunkStages, kChunkStages);
        return describe_piece(geometry, job, slot, chunk, begin, end, first, last);
    }
    __device__ __forceinline__ u32 group_of(u32 place) const { return (place >> 16) * job.blocks + block; }

    __device__ __forceinline__ void fetch_x() const {
        await_kernel_before();
        stage_columns<kind>(job.x, x, job.tokens, geometry.columns, blockDim.x);
    }
    __device__ __forceinline__ void clear_flags() const {
        for (int i = threadIdx.x; i < job.slots + int(blockDim.x >> 5); i += blockDim.x) store_shared(ready + 4 * i, 0u);
    }
    __device__ __forceinline__ void await_turn() const {}
    __device__ __forceinline__ void end_turn() { columns.advance(kTurn); }
    __device__ __forceinline__ void skip_turn() { columns.advance(kTurn); }
    __device__ __forceinline__ void pass() const {}
    __device__ __forceinline__ void begin(const Vec2& piece, Sums<octets>& sums) {
        const bool opens = piece.y & kOpens;
        if (!opens) wait_until(ready + 4 * (number - 1), 1);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums.of[i] = opens ? 0.0f : handed[((number - 1) * kSums + i) * kLanes + lane];
        columns.move_to(job.x, x, job.tokens, geometry.columns, lane, (piece.x & 0xffff) * kChunkStages);
    }
    __device__ __forceinline__ void hand_on(const Sums<octets>& sums) const {
#pragma unroll
        for (int i = 0; i < kSums; ++i) handed[(number * kSums + i) * kLanes + lane] = sums.of[i];
        __syncwarp();
        if (lane == 0) set_flag(ready + 4 * number, 1);
    }
    __device__ __forceinline__ void close(Sums<octets>& sums, int slot, int range) const {
        if (job.ranges == 1 || join(sums, parts + size_t(slot) * job.ranges * kSums * kLanes, done + 4 * slot, range, job.ranges, lane))
            finish(geometry, job, slot * job.blocks + block, lane, sums);
    }
};

template <Kind kind, int octets, Borders borders = kNowhere>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 memory[];
    int lane = threadIdx.x & 31;
    keep(lane);
    const int warp = own_warp(), block = job.block();
    const WalkMemory at = walk_memory(job, memory, warp, blockDim.x >> 5);
    Chains<kind, octets> way(geometry, job, at, block, job.walks[block < job.longer ? 0 : 1][warp], lane);
    walk<Chains<kind, octets>, octets, borders>(geometry, packed, job, at, way, lane);
}
