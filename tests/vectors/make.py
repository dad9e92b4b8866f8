"""Write the golden vectors: ``NAME.bin``, a packed tensor, and ``NAME.words``, its original words (u16, little endian).

    python -m tests.vectors.make          only when FORMAT.md or the plan of samebits' encoder changes on purpose

Those named ``samebits_*`` come from ``samebits.encode``, the others from the slow encoder in tests/codecs.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import samebits
from tests.codecs.tensors import bytes_of, tensor_of, without_compact
from tests.codecs.zoo import GOLDEN, Words, nearly_constant, normal, octaves, pruned, scaled_rows, scattered

FOLDER = Path(__file__).parent
FAST: dict[str, Words] = {  # the code of the name: samebits would take the compact one for most of them
    "samebits_quad": octaves((104, 256), 20),
    "samebits_quad_flat": octaves((24571,), 21),
    "samebits_quad_row_shifts": octaves((104, 256), 22, rows=104),
    "samebits_single": normal((96, 256), 23),
    "samebits_single_row_shifts": scaled_rows((96, 256), 24),
    "samebits_single_flat": scattered((5, 7, 111), 25),
    "samebits_sparse": nearly_constant((128, 256), 26),
    "samebits_compact": normal((17, 241), 27),
    "samebits_compact_escapes": scattered((5, 7, 111), 28),
    "samebits_compact_sparse": pruned((5000,), 0.85),
}


def path_of(name: str, suffix: str) -> Path:
    return FOLDER / f"{name}.{suffix}"


def stored_words(name: str, shape: tuple[int, ...]) -> Words:
    return np.fromfile(path_of(name, "words"), "<u2").reshape(shape)


def written(name: str, tensor: torch.Tensor) -> bytes:
    """The packed tensor that samebits makes of ``tensor`` with the code of the name."""
    with nullcontext() if "compact" in name else without_compact():
        return bytes_of(samebits.encode(tensor))


def main() -> None:
    slow = {case.name: (case.words, case.packed) for case in GOLDEN}
    fast = {name: (words, written(name, tensor_of(words))) for name, words in FAST.items()}
    for name, (words, packed) in (slow | fast).items():
        path_of(name, "words").write_bytes(words.astype("<u2").tobytes())
        path_of(name, "bin").write_bytes(packed)


if __name__ == "__main__":
    main()
