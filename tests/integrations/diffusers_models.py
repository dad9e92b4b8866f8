"""Small random diffusers models of the kinds that are tested, with inputs, and which of their parameters count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.integrations.models import MIN_WEIGHTS

_TEXT, _WIDE = (1, 8, 64), {"num_attention_heads": 4, "attention_head_dim": 16}
_FLUX = {
    **_WIDE, "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
    "joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
}  # fmt: skip
_FLUX2 = {
    **_WIDE, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 64,
    "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4),
}  # fmt: skip
_AURA = {
    **_WIDE, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 64,
    "caption_projection_dim": 64, "pos_embed_max_size": 64,
}  # fmt: skip
_SD3 = {
    **_WIDE, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "joint_attention_dim": 64, "caption_projection_dim": 64, "pooled_projection_dim": 64, "pos_embed_max_size": 16,
}  # fmt: skip
_WAN = {
    **_WIDE, "in_channels": 4, "out_channels": 4, "text_dim": 64, "freq_dim": 64, "ffn_dim": 96, "num_layers": 2,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
}  # fmt: skip
_QWEN = {
    **_WIDE, "in_channels": 16, "out_channels": 4, "num_layers": 2,
    "joint_attention_dim": 64, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
_HIDREAM = {
    **_WIDE, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
    "caption_channels": [64, 64], "text_emb_dim": 64, "num_routed_experts": 4, "num_activated_experts": 2,
    "axes_dims_rope": (4, 6, 6), "max_resolution": (16, 16), "llama_layers": [0, 1],
}  # fmt: skip
_SDXL = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (32, 64),
    "norm_num_groups": 8, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4), "cross_attention_dim": 64,
    "transformer_layers_per_block": (1, 2), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 112,
}  # fmt: skip

# name: model class, options of its config
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", _FLUX),
    "flux2": ("Flux2Transformer2DModel", _FLUX2),
    "auraflow": ("AuraFlowTransformer2DModel", _AURA),
    "sd3": ("SD3Transformer2DModel", _SD3),
    "wan": ("WanTransformer3DModel", _WAN),
    "qwen-image": ("QwenImageTransformer2DModel", _QWEN),
    "hidream": ("HiDreamImageTransformer2DModel", _HIDREAM),
    "sdxl": ("UNet2DConditionModel", _SDXL),
}
TIME = (
    "time_embedder",
    "time_embedding",
    "time_text_embed",
    "time_guidance_embed",
    "t_embedder",
)  # leave their weights plain
MATRICES = (nn.Linear, nn.Embedding, nn.Conv2d, nn.Conv3d)


def inputs(name: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    time, text = torch.tensor([500.0]).to(dtype), noise(*_TEXT)
    if name == "flux":
        ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3), "guidance": torch.tensor([3.5])}
        tokens = {"hidden_states": noise(1, 16, 16), "encoder_hidden_states": text}
        return {**tokens, **ids, "pooled_projections": noise(1, 64), "timestep": time / 1000}
    if name == "flux2":
        ids = {"img_ids": torch.zeros(16, 4), "txt_ids": torch.zeros(8, 4), "guidance": torch.tensor([3.5])}
        return {"hidden_states": noise(1, 16, 16), "encoder_hidden_states": text, **ids, "timestep": time / 1000}
    if name == "auraflow":
        return {"hidden_states": noise(1, 4, 8, 8), "encoder_hidden_states": text, "timestep": time / 1000}
    if name == "sd3":
        pooled = noise(1, 64)
        return {
            "hidden_states": noise(1, 4, 8, 8),
            "encoder_hidden_states": text,
            "pooled_projections": pooled,
            "timestep": time,
        }
    if name == "wan":
        return {"hidden_states": noise(1, 4, 2, 8, 8), "encoder_hidden_states": text, "timestep": torch.tensor([500])}
    if name == "qwen-image":
        tokens = {"hidden_states": noise(1, 16, 16), "encoder_hidden_states": text, "img_shapes": [[(1, 4, 4)]]}
        return {**tokens, "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.int64), "timestep": time / 1000}
    if name == "hidream":
        texts = {"encoder_hidden_states_t5": text, "encoder_hidden_states_llama3": noise(2, 1, 8, 64)}
        return {"hidden_states": noise(1, 4, 8, 8), **texts, "pooled_embeds": noise(1, 64), "timesteps": time}
    added = {"text_embeds": noise(1, 64), "time_ids": torch.tensor([[8.0, 8, 0, 0, 8, 8]])}
    return {"sample": noise(1, 4, 8, 8), "encoder_hidden_states": text, "added_cond_kwargs": added, "timestep": time}


@dataclass(frozen=True)
class Reference:
    """An uncompressed model as loaded from ``folder``, and its output."""

    name: str
    folder: Path
    model: Any
    output: torch.Tensor

    def load(self, folder: Path | None = None, **options: Any) -> Any:
        return type(self.model).from_pretrained(folder or self.folder, **{"dtype": torch.bfloat16, **options})

    def assert_same(self, model: Any) -> None:
        assert_same_bytes(output(self.name, model), self.output)


def make(
    name: str, folder: Path, stored: torch.dtype = torch.bfloat16, dtype: torch.dtype = torch.bfloat16
) -> Reference:
    """A reference model, saved in ``folder``.

    Args:
        stored: of the checkpoint, whose values are BF16's all the same.
        dtype: to load the model with.
    """
    class_name, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    model_class = getattr(diffusers, class_name)
    model = model_class(**options)
    for parameter in model.parameters():  # some are made zero or empty, and would hide what is wrong before them
        nn.init.normal_(parameter, std=0.02)
    model.to(torch.bfloat16).to(stored).save_pretrained(folder)
    model = model_class.from_pretrained(folder, dtype=dtype)
    return Reference(name, folder, model, output(name, model))


@torch.no_grad()
def output(name: str, model: Any, device: str = "cpu") -> torch.Tensor:
    """Plain weights are put where they are aligned as decoded ones are: on a CPU float32 products depend on that."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            parameter.data = parameter.data.clone()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    result: torch.Tensor = model(**tree_map_only(torch.Tensor, moved, inputs(name, model.dtype)), return_dict=False)[0]
    assert result.isfinite().all()
    assert result.unique().numel() > 100
    return result


def assert_same_bytes(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def eligible(model: nn.Module) -> Iterator[str]:
    """Large parameters of linear layers, embeddings and convolutions, but the first and those that embed the time."""
    first = next(model.named_parameters())[0]
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            counts = isinstance(module, MATRICES) and parameter.numel() >= MIN_WEIGHTS
            if counts and name != first and not set(TIME) & set(name.split(".")):
                yield name
