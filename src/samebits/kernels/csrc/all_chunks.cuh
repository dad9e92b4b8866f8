// A whole tensor's chunks as tasks of the decoder.
#pragma once
#include "decoder.cuh"

// Every chunk, all of it. Where chunks are few, two warps share one: the second goes past what is the first's. Short chunks, which end row groups, come
// last: else some blocks would have none but these, where their number and that of a row group's chunks have a divisor.
template <int own_parts>
struct AllChunks {
    const Geometry& geometry;
    u16* output;

    static constexpr bool sparse = false;
    static constexpr int parts = own_parts;
    __device__ __forceinline__ int count() const { return geometry.chunks * parts; }
    __device__ __forceinline__ bool wanted(int) const { return true; }
    __device__ __forceinline__ int chunk(int task) const {
        const int of_row_group = geometry.chunks_per_row_group, long_ones = of_row_group - 1;
        if (parts > 1 || long_ones == 0 || of_row_group * geometry.chunk_stages == geometry.stages) return task / parts;
        const int short_one = task - geometry.row_groups * long_ones;
        return short_one < 0 ? task + task / long_ones : short_one * of_row_group + long_ones;
    }
    __device__ __forceinline__ Window window(int) const { return {output, 0, geometry.words}; }
};
