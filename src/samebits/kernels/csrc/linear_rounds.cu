#include "linear_rounds.cuh"

// One weight in a launch.
LINEAR_KERNEL(linear_rounds_8, Product, kMaxWarps + 1, linear<1>)
LINEAR_KERNEL(linear_rounds_8_turns, Product, kMaxWarps + 1, linear<1, kBetweenTurns>)
LINEAR_KERNEL(linear_rounds_8_borders, Product, kMaxWarps + 1, linear<1, kInsideTurns>)
LINEAR_KERNEL(linear_rounds_16, Product, kFewWarps + 2, linear<2>)
LINEAR_KERNEL(linear_rounds_16_turns, Product, kFewWarps + 2, linear<2, kBetweenTurns>)
LINEAR_KERNEL(linear_rounds_16_borders, Product, kFewWarps + 2, linear<2, kInsideTurns>)

// Several weights of one input.
LINEAR_KERNEL(linear_rounds_8_together, Together, kMaxWarps + 1, linear<1>)
LINEAR_KERNEL(linear_rounds_8_turns_together, Together, kMaxWarps + 1, linear<1, kBetweenTurns>)
LINEAR_KERNEL(linear_rounds_8_borders_together, Together, kMaxWarps + 1, linear<1, kInsideTurns>)
LINEAR_KERNEL(linear_rounds_16_together, Together, kFewWarps + 2, linear<2>)
LINEAR_KERNEL(linear_rounds_16_turns_together, Together, kFewWarps + 2, linear<2, kBetweenTurns>)
LINEAR_KERNEL(linear_rounds_16_borders_together, Together, kFewWarps + 2, linear<2, kInsideTurns>)
