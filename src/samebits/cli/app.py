"""The commands and their options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from samebits.format.names import MIN_WEIGHTS

app = typer.Typer(
    name="samebits",
    help="Run any BF16 model in two thirds of the memory, with the same bits out.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class Cast(StrEnum):
    """What --cast rounds to."""

    BF16 = "bf16"


class Format(StrEnum):
    """What compress writes."""

    SAMEBITS = "samebits"
    DF11 = "df11"


class Device(StrEnum):
    """Where the work is done."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def _given(text: str) -> str:
    """Refuse an empty path, as an unset variable leaves one: it would be the folder at hand, or none."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def _path(text: str) -> Path:
    return Path(_given(text))


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        parser=_given,
        help="Model folder, .safetensors file, or on the hub OWNER/NAME[@REVISION][/FOLDER].",
        show_default=False,
    ),
]
Destination = Annotated[
    Path,
    typer.Argument(metavar="DST", parser=_path, help="Folder for a folder, file for a file.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
On = Annotated[Device, typer.Option("--device", help="auto: a GPU if there is one.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes at most; default: as needed.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace weights, or another unfinished job, in DST.")]
MinWeights = Annotated[int, typer.Option("--min-weights", min=1, help="Smaller tensors are stored unchanged.")]
Include = Annotated[list[str], typer.Option("--include", metavar="PATTERN", help="Pack only such names; repeatable.")]
Exclude = Annotated[list[str], typer.Option("--exclude", metavar="PATTERN", help="Leave such names; repeatable.")]
CastTo = Annotated[
    Cast | None,
    typer.Option("--cast", help="Round FP32 and FP16 weights first: LOSES BITS unless BF16 has all values."),
]
To = Annotated[Format, typer.Option("--format", help="df11: the published layout of DFloat11.")]
Units = Annotated[
    str | None, typer.Option("--patterns", metavar="auto|FILE", help="With df11: which matrices are a unit.")
]
Model = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", parser=_given, help="Default: the example model, in a clone.", show_default=False),
]

_MAX_SEED = 2**64 - 1  # that torch takes
_MOST_TOKENS, _MOST_SEQUENCES = 1 << 24, 1 << 16  # whose memory is told; the former as in model_memory.py


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from samebits import __version__

        typer.echo(f"samebits {__version__}")
        raise typer.Exit


@app.command()
def compress(
    source: Source,
    destination: Destination,
    min_weights: MinWeights = MIN_WEIGHTS,
    include: Include = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    cast: CastTo = None,
    layout: To = Format.SAMEBITS,
    patterns: Units = None,
    workers: Workers = None,
    device: On = Device.AUTO,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Pack a BF16 model; an interrupted run goes on where it stopped."""
    from samebits.cli.commands import compress, compress_df11
    from samebits.jobs.options import CompressOptions, RunOptions
    from samebits.jobs.ranks import Ranks

    options = CompressOptions(min_weights, tuple(include), tuple(exclude), cast is not None)
    is_df11 = layout is Format.DF11
    if patterns is not None and not is_df11:
        raise typer.BadParameter("--patterns goes with --format df11")
    if is_df11 and options != CompressOptions(MIN_WEIGHTS):
        raise typer.BadParameter("--format df11 takes --patterns to choose weights, and casts none")
    with Ranks.of_environment().together() as ranks:
        run = RunOptions(workers, device, overwrite, ranks)
        if is_df11:
            compress_df11(source, destination, patterns, run, as_json)
        else:
            compress(source, destination, options, run, as_json)


