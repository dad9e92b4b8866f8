#include "linear_chains.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_chains_8_shared, Product, kMaxWarps, linear<shared, 1>)
LINEAR_KERNEL(linear_chains_8_shared_turns, Product, kMaxWarps, linear<shared, 1, kBetweenTurns>)
LINEAR_KERNEL(linear_chains_8_shared_borders, Product, kMaxWarps, linear<shared, 1, kInsideTurns>)
LINEAR_KERNEL(linear_chains_8_global, Product, kMaxWarps, linear<global, 1>)
LINEAR_KERNEL(linear_chains_8_global_borders, Product, kMaxWarps, linear<global, 1, kInsideTurns>)
LINEAR_KERNEL(linear_chains_16_shared, Product, kFewWarps, linear<shared, 2>)
LINEAR_KERNEL(linear_chains_16_shared_turns, Product, kFewWarps, linear<shared, 2, kBetweenTurns>)
LINEAR_KERNEL(linear_chains_16_shared_borders, Product, kFewWarps, linear<shared, 2, kInsideTurns>)
LINEAR_KERNEL(linear_chains_16_global, Product, kFewWarps, linear<global, 2>)
LINEAR_KERNEL(linear_chains_16_global_borders, Product, kFewWarps, linear<global, 2, kInsideTurns>)

// Several weights of one input.
LINEAR_KERNEL(linear_chains_8_shared_together, Together, kMaxWarps, linear<shared, 1>)
LINEAR_KERNEL(linear_chains_8_shared_turns_together, Together, kMaxWarps, linear<shared, 1, kBetweenTurns>)
LINEAR_KERNEL(linear_chains_8_shared_borders_together, Together, kMaxWarps, linear<shared, 1, kInsideTurns>)
LINEAR_KERNEL(linear_chains_8_global_together, Together, kMaxWarps, linear<global, 1>)
LINEAR_KERNEL(linear_chains_8_global_borders_together, Together, kMaxWarps, linear<global, 1, kInsideTurns>)
LINEAR_KERNEL(linear_chains_16_shared_together, Together, kFewWarps, linear<shared, 2>)
LINEAR_KERNEL(linear_chains_16_shared_turns_together, Together, kFewWarps, linear<shared, 2, kBetweenTurns>)
LINEAR_KERNEL(linear_chains_16_shared_borders_together, Together, kFewWarps, linear<shared, 2, kInsideTurns>)
LINEAR_KERNEL(linear_chains_16_global_together, Together, kFewWarps, linear<global, 2>)
LINEAR_KERNEL(linear_chains_16_global_borders_together, Together, kFewWarps, linear<global, 2, kInsideTurns>)
