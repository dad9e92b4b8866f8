// Encoding on a GPU: the same counts, codes and bytes as codecs/loops.py. Words are read as they lie, four at a time.
//
//   count     row_statistics (matrix) or histogram (flat), then quad_counts of a sample of rows; the host plans
//   measure   one warp per chunk: the lengths of its streams, so its size
//   write     one warp per chunk: first word, lengths, streams, patches; and the planes of its stages
#include "common.cuh"

constexpr int kExponents = 256;
constexpr int kFractions = 16;
constexpr int kAligned = 512;
constexpr int kAlignedZero = 256;
constexpr int kQuadSymbols = 4096;
constexpr int kCommonLow = 64, kCommonHigh = 191;   // codecs/loops.py
constexpr int kMaxUnit = 63, kMaxBase = 8191, kMaxPatches = 8191;
constexpr int kWarps = 8;                      // of every block here

struct Source {
    const u16* words;
    const int* shifts;                         // one per row, or null
    int shift, window;
};

__device__ __forceinline__ u64 load_quad(const Source& source, i64 position) {
    const u16* p = source.words + position;
    if ((position & 3) == 0) return *reinterpret_cast<const u64*>(p);
    return u64(p[0]) | u64(p[1]) << 16 | u64(p[2]) << 32 | u64(p[3]) << 48;
}

__device__ __forceinline__ int shift_of(const Source& source, i64 row) { return source.shifts ? source.shifts[row] : source.shift; }

// 4.1 for four words; by 4.3 no field overflows.
__device__ __forceinline__ u64 shift_quad(u64 quad, int shift) {
    const u64 nonzero = ((quad & 0x7fff7fff7fff7fffull) + 0x7fff7fff7fff7fffull) & 0x8000800080008000ull;
    return quad + (nonzero >> 8) * u64(i64(shift));
}

// The quad at (row, column), shifted, with padding filled in (5.4).
__device__ u64 shifted_quad(const Geometry& geometry, const Source& source, i64 row, int column, u64 padding) {
    if (row >= geometry.rows) return padding;
    const i64 position = row * geometry.columns + column;
    const int shift = shift_of(source, row);
    if (column + 4 <= geometry.columns && position + 4 <= geometry.words) return shift_quad(load_quad(source, position), shift);
    u64 result = padding;
    for (int i = 0; i < 4; ++i) {
        if (column + i >= geometry.columns || position + i >= geometry.words) break;
        result = (result & ~(0xffffull << 16 * i)) | shift_quad(source.words[position + i], shift) << 16 * i;
    }
    return result;
}

// Low bytes of the four 16-bit fields.
__device__ __forceinline__ u32 pack_bytes(u64 fields) { return __byte_perm(u32(fields), u32(fields >> 32), 0x6420); }

// Classes in bits 0-2 of each field (3.4); other bits are set where a word lies outside the window.
__device__ __forceinline__ u64 classify(u64 quad, int window) {
    return ((quad >> 8 & 0x007f007f007f007full) + (0x0080008000800080ull - u64(window) * 0x0001000100010001ull)) ^ 0x0080008000800080ull;
}
__device__ __forceinline__ bool outside(u64 classes) { return (classes & 0xfff8fff8fff8fff8ull) != 0; }
__device__ __forceinline__ u32 quad_symbol(u64 classes) {
    const u64 z = classes & 0x0007000700070007ull;
    return u32(z | z >> 13 | z >> 26 | z >> 39) & 0xfff;
}

// ---- counting

