"""Shapes of a unit's matrices, which files do not hold: from the model, from biases, or from what is known of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.df11.architectures import HIDDEN_COLUMNS, HIDDEN_ROWS, PUBLISHED
from samebits.df11.config import Df11Config
from samebits.errors import FormatError, InputError

Shape = tuple[int, ...]
ModelShapes = Callable[[Path, Sequence[str]], Mapping[str, Shape]]  # config's folder, names of weights: those known

_KNOWN_UNITS = tuple(Df11Config(patterns) for patterns in PUBLISHED.values())
_UNKNOWN = "put the model's config.json beside the weights, and install the library that it is for"
_MISFIT = "these weights do not belong to this config.json"


def of_no_model(folder: Path, names: Sequence[str]) -> Mapping[str, Shape]:
    """ModelShapes that knows none."""
    return {}


@dataclass(frozen=True)
class Known:
    """What is known of a checkpoint.

    Attributes:
        config: None if it has no dfloat11_config.
        model: shapes of weights, from the model's class.
        vectors: lengths of the one-dimensional tensors of the checkpoint.
    """

    config: Df11Config | None
    model: Mapping[str, Shape]
    vectors: Mapping[str, int]

    def weights(self, path: str, sizes: Sequence[int]) -> dict[str, Shape]:
        """Names and shapes of the matrices in the unit of module ``path``, in order.

        Args:
            sizes: of the matrices, in weights.

        Raises:
            InputError: not known.
            FormatError: they contradict the unit.
        """
        names = self.config.weights(path) if self.config else None
        if names is not None:
            if len(names) != len(sizes):
                what = f"a unit of {len(sizes)} matrices, where dfloat11_config names {len(names)}"
                raise FormatError(what, mend=_MISFIT)
            return self._shapes(names, sizes, path)
        candidates = [found for config in _KNOWN_UNITS if (found := self._try(config, path, sizes))]
        if not candidates or any(list(found) != list(candidates[0]) for found in candidates):
            mend = "put a config.json with dfloat11_config beside the weights"
            raise InputError("which matrices this unit holds is not known", mend=mend)
        return candidates[0]

    def _try(self, config: Df11Config, path: str, sizes: Sequence[int]) -> dict[str, Shape] | None:
        names = config.weights(path)
        if names is None or len(names) != len(sizes):
            return None
        try:
            return self._shapes(names, sizes, path)
        except (FormatError, InputError):
            return None

    def _shapes(self, names: Sequence[str], sizes: Sequence[int], path: str) -> dict[str, Shape]:
        return {name: self._shape(name, size, path) for name, size in zip(names, sizes, strict=True)}

    def _shape(self, name: str, size: int, path: str) -> Shape:
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        shape = self.model.get(name)
        rows = self.vectors.get(f"{module}.bias")
        if shape is None and rows is not None:
            shape = (rows, size // max(1, rows))
        hidden = self._hidden(name, path)
        if shape is None and hidden and leaf in HIDDEN_COLUMNS:
            shape = (size // hidden, hidden)
        if shape is None and hidden and leaf in HIDDEN_ROWS:
            shape = (hidden, size // hidden)
        if shape is None:
            raise InputError("its shape is not known, DFloat11 stores none", where=name, mend=_UNKNOWN)
        if math.prod(shape) != size:
            raise FormatError(f"{size} weights do not make up {list(shape)}", where=name, mend=_MISFIT)
        return shape

    def _hidden(self, name: str, path: str) -> int | None:
        """Values of a hidden state, as many as norms have, if ``name`` belongs to a known unit at ``path``."""
        if not any(name in (config.weights(path) or ()) for config in _KNOWN_UNITS):
            return None
        norms = (f"{path}.input_layernorm.weight", "model.norm.weight")
        return next((self.vectors[norm] for norm in norms if self.vectors.get(norm)), None)
