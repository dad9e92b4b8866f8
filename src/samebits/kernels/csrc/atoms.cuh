// Row groups decoded to atoms in shared memory, as wgmma takes them (hopper.cuh), and its sums, with tokens as the left matrix and row groups as the right
// one, on their way to y.
//
// Row g of a row group is row 2 g of its atom, or 2 g - 7 from g = 4 on: half a warp writes to all banks.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"

constexpr int kAtomBytes = 1024;     // a stage of a row group

// A lane's place in an atom: of each step four columns.
__device__ __forceinline__ u32 atom_place(int lane) {
    const int g = lane >> 2, t = lane & 3, row = g < 4 ? 2 * g : 2 * g - 7;
    return row * 128 + (((t >> 1) ^ row) << 4) + ((t & 1) << 3);
}

// A stage's words to an atom; `place` is the atom's shared address and the lane's place.
template <bool shifted>
__device__ __forceinline__ void store_atom(u32 place, Vec4 raw, Vec4 upper, u32 scale) {
    auto store = [&](u32 q, u32 raw, u32 upper) {
        u32 low = __byte_perm(raw, upper, 0x5140), high = __byte_perm(raw, upper, 0x7362);
        if (shifted) low = unshift(low, scale), high = unshift(high, scale);
        store_shared(place ^ (q << 5), Vec2{low, high});
    };
    store(0, raw.x, upper.x);
    store(1, raw.y, upper.y);
    store(2, raw.z, upper.z);
    store(3, raw.w, upper.w);
}

// What a warp that decodes chunk after chunk has of memory: the first run's planes of the chunk at hand or the next, and its streams, staged.
struct ChunkReader {
    const Geometry& geometry;
    const Packed& packed;
    const int lane, buffer_words;
    u32* buffers;                          // two staging buffers
    const u32 copied;                      // the barrier of what is copied to them
    Vec4 raw[2][kRun];                     // of the run at hand, and of the next
    u32 signs[2][kRun / 2];
    const u8* slab;                        // the chunk's first
    StagedPlace staged;
    int side = 0;                          // which buffer that is
    u32 opened = 0;                        // parity of the chunks that were

    __device__ __forceinline__ ChunkReader(const Geometry& geometry, const Packed& packed, const Job& job, int lane, u32* buffers, u32 copied)
        : geometry(geometry), packed(packed), lane(lane), buffer_words(job.buffer_words), buffers(buffers), copied(copied) {}

