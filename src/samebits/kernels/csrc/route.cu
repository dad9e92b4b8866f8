// What comes before linear_routed.cuh's products: units, and x for each of them.
#include "arrange.cuh"
#include "unit_tables.cuh"

// By one block. Shared memory: a word for each expert.
extern "C" __global__ void __launch_bounds__(1024) route_experts(const __grid_constant__ Job job, const __grid_constant__ Routing routing) {
    extern __shared__ __align__(128) u32 counts[];   // of each expert: pairs, then the first place of its units
    const UnitTables tables(job, routing);
    const int threads = blockDim.x, lane = threadIdx.x & 31, wide = routing.unit_pairs;
    let_kernel_behind_start();
    for (int expert = threadIdx.x; expert < routing.experts; expert += threads) counts[expert] = 0;
    await_kernel_before();
    for (int place = threadIdx.x; place < routing.units * wide; place += threads) tables.pairs[place] = kNoPair;
    __syncthreads();
    for (int pair = threadIdx.x; pair < routing.pairs; pair += threads) {
        const u32 expert = routing.expert_of(pair);
        tables.places[pair] = expert == kNoExpert ? kNoPair : atomicAdd(counts + expert, 1) << 16 | expert;   // linear/routed.py: _MAX_PAIRS
    }
    __syncthreads();
    if (threadIdx.x < kLanes) {
        int units = 0, octets = 0;
        for (int first = 0; first < routing.experts; first += kLanes) {
            const int expert = first + lane, count = expert < routing.experts ? int(counts[expert]) : 0;
            const int own_units = divide(count + wide - 1, routing.by_unit_pairs), own_octets = (count + 7) >> 3;
            int all_units, all_octets;
            const int unit = units + sum_before(own_units, lane, all_units), octet = octets + sum_before(own_octets, lane, all_octets);
            for (int i = 0; i < own_units; ++i) {
                const int octets_before = i * (wide >> 3);
                tables.units[unit + i] = {u32(expert), u32(octet + octets_before), u32(min(own_octets - octets_before, wide >> 3)), 0};
            }
            if (expert < routing.experts) counts[expert] = unit * wide;
            units += all_units, octets += all_octets;
        }
        if (lane == 0) *tables.count = units;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < routing.pairs; pair += threads) {
        const u32 found = tables.places[pair];
        if (found != kNoPair) tables.places[pair] = counts[found & 0xffff] + (found >> 16);
    }
}

// By a thread for each pair and step of 16 columns.
extern "C" __global__ void arrange_experts(const __grid_constant__ Geometry geometry, const __grid_constant__ Job job, const __grid_constant__ Routing routing) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, steps = geometry.columns >> 4, pair = index / steps, step = index - pair * steps;
    let_kernel_behind_start();
    await_kernel_before();
    if (pair >= routing.pairs) return;
    const UnitTables tables(job, routing);
    const u32 place = __ldcg(tables.places + pair);
    if (place == kNoPair) {
        const int rows = 8 * routing.groups;
        for (int row = step; row < rows; row += steps) job.y[size_t(pair) * rows + row] = 0;
        return;
    }
    const int number = divide(int(place), routing.by_unit_pairs), row = int(place) - number * routing.unit_pairs;
    const Vec4 unit = tables.unit(number);
    if (step == 0) {
        tables.pairs[place] = pair;
        if (routing.scales) tables.scales[place] = routing.scales[pair];
    }
    const Vec4* source = reinterpret_cast<const Vec4*>(job.x + size_t(divide(pair, routing.by_sharing)) * geometry.columns + 16 * step);
    u8* tile = reinterpret_cast<u8*>(job.parts) + size_t(unit.y) * u32(geometry.stages) * (8 * 128);
    arrange_step(tile, 8 * int(unit.z), row, step, routing.unit_pairs == 256 ? 2 : 4, source[0], source[1]);
}
