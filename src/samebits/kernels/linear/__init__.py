"""The fused linear layer: launches for every kind of kernel in csrc/linear_*.cu, and products made by them."""
