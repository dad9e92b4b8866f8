"""One denoising step of diffusion models: compressed beside BF16 in one run, the outputs compared as bytes.

    python benchmarks/diffusion.py                                       all of it on a GPU, to results/diffusion.json
    python benchmarks/diffusion.py --models FLUX.1-dev --ways eager
    python benchmarks/diffusion.py --models tiny --device cpu --ways eager --name trial

Transformers and UNets in their real configurations, synthetic weights (common.synthetic_matrix), random latents and
texts, batch 1, or 2 with guidance. On a GPU BF16 and compressed have a process each; text encoders and autoencoders are
not there. Ways to run:

    eager      as a pipeline calls the model, with other latents in each step: a router gives experts other numbers then
    replayed   the same inside of samebits.cuda_graphs
    graphs     the whole step as one CUDA graph, by itself

Where both models fit, they are timed in the compressed one's process at the end, in turns of some seconds each
(gpu.time_turns), since a GPU at its power limit is some percent slower or faster a minute later. Elsewhere each time is
the median of REPEATS steps behind WARM_SECONDS of others, so that the clock has fallen to where it stays; on a CPU
behind one. peak_bytes is what torch allocated at most, weights included, in the process that has one model. Results are
joined: models that are not run again stay in the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import diffusers
import torch
from torch import nn

import samebits
from common import PACKAGES, Timing, add_results, cpu_name, runner, significant, synthetic_matrix, time_calls
from gpu import captured, time_turns
from samebits.integrations.replayed import MAX_FIRST_CALLS
from samebits.kernels.replay import fast_replay

Inputs = dict[str, Any]  # tensors, and dicts of them; but for sizes
WAYS = ("eager", "replayed", "graphs")
REPEATS = 9
WARM_SECONDS = 1.5
CAPTURED_BY = MAX_FIRST_CALLS + 1  # steps, inside of samebits.cuda_graphs


def flux_inputs(config: Any, height: int, width: int, text: int) -> Inputs:
    """Latents of 8 x 8 pixels, 2 x 2 of them to a token."""
    tokens = (height // 16) * (width // 16)
    return {
        "hidden_states": torch.randn(1, tokens, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(height // 16.0), torch.arange(width // 16.0)),
        "txt_ids": torch.zeros(text, 3),
    }


def flux2_inputs(config: Any, height: int, width: int, text: int) -> Inputs:
    """As FLUX.1's, without a vector of the whole text; positions have four numbers."""
    zero, rows, columns = torch.zeros(1), torch.arange(height // 16.0), torch.arange(width // 16.0)
    return {
        "hidden_states": torch.randn(1, (height // 16) * (width // 16), config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.cartesian_prod(zero, rows, columns, zero),
        "txt_ids": torch.cartesian_prod(zero, zero, zero, torch.arange(float(text))),
    }


def qwen_inputs(config: Any, height: int, width: int, text: int) -> Inputs:
    """Latents of 8 x 8 pixels, 2 x 2 of them to a token; a text without padding."""
    rows, columns = height // 16, width // 16
    return {
        "hidden_states": torch.randn(1, rows * columns, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, rows, columns)]],
    }


def hidream_inputs(config: Any, height: int, width: int, text: int) -> Inputs:
    """Two texts of ``text`` tokens each, one of them by layer of the language model that read it."""
    t5, llama = config.caption_channels
    return {
        "hidden_states": torch.randn(1, config.in_channels, height // 8, width // 8),
        "encoder_hidden_states_t5": torch.randn(1, text, t5),
        "encoder_hidden_states_llama3": torch.randn(len(config.llama_layers), 1, text, llama),
        "pooled_embeds": torch.randn(1, config.text_emb_dim),
        "timesteps": torch.tensor([500.0]),
    }


def sdxl_inputs(config: Any, height: int, width: int, text: int, batch: int) -> Inputs:
    """With guidance, as sd3_inputs; six numbers say which size and part of an image is meant."""
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": torch.randn(1, config.in_channels, height // 8, width // 8).repeat(batch, 1, 1, 1),
        "encoder_hidden_states": torch.randn(batch, text, config.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(batch, pooled),
            "time_ids": torch.tensor([height, width, 0.0, 0.0, height, width]).repeat(batch, 1),
        },
        "timestep": torch.tensor(500.0),
    }


def sd3_inputs(config: Any, height: int, width: int, text: int, batch: int = 1) -> Inputs:
    """With guidance, a pipeline asks for the same latents twice: with a negative text and with the prompt."""
    return {
        "hidden_states": torch.randn(1, config.in_channels, height // 8, width // 8).repeat(batch, 1, 1, 1),
        "encoder_hidden_states": torch.randn(batch, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim),
        "timestep": torch.full((batch,), 500.0),
    }


def wan_inputs(config: Any, height: int, width: int, text: int, frames: int) -> Inputs:
    return {
        "hidden_states": torch.randn(1, config.in_channels, 1 + frames // 4, height // 8, width // 8),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim),
        "timestep": torch.tensor([500]),
    }


@dataclass(frozen=True)
class Model:
    """A transformer and what it denoises.

    Attributes:
        kind: its class in diffusers.
        config: its options where they differ from that class's defaults.
        shape: of the image or video in pixels, tokens of text and the batch, as ``inputs`` takes them.
        ways: to run it; steps of some seconds gain nothing from a graph.
    """

    kind: str
    config: dict[str, Any]
    inputs: Callable[..., Inputs]
    shape: dict[str, int]
    ways: tuple[str, ...] = WAYS

    @property
    def input_text(self) -> str:
        frames = f" x {self.shape['frames']} frames" if self.shape.get("frames", 1) > 1 else ""
        batch = f", a batch of {self.shape['batch']}" if self.shape.get("batch", 1) > 1 else ""
        return f"{self.shape['width']} x {self.shape['height']}{frames}, {self.shape['text']} text tokens{batch}"

    @property
    def config_text(self) -> str:
        """Where the weights' shapes come from."""
        options = ", ".join(f"{key}={value}" for key, value in self.config.items())
        return f"{self.kind}({options})"


SD35_LARGE = Model(
    "SD3Transformer2DModel",
    {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
     "qk_norm": "rms_norm"},
    sd3_inputs,
    {"height": 1024, "width": 1024, "text": 333},
)  # fmt: skip
MODELS = {
    "FLUX.1-dev": Model(
        "FluxTransformer2DModel", {"guidance_embeds": True}, flux_inputs, {"height": 1024, "width": 1024, "text": 512}
    ),
    "FLUX.2-dev": Model("Flux2Transformer2DModel", {}, flux2_inputs, {"height": 1024, "width": 1024, "text": 512}),
    "HiDream-I1": Model(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096],
         "axes_dims_rope": (64, 32, 32), "llama_layers": [min(layer, 31) for layer in range(48)]},
        hidream_inputs,
        {"height": 1024, "width": 1024, "text": 128},
        ("eager",),  # it asks for the number of tokens of each expert
    ),
    "Qwen-Image": Model("QwenImageTransformer2DModel", {}, qwen_inputs, {"height": 1024, "width": 1024, "text": 512}),
    "Stable Diffusion XL, with guidance": Model(
        "UNet2DConditionModel",
        {"sample_size": 128, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
         "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
         "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
         "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
         "projection_class_embeddings_input_dim": 2816},
        sdxl_inputs,
        {"height": 1024, "width": 1024, "text": 77, "batch": 2},
    ),
    "Stable Diffusion 3.5 large": SD35_LARGE,
    "Stable Diffusion 3.5 large, with guidance": replace(SD35_LARGE, shape={**SD35_LARGE.shape, "batch": 2}),
    "Wan 2.1 14B, an image": Model(
        "WanTransformer3DModel", {}, wan_inputs, {"height": 1024, "width": 1024, "text": 512, "frames": 1}
    ),
    "Wan 2.1 14B, a video": Model(
        "WanTransformer3DModel", {}, wan_inputs, {"height": 480, "width": 832, "text": 512, "frames": 81}, ("eager",)
    ),
    "tiny": Model(
        "FluxTransformer2DModel",
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16,
         "in_channels": 16, "joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": (4, 4, 8),
         "guidance_embeds": True},
        flux_inputs,
        {"height": 64, "width": 64, "text": 8},
    ),
    "tiny FLUX.2": Model(
        "Flux2Transformer2DModel",
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 16,
         "joint_attention_dim": 64, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        flux2_inputs,
        {"height": 64, "width": 64, "text": 8},
    ),
    "tiny HiDream": Model(
        "HiDreamImageTransformer2DModel",
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16, "patch_size": 2,
         "in_channels": 4, "out_channels": 4, "caption_channels": [64, 64], "text_emb_dim": 64,
         "axes_dims_rope": (4, 6, 6), "max_resolution": (8, 8), "llama_layers": [0, 1]},
        hidream_inputs,
        {"height": 64, "width": 64, "text": 8},
    ),
    "tiny Qwen-Image": Model(
        "QwenImageTransformer2DModel",
        {"num_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 16, "out_channels": 4,
         "joint_attention_dim": 64, "axes_dims_rope": (4, 4, 8)},
        qwen_inputs,
        {"height": 64, "width": 64, "text": 8},
    ),
    "tiny Stable Diffusion 3.5, with guidance": Model(
        "SD3Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 4,
         "attention_head_dim": 16, "joint_attention_dim": 64, "caption_projection_dim": 64,
         "pooled_projection_dim": 64, "pos_embed_max_size": 8, "qk_norm": "rms_norm"},
        sd3_inputs,
        {"height": 64, "width": 64, "text": 8, "batch": 2},
    ),
    "tiny Stable Diffusion XL, with guidance": Model(
        "UNet2DConditionModel",
        {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4),
         "cross_attention_dim": 64, "transformer_layers_per_block": (1, 2), "use_linear_projection": True,
         "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
         "projection_class_embeddings_input_dim": 112},
        sdxl_inputs,
        {"height": 64, "width": 64, "text": 8, "batch": 2},
    ),
    "tiny Wan": Model(
        "WanTransformer3DModel",
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 64,
         "freq_dim": 64, "ffn_dim": 96, "num_layers": 1},
        wan_inputs,
        {"height": 64, "width": 64, "text": 8, "frames": 5},
    ),
}  # fmt: skip
DEFAULT_MODELS = (
    "FLUX.1-dev",
    "FLUX.2-dev",
    "HiDream-I1",
    "Qwen-Image",
    "Stable Diffusion XL, with guidance",
    "Stable Diffusion 3.5 large",
    "Stable Diffusion 3.5 large, with guidance",
    "Wan 2.1 14B, an image",
    "Wan 2.1 14B, a video",
)


