"""Compile CUDA C++ at run time, cache the result on disk, launch on torch's current stream.

NVRTC and the driver's bindings come with torch's CUDA wheels; cuda-core keeps the disk cache, which several processes
may use at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from samebits.errors import DeviceError

if TYPE_CHECKING:
    from cuda.core import Kernel

_log = logging.getLogger(__name__)
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
_INSTANCE = re.compile(r"^[A-Z]+_KERNEL\((\w+), .*\)\n", re.MULTILINE)  # a kernel that is made of a template
_ANY_ADDRESS = 1 << 32
_MEND = "pip install cuda-core cuda-bindings, of the CUDA version that torch was built for, or use the CPU"


def source(file: str, kernel: str | None = None) -> str:
    """The text of csrc/``file`` with its headers put in place, each once.

    Args:
        kernel: one of ``instances(file)``, without the others.
    """
    seen: set[str] = set()

    def read(file: str) -> str:
        return _INCLUDE.sub(include, _text(file).replace("#pragma once\n", ""))

    def include(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return read(match[1])

    return _INSTANCE.sub(lambda match: match[0] if kernel in (None, match[1]) else "", read(file))


def instances(file: str) -> list[str]:
    """The kernels that csrc/``file`` makes of templates, each of which is compiled alone."""
    return _INSTANCE.findall(_text(file))


@cache
def _text(file: str) -> str:
    return files("samebits.kernels").joinpath("csrc", file).read_text(encoding="utf-8")


def architecture(capability: tuple[int, int]) -> str:
    """The target of a compute capability; Hopper and later get their specific features."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_source(
    file: str, target: str, kernel: str | None = None, *, cached: bool = True, log: IO[str] | None = None
) -> Any:
    """Compile csrc/``file`` for ``target`` to a cuda.core ObjectCode (needs no GPU).

    Args:
        kernel: as ``source``.
        log: what the compilers say of it is written there, if it is not found in the cache.

    Raises:
        DeviceError: cuda-core or NVRTC is missing, or the compiler refuses the source.
    """
    try:
        from cuda.core import Program, ProgramOptions
        from cuda.core._utils.cuda_utils import CUDAError  # its errors have no public name
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        raise DeviceError(f"the CUDA kernels need cuda-core ({error})", mend=_MEND) from error
    options = ProgramOptions(name=file, arch=target, std="c++17")
    try:
        program = Program(source(file, kernel), "c++", options)
        if cached:
            try:
                return program.compile("cubin", logs=log, cache=FileStreamProgramCache())
            except OSError as error:
                _log.warning("compiled kernels are not kept, and are compiled anew in each process: %s", error)
        return program.compile("cubin", logs=log)
    except (CUDAError, RuntimeError, OSError) as error:
        raise DeviceError(f"cannot compile {kernel or file} for {target}: {error}", mend=_MEND) from error


class Source(NamedTuple):
    """Where a kernel is: a file under csrc, and its name there."""

    file: str
    kernel: str


def _module(source: Source, device: int) -> Any:
    """With that kernel alone, if it is an instance, else with all of its file."""
    return _compiled(source.file, source.kernel if source.kernel in instances(source.file) else None, device)


@cache
def _compiled(file: str, kernel: str | None, device: int) -> Any:
    return compile_source(file, architecture(torch.cuda.get_device_capability(device)), kernel)


def compile_all(sources: Iterable[Source], device: int) -> None:
    """Have these kernels compiled for a device, side by side: NVRTC takes a second and one thread for each.

    Raises:
        DeviceError: as compile_source.
    """
    sources = sorted({*sources})
    with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1))) as threads:
        list(threads.map(lambda source: _module(source, device), sources))


@cache
def kernel(file: str, name: str, device: int) -> Kernel:
    """The kernel ``name`` of csrc/``file`` on ``device``, ready for as much shared memory as the device has.

    Raises:
        DeviceError: as compile_source.
    """
    module = _module(Source(file, name), device)
    from cuda.bindings import driver
    from cuda.core import Device

    Device(device).set_current()
    function = module.get_kernel(name)
    attribute = driver.CUfunction_attribute
    available = shared_memory(device) - function.attributes[device].shared_size_bytes
    for name, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, available),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),  # percent: room for the kernel behind
    ):
        _check(driver.cuKernelSetAttribute(name, value, function.handle, driver.CUdevice(device)))
    return function


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory one block may use."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def driver_version() -> str:
    """The version of CUDA that the driver is made for."""
    from cuda.bindings import driver

    result, number = driver.cuDriverGetVersion()
    _check((result,))
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def has_wgmma(device: int) -> bool:
    """Whether there are Hopper's own instructions."""
    return torch.cuda.get_device_capability(device) == (9, 0)


class Where(NamedTuple):
    """What a launch becomes a part of: a stream's work, and the graph that is captured there, 0 if none is."""

    stream: int
    capture: int


def where(device: int) -> Where:
    """Of a launch now on torch's current stream of a device."""
    stream = current_stream(device)
    return Where(stream, _capture(stream).number if torch.cuda.is_current_stream_capturing() else 0)


