// Types, geometry and small pieces that every kernel shares. Clause numbers refer to FORMAT.md.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kLanes = 32;
constexpr int kStageBytes = 512;               // raw bytes of a stage: 8 rows x 64 columns
constexpr int kSignBytes = 128;                // sign words of a slab
constexpr int kSlabBytes = kSignBytes + 2 * kStageBytes;
constexpr int kHeadWords = 9;                  // 6.2, 6.3: a coded chunk's first word and 32 length bytes
constexpr u32 kSignMask = 0x80808080u;
constexpr u32 kFull = 0xffffffffu;

// What a warp's lanes have in common, in a uniform register. Of what comes from memory or from threadIdx the compiler does not know that it is the same for
// all of them, and guards every branch that depends on it as if lanes could part there.
__device__ __forceinline__ u32 uniform(u32 value) { return __reduce_or_sync(kFull, value); }

// Of several things, each with blocks of its own, in their order, that of the block at hand. The first blocks of those that there are not lie behind the
// grid. It is uniform, so that all that is loaded of it is, too.
template <int most, class FirstBlock>
__device__ __forceinline__ int own_number(const FirstBlock& first_block) {
    int i = 0;
#pragma unroll
    for (int next = 1; next < most; ++next) i += int(blockIdx.x) >= first_block(next);
    return int(uniform(u32(i)));
}

// A thread's warp in its block.
__device__ __forceinline__ int own_warp() { return int(uniform(threadIdx.x >> 5)); }

struct alignas(16) Vec4 {
    u32 x, y, z, w;

    __device__ __forceinline__ u32 word(int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};
struct alignas(8) Vec2 { u32 x, y; };

// 1.1 to 1.4. Filled by kernels/structures.py, which knows the same fields by name; keep both in this order.
struct Geometry {
    i64 words;          // of the tensor
    int rows, columns, stages, chunk_stages;
    int chunks, chunks_per_row_group, row_groups_per_chunk, row_groups;
};

struct Chunk { int row_group, row_groups, first_stage, stages; };

__device__ __forceinline__ Chunk chunk_at(const Geometry& geometry, int index) {
    if (geometry.chunks_per_row_group > 1) {
        const int group = index / geometry.chunks_per_row_group;
        const int first = (index - group * geometry.chunks_per_row_group) * geometry.chunk_stages;
        return {group, 1, first, min(geometry.chunk_stages, geometry.stages - first)};
    }
    const int group = index * geometry.row_groups_per_chunk;
    return {group, min(geometry.row_groups_per_chunk, geometry.row_groups - group), 0, geometry.stages};
}

// 5.3: where a stage's raw bytes start in the planes of the quad code; its slab's sign words are at slab_offset.
__device__ __forceinline__ size_t slab_offset(int stages, int row_group, int stage) {
    const size_t group_bytes = size_t(stages >> 1) * kSlabBytes + (stages & 1) * (kSignBytes + kStageBytes);
    return row_group * group_bytes + size_t(stage >> 1) * kSlabBytes;
}

template <bool quad>
__device__ __forceinline__ size_t raw_offset(int stages, int row_group, int stage) {
    if (!quad) return (size_t(row_group) * stages + stage) * kStageBytes;
    return slab_offset(stages, row_group, stage) + kSignBytes + (stage & 1) * kStageBytes;
}

// Weights pass through once: keep them out of L1.
__device__ __forceinline__ Vec4 load_once(const void* pointer) {
    Vec4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return v;
}

__device__ __forceinline__ Vec2 load_once_vec2(const void* pointer) {
    Vec2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return v;
}

__device__ __forceinline__ u32 load_once_u32(const void* pointer) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
    return v;
}

// These stay where they are written, ahead of what may wait longer.
__device__ __forceinline__ u32 load_u32(const void* pointer) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
    return v;
}

__device__ __forceinline__ u32 load_u16(const void* pointer) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(pointer));
    return v;
}

__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ u32 load_shared_u8(u32 address) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ Vec2 load_shared_vec2(u32 address) {
    Vec2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

__device__ __forceinline__ Vec4 load_shared_vec4(u32 address) {
    Vec4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// Or anything.
__device__ __forceinline__ Vec4 load_shared_vec4_if(bool any, u32 address) {
    Vec4 v;
    asm("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
    asm volatile("{ .reg .pred any;\n"
                 "  setp.ne.u32 any, %4, 0;\n"
                 "  @any ld.shared.v4.u32 {%0,%1,%2,%3}, [%5]; }"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "r"(u32(any)), "r"(address));
    return v;
}

__device__ __forceinline__ Vec2 load_shared_vec2_if(bool any, u32 address) {
    Vec2 v;
    asm("" : "=r"(v.x), "=r"(v.y));
    asm volatile("{ .reg .pred any;\n"
                 "  setp.ne.u32 any, %2, 0;\n"
                 "  @any ld.shared.v2.u32 {%0,%1}, [%3]; }" : "+r"(v.x), "+r"(v.y) : "r"(u32(any)), "r"(address));
    return v;
}

__device__ __forceinline__ void store_shared(u32 address, Vec4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, Vec2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// By exclusive or, whoever else changes the same word.
__device__ __forceinline__ void change_shared(u32 address, u32 change) { asm volatile("red.shared.xor.b32 [%0], %1;" ::"r"(address), "r"(change) : "memory"); }

__device__ __forceinline__ void store_once(void* pointer, u32 x, u32 y) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1,%2};" ::"l"(pointer), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void store_once(void* pointer, Vec4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Into the L2 cache.
__device__ __forceinline__ void prefetch(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

__device__ __forceinline__ void copy_async(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Narrower ones pass through L1.
__device__ __forceinline__ void copy_async_4(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_8(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
}

// x of more than eight tokens, arranged: of a step (16 columns) the byte at which a lane's left operand is, of columns 4 t and 4 t + 1 tokens g and g + 8, then of the
// others.
__device__ __forceinline__ u32 left_place(int lane, int step) { return 16 * (lane ^ ((step & 1) | (step & 2) << 1)); }

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

__device__ __forceinline__ int sum_before(int value, int lane, int& total) {
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance <<= 1) {
        asm volatile("{ .reg .pred inside; .reg .s32 other;\n"
                     "  shfl.sync.up.b32 other|inside, %0, %1, 0, 0xffffffff;\n"
                     "  @inside add.s32 %0, %0, other; }" : "+r"(sum) : "r"(distance));
    }
    total = __shfl_sync(kFull, sum, kLanes - 1);
    return sum - value;
}

// n / divisor for the small numbers that kernels divide, by what the host has worked out of the divisor (linear/job.py: magic): the compiler's
// own division takes a hundred cycles, and where work starts is found by many of them.
__device__ __forceinline__ int divide(int n, u32 magic) { return magic ? int(__umulhi(u32(n), magic)) : n; }

// Programmatic dependent launch: this kernel may start before the one in front of it has ended, and must not touch what that writes or reads
// before here.
__device__ __forceinline__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_kernel_behind_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
