// What a router says, for linear_experts.cuh and linear_routed.cuh.
//
//   pair       a token and one of its experts; y has a row for each, in the order in which the router gives them
//   unit       up to so many pairs of one expert: what is multiplied with a row group as it is decoded
#pragma once
#include "common.cuh"

constexpr u32 kNoExpert = 0xffff;

struct Routing {
    const void* ids;       // [pairs], i64 each if `wide`, else i32: which experts
    const float* scales;   // [pairs]: what a pair's sums are multiplied with before they are rounded; or null
    int wide, pairs, experts;
    int groups;            // row groups of an expert
    int sharing;           // pairs behind each other that have one row of x
    int units;             // as many as there can be: of a block, in linear_routed.cuh of all
    int unit_pairs;        // that a unit has at most
    u32 by_groups, by_sharing, by_unit_pairs, by_tiles;   // for `divide`
    int tiles;             // linear_routed.cuh: of an expert's rows, one for a cluster of blocks

    __device__ __forceinline__ u32 expert_of(int pair) const {
        const u64 id = wide ? static_cast<const u64*>(ids)[pair] : static_cast<const u32*>(ids)[pair];
        return id < u64(experts) ? u32(id) : kNoExpert;
    }
};
