"""Generation with transformers' ``generate``: compressed beside BF16 in one run, the tokens compared as bytes.

    python benchmarks/generate.py                                       on a GPU, to results/generate.json
    python benchmarks/generate.py --ways compile --batches 1,16 --prompts 128         compiles eight times
    python benchmarks/generate.py --models tiny --device cpu --batches 1 --prompts 16 --name trial

Real configurations, synthetic weights (models.py). On a GPU each form has a process of its own: what runs second in a
process takes longer, its graphs above all. One model at a time is in memory, but for the ways eager and compile: there
a step waits for the host, which is up to twice as slow for some seconds as for others, so both forms are in memory and
generate in turns, TURNS times; ``speed`` is the median turn's, beside BF16's turn before it. Ways:

    eager      a cache that grows, Python for every layer
    compile    a static cache; transformers compiles the step (torch.compile, with CUDA graphs, as it does by itself)
    graphs     a static cache; samebits.cuda_graphs: the step is one CUDA graph of the model as it is
    preferred  as graphs, with the attention that torch prefers, cuDNN's on Hopper: what users get, but BF16's own
               tokens differ from run to run then, so they say nothing

On a CPU "graphs" calls the model where a GPU replays it, and "compile" does not compile. Prompts are never compiled, by
transformers' own rule. Plans are found before (samebits.prepare), and kernels are compiled then.

A case is generated twice, the first time to warm up; only once where its steps take more than LONG seconds. On a GPU
its prompt runs WARM_PROMPTS times before. ``tokens_per_s`` is of all sequences together, from the median time between
two tokens of the last time, without the first SETTLED ones, in which a graph is captured or a step compiled, and from
the slowest and fastest. ``first_token_seconds`` runs from the call of ``generate`` to the first token: median, slowest
and fastest of the last time and, where a case is generated twice, of FIRST_TOKENS more calls for one token. Times are
those of the GPU's own clock (CUDA events). ``peak_bytes`` is torch's max_memory_allocated.
``repeats`` says whether both times gave the same tokens: where BF16's differ, ``same_tokens`` tells nothing. A digest
of each form's tokens tells runs apart; where the forms' differ, ``first_difference`` counts from the prompt's start.
Attention is not cuDNN's but in the way "preferred", for samebits.verify.repeatable_attention's reason. Compiled steps
round where the model does (emulate_precision_casts) and divide sums alike in both forms (deterministic): else that
depends on what Inductor makes one kernel of, and on what was faster when it tried. Both are options of the compiled
call: with every function that is compiled, torch sets torch._inductor.config.deterministic back.

Cases are taken by their number of tokens, small ones first, until each model's share of --seconds is spent; what is
left out is said. Each row is written as it is measured. A row that the file has already of the same case, device and
versions is replaced; all other rows of that device and these versions stay.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from transformers import CompileConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

import samebits
from common import PACKAGES, Timing, add_results, cpu_name, kept_process, significant
from models import MODELS, build, forget, random_prompt
from samebits.integrations.transformers.graphs import decoding_steps
from samebits.kernels.linear.launch import MAX_HOPPER_TOKENS
from samebits.verify import repeatable_attention

WAYS = ("eager", "compile", "graphs", "preferred")
REPLAYED = ("graphs", "preferred")
IN_TURNS = ("eager", "compile")
DEFAULT_MODELS = ("Llama 3.1 8B", "Qwen3 14B")
LONG = 3.0  # seconds
SETTLED = 8  # tokens
TURNS = 4
FIRST_TOKENS = 4
WARM_PROMPTS = 3  # until products of one input are made together
KEYS = ("model", "batch", "prompt", "tokens")
BF16_SHARE = 0.45  # of a model's time
CACHE_STEP = 64  # tokens
INDUCTOR = {"triton.cudagraphs": True, "deterministic": True, "emulate_precision_casts": True}


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Takes the time at the start and when each token is there; stops nothing and waits for nothing."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[Any] = []
        self._mark()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._mark()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _mark(self) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds to the first token, then from each to the next."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(self.marks)]
        return [later - earlier for earlier, later in pairwise(self.marks)]


@dataclass(frozen=True)
class Setting:
    """What is generated, and how."""

    way: str
    batch: int
    prompt: int
    tokens: int

    def options(self, model: Any, device: str) -> dict[str, Any]:
        """What ``generate`` is given besides the prompt."""
        options = {"max_new_tokens": self.tokens, "do_sample": False}
        if self.way == "eager":
            return options
        room = -(-(self.prompt + self.tokens + 1) // CACHE_STEP) * CACHE_STEP  # never full: masks keep their shape
        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=room)
        if self.way == "compile":
            options["compile_config"] = CompileConfig(mode=None, options=INDUCTOR)
        elif self.way in REPLAYED and device != "cuda":  # where transformers would not ask for a compiled step
            options["compile_config"] = CompileConfig()
            options["compile_config"]._compile_all_devices = True
        return options

    @property
    def attention(self) -> AbstractContextManager[None]:
        """What all of it runs in."""
        return nullcontext() if self.way == "preferred" else repeatable_attention()

    def graphs(self, model: Any, device: str) -> AbstractContextManager[None]:
        """What ``generate`` runs in."""
        if self.way not in REPLAYED:
            return nullcontext()
        return samebits.cuda_graphs(model) if device == "cuda" else decoding_steps(model, lambda run: run)


@dataclass(frozen=True)
class Figures:
    """Of one case.

    Attributes:
        first_tokens: seconds until it is there, of each run.
        steps: seconds between two tokens behind the first.
        batch: sequences.
        peak_bytes: on a GPU.
        tokens: all of them, by sequence.
        repeats: whether all runs gave the same tokens; None if there was one run.
        turns: each turn's median of ``steps``, where forms took turns.
    """

    first_tokens: Sequence[float]
    steps: Sequence[float]
    batch: int
    peak_bytes: int | None
    tokens: list[list[int]]
    repeats: bool | None = None
    turns: Sequence[float] = ()

    @property
    def first_token(self) -> Timing:
        return Timing.of(self.first_tokens)

    @property
    def step(self) -> Timing:
        return Timing.of(self.steps)

    @property
    def digest(self) -> str:
        """Of the tokens, to compare runs by."""
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]

    @property
    def rate(self) -> float:
        """Tokens a second, of all sequences."""
        return self.batch / self.step.median

    def columns(self, key: str) -> dict[str, Any]:
        """Of a row."""
        return (
            self.step.rates(f"{key}_tokens_per_s", self.batch)
            | self.first_token.columns(f"{key}_first_token_seconds")
            | {f"{key}_peak_bytes": self.peak_bytes}
        )


def joined(turns: Sequence[Figures]) -> Figures:
    """Those of several turns as of one."""
    first = turns[0]
    return replace(
        first,
        first_tokens=[seconds for turn in turns for seconds in turn.first_tokens],
        steps=[seconds for turn in turns for seconds in turn.steps],
        peak_bytes=max((turn.peak_bytes for turn in turns if turn.peak_bytes), default=None),
        repeats=all(turn.repeats is not False and turn.tokens == first.tokens for turn in turns),
        turns=[turn.step.median for turn in turns],
    )


def measure(model: Any, setting: Setting, device: str) -> Figures:
    """Generate once or twice, behind some runs of the prompt alone."""
    prompt = random_prompt(model, setting.batch, setting.prompt, device)
    for _ in range(WARM_PROMPTS if device == "cuda" else 0):
        first_tokens(model, prompt)
    forget(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options = setting.options(model, device)
    run = partial(model.generate, prompt, attention_mask=torch.ones_like(prompt), **options)
    repeats, again = None, 0

    def timed(**others: Any) -> tuple[list[float], torch.Tensor]:
        if "past_key_values" in options:
            options["past_key_values"].reset()
        return _timed(partial(run, **others), device)

    with setting.graphs(model, device):
        intervals, tokens = timed()
        is_short = Timing.of(settled(intervals)).median * setting.tokens < LONG
        if _as_first_rank(is_short or setting.way == "compile"):
            before, (intervals, tokens), again = tokens, timed(), FIRST_TOKENS
            repeats = torch.equal(tokens, before)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        firsts = [intervals[0], *(timed(max_new_tokens=1)[0][0] for _ in range(again))]
    return Figures(firsts, settled(intervals), setting.batch, peak, tokens.tolist(), repeats)


def _as_first_rank(decision: bool) -> bool:
    """Ranks with clocks of their own would decide differently, and wait for each other for good."""
    decisions = [decision]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(decisions)
    return decisions[0]


def settled(intervals: list[float]) -> list[float]:
    """The steps behind the first ones."""
    steps = intervals[1:]
    return steps[SETTLED:] or steps


def _timed(run: Callable[..., torch.Tensor], device: str) -> tuple[list[float], torch.Tensor]:
    clock = Clock(device)
    tokens = run(stopping_criteria=StoppingCriteriaList([clock]))
    return clock.intervals(), tokens


def ready(name: str, settings: list[Setting], device: str, packed: bool) -> Any:
    """A model that has found its plans and compiled its kernels."""
    start = time.monotonic()
    model = build(name, device, packed)
    if packed:
        prepare(model, settings, device)
    measure(model, replace(settings[0], way="eager", tokens=2), device)  # the first run of all compiles kernels
    print(f"{name}, {kind(packed)}: ready after {time.monotonic() - start:.1f} s", flush=True)
    return model


def prepare(model: Any, settings: list[Setting], device: str) -> None:
    """For what its layers get: of a prompt, the last one gets a token of each sequence."""
    samebits.prepare(model, sorted({setting.batch for setting in settings}))
    for batch, length in sorted({(setting.batch, setting.prompt) for setting in settings}):
        if batch * length <= MAX_HOPPER_TOKENS:  # else nothing has a plan
            samebits.prepare(model, call=partial(first_tokens, model, random_prompt(model, batch, length, device)))


def first_tokens(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """One for each sequence of a prompt [batch, length]; all of them [batch, length + 1]."""
    tokens: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False
    )
    return tokens


def measure_said(name: str, model: Any, setting: Setting, device: str, packed: bool) -> Figures:
    start = time.monotonic()
    with setting.attention:
        figures = measure(model, setting, device)
    said = f"first token {figures.first_token.median:.3f} s, then {figures.rate:.1f} tokens/s"
    print(f"{name}, {kind(packed)}, {setting}: {said}; took {time.monotonic() - start:.1f} s", flush=True)
    return figures


def until(deadline: float, name: str, settings: list[Setting]) -> Iterator[Setting]:
    """Those that can be begun before; says which are left."""
    for number, setting in enumerate(settings):
        if time.monotonic() > deadline:
            print(f"{name}: no time left for", *settings[number:], sep="\n  ", flush=True)
            break
        yield setting


_held: dict[bool, Any] = {}  # the model of a process that takes turns, by whether it is packed


def hold(name: str, settings: list[Setting], device: str, packed: bool) -> None:
    _held[packed] = ready(name, settings, device, packed)


def measure_held(name: str, setting: Setting, device: str, packed: bool) -> Figures:
    return measure_said(name, _held[packed], setting, device, packed)


def measure_each(
    name: str, settings: list[Setting], device: str, packed: bool, deadline: float, separate: bool
) -> Iterator[Figures]:
    """One form, of as many settings as there is time for, on a model that is gone afterwards."""
    with kept_process(separate) as call, ExitStack() as stack:
        stack.callback(forget, device)
        stack.callback(_held.clear)
        call(hold, name, settings, device, packed)
        for setting in until(deadline, name, settings):
            yield call(measure_held, name, setting, device, packed)


def measure_in_turns(
    name: str, settings: list[Setting], device: str, deadline: float, separate: bool
) -> Iterator[tuple[Setting, Figures, Figures]]:
    """BF16 and compressed, each in a process that keeps its model."""
    with ExitStack() as stack:
        processes = {packed: stack.enter_context(kept_process(separate)) for packed in (False, True)}
        stack.callback(_held.clear)
        for packed, call in processes.items():
            call(hold, name, settings, device, packed)
        for setting in until(deadline, name, settings):
            turns: dict[bool, list[Figures]] = {packed: [] for packed in processes}
            for _ in range(TURNS):
                for packed, call in processes.items():
                    turns[packed].append(call(measure_held, name, setting, device, packed))
            yield setting, joined(turns[False]), joined(turns[True])


def rows(
    name: str, settings: list[Setting], device: str, seconds: float, separate: bool = False
) -> Iterator[dict[str, Any]]:
    """Each setting in BF16 beside compressed; ``separate``: in processes of their own."""
    deadline = time.monotonic() + seconds
    if in_turns := [setting for setting in settings if setting.way in IN_TURNS]:
        for found in measure_in_turns(name, in_turns, device, deadline, separate):
            yield row_of(name, *found)
        forget(device)
    if others := [setting for setting in settings if setting.way not in IN_TURNS]:
        middle = time.monotonic() + BF16_SHARE * (deadline - time.monotonic())
        plain = list(measure_each(name, others, device, False, middle, separate))
        packed = measure_each(name, others[: len(plain)], device, True, deadline, separate) if plain else ()
        for ours, bf16, setting in zip(packed, plain, others, strict=False):
            yield row_of(name, setting, bf16, ours)


def row_of(name: str, setting: Setting, bf16: Figures, ours: Figures) -> dict[str, Any]:
    row: dict[str, Any] = {"table": setting.way, "model": name}
    row |= {key: getattr(setting, key) for key in ("batch", "prompt", "tokens")}
    for key, found in (("bf16", bf16), ("samebits", ours)):
        row |= found.columns(key) | {f"{key}_repeats": found.repeats, f"{key}_tokens_digest": found.digest}
    return row | speed(bf16, ours) | differences(bf16.tokens, ours.tokens)


def speed(bf16: Figures, ours: Figures) -> dict[str, float]:
    """Beside BF16; of turns the median one's, each beside the turn before it."""
    found = sorted(before / after for before, after in zip(bf16.turns, ours.turns, strict=True))
    if not found:
        return {"speed": significant(ours.rate / bf16.rate)}
    spread = {"speed_slowest": significant(found[0]), "speed_fastest": significant(found[-1])}
    return {"speed": significant(median(found)), **spread}


