// The fused linear layer where chains are many: every warp walks chains of its own, (row group, range) after (row group, range), and
// decodes four stages, multiplies them, decodes the next. The ranges' sums meet in shared memory. See linear.cuh, and linear_ahead.cu for
// few chains.
#include "linear.cuh"

constexpr int kMaxWarps = 12;

template <int kind, int octets>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int own = (geometry.row_groups - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x), chains = own * job.ranges;

    // Shared memory: table, its entries, for each warp two staging buffers, sums, flags, x.
    const u32 base = u32(__cvta_generic_to_shared(shared));
    u32* buffers = shared + job.table_words + job.entry_words + warp * 2 * job.buffer_words;
    float* all_sums = reinterpret_cast<float*>(shared + job.table_words + job.entry_words + warps * 2 * job.buffer_words);
    u32* flags = reinterpret_cast<u32*>(all_sums + (job.ranges > 1 ? job.slots * job.ranges * 64 * octets : 0));
    const u32 done = u32(__cvta_generic_to_shared(flags));         // [slots]: ranges finished
    const u32 x_shared = base + ((done + 4 * job.slots - base + 127) & ~127u);

    // The chunk behind the present one: its chain, and where its streams and planes are.
    int chain = warp, place = 0, chunk = 0, last_chunk = 0;        // place: which of the block's row groups
    const u32* offset = nullptr;
    const u8* slab = nullptr;
    u32 start = 0, stop = 0;
    auto group_at = [&](int place) { return place * int(gridDim.x) + int(blockIdx.x); };
    auto open_chain = [&] {
        if (chain >= chains) return;
        place = chain / job.ranges;
        const int first = (chain - place * job.ranges) * job.stages_per_range;
        chunk = first / kChunkStages;
        last_chunk = (min(first + job.stages_per_range, geometry.stages) - 1) / kChunkStages;
        offset = reinterpret_cast<const u32*>(packed.data + packed.offsets) + size_t(group_at(place)) * geometry.chunks_per_row_group + chunk;
        slab = packed.data + packed.planes + slab_offset(geometry.stages, group_at(place), chunk * kChunkStages);
        start = load_u32(offset);
        stop = load_u32(offset + 1);
    };
    auto stages_of = [&](int chunk) { return min(kChunkStages, geometry.stages - chunk * kChunkStages); };

    // What decoding needs first comes first from memory.
    let_kernel_behind_start();
    open_chain();
    const CodeSection section(packed.data + packed.code, packed.symbols);
    for (int i = threadIdx.x; i < job.slots; i += blockDim.x) flags[i] = 0;
    Vec4 raw[kRun];
    u32 signs[kRun / 2];
    auto load_stage = [&](const u8* slab, int s) {
        raw[s] = load_raw(slab, s, lane);
        if (s & 1) signs[s / 2] = load_once_u32(slab + (s >> 1) * kSlabBytes + 4 * lane);
    };
    StagedPlace staged{};
    if (chain < chains) {
        staged = stage_streams(packed, buffers, start, stop, lane);
#pragma unroll
        for (int s = 0; s < kRun; ++s) load_stage(slab, s);
        prefetch_planes(slab, stages_of(chunk), lane);
    }
    copy_commit();
    build_table<true>(shared, shared + job.table_words, section, packed.width, packed.symbols, packed.window);
    await_kernel_before();
    stage_x<kind>(job.x, x_shared, job.tokens, geometry.columns);
    copy_commit();
    copy_wait<0>();
    __syncthreads();

    const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    const Tokens<kind, octets> tokens(job.x, reinterpret_cast<const u8*>(shared) + (x_shared - base), job.tokens, geometry.columns, lane);
    int side = 0;                    // which staging buffer
    while (chain < chains) {
        const int this_place = place, group = group_at(place), range = chain - place * job.ranges;
        const int first = range * job.stages_per_range, last = min(first + job.stages_per_range, geometry.stages);
        int shift = packed.shift;
        if (packed.has_row_shifts) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[group * 8 + (lane >> 2)];
        const u32 scale = scale_of(shift);
        float sums[4] = {};
        for (int stage = chunk * kChunkStages; stage < last; stage += kChunkStages) {
            const int count = min(kChunkStages, geometry.stages - stage);
            const u32* buffer = buffers + side * job.buffer_words;
            const StagedPlace present = staged;
            const u8* ahead = slab;
            side ^= 1;
            if (chunk < last_chunk) {
                ++chunk;
                ++offset;
                slab += kChunkStages / 2 * kSlabBytes;
                start = stop;
                stop = load_u32(offset + 1);
            } else {
                chain += warps;
                open_chain();
            }
            copy_wait<0>();
            __syncwarp();
            StagedChunk opened;
            Stream streams[2];
            opened.open(buffer + present.begin, present.size, count, lane, streams);
            const u32* patch_words = opened.words + present.size - opened.patches;
            const u32 patch = lane < opened.patches ? patch_words[lane] : kNoPatch;
            u32 special = opened.raw || opened.patches > kLanes ? kFull : __reduce_or_sync(kFull, patch == kNoPatch ? 0 : 1u << (patch >> 16 & 31));
            const int low = max(first - stage, 0), high = min(last - stage, count);
            u32 active = ((1u << high) - 1) & ~((1u << low) - 1);
            if (chain < chains) {
                staged = stage_streams(packed, buffers + side * job.buffer_words, start, stop, lane);
                prefetch_planes(slab, stages_of(chunk), lane);
            }
            copy_commit();
#pragma unroll 1
            for (int run = 0; run < count; run += kRun) {
                ahead = run + kRun < count ? ahead + kRun / 2 * kSlabBytes : slab;
                Vec4 upper[kRun];
#pragma unroll
                for (int s = 0; s < kRun; ++s) upper[s] = decode_stage(streams, base, byte_mask, common, signs[s / 2] << (4 * (s & 1)));
                constexpr u32 whole = (1u << kRun) - 1;
                if (special & whole) {
                    if (opened.raw) {
#pragma unroll
                        for (int s = 0; s < kRun; ++s)
                            upper[s] = read_stage(opened.words, min(run + s, count - 1), lane, signs[s / 2] << (4 * (s & 1)));
                    }
                    auto change = [&](u32 patch) {
#pragma unroll
                        for (int s = 0; s < kRun; ++s)
                            if (patch >> 16 == u32(run + s)) apply_patch(patch, lane, &upper[s].x);
                    };
#pragma unroll 1
                    for (u32 hits = __ballot_sync(kFull, (patch >> 16) / kRun == u32(run) / kRun); hits; hits &= hits - 1)
                        change(__shfl_sync(kFull, patch, __ffs(hits) - 1));
#pragma unroll 1
                    for (u32 i = kLanes; i < opened.patches; ++i) change(patch_words[i]);
                }
                const Tokens<kind, octets> here = tokens.from(stage + run);
                if ((active & whole) == whole) {
#pragma unroll
                    for (int s = 0; s < kRun; ++s) {
                        multiply_stage(sums, here, s, raw[s], upper[s], scale);
                        load_stage(ahead, s);
                    }
                } else {
#pragma unroll
                    for (int s = 0; s < kRun; ++s) {
                        if (active >> s & 1) multiply_stage(sums, here, s, raw[s], upper[s], scale);
                        load_stage(ahead, s);
                    }
                }
                active >>= kRun;
                special >>= kRun;
            }
            __syncwarp();
        }
        if (job.ranges > 1 && !join_ranges<octets>(sums, all_sums + this_place * job.ranges * 64 * octets, done + 4 * this_place, job.ranges,
                                                   range, job.ranges, lane)) continue;
        finish<octets>(geometry, job, group, lane, sums);
    }
}

#define LINEAR_KERNEL(name, kind, octets)                                                                                            \
    extern "C" __global__ void __launch_bounds__(kMaxWarps * 32, 1) name(const Geometry geometry, const Packed packed, const Job job) { \
        linear<kind, octets>(geometry, packed, job);                                                                                 \
    }
LINEAR_KERNEL(linear_8_halves, kHalves, 1)
LINEAR_KERNEL(linear_8_global, kGlobal, 1)
LINEAR_KERNEL(linear_16_pairs, kPairs, 2)
LINEAR_KERNEL(linear_16_global, kGlobal, 2)
