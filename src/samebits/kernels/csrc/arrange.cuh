// x as wgmma takes it (hopper.cuh): for each stage a matrix, or one for each half of it. Of every 16 columns, those that a quad's lower words are multiplied
// with come first: columns 4 t and 4 t + 1, t from 0 to 3, then the others.
#pragma once
#include "common.cuh"

// Writes 16 columns of a row of a tile: its step-th, words a and b. part_steps: steps that a matrix has, 4 or 2.
__device__ __forceinline__ void arrange_step(u8* tile, int rows, int row, int step, int part_steps, const Vec4& a, const Vec4& b) {
    const int part = step / part_steps, unit = 2 * (step - part * part_steps);
    const int swizzle = part_steps == 4 ? row & 7 : row >> 1 & 3, row_bytes = 32 * part_steps;
    u8* target = tile + (size_t(part) * rows + row) * row_bytes;
    *reinterpret_cast<Vec4*>(target + ((unit ^ swizzle) << 4)) = {a.x, a.z, b.x, b.z};
    *reinterpret_cast<Vec4*>(target + (((unit + 1) ^ swizzle) << 4)) = {a.y, a.w, b.y, b.w};
}
