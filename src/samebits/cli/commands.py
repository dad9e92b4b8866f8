"""compress, decompress, verify, inspect and estimate: call the job, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samebits.cli.console import note, print_json, print_lines, print_table, progress_bar
from samebits.df11.checkpoint import Df11Checkpoint, open_checkpoint
from samebits.df11.patterns import architecture_of, read_patterns
from samebits.errors import CHANGED, MismatchError
from samebits.format.container import Checkpoint, Entry
from samebits.format.names import is_selected
from samebits.integrations.model_shapes import model_shapes
from samebits.jobs import estimate as estimates
from samebits.jobs.compress import Compression, first_rounded
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.decompress import Decompression
from samebits.jobs.device import resolve_device
from samebits.jobs.hub import open_headers, resolve_source
from samebits.jobs.job import JobReport
from samebits.jobs.options import NOT_GAINED, CompressOptions, RunOptions
from samebits.jobs.source import config_of
from samebits.jobs.summary import Sizes, bits_per_weight, by_kind
from samebits.sizes import size
from samebits.verify import Verdict, cast_entries, verify_against, verify_digests

GIVE_CAST = "give --cast bf16 if it was made so"  # where dtypes differ as that makes them


def open_source(text: str) -> Checkpoint:
    """The checkpoint behind a path or a name on the hub, from where it is downloaded; reports call it Path(text)."""
    path = resolve_source(text, announce=lambda nbytes: note(f"note: downloading {size(nbytes)} of {text}"))
    return open_checkpoint(path, model_shapes)


def compress(source: str, destination: Path, options: CompressOptions, run: RunOptions, as_json: bool) -> None:
    checkpoint = open_source(source)
    if run.ranks.is_first:
        note_patterns(source, checkpoint, options)
    with progress_bar("compress", is_shown=run.ranks.is_first) as progress:
        report = Compression(checkpoint, destination, options, run, progress).run()
    if not run.ranks.is_first:
        return
    reasons = [options.reason_against(entry) for entry in checkpoint] + [NOT_GAINED] * len(report.not_gained)
    _report(report, as_json, also=_note_cast(checkpoint, options) | {"unpacked": _counts(reasons)})


def note_patterns(source: str, checkpoint: Checkpoint, options: CompressOptions) -> None:
    """Says which patterns are of no name: a slip, or that of a tied weight, which files have under its other name."""
    for option, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not any(is_selected(entry.name, (pattern,), ()) for entry in checkpoint):
                note(f"note: --{option} {pattern} is the name of no tensor in {Path(source)}")


def _note_cast(checkpoint: Checkpoint, options: CompressOptions) -> dict[str, Any]:
    """Says whether --cast, if there is one, rounded anything; the same, and what it alone gives, for a report."""
    if not options.cast:
        return {}
    cast_bytes = sum(map(options.unpacked_bytes, checkpoint))
    return {**_note_rounding(filter(options.casts, checkpoint)), "cast_bytes": cast_bytes}


def _counts(reasons: Iterable[str | None]) -> dict[str, int]:
    """Of how many tensors each is why they are not packed."""
    return Counter(reason for reason in reasons if reason)


def _listed(counts: Mapping[str, int]) -> str:
    return ": " + ", ".join(f"{count} {reason}" for reason, count in counts.items()) if counts else ""


def _print_cast(cast: Mapping[str, Any], original: int, stored: int) -> None:
    """``cast``: of _note_cast."""
    if nbytes := cast.get("cast_bytes"):
        by_cast, by_packing = (f"{100 * part:.1f} %" for part in (nbytes / original, stored / nbytes))
        print_lines(f"--cast bf16 alone gives {size(nbytes)} ({by_cast}), of which packing leaves {by_packing}")


def _note_rounding(entries: Iterable[Entry]) -> dict[str, Any]:
    rounded = first_rounded(entries)
    effect = f"rounds weights ({rounded.name} for one), which is not lossless" if rounded else "changes no value"
    note(f"note: --cast bf16 {effect}")
    return {"first_rounded": rounded.name if rounded else None}


def compress_df11(source: str, destination: Path, patterns: str | None, run: RunOptions, as_json: bool) -> None:
    checkpoint = open_source(source)
    chosen = None if patterns is None or patterns == "auto" else read_patterns(Path(patterns))
    with progress_bar("compress", is_shown=run.ranks.is_first) as progress:
        report = Df11Compression(checkpoint, destination, chosen, run, progress).run()
    if not run.ranks.is_first:
        return
    if chosen is None and architecture_of(config_of(checkpoint)) is None:
        note("note: not an architecture that is known; each numbered block became a unit (--patterns FILE to choose)")
    _report(report, as_json)


def decompress(source: str, destination: Path, run: RunOptions, as_json: bool) -> None:
    checkpoint = open_source(source)
    with progress_bar("decompress", is_shown=run.ranks.is_first) as progress:
        report = Decompression(checkpoint, destination, run, progress).run()
    if run.ranks.is_first:
        _report(report, as_json, is_packed=False)


def _report(report: JobReport, as_json: bool, is_packed: bool = True, also: Mapping[str, Any] | None = None) -> None:
    """``also``: what _note_cast says, and why tensors are not packed."""
    also = also or {}
    if as_json:
        print_json({**vars(report), "sizes": report.sizes.to_json(), **also})
        return
    sizes = report.sizes
    original, stored = size(sizes.original_bytes), size(sizes.stored_bytes)
    whence = f"{stored}, from {original}" if is_packed else f"{original}, from {stored} compressed"
    speed = size(sizes.original_bytes / max(report.seconds, 1e-9))
    resumed = f", {report.resumed_shards} of {report.shards} files from an earlier run" if report.resumed_shards else ""
    reasons = _listed(also.get("unpacked", {}))
    bits = f", {sizes.bits_per_packed_weight:.2f} bits per packed weight" if sizes.packed_tensors else reasons
    print_lines(f"{report.destination}: {whence} ({100 * sizes.ratio:.1f} %)")
    _print_cast(also, sizes.original_bytes, sizes.stored_bytes)
    print_lines(
        f"{sizes.packed_tensors} of {sizes.tensors} tensors {'' if is_packed else 'were '}packed{bits}",
        f"{report.seconds:.1f} s on {report.device}, {speed}/s{resumed}",
    )
    _list("stored unchanged, packing gains nothing", report.not_gained)
    for why in dict.fromkeys(report.raw_units.values()):
        _list(f"stored unchanged, {why}", [unit for unit, reason in report.raw_units.items() if reason == why])
    _list("not copied (further weights, or the same in another format)", report.skipped_files)


def _list(what: str, names: list[str]) -> None:
    if names:
        print_lines(f"{what}: {_shown(names)}")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def verify(destination: str, against: str | None, cast: bool, device: str, as_json: bool) -> None:
    checkpoint = open_source(destination)
    original = open_source(against) if against else None
    device = resolve_device(device)
    with progress_bar("verify") as progress:
        if original:
            verdict = verify_against(checkpoint, original, device, progress, cast=cast)
        else:
            verdict = verify_digests(checkpoint, device, progress)
    found: dict[str, Any] = {"against": against, "cast": "bf16" if cast else None}
    if original and cast and verdict.identical:
        found |= _note_rounding(cast_entries(checkpoint, original))
    if as_json:
        mismatches = [vars(mismatch) for mismatch in verdict.mismatches]
        is_known = against or verdict.mismatches or not verdict.unchecked
        identical = verdict.identical if is_known else None
        print_json({**vars(verdict), "mismatches": mismatches, "identical": identical, **found})
    if verdict.mismatches:
        mend = _mend(verdict, checkpoint, original, against, cast) if original else CHANGED
        raise MismatchError(f"not identical: {_named(verdict)}", where=str(checkpoint.path), mend=mend)
    if not as_json:
        _print_verdict(verdict, checkpoint, against)


def _named(verdict: Verdict) -> str:
    first, *others = verdict.mismatches
    return f"{first}; {len(others)} more: {_shown([other.tensor for other in others])}" if others else str(first)


def _mend(verdict: Verdict, checkpoint: Checkpoint, original: Checkpoint, against: str | None, cast: bool) -> str:
    could_be_cast = set() if cast else {entry.name for entry in cast_entries(checkpoint, original)}
    if any(mismatch.tensor in could_be_cast for mismatch in verdict.mismatches):
        return GIVE_CAST
    return f"compress {against}{' --cast bf16' if cast else ''} again, if it is from there"


def _print_verdict(verdict: Verdict, checkpoint: Checkpoint, against: str | None) -> None:
    digests = "every digest is right" if verdict.unchecked < verdict.tensors else "every tensor can be read"
    what = f"identical to {against}" if against else digests
    tensors = f"{verdict.tensors} tensors"
    if verdict.cast_tensors:
        what, tensors = f"{what} cast to BF16", f"{tensors} ({verdict.cast_tensors} cast)"
    print_lines(f"{checkpoint.path}: {what}, {tensors}, {verdict.nbytes:,} bytes")
    if verdict.unchecked:
        print_lines(f"{verdict.unchecked} tensors have no digest: compare them with --against SRC")


def inspect(source: str, tensors: bool, as_json: bool) -> None:
    with open_headers(source) as path:
        checkpoint = open_checkpoint(path, model_shapes)
    sizes = Sizes.of(checkpoint)
    kinds = by_kind(checkpoint)
    if as_json:
        print_json(_inspection(source, checkpoint, sizes, kinds))
        return
    if tensors:
        columns = ("tensor", "shape", "dtype", "original", "stored", "bits/weight")
        print_table(str(Path(source)), columns, [_tensor_row(entry) for entry in checkpoint])
    else:
        columns = ("tensors", "number", "weights", "original", "stored", "bits/weight")
        print_table(str(Path(source)), columns, [_kind_row(kind, of_kind) for kind, of_kind in kinds.items()])
    files = len(checkpoint.files)
    print_lines(
        f"{sizes.packed_tensors} of {sizes.tensors} tensors packed, {files} file{'s' * (files != 1)}",
        f"{size(sizes.original_bytes)} uncompressed, {size(sizes.stored_bytes)} stored ({100 * sizes.ratio:.1f} %)",
    )
    if sizes.packed_tensors:
        print_lines(f"{sizes.bits_per_packed_weight:.3f} bits per packed weight, everything counted")
    if isinstance(checkpoint, Df11Checkpoint):
        print_lines(f"in the layout of DFloat11 {checkpoint.version or ''}".rstrip())


def _tensor_row(entry: Entry) -> tuple[str, ...]:
    shape = " x ".join(map(str, entry.shape)) or "scalar"
    bits = _bits(bits_per_weight(entry.nbytes, entry.words))
    return entry.name, shape, entry.dtype, size(entry.original_nbytes), size(entry.nbytes), bits


def _kind_row(kind: str, sizes: Sizes) -> tuple[str, ...]:
    weights, bits = f"{sizes.weights:,}", _bits(sizes.bits_per_weight)
    return kind, str(sizes.tensors), weights, size(sizes.original_bytes), size(sizes.stored_bytes), bits


def _bits(bits: float | None) -> str:
    return "" if bits is None else f"{bits:.2f}"


def _inspection(source: str, checkpoint: Checkpoint, sizes: Sizes, kinds: dict[str, Sizes]) -> dict[str, Any]:
    tensors = [
        {"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, "packed": entry.is_packed,
         "file": entry.file.path.name, "original_bytes": entry.original_nbytes, "stored_bytes": entry.nbytes,
         "bits_per_weight": bits_per_weight(entry.nbytes, entry.words)}
        for entry in checkpoint
    ]  # fmt: skip
    return {
        "path": Path(source),
        "compressed": checkpoint.is_packed,
        "layout": _layout(checkpoint),
        "files": [file.path.name for file in checkpoint.files],
        "total": sizes.to_json(),
        "kinds": {kind: of_kind.to_json() for kind, of_kind in kinds.items()},
        "tensors": tensors,
    }


def _layout(checkpoint: Checkpoint) -> str:
    if isinstance(checkpoint, Df11Checkpoint):
        return "dfloat11"
    return "samebits" if checkpoint.is_packed else "plain"


def estimate(source: str, options: CompressOptions, exact: bool, as_json: bool) -> None:
    checkpoint = open_source(source)
    note_patterns(source, checkpoint, options)
    with progress_bar("estimate") as progress:
        result = estimates.estimate(checkpoint, options, exact=exact, progress=progress)
    cast, unpacked = _note_cast(checkpoint, options), _counts(tensor.reason for tensor in result.tensors)
    if as_json:
        bits = ("bits_per_weight", "bits_per_packed_weight", "entropy")
        totals = {name: getattr(result, name) for name in ("original_bytes", "stored_bytes", "ratio", *bits, "exact")}
        rows = [
            {**vars(tensor), "packed": tensor.packed, "bits_per_weight": tensor.bits_per_weight}
            for tensor in result.tensors
        ]
        print_json({"path": Path(source), **totals, **cast, "unpacked": unpacked, "tensors": rows})
        return
    how = "encoded in full" if exact else "estimated from samples"
    print_lines(
        f"{Path(source)}: {size(result.original_bytes)} -> {size(result.stored_bytes)} "
        f"({100 * result.ratio:.1f} %), {how}",
    )
    _print_cast(cast, result.original_bytes, result.stored_bytes)
    packed, entropy = f"{len(result.packed)} of {len(result.tensors)} tensors packed", result.entropy
    if entropy is None:
        print_lines(packed + _listed(unpacked))
        return
    print_lines(
        f"{packed}, {result.bits_per_packed_weight:.2f} bits per packed weight",
        f"the limit for coding each exponent alone is {8 + entropy:.2f} (8 + entropy {entropy:.2f})",
    )
