"""How fast samebits::linear is beside torch's F.linear in BF16, on the weight shapes of current models.

    python benchmarks/linear.py [--name linear] [--shapes 4096x4096,...] [--tokens 1,8,...] [--prefill 512,...]
                                [--groups 1,8,...]

It writes results/<name>.json: a row that the file has already of the same case, device and versions is replaced, the
others of that device and these versions stay. Every shape is measured with FEW_TOKENS, all in a row of the table "few",
or of "more" for MORE_SHAPES, and with MANY_TOKENS, each in a row of the table "many"; ``--tokens`` chooses among them,
or others. An empty "" leaves shapes, prefill or groups out.

Every product is compared with F.linear's as 16-bit words first. Times are medians of CUDA graph replays over more than
900 MB of distinct weights, BF16's and packed ones' in turns, from WARM_TOKENS tokens on after WARM_SECONDS of replays,
because a GPU whose tensor cores are busy lowers its clock after a while; "decoded first" is the product without the
fused kernel: decode, then F.linear. The table "prefill" has all seven products of a block of Llama 3.1 8B, as modules
with the inputs that they have in the model, so that some may be made together.

The table "together" has the layers of a model that share an input, as modules: nn.Linear, the operator samebits::linear
one by one, and packed modules, whose products samebits.plans.together learns to make by one launch, where that is
faster (``launches`` 1, else 0: then they are made one by one, and have that time). The calls that it learns from come
first, for every copy of the weights. Launches right behind each other begin while the one in front still runs, which
would hide what one launch saves; a model has a norm or an activation in front of such a group. So each group stands
behind SMALL_KERNELS elementwise kernels of torch's that write its input, and the time of a graph of these kernels alone
is taken off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

import samebits
from common import DECODER_LAYERS, Timing, add_results, encode_checked, significant, synthetic_matrix
from gpu import DISTINCT_BYTES, device_name, distinct, measure_read_rate, time_graphs
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import is_supported
from samebits.kernels.residents import resident
from samebits.plans.call import plan_of
from samebits.plans.dispatch import linear
from samebits.plans.key import key_of
from samebits.plans.planner import Planner

# Rows x columns, and the projections that have them.
SHAPES = {
    (1024, 4096): "k, v of Llama 3.1 8B, Qwen3 8B",
    (4096, 4096): "q, o of Llama 3.1 8B, Qwen3 8B",
    (6144, 4096): "q, k, v of Llama 3.1 8B in one",
    (5120, 5120): "q, o of Qwen3 14B",
    (5120, 4096): "o of Mistral Small 24B",
    (5120, 8192): "o of Qwen3 32B",
    (5376, 4096): "o of Gemma 3 27B",
    (8192, 8192): "q, o of Llama 3 70B",
    (10240, 8192): "q, k, v of Llama 3 70B in one",
    (12288, 4096): "gate, up of Qwen3 8B",
    (14336, 4096): "gate, up of Llama 3.1 8B",
    (4096, 14336): "down of Llama 3.1 8B",
    (17408, 5120): "gate, up of Qwen3 14B",
    (5120, 17408): "down of Qwen3 14B",
    (28672, 4096): "gate and up of Llama 3.1 8B in one",
    (21504, 5376): "gate, up of Gemma 3 27B",
    (25600, 5120): "gate, up of Qwen3 32B",
    (32768, 5120): "gate, up of Mistral Small 24B",
    (5120, 32768): "down of Mistral Small 24B",
    (28672, 8192): "gate, up of Llama 3 70B",
    (8192, 28672): "down of Llama 3 70B",
}
MORE_SHAPES = {
    (1024, 5120): "k, v of Qwen3 14B, 32B, Mistral Small 24B",
    (1024, 8192): "k, v of Llama 3 70B",
    (2048, 5376): "k, v of Gemma 3 27B",
    (4096, 5120): "q of Mistral Small 24B",
    (4096, 5376): "q of Gemma 3 27B",
    (6144, 5120): "q, k, v of Mistral Small 24B in one",
    (7168, 5120): "q, k, v of Qwen3 14B in one",
    (8192, 5120): "q of Qwen3 32B",
    (8192, 5376): "q, k, v of Gemma 3 27B in one",
    (4096, 12288): "down of Qwen3 8B",
    (10240, 5120): "q, k, v of Qwen3 32B in one",
    (24576, 4096): "gate and up of Qwen3 8B in one",
    (5376, 21504): "down of Gemma 3 27B",
    (5120, 25600): "down of Qwen3 32B",
    (34816, 5120): "gate and up of Qwen3 14B in one",
    (43008, 5376): "gate and up of Gemma 3 27B in one",
    (51200, 5120): "gate and up of Qwen3 32B in one",
    (65536, 5120): "gate and up of Mistral Small 24B in one",
    (57344, 8192): "gate and up of Llama 3 70B in one",
}
FEW_TOKENS = (1, 2, 4, 8, 16)
GROUP_TOKENS = (*FEW_TOKENS, 64)
MANY_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096)
BLOCK = "Llama 3.1 8B"


class Group(NamedTuple):
    """Layers that share an input.

    Attributes:
        columns: of the input.
        rows: of each weight.
        tokens: where a model always has so many; else as asked for.
    """

    model: str
    layers: str
    columns: int
    rows: tuple[int, ...]
    has_bias: bool = False
    tokens: int | None = None


GROUPS = (
    Group("Llama 3.1 8B", "q, k, v", 4096, (4096, 1024, 1024)),
    Group("Llama 3.1 8B", "gate, up", 4096, (14336, 14336)),
    Group("Qwen3 14B", "q, k, v", 5120, (5120, 1024, 1024)),
    Group("Qwen3 14B", "gate, up", 5120, (17408, 17408)),
    Group("Qwen3 32B", "q, k, v", 5120, (8192, 1024, 1024)),
    Group("Qwen3 32B", "gate, up", 5120, (25600, 25600)),
    Group("Mistral Small 24B", "q, k, v", 5120, (4096, 1024, 1024)),
    Group("Mistral Small 24B", "gate, up", 5120, (32768, 32768)),
    Group("Llama 3 70B", "q, k, v", 8192, (8192, 1024, 1024)),
    Group("Llama 3 70B", "gate, up", 8192, (28672, 28672)),
    Group("Stable Diffusion 3.5 large", "q, k, v of an image", 2432, (2432,) * 3, has_bias=True, tokens=4096),
    Group("FLUX.1-dev", "q, k, v of an image", 3072, (3072,) * 3, has_bias=True, tokens=4096),
    Group("FLUX.1-dev", "q, k, v of a text", 3072, (3072,) * 3, has_bias=True, tokens=512),
    Group("FLUX.1-dev", "mlp, q, k, v of both", 3072, (12288, *(3072,) * 3), has_bias=True, tokens=4608),
)
# Of a block, the products that have an input in common.
BLOCK_INPUTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
Layers = TypeVar("Layers", nn.ModuleList, nn.ModuleDict)
LEARNING_CALLS = 3  # of a group; from the last on, its products may come from one launch
SMALL_KERNELS = 3
KEYS = ("matrix", "model", "layers", "tokens")
REPEATS = 9
WARM_SECONDS, WARM_TOKENS = 0.3, 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="linear")
    parser.add_argument("--shapes", type=shapes, default=[*SHAPES, *MORE_SHAPES])
    parser.add_argument("--tokens", type=counts, default=FEW_TOKENS + MANY_TOKENS)
    parser.add_argument("--prefill", type=counts, default=PREFILL_TOKENS)
    parser.add_argument("--groups", type=counts, default=GROUP_TOKENS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    if not (arguments.shapes or arguments.prefill or arguments.groups):
        parser.error("nothing to measure")
    for found in measured(arguments):
        path = add_results(arguments.name, device_name(), found, KEYS)
    print(path)
    return 0


def measured(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of one weight, of a block, of one group: what is kept if the next takes too long."""
    few = FEW_TOKENS if set(FEW_TOKENS) <= set(arguments.tokens) else ()
    many = tuple(tokens for tokens in arguments.tokens if tokens not in few)
    for shape in arguments.shapes:
        yield measure(synthetic_matrix(*shape, device="cuda"), few, many)
    if arguments.prefill:
        yield list(printed(measure_block(DECODER_LAYERS[BLOCK], arguments.prefill, "cuda")))
    for group in GROUPS if arguments.groups else ():
        tokens = (group.tokens,) if group.tokens else arguments.groups
        yield list(printed(measure_group(group, tokens, "cuda")))


