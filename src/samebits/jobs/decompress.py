"""samebits decompress: plain safetensors again, with the names, shapes and bytes that a checkpoint was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samebits.df11 import unsaid
from samebits.df11.checkpoint import Df11Checkpoint
from samebits.df11.config import KEY as DF11_KEY
from samebits.errors import InputError
from samebits.format.container import Checkpoint, Entry
from samebits.format.folder import KEY
from samebits.format.safetensors_file import SafetensorsWriter, header_size
from samebits.jobs.job import Job, Shard
from samebits.jobs.options import RunOptions
from samebits.jobs.pieces import Piece
from samebits.jobs.source import plain_names, stem_of
from samebits.progress import Progress, silent


class Decompression(Job):
    """See Job.

    Raises:
        InputError: the source is not compressed.
    """

    command = "decompress"

    def __init__(
        self, checkpoint: Checkpoint, destination: Path, run: RunOptions | None = None, progress: Progress = silent
    ) -> None:
        if not checkpoint.is_packed and not isinstance(checkpoint, Df11Checkpoint):
            raise InputError(
                "not compressed by samebits or DFloat11", where=str(checkpoint.path), mend="use it as it is"
            )
        super().__init__(checkpoint, destination, run or RunOptions(), progress)

    def stem(self) -> str:
        return stem_of(self.checkpoint)

    def make_shards(self) -> list[Shard]:
        return self.file_by_file(plain_names(self.checkpoint))

    def identity(self) -> dict[str, Any]:
        return {}

    def changes(self, entry: Entry) -> bool:
        return entry.is_packed

    def packs(self, entry: Entry) -> bool:
        return False

    def result_bytes(self, entry: Entry) -> int:
        return entry.original_nbytes

    def write(self, shard: Shard, path: Path, pieces: Iterator[Piece]) -> None:
        metadata = {key: value for key, value in shard.metadata.items() if key not in (KEY, unsaid.KEY)}
        stored = ((entry.name, entry.dtype, entry.shape, entry.original_nbytes) for entry in shard.entries)
        with SafetensorsWriter(path, header_size(stored, metadata)) as writer:
            for entry, piece in zip(shard.entries, pieces, strict=True):
                if not entry.is_packed:  # workers check what they decode
                    entry.check()
                piece.append_to(writer)
            writer.finish([entry.name for entry in shard.entries], metadata)

    def convert_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in ("quantization_config", DF11_KEY)}
