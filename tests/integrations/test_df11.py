"""DFloat11 folders in transformers: what the BF16 checkpoint says, to the bit, from a model like any packed one."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import samebits
from samebits.df11.unit import Unit
from samebits.errors import DtypeError, FormatError, InputError, VersionError
from samebits.integrations.transformers import df11
from samebits.nn.packed_module import packed_parameters
from tests.df11.checkpoints import VECTORS, copy, originals, regroup, tensors_of
from tests.integrations.models import Reference, assert_same_bits
from tests.integrations.test_placement import as_hub_cache
from tests.jobs.checkpoints import stored

FOLDER = VECTORS / "tiny-llama"
DISK = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
        "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_same_logits_and_tokens(plain: Reference) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    plain.assert_all_packed(model)
    plain.assert_same(model)
    assert model.hf_quantizer.report.bits_per_weight < 10.9


def test_a_model_loaded_so_is_like_one_of_a_compressed_folder(plain: Reference, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"config.json", "samebits.safetensors"}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "samebits"
    assert config.keys().isdisjoint({"dfloat11_config", "transformers_weights"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    plain.assert_same(again)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), again.state_dict()[name].view(torch.uint8)), name


def test_dequantized_it_is_the_plain_model(plain: Reference, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER).dequantize()
    plain.assert_same(model)
    model.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved") == originals("tiny-llama")
    plain.assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


def test_options_of_samebits(plain: Reference) -> None:
    config = samebits.SamebitsConfig(include=("*mlp*",))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=config)
    assert all("mlp" in name for name, _, _ in packed_parameters(model))
    plain.assert_same(model)


def test_any_grouping_of_files(plain: Reference, tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11", version="0.2.0")
    names = sorted(tensors_of(folder))
    regroup(folder, {f"part{number}.safetensors": names[number::3] for number in range(3)})
    plain.assert_same(AutoModelForCausalLM.from_pretrained(folder))


def test_base_model(plain: Reference) -> None:
    model = AutoModel.from_pretrained(FOLDER)
    expected = plain.model.model(plain.tokens).last_hidden_state
    assert torch.equal(model(plain.tokens).last_hidden_state.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_map(plain: Reference, device_map: Any) -> None:
    plain.assert_same(AutoModelForCausalLM.from_pretrained(FOLDER, device_map=device_map))


def test_layers_on_disk(plain: Reference, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, device_map=dict(DISK), offload_folder=tmp_path / "disk")
    on_disk = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    assert "model.layers.1.self_attn.q_proj.sb_packed" in on_disk
    plain.assert_same(model)


def test_hub_id(plain: Reference, tmp_path: Path) -> None:
    cache = as_hub_cache(FOLDER, tmp_path)
    plain.assert_same(AutoModelForCausalLM.from_pretrained("me/model", cache_dir=cache, local_files_only=True))


def test_subfolder(plain: Reference, tmp_path: Path) -> None:
    copy("tiny-llama", tmp_path / "part")
    plain.assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="part"))


def test_one_matrix_at_a_time(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is never whole in memory: each matrix is decoded when its turn comes, and gone when the next one is."""
    decoded: list[weakref.ref[torch.Tensor]] = []
    to = df11._Slice.to

    def watched(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert all(weight() is None for weight in decoded)
        weight = to(self, *args, **kwargs)
        decoded.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(df11._Slice, "to", watched)
    plain.assert_same(AutoModelForCausalLM.from_pretrained(FOLDER))
    assert len(decoded) == 2 + 3 * 7


def test_damaged_unit(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "model_layers_1.safetensors")
    tensors["model.layers.1.encoded_exponent"][5000:] = 0xFF
    save_file(tensors, folder / "model_layers_1.safetensors")
    with pytest.raises(FormatError, match=r"model\.layers\.1.*does not fit its tables"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_missing_file(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "model_layers_1.safetensors")
    del tensors["model.layers.1.gaps"]
    save_file(tensors, folder / "model_layers_1.safetensors")
    with pytest.raises(FormatError, match="no gaps"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_another_models_config(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(FormatError, match="do not make up"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_pickles(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11", version="0.1.0")
    with pytest.raises(VersionError, match="pickles"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    regroup(folder, {})
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match="no safetensors files"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DtypeError, match="bfloat16"):
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"device_map": "cuda"}, {}])
def test_on_a_gpu(plain: Reference, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights belong there, none is decoded on the CPU."""
    expected = AutoModelForCausalLM.from_pretrained(plain.folder).to("cuda")
    if options:
        monkeypatch.delattr(Unit, "decode")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, **options).to("cuda")
    tokens = plain.tokens.to("cuda")
    plain.assert_all_packed(model)
    assert_same_bits(model(tokens).logits, expected(tokens).logits)
