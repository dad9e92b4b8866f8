// Writes x as linear_pairs.cuh, linear_ahead.cuh and linear_rounds.cuh read it, for each tile of `wide` tokens and each stage.
//
// For wgmma: arrange.cuh.
// For mma with x as its right matrix: 128 bytes for each token, 16-byte unit 4 h + t where (4 h + t) ^ 4 (token & 1) would be; it has columns 4 t to 4 t + 3 of
// steps 2 h and 2 h + 1, one lane's right operands of both.
// For mma with x as its left matrix (of 16 tokens; of a stage first one tile's 16, then those of the next): for each step 512 bytes, a lane's left operand at
// left_place.
#include "arrange.cuh"

struct Arrangement {
    const u16* x;        // [tokens, columns]
    u16* arranged;
    u32* done;           // to be zeroed
    int done_count, tokens, columns, wide;
    int part_steps;      // steps of 16 columns that a matrix of wgmma's has: 4 or 2; or kRight, kLeft: for mma
};
constexpr int kRight = 0, kLeft = 1;

extern "C" __global__ void arrange(const __grid_constant__ Arrangement to) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, steps = to.columns >> 4, token = index / steps, step = index - token * steps;
    let_kernel_behind_start();
    await_kernel_before();
    if (index < to.done_count) to.done[index] = 0;
    if (token >= to.tokens) return;
    const Vec4* source = reinterpret_cast<const Vec4*>(to.x + size_t(token) * to.columns + 16 * step);
    const Vec4 a = source[0], b = source[1];
    const int tile = token / to.wide, row = token - tile * to.wide;
    u8* tile_start = reinterpret_cast<u8*>(to.arranged) + size_t(tile) * steps * to.wide * 32;
    if (to.part_steps == kLeft) {
        if (row & 8) return;
        Vec4 c{}, d{};                  // of the token eight behind
        const Vec4* behind = source + to.columns;
        if (token + 8 < to.tokens) c = behind[0], d = behind[1];
        const int stage = step >> 2, matrix = stage * (to.wide >> 4) + (row >> 4);
        u8* target = tile_start + (size_t(matrix) * 4 + (step & 3)) * 512;
        auto put = [&](int t, const Vec4& operand) { *reinterpret_cast<Vec4*>(target + left_place(4 * (row & 7) + t, step)) = operand; };
        put(0, {a.x, c.x, a.y, c.y}), put(1, {a.z, c.z, a.w, c.w}), put(2, {b.x, d.x, b.y, d.y}), put(3, {b.z, d.z, b.w, d.w});
        return;
    }
    if (to.part_steps == kRight) {
        u8* target = tile_start + (size_t(step >> 2) * to.wide + row) * 128 + 8 * (step & 1);
        const int first = (2 * (step & 2)) ^ (4 * (row & 1));
        auto put = [&](int t, u32 low, u32 high) { *reinterpret_cast<Vec2*>(target + 16 * (first + t)) = {low, high}; };
        put(0, a.x, a.y), put(1, a.z, a.w), put(2, b.x, b.y), put(3, b.z, b.w);
        return;
    }
    arrange_step(tile_start, to.wide, row, step, to.part_steps, a, b);
}
