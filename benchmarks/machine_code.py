"""Which kernels a change compiles to other machine code than before it.

    git worktree add ../before COMMIT
    python benchmarks/machine_code.py ../before [--files linear_pairs.cu,linear_chains.cu] [--target sm_90a]

A function in place of a condition, in a header that kernels share, is enough for the compiler to order branches or
loads otherwise in all of them, which has cost some 3 to 13 % (NOTES.md). What is named here is measured again, or the
change is written another way. It needs no GPU. Each kernel is compiled for both trees, which takes a second or two, and
compared as bytes of the cubins' code sections. It ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samebits.kernels import nvrtc

CSRC = Path("src/samebits/kernels/csrc")
CODE = ".text."  # how the names of sections with code begin
_HEADER, _SECTION = "<16xHHIQQQIHHHHHH", "<IIQQQQIIQQ"  # of ELF files of 64 bits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a tree of the repository")
    parser.add_argument("--files", type=lambda text: text.split(","), default=None)
    parser.add_argument("--target", default="sm_90a")
    arguments = parser.parse_args()
    trees = [arguments.before, Path(__file__).resolve().parents[1]]
    if not (trees[0] / CSRC).is_dir():
        parser.error(f"{trees[0]} is no tree of the repository: it has no {CSRC}")
    every = {file.name for tree in trees for file in (tree / CSRC).glob("*.cu")}
    names = arguments.files or sorted(every)
    if unknown := sorted(set(names) - every):
        parser.error(f"neither tree has {', '.join(unknown)} in {CSRC}")
    different = 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = [[threads.submit(codes_of_tree, tree, file, arguments.target) for tree in trees] for file in names]
        for file, (before, after) in zip(names, jobs, strict=True):
            for line in differences(before.result(), after.result()):
                different += 1
                print(f"{file}: {line}", flush=True)
    print(f"{different} kernels differ" if different else "the same machine code")
    return int(different > 0)


def differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """What there is to say of kernels, by the digests of their code."""
    for name in sorted(before | after):
        if name not in after:
            yield f"{name} is gone"
        elif name not in before:
            yield f"{name} is new"
        elif before[name] != after[name]:
            yield f"{name} differs"


def codes_of_tree(tree: Path, file: str, target: str) -> dict[str, str]:
    """``codes`` of another tree's kernels; none if it has no such file."""
    if not (tree / CSRC / file).is_file():
        return {}
    call = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import machine_code as own; "
    call += f"print(json.dumps(own.codes({file!r}, {target!r})))"
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree / 'src'}: {file} cannot be compiled: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def codes(file: str, target: str) -> dict[str, str]:
    """A digest of each kernel's code, of those of csrc/``file``."""
    found: dict[str, str] = {}
    for kernel in nvrtc.instances(file) or [None]:
        cubin = nvrtc.compile_source(file, target, kernel).code
        found |= {name: hashlib.sha256(code).hexdigest() for name, code in code_sections(cubin)}
    return found


def code_sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Each kernel's name and code."""
    *_, sections_at, _, _, _, _, entry_size, count, names_index = struct.unpack_from(_HEADER, cubin)
    entries = [struct.unpack_from(_SECTION, cubin, sections_at + i * entry_size) for i in range(count)]
    names_at = entries[names_index][4]
    for name_at, _, _, _, at, size, *_ in entries:
        start = names_at + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(CODE):
            yield name.removeprefix(CODE), cubin[at : at + size]


if __name__ == "__main__":
    sys.exit(main())
