"""Small random models of the architectures that are tested, and how two models are compared: by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.nn.packed_module import PackedModule
from samebits.verify import verify_against

MIN_WEIGHTS = 1024  # so that every matrix of these small models counts
VOCABULARY = 300
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

# name: model class, config class, options of the config
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _COMMON),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_COMMON, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_COMMON, **_SLIDING, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, "head_dim": 16}),
    "phi": ("PhiForCausalLM", "PhiConfig", _COMMON),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_COMMON, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "head_dim": 16}),
    "bert": ("BertForMaskedLM", "BertConfig", _COMMON),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
}
# transformers splits this one's fused projections into several parameters each.
SPLIT = ("HrmTextForCausalLM", "HrmTextConfig", {**_COMMON, "num_key_value_heads": 4, "head_dim": 16})


@dataclass(frozen=True)
class Reference:
    """An uncompressed model as loaded from ``folder``, and what it says to ``tokens``."""

    folder: Path
    model: Any
    tokens: torch.Tensor
    logits: torch.Tensor
    continuation: torch.Tensor | None

    @property
    def model_class(self) -> Any:
        return type(self.model)

    def load(self, folder: Path | None = None, **options: Any) -> Any:
        return self.model_class.from_pretrained(folder or self.folder, **options)

    def assert_same(self, model: Any) -> None:
        """The same logits, as bytes, and the same greedy tokens."""
        logits, continuation = outputs(model, self.tokens)
        assert_same_bits(logits, self.logits)
        if self.continuation is not None:
            assert continuation is not None
            assert continuation.tolist() == self.continuation.tolist()

    def assert_all_packed(self, model: Any, min_weights: int = MIN_WEIGHTS) -> None:
        """Every eligible parameter is packed, none of it is left, and nothing else was touched."""
        eligible = set(eligible_parameters(self.model, min_weights))
        assert eligible
        packed = {name for name, _, _ in packed_parameters(model)}
        assert packed == eligible
        left = dict(model.named_parameters(remove_duplicate=False))
        assert eligible.isdisjoint(left)
        for name, recipe, data in packed_parameters(model):
            assert recipe.shape == tuple(self.model.get_parameter(name).shape)
            assert all(stored.dtype == torch.uint8 for stored in data)
            assert sum(stored.nbytes for stored in data) < 2 * self.model.get_parameter(name).numel()


def make(name: str, folder: Path, **options: Any) -> Reference:
    """A reference model, saved in ``folder``."""
    model_class, config_class, common = ARCHITECTURES.get(name, SPLIT)
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**common, **options})
    getattr(transformers, model_class)(config).to(torch.bfloat16).save_pretrained(folder)
    return open_reference(name, folder)


def open_reference(name: str, folder: Path, **options: Any) -> Reference:
    """The uncompressed model in ``folder`` as a reference."""
    model = getattr(transformers, ARCHITECTURES.get(name, SPLIT)[0]).from_pretrained(folder, **options)
    assert model.dtype == torch.bfloat16
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    return Reference(folder, model, tokens, *outputs(model, tokens))


@torch.no_grad()
def outputs(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits, and the tokens that a causal language model goes on with."""
    logits = model(tokens).logits
    if "MaskedLM" in type(model).__name__:
        return logits, None
    return logits, model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype == torch.bfloat16
    assert left.shape == right.shape
    assert torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def eligible_parameters(model: nn.Module, min_weights: int = MIN_WEIGHTS) -> Iterator[str]:
    """Large floating parameters of linear layers, embeddings, and modules with bare parameters of three dimensions."""
    for path, module in model.named_modules():
        experts = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        if experts or isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point() and parameter.numel() >= min_weights:
                    yield f"{path}.{name}"


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, Any, list[torch.Tensor]]]:
    """Name, recipe and stored tensors of everything packed, seen from outside."""
    for path, module in model.named_modules():
        if isinstance(module, PackedModule):
            for name, recipe in module.sb_recipes.items():
                yield f"{path}.{name}", recipe, [module.get_parameter(piece.slot) for piece in recipe.pieces]


def compress_folder(source: Path, destination: Path) -> Path:
    """What `samebits compress` does."""
    options = CompressOptions(min_weights=MIN_WEIGHTS)
    Compression(Checkpoint.open(source), destination, options, RunOptions(workers=1, device="cpu")).run()
    return destination


def assert_same_checkpoint(folder: Path, original: Path) -> None:
    """The same tensors, names, shapes and bytes, decoded."""
    verdict = verify_against(Checkpoint.open(folder), Checkpoint.open(original))
    assert verdict.identical, str(verdict.mismatches)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
