"""The CUDA sources compile for every architecture they are meant for; NVRTC needs no GPU for that."""

from __future__ import annotations

import os
from threading import Barrier

import pytest

from samebits.errors import DeviceError
from samebits.kernels import nvrtc

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
CHAINS = ("shared", "shared_borders", "global", "global_borders")
TILES = [(tokens, groups) for tokens in (16, 32, 64, 128) for groups in ((4, 8, 12, 16) if tokens == 64 else (8, 16))]
CLUSTERS = [(tokens, rows) for tokens in (128, 256) for rows in (64, 96, 112)]
KERNELS = {
    "decode.cu": ["decode_quad_whole", "decode_quad_clipped", "decode_single_whole", "decode_single_clipped"],
    "compact.cu": ["decode_compact"],
    "df11.cu": ["decode_df11"],
    "rows.cu": [
        f"decode_{entries}_{code}_{variant}"
        for entries in ("rows", "experts")
        for code in ("quad", "single")
        for variant in ("whole", "clipped")
    ],
    "linear_ahead.cu": [f"linear_ahead_{tokens}" for tokens in (8, 16)],
    "linear_chains.cu": [f"linear_chains_{tokens}_{kind}" for tokens in (8, 16) for kind in CHAINS],
    "linear_ahead_together.cu": [f"linear_ahead_{tokens}_together" for tokens in (8, 16)],
    "linear_chains_together.cu": [f"linear_chains_{tokens}_{kind}_together" for tokens in (8, 16) for kind in CHAINS],
    "linear_tiles.cu": [f"linear_tiles_{tokens}_{groups}" for tokens, groups in TILES],
    "linear_tiles_together.cu": [f"linear_tiles_{tokens}_{groups}_together" for tokens, groups in TILES],
    "linear_singles.cu": [f"linear_singles_{tokens}" for tokens in (4, 8, 16, 32)],
    "linear_singles_together.cu": [f"linear_singles_{tokens}_together" for tokens in (4, 8, 16, 32)],
    "linear_pairs.cu": [f"linear_pairs_{tokens}" for tokens in (4, 8, 16, 32, 64)],
    "linear_pairs_together.cu": [f"linear_pairs_{tokens}_together" for tokens in (4, 8, 16, 32, 64)],
    "linear_warpgroups.cu": [f"linear_warpgroups_{tokens}" for tokens in (64, 128, 256)],
    "linear_relay.cu": [f"linear_relay_{rows}" for rows in range(128, 257, 16)],
    "linear_relay_together.cu": [f"linear_relay_{rows}_together" for rows in range(128, 257, 16)],
    "linear_clusters.cu": [f"linear_clusters_{tokens}_{rows}" for tokens, rows in CLUSTERS],
    "linear_clusters_together.cu": [f"linear_clusters_{tokens}_{rows}_together" for tokens, rows in CLUSTERS],
    "arrange.cu": ["arrange"],
    "tables.cu": ["make_table_quad", "make_table_single"],
    "encode.cu": ["row_statistics", "histogram", "quad_counts", "measure_quad", "write_single", "digest"],
}


HOPPER_ONLY = tuple(
    file for file in KERNELS if file.startswith("linear_") and not file.startswith(("linear_ahead", "linear_chains"))
)


@pytest.mark.parametrize(
    ("file", "capability"),
    [(file, each) for file in KERNELS for each in CAPABILITIES if file not in HOPPER_ONLY or each == (9, 0)],
    ids=lambda value: value if isinstance(value, str) else nvrtc.architecture(value),
)
def test_sources_compile(file: str, capability: tuple[int, int]) -> None:
    binary = nvrtc.compile_source(file, nvrtc.architecture(capability), cached=False).code
    assert binary[:4] == b"\x7fELF"
    assert all(name.encode() in binary for name in KERNELS[file])


def test_sources_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=60)  # one after the other would never pass it
    compiled: list[tuple[str, int]] = []

    def module(name: str, device: int) -> None:
        both.wait()
        compiled.append((name, device))

    monkeypatch.setattr(nvrtc, "_module", module)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    nvrtc.compile_all(["a.cu", "b.cu", "a.cu"], 3)
    assert sorted(compiled) == [("a.cu", 3), ("b.cu", 3)]
    nvrtc.compile_all([], 3)

    def refuse(name: str, device: int) -> None:
        raise DeviceError(f"cannot compile {name}")

    monkeypatch.setattr(nvrtc, "_module", refuse)
    with pytest.raises(DeviceError, match=r"cannot compile [ab]\.cu"):
        nvrtc.compile_all(["a.cu", "b.cu"], 3)


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
    monkeypatch.setattr(nvrtc, "source", lambda name: "this is no CUDA")
    with pytest.raises(DeviceError, match=r"cannot compile decode\.cu for sm_80"):
        nvrtc.compile_source("decode.cu", "sm_80", cached=False)
