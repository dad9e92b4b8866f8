// The fused linear layer on Hopper where warps decode what they multiply, two row groups each: a whole left matrix of 16 rows. See linear.cuh.
//
// A unit of work is 16 rows for each warp of a cluster of blocks, a tile of tokens and a range of stages. A warp decodes stage after stage in
// registers; while a stage is multiplied, the next one's codewords are looked up. x, which arrange.cu has arranged, comes through a ring in shared
// memory that a warp of its own fills. Sums of several ranges meet in memory. There are two ways to multiply: each warp for itself with mma, and for
// more tokens four warps together with wgmma, which wait for each other at every stage.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"

constexpr int kGroups = 2;                // row groups of a warp

// For tiles of so many tokens. Numbers that linear_launch.py knows too: slabs, cluster, x_parts, and the most warps, from the threads.
template <int tokens>
struct WithMma {
    static constexpr bool wgmma = false;
    static constexpr int wide = tokens;
    static constexpr int slabs = 4;       // of a row group, in shared memory and on their way there
    static constexpr int cluster = 1;     // blocks
    static constexpr int x_parts = 1;     // slots of the ring of x that a stage takes
    static constexpr int others = 32;     // threads that do not multiply
    static constexpr int threads = 352 + others;   // leaves 168 registers to each
};
template <int tokens>
struct WithWgmma {
    static constexpr bool wgmma = true;
    static constexpr int wide = tokens;
    static constexpr int slabs = wide == 256 ? 2 : 4;
    static constexpr int cluster = 2;
    static constexpr int x_parts = wide == 256 ? 2 : 1;   // a whole one would leave the ring too few slots
    static constexpr int others = 128;
    static constexpr int threads = 256 + others;
    // Of a thread that multiplies and of one that does not; together as many as a multiprocessor has.
    static constexpr int registers = 240, few_registers = 24;
};

template <class Way>
__host__ __device__ constexpr int x_bytes() { return Way::wide * 128 / Way::x_parts; }   // of a slot

struct Unit { int tile, tokens, range, first, last; };   // first, last: stages

template <int cluster>
struct Units {
    const Job& job;
    const int stages;

    // Units of this cluster: their numbers.
    __device__ __forceinline__ int first() const { return job.block() / cluster; }
    __device__ __forceinline__ int step() const { return job.blocks / cluster; }
    __device__ __forceinline__ bool has(int index) const { return index < job.units; }
    __device__ __forceinline__ Unit at(int index) const {
        Unit unit;
        const int rest = divide(index, job.by_token_tiles);
        unit.tokens = index - rest * job.token_tiles;
        const int tiles = divide(rest, job.by_ranges);
        unit.tile = tiles * cluster + job.block() % cluster;
        unit.range = rest - tiles * job.ranges;
        unit.first = unit.range * job.stages_per_range;
        unit.last = min(unit.first + job.stages_per_range, stages);
        return unit;
    }
};

__device__ __forceinline__ int first_chunk(const Unit& unit) { return unit.first / kChunkStages; }

// Shared addresses of a block's memory.
struct Places {
    u32 x, full, empty;          // the ring of x, and its barriers
    u32 slabs;                   // this warp's
    u32 streams;                 // two sides, each a staging buffer for every row group
    u32 opened;                  // [kGroups]: where the chunks are that are open
    u32 table;
};

// 8 x 8 words: lane (g, t) has 2 t and 2 t + 1 of row g, and gets them of column g.
__device__ __forceinline__ u32 transposed(u32 words) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(words));
    return result;
}

// A lane's own patches (6.4) of an open chunk, in their order: the next and the one behind it. Applied without a branch, for the warps of a warpgroup
// wait for each other at every stage. The few chunks that have more for a lane are left to Opened::mend, as raw ones are.
struct OwnPatches {
    u32 place, change, later;      // place: 4 * stage + step

    __device__ __forceinline__ void apply(Vec4& upper, int stage) const {
        const u32 here = 4 * stage;
        change_if(upper.x, place, here, change);
        change_if(upper.y, place, here + 1, change);
        change_if(upper.z, place, here + 2, change);
        change_if(upper.w, place, here + 3, change);
    }
    // Behind each odd stage.
    __device__ __forceinline__ void go_on(int stage) {
        if (place >= u32(4 * (stage + 1))) return;
        take(later);
        later = kNoPatch;
    }

