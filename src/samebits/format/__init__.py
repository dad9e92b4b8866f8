"""The byte layout of FORMAT.md: packed tensors and the files that hold them, no codec."""
