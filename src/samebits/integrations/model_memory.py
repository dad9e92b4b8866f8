"""What a causal language model takes in memory while it generates, from its config: nothing is allocated.

    peak = packed weights + their decode tables + other tensors + key-value cache + the largest layer decoded

The cache is measured: the model runs one token on the meta device, and each layer of its cache shows what a token
takes there (whatever its heads are), and by its kind how many tokens it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.folder import CONFIG
from samebits.integrations.model_shapes import meta_model
from samebits.jobs.estimate import Estimate
from samebits.kernels.tables import MAX_TABLE_BYTES
from samebits.nn.convert import Selection
from samebits.nn.packed_states import LATEST_TOKENS, default_block_tokens
from samebits.nn.spared import spare

BITS_PER_WEIGHT = 10.75  # of packed words that are not there to be encoded: README.md, "How small"
_EVERY_TOKEN = 1 << 60


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights: packed ones as packed, all others, and all in BF16."""

    packed: int
    other: int
    plain: int

    @classmethod
    def stored(cls, checkpoint: Checkpoint) -> Weights:
        """Of a compressed checkpoint."""
        packed = sum(entry.nbytes for entry in checkpoint if entry.is_packed)
        other = sum(entry.nbytes for entry in checkpoint if not entry.is_packed)
        return cls(packed, other, sum(entry.original_nbytes for entry in checkpoint))

    @classmethod
    def estimated(cls, estimate: Estimate) -> Weights:
        """Of a checkpoint that would be compressed."""
        packed = sum(tensor.stored_bytes for tensor in estimate.packed)
        return cls(packed, estimate.stored_bytes - packed, sum(2 * tensor.words for tensor in estimate.tensors))

    @classmethod
    def supposed(cls, model: nn.Module, selection: Selection) -> Weights:
        """Of a model without weights: BITS_PER_WEIGHT for those that would be packed."""
        packed = {parameter for _, parameters in _to_pack(model, selection) for parameter in parameters}
        words = sum(parameter.numel() for parameter in packed)
        total = sum(parameter.numel() for parameter in model.parameters())
        return cls(round(words * BITS_PER_WEIGHT / 8), 2 * (total - words), 2 * total)


