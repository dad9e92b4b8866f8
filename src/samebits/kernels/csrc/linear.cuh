// What the kernels of the fused linear layer share. y = x W^T + bias for few tokens, W packed in the quad code (matrix layout), with the
// bits of cuBLAS, which adds like this: for each output and split range one fp32 sum, to which mma.m16n8k16 adds 16 columns after 16
// columns; the ranges' sums are added in order, then the bias, then one rounding. The steps of a range form a chain; nothing else has an
// order.
#pragma once
#include "packed.cuh"
#include "streams.cuh"

constexpr int kChunkStages = 16;
constexpr int kRun = 4;              // stages that are loaded, and decoded, as one
constexpr u32 kNibbles = 0x0f0f0f0fu;

// linear_chains.cuh: a warp's stages, in the three parts in which it goes through them. Of each part the first of its chunks, counted among the block's,
// and how many times 2^16. In `edges` 8 bits of each, four for the first stage in the first chunk, four for the last in the last; then the walk's number.
struct Walk { u32 parts[3], edges; };
constexpr int kWalks = 20;           // warps

// linear_relay.cuh: a weight that is decoded for a product to come, to rows of whole stages, as torch has it; the quad code, with a table in memory.
struct Prefetched {
    Packed packed;
    u16* output;         // [8 * row_groups, 64 * stages]; null behind the last one
    u32* claimed;        // counts its units
    int row_groups, stages;
};
constexpr int kMaxPrefetched = 8;

// linear_pairs.cuh: a cut between the shares of two blocks, with mma: the unit that it is in, or in front of, and behind which of its stages.
constexpr int kInRangeBits = 12, kCuts = 2 * kWalks * sizeof(Walk) / sizeof(u32);

struct Job {
    const u16* x;        // [tokens, columns], or as arrange.cu writes it
    const u16* bias;     // [rows] or null
    u16* y;              // [tokens, rows]
    float* parts;        // linear_pairs.cuh, linear_rounds.cuh, linear_tiles.cuh: where ranges' sums meet; linear_routed.cuh: x for each unit, arranged;
                         // linear_relay.cuh: where the weight is decoded to; there behind it,
                         // in linear_tiles.cuh first of all, in linear_clusters.cuh alone: each block's tensor map
    u32* done;           // and, for each meeting, how many have come; or what is claimed, and flags; linear_routed.cuh: UnitTables
    int tokens, ranges, stages_per_range;
    int slots;           // row groups whose sums a block keeps in shared memory; linear_rounds.cuh: of a round
    int batches;         // of so many row groups; linear_relay.cuh: tiles of rows that are decoded side by side
    int chunk_step, slot_step;   // warps of a block = chunk_step * slots + slot_step
    int first_block, blocks;     // of the grid; linear_rounds.cuh: of a segment
    int own, longer;     // row groups of a block; of the first `longer` blocks one more
    int token_tiles, units;      // linear_pairs.cuh, units of all blocks; linear_relay.cuh, linear_clusters.cuh: pairs of tiles of tokens, and items
    u32 by_token_tiles, by_ranges;
    int segments, segment_stages;   // linear_ahead.cuh, linear_rounds.cuh, linear_tiles.cuh: of K; linear_relay.cuh: pairs of a pass, and stages of a part of a shared item
    u32 by_ring;
    u32 by_slots, by_range, by_chunks;   // for `divide`
    int table_words, x_words, buffer_words;   // of shared memory: decode table, x (before that, without Hopper's kernels, the table's entries), each staging buffer
    int x_places;        // linear_ahead.cuh: runs of x that a segment keeps; linear_rounds.cuh: turns of x; linear_tiles.cuh: slots of x
    int ring;            // linear_tiles.cuh: pairs of stages that a block keeps decoded, at least those of the chunks that a warp is ahead;
                         // linear_pairs.cuh: slots of x; with mma, pairs of stages;
                         // linear_ahead.cuh: runs that a line keeps decoded; linear_relay.cuh: parts of stages; linear_clusters.cuh: stages
    union {
        Walk walks[2][kWalks];           // of the warps of blocks with one row group more, and of others
        u32 cuts[kCuts];                 // around the blocks' shares
        Prefetched prefetched[kMaxPrefetched];   // linear_relay.cuh
    };
    u32 x_map[32];       // linear_relay.cuh, linear_tiles.cuh, linear_clusters.cuh: the tensor map of x, but for its address