    __device__ __forceinline__ void take(u32 patch) {
        place = patch >> 14;
        change = (patch & 127) << (8 * (patch >> 7 & 3));
    }
};

// Deals the open chunks' patches to their lanes; ends: shared addresses behind the chunks, scratch: of two words for each lane and chunk.
__device__ __forceinline__ void deal_patches(OwnPatches (&own)[kGroups], Opened (&chunk)[kGroups], const u32 (&ends)[kGroups], u32 scratch, int lane) {
    u32 patch[kGroups], place[kGroups];   // the lane's of the list, and where its target finds it
    int count[kGroups];
    bool is_second[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        count[i] = chunk[i].next_patch ? int(ends[i] - chunk[i].next_patch) >> 2 : 0;
        patch[i] = lane < count[i] ? load_shared(chunk[i].next_patch + 4 * lane) : kNoPatch;
        place[i] = scratch + i * 8 * kLanes + 8 * (patch[i] >> 9 & 31);
        store_shared(scratch + i * 8 * kLanes + 8 * lane, Vec2{kNoPatch, kNoPatch});
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
        if (lane < count[i]) store_shared(place[i], u32(lane));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        is_second[i] = lane < count[i] && load_shared(place[i]) != u32(lane);
        if (is_second[i]) store_shared(place[i] + 4, u32(lane));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        bool left = count[i] > kLanes || (is_second[i] && load_shared(place[i] + 4) != u32(lane));
        const Vec2 both = load_shared_vec2(scratch + i * 8 * kLanes + 8 * lane);   // numbers in the list; kNoPatch is the largest
        const u32 one = __shfl_sync(kFull, patch[i], min(both.x, both.y) & 31), two = __shfl_sync(kFull, patch[i], max(both.x, both.y) & 31);
        u32 first = both.x == kNoPatch ? kNoPatch : one, later = both.y == kNoPatch ? kNoPatch : two;
        left |= later != kNoPatch && later >> 17 <= first >> 17;
        if (__any_sync(kFull, left)) first = later = kNoPatch;
        else if (chunk[i].next_patch) chunk[i].patch = kNoPatch;
        own[i].take(first);
        own[i].later = later;
    }
}

// Fills the ring of x; each block of a cluster brings a part to all of them. By one thread.
template <class Way>
__device__ __forceinline__ void bring_x(const Units<Way::cluster>& units, const Job& job, const Places& at) {
    await_kernel_before();
    show_to_wgmma();                     // the table's entries, which were there
    constexpr u32 bytes = x_bytes<Way>(), part = bytes / Way::cluster;
    const u32 own = Way::cluster == 1 ? 0 : block_of_cluster() * part;
    RingPlace place{0, 0};
    for (int index = units.first(); units.has(index); index += units.step()) {
        const Unit unit = units.at(index);
        const u8* source = reinterpret_cast<const u8*>(job.x) + (size_t(unit.tokens) * units.stages + unit.first) * (Way::x_parts * bytes) + own;
        for (int left = (unit.last - unit.first) * Way::x_parts; left > 0; --left, source += bytes) {
            const u32 target = at.x + place.slot * bytes + own, full = at.full + 8 * place.slot;
            await(at.empty + 8 * place.slot, place.parity ^ 1);
            if constexpr (Way::cluster == 1) {
                copy_bulk(target, source, bytes, full);
            } else {
                expect(full, bytes);
                copy_bulk_to(target, source, part, full, (1 << Way::cluster) - 1);
            }
            place.advance(job.ring);
        }
    }
}

// Brings a warp's slabs and streams to shared memory, ahead of the decoder, unit after unit.
template <class Way>
struct Supply {
    const Units<Way::cluster>& units;
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    const Places& at;
    const int lane, warp, tile_groups;
    const u8* slab;                // of the first row group; the next to be brought
    u32 to_second;                 // bytes from there to the second row group's
    int slab_unit, slab_stages;    // slab_stages: left of its unit, from this slab on
    int chunk_unit, chunk;         // the next to be brought
    u32 offsets = 0;               // its streams': lanes 0 and 1, start and stop of the first row group, 2 and 3 of the second

