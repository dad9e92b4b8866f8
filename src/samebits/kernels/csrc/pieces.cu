// Several packed tensors of the quad code in one launch, each to its place in one tensor. Its rows are `entries`, and a piece has the same
// part of each:
//
//      entry 0   | piece 0 | piece 1 | piece 2 |  what is written elsewhere  |
//      entry 1   | piece 0 | piece 1 | piece 2 |                             |
//
// The pieces' chunks, one behind the other, are divided evenly between blocks, so that most blocks have one piece, some two.
#include "decoder.cuh"

// Filled by kernels/pieces.py, as a launch finds it in memory.
struct Piece {
    Geometry geometry;
    Packed packed;
    i64 first_chunk;       // of all pieces' chunks
    i64 start, words;      // of each entry: where the piece begins, and how much of it that is
    int rows;              // of the packed tensor, in each entry
};

struct PieceWindow : Window {
    i64 gap;               // words between what a piece has of one entry and of the next
    int rows;

    __device__ __forceinline__ i64 start_of(i64 row, int columns) const { return row * columns + int(row) / rows * gap; }
};

// Some of a piece's chunks.
struct PieceChunks {
    int first, number;
    PieceWindow place;

    static constexpr bool sparse = false;
    static constexpr int parts = 1;
    __device__ __forceinline__ int count() const { return number; }
    __device__ __forceinline__ bool wanted(int) const { return true; }
    __device__ __forceinline__ int chunk(int task) const { return first + task; }
    __device__ __forceinline__ PieceWindow window(int) const { return place; }
};

// The last piece that does not begin behind a chunk.
__device__ __forceinline__ int piece_of(const Piece* pieces, int count, i64 chunk) {
    int found = 0;
    for (int behind = count; behind - found > 1;) {
        const int middle = (found + behind) / 2;
        (pieces[middle].first_chunk <= chunk ? found : behind) = middle;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
decode_pieces(const Piece* pieces, int count, i64 chunks, u16* output, i64 entry_words, const Division division) {
    const i64 end = chunks * (blockIdx.x + 1) / gridDim.x;
    i64 chunk = chunks * blockIdx.x / gridDim.x;
    for (int at = piece_of(pieces, count, chunk); chunk < end; ++at) {
        const Piece piece = pieces[at];
        const int first = int(chunk - piece.first_chunk), behind = int(min(end - piece.first_chunk, i64(piece.geometry.chunks)));
        const PieceWindow place{{output + piece.start, 0, piece.geometry.words}, entry_words - piece.words, piece.rows};
        decode_tasks<true, kAll>(piece.geometry, piece.packed, PieceChunks{first, behind - first, place}, division, {0, 1});
        chunk = piece.first_chunk + behind;
        __syncthreads();   // before the next piece's table is built in the place of this one's
    }
}