    __device__ __forceinline__ int block() const { return int(blockIdx.x) - first_block; }
    __device__ __forceinline__ int row_groups_of(int block) const { return own + (block < longer); }
};

// One matrix and what is multiplied with it. Products of one launch have different blocks of the grid.
struct Product {
    Geometry geometry;
    Packed packed;
    Job job;
};

constexpr int kMaxTogether = 4;
struct Together {
    Product products[kMaxTogether];

    __device__ __forceinline__ const Product& own() const {
        return products[own_number<kMaxTogether>([&](int i) { return products[i].job.first_block; })];
    }
};

// What a kernel takes: one weight, or several.
__device__ __forceinline__ const Product& own_product(const Product& product) { return product; }
__device__ __forceinline__ const Product& own_product(const Together& together) { return together.own(); }

// The last argument: the device function that does it.
#define LINEAR_KERNEL(name, Argument, max_warps, ...)                                                          \
    extern "C" __global__ void __launch_bounds__((max_warps) * 32, 1) name(const __grid_constant__ Argument argument) { \
        const Product& product = own_product(argument);                                                        \
        __VA_ARGS__(product.geometry, product.packed, product.job);                                            \
    }

__device__ __forceinline__ void multiply(float sums[4], const u32 x[4], u32 low, u32 high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(low), "r"(high));
}

// Keeps a number in its register: the compiler would rather load or compute it again at every stage.
template <class Number>
__device__ __forceinline__ void keep(Number& number) { asm volatile("" : "+r"(number)); }

// (a & mask) | c, which the compiler would make of two instructions.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 c) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(c));
    return result;
}

// Signs to the upper bytes of a stage's quads; `sign` has the stage's half of the sign word on top (5.2).
__device__ __forceinline__ Vec4 with_signs(u32 sign, const Vec4& upper) {
    return {and_or(sign, kSignMask, upper.x), and_or(sign << 1, kSignMask, upper.y), and_or(sign << 2, kSignMask, upper.z), and_or(sign << 3, kSignMask, upper.w)};
}

// The first look-ups of a stage, one in each of a lane's streams.
struct LookUps { u32 windows[2], entries[2]; };

__device__ __forceinline__ void change_if(u32& value, u32 place, u32 here, u32 change) {
    asm("{ .reg .pred hit;\n"
        "  setp.eq.u32 hit, %1, %2;\n"
        "  @hit xor.b32 %0, %0, %3; }" : "+r"(value) : "r"(place), "r"(here), "r"(change));
}

// A chunk at a lane's streams, decoded stage by stage: begin, go_on, complete, mend. What stands between these calls runs while they wait.
struct Opened {
    static constexpr u32 kInBlock = 0xffffff;
    Stream streams[2];
    u32 patch, next_patch;         // the next patch, and where it is; of a raw chunk 0, so that each stage is mended, and raw_chunk()
    u32 passed = 0;                // stages, times 2^16, that `patch` does not count any more

