"""The byte layout of FORMAT.md: pure arithmetic and validation, no codec."""