// One warp per row: its histogram in shared memory, then the row's centre and, every stride-th row, its share of the others
// (codecs/row_statistics.py).
extern "C" __global__ void __launch_bounds__(32 * kWarps) row_statistics(
    const Geometry geometry, const u16* __restrict__ words, int* __restrict__ centers, int* __restrict__ lowest, int* __restrict__ highest,
    u64* histogram, u64* aligned, u64* pinned, int* any_subnormal, int stride) {
    __shared__ u32 counts[kWarps][kExponents];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32* mine = counts[warp];
    for (i64 row = blockIdx.x * kWarps + warp; row < geometry.rows; row += i64(gridDim.x) * kWarps) {
        for (int e = lane; e < kExponents; e += kLanes) mine[e] = 0;
        __syncwarp();
        const u16* start = words + row * geometry.columns;
        bool subnormal = false;
        for (int column = lane; column < geometry.columns; column += kLanes) {
            const u32 word = start[column];
            subnormal |= (word & 0x7fff) - 1 < 0x7f;
            atomicAdd(&mine[word >> 7 & 255], 1u);
        }
        subnormal = __any_sync(kFull, subnormal);
        __syncwarp();
        u64 total = 0, weighted = 0;
        int low = 255, high = 0;
        for (int e = lane; e < kExponents; e += kLanes) {
            const u32 number = mine[e];
            if (number && row % stride == 0) atomicAdd(&histogram[e], u64(number));
            if (!number || e == 0) continue;
            total += number;
            weighted += u64(number) * e;
            low = min(low, e);
            high = max(high, e);
        }
        for (int distance = 16; distance; distance >>= 1) {
            total += __shfl_xor_sync(kFull, total, distance);
            weighted += __shfl_xor_sync(kFull, weighted, distance);
        }
        low = __reduce_min_sync(kFull, low);
        high = __reduce_max_sync(kFull, high);
        const bool fixed = total == 0 || high == 255 || subnormal;
        const int center = fixed ? -1 : int(kFractions * weighted / total);
        if (lane == 0) {
            centers[row] = center;
            lowest[row] = min(low, kCommonLow);
            highest[row] = max(high, kCommonHigh);
            if (subnormal) *any_subnormal = 1;
        }
        for (int e = lane; e < kExponents && row % stride == 0; e += kLanes) {
            const u32 number = mine[e];
            if (!number) continue;
            if (fixed || e == 0) atomicAdd(&pinned[e], u64(number));
            else atomicAdd(&aligned[center % kFractions * kAligned + e - center / kFractions + kAlignedZero], u64(number));
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) histogram(
    const Geometry geometry, const u16* __restrict__ words, u64* counts, int* any_subnormal) {
    __shared__ u32 local[kWarps][kExponents];
    for (int e = threadIdx.x; e < kWarps * kExponents; e += blockDim.x) local[0][e] = 0;
    __syncthreads();
    u32* mine = local[threadIdx.x >> 5];
    bool subnormal = false;
    const i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < geometry.words; i += stride) {
        const u32 word = words[i];
        subnormal |= (word & 0x7fff) - 1 < 0x7f;
        atomicAdd(&mine[word >> 7 & 255], 1u);
    }
    if (subnormal) *any_subnormal = 1;
    __syncthreads();
    for (int e = threadIdx.x; e < kExponents; e += blockDim.x) {
        u64 sum = 0;
        for (int warp = 0; warp < kWarps; ++warp) sum += local[warp][e];
        if (sum) atomicAdd(&counts[e], sum);
    }
}

// Whole quads of every stride-th row; the last counter takes those with a word outside the window.
extern "C" __global__ void __launch_bounds__(32 * kWarps) quad_counts(
    const Geometry geometry, const Source source, int stride, u64* counts) {
    __shared__ u32 local[kQuadSymbols + 1];
    for (int i = threadIdx.x; i <= kQuadSymbols; i += blockDim.x) local[i] = 0;
    __syncthreads();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (i64 row = i64(blockIdx.x * kWarps + warp) * stride; row < geometry.rows; row += i64(gridDim.x) * kWarps * stride) {
        const i64 start = row * geometry.columns, stop = min(start + geometry.columns, geometry.words);
        const int shift = shift_of(source, row);
        for (i64 position = start + 4 * lane; position + 4 <= stop; position += 4 * kLanes) {
            const u64 classes = classify(shift_quad(load_quad(source, position), shift), source.window);
            atomicAdd(&local[outside(classes) ? u32(kQuadSymbols) : quad_symbol(classes)], 1u);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= kQuadSymbols; i += blockDim.x)
        if (local[i]) atomicAdd(&counts[i], u64(local[i]));
}

// ---- chunks

struct Book {
    const u32* table;         // length << 16 | codeword, or 0
    const u16* nearest;       // quad code: the coded quad that stands in for one without codeword
    u64 padding;
    int common;               // class that stands in for words outside the window
};

// What a lane's quad becomes: its codeword (0 length never occurs), and the patches that correct it.
struct Coded {
    u32 code;                 // length << 16 | bits
    u32 symbol;
    bool patched;
};

__device__ __forceinline__ Coded code_quad(const u32* table, const Book& book, u64 value, int window) {
    const u64 classes = classify(value, window);
    u32 symbol = quad_symbol(classes);
    u32 code = table[symbol];
    if (!outside(classes) && code) return {code, symbol, false};
    u64 kept = classes;
    for (int i = 0; i < 4; ++i)
        if ((classes >> 16 * i & 0xffff) > 7) kept = (kept & ~(0xffffull << 16 * i)) | u64(book.common) << 16 * i;
    symbol = book.nearest[quad_symbol(kept)];
    return {table[symbol], symbol, true};
}

// The word's top7 exclusive-or its coded class, for word i of a quad.
__device__ __forceinline__ u32 difference(u64 value, u32 symbol, int window, int i) {
    return (u32(value >> (16 * i + 8)) & 0x7f) ^ (window + (symbol >> 3 * i & 7));
}

template <typename Visit>
__device__ __forceinline__ void for_each_stage(const Chunk& chunk, Visit visit) {
    int index = 0;
    for (int group = chunk.row_group; group < chunk.row_group + chunk.row_groups; ++group)
        for (int stage = chunk.first_stage; stage < chunk.first_stage + chunk.stages; ++stage) visit(index++, group, stage);
}

template <bool quad>
__device__ __forceinline__ const u32* shared_table(const Book& book) {
    extern __shared__ u32 table[];
    for (int i = threadIdx.x; i < (quad ? kQuadSymbols : kExponents); i += blockDim.x) table[i] = book.table[i];
    __syncthreads();
    return table;
}

__device__ __forceinline__ u32 single_code(const u32* table, u64 value, int i) { return table[value >> (16 * i + 7) & 0xff]; }

// Bits of the lane's two streams; the number of patches of the whole warp.
template <bool quad>
__device__ __forceinline__ int measure_streams(const Geometry& geometry, const Source& source, const Book& book, const u32* table,
                                               const Chunk& chunk, int lane, int bits[2]) {
    int patches = 0;
    bits[0] = bits[1] = 0;
    for_each_stage(chunk, [&](int, int group, int stage) {
        const i64 row = i64(group) * 8 + (lane >> 2);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u64 value = shifted_quad(geometry, source, row, 64 * stage + 16 * q + 4 * (lane & 3), book.padding);
            if (quad) {
                const Coded coded = code_quad(table, book, value, source.window);
                bits[q >> 1] += coded.code >> 16;
                if (coded.patched)
                    for (int i = 0; i < 4; ++i) patches += difference(value, coded.symbol, source.window, i) != 0;
            } else {
                for (int i = 0; i < 4; ++i) bits[q >> 1] += single_code(table, value, i) >> 16;
            }
        }
    });
    return __reduce_add_sync(kFull, patches);
}

struct Head { int base, unit, bits, size; };   // of a coded chunk; size in words

__device__ __forceinline__ Head head_of(const int bits[2], int patches) {
    const int base = __reduce_min_sync(kFull, min(bits[0], bits[1])), most = __reduce_max_sync(kFull, max(bits[0], bits[1]));
    const int unit = max(1, (most - base + 14) / 15);
    const int mine = 2 * base + ((bits[0] - base + unit - 1) / unit + (bits[1] - base + unit - 1) / unit) * unit;
    const int total = __reduce_add_sync(kFull, mine);
    return {base, unit, total, kHeadWords + (total + 31) / 32 + patches};
}

__device__ __forceinline__ bool must_be_raw(const Head& head, int stages, int patches) {   // 6.5
    return head.size >= 1 + 128 * stages || head.base > kMaxBase || head.unit > kMaxUnit || patches > kMaxPatches;
}

template <bool quad>
__device__ __forceinline__ void measure_chunks(const Geometry& geometry, const Source& source, const Book& book, u32* sizes) {
    const u32* table = shared_table<quad>(book);
    const int lane = threadIdx.x & 31;
    for (int index = blockIdx.x * kWarps + (threadIdx.x >> 5); index < geometry.chunks; index += gridDim.x * kWarps) {
        const Chunk chunk = chunk_at(geometry, index);
        const int stages = chunk.row_groups * chunk.stages;
        int bits[2];
        const int patches = measure_streams<quad>(geometry, source, book, table, chunk, lane, bits);
        const Head head = head_of(bits, patches);
        if (lane == 0) sizes[index] = must_be_raw(head, stages, patches) ? 1 + 128 * stages : head.size;
    }
}

// Appends bits to zeroed words that neighbouring streams may share.
struct BitWriter {
    u32* word;
    u64 pending;
    int offset;

    __device__ __forceinline__ BitWriter(u32* words, u32 position) : word(words + (position >> 5)), pending(0), offset(position & 31) {}
    __device__ __forceinline__ void put(u32 code) {
        pending |= u64(code & 0xffff) << offset;
        offset += code >> 16;
        if (offset < 32) return;
        atomicOr(word++, u32(pending));
        pending >>= 32;
        offset -= 32;
    }
    __device__ __forceinline__ void finish() { if (offset) atomicOr(word, u32(pending)); }
};

// Planes (section 5) of one stage: 16 raw bytes and, quad code, half a sign word per lane.
template <bool quad>
__device__ __forceinline__ void write_planes(const Geometry& geometry, u8* planes, int group, int stage, int lane, const u64 values[4]) {
    u32 raw[4], mine = 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const u32 sign = pack_bytes(values[q] >> 8) & kSignMask;
        raw[q] = quad ? pack_bytes(values[q]) : (pack_bytes(values[q]) & 0x7f7f7f7fu) | sign;
        mine |= sign >> q;
    }
    *reinterpret_cast<Vec4*>(planes + raw_offset<quad>(geometry.stages, group, stage) + 16 * lane) = {raw[0], raw[1], raw[2], raw[3]};
    if (!quad) return;
    u32* word = reinterpret_cast<u32*>(planes + slab_offset(geometry.stages, group, stage)) + lane;
    atomicOr(word, mine >> 4 * (stage & 1));   // the slab's other stage may belong to another chunk
}

