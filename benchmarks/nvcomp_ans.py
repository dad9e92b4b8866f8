"""nvCOMP's ANS on the exponent bytes of weights, through its Python package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from common import Measured, Timing
from gpu import DISTINCT_BYTES, OUTPUTS

PACKAGE = "nvidia.nvcomp"
POLICIES = ("CONCURRENCY", "LATENCY")
PAUSE_CYCLES = 50_000_000  # some 25 ms, in which the host puts all calls on the stream


class NvcompAns:
    """The exponents of all matrices behind each other, as one array. Sign and mantissa are left out: somebody would
    still have to put them in."""

    name = "nvCOMP ANS, exponents alone"

    def __init__(self, nvcomp: Any) -> None:
        self.nvcomp = nvcomp
        self.name += f", {nvcomp.__version__}"

    @classmethod
    def installed(cls) -> NvcompAns | None:
        """None without the package; one that is there and cannot be loaded is an error."""
        try:
            return cls(import_module(PACKAGE))
        except ModuleNotFoundError as error:
            if not f"{PACKAGE}.".startswith(f"{error.name}."):
                raise
            return None

    def measure(self, weights: Sequence[torch.Tensor], repeats: int) -> Measured:
        """With the faster of its two policies.

        Returns:
            with the bytes of signs and mantissas, one a weight, added to those of the exponents.

        Raises:
            RuntimeError: its output differs from the exponents, or it fails.
        """
        words = torch.cat([weight.flatten() for weight in weights]).view(torch.int16)
        exponents = (words >> 7 & 0xFF).to(torch.uint8)
        with side_stream() as stream:
            results = [self._measure(exponents, policy, stream, repeats) for policy in POLICIES]
        return min(results, key=lambda measured: measured.timing.median)

    def _measure(self, exponents: torch.Tensor, policy: str, stream: int, repeats: int) -> Measured:
        wrap, execution_policy = self.nvcomp.as_array, getattr(self.nvcomp.ExecutionPolicy, policy)
        codec = self.nvcomp.Codec(algorithm="ANS", cuda_stream=stream, execution_policy=execution_policy)
        encoded = codec.encode(wrap(exponents, cuda_stream=stream))
        config = codec.decompression_config(encoded)  # which waits for the encoder
        data = torch.as_tensor(encoded, device=exponents.device).clone()
        copies = [data, *(data.clone() for _ in range(int(DISTINCT_BYTES / data.nbytes)))]
        outputs = [torch.zeros_like(exponents) for _ in range(OUTPUTS)]
        sources, targets = ([wrap(t, cuda_stream=stream) for t in tensors] for tensors in (copies, outputs))
        calls = [
            partial(codec.decode, source, out=targets[i % OUTPUTS], decompression_config=config)
            for i, source in enumerate(sources)
        ]
        timing = time_stream(calls, repeats)
        if not all(torch.equal(output, exponents) for output in outputs[: len(copies)]):
            raise RuntimeError("its output differs from the exponents")
        return Measured(data.nbytes + exponents.numel(), timing, f"stream ({policy.lower()})")


@contextmanager
def side_stream() -> Iterator[int]:
    """A stream of its own behind all work so far, as torch's current one. The default stream's number means none."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream.cuda_stream
    torch.cuda.synchronize()


def time_stream(calls: list[Callable[[], object]], repeats: int) -> Timing:
    """Seconds of one call, from the current stream's events around all of them.

    For what cannot be captured into a graph. They stand behind a pause, so that the host's own time does not count
    unless a call waits for the device.
    """
    for call in calls:
        call()
    seconds = []
    for _ in range(repeats):
        torch.cuda._sleep(PAUSE_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return Timing.of(seconds)
