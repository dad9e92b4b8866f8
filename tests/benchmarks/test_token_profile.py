"""benchmarks/token_profile.py: how kernels are counted, and all of it in small on the CPU."""

from __future__ import annotations

import pytest

import token_profile


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("linear_ahead_8_shared", "fused"),
        ("linear_tiles_64_16", "fused"),
        ("decode_quad_whole", "decoding"),
        ("decode_rows_quad_whole", "decoding"),
        ("nvjet_tst_192x8_64x8_2x1_v_bz_TNT", "bf16_product"),
        ("void gemvNSP_kernel<__nv_bfloat16, ...>", "bf16_product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, ...>", "bf16_product"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void at::native::reduce_kernel<512, 1, ...>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kinds(kernel: str, kind: str) -> None:
    assert token_profile.kind_of(kernel) == kind


def test_no_moment_counts_twice() -> None:
    kernels = [("gemm", 1000.0, 3000.0), ("linear_chains_8_shared", 2000.0, 4500.0), ("copy", 2500.0, 2600.0)]
    found = token_profile.by_kind(kernels)
    assert (found["bf16_product"], found["fused"], found["other"]) == (2.0, 1.5, 0.0)


def test_by_name() -> None:
    kernels = [("gemm", 0.0, 5.0), ("linear_ahead_8", 7.0, 9.0), ("gemm", 8.0, 14.0), ("linear_ahead_8", 17.0, 21.0)]
    kernels += [(f"{number:03}" + "x" * 200, 100.0 + number, 100.5 + number) for number in range(20)]
    first, second, *others = token_profile.by_name(kernels)
    ours = {"kernel": "linear_ahead_8", "launches": 2, "microseconds": 3.0, "gap_microseconds": 2.5}
    assert first == {"rank": 1, "kernel": "gemm", "launches": 2, "microseconds": 5.5, "gap_microseconds": -0.5}
    assert second == {"rank": 2} | ours
    assert len(others) == token_profile.NAMED - 2
    assert {len(other["kernel"]) for other in others} == {token_profile.LONGEST_NAME}


def test_rows() -> None:
    found = list(token_profile.rows(["tiny"], [2], "cpu"))
    steps = [(row["form"], row["way"]) for row in found if row["table"] == "steps"]
    assert steps == [("BF16", "eager"), ("BF16", "graph"), ("samebits", "eager"), ("samebits", "graph")]
    calls = [row["matrix"] for row in found if row["table"] == "calls"]
    assert calls == ["128 x 128", "64 x 128", "256 x 128", "128 x 256", "512 x 128"]
    assert all(row["step_milliseconds"] >= row["host_milliseconds"] for row in found if row["table"] == "steps")
