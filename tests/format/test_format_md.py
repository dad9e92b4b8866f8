"""FORMAT.md itself: every clause has a test, and its formulas hold for bytes that samebits writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import samebits
from samebits.errors import FormatError, VersionError
from samebits.format.container import Checkpoint
from samebits.format.names import original_name, stored_name
from samebits.format.packed import PackedTensor
from tests.codecs.tensors import tensor_of, without_compact
from tests.codecs.zoo import Words, normal, octaves, pruned

TESTS = Path(__file__).resolve().parents[1]
FORMAT = TESTS.parent / "FORMAT.md"
CLAUSE = re.compile(r"^(\d\.\d) ", re.MULTILINE)


def marked_clauses(path: Path) -> Iterator[str]:
    """The arguments of every ``pytest.mark.clause(...)`` of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.clause":
            yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_clause_has_a_test() -> None:
    clauses = set(CLAUSE.findall(FORMAT.read_text(encoding="utf-8")))
    assert {"1.6", "2.3", "3.7", "4.3", "5.5", "6.8", "7.5"} <= clauses
    assert {clause for path in TESTS.rglob("test_*.py") for clause in marked_clauses(path)} == clauses


def places(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Some rows and columns, corners included."""
    rng = np.random.default_rng(0)
    yield from [(0, 0), (shape[0] - 1, shape[1] - 1), (0, shape[1] - 1)]
    yield from zip(rng.integers(0, shape[0], 64).tolist(), rng.integers(0, shape[1], 64).tolist(), strict=True)


def lane_of(row: int, column: int) -> tuple[int, int, int, int, int, int]:
    """1.2, 1.3 solved for a word: row group, stage, step, lane, i, and its place among a stage's raw bytes (5.3)."""
    step, lane, i = column % 64 // 16, 4 * (row % 8) + column % 16 // 4, column % 4
    return row // 8, column // 64, step, lane, i, 16 * lane + 4 * step + i


@pytest.mark.clause("1.2", "1.3", "5.1", "5.2", "5.3")
@pytest.mark.parametrize("columns", [256, 64 * 15])
def test_where_a_word_lies_in_the_quad_code(columns: int) -> None:
    words = octaves((80, columns))
    words[::3, ::2] |= 0x8000
    with without_compact():
        packed = samebits.encode(tensor_of(words))
    assert packed.code == 1
    planes = packed.section("planes").numpy()
    shift = packed.header.shift
    stages = -(-columns // 64)
    for row, column in places(words.shape):
        group, stage, step, lane, i, raw = lane_of(row, column)
        slab = group * (stages // 2 * 1152 + stages % 2 * 640) + stage // 2 * 1152
        word = int(words[row, column])
        shifted = (word >> 7 & 255) + shift
        assert planes[slab + 128 + 512 * (stage % 2) + raw] == (shifted & 1) << 7 | word & 127
        sign_word = int(planes[slab + 4 * lane : slab + 4 * lane + 4].view("<u4")[0])
        assert sign_word >> 8 * i + 7 - (4 * (stage % 2) + step) & 1 == word >> 15
        assert (sign_word << 4 * (stage % 2) + step & 0x80808080) >> 8 * i + 7 & 1 == word >> 15


@pytest.mark.clause("5.1", "5.3")
def test_where_a_word_lies_in_the_single_code() -> None:
    words = normal((16, 256))
    with without_compact():
        packed = samebits.encode(tensor_of(words))
    assert packed.code == 2
    planes = packed.section("planes").numpy()
    for row, column in places(words.shape):
        group, stage, _, _, _, raw = lane_of(row, column)
        assert planes[512 * (4 * group + stage) + raw] == (words[row, column] >> 15) << 7 | words[row, column] & 127


@pytest.mark.clause("1.5", "3.1", "3.2", "3.3", "3.5", "6.2", "6.3")
def test_the_first_quad_of_a_stream() -> None:
    """Bit p of a chunk is bit p & 31 of its word p >> 5, and a codeword's most significant bit comes first."""
    words = normal((8, 1024))
    with without_compact():
        packed = samebits.encode(tensor_of(words))
    assert (packed.code, packed.header.shift) == (2, 0)
    code = packed.array("code", "<u2").tolist()
    lengths = [length for length, count in enumerate(code[:16]) for _ in range(count)]
    symbols = code[16:]
    number, codewords = 0, {}
    for at, (symbol, length) in enumerate(zip(symbols, lengths, strict=True)):
        number = (number + 1) << length - lengths[at - 1] if at else 0
        codewords[symbol] = format(number, f"0{length}b")
    streams = packed.array("streams", "<u4").tolist()
    chunk = "".join(format(word, "032b")[::-1] for word in streams)
    base, unit = streams[0] & 0x1FFF, streams[0] >> 13 & 0x3F
    nibbles = [int(digit, 16) for word in streams[1:9] for digit in format(word, "08x")[::-1]]
    for stream in range(64):
        start = 9 * 32 + sum(base + unit * nibble for nibble in nibbles[:stream])
        row, column = stream // 8, 4 * (stream // 2 % 4) + 32 * (stream % 2)  # 1.3, 1.5
        quad = (words[row, column : column + 4] >> 7 & 255).tolist()
        assert chunk[start:].startswith("".join(codewords[exponent] for exponent in quad))


@pytest.mark.clause("1.6", "3.3", "3.6", "3.7", "5.5", "6.7", "6.8")
@pytest.mark.parametrize("words", [normal((3, 1000)), pruned((2500,), 0.8)], ids=["normal", "zeros"])
def test_words_of_the_compact_code(words: Words) -> None:
    """Each state's meaning from the frequencies, then each run's bits to its end."""
    packed = samebits.encode(tensor_of(words))
    assert packed.code == 3
    symbols = ranges_of(packed.section("code").tolist())
    streams = "".join(format(word, "032b")[::-1] for word in packed.array("streams", "<u4").tolist())
    ends = np.cumsum(packed.array("offsets", "<u2")).tolist()
    exponents: list[int] = []
    for start, end, count in zip([0, *ends], ends, [256] * (words.size // 256) + [words.size % 256], strict=False):
        bits = iter(streams[start:end])

        def number(count: int, bits: Iterator[str] = bits) -> int:
            return int("".join(next(bits) for _ in range(count))[::-1] or "0", 2)

        state = number(8)
        for _ in range(count):
            mirrored = int(format(state, "08b")[::-1], 2)
            (symbol,) = (symbol for symbol, interval in symbols.items() if mirrored in interval)
            below = sum(int(format(other, "08b")[::-1], 2) < state for other in symbols[symbol])
            y = len(symbols[symbol]) + below
            exponents.append(number(8) if symbol == "escape" else symbol)
            n = max(0, 9 - y.bit_length())
            state = (y << n) - 256 + number(n)
        assert (state, list(bits)) == (0, [])
    assert exponents == (words.reshape(-1) >> 7 & 255).tolist()
    assert packed.section("planes").tolist() == (words.reshape(-1) >> 8 & 128 | words.reshape(-1) & 127).tolist()
    assert len(packed.array("streams", "<u4")) == -(-ends[-1] // 32)


def ranges_of(section: list[int]) -> dict[int | str, range]:
    """3.6, 3.7: each symbol's interval of 0 to 255."""
    symbols: dict[int | str, range] = {}
    exponent, first, content = 0, 0, iter(section)
    for frequency in content:
        if frequency:
            symbols[exponent] = range(first, first + frequency)
            first += frequency
        exponent += 1 if frequency else next(content)
    return symbols | {"escape": range(first, 256)}


def folder_with(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(tensors, path / "samebits.safetensors", metadata=metadata)
    return path


def stored(words: Words) -> torch.Tensor:
    packed = samebits.encode(tensor_of(words))
    assert not packed.is_raw
    return packed.data


@pytest.mark.clause("7.1", "7.2")
def test_a_model_folder(tmp_path: Path) -> None:
    a, b = normal((64, 128), 1), normal((4096,), 2)
    norm = torch.ones(7, dtype=torch.bfloat16)
    folder_with(tmp_path, {"layer.sb_packed": stored(a), "table.sb_bare": stored(b), "norm.weight": norm})
    entries = Checkpoint.open(tmp_path).entries
    assert {name: (entry.shape, entry.is_packed) for name, entry in entries.items()} == {
        "layer.weight": ((64, 128), True),
        "table": ((4096,), True),
        "norm.weight": ((7,), False),
    }
    for name, words in {"layer.weight": a, "table": b}.items():
        assert torch.equal(
            samebits.decode(entries[name].packed()).view(torch.int16), tensor_of(words).view(torch.int16)
        )


@pytest.mark.clause("7.1")
def test_shards_with_an_index(tmp_path: Path) -> None:
    names = [f"samebits-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {}
    for number, name in enumerate(names):
        save_file({f"{number}.sb_packed": stored(normal((64, 128), number))}, tmp_path / name)
        weight_map[f"{number}.sb_packed"] = name
    index = {"metadata": {"total_size": 12345}, "weight_map": weight_map}
    (tmp_path / "samebits.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(tmp_path)
    assert [(entry.name, entry.file.path.name) for entry in checkpoint] == [
        ("0.weight", names[0]),
        ("1.weight", names[1]),
    ]


@pytest.mark.clause("7.2")
@pytest.mark.parametrize(
    ("original", "name"),
    [
        ("lm_head.weight", "lm_head.sb_packed"),
        ("a.b.weight", "a.b.sb_packed"),
        ("experts.gate_up_proj", "experts.gate_up_proj.sb_bare"),
        ("bias", "bias.sb_bare"),
        ("weight", "weight.sb_bare"),
        ("x.weights", "x.weights.sb_bare"),
    ],
)
def test_names(original: str, name: str) -> None:
    assert stored_name(original) == name
    assert original_name(name) == original
    assert original_name(original) is None


@pytest.mark.clause("7.3")
@pytest.mark.parametrize("text", ['{"version": 1}', '{"version": 1, "digests": {"a": "0123456789abcdef"}}'])
def test_metadata_of_a_file(tmp_path: Path, text: str) -> None:
    folder_with(tmp_path, {"a": torch.zeros(2)}, samebits=text, format="pt")
    digests = {"a": 0x0123456789ABCDEF} if "digests" in text else {}
    assert {entry.name: entry.digest for entry in Checkpoint.open(tmp_path)} == {"a": digests.get("a")}


@pytest.mark.clause("7.3")
@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1, "digests": {"a": "0123456789ABCDEF"}}', '{"version": 1, "digests": {"b": 1}}']
)
def test_bad_metadata_of_a_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError):
        Checkpoint.open(folder_with(tmp_path, {"a": torch.zeros(2)}, samebits=text))


@pytest.mark.clause("7.3", "7.4")
@pytest.mark.parametrize("place", ["metadata", "config"])
def test_a_higher_version_is_refused(tmp_path: Path, place: str) -> None:
    version = {"metadata": 1, "config": 1, place: 2}
    folder_with(tmp_path, {"a": torch.zeros(2)}, samebits=json.dumps({"version": version["metadata"]}))
    config = {"quantization_config": {"quant_method": "samebits", "version": version["config"]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VersionError, match="version 2"):
        Checkpoint.open(tmp_path)


@pytest.mark.clause("7.5")
def test_what_does_not_get_smaller_stays_as_it_is() -> None:
    random = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 15), 1 << 15, (256, 256)).astype(np.int16))
    assert samebits.encode(random.view(torch.bfloat16)).is_raw
    assert isinstance(samebits.encode(torch.zeros(1, dtype=torch.bfloat16)), PackedTensor)
