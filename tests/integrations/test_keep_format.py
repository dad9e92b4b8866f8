"""DFloat11 folders that stay in their layout: what the BF16 checkpoint says, to the bit, and the same bytes saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, MambaConfig, MambaForCausalLM, T5Config, T5EncoderModel

import samebits
from samebits.errors import DtypeError, FormatError, InputError
from samebits.format.container import Checkpoint
from samebits.jobs.compress_df11 import Df11Compression
from samebits.nn.df11 import holds_units
from tests.df11.checkpoints import VECTORS, regroup, tensors_of
from tests.df11.checkpoints import copy as copy_folder
from tests.integrations.models import Reference, assert_same_bits, make
from tests.jobs.checkpoints import stored

FOLDER = VECTORS / "tiny-llama"
ONE_GPU = pytest.mark.skipif(torch.cuda.device_count() > 1, reason="auto is several GPUs, which such a model refuses")


def load(folder: Path | str = FOLDER, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, keep_format=True, **options)


def assert_same_tensors(model: Any, folder: Path, tied: str = "") -> None:
    """The model holds a folder's tensors, and nothing else."""
    tensors, state = tensors_of(folder), model.state_dict()
    assert state.keys() - {tied} == tensors.keys()
    for name, tensor in tensors.items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(state[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name


def test_same_logits_and_tokens(plain: Reference) -> None:
    model = load()
    assert_same_tensors(model, FOLDER)
    plain.assert_same(model)
    assert not hasattr(model.config, "_is_quantized")  # some models round otherwise then
    assert model.get_memory_footprint() < 0.72 * plain.model.get_memory_footprint()


def test_saving_gives_the_layout_back(plain: Reference, tmp_path: Path) -> None:
    load().save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved") == stored(FOLDER)
    config, before = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", FOLDER))
    assert config["dfloat11_config"] == before["dfloat11_config"]
    assert config.keys().isdisjoint({"quantization_config", "transformers_weights"})
    plain.assert_same(load(tmp_path / "saved"))
    plain.assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


def test_saved_in_shards(plain: Reference, tmp_path: Path) -> None:
    load().save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert stored(tmp_path / "saved") == stored(FOLDER)
    plain.assert_same(load(tmp_path / "saved"))


def test_base_model(plain: Reference, tmp_path: Path) -> None:
    expected = plain.model.model(plain.tokens).last_hidden_state
    model = AutoModel.from_pretrained(FOLDER, keep_format=True)
    assert_same_bits(model(plain.tokens).last_hidden_state, expected)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, keep_format=True)
    assert_same_bits(again(plain.tokens).last_hidden_state, expected)


def test_any_grouping_of_files(plain: Reference, tmp_path: Path) -> None:
    folder = copy_folder("tiny-llama", tmp_path / "df11", version="0.2.0")
    names = sorted(tensors_of(folder))
    regroup(folder, {f"part{number}.safetensors": names[number::3] for number in range(3)})
    plain.assert_same(load(folder))


@pytest.mark.parametrize("units", ["", "model.embed_tokens", "lm_head", "model.embed_tokens lm_head"])
def test_tied_embeddings(units: str, tmp_path: Path) -> None:
    """Whichever of the two names a unit has, both, or none."""
    reference = make("llama-tied", tmp_path / "bf16")
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    embeddings = tensors.pop("model.embed_tokens.weight")
    tensors |= {f"{name}.weight": embeddings.clone() for name in (units or "model.embed_tokens").split()}
    save_file(tensors, tmp_path / "bf16" / "model.safetensors")
    patterns = {r"model\.layers\.\d+": ["mlp.up_proj", "self_attn.q_proj"], **{name: [] for name in units.split()}}
    Df11Compression(Checkpoint.open(tmp_path / "bf16"), tmp_path / "df11", patterns).run()
    model = reference.load(tmp_path / "df11", keep_format=True)
    assert_same_tensors(model, tmp_path / "df11", "" if units else "lm_head.weight")
    reference.assert_same(model)
    model.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "df11")
    reference.assert_same(reference.load(tmp_path / "again", keep_format=True))


def test_copies_run_on_their_own(plain: Reference) -> None:
    model = load()
    copied = copy.deepcopy(model)
    model.lm_head.sign_mantissa.zero_()
    plain.assert_same(copied)


@pytest.mark.parametrize("device_map", [pytest.param("auto", marks=ONE_GPU), {"": "cpu"}])
def test_device_map(plain: Reference, device_map: Any) -> None:
    plain.assert_same(load(device_map=device_map))


def test_to(plain: Reference) -> None:
    model = load()
    plain.assert_same(model.to("cpu").to(torch.bfloat16))
    with pytest.raises(DtypeError, match="cannot become"):
        model.to(torch.float16)
    assert model.to("meta").lm_head.luts.device.type == "meta"


