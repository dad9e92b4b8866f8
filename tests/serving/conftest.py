"""Models for these tests. vLLM has an environment of its own (make test-vllm); elsewhere nothing here is collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.inspected import MARK

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

HERE = Path(__file__).parent
KING_JAMES = HERE.parents[1] / "examples" / "king-james" / "model"
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [300, 20], [40, 41, 42, 43, 44]]
HAS_GPU = torch.cuda.is_available()
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28} if HAS_GPU else {}  # others are beside it

Gave = dict[str, Any]


def run(model: Path, **arguments: Any) -> Gave:
    """What an engine gave."""
    gave = attempt(model, **arguments)
    if isinstance(gave, str):
        pytest.fail(f"vLLM has not started:\n{gave}", pytrace=False)
    return gave


def refusal(model: Path, **arguments: Any) -> str:
    """All that an engine said that did not start."""
    said = attempt(model, **arguments)
    assert isinstance(said, str), "the engine started"
    return said


def attempt(
    model: Path,
    *,
    rank_cores: Sequence[int] = (),
    adapter: Path | None = None,
    sleep: bool = False,
    reload: bool = False,
    update: bool = False,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    prompt_logprobs: int | None = 3,
    **arguments: Any,
) -> Gave | str:
    """What an engine gave; or, where it ended otherwise, all that it said."""
    options = {
        "model": str(model), "arguments": MEMORY | arguments, "prompts": prompts, "prompt_logprobs": prompt_logprobs,
        "adapter": adapter and str(adapter), "sleep": sleep, "reload": reload, "update": update,
    }  # fmt: skip
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if rank_cores else "0"}
    if rank_cores:
        cores = "|".join(map(str, rank_cores))
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    command = [sys.executable, str(HERE / "engine.py"), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    gave = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not gave:
        return done.stdout + done.stderr
    found: Gave = json.loads(gave[0])
    return found


@pytest.fixture(scope="session")
def plain() -> Callable[..., Gave]:
    """What vLLM gives for a model without samebits; asked for once."""
    known: dict[str, Gave] = {}

    def of(model: Path, **arguments: Any) -> Gave:
        key = repr((model, sorted(arguments.items())))
        if key not in known:
            known[key] = run(model, **arguments)
        return known[key]

    return of


def save(config: Any, folder: Path) -> Path:
    """A model with random BF16 weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # some versions of torch make BF16 numbers of BF16 ones, many of them zeros
        mean, deviation = (0, 0.06) if parameter.dim() > 1 else (1, 0.2)
        parameter.data.copy_(torch.randn(parameter.shape) * deviation + mean)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose head is not its embedding, and whose heads two ranks can share."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
        attention_bias=True,
    )  # fmt: skip
    return save(config, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with enough layers for Inductor to store a sum of residuals in one of them."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    return save(config, tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts, large enough for fused products, also of each of two ranks."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=640, intermediate_size=256, moe_intermediate_size=1280, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=256,
    )  # fmt: skip
    return save(config, tmp_path_factory.mktemp("mixture"))
