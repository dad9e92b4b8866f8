// The places of pairs in units of many (linear_routed.cuh), in memory.
#pragma once
#include "linear.cuh"
#include "routing.cuh"

constexpr u32 kNoPair = ~0u;
constexpr int kHeadOfTables = 4, kWordsOfUnit = 4;   // linear/routed.py: _HEAD_WORDS, _UNIT_WORDS

// What the launches leave each other in memory, which may have been another launch's before: it is read past the first-level cache.
struct UnitTables {
    u32* const count;      // [kHeadOfTables], the first: units
    Vec4* const units;     // [routing.units]: expert, the first octet of its x among all, octets
    u32* const pairs;      // [routing.units][routing.unit_pairs], or kNoPair
    float* const scales;   // as many, if there are any
    u32* const places;     // [routing.pairs] in these, or kNoPair

    __device__ __forceinline__ UnitTables(const Job& job, const Routing& routing)
        : count(job.done), units(reinterpret_cast<Vec4*>(count + kHeadOfTables)), pairs(count + kHeadOfTables + kWordsOfUnit * routing.units),
          scales(reinterpret_cast<float*>(pairs + routing.units * routing.unit_pairs)), places(pairs + 2 * routing.units * routing.unit_pairs) {}

    __device__ __forceinline__ Vec4 unit(int number) const {
        const uint4 found = __ldcg(reinterpret_cast<const uint4*>(units + number));
        return {found.x, found.y, found.z, found.w};
    }
};