def printed(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        print(row, flush=True)
        yield row


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def shapes(text: str) -> list[tuple[int, int]]:
    return [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in text.split(",") if shape)]


def measure(weight: torch.Tensor, few: tuple[int, ...], many: tuple[int, ...]) -> list[dict[str, Any]]:
    """The products of one weight: a row of the table "few" if there are any, and one of "many" for each of ``many``."""
    copies = [copy for (copy,) in distinct([encode_checked(weight)])]
    dense = [weight, *(weight.clone() for _ in range(int(DISTINCT_BYTES / weight.nbytes)))]
    results = []
    for tokens in few + many:
        results.append(measure_tokens(dense, copies, tokens))
        print(results[-1], flush=True)
    if not few:
        return results
    first = few_row(weight, results[: len(few)]) | {
        "packed_bytes": copies[0].nbytes,
        "read_tb_per_s": significant(measure_read_rate([copy.data for copy in copies], REPEATS) / 1e12),
    }
    return [first, *results[len(few) :]]


@torch.no_grad()
def measure_block(shapes: dict[str, tuple[int, int]], tokens: tuple[int, ...], device: str) -> Iterator[dict[str, Any]]:
    """All products of a decoder layer one after the other, as rows of the table "prefill"."""
    weights = [synthetic_matrix(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes.values())]
    dense = copies_of(nn.ModuleDict(zip(shapes, map(layer_of, weights), strict=True)))
    compressed = deepcopy(dense[0])
    samebits.compress(compressed)
    packed = copies_of(compressed)
    for number in tokens:
        inputs = [activations(number, shapes[names[0]][1], device) for names in BLOCK_INPUTS]
        samebits.prepare(compressed, batch_sizes=(number,))
        launches = 0
        for block in packed:
            for x, names in zip(inputs, BLOCK_INPUTS, strict=True):
                layers = nn.ModuleList(block[name] for name in names)
                launches += learned(x, layers, (dense[0][name] for name in names))
        bf16, ours = timed(
            *([partial(products_of_block, inputs, block) for block in blocks] for blocks in (dense, packed)),
            tokens=number,
        )
        yield {
            "table": "prefill",
            "tokens": number,
            "matrices": len(shapes),
            "launches_of_several": launches / len(packed),
            **bf16.columns("bf16_microseconds", 1e6),
            **ours.columns("samebits_microseconds", 1e6),
            "overhead": round(ours.median / bf16.median - 1, 4),
        }


