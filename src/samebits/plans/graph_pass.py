"""A pass over graphs that Inductor compiles: products of one input become one operator, samebits::linears.

Calls of a model as it is show one after another what belongs together (plans/together.py), and what was made ahead is
kept until it is asked for. Compiled graphs ask for all products themselves, reuse memory behind torch's back, and have
no place where something could be kept; but they say ahead what they will ask for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from operator import getitem
from types import ModuleType
from typing import Any

import torch
from torch import fx

from samebits.kernels.structures import MAX_TOGETHER

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)  # Inductor makes the latter of the former
_log = logging.getLogger(__name__)

Region = Callable[[fx.Graph, fx.Node], int]  # between two operations that write to something


def register() -> None:
    """With Inductor, if it is there: called while a product is traced, which is before Inductor gets the graph."""
    post_grad = sys.modules.get("torch._inductor.fx_passes.post_grad")
    if post_grad is not None:
        _register(post_grad)


@cache
def _register(post_grad: ModuleType) -> None:
    try:
        from torch._inductor.pattern_matcher import CallFunctionVarArgs, get_mutation_region_id, register_graph_pattern

        pattern, first_passes = CallFunctionVarArgs(_one()), post_grad.pass_patterns[0]
        register_graph_pattern(pattern, pass_dict=first_passes)(partial(_join_all, get_mutation_region_id))
    except (ImportError, AttributeError, LookupError, TypeError) as error:  # Inductor's own interface may change
        _log.warning("compiled graphs make products of one input one by one: %s", error)


def _one() -> Any:
    return torch.ops.samebits.linear.default


def _several() -> Any:
    return torch.ops.samebits.linears.default


def _join_all(region: Region, match: Any, *_: Any, **__: Any) -> None:
    """The whole graph, at the first product that Inductor comes upon; nothing is left to do at the next ones."""
    for run in list(_runs(match.graph, region)):
        for start in range(0, len(run), MAX_TOGETHER):
            _join(run[start : start + MAX_TOGETHER])


def _join(nodes: Sequence[fx.Node]) -> None:
    """One operator at the place of the first of some products of one input.

    In the order in which their weights are arguments of the graph. With torch.compile that is the one of the calls,
    while Inductor has moved products near to what is made of them; so what is known of them is what calls know.
    """
    if len(nodes) < 2:
        return
    graph, first = nodes[0].graph, nodes[0]
    x, nodes = first.args[0], sorted(nodes, key=_data)
    data, biases, shapes, fields = (list(each) for each in zip(*(node.args[1:] for node in nodes), strict=True))
    with graph.inserting_before(first):
        joint = graph.call_function(_several(), (x, data, biases, [*chain(*shapes)], [*chain(*fields)]))
        joint.meta.update(_meta(first) | {"val": [node.meta["val"] for node in nodes]})
        for i, node in enumerate(nodes):
            made = graph.call_function(getitem, (joint, i))
            made.meta.update(_meta(node))
            node.replace_all_uses_with(made)
    for node in nodes:
        graph.erase_node(node)


def _meta(product: fx.Node) -> dict[str, Any]:
    """What is said of its output, not of its arguments."""
    return {key: value for key, value in product.meta.items() if key != "eager_input_vals"}


def _runs(graph: fx.Graph, region: Region) -> Iterator[list[fx.Node]]:
    """Products of one input, with no other products between them, whose weights are there before the first of them."""
    run: list[fx.Node] = []
    one, several = _one(), _several()
    for node in graph.nodes:
        if node.target not in (one, several):
            continue
        if run and node.target is one and _where(run[0], region) == _where(node, region):
            operands = [each for each in node.args[1:3] if isinstance(each, fx.Node)]
            if all(each < run[0] for each in operands):
                run.append(node)
                continue
        yield run
        run = [node] if node.target is one else []
    yield run


def _data(product: fx.Node) -> Any:
    return product.args[1]


def _where(product: fx.Node, region: Region) -> Hashable:
    """What products of one input have in common: its values, and when and where these are read."""
    x: Any = product.args[0]
    values = (x.args[0], *x.args[1]) if x.target in _VIEWS else x
    stream = product.meta.get("custom", {}).get("stream")
    return values, region(product.graph, product), stream
