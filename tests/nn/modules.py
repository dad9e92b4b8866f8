"""Torch modules of many kinds, and a comparison of what two of them compute, by bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import nn

from samebits.nn import recipe
from samebits.plans import dispatch

MIN_WEIGHTS = 1024


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def watch_decoding(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The memory of each weight that modules decode: dead once no tensor, view or graph of autograd has it any more."""
    seen: list[weakref.ref[Any]] = []

    def watched(decode: Callable[..., torch.Tensor], *packed: object) -> torch.Tensor:
        words = decode(*packed).view(torch.int16).numpy().copy()
        seen.append(weakref.ref(words))
        return torch.from_numpy(words).view(torch.bfloat16)

    monkeypatch.setattr(recipe.Recipe, "decode", partialmethod(partial(watched, recipe.Recipe.decode)))
    monkeypatch.setattr(dispatch, "decoded_weight", partial(watched, dispatch.decoded_weight))
    return seen


def products_of(call: Callable[[], object]) -> list[str]:
    """By which of its routines torch multiplies in a call, and what it adds then."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sorted(event.key for event in profile.key_averages() if event.key[6:] in {"addmm", "mm", "bmm", "add_"})


class Experts(nn.Module):
    """Bare parameters with three dimensions, read once for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, 64) / 8)
        self.up_bias = nn.Parameter(torch.randn(4, 96))
        self.down = nn.Parameter(torch.randn(4, 64, 96) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(4):
            total = total + nn.functional.linear(x, self.up[expert], self.up_bias[expert]) @ self.down[expert].T
        return total


class Tied(nn.Module):
    """An embedding and a head that share their weight, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64, bias=False))
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class ReadsAChild(nn.Module):
    """Computes with its child's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.child.weight.dtype), self.child.weight) + self.child(x)


class Bare(nn.Module):
    """Parameters of its own with two dimensions, and lists and dictionaries of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64) / 8)
        self.list = nn.ParameterList([torch.randn(64, 64) / 8 for _ in range(2)])
        self.dict = nn.ParameterDict({"weight": torch.randn(64, 64) / 8, "other": torch.randn(64, 64) / 8})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in (*self.list, *self.dict.values()):
            x = x @ matrix
        return x @ self.table.T


def _channels_last() -> nn.Module:
    return nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)


def _transposed() -> nn.Module:
    layer = nn.Linear(64, 96)
    layer.weight = nn.Parameter(torch.randn(64, 96).T / 8)
    return layer


class AdaptiveSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """Its children's weights are read in a function of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.log_prob(x.flatten(0, -2))


def _attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(64, 4, batch_first=True, **options)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)


INPUT = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
TOKENS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(6))

# name: how to make the module, how to call it, names of the parameters that are packed
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor], set[str]]] = {
    "linear": (lambda: nn.Linear(64, 96), lambda m: m(INPUT), {"weight"}),
    "large bias": (lambda: nn.Linear(64, 2000), lambda m: m(INPUT), {"weight", "bias"}),
    "embedding": (lambda: nn.Embedding(100, 64, padding_idx=0), lambda m: m(TOKENS), {"weight"}),
    "embedding with max_norm": (lambda: nn.Embedding(100, 64, max_norm=1.0), lambda m: m(TOKENS), set()),
    "embedding bag": (lambda: nn.EmbeddingBag(100, 64), lambda m: m(TOKENS), {"weight"}),
    "conv1d": (lambda: nn.Conv1d(64, 32, 3), lambda m: m(INPUT.transpose(1, 2)), {"weight"}),
    "conv2d": (lambda: nn.Conv2d(8, 64, 3), lambda m: m(INPUT.reshape(1, 8, 9, 16)), {"weight"}),
    "conv3d": (lambda: nn.Conv3d(4, 32, 3), lambda m: m(INPUT.reshape(1, 4, 4, 8, 9)), {"weight"}),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(8, 32, 3), lambda m: m(INPUT.reshape(1, 8, 9, 16)), {"weight"}),
    "channels last": (_channels_last, lambda m: m(INPUT.reshape(1, 32, 4, 9)), {"weight"}),
    "transposed linear": (_transposed, lambda m: m(INPUT), {"weight"}),
    "bare": (Bare, lambda m: m(INPUT), {"table", "list.0", "list.1", "dict.weight", "dict.other"}),
    "bilinear": (lambda: nn.Bilinear(64, 64, 8), lambda m: m(INPUT, INPUT), {"weight"}),
    "experts": (Experts, lambda m: m(INPUT), {"up", "down"}),
    "tied": (Tied, lambda m: m(TOKENS), {"embedding.weight", "head.weight", "layers.0.weight", "layers.3.weight"}),
    "parent reads child": (ReadsAChild, lambda m: m(INPUT), {"child.weight"}),
    "attention": (
        _attention(),
        lambda m: m(INPUT, INPUT, INPUT, need_weights=False)[0],
        {"in_proj_weight", "out_proj.weight"},
    ),
    "attention of three widths": (
        _attention(kdim=32, vdim=48),
        lambda m: m(INPUT, INPUT[..., :32], INPUT[..., :48])[0],
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
    ),
    "attention without biases": (_attention(bias=False), lambda m: m(INPUT, INPUT, INPUT)[0], set()),
    "encoder layer": (
        _encoder_layer,
        lambda m: m(INPUT),
        {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"},
    ),
    "adaptive softmax": (
        lambda: AdaptiveSoftmax(64, 1000, [100, 300]),
        lambda m: m(INPUT),
        {"head.weight", "tail.0.0.weight", "tail.0.1.weight", "tail.1.1.weight"},
    ),
    "lstm": (lambda: nn.LSTM(64, 64), lambda m: m(INPUT)[0], set()),
    "norm": (lambda: nn.LayerNorm(64 * 64), lambda m: m(INPUT.repeat(1, 1, 64)), set()),
}


def make(name: str) -> tuple[nn.Module, Callable[[Any], torch.Tensor], set[str]]:
    create, call, packed = CASES[name]
    torch.manual_seed(0)
    return create().to(torch.bfloat16).eval(), call, packed
