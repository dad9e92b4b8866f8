// Writes x as linear_warpgroups.cu reads it: for each tile of `wide` tokens and each stage, or half a stage, a matrix as wgmma takes it (hopper.cuh). Of every 16
// columns, those that a quad's lower words are multiplied with come first: columns 4 t and 4 t + 1, t from 0 to 3, then the others.
#include "common.cuh"

struct Arrangement {
    const u16* x;        // [tokens, columns]
    u16* arranged;
    u32* done;           // to be zeroed
    int done_count, tokens, columns, wide;
    int part_steps;      // steps of 16 columns that a matrix has: 4 or 2
};

extern "C" __global__ void arrange(const __grid_constant__ Arrangement to) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, steps = to.columns >> 4, token = index / steps, step = index - token * steps;
    let_kernel_behind_start();
    await_kernel_before();
    if (index < to.done_count) to.done[index] = 0;
    if (token >= to.tokens) return;
    const Vec4* source = reinterpret_cast<const Vec4*>(to.x + size_t(token) * to.columns + 16 * step);
    const Vec4 a = source[0], b = source[1];
    const int tile = token / to.wide, row = token - tile * to.wide, part = step / to.part_steps, unit = 2 * (step - part * to.part_steps);
    const int swizzle = to.part_steps == 4 ? row & 7 : row >> 1 & 3, row_bytes = 32 * to.part_steps;
    u8* target = reinterpret_cast<u8*>(to.arranged) + (size_t(tile) * steps * to.wide * 32) + (size_t(part) * to.wide + row) * row_bytes;
    *reinterpret_cast<Vec4*>(target + ((unit ^ swizzle) << 4)) = {a.x, a.z, b.x, b.z};
    *reinterpret_cast<Vec4*>(target + (((unit + 1) ^ swizzle) << 4)) = {a.y, a.w, b.y, b.w};
}
