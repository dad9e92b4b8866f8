"""samebits compress: a plain checkpoint to a container of FORMAT.md section 7."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from samebits.bf16 import is_bf16
from samebits.df11.checkpoint import Df11Checkpoint
from samebits.df11.config import KEY as DF11_KEY
from samebits.digest import digest
from samebits.errors import DtypeError, FormatError, InputError
from samebits.format.container import Checkpoint, Entry, FileInfo
from samebits.format.folder import CONFIG, KEY, STEM, VERSION, read_json, shard_name
from samebits.format.header import align
from samebits.format.names import BARE, PACKED, stored_name
from samebits.format.safetensors_file import FLOATS, SafetensorsWriter, TensorSpec, header_bytes
from samebits.jobs.job import Job, Shard
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.jobs.pieces import Piece
from samebits.jobs.summary import Sizes
from samebits.progress import Progress, silent

SPACE = 0.72  # of the original bytes of what is packed: more than trained weights ever took
_ALIGNMENT = 128  # of the first packed tensor in its file
_WIDE = 10**15  # an offset longer in text than any


class Compression(Job):
    """See Job; ``options`` say which tensors are packed.

    Raises:
        InputError: the source is compressed or quantized already, or holds reserved names.
        DtypeError: most of its weights are not BF16, and casting was not asked for; says if that would lose bits.
    """

    command = "compress"

    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        options: CompressOptions | None = None,
        run: RunOptions | None = None,
        progress: Progress = silent,
    ) -> None:
        self.options = options or CompressOptions()
        check_source(checkpoint, self.options)
        super().__init__(checkpoint, destination, run or RunOptions(), progress)

    def stem(self) -> str:
        return STEM

    def make_shards(self) -> list[Shard]:
        count = len(self.checkpoint.files)
        return self.file_by_file([shard_name(STEM, number, count) for number in range(1, count + 1)])

    def identity(self) -> dict[str, Any]:
        return asdict(self.options)

    def changes(self, entry: Entry) -> bool:
        return entry.is_packed or self.options.packs(entry) or self.options.casts(entry)

    def packs(self, entry: Entry) -> bool:
        return self.options.packs(entry)

    def measure(self, path: Path) -> tuple[Sizes, list[str], dict[str, str]]:
        """See Job; the original bytes are the source's, which may have been cast."""
        sizes, not_gained, raw_units = super().measure(path)
        return replace(sizes, original_bytes=Sizes.of(self.checkpoint).original_bytes), not_gained, raw_units

    def result_bytes(self, entry: Entry) -> int:
        nbytes = self.options.unpacked_bytes(entry)
        return int(nbytes * SPACE) if self.options.packs(entry) else nbytes

    def write(self, shard: Shard, path: Path, pieces: Iterator[Piece]) -> None:
        """Packed tensors first, then the others by falling width: so all are aligned, without holes."""
        stored: dict[str, tuple[str, tuple[int, ...]]] = {}
        unpacked: list[Piece] = []
        digests: dict[str, int] = {}
        with SafetensorsWriter(path, _capacity(shard)) as writer:
            for piece in pieces:
                stored[piece.name] = piece.dtype, piece.shape
                if piece.is_packed:
                    piece.append_to(writer)
                else:
                    unpacked.append(piece)
            for piece in sorted(unpacked, key=lambda piece: piece.width, reverse=True):
                digests[piece.name] = digest(piece.data())
                piece.append_to(writer)
            writer.finish(stored, _metadata(shard, digests, stored))

    def convert_config(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.options.cast:
            _set_dtype(config)
        options = self.options
        entry = {"quant_method": KEY, "version": VERSION, "min_weights": options.min_weights,
                 "include": list(options.include), "exclude": list(options.exclude)}  # fmt: skip
        config.pop(DF11_KEY, None)
        return {**config, "quantization_config": entry}


def _set_dtype(config: dict[str, Any]) -> None:
    """Make a config's dtype, and its parts', bfloat16."""
    parts = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        part.update({key: "bfloat16" for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)})


def _metadata(
    shard: Shard, digests: dict[str, int], stored: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, str]:
    """Of a file with tensors of these names, dtypes and shapes."""
    return {**shard.metadata, KEY: FileInfo(digests, shard.plain).sealed(stored).to_json()}


def _capacity(shard: Shard) -> int:
    """Bytes of the longest header that the shard's file can get."""
    specs: list[TensorSpec] = []
    for entry in shard.entries:
        spec = replace(entry.spec, dtype="BF16" if entry.dtype in FLOATS else entry.dtype, start=_WIDE, stop=_WIDE)
        name = max(entry.name, stored_name(entry.name), key=len)
        specs.append(replace(spec, name=name, shape=(*entry.shape, _WIDE)))
    digests = dict.fromkeys((entry.name for entry in shard.entries), 0)
    return align(len(header_bytes(specs, _metadata(shard, digests, {}))), _ALIGNMENT)


def check_source(checkpoint: Checkpoint, options: CompressOptions) -> None:
    """Refuse what cannot be compressed with ``options``; Compression says how."""
    where = str(checkpoint.path)
    if checkpoint.is_packed and not isinstance(checkpoint, Df11Checkpoint):
        raise InputError("already compressed by samebits", where=where, mend="use it as it is, or decompress it")
    _check_names(checkpoint)
    refuse_quantized(checkpoint.path / CONFIG)
    if options.include and not any(options.matches(entry.name) for entry in checkpoint):
        raise InputError("no tensor's name matches --include", where=where, mend="see `samebits inspect` for the names")
    large = [entry for entry in checkpoint if options.is_large(entry) and entry.dtype in FLOATS]
    other = [entry for entry in large if not options.packs(entry)]
    if 2 * sum(entry.words for entry in other) > sum(entry.words for entry in large):
        casting = replace(options, cast=True)
        raise _other_dtype(first_rounded(entry for entry in checkpoint if casting.casts(entry)), other[0])


def first_rounded(entries: Iterable[Entry]) -> Entry | None:
    """The first of some tensors, which are to be cast, of which that changes a value. None: BF16 has all values."""
    return next((entry for entry in entries if not is_bf16(entry.tensor())), None)


def _other_dtype(rounded: Entry | None, example: Entry) -> DtypeError:
    if rounded is None:
        what, mend = "BF16 has all their values", "add --cast bf16 to store them as BF16, which changes no value"
        return DtypeError(f"the weights are {example.dtype}, but {what}", where=example.where, mend=mend)
    what = f"the weights are {rounded.dtype}, only BF16 can be packed without loss"
    mend = "add --cast bf16 to round it to BF16 first, which loses bits"
    return DtypeError(what, where=rounded.where, mend=mend)


def _check_names(checkpoint: Checkpoint) -> None:
    for entry in checkpoint:
        if entry.name.endswith((PACKED, BARE)):
            raise FormatError("a name reserved for packed tensors", where=entry.where, mend="rename the tensor")


def refuse_quantized(path: Path) -> None:
    """Refuse a model that is quantized already."""
    if not path.is_file():
        return
    method = read_json(path).get("quantization_config")
    if method is not None:
        name = method.get("quant_method") if isinstance(method, dict) else method
        mend = "compress the BF16 original instead"
        raise InputError(f"the model is quantized already ({name})", where=str(path), mend=mend)
