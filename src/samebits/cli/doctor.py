"""samebits doctor: what this machine has, whether it works, and how to mend what does not."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from samebits import __version__, api
from samebits.bf16 import same_words
from samebits.cli.console import compilation_noted, print_json, print_lines
from samebits.compiled import folder_of
from samebits.digest import sum_words
from samebits.errors import MismatchError, SamebitsError
from samebits.integrations import MINIMUM, numbers
from samebits.integrations.vllm.plugin import distribution
from samebits.jobs.device import can_build_kernels
from samebits.parallel import threads

_REQUIRED = ("torch", "numpy", "numba", "safetensors", "huggingface_hub")
_OPTIONAL = ("transformers", "accelerate", "diffusers", "peft", "sentence_transformers", "vllm", "cuda-core")
_WORDS = 1 << 16  # every BF16 word once


@dataclass(frozen=True)
class Finding:
    """One thing looked at; ``mend`` is empty if nothing is wrong with it."""

    name: str
    found: str
    mend: str = ""


@compilation_noted()
def doctor(as_json: bool) -> None:
    findings = list(examine())
    if as_json:
        print_json({"healthy": not any(f.mend for f in findings), "findings": [vars(f) for f in findings]})
        return
    for finding in findings:
        print_lines(*f"{finding.name:<16} {finding.found}".split("\n"))  # of a compiler, say
        if finding.mend:
            print_lines(f"{'':<16} -> {finding.mend}")


def examine() -> Iterator[Finding]:
    """Look at everything; nothing here raises."""
    yield Finding("samebits", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name in _REQUIRED:
        yield Finding(name, version(name))
    yield from _optional_packages()
    yield _tested("CPU threads", lambda: str(threads()))
    yield _loop_cache()
    yield _tested("CPU round trip", lambda: _round_trip("cpu"))
    yield from _gpu()


def _optional_packages() -> Iterator[Finding]:
    for name in _OPTIONAL:
        install = f"pip install '{name}>={MINIMUM[name]}'" if name in MINIMUM else f"pip install {name}"
        try:
            found = version((name == "vllm" and distribution()) or name)
            is_old = name in MINIMUM and numbers(found) < numbers(MINIMUM[name])
            yield Finding(name, f"{found}, too old for packed weights" if is_old else found, install if is_old else "")
        except PackageNotFoundError:
            if name == "cuda-core" and torch.cuda.is_available():
                yield Finding(name, "not installed", install)
            else:  # nothing is wrong without it
                yield Finding(name, f"not installed (to have it: {install})")


def _loop_cache() -> Finding:
    if folder := folder_of(sum_words):
        return Finding("loop cache", str(folder))
    found = "no folder can be written, so each process compiles the CPU codec anew"
    return Finding("loop cache", found, "set NUMBA_CACHE_DIR to a writable folder")


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield Finding("GPU", f"none ({built}); everything runs on the CPU")
        yield native_code()
        return
    properties = torch.cuda.get_device_properties(0)
    memory, capability = properties.total_memory / 2**30, f"{properties.major}.{properties.minor}"
    yield Finding("GPU", f"{properties.name}, {memory:.0f} GiB, compute capability {capability}")
    yield Finding("CUDA", f"{torch.version.cuda} (torch), {_driver()}")
    yield native_code()
    if can_build_kernels():
        yield Finding("kernel cache", str(_kernel_cache()))
        yield _tested("kernels", _compile)
        yield _tested("GPU round trip", lambda: _round_trip("cuda"))


def native_code() -> Finding:
    """What makes products again without Python: samebits.plans.recall."""
    from samebits.plans.recall import native

    if native:
        return Finding("native code", "compiled")
    mend = "install a C compiler and Python's headers, then install samebits once more"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        mend = "use a Python with the global interpreter lock"
    return Finding("native code", "not compiled, so products take the host longer", mend)


def _driver() -> str:
    if not can_build_kernels():
        return "cuda-core is not installed"
    from cuda.bindings import driver, nvrtc

    _, number = driver.cuDriverGetVersion()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{number // 1000}.{number % 1000 // 10} (driver), {major}.{minor} (NVRTC)"


def _kernel_cache() -> Path:
    """Where cuda-core keeps compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "cuda-python" / "program-cache"


def _compile() -> str:
    from samebits.kernels.nvrtc import architecture, compile_source

    target = architecture(torch.cuda.get_device_capability())
    for name in ("decode.cu", "compact.cu", "encode.cu"):
        compile_source(name, target)
    return f"compiled for {target}"


def _round_trip(device: str) -> str:
    """Encode and decode every BF16 word and some trained-like weights, few enough for the compact code and more."""
    words = torch.arange(_WORDS, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    weights = torch.randn(256, 512, generator=torch.Generator().manual_seed(0), device="cpu").to(torch.bfloat16)
    for tensor in (words, weights[:100], weights):
        packed = api.encode(tensor.to(device))
        if not same_words(api.decode(packed).cpu(), tensor):
            raise MismatchError("the decoded words differ", mend="report this as a bug")
    return f"identical, {packed.bits_per_weight:.2f} bits per weight on Gaussian weights"


def _tested(name: str, test: Callable[[], str]) -> Finding:
    try:
        return Finding(name, test())
    except SamebitsError as error:
        return Finding(name, error.what, error.mend or "report this as a bug")
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}", "report this as a bug")
