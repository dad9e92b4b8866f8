"""A diffusers pipeline with packed weights: compressed while loading, saved, loaded again, the same image.

    python examples/diffusion_pipeline.py [FOLDER]

FOLDER is a pipeline with BF16 weights, by default a tiny FLUX.1 with random ones, so that it runs anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PipelineQuantizationConfig,
)
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import samebits

TOKENIZER = Path(__file__).resolve().parent / "king-james" / "model"


def main(source: str, folder: str) -> None:
    config = samebits.SamebitsConfig(min_weights=1024)
    parts = dict.fromkeys(["transformer", "text_encoder", "text_encoder_2"], config)
    packed = DiffusionPipeline.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=PipelineQuantizationConfig(quant_mapping=parts)
    )
    packed.save_pretrained(folder)
    packed = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)  # loads as any pipeline does

    plain = DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16)
    images = [draw(pipeline) for pipeline in (plain, packed)]
    print(str(packed.transformer.hf_quantizer.report).splitlines()[0])
    print("the same image, byte for byte:", images[0] == images[1])


def draw(pipeline: DiffusionPipeline) -> bytes:
    seed = torch.Generator().manual_seed(0)
    options = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
    return pipeline("In the beginning", generator=seed, **options).images[0].tobytes()


def tiny_pipeline() -> FluxPipeline:
    """A FLUX.1 of a few thousand random weights."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, pad_token="<pad>", model_max_length=16)
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    clip = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    t5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "feed_forward_proj": "gated-gelu"}
    blocks = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16}
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=CLIPTextModel(CLIPTextConfig(**clip, **tokens, max_position_embeddings=16)),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(T5Config(**t5, **tokens)),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            **blocks, in_channels=16, joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(4, 4, 8)
        ),
        vae=AutoencoderKL(block_out_channels=(16, 16), latent_channels=4, norm_num_groups=2, shift_factor=0.1,
                          down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    )  # fmt: skip
    return pipeline.to(torch.bfloat16)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        if len(sys.argv) < 2:
            tiny_pipeline().save_pretrained(f"{scratch}/plain")
        main(sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/plain", f"{scratch}/packed")
