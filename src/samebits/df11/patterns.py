"""Which matrices become a unit: patterns of known architectures, resolved against the weights that a checkpoint has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from samebits.df11.architectures import ARCHITECTURES, Blocks
from samebits.df11.config import Df11Config, are_names, compile_pattern
from samebits.errors import FormatError, InputError
from samebits.format.folder import read_json
from samebits.format.names import WEIGHT

Patterns = dict[str, list[str]]  # regular expression of module paths -> attributes; none: the module's own weight

TIED = ("lm_head", "model.embed_tokens")


def architecture_of(config: Mapping[str, object]) -> str | None:
    """The key into ARCHITECTURES of a model's config.json, None if there is none."""
    names = (config.get("_class_name"), config.get("model_type"))
    return next((name for name in names if isinstance(name, str) and name in ARCHITECTURES), None)


def auto_patterns(config: Mapping[str, object], names: Iterable[str]) -> Patterns:
    """Patterns for a checkpoint whose BF16 matrices are called ``names``.

    Of an unknown architecture each numbered block becomes a unit; what is in none, embeddings for example, stays as it
    is. Blocks that lack some attributes get a pattern of their own. Tied embeddings stay as they are: two modules use
    them, and a unit belongs to one.

    Raises:
        InputError: nothing fits.
    """
    modules = {name.removesuffix(WEIGHT): None for name in names if name.endswith(WEIGHT)}  # a set in order
    architecture = architecture_of(config)
    blocks = ARCHITECTURES[architecture] if architecture else _numbered_blocks(modules)
    is_tied = config.get("tie_word_embeddings") is True or TIED[0] not in modules
    patterns: Patterns = {}
    for path, attributes in blocks.items():
        if not (is_tied and path in TIED):
            patterns |= _resolve(path, attributes, modules)
    if not patterns:
        what = f"no matrices where {architecture} has them" if architecture else "no numbered blocks with BF16 matrices"
        raise InputError(
            what, mend='give --patterns FILE, JSON of the form {"layers\\\\.\\\\d+": ["mlp.up_proj", ...]}'
        )
    return patterns


def _numbered_blocks(modules: Iterable[str]) -> Blocks:
    """Blocks by the first number in each module's path."""
    blocks: dict[str, dict[str, None]] = defaultdict(dict)
    for module in modules:
        parts = module.split(".")
        number = next((i for i, part in enumerate(parts) if i and part.isdecimal()), len(parts))
        if number + 1 < len(parts):
            blocks[".".join(parts[:number])][".".join(parts[number + 1 :])] = None
    return {path: tuple(attributes) for path, attributes in blocks.items()}


def _resolve(path: str, attributes: tuple[str, ...], modules: Mapping[str, None]) -> Patterns:
    """One pattern for all blocks with the same attributes, in the order of ``attributes``."""
    if not attributes:
        return {re.escape(path): []} if path in modules else {}
    block = re.compile(rf"{re.escape(path)}\.(\d+)\.(.+)")
    blocks: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        if found := block.fullmatch(module):
            blocks[found[1]].add(found[2])
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for number, present in blocks.items():
        if kept := tuple(attribute for attribute in attributes if attribute in present):
            kinds[kept].append(number)
    return {
        rf"{re.escape(path)}\.{_numbers(numbers, len(numbers) == len(blocks))}": list(kept)
        for kept, numbers in kinds.items()
    }


def _numbers(numbers: list[str], are_all: bool) -> str:
    if are_all:
        return r"\d+"
    return f"(?:{'|'.join(sorted(numbers, key=int))})" if len(numbers) > 1 else numbers[0]


def read_patterns(path: Path) -> Patterns:
    """Patterns from a JSON file: an object of lists of attributes.

    Raises:
        InputError: there is no such file, or a pattern in it cannot be used.
        FormatError: something else is in it.
    """
    if not path.is_file():
        raise InputError("no such file", where=str(path), mend="give auto, or a JSON file of patterns")
    patterns = read_json(path)
    for pattern, names in patterns.items():
        if not are_names(names):
            mend = 'write lists of names: {"layers\\\\.\\\\d+": ["mlp.up_proj"], "lm_head": []}'
            raise FormatError("not a list of different attributes", where=f"{path}: {pattern}", mend=mend)
        try:
            compile_pattern(pattern)
        except InputError as error:
            raise InputError(error.what, where=f"{path}: {error.where}", mend="correct the pattern") from None
    return patterns


def find_units(patterns: Patterns, names: Iterable[str]) -> dict[str, list[str]]:
    """The units of a checkpoint with tensors ``names``: module path -> names of its weights, in order.

    Raises:
        InputError: a pattern that matches nothing, or not what it says; two units with the same weight.
    """
    names = set(names)
    paths = sorted({name[:end] for name in names for end in range(len(name)) if name[end] == "."})
    if not patterns:
        raise InputError("no patterns", mend="give one at least")
    units: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    for pattern, attributes in patterns.items():
        compiled = Df11Config({pattern: attributes})
        found = {path: weights for path in paths if (weights := compiled.weights(path)) is not None}
        if not found:
            raise InputError("the pattern matches no module", where=repr(pattern), mend="correct or remove it")
        for path, weights in found.items():
            for name in weights:
                if name not in names or name in owners or path in units:
                    why = f"a weight of unit {owners[name]} already" if name in owners else "not there"
                    what = f"{path} is a unit already" if path in units else f"{name} is {why}"
                    raise InputError(what, where=repr(pattern), mend="correct the pattern")
                owners[name] = path
        units |= found
    return units
