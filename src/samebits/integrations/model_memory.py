"""What a causal language model takes in memory while it generates, from its config: nothing is allocated.

    peak = packed weights + their decode tables + other tensors + key-value cache + what a forward pass takes beside

The cache is measured: the model runs one token on the meta device, and two, and each layer of its cache shows what a
token takes there (whatever its heads are), and by its kind how many tokens it keeps. So are forward passes, over the
prompt and over the last token (forward_memory.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.folder import CONFIG
from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.integrations.model_shapes import meta_model
from samebits.jobs.estimate import Estimate
from samebits.kernels.tables import MAX_TABLE_BYTES
from samebits.nn.packed_states import LATEST_TOKENS, ROOM_SHARE, default_block_tokens
from samebits.nn.selection import HOLDS_ANY, Selection, tied, unpacked
from samebits.nn.spared import spare
from samebits.plans.planner import FEW_TOKENS

if TYPE_CHECKING:
    from samebits.integrations.forward_memory import ForwardMemory, Pass

BITS_PER_WEIGHT = 10.75  # of packed words that are not there to be encoded: README.md, "How small"
MOST_TOKENS = 1 << 24  # of a sequence that are asked about
MISSING_VALUES = (RuntimeError, NotImplementedError, AttributeError, ValueError)  # raised on the meta device
_TYPICAL_TOKENS = 4096
_EVERY_TOKEN = 1 << 60


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights: packed ones as packed, all others, and all in BF16.

    Attributes:
        names: of the packed ones, in their files.
    """

    packed: int
    other: int
    plain: int
    names: frozenset[str] = frozenset()

    @classmethod
    def stored(cls, checkpoint: Checkpoint) -> Weights:
        """Of a compressed checkpoint."""
        packed = {entry.name: entry.nbytes for entry in checkpoint if entry.is_packed}
        other = sum(entry.nbytes for entry in checkpoint if not entry.is_packed)
        plain = sum(entry.original_nbytes for entry in checkpoint)
        return cls(sum(packed.values()), other, plain, frozenset(packed))

    @classmethod
    def estimated(cls, estimate: Estimate) -> Weights:
        """Of a checkpoint that would be compressed."""
        packed = sum(tensor.stored_bytes for tensor in estimate.packed)
        plain = sum(2 * tensor.words for tensor in estimate.tensors)
        names = frozenset(tensor.name for tensor in estimate.packed)
        return cls(packed, estimate.stored_bytes - packed, plain, names)

    @classmethod
    def supposed(cls, model: nn.Module, packed: Collection[nn.Parameter]) -> Weights:
        """Of a model without weights: BITS_PER_WEIGHT for those that would be packed."""
        words = sum(parameter.numel() for parameter in packed)
        total = sum(parameter.numel() for parameter in model.parameters())
        return cls(round(words * BITS_PER_WEIGHT / 8), 2 * (total - words), 2 * total)