template <bool quad>
__device__ __forceinline__ void write_coded(const Geometry& geometry, const Source& source, const Book& book, const u32* table,
                                            const Chunk& chunk, int lane, const int bits[2], const Head& head, int patches,
                                            u32* output) {
    const int steps[2] = {(bits[0] - head.base + head.unit - 1) / head.unit, (bits[1] - head.base + head.unit - 1) / head.unit};
    const int lengths[2] = {head.base + head.unit * steps[0], head.base + head.unit * steps[1]};
    if (lane == 0) output[0] = head.base | head.unit << 13 | patches << 19;
    reinterpret_cast<u8*>(output + 1)[lane] = u8(steps[0] | steps[1] << 4);
    int total;
    const u32 start = kHeadWords * 32 + sum_before(lengths[0] + lengths[1], lane, total);
    BitWriter writers[2] = {BitWriter(output, start), BitWriter(output, start + lengths[0])};
    u32* next_patch = output + head.size - patches;
    for_each_stage(chunk, [&](int index, int group, int stage) {
        const i64 row = i64(group) * 8 + (lane >> 2);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u64 value = shifted_quad(geometry, source, row, 64 * stage + 16 * q + 4 * (lane & 3), book.padding);
            if (!quad) {
                for (int i = 0; i < 4; ++i) writers[q >> 1].put(single_code(table, value, i));
                continue;
            }
            const Coded coded = code_quad(table, book, value, source.window);
            writers[q >> 1].put(coded.code);
            if (!__any_sync(kFull, coded.patched)) continue;
            u32 found[4];
            int count = 0;
            for (int i = 0; i < 4; ++i) {
                const u32 x = coded.patched ? difference(value, coded.symbol, source.window, i) : 0;
                if (x) found[count++] = index << 16 | q << 14 | lane << 9 | i << 7 | x;
            }
            int all;
            const int before = sum_before(count, lane, all);   // in the order of step, lane, word: ascending (6.4)
            for (int i = 0; i < count; ++i) next_patch[before + i] = found[i];
            next_patch += all;
        }
    });
    writers[0].finish();
    writers[1].finish();
}