    __device__ __forceinline__ Supply(const Units<Way::cluster>& units, const Geometry& geometry, const Packed& packed, const Job& job, const Places& at, int warp,
                                      int lane, int tile_groups)
        : units(units), geometry(geometry), packed(packed), job(job), at(at), lane(lane), warp(warp), tile_groups(tile_groups),
          slab_unit(units.first()), chunk_unit(units.first()) {}

    // In place of a row group that does not exist, the last one.
    __device__ __forceinline__ int group(const Unit& unit, int i) const {
        return min(unit.tile * tile_groups + kGroups * warp + i, geometry.row_groups - 1);
    }

    __device__ __forceinline__ void begin() {
        begin_slabs();
        begin_chunks();
    }
    // The next slabs, to where those were that have been read; and a group of copies is complete. Each lane reads what it copies itself.
    __device__ __forceinline__ void bring_slabs(u32 target) {
        if (units.has(slab_unit)) {
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const u32 own = target + i * kSlabBytes;
                const u8* source = slab + (i ? to_second : 0);
                copy_async_4(own + 4 * lane, source + 4 * lane);
                copy_async(own + kSignBytes + 16 * lane, source + kSignBytes + 16 * lane);
                copy_async(own + kSignBytes + kStageBytes + 16 * lane, source + kSignBytes + kStageBytes + 16 * lane);
            }
            slab += kSlabBytes;
            slab_stages -= 2;
            if (slab_stages <= 0) {
                slab_unit += units.step();
                begin_slabs();
            }
        }
        copy_commit();
    }
    // The next chunks' streams, to one of two sides; returns where the chunks will be.
    __device__ __forceinline__ void bring_chunk(int side, StagedPlace (&staged)[kGroups]) {
        if (!units.has(chunk_unit)) return;
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
            staged[i] = stage_streams(packed, at.streams + (kGroups * side + i) * 4 * job.buffer_words,
                                      __shfl_sync(kFull, offsets, 2 * i), __shfl_sync(kFull, offsets, 2 * i + 1), lane);
        const Unit unit = units.at(chunk_unit);
        if (++chunk * kChunkStages < unit.last) {
            load_offsets(unit);
        } else {
            chunk_unit += units.step();
            begin_chunks();
        }
    }

   private:
    __device__ __forceinline__ void begin_slabs() {
        if (!units.has(slab_unit)) return;
        const Unit unit = units.at(slab_unit);
        const int from = first_chunk(unit) * kChunkStages, own = group(unit, 0);
        slab = packed.data + packed.planes + slab_offset(geometry.stages, own, from);
        to_second = group(unit, 1) == own ? 0 : u32(slab_offset(geometry.stages, 1, 0));
        slab_stages = min((unit.last + 1) & ~1, geometry.stages) - from;
    }
    __device__ __forceinline__ void begin_chunks() {
        if (!units.has(chunk_unit)) return;
        const Unit unit = units.at(chunk_unit);
        chunk = first_chunk(unit);
        load_offsets(unit);
    }
    __device__ __forceinline__ void load_offsets(const Unit& unit) {
        if (lane < 2 * kGroups) {
            const size_t index = size_t(group(unit, lane >> 1)) * geometry.chunks_per_row_group + chunk + (lane & 1);
            offsets = load_u32(packed.data + packed.offsets + 4 * index);
        }
    }
};

// A warp's sums of a unit to y, or to where those of the other ranges are; who brings the last adds them, in order.
template <int wide>
__device__ __forceinline__ void finish_unit(const Geometry& geometry, const Job& job, const Unit& unit, int first_group, int lane, float (&sums)[wide / 2]) {
    constexpr int count = wide / 2;
    if (job.ranges > 1) {
        const int meeting = first_group / kGroups * job.token_tiles + unit.tokens;
        float* parts = job.parts + size_t(meeting) * job.ranges * (count * kLanes) + lane;
        float* own = parts + unit.range * (count * kLanes);
#pragma unroll
        for (int i = 0; i < count; ++i) __stcg(own + i * kLanes, sums[i]);
        __threadfence();
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = atomicAdd(job.done + meeting, 1);
        if (int(__shfl_sync(kFull, before, 0)) + 1 < job.ranges) return;
        __threadfence();
#pragma unroll
        for (int i = 0; i < count; ++i) sums[i] = __ldcg(parts + i * kLanes);
#pragma unroll 1
        for (int range = 1; range < job.ranges; ++range)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] += __ldcg(parts + (range * count + i) * kLanes);
    }
    // Two lanes swap, so that each has four rows of a token, lanes with even t of the first row group and others of the second.
    const int g = lane >> 2, t = lane & 3, odd = t & 1;
    float bias[kGroups] = {};
    if (job.bias)
