"""How the fused layer's work is divided on Hopper: what csrc/linear_tiles.cu relies on."""

from __future__ import annotations

import pytest

from samebits.format.geometry import Geometry, Layout
from samebits.kernels import linear, nvrtc
from samebits.kernels.linear import CHUNK_STAGES, STATIC_SHARED

SHARED_MEMORY = 232448


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 128])
@pytest.mark.parametrize("buffer_words", [300, 500, 1000, 2068])
@pytest.mark.parametrize(
    "shape", [(8, 1024), (1064, 2880), (5120, 5120), (12288, 4096), (28672, 8192), (151936, 4096)], ids=str
)
def test_tiles_fit(shape: tuple[int, int], buffer_words: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: True)
    monkeypatch.setattr(nvrtc, "shared_memory", lambda device: SHARED_MEMORY)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: 132)
    geometry = Geometry.of_layout(shape, Layout.MATRIX, CHUNK_STAGES)
    launch = linear._Launch._of_tiles(geometry, (tokens, 1, geometry.stages), (8192, 1400, buffer_words), 20, 0)
    assert launch is not None
    slots, batches, *steps, _, _, _, ring = launch.job[3:]
    wide, tiles = map(int, launch.name.split("_")[-2:])
    decoding = launch.warps - (4 * tiles if wide == 128 else 4)
    assert wide >= tokens
    assert slots <= 8 * tiles
    assert slots * batches * launch.grid >= geometry.row_groups > slots * (batches - 1) * launch.grid
    assert slots <= decoding <= 16
    assert launch.warps <= 20
    assert steps == [decoding // slots, decoding % slots]
    assert ring >= 3 + (-(-decoding // slots) - 1) * CHUNK_STAGES // 2
    assert launch.shared_bytes <= SHARED_MEMORY - STATIC_SHARED


def test_only_hopper_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: False)
    geometry = Geometry.of_layout((4096, 4096), Layout.MATRIX, CHUNK_STAGES)
    assert linear._Launch._of_tiles(geometry, (1, 1, 64), (8192, 1400, 500), 20, 0) is None
    assert linear.max_tokens(0) == linear.MAX_TOKENS
