// Routed experts that have many pairs each: tiles of up to 64, 96, 128, 192 or 256 pairs of one expert, which warpgroups multiply with what they decode (linear_pairs.cuh).
// Whoever has been chosen the host does not know; the launches are the same whatever the router says. There are three:
//
//   route_experts     numbers units (routing.cuh), and gives each pair a place in one: route.cu
//   arrange_experts   writes x of each unit as wgmma takes it (arrange.cuh), stage by stage, with as many rows as the unit has, in whole octets
//   linear_routed     multiplies; an item is a unit and a tile of its expert's rows
//
// Which pairs of an expert share a unit, and where they are in it, may differ from launch to launch: no pair's sums depend on the others.
#pragma once
#include "linear_pairs.cuh"
#include "unit_tables.cuh"

template <int tokens>
struct WithRoutes : WithWgmma<tokens> {};

template <int tokens>
struct Units<WithRoutes<tokens>> {
    using Way = WithRoutes<tokens>;
    const Job& job;
    const int stages;
    const Routing& routing;
    const UnitTables tables;
    const int count;               // items

    __device__ __forceinline__ Units(const Job& job, int stages, const Routing& routing)
        : job(job), stages(stages), routing(routing), tables(job, routing), count(int(uniform(__ldcg(tables.count))) * routing.tiles) {}

    __device__ __forceinline__ int first() const { return job.block() / Way::cluster; }
    __device__ __forceinline__ int step() const { return job.blocks / Way::cluster; }
    __device__ __forceinline__ bool has(int index) const { return index < count; }
    __device__ __forceinline__ Unit at(int index) const {
        Unit unit{};
        unit.tokens = divide(index, routing.by_tiles);
        unit.tile = (index - unit.tokens * routing.tiles) * Way::cluster + job.block() % Way::cluster;
        unit.last = stages;
        const Vec4 found = tables.unit(unit.tokens);
        unit.matrix = int(found.x) * routing.groups, unit.octet = found.y, unit.octets = found.z;
        return unit;
    }
    __device__ __forceinline__ int row_groups(const Geometry&) const { return routing.groups; }
    __device__ __forceinline__ const u8* x_of(const Unit& unit) const {
        return reinterpret_cast<const u8*>(job.parts) + size_t(unit.octet) * u32(stages) * (8 * 128);
    }
    static __device__ __forceinline__ u32 x_stage_bytes(const Unit& unit) { return unit.octets * (8 * 128); }
};

// Each pair's sums go to its row of y.
template <int tokens>
struct Endings<WithRoutes<tokens>> {
    static constexpr int count = tokens / 2, words = tokens / kLanes;
    const Block<WithRoutes<tokens>>& block;
    u32 pairs[words];              // of the unit at hand, lane by lane
    float scales[words];

    __device__ __forceinline__ void begin(const Unit& unit) {
        if (tokens <= 128) find(unit);   // else the registers are needed
    }
    __device__ __forceinline__ void find(const Unit& unit) {
        const UnitTables& tables = block.units.tables;
        const int first = unit.tokens * tokens + block.lane;
#pragma unroll
        for (int i = 0; i < words; ++i) pairs[i] = __ldcg(tables.pairs + first + i * kLanes);
        if (block.units.routing.scales)
#pragma unroll
            for (int i = 0; i < words; ++i) scales[i] = __ldcg(tables.scales + first + i * kLanes);
    }
    __device__ __forceinline__ void take(int, float (&)[count]) const {}
    __device__ __forceinline__ void end(const Unit& unit, int warp, const float (&sums)[count]) {
        if (tokens > 128) find(unit);
        const bool is_scaled = block.units.routing.scales;
        const int g = block.lane >> 2, t = block.lane & 3, odd = t & 1;
        const int group = unit.tile * block.rows.block_groups + 2 * warp + odd, row = 8 * group + 4 * (t >> 1);
#pragma unroll
        for (int j = 0; j < tokens / 8; ++j) {
            const int first = 8 * (j & 3);   // of the octet's lanes
            const u32 pair = __shfl_sync(kFull, pairs[j >> 2], first + g);
            float factors[2];
            if (is_scaled)
#pragma unroll
                for (int i = 0; i < 2; ++i) factors[i] = __shfl_sync(kFull, scales[j >> 2], first + 2 * t + i);
            u32 words[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float low = sums[4 * j + 2 * h], high = sums[4 * j + 2 * h + 1];
                if (is_scaled) low *= factors[0], high *= factors[1];
                words[h] = transposed(to_bf16x2(low, high));
            }
            const u32 other = __shfl_xor_sync(kFull, odd ? words[0] : words[1], 1);
            if (group >= block.rows.row_groups || pair == kNoPair) continue;
            u32* const target = reinterpret_cast<u32*>(block.job.y + size_t(pair) * u32(8 * block.rows.row_groups) + row);
            target[0] = odd ? other : words[0], target[1] = odd ? words[1] : other;
        }
    }
};

template <int tokens>
__device__ __forceinline__ void linear_routed(const Geometry& geometry, const Packed& packed, const Job& job, const Routing& routing) {
    let_kernel_behind_start();
    await_kernel_before();
    linear<WithRoutes<tokens>>(geometry, packed, job, routing);
}