def test_other_checkpoints_keep_their_format_anyway(plain: Reference) -> None:
    model = load(plain.folder)
    assert not holds_units(model)
    plain.assert_same(model)


@pytest.mark.parametrize(
    "device_map",
    [
        {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
         "lm_head": "disk"},
        {"model": "cpu", "lm_head": "meta"},
        {"": "disk"},
    ],
    ids=["disk", "two devices", "all on disk"],
)  # fmt: skip
def test_several_devices_are_refused(device_map: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"keeps its format cannot be on (cpu, )?\w+; pass device_map="):
        load(device_map=device_map, offload_folder=tmp_path)


def test_options_of_samebits_are_refused() -> None:
    with pytest.raises(InputError, match="leave out keep_format"):
        load(quantization_config=samebits.SamebitsConfig())


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DtypeError, match="bfloat16"):
        load(dtype=torch.float16)


T5 = T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
MAMBA = MambaConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, state_size=8)
REACHING = {
    "t5": (T5EncoderModel, T5, {r"encoder\.block\.\d+": ["layer.0.SelfAttention.q", "layer.0.SelfAttention.o"]}),
    "mamba": (MambaForCausalLM, MAMBA, {r"backbone\.layers\.\d+": ["mixer.in_proj", "mixer.out_proj"]}),
}


@pytest.mark.parametrize("name", REACHING)
def test_modules_that_initialize_what_is_below_them(name: str, tmp_path: Path) -> None:
    """As they would weights of units, which are gone by then."""
    model_class, config, units = REACHING[name]
    torch.manual_seed(0)
    model_class(config).bfloat16().save_pretrained(tmp_path / "plain")
    Df11Compression(Checkpoint.open(tmp_path / "plain"), tmp_path / "df11", units).run()
    kept = model_class.from_pretrained(tmp_path / "df11", keep_format=True)
    kept.save_pretrained(tmp_path / "again")
    assert not any("weight" in vars(module) for module in kept.modules())
    tokens, models = torch.arange(3, 20)[None], [kept]
    for folder, options in (("plain", {"dtype": torch.bfloat16}), ("again", {"keep_format": True})):
        models.append(model_class.from_pretrained(tmp_path / folder, **options))
    with torch.no_grad():
        first, expected, again = (model(tokens)[0].contiguous().view(torch.uint8) for model in models)
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)


def test_it_is_not_decompressed_in_place() -> None:
    model = load()
    with pytest.raises(InputError, match="keeps its weights in DFloat11's layout; load the model anew"):
        samebits.decompress(model)


def test_it_cannot_be_decompressed() -> None:
    with pytest.raises(InputError, match="load it without keep_format"):
        load().dequantize()


def test_another_models_config(tmp_path: Path) -> None:
    folder = copy_folder("tiny-llama", tmp_path / "df11")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(FormatError, match=r"model\.layers\.\d.*do not make up"):
        load(folder)


def test_a_unit_of_matrices_that_become_others(tmp_path: Path) -> None:
    """As transformers puts together those of experts."""
    mixtral = make("mixtral", tmp_path / "bf16")
    units = {r"model\.layers\.\d+\.block_sparse_moe\.experts\.\d+": ["w2"]}
    Df11Compression(Checkpoint.open(tmp_path / "bf16"), tmp_path / "df11", units).run()
    with pytest.raises(InputError, match="transformers makes other matrices of this unit's"):
        mixtral.load(tmp_path / "df11", keep_format=True)


def test_a_damaged_stream(tmp_path: Path) -> None:
    """Seen when it is decoded first."""
    folder = copy_folder("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "model_layers_1.safetensors")
    tensors["model.layers.1.encoded_exponent"][5000:] = 0xFF
    save_file(tensors, folder / "model_layers_1.safetensors")
    model = load(folder)
    with pytest.raises(FormatError, match="does not fit its tables"):
        model(torch.arange(5)[None])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"device_map": "cuda"}, pytest.param({"device_map": "auto"}, marks=ONE_GPU), {}], ids=str
)
def test_on_a_gpu(plain: Reference, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = AutoModelForCausalLM.from_pretrained(plain.folder).to("cuda")
    model = load(**options).to("cuda")
    tokens = plain.tokens.to("cuda")
    for cache in ({}, {"cache_implementation": "static"}):
        generated = [m.generate(tokens, max_new_tokens=6, do_sample=False, **cache).tolist() for m in (model, expected)]
        assert generated[0] == generated[1]
    assert_same_bits(model(tokens).logits, expected(tokens).logits)
    assert_same_tensors(model, FOLDER)
    model.save_pretrained(tmp_path)
    assert stored(tmp_path) == stored(FOLDER)
