// The fused linear layer where chains are few: a block's row groups are its *slots*, a *task* is a chunk of one of them. A warp
//   1. decodes its chunk's upper bytes to shared memory, which depends on nothing else,
//   2. takes over the sums that the chunk before left in shared memory, multiplies, and leaves them for the chunk behind,
// while the streams of its next task are copied to shared memory. Tasks are numbered chunk by chunk through all slots: chains advance
// together, and a task only waits for tasks of lower number. See linear.cuh.
#pragma once
#include "tasks.cuh"
#include "tokens.cuh"

constexpr int kMaxWarps = 16;
constexpr int kUpperWords = kChunkStages * 128;         // of a decoded chunk: [stage][lane][step], a quad's upper bytes
constexpr int kSignWords = kChunkStages / 2 * kLanes;   // a chunk's sign words

// Rare, and so out of line.
__device__ __noinline__ void read_chunk(const u32* words, u32 upper, u32 signs, int count, int lane) {
    for (int s = 0; s < count; ++s)
        store_shared(upper + s * 512, read_stage(words, s, lane, load_shared(signs + s / 2 * kSignBytes + 4 * lane) << (4 * (s & 1))));
}

template <int kind, int octets>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int block = job.block(), own = job.row_groups_of(block), chunks = geometry.chunks_per_row_group;
    const Tasks tasks{chunks, job.slots, own, job.batches, job.chunk_step, job.slot_step, job.by_slots, block, job.blocks};
    const int chains = job.slots * job.ranges;

    // Shared memory: table, its entries and then x, for each warp (a chunk's streams, its sign words, its upper bytes), sums, flags.
    const u32 base = u32(__cvta_generic_to_shared(shared));
    const int warp_words = job.buffer_words + kSignWords + kUpperWords;
    u32* buffer = shared + job.table_words + job.x_words + warp * warp_words;
    const u32 signs = u32(__cvta_generic_to_shared(buffer + job.buffer_words)), upper = signs + 4 * kSignWords + 16 * lane;
    u8* upper_bytes = reinterpret_cast<u8*>(buffer + job.buffer_words + kSignWords);
    float* all_sums = reinterpret_cast<float*>(shared + job.table_words + job.x_words + warps * warp_words);
    u32* flags = reinterpret_cast<u32*>(all_sums + chains * 64 * octets);
    const u32 progress = u32(__cvta_generic_to_shared(flags));     // [chains]: tickets of the chunks added
    const u32 done = progress + 4 * chains;                        // [slots]: ranges finished
    const u32 epoch = done + 4 * job.slots;                        // [slots]: batches finished
    const u32 x_shared = base + 4 * job.table_words;

    Vec4 raw[kRun];
    const u8* slab = nullptr;        // of the present task: its first
    int shift = 0;
    StagedPlace staged{};
    u32 start = 0, stop = 0;         // of the next task: its streams
    auto find_chunk = [&](const Task& task) {
        const u32* chunk = reinterpret_cast<const u32*>(packed.data + packed.offsets) + size_t(task.group) * chunks + task.chunk;
        start = load_u32(chunk);
        stop = load_u32(chunk + 1);
        shift = packed.shift;
        if (packed.has_row_shifts) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[task.group * 8 + (lane >> 2)];
    };
    auto slab_of = [&](const Task& task) {
        return packed.data + packed.planes + slab_offset(geometry.stages, task.group, task.chunk * kChunkStages);
    };
    auto stages_of = [&](const Task& task) { return min(kChunkStages, geometry.stages - task.chunk * kChunkStages); };
    auto stage_chunk = [&](const u8* slab, int stages) {
#pragma unroll 1
        for (int pair = lane >> 3; 2 * pair < stages; pair += 4)
            copy_async(signs + pair * kSignBytes + 16 * (lane & 7), slab + pair * kSlabBytes + 16 * (lane & 7));
        staged = stage_streams(packed, u32(__cvta_generic_to_shared(buffer)), start, stop, lane);
    };

    // What decoding needs first comes first from memory.
    let_kernel_behind_start();
    Task task = tasks.first(warp);
    const bool busy = tasks.has(task);
    if (busy) find_chunk(task);
    const Table<true> table(packed, shared, shared + job.table_words);
    for (int i = threadIdx.x; i < chains + 2 * job.slots; i += blockDim.x) flags[i] = 0;
    if (busy) {
        slab = slab_of(task);
        stage_chunk(slab, stages_of(task));
#pragma unroll
        for (int s = 0; s < kRun; ++s) raw[s] = load_raw(slab, s, lane);
        prefetch_planes(slab, stages_of(task), lane);
    }
    copy_commit();
    table.finish();
    bool x_staged = false;
    auto bring_x = [&] {
        await_kernel_before();
        stage_x<kind>(job.x, x_shared, job.tokens, geometry.columns);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        x_staged = true;
    };

    const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    const Tokens<kind, octets> tokens(job.x, x_shared, job.tokens, geometry.columns, lane);

    while (tasks.has(task)) {
        const int first_stage = task.chunk * kChunkStages, count = stages_of(task);
        const u32 scale = scale_of(shift);
        const Task next = tasks.behind(task);
        const u8* next_slab = slab;
        if (tasks.has(next)) {
            find_chunk(next);
            next_slab = slab_of(next);
            prefetch_planes(next_slab, stages_of(next), lane);
        }

        // 1. Decode.
        copy_wait<0>();
        __syncwarp();
        StagedChunk chunk;
        Stream streams[2];
        chunk.open(buffer + staged.begin, staged.size, count, lane, streams);
#pragma unroll 1
        for (int s = 0; s < count; s += 2) {
            const u32 sign = load_shared(signs + s * 64 + 4 * lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                store_shared(upper + (s + i) * 512, decode_stage(streams, base, byte_mask, common, sign << 4 * i));
            }
        }
        if (chunk.raw) read_chunk(chunk.words, upper, signs, count, lane);
        __syncwarp();
#pragma unroll 1
        for (u32 i = lane; i < chunk.patches; i += kLanes) {
            const u32 patch = chunk.words[staged.size - chunk.patches + i];
            const u32 place = (patch >> 16) * 512 + (patch >> 9 & 31) * 16 + (patch >> 14 & 3) * 4 + (patch >> 7 & 3);
            if (patch >> 16 < u32(count)) upper_bytes[place] ^= patch & 127;
        }
        __syncwarp();
        if (tasks.has(next)) stage_chunk(next_slab, stages_of(next));
        copy_commit();
        if (!x_staged) bring_x();   // decoding needs nothing of the kernel before

        // 2. Multiply, for each range that has stages in this chunk. The first may have to wait, so it comes last.
        int first_range = 0, range_end = job.stages_per_range;
#pragma unroll 1
        while (range_end <= first_stage) ++first_range, range_end += job.stages_per_range;
        int range = first_range;
#pragma unroll 1
        while (range_end < first_stage + count) ++range, range_end += job.stages_per_range;
        for (; range >= first_range; --range) {
            const int range_begin = range * job.stages_per_range;
            const int low = max(range_begin - first_stage, 0), high = min(range_begin + job.stages_per_range - first_stage, count);
            u32 active = ((1u << high) - 1) & ~((1u << low) - 1);
            const bool opens = range_begin >= first_stage;
            const bool closes = first_stage + high == min(range_begin + job.stages_per_range, geometry.stages);
            const int chain = task.slot * job.ranges + range;
            float* handed = all_sums + chain * 64 * octets + lane;
            float sums[4] = {};
            if (!opens) {
                wait_until(progress + 4 * chain, task.batch * chunks + task.chunk);
#pragma unroll
                for (int i = 0; i < 2 * octets; ++i) sums[i] = handed[32 * i];
            }
            const u8* following = range > first_range ? slab : next_slab;
            const u8* ahead = slab;
#pragma unroll 1
            for (int run = 0; run < count; run += kRun) {
                ahead = run + kRun < count ? ahead + kRun / 2 * kSlabBytes : following;
                const Tokens<kind, octets> here = tokens.from(first_stage + run);
                const u32 run_upper = upper + run * 512;
                auto step = [&](int s, Vec4 bytes) { multiply_stage(sums, here, s, bytes, load_shared_vec4(run_upper + s * 512), scale); };
                constexpr u32 whole = (1u << kRun) - 1;
                if ((active & whole) == whole) {
#pragma unroll
                    for (int s = 0; s < kRun; ++s) {
                        step(s, raw[s]);
                        raw[s] = load_raw(ahead, s, lane);
                    }
                } else {   // a range begins or ends here; rare, and so kept short
#pragma unroll 1
                    for (int s = 0; s < kRun; ++s)
                        if (active >> s & 1) step(s, load_raw(slab, run + s, lane));
#pragma unroll
                    for (int s = 0; s < kRun; ++s) raw[s] = load_raw(ahead, s, lane);
                }
                active >>= kRun;
            }
            if (opens && !(closes && job.ranges == 1)) wait_until(epoch + 4 * task.slot, task.batch);   // the batch before has read its sums
            if (!closes) {
#pragma unroll
                for (int i = 0; i < 2 * octets; ++i) handed[32 * i] = sums[i];
                __syncwarp();
                if (lane == 0) set_flag(progress + 4 * chain, task.batch * chunks + task.chunk + 1);
                continue;
            }
            if (job.ranges > 1 && !join_ranges<octets>(sums, all_sums + task.slot * job.ranges * 64 * octets, done + 4 * task.slot,
                                                       (task.batch + 1) * job.ranges, range, job.ranges, lane)) continue;
            finish<octets>(geometry, job, task.group, lane, sums);
            __syncwarp();
            if (lane == 0) set_flag(epoch + 4 * task.slot, task.batch + 1);
        }
        slab = next_slab;
        task = next;
    }
    if (!x_staged) bring_x();
}
