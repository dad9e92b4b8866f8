"""A key-value cache for transformers whose tokens are packed: about two thirds of the memory, and the same bits.

For attention a layer's keys and values are decoded, one layer at a time, into tensors as DynamicCache would have them;
how they are kept is nn/packed_states.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import KeyPath, tree_flatten_with_path
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from samebits.errors import InputError
from samebits.nn.packed_states import Arena, PackedStates


class PackedCache(DynamicCache):  # type: ignore[misc]
    """DynamicCache in about two thirds of the memory: ``model.generate(..., past_key_values=PackedCache(config))``.

    Attention gets the same tensors, bit for bit, so tokens and logits are those of DynamicCache, for BF16 models as for
    compressed ones. Each step decodes what is packed, one layer at a time, which takes memory for one layer's keys and
    values, and time in proportion to the tokens.

    Packed are BF16 states of layers that keep all tokens, and nothing else. Layers with a sliding window, with linear
    attention or an indexer, and states of other dtypes or that need gradients stay as they are.

    Args:
        config: the model's, by which layers with a window are known; without it every layer keeps all tokens.
        offloading: keep layers in main memory and bring them one ahead, as DynamicCache does.
        offload_only_non_sliding: only those that keep all tokens.
        block_tokens: how many tokens are packed at a time; by default as many as have a million words in a layer's
            keys.

    Raises:
        InputError: ``block_tokens`` is not positive, or ``config`` is none of a model.
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(
        self,
        config: Any = None,
        *,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        block_tokens: int | None = None,
    ) -> None:
        if block_tokens is not None and (not hasattr(block_tokens, "__index__") or block_tokens < 1):
            raise InputError(f"blocks of {block_tokens!r} tokens", mend="give a whole number from 1 on, or none")
        if config is not None and not hasattr(config, "get_text_config"):
            raise InputError(f"{type(config).__name__} is no configuration", mend="give that of the model, or none")
        super().__init__(config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        new_layer = partial(PackedLayer, Arena(), block_tokens)
        self.layers = [new_layer() if is_packable(layer) else layer for layer in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = new_layer

    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        """Bring a layer back ahead of time, behind what the current stream still copies to main memory.

        And let the current stream wait for the layer before. Not all versions of transformers that we support wait for
        the former, and all let only the default stream wait for the latter.
        """
        current = torch.cuda.current_stream(self.prefetch_stream.device)
        current.wait_stream(self.prefetch_stream)
        self.prefetch_stream.wait_stream(current)
        super().prefetch(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Of all layers' states, as they are kept."""
        packed = sum(layer.nbytes for layer in self.layers if isinstance(layer, PackedLayer))
        others = (states_of(layer).values() for layer in self.layers if not isinstance(layer, PackedLayer))
        return packed + sum(state.nbytes for states in others for state in states)


def is_packable(layer: Any) -> bool:
    """Whether a layer of DynamicCache keeps all tokens and nothing else."""
    return type(layer) is DynamicLayer


def states_of(layer: Any) -> dict[KeyPath, torch.Tensor]:
    """All tensors that a layer of a cache holds, each once, by where it does; single numbers apart."""
    leaves, _ = tree_flatten_with_path(vars(layer))
    found = {id(leaf): (path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return dict(found.values())


class PackedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a PackedCache. Whoever asks for ``keys`` or ``values`` has all of them decoded."""

    def __init__(self, arena: Arena, block_tokens: int | None) -> None:
        self._keys, self._values = PackedStates(arena, block_tokens), PackedStates(arena, block_tokens)
        super().__init__()

    @property
    def keys(self) -> torch.Tensor | None:
        """[sequences, heads, tokens, channels], contiguous; None before the first token."""
        return self._keys.all()

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys.replace(states)

    @property
    def values(self) -> torch.Tensor | None:
        """As ``keys``."""
        return self._values.all()

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values.replace(states)

    @property
    def nbytes(self) -> int:
        """Of keys and values, as they are kept."""
        return self._keys.nbytes + self._values.nbytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in more tokens; all keys and values, as DynamicLayer has them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._keys.updated(key_states), self._values.updated(value_states)

    def get_seq_length(self) -> int:
        return self._keys.tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; all but the first so many if it is positive."""
        held = self.get_seq_length()
        removed = -tokens_to_remove if tokens_to_remove <= 0 else held - tokens_to_remove
        for states in self._both() if removed > 0 else ():
            states.forget(min(removed, held))

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for states in self._both():
            states.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for states in self._both():
            states.select(states.sequences().repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for states in self._both():
            states.select(states.sequences()[indices])

    def offload(self) -> None:
        """All of it to main memory."""
        for states in self._both():
            states.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """All of it back to its device."""
        for states in self._both():
            states.move(self.device)

    def _both(self) -> Iterator[PackedStates]:
        """Keys and values, where there are any."""
        return iter((self._keys, self._values) if self.is_initialized else ())
