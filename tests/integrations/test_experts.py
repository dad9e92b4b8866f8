"""Mixtures of experts decode the experts that tokens are routed to, and say the same as the uncompressed model."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import samebits
from samebits.codecs import decode
from samebits.errors import FormatError
from samebits.format.container import Checkpoint
from samebits.integrations.transformers import experts
from samebits.integrations.transformers.experts import PackedExperts
from samebits.jobs.compress import Compression
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.nn import recipe
from samebits.plans.calibrate_experts import multiply_decoded
from tests.integrations.models import (
    ARCHITECTURES,
    MIN_WEIGHTS,
    Reference,
    assert_same_bits,
    compress_folder,
    make,
    open_reference,
)

NAMES = ["mixtral", "qwen3-moe"]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]
EXPERTS = 32
# So large that a few experts have fewer chunks than all of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 64},
    "qwen3-moe": {"num_experts": EXPERTS, "moe_intermediate_size": 64},
}


@pytest.fixture(scope="module", params=NAMES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make(request.param, tmp_path_factory.mktemp(request.param) / "plain", **OPTIONS[request.param])


def load(plain: Reference, implementation: str, pieces: bool, folder: Path) -> tuple[Any, Any]:
    """The uncompressed model and the compressed one, its experts fused or in pieces as in the folder."""
    name = "mixtral" if "Mixtral" in type(plain.model).__name__ else "qwen3-moe"
    reference = open_reference(name, plain.folder, experts_implementation=implementation)
    if pieces:
        options: dict[str, Any] = {"folder": compress_folder(plain.folder, folder / "compressed")}
    else:
        options = {"quantization_config": samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)}
    return reference, plain.load(**options, experts_implementation=implementation)


def experts_of(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def routed_of(model: nn.Module) -> Iterator[set[int]]:
    """A hook on each layer's experts: the experts that its tokens were routed to."""
    for module in experts_of(model):
        found: set[int] = set()
        module.register_forward_pre_hook(lambda _, args, found=found: found.update(args[1].flatten().tolist()))
        yield found


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_routed_experts_are_decoded(
    plain: Reference, implementation: str, pieces: bool, tmp_path: Path, decodes, row_decodes, expert_decodes
) -> None:
    reference, model = load(plain, implementation, pieces, tmp_path)
    routed = list(routed_of(model))
    assert len(routed) == 2
    tokens = plain.tokens[:1, :2]
    for calls in (decodes, row_decodes, expert_decodes):
        calls.clear()
    with torch.no_grad():
        logits, expected = model(tokens).logits, reference.model(tokens).logits
    assert_same_bits(logits, expected)
    assert all(2 <= len(found) <= 4 for found in routed)
    number = sum(map(len, routed))
    fused = {(EXPERTS, 128, 64), (EXPERTS, 64, 64)}
    assert fused.isdisjoint(decodes)
    if pieces:  # gate, up, down, all of this shape; so is o_proj and q_proj
        dense = Counter(tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear))
        assert decodes.count((64, 64)) == 3 * number + dense[64, 64]
    elif implementation == "grouped_mm":
        assert Counter(expert_decodes) == Counter([*fused, *fused])
    else:
        times = number if implementation == "eager" else 2
        assert Counter(shape for shape in row_decodes if shape in fused) == Counter(dict.fromkeys(fused, times))


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_same_logits_and_tokens(plain: Reference, implementation: str, pieces: bool, tmp_path: Path) -> None:
    reference, model = load(plain, implementation, pieces, tmp_path)
    reference.assert_same(model)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_same_gradients(plain: Reference, implementation: str, tmp_path: Path) -> None:
    reference, model = load(plain, implementation, False, tmp_path)
    gradients = []
    for each in (reference.model, model):
        embedded = each.get_input_embeddings()(plain.tokens).detach().requires_grad_()
        each(inputs_embeds=embedded).logits.float().sum().backward()
        gradients.append(embedded.grad)
    assert_same_bits(*gradients)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled(references, name: str, implementation: str, pieces: bool, tmp_path: Path) -> None:
    """One graph, in which experts that are not in pieces are decoded by the operators for some of them.

    Of four experts: each piece is a node of the graph.
    """
    reference, model = load(references(name), implementation, pieces, tmp_path)
    operators: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graph.graph.eliminate_dead_code()
        targets = [str(node.target) for node in graph.graph.nodes]
        operators.update(target for target in targets if target.startswith("samebits.decode_"))
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    with torch.no_grad():
        logits = torch.compile(model, backend=backend, fullgraph=True)(reference.tokens).logits
    assert_same_bits(logits, reference.logits)
    own = {"batched_mm": {"samebits.decode_rows": 4}, "grouped_mm": {"samebits.decode_experts": 4}}[implementation]
    assert operators == Counter({} if pieces else own) + Counter({"samebits.decode_rows": 1})  # and the embedding


