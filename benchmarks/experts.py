"""Routed experts of one layer in vLLM: BF16, packed, and packed but decoded first, in CUDA graphs.

    python benchmarks/experts.py [--name experts] [--models ...] [--tokens 1,8]      on a GPU, where vLLM is installed
    python benchmarks/experts.py --prompts                                           the same file: between the rungs

Real shapes, synthetic weights, tokens and routes (uniform, other ones in each call of a graph, so that the cache does
not have their experts). Each form is what vLLM does with a router's choice: sorts, makes the first product, multiplies
gates and ups, makes the second, scales, adds up. BF16's products are vLLM's Triton kernel's, ``samebits`` has the
variants that samebits chooses for it, else decodes first, as ``decoded`` always does. ``same`` says whether the bytes
of a call are those of BF16, for each of the calls that are timed.

Rows of the table "prompts" are of numbers of tokens that nothing was found for ahead: experts are multiplied as with
the rung above (samebits.integrations.vllm.routed), or decoded first. ``how`` has the rung's variants.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from common import PACKAGES, add_results, encode_checked, significant, synthetic_matrix
from gpu import time_graphs
from samebits.bf16 import same_words
from samebits.integrations.vllm import plugin
from samebits.integrations.vllm.routed import Choices, Routing, decoded, multiplying_routed, weights
from samebits.kernels.linear.experts import VARIANTS

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
PROMPTS = [300, 701, 1000, 1500, 3000, 6000]
MOST = 8192  # tokens of a step, as vLLM's server has by default
ROUTES, FEW_ROUTES, MANY = 12, 4, 16  # calls in a graph; of more than so many tokens
KEYS = ("model", "tokens")
Form = Callable[[torch.Tensor, Routing], torch.Tensor]


class Shape(NamedTuple):
    """Of a layer: experts, how many of them a token gets, and their matrices."""

    experts: int
    each: int
    hidden: int
    intermediate: int


MODELS = {
    "Qwen3 30B-A3B": Shape(128, 8, 2048, 768),
    "Qwen3 235B-A22B": Shape(128, 8, 4096, 1536),
    "OLMoE 7B-A1B": Shape(64, 8, 2048, 1024),
    "DeepSeek V2 Lite": Shape(64, 6, 2048, 1408),
    "Mixtral 8x7B": Shape(8, 2, 4096, 14336),
}


class Layer:
    """Experts with vLLM's products."""

    def __init__(self, shape: Shape) -> None:
        from vllm.model_executor.layers.fused_moe import fused_moe

        self.shape = shape
        experts, _, hidden, intermediate = shape
        made = [(2 * intermediate, hidden), (hidden, intermediate)]
        matrices = [
            synthetic_matrix(experts * rows, columns, seed=seed, device="cuda").view(experts, rows, columns)
            for seed, (rows, columns) in enumerate(made)
        ]
        self.plain, self.packed = matrices, [encode_checked(matrix) for matrix in matrices]
        self._vllm, self._multiply = fused_moe, multiplying_routed(fused_moe.invoke_fused_moe_triton_kernel)
        self.choices = Choices(self.packed, shape.each, self.run, self.decoded)

    def run(self, x: torch.Tensor, routing: Routing, given: Sequence[Any]) -> torch.Tensor:
        """As vLLM's TritonExperts."""
        import triton.language as tl
        from vllm import _custom_ops

        (experts, each, hidden, intermediate), tokens = self.shape, len(x)
        sizes = (matrix.size() for matrix in self.plain)
        config = self._vllm.try_get_optimal_moe_config(*sizes, each, None, tokens)
        sorted_pairs = self._vllm._prepare_expert_assignment(routing.ids, config, tokens, each, experts, None)

        def multiply(a: torch.Tensor, weight: Any, c: torch.Tensor, scales: torch.Tensor | None, sharing: int) -> None:
            self._multiply(
                a, weight, c, None, None, scales, *sorted_pairs, scales is not None, sharing, config,
                compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
                use_int4_w4a16=False, per_channel_quant=False,
            )  # fmt: skip

        both, down = x.new_empty(tokens, each, 2 * intermediate), x.new_empty(tokens, each, hidden)
        gated, y = x.new_empty(tokens * each, intermediate), torch.empty_like(x)
        multiply(x, given[0], both, None, each)
        torch.ops._C.silu_and_mul(gated, both.view(-1, 2 * intermediate))
        multiply(gated, given[1], down, routing.scales, 1)
        _custom_ops.moe_sum(down, y)
        return y

    def decoded(self, routing: Routing) -> list[torch.Tensor]:
        return [decoded(each, routing.ids) for each in self.packed]

    def decode_first(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.run(x, routing, self.decoded(routing))

    def found(self, tokens: int) -> tuple[Form, str]:
        """The packed form, and how it is made."""
        chosen = self.choices.of(tokens, ahead=True)
        if chosen is None:
            return self.decode_first, "decoded first"
        how = "; ".join(str(VARIANTS[each]) for each in chosen)
        return lambda x, routing: self.run(x, routing, weights(self.packed, routing.ids, chosen)), how

    def between(self, tokens: int) -> tuple[Form, str]:
        """The same for a number that nothing was found for."""

        def form(x: torch.Tensor, routing: Routing) -> torch.Tensor:
            given = self.choices.weights(self.packed, routing.ids)
            return self.decode_first(x, routing) if given is None else self.run(x, routing, given)

        given = self.choices.weights(self.packed, torch.zeros(tokens, self.shape.each, dtype=torch.int32))
        return form, "; ".join(str(VARIANTS[each.variant]) for each in given) if given else "decoded first"


def measure(name: str, table: str, layer: Layer, tokens: int, repeats: int) -> dict[str, Any]:
    experts, each, hidden, _ = layer.shape
    x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    routes = ROUTES if tokens <= MANY else FEW_ROUTES
    routings = [Routing.random(tokens, experts, each, x.device, 100 + seed) for seed in range(routes)]
    samebits, how = layer.between(tokens) if table == "prompts" else layer.found(tokens)
    forms: dict[str, Form] = {
        "bf16": lambda x, routing: layer.run(x, routing, layer.plain),
        "samebits": samebits,
        "decoded": layer.decode_first,
    }
    same = all(same_words(forms["samebits"](x, routing), forms["bf16"](x, routing)) for routing in routings)
    timings = time_graphs([[partial(form, x, routing) for routing in routings] for form in forms.values()], repeats)
    row: dict[str, Any] = {"table": table, "model": name, "tokens": tokens, "how": how, "same": same}
    for key, timing in zip(forms, timings, strict=True):
        row |= timing.columns(f"{key}_microseconds", 1e6)
    bf16, ours, decoded_first = (timing.median for timing in timings)
    return row | {"speed": significant(bf16 / ours), "decoded_speed": significant(bf16 / decoded_first)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="experts")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--prompts", action="store_true", help="numbers of tokens that nothing is found for ahead")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    from vllm.config import VllmConfig, set_current_vllm_config

    packages, all_same = (*PACKAGES, plugin.distribution() or "vllm"), True
    table, numbers = ("prompts", PROMPTS) if options.prompts else ("experts", TOKENS)
    for name in options.models:
        with set_current_vllm_config(VllmConfig()):
            layer = Layer(MODELS[name])
            for rung in layer.choices.rungs(MOST) if options.prompts else ():
                layer.choices.find_rung(rung)
            layer.choices.climb()
            rows = [measure(name, table, layer, tokens, options.repeats) for tokens in options.tokens or numbers]
        all_same &= all(row["same"] for row in rows)
        print(add_results(options.name, torch.cuda.get_device_name(), rows, KEYS, packages), flush=True)
        del layer
    return int(not all_same)


if __name__ == "__main__":
    raise SystemExit(main())