    __device__ __forceinline__ int stages_of(int chunk) const { return min(kChunkStages, geometry.stages - chunk * kChunkStages); }
    __device__ __forceinline__ const u8* slab_of(int group, int chunk) const {
        return packed.data + packed.planes + slab_offset(geometry.stages, group, chunk * kChunkStages);
    }
    __device__ __forceinline__ const u32* offset_of(int group, int chunk) const {
        return reinterpret_cast<const u32*>(packed.data + packed.offsets) + size_t(group) * geometry.chunks_per_row_group + chunk;
    }
    __device__ __forceinline__ void load_run(int set, const u8* slab) {
#pragma unroll
        for (int s = 0; s < kRun; ++s) {
            raw[set][s] = load_raw(slab, s, lane);
            if (s & 1) signs[set][s / 2] = load_once_u32(slab + (s >> 1) * kSlabBytes + 4 * lane);
        }
    }
    __device__ __forceinline__ void stage(u32 start, u32 stop) {
        const StreamUnits streams(packed, start, stop);
        if (lane == 0) copy_bulk(u32(__cvta_generic_to_shared(buffers + side * buffer_words)), streams.source, 16 * streams.units, copied);
        staged = streams.place;
    }
    __device__ __forceinline__ void open_copied() const {
        if (lane != 0) return;
        open_barrier(copied, 1);
        show_barrier();
    }
    // The first chunk, before the table is there.
    __device__ __forceinline__ void begin(int group, int chunk) {
        const u32* offset = offset_of(group, chunk);
        const u32 start = load_u32(offset), stop = load_u32(offset + 1);
        slab = slab_of(group, chunk);
        stage(start, stop);
        load_run(0, slab);
        prefetch_planes(slab, stages_of(chunk), lane);
    }
    // Of the lane's row.
    __device__ __forceinline__ u32 scale(int group) const {
        int shift = packed.shift;
        if (packed.has_row_shifts) shift = reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[group * 8 + (lane >> 2)];
        return scale_of(shift);
    }
    // Of the chunk behind the one at hand: its first slab, and where its streams are.
    struct Next {
        bool exists;
        const u8* slab;
        u32 start, stop;
    };
    // Its planes are brought to the second-level cache.
    __device__ __forceinline__ Next look_ahead(bool exists, int group, int chunk) const {
        Next next{exists, slab, 0, 0};
        if (exists) {
            const u32* offset = offset_of(group, chunk);
            next.start = load_u32(offset);
            next.stop = load_u32(offset + 1);
            next.slab = slab_of(group, chunk);
            prefetch_planes(next.slab, stages_of(chunk), lane);
        }
        return next;
    }
    // The chunk that is staged; the other buffer is free from here on.
    __device__ __forceinline__ Opened open(int stages) {
        await(copied, opened);
        opened ^= 1;
        Opened chunk;
        chunk.open(u32(__cvta_generic_to_shared(buffers + side * buffer_words + staged.begin)), staged.size, stages, lane);
        side ^= 1;
        return chunk;
    }
    // Goes through a chunk's runs up to stage `count`: use(set, run, upper), run being the first of its stages, and upper their upper bytes, signs and all. On
    // the way, the next chunk is staged.
    //
    // The planes of the run behind are asked for as soon as those of the run at hand are there. All loads share one scoreboard, so that whoever waits for some
    // of them later would wait for younger ones, too; and so that they are not moved, they are made to depend on what came before.
    template <bool in_cluster, class Use>
    __device__ __forceinline__ void decode(Opened& chunk, int count, const Next& next, u32 table, const Use& use) {
        const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
        const u32 zero = u32(buffer_words) >> 31;   // which the compiler does not know
        LookUps begun = chunk.begin(table, byte_mask);
#pragma unroll 1
        for (int first = 0; first < count; first += 2 * kRun) {
#pragma unroll
            for (int set = 0; set < 2; ++set) {
                const int run = first + set * kRun;
                const u8* behind = set == 0 || run + kRun < count ? slab + (run + kRun) / 2 * kSlabBytes : next.slab;
                load_run(set ^ 1, behind + (signs[set][kRun / 2 - 1] & zero));
                if (run >= count) continue;
                Vec4 upper[kRun];
#pragma unroll
                for (int s = 0; s < kRun; ++s) {
                    upper[s] = chunk.go_on(begun, table, byte_mask);
                    chunk.complete(upper[s], common);
                    begun = chunk.begin(table, byte_mask);   // of the next stage
                    chunk.mend<in_cluster>(upper[s], s, lane);
                    upper[s] = with_signs(signs[set][s / 2] << (4 * (s & 1)), upper[s]);
                }
                chunk.pass(kRun);
                use(set, run, upper);
                if (run == 0 && next.exists) stage(next.start, next.stop);   // these two are there by now
            }
        }
        __syncwarp();
        slab = next.slab;
    }
};

// A warp's sums, whose lane (g, t) has tokens `token` and `token` + 8, to y: of row groups row_group(0) to row_group(there - 1). Of each a lane has rows
// t and t + 4 of two tokens; the quad's lanes swap, so that each has all rows of every fourth row group.
template <int count, class RowGroup>
__device__ __forceinline__ void write_tokens(const Geometry& geometry, const Job& job, int token, int there, int lane, const float (&sums)[count], RowGroup row_group) {
    const int t = lane & 3, odd = t & 1;
#pragma unroll
    for (int slot = 0; slot < count / 4; slot += 4) {
        float biases[4][2] = {};
        if (job.bias)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    biases[i][k] = __uint_as_float(u32(job.bias[8 * row_group(min(slot + i, there - 1)) + t + 4 * k]) << 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = 0;
                if (slot + i >= count / 4) continue;
                float low = sums[4 * (slot + i) + 2 * half], high = sums[4 * (slot + i) + 2 * half + 1];
                if (job.bias) low += biases[i][0], high += biases[i][1];
                const float other = __shfl_xor_sync(kFull, odd ? low : high, 1);
                words[i] = odd ? to_bf16x2(other, high) : to_bf16x2(low, other);
            }
            const Vec4 whole = transpose(words, t);   // rows 0 and 1, 4 and 5, 2 and 3, 6 and 7
            const int own = token + 8 * half;
            if (own < job.tokens && slot + t < there)
                *reinterpret_cast<Vec4*>(job.y + size_t(own) * geometry.rows + 8 * row_group(slot + t)) = {whole.x, whole.z, whole.y, whole.w};
        }
    }
}
