"""Graphs that Inductor compiles: which products of one input become one operator, and that nothing else changes."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from operator import getitem
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import samebits
from samebits.kernels.ops import fields_of
from samebits.nn import product
from samebits.nn.packed_linear import PackedLinearModule
from samebits.plans import graph_pass
from tests.plans.sums import normal

K = 128


class Attention(nn.Module):
    """Products of one input, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, rows, bias=rows == 64) for rows in (K, 64, 64))
        self.out = nn.Linear(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.out(torch.cat([torch.tanh(k), q[..., :64] * v], -1)) * 0.5  # type: ignore[no-any-return]


class Turns(nn.Module):
    """Another input between two products of one, and five products in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, K) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, other, last, *rest = self.layers
        made = other(first(x).tanh()) + last(x)
        twice = made * 2
        return made + sum(layer(twice) for layer in rest)  # type: ignore[no-any-return]


class BiasOfProduct(nn.Module):
    """Two products of one input, of which one is the other's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, K, bias=False), nn.Linear(K, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        bias = self.first(rows)[0].relu()
        if not isinstance(self.second, PackedLinearModule):
            return F.linear(rows, self.second.weight, bias)
        header = self.second.sb_recipes["weight"].matrix
        assert header is not None
        product: torch.Tensor = torch.ops.samebits.linear(
            rows, self.second.get_parameter("sb_packed"), bias, list(header.shape), fields_of(header)
        )
        return product


class Gates(nn.Module):
    """Others stand between products of one input, and stay there once they are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(K, K) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        first, between = self.a(x), self.b(y) * self.c(y)
        return first * between + self.d(x)  # type: ignore[no-any-return]


def compiled(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What the compiled module makes of x, and its code: compiled anew, but for kernels whose text is the same."""
    torch.compiler.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        made, [code] = run_and_get_code(torch.compile(module, fullgraph=True), x)
    return made, code


LOAD = """
import sys
import samebits
import torch

program, package, traced, operands = sys.argv[1:]
x, expected = torch.load(operands)
for name, load in (
    (program, lambda path: torch.export.load(path).module()),
    (package, torch._inductor.aoti_load_package),
    (traced, lambda path: samebits.compress and torch.jit.load(path)),
):
    print(name, torch.equal(load(name)(x).view(torch.int16), expected.view(torch.int16)))
"""


def test_saved_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process runs them; in AOTInductor's package products are one operator, too."""
    torch.manual_seed(0)
    plain = Attention().to(torch.bfloat16).requires_grad_(False)
    x = normal(3, K)
    expected, _ = compiled(plain, x)
    samebits.compress(plain, min_weights=1)
    program, package, traced, operands = paths = [str(tmp_path / name) for name in ("e.pt2", "a.pt2", "j.pt", "x.pt")]
    torch.save((x, expected), operands)
    torch.jit.save(torch.jit.trace(plain, x), traced)
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    with torch.no_grad():
        exported = torch.export.export(plain, (x,))
    torch.export.save(exported, program)
    torch._inductor.aoti_compile_and_package(exported, package_path=package)
    assert b"samebits::linears" in unzipped(package)
    done = subprocess.run([sys.executable, "-c", LOAD, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{path} True" for path in (program, package, traced)]


def test_programs_find_every_operator() -> None:
    """Also those that no linear layer asks for: each module that defines some is imported.

    Those of vLLM find weights by their address, so no other process could use them.
    """
    root = Path(samebits.__file__).parents[1]
    defining = [path for path in root.rglob("samebits/**/*.py") if 'Library("samebits"' in path.read_text()]
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in defining}
    modules.remove("samebits.integrations.vllm.weights")
    code = "import sys, samebits.integrations.programs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(modules) >= 3
    assert modules <= {*done.stdout.split()}


def unzipped(path: str) -> bytes:
    with ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".json"))


