// What the fused kernels must give, written as plainly as it can be: cuBLAS's order of summation on a dense weight. One warp takes eight rows.
typedef unsigned int u32;
typedef unsigned short u16;

__device__ float widen(u16 word) { return __uint_as_float(u32(word) << 16); }

extern "C" __global__ void plain_linear(const u16* x, const u16* weight, const u16* bias, u16* y, int tokens, int rows, int columns,
                                        int stages_per_range) {
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, first_row = 8 * blockIdx.x;
    const int stages = columns / 64;
    float total[4] = {0, 0, 0, 0};
    for (int first = 0; first < stages; first += stages_per_range) {
        float sums[4] = {0, 0, 0, 0};
        for (int step = 4 * first; step < 4 * min(first + stages_per_range, stages); ++step) {
            u32 a[4] = {0, 0, 0, 0}, b[2];
            const int column = 16 * step + 2 * t;
            const u16* row = weight + size_t(first_row + g) * columns;
            for (int half = 0; half < 2; ++half) {
                b[half] = row[column + 8 * half] | u32(row[column + 8 * half + 1]) << 16;
                for (int lower = 0; lower < 2; ++lower)
                    if (g + 8 * lower < tokens) {
                        const u16* token = x + size_t(g + 8 * lower) * columns + column + 8 * half;
                        a[2 * half + lower] = token[0] | u32(token[1]) << 16;
                    }
            }
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
        for (int i = 0; i < 4; ++i) total[i] = first ? total[i] + sums[i] : sums[i];
    }
    for (int i = 0; i < 4; ++i) {
        const int token = g + 8 * (i >> 1), row = first_row + 2 * t + (i & 1);
        const float sum = bias ? total[i] + widen(bias[row]) : total[i];
        u16 word;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(word) : "f"(sum));
        if (token < tokens) y[size_t(token) * rows + row] = word;
    }
}
