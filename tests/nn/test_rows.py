"""What takes entries of a weight along its first dimension decodes these alone: embeddings, experts, pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import samebits
from samebits.nn import recipe
from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import PackedModule, pack
from samebits.nn.recipe import Piece, Recipe
from tests.nn.modules import same_bits

ROWS, COLUMNS = 400, 1024  # 50 chunks


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * torch.tensor(3.0).to(self.weight.dtype)


class Functional(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight, self.padding_idx)


class Positions(nn.Embedding):
    """As Whisper's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


KINDS = [nn.Embedding, Scaled, Functional, Positions]
IDS = [
    torch.tensor(7),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([[399, 0], [5, 5]], dtype=torch.int32),
    torch.arange(12).reshape(2, 3, 2) * 33,
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The decoding functions that are called, and the shapes of the packed tensors they are called for."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watched(name: str) -> Callable[..., torch.Tensor]:
        original = getattr(recipe, name)

        def function(packed: Any, *args: Any) -> torch.Tensor:
            seen.append((name, tuple(packed.shape)))
            return original(packed, *args)  # type: ignore[no-any-return]

        return function

    for name in ("decoded_weight", "decode_rows", "decode_experts"):
        monkeypatch.setattr(recipe, name, watched(name))
    return seen


def pair(kind: type[nn.Embedding], **options: Any) -> tuple[nn.Embedding, nn.Embedding]:
    """An embedding, and a compressed copy."""
    torch.manual_seed(0)
    plain = kind(ROWS, COLUMNS, **options).to(torch.bfloat16)
    module = copy.deepcopy(plain)
    samebits.compress(module)
    assert isinstance(module, PackedModule)
    return plain, module


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_decode_rows(kind: type[nn.Embedding], mode: Callable[[], Any], calls: list[Any]) -> None:
    plain, module = pair(kind)
    assert isinstance(module, kind)
    for ids in IDS:
        calls.clear()
        with mode():
            assert same_bits(module(ids), plain(ids))
        assert calls == [("decode_rows", (ROWS, COLUMNS))]


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Functional])
def test_options_of_embeddings(kind: type[nn.Embedding], options: dict[str, Any], calls: list[Any]) -> None:
    plain, module = pair(kind, **options)
    ids = torch.tensor([3, 5])
    assert same_bits(module(ids), plain(ids))
    assert calls == [("decode_rows", (ROWS, COLUMNS))]


@pytest.mark.parametrize("wrong", [-1, ROWS])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Functional])
def test_tokens_out_of_range(kind: type[nn.Embedding], wrong: int) -> None:
    for module in pair(kind):
        with pytest.raises(IndexError, match="out of range"):
            module(torch.tensor([1, wrong]))


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_compiled_embeddings_decode_rows(kind: type[nn.Embedding]) -> None:
    plain, module = pair(kind)
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        operators.extend(name for name in called if "samebits" in name or "embedding" in name)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    with torch.no_grad():
        assert same_bits(torch.compile(module, backend=backend, fullgraph=True)(IDS[2]), plain(IDS[2]))
    rows, embedding = operators
    assert rows == "samebits.decode_rows"
    assert "embedding" in embedding  # what Inductor makes one kernel of behind it depends on this


INDEXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number": lambda t: t[3],
    "last": lambda t: t[-1],
    "zero-dimensional": lambda t: t[torch.tensor(5)],
    "ids": lambda t: t[torch.tensor([[2, 0], [0, 5]])],
    "negative ids": lambda t: t[torch.tensor([2, -1, -6])],
    "int32": lambda t: t[torch.tensor([2, 1], dtype=torch.int32)],
    "index_select": lambda t: t.index_select(0, torch.tensor([4, 4])),
    "select": lambda t: t.data.select(-t.dim(), 2),
}
OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask": lambda t: t[torch.tensor([True, False, True, False, False, True])],
    "list": lambda t: t[:, [1, 2]],
    "two": lambda t: t[torch.tensor([1, 2]), torch.tensor([3, 4])],
    "columns": lambda t: t.index_select(1, torch.tensor([4, 4])),
    "index_select of a number": lambda t: t.index_select(0, torch.tensor(4)),
    "column": lambda t: t.select(1, 2),
    "slice": lambda t: t[2:4],
}


