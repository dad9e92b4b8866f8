"""What kernels take by value lies where they look for it: ctypes' structures beside the compiler's."""

from __future__ import annotations

import ctypes

import pytest
from cuda.core import Program, ProgramOptions
from cuda.core._utils.cuda_utils import CUDAError

from samebits.kernels import nvrtc, structures

STRUCTURES = {
    "routing.cuh": ("Routing",),
    "linear.cuh": ("Geometry", "Packed", "Prefetched", "Job", "Product", "Together"),
    "decode_together.cu": ("Decoded", "DecodedTogether"),
    "decoder.cuh": ("Division",),
    "arrange.cu": ("Arrangement",),
    "compact.cu": ("Compact",),
    "df11.cu": ("Unit",),
    "encode.cu": ("Source", "Book"),
    "pieces.cu": ("Piece",),
    "rows.cu": ("Gather", "Routed"),
}
OTHER_NAMES = {("Job", "division"): "walks"}  # a union


def check(file: str, *lines: str) -> None:
    """That these hold at the end of a file without its kernels."""
    text = nvrtc.source(file, "") + "\n".join(lines) + "\n"
    assert Program(text, "c++", ProgramOptions(name=file, arch="sm_90a", std="c++17")).compile("cubin").code


def assertions(name: str) -> list[str]:
    """That the compiler gives a structure the same size, and its fields the same places."""
    structure = getattr(structures, f"{name}Structure")
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size of {name}");']
    for field, *_ in structure._fields_:
        place, other = getattr(structure, field).offset, OTHER_NAMES.get((name, field), field)
        lines.append(f'static_assert(__builtin_offsetof({name}, {other}) == {place}, "{name}.{field}");')
    return lines


@pytest.mark.parametrize("file", STRUCTURES)
def test_structures_are_those_of_the_kernels(file: str) -> None:
    check(file, *(line for name in STRUCTURES[file] for line in assertions(name)))


def test_every_structure_is_compared() -> None:
    found = {name.removesuffix("Structure") for name in vars(structures) if name.endswith("Structure")}
    assert found == {name for names in STRUCTURES.values() for name in names}


@pytest.mark.parametrize(
    ("file", "constant", "value"),
    [
        ("decode_together.cu", "kMaxDecoded", structures.MAX_DECODED),
        ("linear.cuh", "kMaxTogether", structures.MAX_TOGETHER),
        ("linear.cuh", "kMaxPrefetched", structures.MAX_PREFETCHED),
        ("linear.cuh", "kWalks", structures.WALKS),
        ("linear.cuh", "kCuts", structures.DIVISION_WORDS),
    ],
)
def test_constants_are_those_of_the_kernels(file: str, constant: str, value: int) -> None:
    check(file, f'static_assert({constant} == {value}, "{constant}");')


def test_what_differs_is_found() -> None:
    with pytest.raises(CUDAError, match="size of Packed"):
        check("linear.cuh", 'static_assert(sizeof(Packed) == 1, "size of Packed");')
