"""Run the compiled loops with every array access checked; a script of test_bounds.py (NUMBA_BOUNDSCHECK=1)."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
from numba import njit

import samebits
from samebits.codecs import decode
from samebits.errors import FormatError
from samebits.format.packed import PackedTensor
from tests.codecs.malformed import MALFORMED
from tests.codecs.surgery import Parts
from tests.codecs.tensors import packed_of, tensor_of, without_compact
from tests.codecs.zoo import ZOO


@njit
def _read(array: np.ndarray, index: int) -> int:
    return array[index]  # type: ignore[no-any-return]


def prove_that_accesses_are_checked() -> None:
    try:
        _read(np.zeros(3), 3)
    except IndexError:
        return
    raise AssertionError("NUMBA_BOUNDSCHECK is not set")


def decode_in_every_way(packed: PackedTensor) -> None:
    samebits.decode(packed)
    if packed.shape:
        ids = torch.tensor([0, packed.shape[0] - 1])
        decode.decode_rows_cpu(packed, ids)
        decode.decode_experts_cpu(packed, ids)


def write_behind_validation(packed: PackedTensor, fill: bytes) -> None:
    """As through a parameter's ``.data``; the header stays, or decoders notice."""
    for section in ("code", "row_shifts", "offsets", "streams"):
        changed = PackedTensor(packed.header, packed.data.clone())
        content = changed.section(section)  # type: ignore[arg-type]
        content.copy_(torch.from_numpy(np.resize(np.frombuffer(fill, np.uint8), len(content))))
        with suppress(FormatError):  # a code that is none
            decode_in_every_way(changed)


def main() -> None:
    prove_that_accesses_are_checked()
    decode.gathers = lambda header, count: header.is_chunked  # however small the tensor is
    rng = np.random.default_rng(0)
    for case in ZOO:
        samebits.decode(samebits.encode(tensor_of(case.words)))
        with without_compact():
            samebits.decode(samebits.encode(tensor_of(case.words)))
        decode_in_every_way(packed_of(case.packed))
        for fill in (rng.bytes, lambda size: b"\xff" * size, lambda size: b"\0\0\0\x01" * (size // 4)):
            parts = Parts.of(case.packed)
            parts.streams[:] = fill(len(parts.streams))
            decode_in_every_way(packed_of(parts.joined()))
        packed = packed_of(case.packed)
        if not packed.is_raw:
            for far in (b"\xff", b"\0", b"\x7f", b"\0\0\xff\xff"):
                write_behind_validation(packed, far)
    for malformed in MALFORMED:
        if not malformed.refused:
            decode_in_every_way(packed_of(malformed.data))


if __name__ == "__main__":
    main()