#pragma unroll
        for (int h = 0; h < kGroups; ++h)
            bias[h] = __uint_as_float(u32(job.bias[8 * min(first_group + h, geometry.row_groups - 1) + g]) << 16);
    const bool exists = first_group + odd < geometry.row_groups;
    const int token = unit.tokens * wide + g;
    u16* target = job.y + size_t(token) * geometry.rows + 8 * (first_group + odd) + 4 * (t >> 1);
#pragma unroll
    for (int j = 0; j < wide / 8; ++j, target += 8 * size_t(geometry.rows)) {
        u32 words[kGroups];
#pragma unroll
        for (int h = 0; h < kGroups; ++h) {
            float first = sums[4 * j + 2 * h], second = sums[4 * j + 2 * h + 1];
            if (job.bias) first += bias[h], second += bias[h];
            words[h] = transposed(to_bf16x2(first, second));
        }
        const u32 other = __shfl_xor_sync(kFull, odd ? words[0] : words[1], 1);
        const Vec2 own = odd ? Vec2{other, words[1]} : Vec2{words[0], other};
        if (exists && token + 8 * j < job.tokens) *reinterpret_cast<Vec2*>(target) = own;
    }
}

template <class Way>
__device__ __forceinline__ void decode_and_multiply(const Units<Way::cluster>& units, const Geometry& geometry, const Packed& packed, const Job& job, const Places& at,
                                                    Supply<Way>& supply, StagedPlace (&staged)[kGroups], int warp, int lane) {
    constexpr int wide = Way::wide, count = wide / 2;
    const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    float sums[count];
    u32 weights[4][4];                   // left matrices, by step
    Opened chunk[kGroups];
    OwnPatches patches[kGroups];
    RingPlace x{0, 0};
    u32 used[Way::x_parts] = {};         // barriers of the slots of x that wgmma reads
    u32 pairs = 0, chunks = 0;
    int since = Way::slabs;              // groups of copies since the last chunks' streams
    auto release_x = [&] {
#pragma unroll
        for (int i = 0; i < Way::x_parts; ++i) {
            if (used[i] && lane < Way::cluster) arrive_at(used[i], lane);
            used[i] = 0;
        }
    };
#pragma unroll 1
    for (int index = units.first(); units.has(index); index += units.step()) {
        const Unit unit = units.at(index);
        const int first_group = unit.tile * supply.tile_groups + kGroups * warp;
        u32 scale[kGroups], add = 0;
        if constexpr (!Way::wgmma)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] = 0;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            int shift = packed.shift;
            if (packed.has_row_shifts) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[supply.group(unit, i) * 8 + (lane >> 2)];
            scale[i] = scale_of(shift);
        }
#pragma unroll 1
        for (int from = first_chunk(unit) * kChunkStages; from < unit.last; from += kChunkStages) {
            const int side = chunks & 1, stages = min(kChunkStages, geometry.stages - from), stop = min(stages, unit.last - from);
            if (since >= Way::slabs) copy_wait<Way::slabs - 1>();   // the streams are older than the last slabs
            else copy_wait<0>();
            __syncwarp();
            ++chunks;
            since = (stop + 1) / 2;
            u32 ends[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const u32 place = at.streams + ((kGroups * side + i) * job.buffer_words + staged[i].begin) * 4;
                chunk[i].open(place, staged[i].size, stages, lane);
                ends[i] = place + 4 * staged[i].size;
                if (lane == 0) store_shared(at.opened + 4 * i, place);
            }
            deal_patches(patches, chunk, ends, at.streams + kGroups * (side ^ 1) * 4 * job.buffer_words, lane);   // which is free
            __syncwarp();
            supply.bring_chunk(side ^ 1, staged);
            Vec4 upper[kGroups];
            LookUps begun[kGroups];
            auto begin = [&] {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) begun[i] = chunk[i].begin(at.table, byte_mask);
            };
            auto go_on = [&] {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) upper[i] = chunk[i].go_on(begun[i], at.table, byte_mask);
            };
            auto complete = [&](int stage) {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    chunk[i].complete(upper[i], common);
                    patches[i].apply(upper[i], stage);
                    if (stage & 1) patches[i].go_on(stage);
                }
                if (min(chunk[0].patch, chunk[1].patch) >> 16 <= u32(stage))