    // 6.2, 6.3. As StagedChunk::open: whatever the contents, nothing behind the chunk's end starts a stream or a patch.
    __device__ __forceinline__ void open(u32 at, int size, int stages, int lane) {
        const u32 head = load_shared(at), steps = load_shared_u8(at + 4 + lane);
        if (lane == 0) store_shared(at + 4 * size, kNoPatch);   // ends the patches
        const u32 base = head & 8191, unit = head >> 13 & 63, first = base + unit * (steps & 15);
        int total;
        const u32 start = kHeadWords * 32, end = u32(max(size, 1)) * 32;
        const u32 own = start + sum_before(int(first + base + unit * (steps >> 4)), lane, total);
        streams[0].start(at, min(own, end));
        streams[1].start(at, min(own + first, end));
        __syncwarp();
        const bool raw = head == 0 && size >= 1 + 128 * stages;
        next_patch = at + 4 * u32(size - min(int(head >> 19), max(size - kHeadWords, 0)));
        patch = raw ? 0 : load_shared(next_patch);
        if (raw) next_patch = raw_chunk(at, stages);
        passed = 0;
    }
    __device__ __forceinline__ LookUps begin(u32 table, u32 byte_mask) const {
        LookUps begun;
#pragma unroll
        for (int i = 0; i < 2; ++i) begun.windows[i] = streams[i].window();
#pragma unroll
        for (int i = 0; i < 2; ++i) begun.entries[i] = look_up(table, begun.windows[i], byte_mask);
        return begun;
    }
    // The entries of the stage's four quads.
    __device__ __forceinline__ Vec4 go_on(const LookUps& begun, u32 table, u32 byte_mask) const {
        Vec4 entries{begun.entries[0], 0, begun.entries[1], 0};
        entries.y = look_up(table, begun.windows[0] >> (entries.x >> 28), byte_mask);
        entries.w = look_up(table, begun.windows[1] >> (entries.z >> 28), byte_mask);
        return entries;
    }
    // Moves the streams on, and makes upper bytes without signs of the entries. common: the upper nibble of each.
    __device__ __forceinline__ void complete(Vec4& quads, u32 common) {
        streams[0].move_to(streams[0].bit + (quads.x >> 28) + (quads.y >> 28));
        streams[1].move_to(streams[1].bit + (quads.z >> 28) + (quads.w >> 28));
        quads = {and_or(quads.x, kNibbles, common), and_or(quads.y, kNibbles, common), and_or(quads.z, kNibbles, common), and_or(quads.w, kNibbles, common)};
    }
    // From here on stages are counted from the one that many further, so that a loop can ask with numbers that are known.
    __device__ __forceinline__ void pass(int stages) {
        patch -= min(patch, u32(stages) << 16);
        passed += u32(stages) << 16;
    }
    // Of a raw chunk (6.5) at a shared address, but for its highest byte, which is a block's number in its cluster.
    static __device__ __forceinline__ u32 raw_chunk(u32 at, int stages) { return 1u << 31 | u32(stages - 1) << 24 | (at & kInBlock); }
    __device__ __forceinline__ bool is_raw() const { return int(next_patch) < 0; }
    // Of a raw chunk's stage the upper bytes without signs.
    template <bool in_cluster = false>
    __device__ __forceinline__ Vec4 read_raw(u32 stage, int lane) const {
        const u32 in_chunk = min(stage, next_patch >> 24 & 127), block = in_cluster ? streams[0].next & ~kInBlock : 0;
        const u32 tops = block + (next_patch & kInBlock) + 4 + 512 * in_chunk + 16 * lane;
        return {load_shared(tops) & ~kSignMask, load_shared(tops + 4) & ~kSignMask, load_shared(tops + 8) & ~kSignMask, load_shared(tops + 12) & ~kSignMask};
    }
    // What is left to do for a stage's upper bytes, rarely: patches (6.4), raw chunks. Stages come in their order.
    template <bool in_cluster = false>
    __device__ __forceinline__ void mend(Vec4& upper, int stage, int lane) {
        const u32 behind = u32(stage + 1) << 16;
        if (patch >= behind) return;
        if (int(next_patch) < 0) {   // asked as is_raw() the compiler would put patches behind another branch
            upper = read_raw<in_cluster>((passed >> 16) + stage, lane);
            return;
        }
        do {
            const u32 change = lane == (patch >> 9 & 31) ? (patch & 127) << (8 * (patch >> 7 & 3)) : 0, step = patch >> 14 & 3;
            next_patch += 4;
            patch = load_shared(next_patch) - passed;
            change_if(upper.x, step, 0, change);
            change_if(upper.y, step, 1, change);
            change_if(upper.z, step, 2, change);
            change_if(upper.w, step, 3, change);
        } while (patch < behind);
    }
};

// Flags in shared memory. A warp's accesses to it happen in the order of the program, so what a warp wrote before a flag (__syncwarp between)
// is there for whoever has seen the flag. Release and acquire would say the same, but wait for the warp's loads from global memory.
__device__ __forceinline__ u32 read_flag(u32 flag) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(flag) : "memory");
    return value;
}

