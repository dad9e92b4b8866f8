// The fused linear layer where chains are many: a warp walks a row group as rows of mma's A operand, and decodes the stage behind while it
// multiplies the one at hand. See linear.cuh, and linear_ahead.cuh for few chains.
//
// A block's chains (row group, range) stand behind each other, and each of its warps has an equal *segment* of them, in
// stages. Where a segment ends inside a chain, the warp behind goes on with its sums. So a warp starts with its last chain and ends with its
// first: what it takes over has long been left for it.
#pragma once
#include "columns.cuh"

constexpr int kMaxWarps = 20;
constexpr int kRing = 4;                        // slabs: of the one at hand and those on their way
constexpr int kTurn = 2 * kRing;                // stages of the loop's body
static_assert(kChunkStages % kTurn == 0, "a chunk is whole turns");

// Chunk `chunk` of the block's row group `slot`, of which stages [first, last) belong to the part of a chain at hand.
struct alignas(16) Place { int slot, first, last, chunk; };

// A block's chains behind each other, in stages of all its row groups.
struct Chains {
    int stages, per_range;
    u32 by_stages, by_range;

    struct Chain { int slot, begin, end; };
    __device__ __forceinline__ Chain at(int position) const {
        const int slot = divide(position, by_stages), from = slot * stages, range = divide(position - from, by_range) * per_range;
        return {slot, from + range, from + min(range + per_range, stages)};
    }
};

// A warp's chunks in their order: its last part of a chain, whole chains, its first part.
struct alignas(16) Walk {
    Place place;
    int position, limit;
    int begin, first_end, last_begin;   // of the segment: the first part is [begin, first_end), the last starts at last_begin
    int valid;                          // whether there is a chunk

    Walk() = default;
    __device__ __forceinline__ Walk(const Chains& chains, int begin, int end) : limit(end), begin(begin), valid(true) {
        last_begin = max(begin, chains.at(end - 1).begin);
        first_end = min(chains.at(begin).end, last_begin);
        position = last_begin;
        open(chains);
    }
    __device__ __forceinline__ void open(const Chains& chains) {
        const Chains::Chain chain = chains.at(position);
        const int from = chain.slot * chains.stages, stop = min(chain.end, limit);
        place = {chain.slot, position - from, stop - from, (position - from) / kChunkStages};
        position = stop;
    }
    __device__ __forceinline__ void next(const Chains& chains) {
        if ((place.chunk + 1) * kChunkStages < place.last) {
            ++place.chunk;
            return;
        }
        if (position >= limit) {
            if (limit > last_begin && first_end < last_begin) position = first_end, limit = last_begin;
            else if (limit > first_end && begin < first_end) position = begin, limit = first_end;
            else valid = false;
        }
        if (valid) open(chains);
    }
};

// What a warp keeps in shared memory of the chunks on their way.
struct alignas(16) Ahead {
    Walk walk;                     // at the chunk behind the staged one, whose offsets are on their way
    Place staged;
    Place opened, part;            // the chunk at the streams, and the first of the part of a chain at hand
    u32 shifts[2][2];              // [buffer]: of its eight rows
    Vec2 copied[2];                // [buffer]: where the staged chunk is in its buffer, and its size, in words
    u32 offsets[2];                // start and stop
    u32 opened_at;                 // shared address of the opened chunk's first word
    int opened_stages;
    int staged_valid;
};
static_assert(sizeof(Ahead) == 160, "linear_launch.py: _WALK_WORDS");

// A warp's slabs in shared memory and on their way there, by asynchronous copies, of which each lane reads what it has copied itself: loads to
// registers would have to be waited for all at once.
struct Ring {
    u32 slabs;