def build(model: Model, device: str, packed: bool) -> Any:
    """A transformer with synthetic weights, the same whether packed or not; what diffusers keeps in float32 is so."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(diffusers, model.kind)(**model.config)
    torch.set_default_dtype(usual)
    made.to(device)  # tables made by NumPy
    in_float32 = set(made._keep_in_fp32_modules or ())
    for seed, (name, parameter) in enumerate(made.named_parameters()):
        parameter.requires_grad_(False)
        if parameter.dim() >= 2:
            rows, columns = parameter.shape[0], parameter[0].numel()
            parameter.copy_(synthetic_matrix(rows, columns, seed=seed, device=device).view(parameter.shape))
        if in_float32 & set(name.split(".")):
            parameter.data = parameter.float()
    if packed:
        samebits.compress(made)
    return made.eval()


def inputs_of(model: Model, config: Any, device: str) -> Inputs:
    """In BF16, but for positions and whole numbers."""
    torch.manual_seed(1)
    made = model.inputs(config, **model.shape)

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(key, each) for key, each in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        is_exact = name.endswith("ids") or not value.is_floating_point()
        return value.to(device, None if is_exact else torch.bfloat16)

    return {name: placed(name, value) for name, value in made.items()}


@dataclass(frozen=True)
class Figures:
    """Of the steps of one model, run in one way.

    Attributes:
        peak_bytes: on a GPU.
        output: on the CPU.
        repeats: whether a second step had the same output: where BF16's has not, a comparison says nothing.
    """

    timing: Timing
    peak_bytes: int | None
    output: torch.Tensor
    repeats: bool


@torch.no_grad()
def measure(module: nn.Module, inputs: Inputs, way: str, device: str) -> Figures:
    step = partial(module, **inputs, return_dict=False)
    if device == "cpu":
        output = step()[0]
        return Figures(time_calls(step, repeats=REPEATS), None, output, same_bytes(output, step()[0]))
    with steps_of(module, way):
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run: Callable[[], Any] = partial(step_of_others, module, inputs)
        if way == "graphs":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = step()[0]
            run = graph.replay

        def whole() -> None:
            run()
            torch.cuda.synchronize()

        start = time.perf_counter()
        while time.perf_counter() < start + WARM_SECONDS:
            whole()
        timing = time_calls(whole, repeats=REPEATS)
        peak = torch.cuda.max_memory_allocated()
        outputs = []
        for _ in range(2):
            if way == "graphs":
                graph.replay()
            else:
                output = step()[0]
            outputs.append(output.cpu())
        return Figures(timing, peak, outputs[0], same_bytes(*outputs))


def steps_of(module: nn.Module, way: str) -> AbstractContextManager[None]:
    """What steps of the module run in."""
    return samebits.cuda_graphs(module) if way == "replayed" else nullcontext()


def step_of_others(module: nn.Module, inputs: Inputs) -> Any:
    """A step with other latents, which are the first of the inputs."""
    name, latents = next(iter(inputs.items()))
    return module(**{**inputs, name: torch.randn_like(latents)}, return_dict=False)


@torch.no_grad()
def time_in_turns(model: Model, packed: nn.Module, inputs: Inputs, ways: list[str]) -> dict[str, list[Timing]]:
    """Of a step of BF16 and of this one, in each way; where both fit."""
    found: dict[str, list[Timing]] = {}
    with suppress(torch.OutOfMemoryError):
        plain = build(model, "cuda", packed=False)
        modules = (plain, packed)
        for way in ways:
            if way == "graphs":
                steps = [partial(module, **inputs, return_dict=False) for module in modules]
                found[way] = time_turns([fast_replay(captured([step])) for step in steps])
            else:
                with ExitStack() as stack:
                    for module in modules:
                        stack.enter_context(steps_of(module, way))
                        for _ in range(CAPTURED_BY if way == "replayed" else 0):
                            step_of_others(module, inputs)
                    found[way] = time_turns([partial(step_of_others, module, inputs) for module in modules])
    return found


class Measured(NamedTuple):
    """Of one model.

    Attributes:
        figures: of each way.
        bits: per packed weight.
        in_turns: of a step of BF16 and of a compressed one, in the ways in which they were timed so.
    """

    figures: list[Figures]
    bits: float
    in_turns: dict[str, list[Timing]]


def measure_all(name: str, ways: list[str], device: str, packed: bool) -> Measured:
    """Every way on one model; BF16 beside the packed one, in turns, at the end."""
    model = MODELS[name]
    module = build(model, device, packed)
    bits = 0.0
    inputs, found = inputs_of(model, module.config, device), []
    if packed:
        bits = samebits.compress(module).bits_per_weight  # nothing is left to pack: a report
        with torch.no_grad():
            samebits.prepare(module, call=lambda: module(**inputs))
    for way in ways:
        found.append(measure(module, inputs, way, device))
        print(name, "samebits" if packed else "BF16", way, f"{found[-1].timing.median:.4f} s", flush=True)
    in_turns = time_in_turns(model, module, inputs, ways) if packed and device == "cuda" else {}
    for way, timings in in_turns.items():
        print(name, way, "in turns", *(f"{timing.median:.4f} s" for timing in timings), flush=True)
    return Measured(found, bits, in_turns)


def rows(
    name: str, ways: list[str], device: str, run: Callable[..., Callable[[], Any]] = partial
) -> Iterator[dict[str, Any]]:
    """BF16 first, then compressed, each way beside the other; ``run`` is partial or in_own_process."""
    plain, *_ = run(measure_all, name, ways, device, packed=False)()
    packed, bits, in_turns = run(measure_all, name, ways, device, packed=True)()
    model = MODELS[name]
    for way, left, right in zip(ways, plain, packed, strict=True):
        if way in in_turns:
            both = zip((left, right), in_turns[way], strict=True)
            left, right = (replace(each, timing=timing) for each, timing in both)
        yield {
            "table": "steps", "model": name, "config": model.config_text, "input": model.input_text, "way": way,
            "bits_per_weight": significant(bits), "in_turns": way in in_turns,
            **left.timing.columns("bf16_seconds"), **right.timing.columns("samebits_seconds"),
            "more_time": significant(right.timing.median / left.timing.median - 1),
            "bf16_peak_bytes": left.peak_bytes, "samebits_peak_bytes": right.peak_bytes,
            "less_memory": None if not left.peak_bytes or not right.peak_bytes
            else significant(1 - right.peak_bytes / left.peak_bytes),
            "same_output": same_bytes(left.output, right.output),
            "bf16_repeats": left.repeats, "samebits_repeats": right.repeats,
        }  # fmt: skip


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Of outputs that say something: no infinities, not a constant."""
    if not left.isfinite().all() or left.unique().numel() < 100:
        raise SystemExit("the BF16 model's output is degenerate, so there is nothing worth comparing")
    is_alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return is_alike and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="diffusion")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    found: list[dict[str, Any]] = []
    for name in options.models:
        ways = [way for way in options.ways if way in MODELS[name].ways]
        run = runner(options.device)
        found += rows(name, ways, options.device, run)
        print(add_results(options.name, device, found, ("model", "way"), (*PACKAGES, "diffusers")))
    return int(not all(row["same_output"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