class _Capture(NamedTuple):
    """A graph that is being captured on a stream: its number, and the nodes, with edges, that the next depends on."""

    number: int
    nodes: list[Any]
    edges: list[Any]


def _capture(stream: int) -> _Capture:
    from cuda.bindings import driver

    result, _, number, _, nodes, edges, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    _check((result,))
    return _Capture(int(number), nodes, edges)


_ALREADY = nullcontext()


def on_device(device: int) -> AbstractContextManager[object]:
    """Makes ``device`` the current one, which takes no time where it is."""
    return _ALREADY if torch.cuda.current_device() == device else torch.cuda.device(device)


@cache
def starts_early(device: int) -> bool:
    """Whether there are programmatic dependent launches."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    function: Kernel,
    grid: int,
    threads: int,
    shared: int,
    *arguments: ctypes.Structure | ctypes._SimpleCData[Any],
    early: bool = False,
) -> None:
    """Launch on torch's current stream.

    Args:
        arguments: ctypes values, structures by value.
        early: the kernel may start before the one in front of it has ended (programmatic dependent launch); it waits
            itself before it touches what that kernel may write or read. Older devices than Hopper cannot.
    """
    device = torch.cuda.current_device()
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    launcher(function, grid, threads, shared, current_stream(device), early, device)(ctypes.addressof(pointers))


def current_stream(device: int) -> int:
    """torch's, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


class Configured(NamedTuple):
    """A launch but for its arguments, as cuLaunchKernelEx takes it.

    Attributes:
        config: CUlaunchConfig.
        function: CUfunction.
    """

    config: Any
    function: Any


@lru_cache(maxsize=8192)
def configured(
    function: Kernel, grid: int, threads: int, shared: int, stream: int, early: bool, device: int
) -> Configured:
    """Made once for each, for this is what takes longest in a launch."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(stream)
    if early and starts_early(device):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return Configured(config, driver.CUfunction(int(function.handle)))


@lru_cache(maxsize=8192)
def launcher(
    function: Kernel, grid: int, threads: int, shared: int, stream: int, early: bool, device: int
) -> Callable[[int], None]:
    """``launch``, but on a stream, made once: it takes the address of an array of the arguments' addresses."""
    from cuda.bindings import driver

    start = partial(driver.cuLaunchKernelEx, *configured(function, grid, threads, shared, stream, early, device))

    def launch(pointers: int) -> None:
        _check(start(pointers, 0))

    if not (early and starts_early(device)):
        return launch
    captured = launcher(function, grid, threads, shared, stream, False, device)

    def launch_or_capture(pointers: int) -> None:
        if torch.cuda.is_current_stream_capturing() and _begins_beside_next(stream):
            captured(pointers)
        else:
            launch(pointers)

    return launch_or_capture


def _begins_beside_next(stream: int) -> bool:
    """Have what is captured next begin when all blocks of the kernel in front of it have; False if that is no kernel.

    By itself a launch that starts early does so when the kernel in front lets it, or has ended, and torch's kernels
    never let it. That it may do so sooner only an edge of a graph can say, and it waits for that kernel all the same.
    """
    from cuda.bindings import driver

    _, nodes, edges = _capture(stream)
    if len(nodes) != 1 or any(edge.from_port or edge.type for edge in edges):
        return False
    result, kind = driver.cuGraphNodeGetType(nodes[0])
    _check((result,))
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return False
    edge = driver.CUgraphEdgeData()
    edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER
    edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
    flags = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES.value
    _check(driver.cuStreamUpdateCaptureDependencies(driver.CUstream(stream), nodes, [edge], 1, flags))
    return True


def tensor_map(rows: int, columns: int, box_rows: int, box_columns: int) -> tuple[int, ...]:
    """A CUtensorMap, as 32-bit words, of a bfloat16 matrix at an address that is still to be put in.

    Its boxes arrive in shared memory swizzled, as wgmma takes rows of 32 or 64 columns; where rows end, zeros arrive.

    Raises:
        DeviceError: the driver does not know of tensor maps.
    """
    from cuda.bindings import driver

    kind, swizzle = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, driver.CUtensorMapSwizzle
    swizzles = {32: swizzle.CU_TENSOR_MAP_SWIZZLE_64B, 64: swizzle.CU_TENSOR_MAP_SWIZZLE_128B}
    result, made = driver.cuTensorMapEncodeTiled(
        kind, 2, _ANY_ADDRESS, [driver.cuuint64_t(columns), driver.cuuint64_t(rows)], [driver.cuuint64_t(2 * columns)],
        [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)], [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles[box_columns],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    _check((result,))
    words = (int(word) for word in made.opaque)
    return tuple(half for word in words for half in (word & 0xFFFFFFFF, word >> 32))


@cache
def launch_address() -> int:
    """Of the driver's cuLaunchKernelEx."""
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value
    assert address is not None
    return address


def check_code(code: int) -> None:
    """Raise a DeviceError for a CUresult that is not CUDA_SUCCESS."""
    from cuda.bindings import driver

    _check((driver.CUresult(code),))


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise DeviceError(f"CUDA driver: {result[0].name}", mend="see `samebits doctor`")