@pytest.fixture
def fusible(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, bool]]:
    """Products that a GPU would make, as (shape of the weight, rows are grouped), made by torch's own operations."""
    made: list[tuple[torch.Size, bool]] = []

    def multiply(x: torch.Tensor, packed: samebits.PackedTensor, ids: torch.Tensor, offsets: Any) -> torch.Tensor:
        made.append((packed.shape, offsets is not None))
        return multiply_decoded(x, packed, ids, offsets)

    monkeypatch.setattr(experts, "is_fusible", lambda x, bias: True)
    monkeypatch.setattr(experts, "is_supported", lambda header: True)
    monkeypatch.setattr(experts, "multiply_experts", multiply)
    return made


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_products_are_handed_over(
    plain: Reference, implementation: str, fusible: list[tuple[torch.Size, bool]], tmp_path: Path
) -> None:
    reference, model = load(plain, implementation, False, tmp_path)
    with torch.no_grad():
        logits = model(plain.tokens).logits
    assert_same_bits(logits, reference.logits)
    grouped = implementation == "grouped_mm"
    assert fusible == 2 * [((EXPERTS, 128, 64), grouped), ((EXPERTS, 64, 64), grouped)]


@pytest.mark.parametrize("who", ["interface", "class", "linear"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_what_others_replace_is_respected(
    plain: Reference, implementation: str, who: str, fusible: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the plain model; transformers' exporters do so, say."""
    reference, model = load(plain, implementation, False, tmp_path)
    doubled = lambda self, hidden, *_: 2 * hidden  # noqa: E731
    if who == "interface":
        monkeypatch.setattr(moe.ExpertsInterface, "get_interface", lambda self, name, default: doubled)
    elif who == "class":
        monkeypatch.setattr(experts_of(model)[0].sb_base, "forward", doubled)
    else:
        name = f"_{implementation.removesuffix('_mm')}_linear"
        original = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *arguments, **named: 2 * original(*arguments, **named))
    with torch.no_grad():
        logits, expected = model(plain.tokens).logits, reference.model(plain.tokens).logits
    assert_same_bits(logits, expected)
    assert not torch.equal(logits.view(torch.int16), reference.logits.view(torch.int16))
    assert not fusible


def standalone(**options: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Eight experts, and what they are called with."""
    config = transformers.Qwen3MoeConfig(**ARCHITECTURES["qwen3-moe"][2] | {"num_experts": 8}, **options)
    module: Any = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids, scales = torch.tensor([[7, 6], [7, 1]]), torch.full((2, 2), 0.5, dtype=torch.bfloat16)
    return module, (torch.randn(2, 64).to(torch.bfloat16), ids, scales)


def test_rows_of_a_step(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a token has experts, where the class's own forward gives them to its experts."""
    model = plain.load(quantization_config=samebits.SamebitsConfig(min_weights=MIN_WEIGHTS))
    each = model.config.num_experts_per_tok
    assert each > 1
    assert {module.sb_routed_rows(3) for module in experts_of(model)} == {3 * each}
    module = experts_of(model)[0]
    monkeypatch.setattr(module.sb_base, "forward", lambda self, *args: args[0])
    assert module.sb_routed_rows(3) is None


def test_routers_are_nothing_beside_large_models(tmp_path: Path) -> None:
    """Packed in a folder, where nobody knows what reads them, and plain in memory and in what is saved of that."""
    plain = make("qwen3-moe", tmp_path / "plain", num_experts=4, moe_intermediate_size=64, vocab_size=66_000)
    router, options = "model.layers.0.mlp.gate.weight", CompressOptions(min_weights=1)
    Compression(Checkpoint.open(plain.folder), tmp_path / "a", options, RunOptions(workers=1, device="cpu")).run()
    assert Checkpoint.open(tmp_path / "a").entries[router].is_packed
    for model in (plain.load(tmp_path / "a"), plain.load(quantization_config=samebits.SamebitsConfig(min_weights=1))):
        assert torch.equal(model.get_parameter(router), plain.model.get_parameter(router))
        plain.assert_same(model)
        model.save_pretrained(tmp_path / "b")
        assert not Checkpoint.open(tmp_path / "b").entries[router].is_packed
        plain.assert_same(plain.load(tmp_path / "b"))


def test_an_implementation_that_is_not_said() -> None:
    module, inputs = standalone()
    assert module.config._experts_implementation is None
    with torch.no_grad():
        expected = module(*inputs)
        samebits.compress(module, min_weights=MIN_WEIGHTS)
        assert_same_bits(module(*inputs), expected)


def test_a_class_that_others_derive(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = standalone(experts_implementation="grouped_mm")
    module.bias = nn.Parameter(torch.zeros(3))
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda self, hidden, *_: hidden)
    nn.utils.parametrize.register_parametrization(module, "bias", nn.Identity())
    with torch.no_grad():
        assert_same_bits(module(*inputs), inputs[0])


def test_a_parameter_that_no_expert_has(fusible: list[Any]) -> None:
    """It is decoded when it is read, not at the experts' indices."""
    module, inputs = standalone(experts_implementation="grouped_mm")
    module.more = nn.Parameter(torch.randn(4, 512).to(torch.bfloat16))
    with torch.no_grad():
        expected = module(*inputs)
        samebits.compress(module, min_weights=MIN_WEIGHTS)
        assert set(module.sb_recipes) == {"gate_up_proj", "down_proj", "more"}
        assert_same_bits(module(*inputs), expected)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_compiled_products(references, implementation: str, fusible: list[Any], tmp_path: Path) -> None:
    """Operators of the graph, instead of what decodes."""
    reference, model = load(references("qwen3-moe"), implementation, False, tmp_path)
    operators: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        operators.update(target for node in graph.graph.nodes if "samebits." in (target := str(node.target)))
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    with torch.no_grad():
        logits = torch.compile(model, backend=backend, fullgraph=True)(reference.tokens).logits
    assert_same_bits(logits, reference.logits)
    assert operators["samebits.experts"] == 4
    assert not {"samebits.decode_experts"} & operators.keys()
    assert not fusible


@pytest.mark.parametrize("pieces", [False, True])
def test_undecoded_experts_are_not_read(plain: Reference, pieces: bool, tmp_path: Path, monkeypatch) -> None:
    """Their memory holds NaNs, and none gets into the logits."""

    def not_a_number(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape[0], torch.nan, **{"dtype": torch.bfloat16, **options})

    reference, model = load(plain, "grouped_mm", pieces, tmp_path)
    monkeypatch.setattr(decode, "empty", not_a_number)
    monkeypatch.setattr(recipe.torch, "empty", not_a_number)
    with torch.no_grad():
        logits = model(plain.tokens).logits
    assert_same_bits(logits, reference.logits)
    experts = experts_of(model)[0]
    assert experts.sb_routed("down_proj", torch.tensor([3])).isnan().sum() == (EXPERTS - 1) * 64 * 64


def test_other_implementations_get_whole_weights(plain: Reference, tmp_path: Path, monkeypatch, decodes) -> None:
    """One of its own, and one that took another's name."""

    def dense(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert type(self.gate_up_proj) is torch.Tensor
        return moe.grouped_mm_experts_forward(self, hidden, index, weights)

    reference, model = load(plain, "grouped_mm", False, tmp_path)
    for name in ("third_party", "grouped_mm"):
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, name, dense)
        model.set_experts_implementation(name)
        decodes.clear()
        reference.assert_same(model)
        assert (EXPERTS, 128, 64) in decodes


def test_copies_and_pickles_of_experts(plain: Reference, tmp_path: Path) -> None:
    _, model = load(plain, "grouped_mm", False, tmp_path)
    experts = experts_of(model)[0]
    hidden = torch.randn(3, 64).to(torch.bfloat16)
    routing = torch.tensor([[1, 5], [0, 7], [1, 0]]), torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = experts(hidden, *routing)
        for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            assert type(other) is type(experts)
            assert_same_bits(other(hidden, *routing), expected)
            assert_same_bits(other(hidden, top_k_index=routing[0], top_k_weights=routing[1]), expected)


def test_a_state_of_pieces_does_not_say_where_they_belong(plain: Reference, tmp_path: Path) -> None:
    _, model = load(plain, "eager", True, tmp_path)
    state = model.state_dict()
    other = plain.load()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(FormatError, match=r"sb_piece_\w+: a part of a weight.*save_pretrained"):
            samebits.load_state_dict(other, state, strict=strict)
    for name, tensor in other.state_dict().items():
        assert_same_bits(tensor, before[name])
    samebits.load_state_dict(model, state)  # which has the same
    model.load_state_dict(state)


def test_gpt_oss(tmp_path: Path, expert_decodes, row_decodes) -> None:
    """Its biases are packed too, and its matrices lie the other way round."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=EXPERTS, vocab_size=300, hidden_size=64, intermediate_size=64,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    plain = GptOssForCausalLM(config).to(torch.bfloat16).eval()
    model = copy.deepcopy(plain)
    samebits.compress(model, min_weights=MIN_WEIGHTS)
    tokens = torch.tensor([[5, 7, 9]])
    for implementation in IMPLEMENTATIONS:
        plain.set_experts_implementation(implementation)
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            assert_same_bits(model(tokens).logits, plain(tokens).logits)
    assert (EXPERTS, 128) in expert_decodes  # gate_up_proj_bias
    assert (EXPERTS, 64, 128) in row_decodes