@app.command()
def decompress(
    source: Source,
    destination: Destination,
    workers: Workers = None,
    device: On = Device.AUTO,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Give plain BF16 safetensors back."""
    from samebits.cli.commands import decompress
    from samebits.jobs.options import RunOptions
    from samebits.jobs.ranks import Ranks

    with Ranks.of_environment().together() as ranks:
        decompress(source, destination, RunOptions(workers, device, overwrite, ranks), as_json)


@app.command()
def verify(
    destination: Annotated[
        str, typer.Argument(metavar="DST", parser=_given, help="Compressed folder, file or hub id.", show_default=False)
    ],
    against: Annotated[
        str | None, typer.Option(metavar="SRC", parser=_given, help="Its original: compare byte by byte.")
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Run both and compare every logit instead.")] = False,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --logits: over this text; default: random tokens.")
    ] = None,
    cast: Annotated[
        Cast | None, typer.Option("--cast", help="With --against: its weights cast first, as compress does.")
    ] = None,
    device: On = Device.AUTO,
    as_json: Json = False,
) -> None:
    """Prove that nothing was lost: every byte against the original, or every digest. Exit code 1 if not identical."""
    if text is not None and not logits:
        raise typer.BadParameter("--text goes with --logits")
    if cast is not None and against is None:
        raise typer.BadParameter("--cast goes with --against")
    if logits:
        if against is None:
            raise typer.BadParameter("--logits needs --against")
        from samebits.cli.logits import verify_logits

        verify_logits(destination, against, text, cast is not None, device, as_json)
        return
    from samebits.cli.commands import verify

    verify(destination, against, cast is not None, device, as_json)


@app.command()
def inspect(
    path: Source,
    tensors: Annotated[bool, typer.Option("--tensors", help="One row for each tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Report what a checkpoint holds, from its headers: of one on the hub no weights are downloaded."""
    from samebits.cli.commands import inspect

    inspect(path, tensors, as_json)


@app.command()
def estimate(
    source: Source,
    min_weights: MinWeights = MIN_WEIGHTS,
    include: Include = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    cast: CastTo = None,
    exact: Annotated[bool, typer.Option("--exact", help="Encode everything, not only samples.")] = False,
    context: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Tell the memory for this many tokens instead.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=_MOST_SEQUENCES, help="With --context: sequences.")] = 1,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_TOKENS, help="With --context: tokens read at once.", show_default="all of them"),
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="With --context: what fits, as 24GiB.")] = None,
    as_json: Json = False,
) -> None:
    """Tell what compress would save, without writing, or with --context what a model takes in memory.

    On the hub, the model is downloaded; with --context its config alone, unless --exact.
    """
    from samebits.jobs.options import CompressOptions

    options = CompressOptions(min_weights, tuple(include), tuple(exclude), cast is not None)
    if context is not None:
        from samebits.cli.memory import Case, estimate_memory

        estimate_memory(source, options, Case(context, batch, prompt), gpu, exact, as_json)
        return
    if gpu is not None or prompt is not None or batch != 1:
        raise typer.BadParameter("--batch, --prompt and --gpu go with --context")
    from samebits.cli.commands import estimate

    estimate(source, options, exact, as_json)


@app.command()
def generate(
    path: Model = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "In the beginning",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token; otherwise sample.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, max=100, help="For sampling.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=_MAX_SEED, help="For sampling.")] = 0,
    graphs: Annotated[bool, typer.Option("--graphs", help="On a GPU: replay each step as a CUDA graph.")] = False,
    device: On = Device.AUTO,
    as_json: Json = False,
) -> None:
    """Generate text with a compressed or plain model."""
    from samebits.cli.generate import Sampling, generate

    sampling = Sampling(max_new_tokens, None if greedy else temperature, seed)
    generate(path, prompt, sampling, device, graphs, as_json)


@app.command()
def bench(path: Model = None, device: On = Device.AUTO, as_json: Json = False) -> None:
    """Measure size, loading, coding and generation beside BF16."""
    from samebits.cli.bench import bench

    bench(path, device, as_json)


@app.command()
def doctor(
    plans: Annotated[bool, typer.Option("--plans", help="List the plans of fused products instead.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="With --plans: delete them.")] = False,
    as_json: Json = False,
) -> None:
    """Check Python, packages, GPU, kernels and caches, and say how to mend what is missing."""
    if clear and not plans:
        raise typer.BadParameter("--clear goes with --plans")
    if plans:
        from samebits.cli.plans import clear_plans, show_plans

        (clear_plans if clear else show_plans)(as_json)
        return
    from samebits.cli.doctor import doctor

    doctor(as_json)
