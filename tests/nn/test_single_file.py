"""One safetensors file into a module that a program has built itself."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import samebits
from samebits.cli.run import run
from samebits.errors import DigestError, FormatError, InputError
from samebits.nn.packed_module import PackedModule
from tests.nn.modules import INPUT, Experts, same_bits

PREFIX = "model.diffusion_model."


class Model(nn.Module):
    """Layers, bare parameters, and something that is never packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.experts = Experts()
        self.register_buffer("steps", torch.arange(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.layer(x))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


@pytest.fixture
def plain(model: Model, tmp_path: Path) -> Path:
    """A checkpoint with the model below a prefix, and another tensor."""
    tensors = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "plain.safetensors"
    save_file({**tensors, "vae.weight": torch.randn(64, 64).to(torch.bfloat16)}, path, metadata={"license": "none"})
    return path


@pytest.fixture
def packed(plain: Path) -> Path:
    path = plain.with_name("packed.safetensors")
    assert run(["compress", str(plain), str(path)]) == 0
    return path


def test_description(plain: Path, packed: Path) -> None:
    original, file = samebits.SingleFile(plain), samebits.SingleFile(packed)
    assert file.shapes == original.shapes
    assert file.dtypes == original.dtypes
    assert file.metadata == original.metadata == {"license": "none"}
    assert file.is_packed
    assert not original.is_packed
    assert file.original_nbytes == original.nbytes == original.original_nbytes
    assert file.nbytes < 0.8 * original.nbytes


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_plain_tensors(prefix: str, plain: Path, packed: Path) -> None:
    expected = {name.removeprefix(prefix): tensor for name, tensor in load_file(plain).items() if prefix in name}
    for path in (plain, packed):
        state = samebits.SingleFile(path, prefix).state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name].view(torch.uint8))


def test_tensors_that_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    """On the GPU cuBLAS computes otherwise with a matrix that is aligned to less than 16 bytes."""
    tensors = {str(size): torch.randn(size).to(torch.bfloat16) for size in (1, 3, 5, 7)}
    save_file(tensors, tmp_path / "plain.safetensors")
    state = samebits.SingleFile(tmp_path / "plain.safetensors").state_dict()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in state.values())
    assert all(same_bits(state[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("assign", [False, True])
def test_packed_into_a_module(assign: bool, model: Model, packed: Path) -> None:
    file = samebits.SingleFile(packed, PREFIX)
    fresh = copy.deepcopy(model).to("meta") if assign else Model().to(torch.bfloat16)
    samebits.load_state_dict(fresh, file.packed_state_dict(), assign=assign)
    assert isinstance(fresh.layer, PackedModule)
    assert isinstance(fresh.experts, PackedModule)
    assert same_bits(fresh(INPUT), model(INPUT))
    assert all(parameter.data_ptr() % 16 == 0 for parameter in fresh.parameters())
    samebits.decompress(fresh)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_a_plain_file_into_a_module(model: Model, plain: Path) -> None:
    fresh = Model().to(torch.bfloat16)
    samebits.load_state_dict(fresh, samebits.SingleFile(plain, PREFIX).packed_state_dict())
    samebits.compress(fresh)
    assert same_bits(fresh(INPUT), model(INPUT))


def test_layout_of_dfloat11(tmp_path: Path) -> None:
    """Whose units would be given as they are stored."""
    plain, path = tmp_path / "plain.safetensors", tmp_path / "df11.safetensors"
    save_file({"blocks.0.layer.weight": torch.randn(64, 64).to(torch.bfloat16)}, plain)
    assert run(["compress", str(plain), str(path), "--format", "df11"]) == 0
    with pytest.raises(InputError, match=r"df11\.safetensors: in the layout of DFloat11; give `samebits decompress`"):
        samebits.SingleFile(path)


def test_a_file_that_is_replaced_while_it_is_open(plain: Path) -> None:
    file = samebits.SingleFile(plain)
    save_file({name: torch.zeros(32, 32) for name in load_file(plain)}, plain)
    for read in (file.state_dict, file.packed_state_dict):
        with pytest.raises(InputError, match=r"plain\.safetensors: the file has changed while it was read"):
            read()


def test_errors(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tensor's name begins with 'other\.'"):
        samebits.SingleFile(packed, "other.")
    with pytest.raises(InputError, match="a folder; give one"):
        samebits.SingleFile(tmp_path)
    with pytest.raises(InputError, match=r"absent\.safetensors: no such file; check the path"):
        samebits.SingleFile(tmp_path / "absent.safetensors")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"other\.gguf: not a safetensors file; give one \.safetensors file$"):
        samebits.SingleFile(tmp_path / "other.gguf")
    content = bytearray(packed.read_bytes())
    content[-100] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    for read in (samebits.SingleFile(damaged).state_dict, samebits.SingleFile(damaged).packed_state_dict):
        with pytest.raises((DigestError, FormatError), match=r"damaged\.safetensors: "):
            read()
    damaged.write_bytes(content[:-100])
    with pytest.raises(FormatError, match=r"damaged\.safetensors"):
        samebits.SingleFile(damaged)
