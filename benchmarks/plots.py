"""Draw what was measured: docs/<name>.svg from results/, each picture as far as there are results for it.

python benchmarks/plots.py            draw again
python benchmarks/plots.py --check    exit code 1 if a picture is of other results, or missing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

import common

DOCS = Path(__file__).resolve().parents[1] / "docs"
INK = "#797979"  # as readable on white as on a dark page: 4.3 : 1
COLORS = ("#d9822b", "#4f8fc4", "#8f6fc0", "#3f9f7f", "#c65f7a")
# mpl: keep text as text in the SVG, and the file the same for the same numbers.
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "samebits",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.transparent": True,
    "axes.prop_cycle": mpl.cycler(color=COLORS),
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), INK
    ),
}

Row = dict[str, Any]
MILLION = 1_000_000
WEIGHT_CLASSES = {
    "48 million or more": (48 * MILLION, math.inf),
    "16 to 48 million": (16 * MILLION, 48 * MILLION),
    "less than 16 million": (0, 16 * MILLION),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        draw: draws some rows.
        rows: what it draws; a panel without rows is left out.
    """

    draw: Callable[[Axes, list[Row]], None]
    rows: list[Row]


def rows_of(name: str, table: str, *needed: str) -> list[Row]:
    """The rows of a table that have these keys; none without results."""
    rows = common.read_results(name)["rows"]
    return [row for row in rows if row["table"] == table and all(row.get(key) is not None for key in needed)]


def speed_by_tokens() -> list[Panel]:
    many = rows_of("linear", "many")
    matrices = {row["matrix"] for row in many}
    few = [row for table in ("few", "more") for row in rows_of("linear", table) if row["matrix"] in matrices]
    return [
        Panel(draw_speeds, [*chain.from_iterable(map(few_as_many, few)), *many]),
        Panel(draw_overhead, rows_of("linear", "prefill")),
    ]


def few_as_many(row: Row) -> list[Row]:
    """A row of the table "few" as rows of the table "many", with what is drawn of them."""
    tokens = sorted(int(key.removeprefix("speed_at_")) for key in row if key.startswith("speed_at_"))
    return [{"matrix": row["matrix"], "tokens": count, "speed": row[f"speed_at_{count}"]} for count in tokens]


