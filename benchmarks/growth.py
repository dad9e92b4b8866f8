"""How time grows with the size of a matrix: encode, decode, and the product with one token beside BF16.

    python benchmarks/growth.py [--name growth]        writes results/<name>.json, from 1 M to 500 M weights

All matrices have COLUMNS columns. Each size is measured as in gpu.py and linear.py: over more than 900 MB of distinct
packed bytes, after comparing the results as bytes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import significant, synthetic_matrix, write_results
from gpu import device_name
from gpu import measure as measure_codec
from linear import measure as measure_products

COLUMNS = 4096
ROWS = [256 << step for step in range(10)]
REPEATS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="growth")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows = [measure(synthetic_matrix(count, COLUMNS, device="cuda")) for count in ROWS]
    print(write_results(arguments.name, device_name(), rows))
    return 0


def measure(weights: torch.Tensor) -> dict[str, Any]:
    """One row of the table "growth"."""
    codec = measure_codec(weights, REPEATS)
    [product] = measure_products(weights, (1,), ())
    gweights = weights.numel() / 1e9
    return {
        "table": "growth",
        "matrix": codec["matrix"],
        "weights": weights.numel(),
        "path": product["path_at_1"],
        "roof_microseconds": significant(weights.nbytes / codec["roof_tb_per_s"] / 1e6),
        "decode_microseconds": codec["decode_microseconds"],
        "encode_microseconds": significant(gweights / codec["encode_gweights_per_s"] * 1e6),
        "bf16_microseconds": product["bf16_microseconds_at_1"],
        "samebits_microseconds": product["samebits_microseconds_at_1"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
