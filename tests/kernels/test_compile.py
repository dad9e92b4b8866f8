"""The CUDA sources compile for every architecture they are meant for; NVRTC needs no GPU for that."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from io import StringIO
from threading import Barrier

import pytest
import torch

from samebits.errors import DeviceError
from samebits.kernels import nvrtc
from samebits.kernels.nvrtc import Source

OLDER, HOPPER, NEWER = [(8, 0), (8, 6), (8, 9)], (9, 0), [(10, 0), (12, 0)]
CAPABILITIES = [*OLDER, HOPPER, *NEWER]
CHAINS = ("shared", "shared_turns", "shared_borders", "global", "global_borders")
TILES = [(16, 8), (16, 16), (32, 8), (32, 16), (64, 4), (64, 8), (64, 12), (64, 16), (128, 8), (128, 12)]
LINEAR = {
    "linear_ahead.cu": ["linear_ahead_8", "linear_ahead_8_two"],
    "linear_ahead_left.cu": [
        f"linear_ahead_{kind}" for kind in ("16_two", "16_apart", "32_two", "32_apart", "32_two_apart", "48_two")
    ],
    "linear_chains.cu": [f"linear_chains_{tokens}_{kind}" for tokens in (8, 16) for kind in CHAINS],
    "linear_clusters.cu": [f"linear_clusters_{tokens}_{rows}" for tokens in (128, 256) for rows in (64, 96, 112)],
    "linear_pairs.cu": [f"linear_pairs_{tokens}" for tokens in (4, 8, 16, 32, 64)],
    "linear_relay.cu": [f"linear_relay_{rows}" for rows in range(256, 127, -16)],
    "linear_rounds.cu": [f"linear_rounds_{tokens}{kind}" for tokens in (8, 16) for kind in ("", "_turns", "_borders")],
    "linear_singles.cu": [f"linear_singles_{tokens}" for tokens in (4, 8, 16, 32)],
    "linear_tiles.cu": [f"linear_tiles_{tokens}_{groups}" for tokens, groups in TILES],
}
INSTANCES = {
    "decode.cu": [
        *(f"decode_{code}_{variant}" for code in ("quad", "single") for variant in ("whole", "clipped")),
        "decode_quad_whole_shared",
    ],
    "rows.cu": [
        f"decode_{entries}_{code}_{variant}"
        for entries in ("rows", "experts")
        for code in ("quad", "single")
        for variant in ("whole", "clipped")
    ],
    **{file: [name + end for end in ("", "_together") for name in names] for file, names in LINEAR.items()},
    "linear_experts.cu": [f"linear_experts_{pairs}_{x}" for pairs in (8, 16) for x in ("shared", "in_step")],
    "linear_routed.cu": [f"linear_routed_{pairs}" for pairs in (64, 96, 128, 192, 256)],
    "linear_warpgroups.cu": [f"linear_warpgroups_{tokens}" for tokens in (64, 128, 256)],
}
WHOLE = {
    "arrange.cu": ["arrange"],
    "compact.cu": ["decode_compact"],
    "decode_together.cu": ["decode_together"],
    "df11.cu": ["decode_df11"],
    "encode.cu": [
        "row_statistics", "histogram", "quad_counts", "digest",
        *(f"{what}_{code}" for what in ("measure", "write") for code in ("quad", "single")),
    ],
    "pieces.cu": ["decode_pieces"],
    "replay.cu": ["before_replay"],
    "route.cu": ["route_experts", "arrange_experts"],
    "tables.cu": ["make_table_quad", "make_table_single"],
}  # fmt: skip
EVERYWHERE = (
    "linear_ahead.cu",
    "linear_chains.cu",
    "linear_experts.cu",
)  # of the fused layer's kernels; the others are Hopper's


def capabilities(file: str) -> list[tuple[int, int]]:
    return [HOPPER] if file.startswith("linear_") and file not in EVERYWHERE else CAPABILITIES


def pairs(file: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each kernel with Hopper, and in turn with one of the newer architectures and one of the older ones."""
    for number, name in enumerate(INSTANCES[file]):
        chosen = {HOPPER, NEWER[number % len(NEWER)], OLDER[number % len(OLDER)]}
        yield from ((name, each) for each in capabilities(file) if each in chosen)


