"""What lies inside the domain of plans, and what makes another key."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from samebits.kernels.linear.launch import MAX_HOPPER_TOKENS
from samebits.plans import environment
from samebits.plans.environment import Environment, blas_state
from samebits.plans.key import PlanKey, is_gapless, key_of

N, K = 96, 128


def at_offset(shape: tuple[int, ...], words: int) -> torch.Tensor:
    """A contiguous tensor that starts ``words`` behind a multiple of 64 bytes."""
    room = torch.zeros(64 + words + 32 + torch.Size(shape).numel(), dtype=torch.bfloat16)
    start = -room.data_ptr() % 64 // 2 + words
    return room[start : start + torch.Size(shape).numel()].view(shape)


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    for remembered in (environment.variables, environment.getters):
        remembered.cache_clear()
    environment._last = ((), None)


def key(x: torch.Tensor, bias: torch.Tensor | None = None) -> PlanKey | None:
    return key_of(x, (N, K), bias)


@pytest.mark.parametrize("shape", [(5, K), (1, 5, K), (5, 1, K)], ids=str)
def test_two_and_three_dimensions_are_one_key(shape: tuple[int, ...]) -> None:
    state = blas_state()
    assert state is not None
    assert key(at_offset(shape, 0)) == PlanKey(N, K, 5, False, state)
    assert key(at_offset(shape, 8), at_offset((N,), 8)) == PlanKey(N, K, 5, True, state)


OUTSIDE: dict[str, Callable[[], torch.Tensor]] = {
    "one dimension": lambda: at_offset((K,), 0),
    "four dimensions": lambda: at_offset((1, 1, 5, K), 0),
    "2 bytes off": lambda: at_offset((5, K), 1),
    "8 bytes off": lambda: at_offset((5, K), 4),
    "gaps between rows": lambda: at_offset((5, 2 * K), 0)[:, :K],
    "every other column": lambda: at_offset((5, 2 * K), 0)[:, ::2],
    "last token of one sequence": lambda: at_offset((1, 5, K), 0)[:, -1:],
    "last token of two sequences": lambda: at_offset((2, 5, K), 0)[:, -1:],
    "transposed": lambda: at_offset((K, 5), 0).T,
    "swapped": lambda: at_offset((5, 2, K), 0).transpose(0, 1),
    "expanded": lambda: at_offset((1, K), 0).expand(5, K),
    "another width": lambda: at_offset((5, K + 64), 0),
    "more tokens than any kernel takes": lambda: at_offset((MAX_HOPPER_TOKENS + 1, K), 0),
    "float32": lambda: at_offset((5, K), 0).float(),
    "float16": lambda: at_offset((5, K), 0).half(),
}


@pytest.mark.parametrize("stride", [0, K + 8, 2 * K])
def test_one_row_may_have_any_aligned_stride(stride: int) -> None:
    """As torch.compile has it."""
    row = at_offset((1, 2 * K), 0)
    assert key(row.as_strided((1, K), (stride, 1))) == key(at_offset((1, K), 0)) is not None
    assert key(row.as_strided((1, 1, K), (stride, K, 1))) is None
    assert key(row.as_strided((1, K), (stride, 2))) is None
    assert key(row.as_strided((1, K), (1, 1))) is None
    assert key(row.as_strided((1, K), (K + 4, 1))) is None  # the next one would be aligned otherwise


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_inputs_have_no_key(name: str) -> None:
    assert key(OUTSIDE[name]()) is None


class Elsewhere(torch.Tensor):
    def get_device(self) -> int:
        return 1


BIASES: dict[str, Callable[[], torch.Tensor]] = {
    "2 bytes off": lambda: at_offset((N,), 1),
    "float32": lambda: at_offset((N,), 0).float(),
    "another length": lambda: at_offset((N + 8,), 0),
    "one for all": lambda: at_offset((1,), 0),
    "two dimensions": lambda: at_offset((1, N), 0),
    "strided": lambda: at_offset((2 * N,), 0)[::2],
    "on another device": lambda: at_offset((N,), 0).as_subclass(Elsewhere),
}


@pytest.mark.parametrize("name", BIASES)
def test_other_biases_have_no_key(name: str) -> None:
    assert key(at_offset((5, K), 0), BIASES[name]()) is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("_get_blas_preferred_backend", torch._C._BlasBackend.Cublaslt),
        ("_get_cublas_allow_bf16_reduced_precision_reduction", (False, True)),
        ("_get_cublas_allow_bf16_reduced_precision_reduction", (False, False)),
        ("_get_cublas_allow_bf16_reduced_precision_reduction", False),  # older versions of torch
        ("_get_deterministic_algorithms", True),
        ("_get_sm_carveout_experimental", 8),
        ("_cuda_getCublasWorkspaceSize", 1 << 20),
        ("_cuda_getCublasLtWorkspaceSize", 1 << 20),
    ],
)
def test_settings_make_another_key(setting: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    x = at_offset((5, K), 0)
    before = key(x)
    monkeypatch.setattr(torch._C, setting, lambda: value, raising=False)
    forget()
    assert None is not key(x) != before


def test_settings_are_read_at_every_call() -> None:
    x = at_offset((5, K), 0)
    before = key(x)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        assert None is not key(x) != before
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    assert key(x) == before


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"])
def test_a_workspace_that_changes_has_no_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may go on with the old one or not, by stream: nothing is known."""
    x = at_offset((5, K), 0)
    before = key(x)
    monkeypatch.setenv(name, ":16:8")
    assert key(x) is None
    monkeypatch.delenv(name)
    assert key(x) == before


def test_a_workspace_from_the_start_is_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert key(at_offset((5, K), 0)) is not None
    assert environment.variables()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert key(at_offset((5, K), 0)) is None


def test_tunable_operators_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = [False]
    monkeypatch.setattr(torch._C, "_cuda_tunableop_is_enabled", lambda: tuned[0], raising=False)
    forget()
    assert key(at_offset((5, K), 0)) is not None
    tuned[0] = True
    assert key(at_offset((5, K), 0)) is None


def test_every_part_of_the_environment_has_its_own_plans() -> None:
    plain = {"device": "a", "multiprocessors": 1, "driver": "b", "torch": "c", "cublas": "d", "kernels": "e"}
    digests = {Environment(**plain, variables={}).digest, Environment(**plain, variables={"CUBLAS_X": "1"}).digest}
    digests |= {Environment(**{**plain, name: "other"}, variables={}).digest for name in plain}
    assert len(digests) == len(plain) + 2


def test_the_digest_of_the_kernels_is_that_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(environment.__file__).parents[1] / "kernels", tmp_path / "kernels")
    before = environment.kernels_digest()
    monkeypatch.setattr(environment, "files", lambda package: tmp_path / "kernels")
    assert environment.kernels_digest() == before
    for name in ("linear/products.py", "linear/launch.py", "linear/job.py", "linear/pairs.py", "csrc/common.cuh"):
        with open(tmp_path / "kernels" / name, "a", encoding="utf-8") as file:
            file.write("\n")
        assert environment.kernels_digest() != before
        before = environment.kernels_digest()


@pytest.mark.parametrize("shape", [(3, 64), (2, 1, 64), (1, 0, 64), (0, 3, 64), (2, 0, 3, 64), (1, 1, 5, 64)], ids=str)
def test_gapless_are_the_strides_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    assert is_gapless(torch.empty(shape))
    assert not is_gapless(torch.empty((*shape[:-1], 72))[..., :64])
