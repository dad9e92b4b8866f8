"""A hub whose models are folders of this machine."""

from __future__ import annotations

import shutil
from collections import Counter
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects


class Hub:
    """In the place of huggingface_hub's, below ``folder``; another revision than the main branch is a folder @REVISION.

    Attributes:
        downloaded: names of files.
        bytes_read: of files that were read in parts, by name.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.snapshots = folder, folder / "snapshots"
        self.downloaded: list[str] = []
        self.bytes_read: Counter[str] = Counter()
        patch.setattr("huggingface_hub.HfApi.list_repo_files", lambda _, name, revision: self.names(name, revision))
        patch.setattr("huggingface_hub.snapshot_download", self.download)
        patch.setattr("huggingface_hub.HfFileSystem", lambda: self)

    def place(self, name: str, revision: str | None) -> Path:
        """Where a model lies."""
        return self.folder / (f"{name}@{revision}" if revision else name)

    def names(self, name: str, revision: str | None) -> list[str]:
        place = self.place(name, revision)
        return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())

    def download(
        self, name: str, revision: str | None, allow_patterns: list[str], dry_run: bool = False
    ) -> str | list[Any]:
        source, target = self.place(name, revision), self.snapshots / name
        names = list(filter_repo_objects(self.names(name, revision), allow_patterns=allow_patterns))
        if dry_run:
            sizes = [(source / each).stat().st_size for each in names]
            return [SimpleNamespace(file_size=size, will_download=True) for size in sizes]
        self.downloaded += names
        for each in names:
            (target / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / each, target / each)
        return str(target)

    def open(self, path: str, mode: str, revision: str | None, cache_type: str) -> FileIO:
        assert (mode, cache_type) == ("rb", "none")
        owner, name, inner = path.split("/", 2)
        return _Remote(self.place(f"{owner}/{name}", revision) / inner, self.bytes_read)


class _Remote(FileIO):
    def __init__(self, path: Path, counts: Counter[str]) -> None:
        super().__init__(path)
        self.path, self.counts, self.size = path, counts, path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        self.counts[self.path.name] += len(data)
        return data