#pragma unroll
                    for (int i = 0; i < kGroups; ++i) chunk[i].mend(upper[i], stage, lane, [&] { return RawChunk{load_shared(at.opened + 4 * i), stages}; });
            };
            begin();
            go_on();
            complete(0);
            bool x_is_there = test(at.full + 8 * x.slot, x.parity);
#pragma unroll 1
            for (int stage = 0; stage < stop; stage += 2) {
                const u32 slab = at.slabs + pairs++ % Way::slabs * (kGroups * kSlabBytes);
                copy_wait<Way::slabs - 1>();
                u32 signs[kGroups];
#pragma unroll
                for (int i = 0; i < kGroups; ++i) signs[i] = load_shared(slab + i * kSlabBytes + 4 * lane);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (half && stage + 1 >= stop) break;
                    const bool counts = from + stage + half >= unit.first;
                    auto assemble = [&](int q, u32 raw0, u32 top0, u32 raw1, u32 top1) {
                        top0 = and_or(signs[0] << (4 * half + q), kSignMask, top0);
                        top1 = and_or(signs[1] << (4 * half + q), kSignMask, top1);
                        weights[q][0] = unshift(__byte_perm(raw0, top0, 0x5140), scale[0]);
                        weights[q][1] = unshift(__byte_perm(raw1, top1, 0x5140), scale[1]);
                        weights[q][2] = unshift(__byte_perm(raw0, top0, 0x7362), scale[0]);
                        weights[q][3] = unshift(__byte_perm(raw1, top1, 0x7362), scale[1]);
                    };
                    // The stage behind is looked up meanwhile; behind a chunk's last there is nothing, and nobody reads it.
                    Vec4 raw[kGroups];
#pragma unroll
                    for (int i = 0; i < kGroups; ++i) raw[i] = load_shared_vec4(slab + i * kSlabBytes + kSignBytes + half * kStageBytes + 16 * lane);
                    begin();
                    const Vec4 tops[kGroups] = {upper[0], upper[1]};
                    auto assemble_step = [&](int q) {
                        if (q == 0) assemble(0, raw[0].x, tops[0].x, raw[1].x, tops[1].x);
                        if (q == 1) assemble(1, raw[0].y, tops[0].y, raw[1].y, tops[1].y);
                        if (q == 2) assemble(2, raw[0].z, tops[0].z, raw[1].z, tops[1].z);
                        if (q == 3) assemble(3, raw[0].w, tops[0].w, raw[1].w, tops[1].w);
                    };
                    if constexpr (Way::wgmma) {
                        wgmma_wait<0>();     // nobody reads the weights any longer
                        release_x();
                        assemble_step(0);
                        assemble_step(1);
                        go_on();
                        assemble_step(2);
                        assemble_step(3);
                        RingPlace next = x;
                        u64 right[Way::x_parts];
#pragma unroll
                        for (int part = 0; part < Way::x_parts; ++part) {
                            if (part || !x_is_there) await(at.full + 8 * next.slot, next.parity);
                            right[part] = describe<128 / Way::x_parts>(at.x + next.slot * x_bytes<Way>(), 1024 / Way::x_parts);
                            if (counts) used[part] = at.empty + 8 * next.slot;
                            next.advance(job.ring);
                        }
                        wgmma_fence();
#pragma unroll
                        for (int q = 0; q < 4; ++q)
                            multiply_add(sums, weights[q], right[q * Way::x_parts / 4] + q % (4 / Way::x_parts) * 32 / 16, q || add);
                        wgmma_commit();
                        if (counts) add = 1, x = next;   // else these sums are of the range before, and forgotten at the next stage
                    } else if (counts) {
                        if (!x_is_there) await(at.full + 8 * x.slot, x.parity);
                        const u32 columns = at.x + x.slot * x_bytes<Way>() + (lane >> 2) * 128;
                        Vec4 right[wide / 8];
                        auto load_right = [&](int h) {
#pragma unroll
                            for (int j = 0; j < wide / 8; ++j) right[j] = load_shared_vec4(columns + j * 1024 + (((lane & 7) ^ 4 * h) << 4));
                        };
                        auto step = [&](int q) {
                            assemble_step(q);
#pragma unroll
                            for (int j = 0; j < wide / 8; ++j)
                                multiply(sums + 4 * j, weights[q], q & 1 ? right[j].z : right[j].x, q & 1 ? right[j].w : right[j].y);
                        };
                        load_right(0);
                        step(0);
                        go_on();
                        step(1);
                        load_right(1);
                        step(2);
                        step(3);
                        __syncwarp();
                        if (lane == 0) arrive(at.empty + 8 * x.slot);
                        x.advance(job.ring);
                    } else {
                        go_on();
                    }
                    x_is_there = test(at.full + 8 * x.slot, x.parity);
                    complete(stage + half + 1);
                }
                supply.bring_slabs(slab);
            }
        }
        if constexpr (Way::wgmma) {
            wgmma_wait<0>();
            pin(sums);
            release_x();
        }
        finish_unit<wide>(geometry, job, unit, first_group, lane, sums);
    }
}