def experts(pieces: bool) -> tuple[torch.Tensor, nn.Module]:
    """A weight of six experts, and a module that holds it packed: in one, or in two for each expert."""
    torch.manual_seed(1)
    weight = (torch.randn(6, 64, 256) / 50).to(torch.bfloat16)
    module = nn.Module()
    module.up = nn.Parameter(weight)
    if not pieces:
        samebits.compress(module)
        return weight, module
    places = [(number, slice(start, start + 32), slice(0, 256)) for number in range(6) for start in (0, 32)]
    packed = [samebits.encode(weight[place]) for place in places]
    packed_pieces = [Piece(f"piece_{i}", each.header, places[i]) for i, each in enumerate(packed)]
    pack(module, "up", Recipe((6, 64, 256), tuple(packed_pieces)), [each.data for each in packed])
    return weight, module


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("indexing", INDEXING)
def test_indexing_decodes_no_more_than_it_takes(indexing: str, pieces: bool, calls: list[Any]) -> None:
    weight, module = experts(pieces)
    assert isinstance(module.up, LazyWeight)
    result = INDEXING[indexing](module.up)
    assert same_bits(result, INDEXING[indexing](weight))
    taken = INDEXING[indexing](torch.arange(6).view(6, 1)).unique().numel()
    assert calls == ([("decoded_weight", (32, 256))] * 2 * taken if pieces else [("decode_rows", (6, 64, 256))])


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("indexing", OTHERWISE)
def test_other_indexing(indexing: str, pieces: bool) -> None:
    weight, module = experts(pieces)
    assert same_bits(OTHERWISE[indexing](module.up), OTHERWISE[indexing](weight))


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("index", [6, -7, torch.tensor(6), torch.tensor([0, 6]), torch.tensor([-7])], ids=str)
def test_indices_out_of_range(index: Any, pieces: bool) -> None:
    _, module = experts(pieces)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        module.up[index]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("ids", [[[4, 1], [1, 4]], [], [5]], ids=str)
def test_routed_experts(ids: list[Any], pieces: bool, calls: list[Any]) -> None:
    weight, module = experts(pieces)
    routed = torch.tensor(ids, dtype=torch.int64)
    result = module.sb_routed("up", routed)
    assert result.shape == weight.shape
    assert same_bits(result[routed], weight[routed])
    number = routed.unique().numel()
    assert calls == ([("decoded_weight", (32, 256))] * 2 * number if pieces else [("decode_experts", (6, 64, 256))])


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("wrong", [-1, 6])
def test_routed_experts_out_of_range(wrong: int, pieces: bool) -> None:
    """Of these nothing would be decoded."""
    _, module = experts(pieces)
    with pytest.raises(IndexError, match="out of range"):
        module.sb_routed("up", torch.tensor([0, wrong]))


def test_pieces_that_hold_several_rows(calls: list[Any]) -> None:
    """As of a matrix put together from three."""
    torch.manual_seed(2)
    parts = [(torch.randn(rows, 256) / 50).to(torch.bfloat16) for rows in (64, 32, 32)]
    starts = (0, 64, 96)
    packed = [samebits.encode(part) for part in parts]
    pieces = [
        Piece(str(i), packed[i].header, (slice(start, start + len(parts[i])), slice(0, 256)))
        for i, start in enumerate(starts)
    ]
    whole, data = Recipe((128, 256), tuple(pieces)), [each.data for each in packed]
    for number in (0, 64, 70, 95, 96, -1):
        calls.clear()
        assert same_bits(whole.entry(data, number), torch.cat(parts)[number])
        assert len(calls) == 1
    ids = torch.tensor([127, 3])
    assert same_bits(whole.rows(data, ids), torch.cat(parts)[ids])
    assert same_bits(whole.routed(data, ids), torch.cat(parts))


def test_strides_of_experts() -> None:
    """torch chooses by them how it computes."""
    weight = (torch.randn(6, 256, 64) / 50).to(torch.bfloat16).transpose(1, 2)
    module = nn.Module()
    module.up = nn.Parameter(weight)
    samebits.compress(module)
    for found, expected in (
        (module.sb_routed("up", torch.tensor([4])), weight),
        (module.sb_recipes["up"].entry(module.sb_data("up"), 4), weight[4]),
    ):
        assert found.stride() == expected.stride()
    assert same_bits(found, weight[4])


def test_unpacked_pieces_and_other_dtypes() -> None:
    weight = torch.randn(6, 8).to(torch.bfloat16)
    ids = torch.tensor([[5, 0]])
    for dtype in (torch.bfloat16, torch.float32):
        plain = Recipe((6, 8), (Piece("weight", None),), dtype)
        assert torch.equal(plain.rows([weight], ids), weight.to(dtype)[ids])
        assert torch.equal(plain.entry([weight], -2), weight.to(dtype)[-2])
        assert torch.equal(plain.routed([weight], ids)[ids], weight.to(dtype)[ids])