@dataclass(frozen=True)
class CacheLayer:
    """A layer of the key-value cache, for one sequence; or those of its tensors that grow alike.

    Attributes:
        token: bytes of a token, or of as many as one entry is made of.
        window: tokens kept at most.
        fixed: bytes that never grow.
        packs: words of a token in its keys or in its values, whichever has fewer, if PackedCache packs them; else 0.
        every: tokens that one entry is made of.
    """

    token: int
    window: int
    fixed: int
    packs: int
    every: int = 1

    def nbytes(self, context: int) -> int:
        return self.fixed + self.token * (min(context, self.window) // self.every)

    def packed_nbytes(self, context: int, batch: int) -> int:
        """The most that ``batch`` sequences take in a PackedCache on their way to ``context`` tokens.

        The first block takes up to two blocks' tokens; behind it the room for those that are not packed is an eighth of
        those that are, and a block at most, of which the latest tokens may be all that is in it.
        """
        if not self.packs:
            return batch * self.nbytes(context)
        block = default_block_tokens(batch * self.packs)
        room = block + LATEST_TOKENS - 1
        latest = max(LATEST_TOKENS, (ROOM_SHARE * room - context) // (ROOM_SHARE - 1))  # when the room is that large
        packed = max(0, context - latest) * BITS_PER_WEIGHT / 16
        tokens = min(context, max(block + room, room + packed))
        return batch * (self.fixed + math.ceil(self.token * tokens))


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that a model takes.

    Attributes:
        tables: that products on a GPU keep for packed weights.
        buffers: that no checkpoint holds, such as rotary frequencies.
        decoded: the weights of its largest layer in BF16.
        forward: what forward passes take; None where that is not known, and only ``decoded`` counts.
        positions: tokens that its configuration says it was made for; None: any number, or it does not say.
    """

    weights: Weights
    tables: int
    buffers: int
    cache_layers: tuple[CacheLayer, ...]
    decoded: int
    forward: ForwardMemory | None = None
    positions: int | None = None

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

    def peak(self, context: int, batch: int, prompt: int | None = None) -> int:
        """Of the compressed model, once the plans of its products are found (samebits.prepare).

        Args:
            prompt: tokens that the first forward pass reads; None: all of ``context``.
        """
        return self.resident + self._most(self.cache, _packed_beside, context, batch, prompt)

    def packed_cache_peak(self, context: int, batch: int, prompt: int | None = None) -> int:
        """With a PackedCache."""
        return self.resident + self._most(self.packed_cache, _packed_beside, context, batch, prompt)

    def plain_peak(self, context: int, batch: int, prompt: int | None = None) -> int:
        """The same model in BF16."""
        return self.weights.plain + self.buffers + self._most(self.cache, _plain_beside, context, batch, prompt)

    def needed(self, context: int, batch: int, prompt: int | None = None, *, packed_cache: bool = False) -> int:
        """What the compressed model never takes less than, where memory ends there: also products without a plan.

        Those of the last token decode the largest layer.
        """
        peak, cache = (self.packed_cache_peak, self.packed_cache) if packed_cache else (self.peak, self.cache)
        return max(peak(context, batch, prompt), self.resident + cache(context, batch) + self.decoded)

    def _most(
        self, cache: Callable[[int, int], int], beside: Callable[[Pass], int], context: int, batch: int,
        prompt: int | None,
    ) -> int:  # fmt: skip
        """Beside what never changes: while the prompt is read, or behind it."""
        if self.forward is None:
            return cache(context, batch) + (self.decoded if beside is _packed_beside else 0)
        read = min(prompt or context, context)
        try:
            found = cache(read, batch) + beside(self.forward.prompt(read, batch))
            if read < context:
                found = max(found, cache(context, batch) + beside(self.forward.step(context, batch)))
        except RuntimeError:  # a tensor of more bytes than torch can count
            what = f"a forward pass of {batch:,} x {context:,} tokens is too large to be followed"
            raise InputError(what, mend="give fewer") from None
        return found


def longest(needed: Callable[[int], int], limit: int) -> int | None:
    """The most tokens for which ``needed``, which grows with them, is at most ``limit`` bytes.

    -1 if not even one, None if MOST_TOKENS. What is needed grows nearly in a line, so it takes few calls.
    """
    fits, at_fits = 1, needed(1)
    if at_fits > limit:
        return -1
    guess, is_known = _TYPICAL_TOKENS, False  # its slope
    while (found := needed(guess)) <= limit:
        if guess == MOST_TOKENS:
            return None
        slope = (found - at_fits) / (guess - fits)
        fits, at_fits = guess, found
        crossing = fits + math.ceil((limit - found) / slope) + 1 if slope else MOST_TOKENS
        guess, is_known = min(2 * fits if is_known else crossing, MOST_TOKENS), True
    too_many, at_too_many, bisects = guess, found, False
    while too_many - fits > 1:
        width = too_many - fits
        share = 0.5 if bisects else (limit - at_fits) / (at_too_many - at_fits)
        guess = min(max(fits + int(share * width), fits + 1), too_many - 1)
        found = needed(guess)
        if found <= limit:
            fits, at_fits = guess, found
        else:
            too_many, at_too_many = guess, found
        bisects = not bisects and 2 * (too_many - fits) > width
    return fits


def _packed_beside(found: Pass) -> int:
    return found.packed - found.cache


def _plain_beside(found: Pass) -> int:
    return found.plain - found.cache


def model_memory(folder: Path, selection: Selection, weights: Weights | None) -> ModelMemory:
    """What the model of a folder's config.json takes.

    Args:
        selection: what of its weights would be packed, where nothing is known of them.
        weights: what is known of them; None: they are supposed.

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
    model.config.pad_token_id = None  # else some look for it in what they are given, to warn
    held = model.state_dict().keys()
    buffers = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in held)
    packed = _selected(model, selection) if weights is None else _packed(model, weights.names)
    decoded = {module: own for module in model.modules() if (own := _packed_of(module, set(packed)))}
    largest = max((_decoded_at_once(*each) for each in decoded.items()), default=0)
    layers = tuple(_cache_layers(model.eval(), where))
    weights = weights or Weights.supposed(model, packed)
    forward, tables = _forward(model, decoded), MAX_TABLE_BYTES * len(packed)
    return ModelMemory(weights, tables, buffers, layers, largest, forward, _positions(model.config))


def _positions(config: Any) -> int | None:
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _forward(model: nn.Module, decoded: Mapping[nn.Module, Sequence[nn.Parameter]]) -> ForwardMemory | None:
    """None where the model's forward needs values."""
    from samebits.integrations.forward_memory import ForwardMemory

    found = ForwardMemory(model, decoded)
    try:
        found.prompt(2 * FEW_TOKENS, 1)
        found.step(2, 1)
    except MISSING_VALUES:
        return None
    return found


def _selected(model: nn.Module, selection: Selection) -> list[nn.Parameter]:
    """The parameters that would be packed."""
    groups = [owned for owned in tied(list(unpacked(model))) if selection.reason_against_tied(owned) is None]
    return [owner.get_parameter(name) for _, owner, name in (owned[0] for owned in groups)]


def _packed(model: Any, names: Collection[str]) -> list[nn.Parameter]:
    """Of each packed tensor of its files, which have these names, the parameter that it is, or is a part of."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    from samebits.integrations.transformers.names import Names

    naming = Names(model, get_model_conversion_mapping(model))
    owned = {full_name: owned for owned in tied(list(unpacked(model))) for full_name, _, _ in owned}
    found = [owned[target] for name in names if (target := naming.target(name)[0]) in owned]
    firsts = (every[0] for every in found if HOLDS_ANY.reason_against_tied(every) is None)
    return [owner.get_parameter(name) for _, owner, name in firsts]


def _packed_of(module: nn.Module, packed: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """What a module decodes for its forward; an embedding only the rows that it looks up."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter in packed]
    return [] if isinstance(module, nn.Embedding) else own


def _decoded_at_once(module: nn.Module, weights: Sequence[nn.Parameter]) -> int:
    """Bytes of a module's weights; of routed experts' stacks those of the largest."""
    from samebits.integrations.transformers.experts import is_experts

    sizes = [(2 * each.numel(), each.dim() >= EXPERTS_DIMENSIONS) for each in weights]
    stacks = [size for size, is_stack in sizes if is_stack]
    others = sum(size for size, is_stack in sizes if not is_stack)
    return others + (max(stacks, default=0) if is_experts(type(module)) else sum(stacks))


def _cache_layers(model: Any, where: str) -> Iterator[CacheLayer]:
    from samebits.integrations.transformers.cache import is_packable, states_of

    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "batched_mm"  # the others look at the tokens' values
    caches = {tokens: _cache_after(model, tokens, where) for tokens in (1, 2)}
    rates = {_rate(layer) for layer in caches[1]} - {1}
    caches |= {tokens: _cache_after(model, tokens, where) for rate in rates for tokens in (rate, 2 * rate)}
    for number, layer in enumerate(caches[1]):
        states = {tokens: states_of(layers[number]) for tokens, layers in caches.items()}
        sizes = {tokens: {path: state.nbytes for path, state in found.items()} for tokens, found in states.items()}
        packs = 0
        if is_packable(layer) and all(state.dtype == torch.bfloat16 for state in states[1].values()):
            packs = min((state.numel() for state in states[1].values()), default=0)
        window = getattr(layer, "sliding_window", None)
        kept = window - 1 if window else _EVERY_TOKEN  # with the token at hand a window is full
        for (limit, every), (token, fixed) in _growth(sizes, kept, _rate(layer)).items():
            yield CacheLayer(token, limit, fixed, packs, every)


def _rate(layer: Any) -> int:
    """Of how many tokens a layer makes an entry, as DeepSeek V4's do."""
    return getattr(layer, "compress_rate", 1)


def _growth(sizes: dict[int, dict[Any, int]], kept: int, rate: int) -> dict[tuple[int, int], list[int]]:
    """How a layer's tensors grow: by limit and tokens of an entry, the bytes of an entry and those that never grow.

    Args:
        sizes: of each tensor, by its place, after so many tokens: one, two, ``rate`` and twice that.
        kept: tokens that it keeps at most.
    """
    grown: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for path in sizes[2 * rate]:
        one, two, first, second = (sizes[tokens].get(path, 0) for tokens in (1, 2, rate, 2 * rate))
        if not second:  # collects what the next entry is made of
            kind, token, fixed = (rate - 1, 1), one, 0
        elif two > one > 0:
            kind, token, fixed = (kept, 1), two - one, one - (two - one)
        else:
            kind, token, fixed = (_EVERY_TOKEN, rate), second - first, first - (second - first)
        grown[kind][0] += token
        grown[kind][1] += fixed
    return grown


def _cache_after(model: Any, tokens: int, where: str) -> list[Any]:
    """The layers of its cache, without memory."""
    from transformers.cache_utils import Cache

    try:
        with torch.inference_mode():
            output = model(input_ids=torch.zeros(1, tokens, dtype=torch.int64, device="meta"), use_cache=True)
        return next(value.layers for value in output.values() if isinstance(value, Cache))
    except StopIteration:
        raise InputError("its model gives no cache to measure", where=where, mend="leave --context out") from None
    except MISSING_VALUES as error:
        reason = str(error).partition("\n")[0]
        what = f"its cache cannot be measured without weights ({reason})"
        raise InputError(what, where=where, mend="leave --context out") from None