    // The slab behind one that has been read, to its place; in the order of places, each a group of copies of its own.
    __device__ __forceinline__ void fetch(int place, const u8* slab, int lane) const {
        const u32 target = slabs + place * kSlabBytes;
        copy_async_4(target + 4 * lane, slab + 4 * lane);
        copy_async(target + kSignBytes + 16 * lane, slab + kSignBytes + 16 * lane);
        copy_async(target + kSignBytes + kStageBytes + 16 * lane, slab + kSignBytes + kStageBytes + 16 * lane);
    }
    __device__ __forceinline__ void await_next() const { copy_wait<kRing - 1>(); }
    __device__ __forceinline__ Vec4 bytes(int stage, int lane) const {
        return load_shared_vec4(slabs + (stage >> 1) * kSlabBytes + kSignBytes + (stage & 1) * kStageBytes + 16 * lane);
    }
    __device__ __forceinline__ u32 sign(int stage, int lane) const { return load_shared(slabs + (stage >> 1) * kSlabBytes + 4 * lane) << 4 * (stage & 1); }
};

template <Kind kind, int octets>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 memory[];
    constexpr int kSums = 2 * octets;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, block_warps = blockDim.x >> 5;
    const int block = job.block(), own = job.row_groups_of(block), warps = min(block_warps, own * job.ranges);
    const Chains chains{geometry.stages, job.stages_per_range, job.by_stages, job.by_range};

    // Shared memory: table, its entries and then x, for each warp two staging buffers and a ring of slabs, its state, sums, flags.
    const int warp_words = 2 * job.buffer_words + kRing * kSlabBytes / 4;
    const u32 base = u32(__cvta_generic_to_shared(memory));
    const u32 x_shared = base + 4 * job.table_words;
    u32* buffers = memory + job.table_words + job.x_words + warp * warp_words;
    u32* behind = memory + job.table_words + job.x_words + block_warps * warp_words;
    Ahead& ahead = reinterpret_cast<Ahead*>(behind)[warp];
    float* handed = reinterpret_cast<float*>(behind + block_warps * sizeof(Ahead) / 4);
    float* parts = handed + block_warps * kSums * kLanes;
    u32* flags = reinterpret_cast<u32*>(parts + (job.ranges > 1 ? job.slots * job.ranges * kSums * kLanes : 0));
    const u32 ready = u32(__cvta_generic_to_shared(flags));        // [warps]: sums handed to this warp
    const u32 done = ready + 4 * block_warps;                      // [slots]: ranges finished

    auto group_of = [&](int slot) { return slot * job.blocks + block; };
    auto slab_of = [&](const Place& place) {
        return packed.data + packed.planes + slab_offset(geometry.stages, group_of(place.slot), place.chunk * kChunkStages);
    };
    auto stages_of = [&](const Place& place) { return min(kChunkStages, geometry.stages - place.chunk * kChunkStages); };
    auto fetch_offsets = [&](const Place& place) {
        if (lane < 2) {
            const size_t chunk = size_t(group_of(place.slot)) * geometry.chunks_per_row_group + place.chunk;
            copy_async_4(u32(__cvta_generic_to_shared(ahead.offsets + lane)), packed.data + packed.offsets + 4 * (chunk + lane));
        }
    };
    auto stage_chunk = [&](const Place& place, int buffer) {
        const StagedPlace at = stage_streams(packed, u32(__cvta_generic_to_shared(buffers + buffer * job.buffer_words)), ahead.offsets[0], ahead.offsets[1], lane);
        if (lane == 0) {
            ahead.copied[buffer] = {u32(at.begin), u32(at.size)};
            if (packed.has_row_shifts)
                copy_async_8(u32(__cvta_generic_to_shared(ahead.shifts[buffer])), packed.data + packed.row_shifts + 8 * group_of(place.slot));
        }
    };
    auto cut = [&](int warp) {
        const int position = divide(own * geometry.stages * warp, job.by_warps[own > job.own ? 0 : 1]);
        const Chains::Chain chain = chains.at(position);
        const int from = chain.slot * geometry.stages;
        return max(from + (position - from & -kChunkStages), chain.begin);
    };

    // What decoding needs first comes first from memory.
    let_kernel_behind_start();
    const int begin = warp < warps ? cut(warp) : 0, end = warp < warps ? cut(warp + 1) : 0;
    const bool busy = begin < end;
    Walk walk{};
    Place place{};
    if (busy) {
        walk = Walk(chains, begin, end);
        place = walk.place;
        fetch_offsets(place);
    }
    copy_commit();
    const Table<true> table(packed, memory, memory + job.table_words);
    copy_commit();
    auto fetch_x = [&] {                // to where the table's entries were
        table.build();
        await_kernel_before();
        stage_columns<kind>(job.x, x_shared, job.tokens, geometry.columns, blockDim.x);
        copy_commit();
    };
    for (int i = threadIdx.x; i < job.slots + block_warps; i += blockDim.x) flags[i] = 0;

    const Ring ring{u32(__cvta_generic_to_shared(buffers + 2 * job.buffer_words))};
    if (!busy) {
        fetch_x();
        copy_wait<0>();
        __syncthreads();
        return;
    }
    walk.next(chains);
    if (lane == 0) {
        ahead.staged = place;
        ahead.staged_valid = 1;
        ahead.walk = walk;
    }
    copy_wait<1>();                     // the offsets
    __syncwarp();
    stage_chunk(place, 0);
    __syncwarp();
    if (walk.valid) fetch_offsets(walk.place);
    copy_commit();
    const u8* following = slab_of(place);   // the slabs behind those at hand