template <class Way>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(kFull, threadIdx.x >> 5, 0), warps = (blockDim.x - Way::others) >> 5;
    const bool supplies = warp >= warps;

    // Shared memory: the ring of x (first of all, there, the table's entries), for each warp slabs and two sides of streams, table, barriers, state.
    const u32 start = u32(__cvta_generic_to_shared(shared_bytes)), base = (start + 1023) & ~1023u;
    const int own = supplies ? 0 : warp;
    const u32 slab_bytes = Way::slabs * kGroups * kSlabBytes, stream_bytes = 2 * kGroups * 4 * job.buffer_words;
    Places at;
    at.x = base;
    const u32 warp_memory = base + 4 * job.x_words;
    at.slabs = warp_memory + own * slab_bytes;
    at.streams = warp_memory + warps * slab_bytes + own * stream_bytes;
    at.table = warp_memory + warps * (slab_bytes + stream_bytes);
    at.full = at.table + 4 * job.table_words;
    at.empty = at.full + 8 * job.ring;
    at.opened = at.empty + 8 * job.ring + 4 * kGroups * own;

    let_kernel_behind_start();
    const Units<Way::cluster> units{job, geometry.stages};
    Supply<Way> supply(units, geometry, packed, job, at, own, lane, kGroups * warps);
    StagedPlace staged[kGroups];
    if (!supplies) {
        supply.begin();
        supply.bring_chunk(0, staged);
#pragma unroll
        for (int i = 0; i < Way::slabs; ++i) supply.bring_slabs(at.slabs + i * (kGroups * kSlabBytes));
    } else if (warp == warps && lane == 0) {
        for (int i = 0; i < job.ring; ++i) {
            open_barrier(at.full + 8 * i, 1);
            open_barrier(at.empty + 8 * i, Way::cluster * warps);
        }
        show_barrier();
    }
    u32* entries = reinterpret_cast<u32*>(shared_bytes + (base - start));
    const Table<true> decode_table(packed, entries + (at.table - base) / 4, entries);
    copy_commit();
    decode_table.finish();
    if constexpr (Way::cluster > 1) await_cluster();   // their barriers are open
    if (supplies) {
        if constexpr (Way::wgmma) give_registers<Way::few_registers>();
        if (warp == warps && lane == 0) bring_x<Way>(units, job, at);
        __syncwarp();
    } else {
        if constexpr (Way::wgmma) take_registers<Way::registers>();
        decode_and_multiply<Way>(units, geometry, packed, job, at, supply, staged, warp, lane);
    }
    if constexpr (Way::cluster > 1) await_cluster();   // nothing comes from the others any longer
}

#define PAIRS_KERNEL(name, Argument, Way, wide)                                                                                           \
    extern "C" __global__ void __cluster_dims__(Way<wide>::cluster) __launch_bounds__(Way<wide>::threads, 1) name(                       \
        const __grid_constant__ Argument argument) {                                                                                      \
        const Product& product = own_product(argument);                                                                                   \
        linear<Way<wide>>(product.geometry, product.packed, product.job);                                                                  \
    }
