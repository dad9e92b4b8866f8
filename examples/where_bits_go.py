"""One picture of where the bits of a model's weights go, in BF16 and packed by samebits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from samebits.bf16 import entropy, exponent_histogram, words_of
from samebits.format.container import Checkpoint, Entry
from samebits.format.geometry import Code

# mpl: keep text as text in the SVG, and the file the same for the same numbers.
STYLE = {"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "samebits"}
SIGN, MANTISSA, EXPONENT, FRAMING = "#6d5a8d", "#4f7391", "#d9822b", "#3a3a3a"
WASTE, PAPER, INK, QUIET = "#f6e3cf", "#ffffff", "#222222", "#777777"
TINTS = {SIGN: "#e6e1ee", EXPONENT: WASTE, MANTISSA: "#dde6ed"}
FIELDS = (SIGN, *(EXPONENT,) * 8, *(MANTISSA,) * 7)  # of a word, bit 15 first
CHUNK_HEAD_BYTES = 36  # FORMAT.md 6.2 and 6.3: the first word and the stream lengths; a run's head (6.8) is 1 byte
WORDS_SHOWN = 48
WORD_BITS = 16
VISIBLE_SHARE = 0.0005  # rarer exponents are not drawn


@dataclass(frozen=True)
class Anatomy:
    """Bits per weight over a model's packed tensors.

    Attributes:
        histogram: of their exponents, int64 [256].
        entropy: what the exponents say, tensor by tensor.
        exponent_code: what samebits spends on them; framing: headers, tables, offsets, lengths, padding.
    """

    histogram: NDArray[np.int64]
    entropy: float
    exponent_code: float
    framing: float

    @property
    def limit(self) -> float:
        """Sign, mantissa, and what the exponents say."""
        return 8 + self.entropy

    @property
    def bits_per_weight(self) -> float:
        return 8 + self.exponent_code + self.framing


def framing_bytes(entry: Entry) -> int:
    """All of a packed tensor but signs, mantissas and exponents."""
    header = entry.packed().header
    sections = {name: part.stop - part.start for name, part in header.sections.items()}
    content = (9 if header.code is Code.QUAD else 8) * entry.words // 8
    padding = sections["planes"] - content
    gaps = header.nbytes - sum(sections.values())
    tables = sum(sections[name] for name in ("header", "shape", "code", "row_shifts", "offsets"))
    heads = header.runs if header.code is Code.COMPACT else CHUNK_HEAD_BYTES * header.geometry.chunks
    return tables + padding + gaps + heads


def anatomy(packed: Checkpoint, original: Checkpoint) -> Anatomy:
    """Where the bits of ``packed`` went; ``original`` tells what the exponents were."""
    histogram, information = np.zeros(256, np.int64), 0.0
    entries = [entry for entry in packed if entry.is_packed]
    for entry in entries:
        of_tensor = exponent_histogram(original.entries[entry.name].tensor())
        histogram += of_tensor
        information += entropy(of_tensor) * entry.words
    words = sum(entry.words for entry in entries)
    framing = 8 * sum(map(framing_bytes, entries)) / words
    total = 8 * sum(entry.nbytes for entry in entries) / words
    return Anatomy(histogram, information / words, total - 8 - framing, framing)


def draw(parts: Anatomy, words: NDArray[np.uint16], title: str, out: Path) -> list[Path]:
    """Draw to ``out``.svg and ``out``.png; ``words`` are BF16 words of the model to show bit by bit."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.6), facecolor=PAPER)
        grid = figure.add_gridspec(
            2, 2, width_ratios=(1, 2), height_ratios=(1, 1.05), left=0.03, right=0.975, top=0.83, bottom=0.09,
            wspace=0.2, hspace=0.42,
        )  # fmt: skip
        raster, bars, exponents = (figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
        draw_raster(raster, words[:WORDS_SHOWN])
        draw_bars(bars, parts)
        draw_exponents(exponents, parts)
        saved = 100 * (1 - parts.bits_per_weight / WORD_BITS)
        figure.text(0.03, 0.945, title, fontsize=16, weight="bold", color=INK)
        subtitle = (
            f"{parts.bits_per_weight:.2f} bits a weight instead of 16, {saved:.1f} % less, and every bit comes back"
        )
        figure.text(0.03, 0.9, subtitle, fontsize=11.5, color=QUIET)
        paths = [out.with_suffix(".svg"), out.with_suffix(".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def shown_words(original: Checkpoint) -> NDArray[np.uint16]:
    """Neighbours from the middle of the first matrix after the embedding."""
    matrices = [entry for entry in original if len(entry.shape) == 2 and "embed" not in entry.name]
    words = words_of(matrices[0].tensor())
    return words[words.size // 2 :]


def draw_raster(axes: Axes, words: NDArray[np.uint16]) -> None:
    """Every bit of some words: a full cell is 1, a pale one 0."""
    for row, word in enumerate(words):
        for column, field in enumerate(FIELDS):
            bit = int(word) >> (WORD_BITS - 1 - column) & 1
            axes.add_patch(Rectangle((column, row), 0.9, 0.86, color=field if bit else TINTS[field], linewidth=0))
    for first, last, name, field in ((0, 1, "sign", SIGN), (1, 9, "exponent", EXPONENT), (9, 16, "mantissa", MANTISSA)):
        axes.text((first + last) / 2 - 0.05, -0.9, name, ha="center", va="bottom", color=field, weight="bold")
    axes.set(xlim=(-0.6, WORD_BITS + 0.2), ylim=(len(words) + 0.5, -2.4))
    axes.axis("off")
    note = f"{len(words)} weights of the model, bit by bit (a full cell is a 1)"
    axes.text(WORD_BITS / 2, len(words) + 0.9, note, ha="center", va="top", color=QUIET, fontsize=9)


def draw_bars(axes: Axes, parts: Anatomy) -> None:
    """A weight in BF16 above the same weight packed, on one scale of 16 bits."""
    limit, total = parts.limit, parts.bits_per_weight
    above = [("sign", 1, SIGN), ("mantissa", 7, MANTISSA), ("says", parts.entropy, EXPONENT)]
    below = [*above[:2], ("code", parts.exponent_code, EXPONENT), ("framing", parts.framing, FRAMING)]
    for height, segments in ((1.15, [*above, ("waste", WORD_BITS - limit, WASTE)]), (0, below)):
        left = 0.0
        for name, width, color in segments:
            hatch = {"hatch": "////", "edgecolor": EXPONENT, "linewidth": 0} if name == "waste" else {}
            axes.barh(height, width, left=left, height=0.62, color=color, **hatch)
            left += width
    label = {"ha": "center", "va": "center", "color": PAPER, "fontsize": 10}
    for height in (0, 1.15):
        axes.text(0.5, height, "sign", **label | {"fontsize": 8.5})
        axes.text(4.5, height, "mantissa, 7 bits", **label)
    axes.text(8 + parts.entropy / 2, 1.15, f"exponent:\n{parts.entropy:.2f} bits", **label)
    boxed = {"boxstyle": "round,pad=0.3", "facecolor": PAPER, "edgecolor": "none"}
    waste = f"{WORD_BITS - limit:.2f} bits that say nothing"
    axes.text((limit + WORD_BITS) / 2, 1.15, waste, ha="center", va="center", color=EXPONENT, bbox=boxed)
    axes.text(8 + parts.exponent_code / 2, 0, f"as a code:\n{parts.exponent_code:.2f} bits", **label)
    axes.text(total + 0.15, 0.12, f"{total:.2f} bits", va="center", color=INK, weight="bold", fontsize=12)
    axes.text(total + 0.15, -0.17, f"of them framing {parts.framing:.2f}", va="center", color=FRAMING, fontsize=9)
    axes.plot((limit, limit), (-0.45, 1.58), color=INK, linewidth=1, linestyle=(0, (3, 2)))
    axes.text(limit, 1.63, f"limit 8 + entropy = {limit:.2f}", ha="center", color=INK, fontsize=9)
    axes.set(xlim=(0, WORD_BITS), ylim=(-0.45, 1.7), yticks=[], xticks=range(0, WORD_BITS + 1, 2))
    axes.set_xlabel("bits a weight", color=QUIET, fontsize=9)
    axes.text(-0.15, 1.15, "BF16", ha="right", va="center", color=INK, weight="bold")
    axes.text(-0.15, 0, "samebits", ha="right", va="center", color=INK, weight="bold")
    clean(axes)


def draw_exponents(axes: Axes, parts: Anatomy) -> None:
    """How often each exponent occurs, with the length of its ideal code."""
    shares = parts.histogram / parts.histogram.sum()
    used = np.nonzero(shares)[0]
    frequent = np.nonzero(shares > VISIBLE_SHARE)[0]
    visible = np.arange(frequent[0] - 1, frequent[-1] + 2)
    axes.bar(visible, 100 * shares[visible], width=0.82, color=EXPONENT)
    for exponent in frequent:
        bits = -np.log2(shares[exponent])
        axes.text(exponent, 100 * shares[exponent] + 0.8, f"{bits:.1f}", ha="center", color=INK, fontsize=8.5)
    labels = [f"$2^{{{exponent - 127}}}$" for exponent in visible]
    axes.set(xticks=visible, yticks=[], ylim=(0, 118 * shares.max()))
    axes.set_xticklabels(labels, fontsize=9)
    axes.set_xlabel("size of the weight (its exponent)", color=QUIET, fontsize=9)
    note = (
        f"Of 256 exponents, {len(used)} occur,\nand a few of them nearly always.\n"
        "Numbers: the bits that each is worth,\n"
        f"{entropy(parts.histogram):.2f} in the mean (tensor by tensor {parts.entropy:.2f}),\nwhere BF16 spends 8."
    )
    axes.text(0.02, 0.95, note, transform=axes.transAxes, va="top", color=INK, linespacing=1.5)
    clean(axes)


def clean(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")
    axes.tick_params(colors=QUIET, length=0)
