"""Weights stay packed: what is decoded, how often, and what of it is alive at a time."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.integrations.transformers.experts import PackedExperts
from samebits.nn import recipe
from samebits.nn.packed_module import PackedModule
from tests.integrations.models import Reference, compress_folder, packed_parameters


@pytest.fixture(params=["llama", "llama-tied", "mixtral", "gpt2"])
def packed(request: pytest.FixtureRequest, references, tmp_path: Path) -> tuple[Reference, Any]:
    plain = references(request.param)
    return plain, plain.load(compress_folder(plain.folder, tmp_path))


def test_each_packed_tensor_is_decoded_once_per_forward(packed, decodes, row_decodes) -> None:
    """Embeddings not whole: only the rows of the tokens."""
    plain, model = packed
    with torch.no_grad():
        model(plain.tokens)
    embeddings = {id(module) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for module in model.modules():
        if isinstance(module, PackedModule):
            pieces = [piece for weight in module.sb_recipes.values() for piece in weight.pieces]
            shapes[id(module) in embeddings] += [piece.header.shape for piece in pieces]
    assert Counter(decodes) == Counter(shapes[False])
    assert Counter(row_decodes) == Counter(shapes[True])


def test_describing_a_weight_decodes_nothing(packed, decodes: list[tuple[int, ...]]) -> None:
    plain, model = packed
    for name, weight, _ in packed_parameters(model):
        parameter, expected = model.get_parameter(name), plain.model.get_parameter(name)
        assert (parameter.shape, parameter.dtype, parameter.device) == (weight.shape, expected.dtype, expected.device)
        assert (parameter.numel(), parameter.ndim, parameter.stride()) == (
            expected.numel(),
            expected.ndim,
            expected.stride(),
        )
        assert isinstance(parameter, torch.nn.Parameter)
    assert not decodes


def test_parameters_in_memory_are_the_packed_bytes(packed) -> None:
    """No module holds a tensor besides its parameters and buffers, and of weights these hold what the file has."""
    plain, model = packed
    stored = {id(tensor): tensor.nbytes for _, _, data in packed_parameters(model) for tensor in data}
    others = {id(p): p.nbytes for p in model.parameters() if p.is_floating_point()}
    assert sum(p.nbytes for p in model.parameters()) == sum(stored.values()) + sum(others.values())
    eligible = {
        id(plain.model.get_parameter(name)): plain.model.get_parameter(name) for name, _, _ in packed_parameters(model)
    }
    assert sum(stored.values()) < 0.75 * sum(parameter.nbytes for parameter in eligible.values())
    for module in model.modules():
        assert not [value for value in vars(module).values() if isinstance(value, torch.Tensor)]


def test_one_decoded_module_at_most(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model generates: the weights alive at a time are those of one module, after it none."""
    plain, model = packed
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    def watched(weight: recipe.Recipe, *args: Any) -> torch.Tensor:
        nonlocal peak
        decoded = decode(weight, *args)
        alive.append(weakref.ref(decoded))
        peak = max(peak, sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
        return decoded

    decode = recipe.Recipe.decode
    monkeypatch.setattr(recipe.Recipe, "decode", watched)
    gc.disable()  # reference counts alone must free them
    try:
        plain.assert_same(model)
        assert len(alive) > 0
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()
    assert peak == max(
        _decoded_bytes(module)
        for module in model.modules()
        if isinstance(module, PackedModule) and not isinstance(module, torch.nn.Embedding)
    )


def test_gradients_of_inputs(llama: Reference, config: samebits.SamebitsConfig) -> None:
    """So adapters can be trained on top: gradients reach the inputs, and are those of the uncompressed model."""
    model = llama.load(quantization_config=config)
    gradients = []
    for each in (llama.model, model):
        embedded = each.get_input_embeddings()(llama.tokens).detach().requires_grad_()
        each(inputs_embeds=embedded).logits.float().sum().backward()
        gradients.append(embedded.grad)
    assert torch.equal(gradients[0].view(torch.int16), gradients[1].view(torch.int16))


def _decoded_bytes(module: PackedModule) -> int:
    """At once: of experts one stack."""
    sizes = [2 * prod(weight.shape) for weight in module.sb_recipes.values()]
    return max(sizes) if isinstance(module, PackedExperts) else sum(sizes)