template <bool quad>
__device__ __forceinline__ void write_chunks(const Geometry& geometry, const Source& source, const Book& book, const u32* offsets,
                                             u32* streams, u8* planes) {
    const u32* table = shared_table<quad>(book);
    const int lane = threadIdx.x & 31;
    for (int index = blockIdx.x * kWarps + (threadIdx.x >> 5); index < geometry.chunks; index += gridDim.x * kWarps) {
        const Chunk chunk = chunk_at(geometry, index);
        u32* output = streams + offsets[index];
        int bits[2];
        const int patches = measure_streams<quad>(geometry, source, book, table, chunk, lane, bits);
        const Head head = head_of(bits, patches);
        const bool raw = must_be_raw(head, chunk.row_groups * chunk.stages, patches);
        if (!raw) write_coded<quad>(geometry, source, book, table, chunk, lane, bits, head, patches, output);
        for_each_stage(chunk, [&](int stage_of_chunk, int group, int stage) {
            u64 values[4], plain[4];
            const i64 row = i64(group) * 8 + (lane >> 2);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int column = 64 * stage + 16 * q + 4 * (lane & 3);
                values[q] = shifted_quad(geometry, source, row, column, book.padding);
                plain[q] = shifted_quad(geometry, source, row, column, 0);
            }
            write_planes<quad>(geometry, planes, group, stage, lane, plain);
            if (!raw) return;
#pragma unroll
            for (int q = 0; q < 4; ++q)
                output[1 + 128 * stage_of_chunk + 4 * lane + q] =
                    quad ? pack_bytes(values[q] >> 8) & 0x7f7f7f7fu : pack_bytes(values[q] >> 7);
        });
    }
}

#define CHUNK_KERNELS(suffix, quad)                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * kWarps) measure_##suffix(                                        \
        const Geometry geometry, const Source source, const Book book, u32* sizes) {                                   \
        measure_chunks<quad>(geometry, source, book, sizes);                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * kWarps) write_##suffix(                                          \
        const Geometry geometry, const Source source, const Book book, const u32* offsets, u32* streams, u8* planes) { \
        write_chunks<quad>(geometry, source, book, offsets, streams, planes);                                          \
    }
CHUNK_KERNELS(quad, true)
CHUNK_KERNELS(single, false)

// ---- digest (2.3): `total` += the sum over words [0, count), of which the first has index `first`.
extern "C" __global__ void __launch_bounds__(32 * kWarps) digest(const u64* __restrict__ words, i64 count, i64 first, u64* total) {
    u64 sum = 0;
    const i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        u64 z = words[i] + u64(first + i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        sum += z ^ z >> 31;
    }
    for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(kFull, sum, distance);
    if ((threadIdx.x & 31) == 0) atomicAdd(total, sum);
}
