// samebits::decode_rows and samebits::decode_experts: some of a packed tensor's entries. An entry is what one index along the first
// dimension gives: `entry_words` consecutive words, which may lie in several chunks, and share the first and last with other entries.
#include "decoder.cuh"

extern "C" __device__ void __assertfail(const char* what, const char* file, u32 line, const char* function, size_t char_size);

// The chunk with a word of the tensor; where a row group has several chunks, the first.
__device__ __forceinline__ int chunk_of(const Geometry& geometry, i64 word) {
    const int row_group = int(word / geometry.columns >> 3);
    return geometry.chunks_per_row_group > 1 ? row_group * geometry.chunks_per_row_group : row_group / geometry.row_groups_per_chunk;
}

// decode_rows: the entries `ids`, one behind the other. Each has as many tasks as an entry can have chunks.
struct Gather {
    const void* ids;     // i64 each if `wide`, else i32
    i64 entries, entry_words;
    int wide, id_count, chunks_per_entry;
};

struct GatheredChunks {
    const Geometry& geometry;
    const Gather& gather;
    u16* output;

    __device__ __forceinline__ i64 id(int task) const {
        const int index = task / gather.chunks_per_entry;
        return gather.wide ? static_cast<const i64*>(gather.ids)[index] : static_cast<const int*>(gather.ids)[index];
    }

    static constexpr bool sparse = true;
    static constexpr int parts = 1;
    __device__ __forceinline__ int count() const { return gather.id_count * gather.chunks_per_entry; }
    // Every task comes here first. An id out of range ends the kernel, as torch's own embedding does.
    __device__ __forceinline__ bool wanted(int task) const {
        if (u64(id(task)) >= u64(gather.entries)) {
            __assertfail("id of an entry out of range", "samebits/kernels/csrc/rows.cu", __LINE__, "decode_rows", sizeof(char));
            return false;
        }
        const int last = chunk_of(geometry, (id(task) + 1) * gather.entry_words - 1) + geometry.chunks_per_row_group - 1;
        return chunk(task) <= last;
    }
    __device__ __forceinline__ int chunk(int task) const {
        return chunk_of(geometry, id(task) * gather.entry_words) + task % gather.chunks_per_entry;
    }
    __device__ __forceinline__ Window window(int task) const {
        const i64 begin = id(task) * gather.entry_words, place = task / gather.chunks_per_entry * gather.entry_words;
        return {output + (place - begin), begin, begin + gather.entry_words};
    }
};

// decode_experts: every entry in its place, of those with a flag. Chunks that reach into others write some of their words too.
struct Routed {
    const u8* flags;
    i64 entry_words;
};

struct RoutedChunks {
    const Geometry& geometry;
    const Routed& routed;
    u16* output;

    static constexpr bool sparse = true;
    static constexpr int parts = 1;
    __device__ __forceinline__ int count() const { return geometry.chunks; }
    __device__ __forceinline__ bool wanted(int task) const {
        const Chunk extent = chunk_at(geometry, task);
        const i64 begin = i64(extent.row_group) * 8 * geometry.columns;
        const i64 end = min(begin + i64(extent.row_groups) * 8 * geometry.columns, geometry.words);
        for (i64 entry = begin / routed.entry_words; entry * routed.entry_words < end; ++entry)
            if (routed.flags[entry]) return true;
        return false;
    }
    __device__ __forceinline__ int chunk(int task) const { return task; }
    __device__ __forceinline__ Window window(int) const { return {output, 0, geometry.words}; }
};

#define GATHER_KERNEL(name, quad, clip)                                                                            \
    extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)                                          \
    name(const Geometry geometry, const Packed packed, u16* output, const Division division, const Gather gather) { \
        decode_tasks<quad, clip>(geometry, packed, GatheredChunks{geometry, gather, output}, division, Blocks::of_launch());            \
    }
GATHER_KERNEL(decode_rows_quad_whole, true, kRows)
GATHER_KERNEL(decode_rows_quad_clipped, true, kWords)
GATHER_KERNEL(decode_rows_single_whole, false, kRows)
GATHER_KERNEL(decode_rows_single_clipped, false, kWords)

#define ROUTED_KERNEL(name, quad, clip)                                                                            \
    extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)                                          \
    name(const Geometry geometry, const Packed packed, u16* output, const Division division, const Routed routed) { \
        decode_tasks<quad, clip>(geometry, packed, RoutedChunks{geometry, routed, output}, division, Blocks::of_launch());              \
    }
ROUTED_KERNEL(decode_experts_quad_whole, true, kAll)
ROUTED_KERNEL(decode_experts_quad_clipped, true, kWords)
ROUTED_KERNEL(decode_experts_single_whole, false, kAll)
ROUTED_KERNEL(decode_experts_single_clipped, false, kWords)
