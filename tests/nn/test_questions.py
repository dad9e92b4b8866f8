"""Classes that ask their parameters for a dtype, in many spellings, with their source and without."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.nn.questions import asked_parts
from tests.nn.modules import same_bits

TEXT = """
import itertools
import torch
from torch import nn

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
        self.named = nn.ModuleDict({{"a": nn.Linear(64, 64, bias=False)}})
        self.listed = [self.k]

    def asked(self):
{body}

    def forward(self, x):
        return self.k(self.l(x) + self.net(x) + self.named["a"]((x * 0.37).to(self.asked())))
"""
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
EVERY = {"l", "k", "net.0", "net.1", "named.a"}

# What asks, and whose weights stay plain then. All of them do where nobody knows which module is asked.
QUESTIONS: dict[str, set[str]] = {
    "return next(self.parameters()).dtype": {"l"},
    "return next(iter(self.parameters())).dtype": {"l"},
    "return list(self.parameters())[0].dtype": {"l"},
    "return [p for p in self.parameters()][0].dtype": {"l"},
    "return [*self.parameters()][0].dtype": {"l"},
    "for p in self.parameters():\n    dtype = p.dtype\nreturn dtype": {"l", "named.a"},
    "return list(self.parameters())[-1].dtype": {"l", "named.a"},
    "for p in self.parameters():\n    return p.dtype": {"l", "named.a"},
    "return next(self.named_parameters())[1].dtype": {"l"},
    "return self.parameters().__next__().dtype": {"l"},
    "return tuple(self.k.parameters())[0].dtype": {"k"},
    "return next(self.net[1].parameters()).dtype": {"net.1"},
    "return next(self.net[-1].parameters()).dtype": {"net.0", "net.1"},
    "return next(self.named['a'].parameters()).dtype": {"named.a"},
    "return next(self.listed[0].parameters()).dtype": {"k"},
    "return next(next(self.children()).parameters()).dtype": {"l", "k", "net.0", "named.a"},
    "return next(iter(self.state_dict().values())).dtype": {"l"},
    "return next(p.dtype for p in self.parameters())": {"l"},
    "return next(itertools.chain(self.k.parameters(), self.buffers())).dtype": {"k"},
    "first = next(self.parameters())\nreturn torch.zeros(3, 64).to(first).dtype": {"l"},
    "k = self.k\nreturn next(k.parameters()).new_zeros(3).dtype": {"k"},
    "for part in self.net:\n    dtype = next(part.parameters()).dtype\nreturn dtype": {"net.0", "net.1"},
    "for name, p in self.named_parameters():\n    dtype = p.dtype\nreturn dtype": {"l", "named.a"},
    "return next(getattr(self, 'net').parameters()).dtype": {"net.0"},
    "return (lambda: next(self.net.parameters()).dtype)()": {"net.0"},
    "return (lambda part: next(part.parameters()).dtype)(self.k)": EVERY,
    "p = next(self.l.parameters())\na = p.dtype\np = next(self.k.parameters())\nreturn p.to(a).dtype": {"l", "k"},
    "part = self\nwhile hasattr(part, 'net'):\n    part = part.net\nreturn next(part.parameters()).dtype": EVERY,
    "part, _ = self.l, self.k\nreturn next(part.parameters()).dtype": EVERY,
    "def of(part=None):\n    part = part or self.k\n    return next(part.parameters()).dtype\nreturn of()": EVERY,
    "for n, part in self.net.named_children():\n    d = next(part.parameters()).dtype\nreturn d": {"net.0", "net.1"},
    "return next(self.get_submodule('k').parameters()).dtype": EVERY,
}
# What learns no dtype; the last line is there for forward.
OTHERS = [
    "next(self.parameters()).device",
    "sum(p.numel() for p in self.parameters() if p.requires_grad)",
    "[p.requires_grad_(p.requires_grad) for p in self.k.parameters()]",
    "for p in self.parameters():\n    p.grad = None",
    "for name, p in self.named_parameters():\n    assert p.ndim, name",
    "len(list(self.parameters()))",
    "(lambda part: [p.element_size() for p in part.parameters()])(self.k)",
    "(lambda state: state)(self.state_dict())",
    "torch.optim.SGD(self.parameters(), lr=1.0)",
    "self.k.load_state_dict(self.k.state_dict())",
    "nn.utils.clip_grad_norm_(self.parameters(), 1.0)",
    "all(p is not None for p in self.parameters())",
    "first = next(self.parameters(), None)\nif first is not None:\n    first.device",
    "{name: p.shape for name, p in self.state_dict().items()}",
]


WITHOUT_SOURCE = {
    "return next(self.parameters()).dtype": {"l"},
    "return tuple(self.k.parameters())[0].dtype": {"k"},
    "return (lambda: next(self.net.parameters()).dtype)()": {"net.0"},
    "return next(self.net[1].parameters()).dtype": EVERY,
    "return torch.bfloat16": set(),
    "list((lambda part: part.parameters())(self.k))\nreturn torch.bfloat16": set(),
}


def text(body: str) -> str:
    return TEXT.format(body=indent(body, " " * 8))


def in_file(body: str, file: Path) -> type[nn.Module]:
    file.write_text(text(body), encoding="utf-8")
    return runpy.run_path(str(file))["Asks"]  # type: ignore[no-any-return]


def plain_after_packing(kind: type[nn.Module]) -> set[str]:
    torch.manual_seed(0)
    module = kind().to(torch.bfloat16)
    expected = module(X)
    report = samebits.compress(module, min_weights=1024)
    assert same_bits(module(X), expected)
    reasons = {name: reason for name, reason in report.raw.items() if name.endswith("weight")}
    assert set(reasons.values()) <= {"tells the model's code the dtype to compute with"}
    return {name.removesuffix(".weight") for name in reasons}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_asked_for_a_dtype_stays_plain(question: str, tmp_path: Path) -> None:
    assert plain_after_packing(in_file(question, tmp_path / "asks.py")) == QUESTIONS[question]


@pytest.mark.parametrize("question", WITHOUT_SOURCE)
def test_classes_without_source(question: str) -> None:
    made: dict[str, Any] = {}
    exec(text(question), made)
    assert plain_after_packing(made["Asks"]) == WITHOUT_SOURCE[question]


@pytest.mark.parametrize("body", OTHERS)
def test_what_is_not_asked_for_a_dtype_is_packed(body: str, tmp_path: Path) -> None:
    assert plain_after_packing(in_file(f"{body}\nreturn torch.bfloat16", tmp_path / "asks.py")) == set()


def _doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*args: Any) -> Any:
        return function(*args), twice

    return twice


class AsksInManyWays(nn.Module):
    @property
    def dtype(self) -> torch.dtype:
        return next(self.one.parameters()).dtype

    @cached_property
    def kept(self) -> torch.dtype:
        return next(self.two.parameters()).dtype

    @torch.no_grad()
    def without_gradients(self) -> torch.dtype:
        return next(self.three.parameters()).dtype

    @_doubled
    def twice(self) -> torch.dtype:
        return next(self.four.parameters()).dtype

    @lru_cache  # noqa: B019
    def remembered(self) -> torch.dtype:
        return next(self.five.parameters()).dtype

    async def later(self) -> torch.dtype:
        return next(self.six.parameters()).dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.seven.parameters(recurse)

    def _init_weights(self, module: nn.Module) -> torch.dtype:
        return next(module.parameters()).dtype


class AsksAnyPart(AsksInManyWays):
    @staticmethod
    def dtype_of(module: nn.Module) -> torch.dtype:
        return next(module.parameters()).dtype


def test_kinds_of_methods() -> None:
    found = {("one",), ("two",), ("three",), ("four",), ("five",), ("six",)}
    assert asked_parts(AsksInManyWays) == found
    assert asked_parts(AsksAnyPart) == {*found, ("**",)}