def products_of_block(inputs: Sequence[torch.Tensor], block: nn.ModuleDict) -> None:
    for x, names in zip(inputs, BLOCK_INPUTS, strict=True):
        for name in names:
            block[name](x)


def find_plan(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None = None) -> None:
    """As samebits.prepare does for a model; a product of many tokens waits for some calls of its own."""
    key = key_of(x, packed.shape, bias)
    if key and is_supported(packed.header, key.tokens, x.get_device()):
        Planner.of(x.get_device()).outcome(key)


def check_same(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Leave with an error if a product's words are not F.linear's."""
    if not torch.equal(y.view(torch.int16), F.linear(x, weight, bias).view(torch.int16)):
        raise SystemExit(f"{tuple(weight.shape)} with {x.shape[0]} tokens: not identical")


@torch.no_grad()
def measure_group(group: Group, tokens: tuple[int, ...], device: str) -> Iterator[dict[str, Any]]:
    """Products of one input, as rows of the table "together"."""
    weights = [synthetic_matrix(rows, group.columns, seed=seed, device=device) for seed, rows in enumerate(group.rows)]
    dense = copies_of(nn.ModuleList(layer_of(weight, group.has_bias) for weight in weights))
    compressed = deepcopy(dense[0])
    samebits.compress(compressed)
    modules = copies_of(compressed)
    operators = [list(map(operator_of, layers)) for layers in modules]
    for number in tokens:
        x = activations(number, group.columns, device)
        samebits.prepare(compressed, batch_sizes=(number,))
        for operator, layer in zip(operators[0], dense[0], strict=True):
            check_same(operator(x), x, layer.weight, layer.bias)
        [launches] = {learned(x, layers, dense[0]) for layers in modules}  # every copy alike
        bf16, one_by_one, *together = timed_behind(x, dense, operators, *([modules] if launches else []))
        yield {
            "table": "together",
            "model": group.model,
            "layers": group.layers,
            "tokens": number,
            **bf16.columns("bf16_microseconds", 1e6),
            **one_by_one.columns("one_by_one_microseconds", 1e6),
            **(together[0] if launches else one_by_one).columns("together_microseconds", 1e6),
            "launches": launches,
        }


def layer_of(weight: torch.Tensor, has_bias: bool = False) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=has_bias, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        layer.bias = nn.Parameter(activations(1, weight.shape[0], weight.device)[0], requires_grad=False)
    return layer


def operator_of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """samebits::linear with a packed layer's weight and bias."""
    return partial(linear, packed=samebits.PackedTensor.from_data(layer.sb_packed), bias=layer.bias)


def copies_of(layers: Layers) -> list[Layers]:
    """These, and as many copies of all of them as make up more than DISTINCT_BYTES."""
    nbytes = sum(parameter.nbytes for parameter in layers.parameters())
    return [layers, *(deepcopy(layers) for _ in range(int(DISTINCT_BYTES / nbytes)))]


def learned(x: torch.Tensor, layers: nn.ModuleList, plain: Iterable[nn.Module]) -> int:
    """Have together.py learn a group; how many launches of several products it takes then. Every product is checked."""
    plain = list(plain)
    for _ in range(LEARNING_CALLS):
        x.mul_(1)  # counts as another input
        for layer, same in zip(layers, plain, strict=True):
            check_same(layer(x), x, same.weight, same.bias)
    first = resident(layers[0].sb_packed)
    return int(bool(first and first.followers and first.followers.chosen_for(x.shape[0])))


Groups = Sequence[Iterable[Callable[[torch.Tensor], object]]]


def timed_behind(x: torch.Tensor, *ways: Groups) -> list[Timing]:
    """Of the products of a group, made in each of these ways, without the small kernels in front of them."""
    every: list[Groups] = [*ways, [()] * len(ways[0])]
    calls = [[partial(behind_small_kernels, x, group) for group in groups] for groups in every]
    *whole, empty = timed(*calls, tokens=x.shape[0])
    alone = empty.median
    return [Timing(each.median - alone, each.fastest - alone, each.slowest - alone) for each in whole]


def behind_small_kernels(x: torch.Tensor, products: Iterable[Callable[[torch.Tensor], object]]) -> None:
    for _ in range(SMALL_KERNELS):
        x.mul_(1)
    for product in products:
        product(x)


def measure_tokens(dense: list[torch.Tensor], copies: list[samebits.PackedTensor], tokens: int) -> dict[str, Any]:
    """A product, as a row of the table "many"."""
    rows, columns = dense[0].shape
    x = activations(tokens, columns, dense[0].device)
    find_plan(x, copies[0])
    plan = plan_of(x, copies[0], None)
    check_same(linear(x, copies[0], None), x, dense[0])
    ways = [
        [partial(F.linear, x, weight) for weight in dense],
        [partial(linear, x, packed, None) for packed in copies],
        [partial(decode_first, x, packed) for packed in copies],
    ]
    bf16, ours, decoded = timed(*ways, tokens=tokens)
    return {
        "table": "many",
        "matrix": f"{rows} x {columns}",
        "tokens": tokens,
        "path": "fused" if plan else "decoded first",
        "split": plan.split if plan else None,
        "kernel": str(VARIANTS[plan.variant]) if plan else None,
        **bf16.columns("bf16_microseconds", 1e6),
        **ours.columns("samebits_microseconds", 1e6),
        **decoded.columns("decoded_first_microseconds", 1e6),
        "speed": significant(bf16.median / ours.median),
    }


def activations(tokens: int, columns: int, device: str | torch.device) -> torch.Tensor:
    return torch.randn(tokens, columns, device=device).bfloat16()


def few_row(weight: torch.Tensor, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table "few": a weight with each number of tokens."""
    rows, columns = weight.shape
    row: dict[str, Any] = {
        "table": "more" if (rows, columns) in MORE_SHAPES else "few",
        "matrix": f"{rows} x {columns}",
        "used_as": (SHAPES | MORE_SHAPES).get((rows, columns), ""),
    }
    for product in measured:
        values = {key: value for key, value in product.items() if key not in ("table", "matrix", "tokens")}
        row |= {f"{key}_at_{product['tokens']}": value for key, value in values.items()}
    return row


def decode_first(x: torch.Tensor, packed: samebits.PackedTensor) -> torch.Tensor:
    return F.linear(x, samebits.decode(packed))


def timed(*candidates: list[Callable[[], object]], tokens: int = 0) -> list[Timing]:
    return time_graphs(list(candidates), REPEATS, WARM_SECONDS if tokens >= WARM_TOKENS else 0.0)


if __name__ == "__main__":
    raise SystemExit(main())
