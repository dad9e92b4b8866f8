"""Checkpoints in the layout of DFloat11 (arXiv 2504.11651), versions 0.2.0 to 0.5.0."""