#pragma unroll
    for (int i = 0; i < kRing; ++i) {
        ring.fetch(i, following + i * kSlabBytes, lane);
        copy_commit();
        if (i == 0) fetch_x();          // the other slabs would keep the streams waiting
    }
    following += kRing * kSlabBytes;

    const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    Opened chunk;
    int buffer = 0;                     // of the chunk at hand

    // The staged chunk goes to the streams; the chunk behind it is staged, and the offsets of the one behind that are fetched.
    auto open_staged = [&](int from) {
        __syncwarp();                   // its streams are older than the slabs that have been waited for
        const Place staged = ahead.staged;
        Walk walk = ahead.walk;
        const Vec2 copied = ahead.copied[from];
        const u32 at = u32(__cvta_generic_to_shared(buffers + from * job.buffer_words)) + 4 * copied.x;
        const int stages = stages_of(staged);
        if (walk.valid) stage_chunk(walk.place, from ^ 1);
        chunk.open(at, copied.y, stages, lane);
        if (lane == 0) {
            ahead.opened = staged;
            ahead.opened_at = at;
            ahead.opened_stages = stages;
            ahead.staged_valid = walk.valid;
            ahead.staged = walk.place;
        }
        if (walk.valid) walk.next(chains);
        if (lane == 0) ahead.walk = walk;
        __syncwarp();
        if (walk.valid) fetch_offsets(walk.place);   // part of the next slab's group
    };
    Sums<octets> sums = {};
    u32 scale = kNoShift, active = 0;

    // Look-ups and multiplications take turns: each waits for what it depends on, and nothing waits for the other. While a stage is multiplied,
    // the one behind is decoded; its second look-ups stand in front of the first multiplications, and the first look-ups of the stage behind
    // that in front of the last.
    Vec4 upper[2];                      // of the stage at hand and the one behind: all but the signs
    LookUps begun;
    auto mend = [&](Vec4& upper, int stage) { chunk.mend(upper, stage, lane, [&] { return RawChunk{ahead.opened_at, ahead.opened_stages}; }); };
    struct { Vec4 bytes; u32 sign; Vec4 x[octets]; } at_hand;
    auto step = [&](int q, u32 raw, u32 top, u32 sign, const Vec4 (&x)[octets]) {
        multiply_quad(sums, q, raw, and_or(sign << q, kSignMask, top), scale, x);
    };
    auto load_x = [&](Vec4 (&x)[octets], const Columns<kind, octets>& columns, int stage, int half) {
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) x[octet] = columns.load(stage, half, octet);
    };

    // The first chunk's first stage.
    copy_wait<kRing + 1>();             // the streams
    open_staged(0);
    copy_wait<kRing - 1>();             // its own part of table and x, and the first slab
    __syncthreads();
    begun = chunk.begin(base, byte_mask);
    upper[0] = chunk.go_on(begun, base, byte_mask);
    chunk.complete(upper[0], common);
    mend(upper[0], 0);
    begun = chunk.begin(base, byte_mask);
    at_hand.bytes = ring.bytes(0, lane), at_hand.sign = ring.sign(0, lane);

    for (;;) {
        // Part of a chain, from here to its last chunk.
        const Place first = ahead.opened;
        if (lane == 0) ahead.part = first;
        __syncwarp();
        const bool opens = first.first % job.stages_per_range == 0;
        scale = scale_of(packed.has_row_shifts ? reinterpret_cast<const i8*>(ahead.shifts[buffer])[lane >> 2] : packed.shift);
        if (!opens) wait_until(ready + 4 * warp, 1);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums.of[i >> 1][i & 1] = opens ? 0.0f : handed[(warp * kSums + i) * kLanes + lane];
        bool more = true;                // chunks of this warp
        int low = first.first - first.chunk * kChunkStages, chunk_first = first.chunk * kChunkStages;
        Columns<kind, octets> columns(job.x, x_shared, job.tokens, geometry.columns, lane, chunk_first);
        do {
            active = ((1u << min(ahead.part.last - chunk_first, kChunkStages)) - 1) & ~((1u << low) - 1);
            low = 0;
            more = ahead.staged_valid;
            const u8* next_slab = more ? slab_of(ahead.staged) : packed.data + packed.planes;
            const int count = min(kChunkStages, geometry.stages - chunk_first);
#pragma unroll 1
            for (int run = 0; run < count; run += kTurn) {
                const bool last = run + kTurn >= count;
                if (last) following = next_slab;
                auto turn = [&](bool whole) {
                    if (whole || (active & 1)) load_x(at_hand.x, columns, 0, 0);
#pragma unroll
                    for (int stage = 0; stage < kTurn; ++stage) {
                        const bool any = whole || (active >> stage & 1);
                        const auto now = at_hand;
                        Vec4 x[octets];
                        if (any) load_x(x, columns, stage, 1);
                        const Vec4 tops = upper[stage & 1];
                        upper[(stage + 1) & 1] = chunk.go_on(begun, base, byte_mask);
                        if (any) {
                            step(0, now.bytes.x, tops.x, now.sign, now.x);
                            step(1, now.bytes.y, tops.y, now.sign, now.x);
                        }
                        chunk.complete(upper[(stage + 1) & 1], common);
                        mend(upper[(stage + 1) & 1], stage == kTurn - 1 && last ? 0 : run + stage + 1);
                        if (stage == kTurn - 2 && last && more) open_staged(buffer ^ 1);
                        begun = chunk.begin(base, byte_mask);
                        if (stage % 2 == 1) ring.await_next();
                        at_hand.bytes = ring.bytes((stage + 1) % kTurn, lane), at_hand.sign = ring.sign((stage + 1) % kTurn, lane);
                        if (stage + 1 < kTurn && (whole || (active >> (stage + 1) & 1))) load_x(at_hand.x, columns, stage + 1, 0);
                        if (any) {
                            step(2, now.bytes.z, tops.z, now.sign, x);
                            step(3, now.bytes.w, tops.w, now.sign, x);
                        }
                        if (stage % 2 == 0) {            // what is copied is waited for: nothing may be on its way when the block ends
                            if (!last || more) ring.fetch(stage >> 1, following + (stage >> 1) * kSlabBytes, lane);
                            copy_commit();
                        }
                    }
                };
                constexpr u32 whole = (1u << kTurn) - 1;
                if ((active & whole) == whole) turn(true);
                else turn(false);
                following += kRing * kSlabBytes;
                active >>= kTurn;
                columns.advance(kTurn);
            }
            buffer ^= 1;
            chunk_first += kChunkStages;
        } while (chunk_first < ahead.part.last);
        const Place part = ahead.part;
        const int slot = part.slot, range = part.first / job.stages_per_range;
        if (part.last < min((range + 1) * job.stages_per_range, geometry.stages)) {
            int behind = warp + 1;       // the next warp that has a segment
            while (cut(behind + 1) == cut(behind)) ++behind;
#pragma unroll
            for (int i = 0; i < kSums; ++i) handed[(behind * kSums + i) * kLanes + lane] = sums.of[i >> 1][i & 1];
            __syncwarp();
            if (lane == 0) set_flag(ready + 4 * behind, 1);
        } else if (job.ranges == 1 || join(sums, parts + size_t(slot) * job.ranges * kSums * kLanes, done + 4 * slot, range, job.ranges, lane)) {
            finish(geometry, job, group_of(slot), lane, sums);
        }
        if (!more) return;
    }
}