@pytest.mark.parametrize("shape", [(1, 1, K), (3, K), (2, 3, K)])
@pytest.mark.parametrize(
    ("make", "joint", "alone"), [(Attention, 1, 1), (Turns, 1, 4), (BiasOfProduct, 0, 2), (Gates, 1, 2)]
)
def test_joined(
    make: Callable[[], nn.Module], joint: int, alone: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of the plain module that is compiled, and as many of either operator as there are such products."""
    torch.manual_seed(0)
    plain = make().to(torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(plain)
    samebits.compress(packed, min_weights=1)
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    x = normal(shape[0] if len(shape) == 2 else shape[0] * shape[1], K).view(shape)
    expected, code = compiled(plain, x)
    assert "samebits" not in code
    found, code = compiled(packed, x)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert code.count("torch.ops.samebits.linears.default(") == joint
    assert code.count("torch.ops.samebits.linear.default(") == alone


def graph_of(*products: tuple[int, dict[str, Any]]) -> fx.Graph:
    """Products of one input: each with the number of its weight, and with what is said of it."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in "xabc")
    made = []
    for number, said in products:
        view = said.get("view")
        rows = graph.call_function(torch.ops.aten.view.default, (x, view)) if view else x
        operands = (rows, weights[number], None, [number, K], [number])
        made.append(graph.call_function(torch.ops.samebits.linear.default, operands))
        made[-1].meta.update({"val": number, **said})
    graph.output(tuple(made))
    return graph


def calls_in(graph: fx.Graph, regions: Sequence[int] = (0, 0, 0)) -> list[fx.Node]:
    """What the pass leaves of three products that are in these regions between writes."""
    found = [node for node in graph.nodes if node.target is torch.ops.samebits.linear.default]
    region_of = dict(zip(found, regions, strict=True))
    graph_pass._join_all(lambda graph, node: region_of[node], SimpleNamespace(graph=graph))
    graph.lint()
    return [node for node in graph.nodes if node.op == "call_function"]


def test_joined_in_the_order_of_the_weights() -> None:
    """As calls have them: so each product is still what it was, and known by the same weights."""
    graph = graph_of((1, {}), (2, {}), (0, {"eager_input_vals": "of one product"}))
    joint, *made = calls_in(graph)
    assert joint.target is torch.ops.samebits.linears.default
    _, data, biases, shapes, fields = joint.args
    assert ([each.name for each in data], biases) == (["a", "b", "c"], [None] * 3)
    assert (shapes, fields, joint.meta) == ([0, K, 1, K, 2, K], [0, 1, 2], {"val": [0, 1, 2]})
    assert [(node.target, node.args, node.meta) for node in made] == [
        (getitem, (joint, number), {"val": number}) for number in range(3)
    ]
    [*_, output] = graph.nodes
    assert [node.args[1] for node in output.args[0]] == [1, 2, 0]


@pytest.mark.parametrize(
    ("regions", "streams", "joint"),
    [((0, 1, 1), "aaa", 1), ((0, 0, 0), "aab", 1), ((0, 1, 2), "aaa", 0), ((0, 0, 1), "abb", 0)],
)
def test_not_joined_across_a_write_or_with_another_stream(regions: Sequence[int], streams: str, joint: int) -> None:
    """The input may be another one behind a write, and another stream may have to wait for it."""
    graph = graph_of(*((number, {"custom": {"stream": stream}}) for number, stream in enumerate(streams)))
    found = [node.target for node in calls_in(graph, regions)]
    assert found.count(torch.ops.samebits.linears.default) == joint
    assert found.count(torch.ops.samebits.linear.default) == 3 - 2 * joint


@pytest.mark.parametrize(("views", "joint"), [(([3, K], [3, K], [3, K]), 1), (([3, K], [1, 3 * K], [3, K]), 0)])
def test_views_of_one_input_are_one_if_they_have_one_shape(views: Sequence[list[int]], joint: int) -> None:
    graph = graph_of(*((number, {"view": view}) for number, view in enumerate(views)))
    found = [node.target for node in calls_in(graph)]
    assert found.count(torch.ops.samebits.linears.default) == joint
    assert found.count(torch.ops.samebits.linear.default) == 3 - 3 * joint


def test_an_inductor_that_has_changed_compiles_products_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        graph_pass._register.__wrapped__(ModuleType("post_grad"))
    assert "compiled graphs make products of one input one by one: " in caplog.text
