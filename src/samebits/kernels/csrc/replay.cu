// In front of a replay of a CUDA graph: nothing but a launch that may start early. See kernels/replay.py.
#include "common.cuh"

extern "C" __global__ void before_replay() { await_kernel_before(); }
