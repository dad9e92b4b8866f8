"""Interpreters in which samebits, and the libraries that it extends, are still to be imported.

To import what these import takes seconds, torch above all. One process has done that, and each interpreter is a fork of
it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from tempfile import TemporaryDirectory
from types import ModuleType

EXTENDED = {"samebits", "transformers", "diffusers", "peft", "sentence_transformers"}

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "torch.distributed.tensor", "accelerate", "huggingface_hub", "numba", "PIL.Image",
        "safetensors.torch", "scipy.optimize", "sympy", "tokenizers",
    ]
)  # fmt: skip


def run_python(code: str, *arguments: str) -> str:
    """A fresh interpreter's stderr; its exit code must be 0."""
    with TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(code, arguments, outputs))
        process.start()
        process.join()
        texts = []
        for output in outputs:
            with open(output, encoding="utf-8") as file:
                texts.append(file.read())
    assert process.exitcode == 0, "\n".join(texts)
    return texts[1]


def _run(code: str, arguments: tuple[str, ...], outputs: list[str]) -> None:
    """In the fork."""
    assert EXTENDED.isdisjoint(sys.modules)
    for stream, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, vars(main))
