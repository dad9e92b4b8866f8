"""Of which parts of a module its class may ask a parameter's dtype, from the source of the class.

Whoever asks for all parameters, and does not merely count, freeze or fill them, may take the dtype of the first.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from tokenize import TokenError
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

CHILDREN, EVERY = "*", "**"  # steps: to each child, or to all that is below and no further
LAST = "$"  # ends a path: the last parameter is asked for, not the first
Path = tuple[str, ...]  # from a module to parts of it: attributes, items such as "[0]", and these steps

_ASKED = frozenset(("parameters", "named_parameters", "state_dict"))
# Of classes that are no model's own; what transformers' and diffusers' answer for ``dtype`` is seen to elsewhere.
_LIBRARIES = (
    "torch.", "samebits.", "transformers.modeling_utils.", "transformers.distributed.",
    "diffusers.models.modeling_utils.", "diffusers.loaders.", "peft.",
)  # fmt: skip
_TELL_DTYPE = {"dtype", "to", "type", "type_as"}
_TELL_NOTHING = {
    "device", "is_cuda", "is_meta", "requires_grad", "grad", "numel", "nelement", "shape", "size", "dim", "ndim",
    "keys", "load_state_dict", "len", "id", "isinstance", *vars(torch.optim),
}  # fmt: skip
_TELL_AS_MUCH = {
    "data", "detach", "values", "items", "__next__", "next", "iter", "list", "tuple", "set", "dict", "sorted",
    "reversed", "enumerate", "chain", "islice",
}  # fmt: skip
_WRAPPERS = {property: "fget", staticmethod: "__func__", classmethod: "__func__", cached_property: "func"}
_WRAPPERS[type(lru_cache(len))] = "__wrapped__"
_FUNCTIONS = (FunctionType, *_WRAPPERS)


@lru_cache(maxsize=1024)
def asked_parts(cls: Any) -> frozenset[Path]:
    """Paths from a module to those whose first parameter is asked for."""
    found: set[Path] = set()
    for base in cls.__mro__:
        for member in () if f"{base.__module__}.".startswith(_LIBRARIES) else vars(base).values():
            for function in _functions(member):
                found |= _asked_in(function.__code__, not isinstance(member, staticmethod))
    return frozenset(found)


def _functions(member: Any) -> Iterator[FunctionType]:
    """What a member of a class calls: of a property what gets it, of what a decorator made what it was made of."""
    pending = [member]
    for each in pending:
        if isinstance(each, FunctionType):
            yield each
            held = [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
        else:
            held = [getattr(each, name) for kind, name in _WRAPPERS.items() if isinstance(each, kind)]
        pending += [function for function in held if isinstance(function, _FUNCTIONS) and function not in pending]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@lru_cache(maxsize=4096)
def _asked_in(code: CodeType, has_self: bool) -> frozenset[Path]:
    if _ASKED.isdisjoint(_names(code)) or code.co_name == "_init_weights":  # before anything is packed
        return frozenset()
    try:
        source = inspect.getsource(code)
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    except (OSError, SyntaxError, TokenError):
        is_sure = any(map(_tells_dtype, _names(code)))
        return frozenset(path for path in _asked_in_code(code) if is_sure or EVERY not in path)
    return frozenset(_Source(tree, has_self).asked())


def _asked_in_code(code: CodeType) -> Iterator[Path]:
    """The same where there is no source, as of what was typed in or made: whatever is asked for."""
    path: list[str] | None = None  # to what the last instruction loads
    for each in dis.get_instructions(code):
        if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            name = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
            path = [] if name == "self" else None
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if each.argval in _ASKED:
                yield (EVERY,) if path is None else tuple(path)
            path = None if path is None else [*path, each.argval]
        else:
            path = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _asked_in_code(constant)


class _Source:
    """What a function's source does with parameters.

    Args:
        has_self: whether its first argument is the module.
    """

    def __init__(self, tree: ast.AST, has_self: bool) -> None:
        self.nodes = list(ast.walk(tree))
        self.parents = {child: parent for parent in self.nodes for child in ast.iter_child_nodes(parent)}
        arguments = (node for node in self.nodes if isinstance(node, ast.arg))  # the outermost function's first
        self.seen: set[ast.AST] = set()
        self.surely = False
        self.module = next((argument.arg for argument in arguments), None) if has_self else None

    def asked(self) -> set[Path]:
        found: set[Path] = set()
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ASKED:
                is_saved = node.func.attr == "state_dict"
                paths = self.paths(node.func.value)
                paths = {path for path in paths if self.tells(node, surely=is_saved or EVERY in path)}
                found |= paths if self._is_first(node) else paths | _then(paths, LAST)
        return found

    def tells(self, node: ast.AST, surely: bool) -> bool:
        """Whether a dtype may be learnt, or is ``surely``, from what an expression gives: a parameter, or several."""
        self.seen.clear()
        self.surely = surely
        return self._tells(node)

    def _is_first(self, node: ast.AST) -> bool:
        """Whether of parameters the first is taken, and not any other."""
        parent = self.parents[node]
        match parent:
            case ast.Call(func=ast.Name(id="next")) | ast.Attribute(attr="__next__"):
                return True
            case ast.Subscript(slice=index):
                return isinstance(index, ast.Constant) and index.value == 0
            case ast.Attribute() | ast.Call() | ast.comprehension() | ast.Starred() | ast.List() | ast.Tuple():
                return self._is_first(parent)
            case ast.GeneratorExp() | ast.ListComp():
                return self._is_first(parent)
        return False

    def _tells(self, node: ast.AST) -> bool:
        if node in self.seen:
            return False
        self.seen.add(node)
        parent = self.parents[node]
        match parent:
            case ast.Attribute(attr=name) if name in _TELL_AS_MUCH:
                return self._tells(parent)
            case ast.Attribute(attr=name, ctx=ast.Load()):
                return _tells_dtype(name) or not (self.surely or _tells_nothing(name))
            case ast.Attribute():
                return False
            case ast.Call(func=function) if function is node:
                return self._tells(parent)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _TELL_AS_MUCH:
                return self._tells(parent)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return _tells_dtype(name) or not (self.surely or _tells_nothing(name))
            case ast.For(target=target) | ast.comprehension(target=target) | ast.NamedExpr(target=target):
                return self._name_tells(target) or (isinstance(parent, ast.NamedExpr) and self._tells(parent))
            case ast.Assign(targets=[ast.Name() as target]):
                return self._name_tells(target)
            case ast.Return() if any(isinstance(each, ast.FunctionDef) and each.name in _ASKED for each in self.nodes):
                return False
            case ast.Assign(targets=[ast.Subscript()]) | ast.Compare() | ast.Expr() | ast.UnaryOp(op=ast.Not()):
                return False
            case ast.If() | ast.While() | ast.Assert():
                return False
            case ast.Subscript() | ast.Starred() | ast.List() | ast.Tuple() | ast.Set() | ast.BoolOp() | ast.IfExp():
                return self._tells(parent)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                return self._tells(parent)
        return not self.surely

    def _name_tells(self, target: ast.AST) -> bool:
        """The same of the name that a parameter gets: the last one, behind its own name or number."""
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        if not names:
            return not self.surely
        return any(self._tells(use) for use in self.nodes if _is_use(use, names[-1]))

    def paths(self, node: ast.AST, among: frozenset[str] = frozenset()) -> set[Path]:
        """To the modules that an expression gives, or whose children it gives; ``among``: names that it is part of."""
        match node:
            case ast.Name(id=name) if name == self.module:
                return {()}
            case ast.Name(id=name) if name not in among:
                return _union(self.bindings(name, among | {name})) or {(EVERY,)}
            case ast.Attribute(value=value, attr=name):
                return _then(self.paths(value, among), name)
            case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as key)):
                return _then(self.paths(value, among), f"[{key}]")
            case ast.Subscript(value=value):
                return _then(self.paths(value, among), CHILDREN)
            case ast.Call(func=ast.Name(id="super")):
                return {()}
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as name), *_]):
                return _then(self.paths(value, among), name)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                return _then(self.paths(value, among), CHILDREN)
            case ast.Call(func=ast.Name(id="next"), args=[value, *_]):
                return _then(self.paths(value, among), CHILDREN)
            case ast.Call(func=ast.Name(id=name), args=values) if name in _TELL_AS_MUCH or name == "zip":
                return _union(self.paths(value, among) for value in values)
            case ast.Call(func=ast.Attribute(value=value, attr="children" | "named_children" | "values" | "items")):
                return self.paths(value, among)
            case ast.IfExp(body=one, orelse=other):
                return self.paths(one, among) | self.paths(other, among)
        return {(EVERY,)}

    def bindings(self, name: str, among: frozenset[str]) -> Iterator[set[Path]]:
        for node in self.nodes:
            if isinstance(node, ast.arg) and node.arg == name:
                yield {(EVERY,)}
            elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                parent = self.parents[node]
                is_alone = not isinstance(parent, ast.Tuple)
                match parent if is_alone else self.parents[parent]:
                    case ast.For(iter=value) | ast.comprehension(iter=value):
                        yield _then(self.paths(value, among), CHILDREN)
                    case ast.Assign(value=value) if is_alone:
                        yield self.paths(value, among)
                    case _:
                        yield {(EVERY,)}


def _tells_dtype(name: str) -> bool:
    return name in _TELL_DTYPE or name.startswith("new_") or name.endswith("_like")


def _tells_nothing(name: str) -> bool:
    """By the name of what is read or called: what ends like this changes a parameter, or the module."""
    return name in _TELL_NOTHING or name.endswith("_")


def _is_use(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _then(paths: Iterable[Path], step: str) -> set[Path]:
    return {(*path, step) for path in paths}


def _union(sets: Iterable[set[Path]]) -> set[Path]:
    return set().union(*sets)
