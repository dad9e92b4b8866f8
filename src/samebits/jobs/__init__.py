"""Jobs over whole checkpoints: compress, decompress, inspect, estimate. Memory does not grow with the checkpoint."""
