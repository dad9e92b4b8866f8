"""Which fused product gives exactly cuBLAS's bits, and is faster than decoding first: found by trying, kept on disk."""
