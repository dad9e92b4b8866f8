"""Where a step of a diffusion model goes: BF16 and compressed in turns, their kernels, and a layer's products in order.

    python benchmarks/step_profile.py [--models FLUX.1-dev "Qwen-Image"] [--layers 4]
    SAMEBITS_PLANS=off python benchmarks/step_profile.py                                 every weight decoded first

It prints and writes nothing. The models are diffusion.py's with few layers, so that both forms fit beside each other
and are soon there. Their steps are graphs whose replays alternate, so the GPU's clock is the same for both: what more
power costs a whole model, whose step takes longer than the clock takes to follow, is not in these times.

A kernel's time counts from the end of the one in front, where it starts before that. Of the middle of a step, from one
attention to the second behind it (two layers, or one that has two), products are shown in their order, what is decoded
for them, and attention: behind "decode" a weight was decoded first; where a BF16 kernel multiplies without, it was
decoded ahead by a launch before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import diffusers
import torch

import samebits
from diffusion import DEFAULT_MODELS, MODELS, REPEATS, WARM_SECONDS, Model, build, inputs_of, same_bytes
from gpu import captured, time_graphs
from token_profile import KINDS, Kernel, by_kind, by_name, kernels_of, kind_of, one_by_one

LAYER_OPTIONS = {"num_layers": 1, "num_single_layers": 2}  # of a configuration: how many of each for one of ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DEFAULT_MODELS, default=["FLUX.1-dev"])
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    for name in options.models:
        measure(name, shortened(MODELS[name], options.layers))
    return 0


def shortened(model: Model, layers: int) -> Model:
    """With so many layers, and twice as many single ones where there are such; a UNet as it is."""
    known = signature(getattr(diffusers, model.kind)).parameters
    few: dict[str, Any] = {option: layers * times for option, times in LAYER_OPTIONS.items() if option in known}
    if "llama_layers" in model.config:  # one for each layer
        few["llama_layers"] = model.config["llama_layers"][: sum(few.values())]
    return replace(model, config={**model.config, **few})


@torch.no_grad()
def measure(name: str, model: Model) -> None:
    """Prints what there is to say of one model.

    Raises:
        SystemExit: the outputs of the two forms differ.
    """
    forms = {"BF16": build(model, "cuda", packed=False), "samebits": build(model, "cuda", packed=True)}
    inputs = inputs_of(model, forms["BF16"].config, "cuda")
    samebits.prepare(forms["samebits"], call=lambda: forms["samebits"](**inputs))
    steps: list[Callable[[], Any]] = [partial(form, **inputs, return_dict=False) for form in forms.values()]
    if not same_bytes(*(step()[0] for step in steps)):
        raise SystemExit(f"{name}: the outputs differ")
    plain, packed = time_graphs([[step] for step in steps], REPEATS, WARM_SECONDS)
    more = 100 * (packed.median / plain.median - 1)
    print(f"{name}, {model.config_text}: BF16 {1e3 * plain.median:.2f} ms, samebits {1e3 * packed.median:.2f} ms "
          f"({more:+.1f} %)", flush=True)  # fmt: skip
    found = [list(one_by_one(kernels_of(captured([step]).replay, "cuda"))) for step in steps]
    for line in lines(dict(zip(forms, found, strict=True))):
        print(f"  {line}", flush=True)


def lines(kernels: dict[str, list[Kernel]]) -> Iterator[str]:
    """What there is to say of each form's kernels, which are one_by_one's."""
    kinds = {form: by_kind(own) for form, own in kernels.items()}
    yield f"{'milliseconds of':16}" + "".join(f"{form:>10}" for form in kinds)
    for kind in KINDS:
        yield f"{kind:16}" + "".join(f"{own[kind]:10.3f}" for own in kinds.values())
    for form, own in kernels.items():
        yield f"{form}, by kernel:"
        for row in by_name(own):
            yield f"  {row['launches']:5} x {row['microseconds']:8.1f} us  {row['kernel']}"
        yield f"{form}, in the middle:"
        for name, start, end in middle(own):
            yield f"  {end - start:8.1f} us  {name[:60]}"


def middle(kernels: list[Kernel]) -> list[Kernel]:
    """Products, decoding and attention between two attentions and the one between them."""
    found = [kernel for kernel in kernels if kind_of(kernel[0]) != "other"]
    attentions = [number for number, (name, _, _) in enumerate(found) if kind_of(name) == "attention"]
    first = (len(attentions) - 2) // 2
    return found[attentions[first] : attentions[first + 2]] if len(attentions) > 2 else found


if __name__ == "__main__":
    raise SystemExit(main())