@dataclass(frozen=True)
class CacheLayer:
    """A layer of the key-value cache, for one sequence.

    Attributes:
        token: bytes of a token.
        window: tokens kept at most.
        fixed: bytes that never grow.
        packs: whether PackedCache packs it.
    """

    token: int
    window: int
    fixed: int
    packs: bool

    def nbytes(self, context: int) -> int:
        return self.fixed + self.token * min(context, self.window)

    def packed_nbytes(self, context: int, batch: int) -> int:
        """Of ``batch`` sequences in a PackedCache, with as many tokens left unpacked as there can be behind a block."""
        if not self.packs:
            return batch * self.nbytes(context)
        unpacked = default_block_tokens(batch * self.token // 4) + LATEST_TOKENS
        packed = max(0, context - unpacked) * self.token * BITS_PER_WEIGHT / 16
        return batch * (self.fixed + self.token * min(context, unpacked) + round(packed))


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that a model takes.

    Attributes:
        tables: that products on a GPU keep for packed weights.
        buffers: that no checkpoint holds, such as rotary frequencies.
        decoded: the weights of its largest layer in BF16.
    """

    weights: Weights
    tables: int
    buffers: int
    cache_layers: tuple[CacheLayer, ...]
    decoded: int

    def cache(self, context: int, batch: int) -> int:
        """Bytes of the cache with ``context`` tokens in each of ``batch`` sequences."""
        return batch * sum(layer.nbytes(context) for layer in self.cache_layers)

    def packed_cache(self, context: int, batch: int) -> int:
        """The same of a PackedCache, with one layer of it decoded."""
        decoded = max((batch * layer.nbytes(context) for layer in self.cache_layers if layer.packs), default=0)
        return decoded + sum(layer.packed_nbytes(context, batch) for layer in self.cache_layers)

    @property
    def resident(self) -> int:
        """Without any cache."""
        return self.weights.packed + self.tables + self.weights.other + self.buffers

    def peak(self, context: int, batch: int) -> int:
        return self.resident + self.decoded + self.cache(context, batch)

    def packed_cache_peak(self, context: int, batch: int) -> int:
        """With a PackedCache."""
        return self.resident + self.decoded + self.packed_cache(context, batch)

    def plain_peak(self, context: int, batch: int) -> int:
        """The same model in BF16."""
        return self.weights.plain + self.buffers + self.cache(context, batch)

    def longest(self, room: int, batch: int, packed_cache: bool = False) -> int | None:
        """The most tokens whose cache fits into ``room`` bytes; -1 if not even none, None if any number."""
        cache = self.packed_cache if packed_cache else self.cache
        if cache(_EVERY_TOKEN, batch) <= room:
            return None
        fits, too_many = -1, _EVERY_TOKEN
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if cache(middle, batch) <= room else (fits, middle)
        return fits


def model_memory(folder: Path, selection: Selection, weights: Weights | None) -> ModelMemory:
    """What the model of a folder's config.json takes.

    Args:
        weights: what is known of its weights; None: they are supposed.

    Raises:
        InputError: no config.json, a model that cannot be made, or one without a key-value cache to measure.
    """
    where = str(folder / CONFIG)
    if not (folder / CONFIG).is_file():
        raise InputError("no config.json", where=str(folder), mend="give a model folder")
    model = meta_model(folder)
    if model is None or not model.can_generate() or model.config.is_encoder_decoder:
        raise InputError("not a decoder-only language model of transformers", where=where, mend="leave --context out")
    spare(model)
    held = model.state_dict().keys()
    buffers = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in held)
    to_pack = list(_to_pack(model, selection))
    decoded = max(_decoded_bytes(*found) for found in to_pack)
    tables = MAX_TABLE_BYTES * len({parameter for _, parameters in to_pack for parameter in parameters})
    weights = weights or Weights.supposed(model, selection)
    layers = tuple(_cache_layers(model.eval(), where))
    return ModelMemory(weights, tables, buffers, layers, decoded)


def _to_pack(model: nn.Module, selection: Selection) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Each module and those of its parameters that would be packed."""
    for prefix, module in model.named_modules():
        names = [name for name in module._parameters if not selection.reason_against(module, name, f"{prefix}.{name}")]
        yield module, [module.get_parameter(name) for name in names]


def _decoded_bytes(module: nn.Module, packed: list[nn.Parameter]) -> int:
    """What a module decodes for its forward; an embedding only the rows that it looks up."""
    return 0 if isinstance(module, nn.Embedding) else 2 * sum(parameter.numel() for parameter in packed)


def _cache_layers(model: Any, where: str) -> Iterator[CacheLayer]:
    from transformers.cache_utils import Cache

    from samebits.integrations.transformers_cache import is_packable, states_of

    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "batched_mm"  # the others look at the tokens' values
    try:
        with torch.inference_mode():
            output = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta"), use_cache=True)
        layers = next(value.layers for value in output.values() if isinstance(value, Cache))
    except StopIteration:
        raise InputError("its model gives no cache to measure", where=where, mend="leave --context out") from None
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        what = f"its cache cannot be measured without weights ({reason})"
        raise InputError(what, where=where, mend="leave --context out") from None
    for layer in layers:
        pair, fixed = states_of(layer)
        window = getattr(layer, "sliding_window", None)
        kept = window - 1 if window else _EVERY_TOKEN  # with the token at hand a window is full
        packs = is_packable(layer) and all(state.dtype == torch.bfloat16 for state in pair)
        yield CacheLayer(sum(state.nbytes for state in pair), kept, sum(state.nbytes for state in fixed), packs)
