// How a block's warps divide the chunks of its row groups, for the kernels in which chains advance together.
#pragma once
#include "common.cuh"

struct Task { int batch, chunk, slot, group; };

// Which tasks a warp has, in the order of their numbers.
struct Tasks {
    int chunks, slots, own, batches;          // own: row groups of the block
    int chunk_step, slot_step;                // from one task of a warp to its next
    u32 by_slots;
    int block, blocks;

    __device__ __forceinline__ bool has(const Task& task) const { return task.batch < batches; }
    __device__ __forceinline__ Task first(int warp) const {
        const int chunk = divide(warp, by_slots);
        return settled({0, chunk, warp - chunk * slots, 0});
    }
    __device__ __forceinline__ Task behind(Task task) const { return settled(moved(task)); }
    __device__ __forceinline__ Task moved(Task task) const {
        task.slot += slot_step;
        task.chunk += chunk_step;
        if (task.slot >= slots) {
            task.slot -= slots;
            ++task.chunk;
        }
        return task;
    }
    __device__ __forceinline__ Task settled(Task task) const {   // at the next task whose row group exists
        for (;;) {
            while (task.chunk >= chunks) {
                task.chunk -= chunks;
                ++task.batch;
            }
            const int place = task.batch * slots + task.slot;
            task.group = place * blocks + block;
            if (place < own || !has(task)) return task;
            task = moved(task);
        }
    }
};