def differences(bf16: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> dict[str, int | bool | None]:
    """How many sequences are others, and where the first difference is."""
    places = [
        next((i for i, (left, right) in enumerate(zip(*both, strict=True)) if left != right), None)
        for both in zip(bf16, ours, strict=True)
    ]
    found = [place for place in places if place is not None]
    return {
        "same_tokens": ours == bf16,
        "different_sequences": len(found),
        "first_difference": min(found, default=None),
    }


def kind(packed: bool) -> str:
    return "samebits" if packed else "BF16"


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="generate")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(DEFAULT_MODELS), help=", ".join(MODELS)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["eager", "graphs"], help=", ".join(WAYS))
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64, 128])
    parser.add_argument("--prompts", type=numbers, default=[128, 2048])
    parser.add_argument("--tokens", type=int, default=32, help="generated, of each sequence")
    parser.add_argument("--seconds", type=float, default=300, help="for all models together")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    settings = [Setting(*case, options.tokens) for case in product(options.ways, options.batches, options.prompts)]
    settings.sort(key=lambda setting: setting.batch * setting.prompt)
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    separate = options.device == "cuda"
    start, all_same = time.monotonic(), True
    for number, name in enumerate(options.models):
        left = options.seconds - (time.monotonic() - start)
        for row in rows(name, settings, options.device, left / (len(options.models) - number), separate):
            all_same &= row["same_tokens"] or row["table"] == "preferred"
            print(add_results(options.name, device, [row], KEYS, (*PACKAGES, "transformers")), flush=True)
    return int(not all_same)


if __name__ == "__main__":
    sys.exit(main())
