"""What DFloat11's layout leaves out. samebits puts it into a file's metadata, where other readers pass over it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits.df11.config import Df11Config
from samebits.errors import CHANGED, FormatError

KEY = "dfloat11"  # of a JSON object in the metadata


@dataclass(frozen=True)
class Unsaid:
    """What a file says besides its tensors.

    Attributes:
        shapes: of the weights in units, by name; units of other files may be among them.
        config: the dfloat11_config that has no config.json to be in.
        raw: modules that would have been units of this file, and why they are not.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    config: Df11Config | None = None
    raw: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> Unsaid:
        """Read a file's metadata, which need not say anything.

        Raises:
            FormatError: malformed.
        """
        try:
            said = json.loads(metadata.get(KEY, "{}"))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise FormatError(f"{KEY} in its metadata is no JSON object", mend=CHANGED)
        shapes, raw = said.get("shapes", {}), said.get("raw", {})
        if not isinstance(shapes, dict) or not all(_is_shape(shape) for shape in shapes.values()):
            raise FormatError(f"{KEY} in its metadata has malformed shapes", mend=CHANGED)
        if not isinstance(raw, dict) or not all(isinstance(why, str) for why in raw.values()):
            raise FormatError(f"{KEY} in its metadata has malformed raw units", mend=CHANGED)
        config = Df11Config.parse(said["config"]) if "config" in said else None
        return cls({name: tuple(shape) for name, shape in shapes.items()}, config, raw)

    def to_metadata(self) -> dict[str, str]:
        """For a file's metadata; empty if there is nothing to say."""
        said: dict[str, Any] = {"shapes": self.shapes, "config": self.config and self.config.to_dict(), "raw": self.raw}
        said = {key: value for key, value in said.items() if value}
        return {"format": "pt", KEY: json.dumps(said)} if said else {}


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
