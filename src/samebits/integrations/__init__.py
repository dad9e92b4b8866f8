"""Other libraries with packed weights; each is imported only where it is used."""

from __future__ import annotations

import re
import warnings

# Older versions are left alone.
MINIMUM = {"transformers": "5.17", "diffusers": "0.42", "peft": "0.21", "sentence_transformers": "6.2", "vllm": "0.26"}
INSTALL_TRANSFORMERS = f"pip install 'transformers>={MINIMUM['transformers']}' accelerate"


def is_too_old(package: str, found: str) -> bool:
    """Whether a version is older than MINIMUM has it, with a warning then."""
    if numbers(found) >= numbers(MINIMUM[package]):
        return False
    name = "vLLM" if package == "vllm" else package.replace("_", "-")
    warnings.warn(f"samebits needs {name} {MINIMUM[package]} or newer, and leaves {found} alone", stacklevel=3)
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The first two of a version, as of 5.17.1 and of 5.17rc1; none of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
