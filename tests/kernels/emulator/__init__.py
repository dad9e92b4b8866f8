"""Kernels of csrc as programs for the CPU, so that they are tested where there is no GPU.

Their sources are compiled as C++, with the PTX in them translated instruction by instruction (``PTX``). Lanes are
coroutines that run until their warp meets, warps go on in an order that a seed decides (emulator.h). What a GPU may do
late is done as late as it may be: an asynchronous copy when it is waited for. What may not be is an EmulationError:
in PTX an address outside of shared memory or of ``allowed`` global memory, or one that is not aligned (pointers of C++
are not looked at, but for what is just behind shared memory); lanes that part where their warp meets, warps that wait
for ever. Blocks run one after the other.

A tensor core's sum is that of its 17 terms in double precision, rounded once. Where terms are so few powers of two
apart that this is exact, bits depend on the order of these sums, and on nothing else, as on a GPU (``chains``).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from samebits.format.geometry import STAGE
from samebits.kernels import nvrtc

HAS_COMPILER = shutil.which("g++") is not None
_HEADER = Path(__file__).with_name("emulator.h")
_MESSAGE_BYTES = 256
_STEP = 16  # columns of a tensor core's sum
_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_EXTERN = re.compile(r"extern __shared__(?: __align__\(\d+\))? (\w+) (\w+)\[\];")
_OPERAND = re.compile(r'"[=+]?\w"\s*\(')
_PORTABLE = re.compile(r"#if __CUDA_ARCH__ >= 900\n.*?(?:#else\n(.*?))?#endif\n", re.DOTALL)
PTX = {  # by how a template begins; $0, $1 are its operands, those that are written first
    "ld.global.nc.L1::no_allocate.v4.u32": "emu::read<4>($4, {&$0, &$1, &$2, &$3});",
    "ld.global.nc.L1::no_allocate.v2.u32": "emu::read<2>($2, {&$0, &$1});",
    "ld.global.nc.L1::no_allocate.u32": "emu::read<1>($1, {&$0});",
    "ld.global.L1::no_allocate.v4.u32": "emu::read<4>($4, {&$0, &$1, &$2, &$3});",
    "ld.global.L1::no_allocate.u32": "emu::read<1>($1, {&$0});",
    "ld.global.nc.u32": "emu::read<1>($1, {&$0});",
    "ld.global.nc.u16": "$0 = emu::read_u16($1);",
    "ld.shared.u32": "emu::load<1>($1, {&$0});",
    "ld.volatile.shared.u32": "$0 = emu::load_flag($1);",
    "ld.shared.u8": "$0 = emu::load_u8($1);",
    "ld.shared.v2.u32": "emu::load<2>($2, {&$0, &$1});",
    "ld.shared.v4.u32": "emu::load<4>($4, {&$0, &$1, &$2, &$3});",
    "{ .reg .pred any;\nsetp.ne.u32 any, %4, 0;\n@any ld.shared.v4": "if ($4) emu::load<4>($5, {&$0, &$1, &$2, &$3});",
    "{ .reg .pred any;\nsetp.ne.u32 any, %2, 0;\n@any ld.shared.v2": "if ($2) emu::load<2>($3, {&$0, &$1});",
    "st.shared.v4.u32": "emu::store<4>($0, {$1, $2, $3, $4});",
    "st.shared.v2.u32": "emu::store<2>($0, {$1, $2});",
    "st.shared.u32": "emu::store<1>($0, {$1});",
    "st.volatile.shared.u32": "emu::store<1>($0, {$1});",
    "atom.relaxed.cta.shared.add.u32": "$0 = emu::add_shared($1, $2);",
    "red.shared.xor.b32": "emu::xor_shared($0, $1);",
    "st.global.cs.v2.u32": "emu::write<2>($0, {$1, $2});",
    "st.global.cs.v4.u32": "emu::write<4>($0, {$1, $2, $3, $4});",
    "cp.async.cg.shared.global": "emu::copy($0, $1, 16);",
    "cp.async.ca.shared.global [%0], [%1], 4": "emu::copy($0, $1, 4);",
    "cp.async.ca.shared.global [%0], [%1], 8": "emu::copy($0, $1, 8);",
    "cp.async.commit_group": "emu::commit();",
    "cp.async.wait_group": "emu::await($0);",
    "prefetch.global.L2": ";",
    "fma.rn.bf16x2": "$0 = emu::scaled($1, $2);",
    "lop3.b32 %0, %1, %2, %3, 0xea": "$0 = ($1 & $2) | $3;",
    "cvt.rn.bf16x2.f32": "$0 = emu::bf16($1) << 16 | emu::bf16($2);",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
        "emu::multiply({&$0, &$1, &$2, &$3}, {$4, $5, $6, $7}, {$8, $9});",
    "{ .reg .pred inside; .reg .s32 other;\nshfl.sync.up": "$0 = emu::plus_below($0, $1);",
    "mov.u32 %0, %0": ";",
    "{ .reg .pred whole;\nsetp.ne.u32 whole, %4, 0;\n@whole st.shared.u32":
        "if ($4) emu::store<1>($1, {$2}), $1 += $5, $0 = $3; else $0 = $2;",
    "{ .reg .pred crossed;\nsetp.ne.u32 crossed, %5, 0;":
        "if ($5) { $0 = $1; $1 = $2; emu::load<1>($3, {&$2}); $3 += 4; }",
    "{ .reg .pred hit;\nsetp.eq.u32 hit, %1, %2;\n@hit xor.b32 %0, %0, %3;": "if ($1 == $2) $0 ^= $3;",
}  # fmt: skip


class EmulationError(Exception):
    """A kernel has done what it may not do."""


class Memory(NamedTuple):
    """Global memory that a kernel may touch: an address, and bytes from there on."""

    address: int
    size: int


def run(
    file: str, name: str, grid: int, threads: int, shared_bytes: int, pointers: int, allowed: Iterable[Memory] = (),
    seed: int = 0,
) -> None:  # fmt: skip
    """A launch; returns when it has ended.

    Args:
        pointers: the address of an array of the arguments' addresses.
        allowed: none: all memory.
        seed: decides which warp goes on when several can.

    Raises:
        EmulationError
    """
    ranges = list(allowed)
    words = (ctypes.c_uint64 * (2 * len(ranges)))(*(word for each in ranges for word in each))
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    _program(file, name).run_kernel(
        ctypes.c_void_p(pointers), grid, threads, shared_bytes, words, len(ranges), seed, message, _MESSAGE_BYTES
    )
    if message.value:
        raise EmulationError(f"{name}: {message.value.decode()}")


def program_text(file: str, name: str) -> str:
    """The program in C++."""
    text = _PORTABLE.sub(lambda match: match[1] or "", nvrtc.source(file, name))
    text = _EXTERN.sub(r"\1* const \2 = reinterpret_cast<\1*>(emu::shared_memory);", _translated(text))
    return f'#include "{_HEADER}"\n{text}\nEMULATED_KERNEL({name})\n'


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="emulated-")


@cache
def _program(file: str, name: str) -> ctypes.CDLL:
    place = Path(_folder().name, name)
    place.with_suffix(".cpp").write_text(program_text(file, name))
    options = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing"]
    made = subprocess.run(
        ["g++", *options, place.with_suffix(".cpp"), "-o", place.with_suffix(".so")], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[:4000]
    return ctypes.CDLL(str(place.with_suffix(".so")))


def _translated(text: str) -> str:
    parts, at = list[str](), 0
    for match in _ASM.finditer(text):
        end = _closing(text, match.end())
        parts += [text[at : match.start()], _statement(text[match.end() : end])]
        at = end + 1
    return "".join([*parts, text[at:]])


def _statement(inside: str) -> str:
    """What an asm statement does, in C++; nothing where it only keeps the compiler from moving something."""
    sections = _sections(inside)
    lines = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])).split("\\n")
    template = "\n".join(line.strip() for line in lines)
    operands = [expression for section in sections[1:3] for expression in _operands(section)]
    known = max((begin for begin in PTX if template.startswith(begin)), key=len, default=None)
    does = PTX[known] if known else 'emu::fail("an instruction that is not emulated");' if template else ""
    return "do { " + re.sub(r"\$(\d)", lambda match: f"({operands[int(match[1])]})", does) + " } while (0)"


def _operands(section: str) -> Iterator[str]:
    for match in _OPERAND.finditer(section):
        yield section[match.end() : _closing(section, match.end())]


def _sections(inside: str) -> Sequence[str]:
    """Template, outputs, inputs and what else is said, which colons part."""
    cuts, depth = [-1], 0
    for place, character in _code(inside, 0):
        depth += (character in "([") - (character in ")]")
        if character == ":" and depth == 0:
            cuts.append(place)
    return [inside[begin + 1 : end] for begin, end in zip(cuts, [*cuts[1:], len(inside)], strict=True)]


def _closing(text: str, at: int) -> int:
    """Where the parenthesis closes that is open in front of ``at``."""
    depth = 1
    for place, character in _code(text, at):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    raise AssertionError("no closing parenthesis")


def _code(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Characters from ``at`` on, without those in quotes."""
    quoted = skipped = False
    for place in range(at, len(text)):
        character = text[place]
        if skipped:
            skipped = False
        elif quoted:
            quoted, skipped = character != '"', character == "\\"
        elif character == '"':
            quoted = True
        else:
            yield place, character


def chains(x: torch.Tensor, weight: torch.Tensor, split: int = 1) -> torch.Tensor:
    """What products add up to that way: float32 [tokens, rows], for K cut into so many ranges, see linear.cuh.

    Args:
        x, weight: bfloat16 [tokens, K], [rows, K].
    """
    stages = x.shape[1] // STAGE
    ranges = [
        range(first * STAGE, min(first + -(-stages // split), stages) * STAGE, _STEP)
        for first in range(0, stages, -(-stages // split))
    ]
    total = None
    for columns in ranges:
        sums = torch.zeros(len(x), len(weight))
        for first in columns:
            step = slice(first, first + _STEP)
            sums = (sums.double() + x[:, step].double() @ weight[:, step].double().T).float()
        total = sums if total is None else total + sums
    assert total is not None
    return total


def values(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 of 0.125 to 16, of either sign, whose products a tensor core adds up exactly before it rounds."""
    magnitudes = (1 + torch.rand(*shape, generator=generator)) * 2.0 ** torch.randint(-3, 4, shape, generator=generator)
    return torch.copysign(magnitudes, torch.rand(*shape, generator=generator) - 0.5).to(torch.bfloat16)