def draw_speeds(axes: Axes, rows: list[Row]) -> None:
    """The median of the weights of each class of sizes, and from the slowest to the fastest."""
    for name, (least, most) in WEIGHT_CLASSES.items():
        speeds: dict[int, list[float]] = {}
        for row in sorted(rows, key=lambda row: row["tokens"]):
            if least <= weights_of(row["matrix"]) < most:
                speeds.setdefault(row["tokens"], []).append(row["speed"])
        if not speeds:
            continue
        medians = [statistics.median(each) for each in speeds.values()]
        (line,) = axes.plot(list(speeds), medians, marker="o", markersize=3.5, label=name)
        lowest, highest = ([pick(each) for each in speeds.values()] for pick in (min, max))
        axes.fill_between(list(speeds), lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.set_ylim(0, 1.08 * max(1, *(row["speed"] for row in rows)))
    axes.legend(loc="lower left", title="weights: median, slowest to fastest shape")
    label(axes, "Linear layer: times the speed of cuBLAS in BF16", "tokens", "times as fast")
    token_axis(axes, [row["tokens"] for row in rows])


def weights_of(matrix: str) -> int:
    return math.prod(map(int, matrix.split(" x ")))


def draw_overhead(axes: Axes, rows: list[Row]) -> None:
    axes.plot([row["tokens"] for row in rows], [100 * row["overhead"] for row in rows], marker="o", markersize=3.5)
    axes.axhline(0, color=INK, linewidth=1.2)
    label(axes, "All products of a Llama 3.1 8B layer: time over BF16", "tokens", "more time, %")
    token_axis(axes, [row["tokens"] for row in rows])


def bytes_by_matrix() -> list[Panel]:
    return [
        Panel(draw_decode_bytes, rows_of("h200", "codec", "roof_tb_per_s")),
        Panel(
            draw_product_bytes, rows_of("linear", "few", "packed_bytes", "read_tb_per_s", "samebits_microseconds_at_1")
        ),
        Panel(draw_peers, rows_of("peers", "decode", "decode_tb_per_s")),
    ]


def draw_decode_bytes(axes: Axes, rows: list[Row]) -> None:
    """Packed bytes read and BF16 bytes written, a second."""
    moved = [1 + row["bits_per_weight"] / 16 for row in rows]
    achieved = [share * row["decode_tb_per_s"] for share, row in zip(moved, rows, strict=True)]
    roofs = [share * row["roof_tb_per_s"] for share, row in zip(moved, rows, strict=True)]
    bars(axes, [row["matrix"] for row in rows], achieved, roofs)
    label(
        axes, "Decode to memory: bytes read and written", "TB/s; blue: filling the output, reading the packed bytes", ""
    )


def draw_product_bytes(axes: Axes, rows: list[Row]) -> None:
    achieved = [row["packed_bytes"] / row["samebits_microseconds_at_1"] / 1e6 for row in rows]
    roofs = [row["read_tb_per_s"] for row in rows]
    bars(axes, [row["matrix"] for row in rows], achieved, roofs)
    label(axes, "Linear layer, one token: packed bytes read", "TB/s; blue: reading the packed bytes", "")


def draw_peers(axes: Axes, rows: list[Row]) -> None:
    """Every decoder of every matrix; the roof stands among them as a row."""
    roofs = {row["matrix"]: row["decode_tb_per_s"] for row in rows if row["decoder"].startswith("roof")}
    decoders = [row for row in rows if not row["decoder"].startswith("roof")]
    names = [f"{row['matrix']}: {row['decoder'].split(',')[0]}" for row in decoders]
    achieved = [row["decode_tb_per_s"] for row in decoders]
    bars(axes, names, achieved, [roofs[row["matrix"]] for row in decoders])
    label(axes, "Decoders on the same GPU: BF16 written", "TB/s; blue: filling the output, reading samebits' bytes", "")


def bars(axes: Axes, names: Sequence[str], achieved: Sequence[float], roofs: Sequence[float]) -> None:
    """Horizontal bars from the top down, each with its roof as a line across."""
    places = range(len(names))
    axes.barh(places, achieved, height=0.62, color=COLORS[0])
    axes.vlines(roofs, [p - 0.4 for p in places], [p + 0.4 for p in places], color=COLORS[1], linewidth=2.5)
    for place, value, roof in zip(places, achieved, roofs, strict=True):
        note = f"{value:.2f}, {100 * value / roof:.0f} %"
        axes.text(max(value, roof) + 0.015 * max(roofs), place, note, va="center", fontsize=8)
    axes.set_yticks(places, names)
    axes.set(xlim=(0, 1.2 * max(*achieved, *roofs)), ylim=(len(names) - 0.4, -0.6))
    axes.grid(visible=False, axis="y")


def growth() -> list[Panel]:
    return [Panel(draw_growth, rows_of("growth", "growth"))]


def draw_growth(axes: Axes, rows: list[Row]) -> None:
    series = {
        "encode": "encode_microseconds",
        "decode": "decode_microseconds",
        "decode's roof": "roof_microseconds",
        "product with one token, BF16": "bf16_microseconds",
        "product with one token, samebits": "samebits_microseconds",
    }
    sizes = [row["weights"] / 1e6 for row in rows]
    for name, key in series.items():
        dashed = {"linestyle": "--", "marker": ""} if key.startswith("roof") else {"marker": "o", "markersize": 3.5}
        axes.plot(sizes, [row[key] for row in rows], label=name, **dashed)
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(loc="upper left")
    label(axes, "Time by the size of a matrix", "million weights", "µs")


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.set(xlabel=x, ylabel=y)


def token_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """Powers of two, as far apart as they are multiples of each other."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(tokens) / 1.2, max(tokens) * 1.2)


PICTURES: dict[str, Callable[[], list[Panel]]] = {
    "speed-by-tokens": speed_by_tokens,
    "bytes-by-matrix": bytes_by_matrix,
    "growth": growth,
}


def panels_of(name: str) -> list[Panel]:
    """The panels of a picture that have something to show."""
    return [panel for panel in PICTURES[name]() if panel.rows]


def digest(panels: Sequence[Panel]) -> str:
    """Stands in the picture, and says which results it is of."""
    rows = json.dumps([panel.rows for panel in panels], sort_keys=True)
    return f"results {hashlib.sha256(rows.encode()).hexdigest()[:16]}"


def draw(panels: Sequence[Panel], path: Path) -> None:
    with mpl.rc_context(STYLE):
        heights = [max(3.2, 0.24 * len(panel.rows) + 1.2) if panel.draw in BARS else 3.6 for panel in panels]
        figure = Figure(figsize=(7.6, sum(heights)), layout="constrained")
        grids = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for axes, panel in zip(grids.flat, panels, strict=True):
            panel.draw(axes, panel.rows)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": digest(panels)})


BARS = (draw_decode_bytes, draw_product_bytes, draw_peers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    checking = parser.parse_args().check
    for name in PICTURES:
        path, panels = DOCS / f"{name}.svg", panels_of(name)
        if checking and panels and not (path.exists() and digest(panels) in path.read_text()):
            print(f"{path} is not of the results: run python benchmarks/plots.py")
            return 1
        if not checking and panels:
            draw(panels, path)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
