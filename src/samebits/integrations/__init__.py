"""Other libraries with packed weights; each is imported only where it is used."""

from __future__ import annotations

import re

# Older versions are left alone.
MINIMUM = {"transformers": "5.17", "diffusers": "0.42", "peft": "0.21", "sentence_transformers": "6.2", "vllm": "0.26"}
INSTALL_TRANSFORMERS = f"pip install 'transformers>={MINIMUM['transformers']}' accelerate"


def numbers(version: str) -> tuple[int, ...]:
    """The first two of a version, as of 5.17.1 and of 5.17rc1; none of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
