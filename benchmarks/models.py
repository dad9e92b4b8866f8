"""Language models with real configurations and synthetic weights, made on a device without any file.

Weights come from common.synthetic_matrix, module by module, and a packed model packs each at once, so that it never
exists in BF16. One model must be gone before the next is made: ``forget`` sees to what holds on to it.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import transformers

import samebits
from common import synthetic_matrix
from samebits.nn.spared import reason_to_spare, spare

LLAMA = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# model_type, and what its config says besides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "Llama 3.3 70B": ("llama", LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "Qwen3 14B": ("qwen3", {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    "Mistral Nemo 12B": ("mistral", {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
        "sliding_window": None,
    }),
    "Mistral Small 24B": ("mistral", {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 32768,
        "sliding_window": None,
    }),
    "Qwen3 30B-A3B": ("qwen3_moe", MIXTURE | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }),
    "tiny mixture": ("qwen3_moe", MIXTURE | {
        "hidden_size": 640, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 640,
    }),
    "tiny": ("llama", LLAMA | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }),
}  # fmt: skip


def config_of(name: str) -> Any:
    """The config of a model of MODELS."""
    kind, options = MODELS[name]
    return transformers.AutoConfig.for_model(kind, **options, tie_word_embeddings=False, dtype="bfloat16")


def build(name: str, device: str, packed: bool, *, tight: bool = False) -> Any:
    """A model with synthetic weights, the same whether packed or not; no token ends what it generates.

    With ``tight`` no room is left between weights in the GPU's memory, which takes some seconds more.
    """
    config, give_back = config_of(name), torch.cuda.empty_cache if tight and device == "cuda" else lambda: None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for path, module in list(model.named_modules()):
        if module._buffers:  # rotary frequencies, from the config
            with torch.device(device):
                model.set_submodule(path, type(module)(config=config))
    spare(model)  # whatever samebits.compress of all of it would leave, module by module
    left = {
        module: [leaf for leaf in module._parameters if reason_to_spare(module, leaf)] for module in model.modules()
    }
    for seed, module in enumerate(model.modules()):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[leaf] = torch.nn.Parameter(synthetic(parameter.shape, seed, device))
                give_back()
        own = sum(parameter is not None for parameter in module._parameters.values())
        if packed and own and own == len(list(module.parameters())):
            samebits.compress(module, exclude=left[module])  # which gives back, too
    model.generation_config.eos_token_id = None
    return model.eval()


def synthetic(shape: torch.Size, seed: int, device: str) -> torch.Tensor:
    """Matrices, and stacks of them, are random; what has one dimension belongs to norms."""
    if len(shape) > 1:
        return synthetic_matrix(shape[:-1].numel(), shape[-1], seed=seed, device=device).view(shape)
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def random_prompt(model: Any, batch: int, length: int, device: str) -> torch.Tensor:
    """The same random tokens each time: int64 [batch, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(device)


def forget(device: str) -> None:
    """Give back what compiled code, graphs and torch's allocator hold; the caller's own names must be deleted first."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