def test_sources_tell_hopper_from_older_architectures_alone() -> None:
    csrc = files("samebits.kernels").joinpath("csrc")
    lines = {line for file in csrc.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    assert {line for line in lines if "__CUDA_ARCH" in line} == {"#if __CUDA_ARCH__ >= 900"}


def test_every_architecture_is_compiled_for() -> None:
    for file in INSTANCES:
        found = list(pairs(file))
        assert {name for name, _ in found} == {*INSTANCES[file]}
        assert {each for _, each in found} == {*capabilities(file)}


def test_every_file_is_known() -> None:
    csrc = files("samebits.kernels").joinpath("csrc")
    assert {file.name for file in csrc.iterdir() if file.name.endswith(".cu")} == INSTANCES.keys() | WHOLE.keys()
    assert {file: sorted(nvrtc.instances(file)) for file in INSTANCES} == {
        file: sorted(names) for file, names in INSTANCES.items()
    }
    assert not any(nvrtc.instances(file) for file in WHOLE)


def test_no_generic_lambdas() -> None:
    """NVRTC 13.0, which torch 2.11 brings, takes them for functions of the host; later ones compile them."""
    csrc = files("samebits.kernels").joinpath("csrc")
    generic = re.compile(r"\[[&=]?\w*\]\s*\([^)]*\bauto\b")
    assert generic.search("auto multiply = [&](auto number, int stage) {")
    assert not [file.name for file in csrc.iterdir() if generic.search(file.read_text(encoding="utf-8"))]


def symbols(binary: bytes) -> set[str]:
    """Of those that are kernels, and perhaps of others."""
    return {text.decode() for text in re.findall(rb"(?<=\0)\w+(?=\0)", binary)}


@pytest.mark.parametrize(
    ("file", "kernel", "capability"),
    [(file, *pair) for file in INSTANCES for pair in pairs(file)],
    ids=lambda value: value if isinstance(value, str) else nvrtc.architecture(value),
)
def test_kernels_compile(file: str, kernel: str, capability: tuple[int, int]) -> None:
    """Each alone. ptxas says where wgmmas have to wait for each other, which takes up to an eighth longer."""
    log = StringIO()
    binary = nvrtc.compile_source(file, nvrtc.architecture(capability), kernel, cached=False, log=log).code
    assert binary[:4] == b"\x7fELF"
    assert symbols(binary) & {*INSTANCES[file]} == {kernel}
    assert "serialized" not in log.getvalue()


@pytest.mark.parametrize(
    ("file", "capability"),
    [(file, each) for file in WHOLE for each in capabilities(file)],
    ids=lambda value: value if isinstance(value, str) else nvrtc.architecture(value),
)
def test_files_compile(file: str, capability: tuple[int, int]) -> None:
    binary = nvrtc.compile_source(file, nvrtc.architecture(capability), cached=False).code
    assert binary[:4] == b"\x7fELF"
    assert {*WHOLE[file]} <= symbols(binary)


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=60)  # one after the other would never pass it
    first, second = Source("a.cu", "one"), Source("a.cu", "two")
    compiled: list[tuple[Source, int]] = []

    def module(source: Source, device: int) -> None:
        both.wait()
        compiled.append((source, device))

    monkeypatch.setattr(nvrtc, "_module", module)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    nvrtc.compile_all([first, second, first], 3)
    assert sorted(compiled) == [(first, 3), (second, 3)]
    nvrtc.compile_all([], 3)

    def refuse(source: Source, device: int) -> None:
        raise DeviceError(f"cannot compile {source.kernel}")

    monkeypatch.setattr(nvrtc, "_module", refuse)
    with pytest.raises(DeviceError, match=r"cannot compile (one|two)"):
        nvrtc.compile_all([first, second], 3)


def test_a_file_of_other_kernels_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str | None, ...]] = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda *arguments: compiled.append(arguments) or len(compiled))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    modules = [
        nvrtc._module(Source(file, kernel), 99)
        for file, kernel in (
            ("tables.cu", "make_table_quad"), ("tables.cu", "make_table_single"),
            ("decode.cu", "decode_quad_whole"), ("decode.cu", "decode_quad_clipped"),
        )
    ]  # fmt: skip
    assert modules == [1, 1, 2, 3]
    assert compiled == [
        ("tables.cu", "sm_90a", None), ("decode.cu", "sm_90a", "decode_quad_whole"),
        ("decode.cu", "sm_90a", "decode_quad_clipped"),
    ]  # fmt: skip


def test_without_a_folder_for_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HOME may be read-only, or the disk full."""
    from cuda.core import utils

    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(utils, "FileStreamProgramCache", refuse)
    assert nvrtc.compile_source("arrange.cu", "sm_90a").code[:4] == b"\x7fELF"
    assert "compiled kernels are not kept" in caplog.text


def test_headers_are_included_once() -> None:
    text = nvrtc.source("decode.cu")
    assert "#include" not in text
    assert text.count("struct Geometry {") == text.count("struct Decoder {") == 1


def test_a_compiler_error_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "source", lambda file, kernel: "this is no CUDA")
    with pytest.raises(DeviceError, match=r"cannot compile decode\.cu for sm_80"):
        nvrtc.compile_source("decode.cu", "sm_80", cached=False)


def test_a_kernel_without_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can do without it need not know which library is missing."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(DeviceError, match="the CUDA kernels need cuda-core"):
        nvrtc.kernel("replay.cu", "before_replay", 98)