__device__ __forceinline__ void set_flag(u32 flag, u32 value) {
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ u32 add_to_flag(u32 flag, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(flag), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ void wait_until(u32 flag, u32 value) {
    while (read_flag(flag) < value) __nanosleep(40);
}

// Where a warp's sums of all ranges meet, in memory: [ranges][tiles * count][32].
template <int tiles, int count>
struct Meeting {
    static constexpr int all = tiles * count;
    using Sums = float[tiles][count];
    float* parts;
    int lane;

    __device__ __forceinline__ float* part(int range) const { return parts + range * (all * kLanes) + lane; }
    __device__ __forceinline__ void bring(int range, const Sums& sums) const {
        float* own = part(range);
#pragma unroll
        for (int i = 0; i < all; ++i) __stcg(own + i * kLanes, sums[i / count][i % count]);
    }
    // Whether this warp is the last of so many that bring some. done: how many have come.
    __device__ __forceinline__ bool is_last(u32* done, int parties) const {
        __threadfence();
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = atomicAdd(done, 1);
        const bool is_last = int(__shfl_sync(kFull, before, 0)) + 1 == parties;
        if (is_last) __threadfence();
        return is_last;
    }
    // What was brought is there for whoever has seen the flag; another warp waits for it.
    __device__ __forceinline__ void raise(u32* flag) const {
        __threadfence();
        __syncwarp();
        if (lane == 0) atomicExch(flag, 1);
    }
    static __device__ __forceinline__ void await_flag(const volatile u32* flag) {
        while (*flag == 0) __nanosleep(40);
        __threadfence();
        __syncwarp();
    }
    // What was brought for the first range, or zeros; without a branch, behind which the compiler would have wgmmas wait for each other.
    __device__ __forceinline__ void take_if(bool any, Sums& sums) const {
#pragma unroll
        for (int i = 0; i < all; ++i)
            asm volatile("{ .reg .pred any;\n"
                         "  setp.ne.u32 any, %2, 0;\n"
                         "  mov.f32 %0, 0f00000000;\n"
                         "  @any ld.global.cg.f32 %0, [%1]; }" : "=f"(sums[i / count][i % count]) : "l"(part(0) + i * kLanes), "r"(u32(any)) : "memory");
    }
    // Adds all ranges' in order. If they are few, several are on their way at once.
    __device__ __forceinline__ void add(int ranges, Sums& sums) const {
        constexpr int at_once = all < 32 ? 32 / all : 1;
        auto load = [&](int range, int i) { return __ldcg(part(range) + i * kLanes); };
#pragma unroll
        for (int i = 0; i < all; ++i) sums[i / count][i % count] = load(0, i);
        int range = 1;
        if constexpr (at_once > 1) {
#pragma unroll 1
            for (; range + at_once <= ranges; range += at_once) {
                float loaded[at_once][all];
#pragma unroll
                for (int i = 0; i < at_once * all; ++i) loaded[i / all][i % all] = load(range + i / all, i % all);
#pragma unroll
                for (int i = 0; i < at_once * all; ++i) sums[i % all / count][i % count] += loaded[i / all][i % all];
            }
        }
#pragma unroll 1
        for (; range < ranges; ++range)
#pragma unroll
            for (int i = 0; i < all; ++i) sums[i / count][i % count] += load(range, i);
    }
};

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// Four words of each of a quad's lanes, of which lane t gets the t-th of all four.
__device__ __forceinline__ Vec4 transpose(const u32 (&words)[4], int t) {
    const bool odd = t & 1, upper = t & 2;
    u32 own[4];     // of this lane and its neighbour, word 0 or 1 of both and then word 2 or 3
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(kFull, odd ? words[i] : words[i + 1], 1);
        own[i] = odd ? other : words[i];
        own[i + 1] = odd ? words[i + 1] : other;
    }
    const u32 first = __shfl_xor_sync(kFull, upper ? own[0] : own[2], 2), second = __shfl_xor_sync(kFull, upper ? own[1] : own[3], 2);
    return upper ? Vec4{first, second, own[2], own[3]} : Vec4{own[0], own[1], first, second};
}

// Brings bytes from memory to L2, ahead of the loads to registers. By one thread.
__device__ __forceinline__ void prefetch(const u8* data, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes & ~15));
#else
    for (int byte = 0; byte < bytes; byte += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(data + byte));
#endif
}

__device__ __forceinline__ void prefetch_planes(const u8* planes, int stages, int lane) {
    if (lane == 0) prefetch(planes, stages * (kSlabBytes / 2));
}

__device__ __forceinline__ Vec4 load_raw(const u8* slab, int stage, int lane) {
    return load_once(slab + (stage >> 1) * kSlabBytes + kSignBytes + (stage & 1) * kStageBytes + 16 * lane);
}
