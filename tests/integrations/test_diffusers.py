"""diffusers: outputs equal to the uncompressed model's, by bytes, whichever way in; eligible weights are packed."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("diffusers")
import diffusers
from diffusers.configuration_utils import register_to_config
from diffusers.hooks import apply_layerwise_casting

import samebits
from samebits.cli.run import run
from samebits.df11.checkpoint import open_checkpoint
from samebits.errors import DigestError, DtypeError, FormatError, InputError, VersionError
from samebits.format.container import Checkpoint
from samebits.integrations.diffusers.quantizer import convert
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.decompress import Decompression
from samebits.nn.packed_linear import PackedLinearModule
from samebits.plans import dispatch
from tests.fresh import run_python
from tests.integrations.diffusers_models import (
    ARCHITECTURES,
    Reference,
    assert_same_bytes,
    eligible,
    inputs,
    make,
    output,
)
from tests.integrations.models import assert_same_checkpoint, compress_folder, files, packed_parameters


@pytest.fixture(scope="module")
def make_once(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda name, **options: make(name, tmp_path_factory.mktemp(name) / "plain", **options))


@pytest.fixture(params=ARCHITECTURES)
def any_model(request: pytest.FixtureRequest, make_once) -> Reference:
    return make_once(request.param)


@pytest.fixture
def flux(make_once) -> Reference:
    return make_once("flux")


@pytest.fixture
def flux_folder(flux: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> Path:
    flux.load(quantization_config=config).save_pretrained(tmp_path / "flux")
    return tmp_path / "flux"


def assert_all_packed(model, reference: Reference) -> None:
    expected = set(eligible(reference.model))
    assert len(expected) > 10
    assert {name for name, _, _ in packed_parameters(model)} == expected
    assert model.hf_quantizer.report.packed.keys() == expected


@pytest.mark.parametrize(
    "options", [{}, {"low_cpu_mem_usage": False}, {"quantization_config": samebits.SamebitsConfig()}], ids=str
)
def test_layouts_of_dfloat11_are_refused(flux: Reference, options: dict[str, Any], tmp_path: Path) -> None:
    """Whose units diffusers takes for weights that are missing; what is made of such a folder loads."""
    units = {r"transformer_blocks\.\d+": ["attn.to_q", "attn.to_k"]}
    Df11Compression(Checkpoint.open(flux.folder), tmp_path / "df11", units).run()
    model_class = type(flux.model)
    with pytest.raises(InputError, match=r"df11: a checkpoint in DFloat11's layout.*samebits compress"):
        model_class.from_pretrained(tmp_path / "df11", dtype=torch.bfloat16, **options)
    assert model_class.load_config(tmp_path / "df11")["dfloat11_config"]
    Decompression(open_checkpoint(tmp_path / "df11"), tmp_path / "plain").run()
    flux.assert_same(model_class.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, **options))


def test_a_single_file_of_dfloat11_is_refused(flux: Reference, tmp_path: Path) -> None:
    source, file = flux.folder / "diffusion_pytorch_model.safetensors", tmp_path / "df11.safetensors"
    Df11Compression(Checkpoint.open(source), file, {r"transformer_blocks\.\d+": ["attn.to_q", "attn.to_k"]}).run()
    with pytest.raises(InputError, match=r"df11.safetensors: in the layout of DFloat11; .*samebits decompress"):
        type(flux.model).from_single_file(str(file), config=str(flux.folder), dtype=torch.bfloat16)


def motion_adapter(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"motion_layers_per_block": 1, "motion_norm_num_groups": 4, "motion_num_attention_heads": 2}
    adapter = diffusers.MotionAdapter(block_out_channels=(32, 64), **sizes).to(torch.bfloat16)
    for parameter in adapter.parameters():  # some are made zero
        nn.init.normal_(parameter, std=0.02)
    return adapter


@pytest.fixture(scope="module")
def motion_unet() -> Any:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=4, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return diffusers.UNetMotionModel.from_unet2d(unet.to(torch.bfloat16), motion_adapter(1)).to(torch.bfloat16)


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    model = copy.deepcopy(model)
    samebits.decompress(model)
    found = {name: tensor.bfloat16().view(torch.int16) for name, tensor in model.state_dict().items()}
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], each.view(torch.int16)) for name, each in expected.state_dict().items())


@pytest.mark.parametrize("packed", ["unet", "adapter", "both", "neither"])
def test_motion_modules_of_another_adapter(motion_unet: Any, packed: str) -> None:
    unet, adapter, expected = copy.deepcopy(motion_unet), motion_adapter(2), copy.deepcopy(motion_unet)
    expected.load_motion_modules(adapter)
    for model, names in ((unet, ("unet", "both")), (adapter, ("adapter", "both"))):
        if packed in names:
            assert samebits.compress(model, min_weights=256).packed
    if packed == "unet":
        with pytest.raises(InputError, match=r"its motion modules are packed, and the adapter's are not"):
            unet.load_motion_modules(adapter)
        assert_same_weights(unet, motion_unet)
        return
    unet.load_motion_modules(adapter)
    assert_same_weights(unet, expected)


def test_motion_modules_are_saved_plain(motion_unet: Any, tmp_path: Path) -> None:
    unet = copy.deepcopy(motion_unet)
    assert samebits.compress(unet, min_weights=256).packed
    unet.save_motion_modules(str(tmp_path))
    assert_same_weights(diffusers.MotionAdapter.from_pretrained(tmp_path), motion_adapter(1))


def test_compressed_while_loading(any_model: Reference, config: samebits.SamebitsConfig) -> None:
    model = any_model.load(quantization_config=config)
    assert_all_packed(model, any_model)
    any_model.assert_same(model)
    assert model.num_parameters() == any_model.model.num_parameters()


def test_saved_and_loaded_again(any_model: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    any_model.model.save_pretrained(tmp_path / "plain")
    any_model.load(quantization_config=config).save_pretrained(tmp_path / "packed")
    assert files(tmp_path / "packed") == {"config.json", "samebits.safetensors"}
    assert_same_checkpoint(tmp_path / "packed", tmp_path / "plain")
    configs = [json.loads((tmp_path / way / "config.json").read_text()) for way in ("plain", "packed")]
    assert configs[1].pop("quantization_config")["quant_method"] == "samebits"
    assert configs[1] == configs[0]
    model = any_model.load(tmp_path / "packed")
    assert_all_packed(model, any_model)
    any_model.assert_same(model)


@pytest.mark.parametrize("size", ["100KB", "1GB"])
def test_saved_and_decompressed(flux: Reference, config: samebits.SamebitsConfig, size: str, tmp_path: Path) -> None:
    flux.model.save_pretrained(tmp_path / "plain")
    flux.load(quantization_config=config).save_pretrained(tmp_path / "packed", max_shard_size=size)
    assert run(["decompress", str(tmp_path / "packed"), str(tmp_path / "back")]) == 0
    assert_same_checkpoint(tmp_path / "back", tmp_path / "plain")
    flux.assert_same(flux.load(tmp_path / "back"))


def test_folder_of_the_command_line(any_model: Reference, tmp_path: Path) -> None:
    folder = compress_folder(any_model.folder, tmp_path / "compressed")
    model = any_model.load(folder)
    assert_all_packed(model, any_model)
    any_model.assert_same(model)


OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}  # of autoencoders' attention


@pytest.mark.parametrize("held", ["packed", "plain"])
def test_names_of_old_checkpoints(held: str, tmp_path: Path) -> None:
    """diffusers renames them while it loads; packed weights, too, and those that the model cannot hold packed."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(block_out_channels=(64,), latent_channels=4, norm_num_groups=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "old")
    (file,) = (tmp_path / "old").glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if ".attentions." in name]:
        old = re.sub("|".join(OLD_NAMES), lambda found: OLD_NAMES[found[0]], name)
        tensors[old] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    folder = compress_folder(tmp_path / "old", tmp_path / "compressed")
    assert sum(".attentions." in entry.name for entry in Checkpoint.open(folder) if entry.header) == 8
    with pytest.MonkeyPatch.context() as patch:
        if held == "plain":
            patch.setattr("samebits.integrations.diffusers.quantizer.ModelSelection.reason_against", lambda *_: "no")
        loaded, info = diffusers.AutoencoderKL.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    names = {name for name, _, _ in packed_parameters(loaded) if ".attentions." in name}
    assert len(names) == (8 if held == "packed" else 0)
    assert_same_weights(loaded, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["sdxl", "wan"])
def test_bf16_in_disguise(
    make_once, config: samebits.SamebitsConfig, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A checkpoint in another dtype whose values are BF16's, and a model that computes in that dtype."""
    reference = make_once(name, stored=dtype, dtype=dtype)
    model = reference.load(dtype=dtype, quantization_config=config)
    assert_all_packed(model, reference)
    reference.assert_same(model)
    model.save_pretrained(tmp_path)
    model = reference.load(tmp_path, dtype=dtype)
    assert_all_packed(model, reference)
    reference.assert_same(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_weights_stay_as_they_are(
    flux: Reference,
    config: samebits.SamebitsConfig,
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One weight of an FP16 checkpoint has a value between two of BF16."""
    name = "context_embedder.weight"
    model = flux.load(dtype=torch.float16)
    model.get_parameter(name).data[0, 0] = 1 + 2**-10
    model.save_pretrained(tmp_path)
    plain, packed = (flux.load(tmp_path, dtype=dtype, **options) for options in ({}, {"quantization_config": config}))
    assert packed.hf_quantizer.report.packed.keys() == set(eligible(flux.model)) - {name}
    assert packed.hf_quantizer.report.raw[name] == "torch.float16, has values that are not BF16"
    assert "1 weights of FluxTransformer2DModel stay as they are (context_embedder.weight" in caplog.text
    assert_same_bytes(output("flux", packed), output("flux", plain))


def test_without_a_dtype_it_is_bf16(flux: Reference, flux_folder: Path) -> None:
    model = flux.load(flux_folder, dtype=None)
    assert model.dtype == torch.bfloat16
    flux.assert_same(model)


def test_sharded(flux: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    flux.model.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    model = flux.load(tmp_path / "plain", quantization_config=config)
    assert_all_packed(model, flux)
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    assert len(Checkpoint.open(tmp_path / "packed").files) > 1
    assert "samebits.safetensors.index.json" in files(tmp_path / "packed")
    model = flux.load(tmp_path / "packed")
    assert_all_packed(model, flux)
    flux.assert_same(model)


def test_saved_over_another(flux: Reference, flux_folder: Path, tmp_path: Path) -> None:
    """Of whichever kind: no stale weights stay."""
    flux.model.save_pretrained(tmp_path / "out")
    flux.load(flux_folder).save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json", "samebits.safetensors"}
    flux.assert_same(flux.load(tmp_path / "out"))


@pytest.mark.parametrize("by", ["dequantize", "decompress"])
def test_decompressed(flux: Reference, flux_folder: Path, by: str, tmp_path: Path) -> None:
    model = flux.load(flux_folder)
    if by == "dequantize":
        assert model.dequantize() is model
    else:
        samebits.decompress(model)
    assert not list(packed_parameters(model))
    assert not model.is_quantized
    assert not hasattr(model, "hf_quantizer")
    flux.assert_same(model)
    for folder in (tmp_path / "plain", flux_folder):  # over the compressed one, too
        model.save_pretrained(folder)
        assert files(folder) == {"config.json", "diffusion_pytorch_model.safetensors"}
        assert_same_checkpoint(folder, flux.folder)
        flux.assert_same(flux.load(folder))
    assert model.half().dtype == torch.float16


@pytest.mark.parametrize("way", ["from_pretrained", "compress"])
def test_a_changed_config(make_once, config: samebits.SamebitsConfig, way: str, tmp_path: Path) -> None:
    """As an attribute alone, as diffusers changes it for IP adapters: it stays as it is, and counts."""
    reference, configs = make_once("sdxl"), []
    plain, packed = reference.load(), reference.load(**({"quantization_config": config} if way != "compress" else {}))
    if way == "compress":
        samebits.compress(packed, min_weights=1024)
    for model in (plain, packed):
        torch.manual_seed(4)
        model.encoder_hid_proj = torch.nn.Linear(64, 64).to(torch.bfloat16)
        model.config.encoder_hid_dim_type = "text_proj"
    expected = output("sdxl", plain)
    assert not torch.equal(expected, reference.output)
    for model, folder in ((plain, tmp_path / "plain"), (packed, tmp_path / "packed")):
        model.save_pretrained(folder)
        configs.append(json.loads((folder / "config.json").read_text()))
    assert configs[1].pop("quantization_config")["quant_method"] == "samebits"
    assert configs[1] == configs[0]
    assert_same_bytes(output("sdxl", packed), expected)
    samebits.decompress(packed)
    assert_same_bytes(output("sdxl", packed), expected)
    for of_both in (
        [dict(model.config) for model in (plain, packed)],
        [vars(model.config) for model in (plain, packed)],
    ):
        assert of_both[0] == {key: value for key, value in of_both[1].items() if key != "_pre_quantization_dtype"}


def test_a_plain_model_of_a_compressed_ones_config(make_once, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    packed = make_once("flux").load(quantization_config=config)
    plain = type(packed).from_config(packed.config)
    plain.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" in packed.config


def test_products_that_may_have_plans(any_model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, as which this CPU is taken: of all linear layers but those whose inputs are transposed."""
    model = any_model.load()
    samebits.compress(model, min_weights=1)
    monkeypatch.setattr("samebits.nn.product._is_plain", lambda tensor: tensor.dtype is torch.bfloat16)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinearModule)}
    present, called, fused = "", set[str](), set[str]()

    def linear(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        fused.add(present)
        return torch.nn.functional.linear(x, samebits.decode(packed), bias)

    def note(name: str) -> None:
        nonlocal present
        present = name
        called.add(name)

    monkeypatch.setattr(dispatch, "linear_of_module", linear)
    for name, module in layers.items():
        module.register_forward_pre_hook(lambda module, inputs, name=name: note(name))
    any_model.assert_same(model)
    left = {name for name in called - fused if layers[name].weight.dtype is torch.bfloat16}
    assert len(fused) > 15
    assert left == {name for name in called if any_model.name == "sdxl" and name.endswith("proj_in")}


def test_compressed_in_place_and_saved(any_model: Reference, tmp_path: Path) -> None:
    """More is packed than while loading, such as what embeds the time; saved, it loads as any other."""
    model = any_model.load()
    samebits.compress(model, min_weights=1024)
    any_model.assert_same(model)
    any_model.model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    assert files(tmp_path / "packed") == {"config.json", "samebits.safetensors"}
    assert_same_checkpoint(tmp_path / "packed", tmp_path / "plain")
    any_model.assert_same(any_model.load(tmp_path / "packed"))


class Attentive(diffusers.ModelMixin, diffusers.ConfigMixin):
    """With torch's own attention, which has a module in it, and matrices of its own."""

    config_name = "config.json"

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.attention(y, y, y)[0]


@torch.no_grad()
def test_torchs_attention(config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    plain, x = Attentive().to(torch.bfloat16).eval(), torch.randn(2, 5, 8).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    packed = Attentive.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, quantization_config=config)
    assert "attention.sb_bare_in_proj_weight" in dict(packed.named_parameters())
    packed.save_pretrained(tmp_path / "packed")
    for model in (packed, Attentive.from_pretrained(tmp_path / "packed")):
        assert torch.equal(model.eval()(x).view(torch.int16), plain(x).view(torch.int16))


def test_blocks_keep_their_classes(any_model: Reference) -> None:
    """By which caches of diffusers, skipped layers and regional compilation find them."""
    model, plain = any_model.load(), any_model.model
    report = samebits.compress(model, min_weights=1)
    blocks = [(name, module) for name, module in plain.named_modules() if name and module._modules]
    kept = [(name, module) for name, module in blocks if not type(module).__module__.startswith("torch.nn.")]
    assert kept
    assert all(type(model.get_submodule(name)) is type(module) for name, module in kept)
    own = [f"{name}.{leaf}" for name, module in kept for leaf, _ in module.named_parameters(recurse=False)]
    assert all("by its class" in report.raw[name] or "fewer than" in report.raw[name] for name in own)


@pytest.mark.parametrize("source", ["plain", "packed"])
def test_single_file(
    flux: Reference, flux_folder: Path, config: samebits.SamebitsConfig, source: str, tmp_path: Path
) -> None:
    """A plain one, and one that was compressed: from_single_file converts its names first."""
    plain = source == "plain"
    file = flux.folder / "diffusion_pytorch_model.safetensors" if plain else flux_folder / "samebits.safetensors"
    options = {"config": str(flux.folder), "dtype": torch.bfloat16, "quantization_config": config}
    model = type(flux.model).from_single_file(str(file), **options)
    assert_all_packed(model, flux)
    flux.assert_same(model)
    model.save_pretrained(tmp_path / "saved")
    flux.assert_same(flux.load(tmp_path / "saved"))


def test_numbers_stay_numbers() -> None:
    """Where a model becomes another dtype, as a plain one's do."""
    module = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    samebits.compress(module, min_weights=1)
    module.register_buffer("places", torch.arange(1000, 1004))
    module.register_buffer("scales", torch.ones(3))
    convert(module, torch.float16)
    assert module.places.tolist() == [1000, 1001, 1002, 1003]
    assert [tensor.dtype for tensor in (module.places, module.scales, module.weight)] == [
        torch.int64,
        torch.float16,
        torch.float16,
    ]


def test_include_and_exclude(flux: Reference) -> None:
    config = samebits.SamebitsConfig(1024, include=["*transformer_blocks.*"], exclude=["*.attn.*"])
    model = flux.load(quantization_config=config)
    names = {name for name in eligible(flux.model) if "transformer_blocks." in name and ".attn." not in name}
    assert model.hf_quantizer.report.packed.keys() == names
    flux.assert_same(model)


def test_everything_packed_still_has_a_dtype(flux: Reference) -> None:
    """Even where no floating point parameter is left."""
    model = flux.load(quantization_config=samebits.SamebitsConfig(min_weights=1))
    assert model.dtype == torch.bfloat16
    flux.assert_same(model)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(flux: Reference, flux_folder: Path, config: samebits.SamebitsConfig, device_map) -> None:
    flux.assert_same(flux.load(flux_folder, device_map=device_map))
    flux.assert_same(flux.load(quantization_config=config, device_map=device_map))


def test_offloaded_to_disk(flux: Reference, flux_folder: Path, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    places = {name: "cpu" for name, _ in flux.model.named_children()} | {"transformer_blocks": "disk"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "offload")}
    model = flux.load(flux_folder, **options)
    flux.assert_same(model)
    model.save_pretrained(tmp_path / "saved")
    flux.assert_same(flux.load(tmp_path / "saved"))
    with pytest.raises(InputError, match="while they are offloaded to disk"):
        flux.load(quantization_config=config, **options)


def grouped(model: torch.nn.Module, folder: Path | None, **options: Any) -> Any:
    where = {"offload_to_disk_path": str(folder)} if folder else {}
    model.enable_group_offload(torch.device("cpu"), **{"offload_type": "leaf_level", **options}, **where)
    return model


@pytest.mark.parametrize("options", [{}, {"offload_type": "block_level", "num_blocks_per_group": 1}])
@pytest.mark.parametrize("on_disk", [True, False])
def test_group_offloading(
    flux: Reference, flux_folder: Path, on_disk: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """What diffusers moves has no values of its own while they lie on disk: nothing is packed of them, or written."""
    plain = grouped(flux.load(), tmp_path / "plain groups" if on_disk else None, **options)
    packed = grouped(flux.load(flux_folder), tmp_path / "groups" if on_disk else None, **options)
    for change, model in ((samebits.compress, plain), (samebits.decompress, packed), (samebits.compress, packed)):
        with pytest.raises(InputError, match=r"diffusers' group offloading .* before enable_group_offload"):
            change(model)
    assert not list(packed_parameters(plain))
    if on_disk:
        with pytest.raises(InputError, match=r"group offloading .* to disk.* before enable_group_offload"):
            packed.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
    else:
        packed.save_pretrained(tmp_path / "saved")
        flux.assert_same(flux.load(tmp_path / "saved"))
    with torch.no_grad():
        for model in (plain, packed):
            result = model(**inputs("flux", torch.bfloat16), return_dict=False)[0]
            assert_same_bytes(result, flux.output)


def test_other_dtypes_are_refused(flux: Reference, flux_folder: Path) -> None:
    model = flux.load(flux_folder)
    for change in (model.to, model.type):
        with pytest.raises(DtypeError, match="cannot become"):
            change(torch.float16)
    for change in (model.half, model.float, model.double):
        with pytest.raises((DtypeError, ValueError), match=r"not supported|cannot become"):
            change()
    flux.assert_same(model.to("cpu"))
    with pytest.raises(DtypeError, match=r"cannot be loaded as torch.float64"):
        flux.load(flux_folder, dtype=torch.float64)


@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_to_bf16(make_once, config: samebits.SamebitsConfig, name: str, loaded: torch.dtype) -> None:
    """Also what a model keeps in FP32, and one that was loaded in another dtype: as the plain model does."""
    reference = make_once(name)
    plain, packed = (reference.load(dtype=loaded, **options) for options in ({}, {"quantization_config": config}))
    for model in (plain, packed):
        assert model.to("cpu", torch.bfloat16).to(dtype=torch.bfloat16) is model
    assert_all_packed(packed, reference)
    assert packed.is_quantized
    dtypes = [{name: tensor.dtype for name, tensor in model.named_buffers()} for model in (plain, packed)]
    assert dtypes[0] == dtypes[1]
    assert {weight.dtype for weight in packed.parameters()} == {torch.bfloat16, torch.uint8}
    assert_same_bytes(output(name, packed), output(name, plain))
    with pytest.raises(DtypeError, match=r"cannot become torch\.float16"):
        packed.to("cpu", torch.float16)
    assert packed.to(dtype=None, device="cpu").is_quantized


DTYPES = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.bfloat16}
CASTS = {
    "by the model": lambda model: model.enable_layerwise_casting(**DTYPES),
    "by itself": lambda model: apply_layerwise_casting(model, **DTYPES),
    "of a part": lambda model: apply_layerwise_casting(model.transformer_blocks, **DTYPES),
    "as a whole": lambda model: apply_layerwise_casting(model, **DTYPES, skip_modules_pattern=None),
    "of a part as a whole": lambda model: apply_layerwise_casting(
        model.transformer_blocks, **DTYPES, skip_modules_pattern=None
    ),
}


@pytest.mark.parametrize("way", CASTS)
def test_layerwise_casting_is_refused(flux: Reference, flux_folder: Path, way: str) -> None:
    """Before any layer is cast."""
    model = flux.load(flux_folder)
    with pytest.raises(InputError, match=r"cannot be cast.*samebits\.decompress"):
        CASTS[way](model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16, torch.uint8}
    assert not any(hasattr(module, "_diffusers_hook") for module in model.modules())
    flux.assert_same(model)
    plain = flux.load()
    CASTS[way](plain)
    assert torch.float8_e4m3fn in {weight.dtype for weight in plain.parameters()}


@pytest.mark.parametrize(
    "imports",
    [
        "import samebits; from diffusers.hooks import apply_layerwise_casting",
        "from diffusers.hooks import apply_layerwise_casting; import samebits",
        "import samebits; from diffusers import FluxTransformer2DModel",
        "from diffusers import FluxTransformer2DModel; import samebits",
        "import samebits, diffusers.models.attention; from diffusers import FluxTransformer2DModel",
    ],
)
def test_layerwise_casting_is_wrapped_in_either_order(imports: str) -> None:
    run_python(f"""
{imports}
from diffusers import FluxTransformer2DModel
from diffusers.hooks import layerwise_casting
for function in (layerwise_casting._apply_layerwise_casting, layerwise_casting.apply_layerwise_casting_hook):
    assert hasattr(function, "__wrapped__") and not hasattr(function.__wrapped__, "__wrapped__")
""")


CONTROLS = {
    "sdxl": lambda unet: diffusers.ControlNetModel.from_unet(unet),
    "flux": lambda transformer: diffusers.FluxControlNetModel.from_transformer(transformer, 1, 1, 16, 4),
    "sd3": lambda transformer: diffusers.SD3ControlNetModel.from_transformer(transformer, num_layers=1),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_nets(make_once, config: samebits.SamebitsConfig, name: str) -> None:
    """A copy is plain, and what it was made from stays packed; some layers of a ControlNet begin at random."""
    reference = make_once(name)
    packed = reference.load(quantization_config=config)
    names, states = set(packed.state_dict()), []
    for model in (reference.model, packed):
        torch.manual_seed(2)
        copied = CONTROLS[name](model)
        assert "quantization_config" not in copied.config
        states.append(copied.state_dict())
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert_same_bytes(states[1][key], tensor)
    assert set(packed.state_dict()) == names
    reference.assert_same(packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["wan", "flux", "sdxl"])
@pytest.mark.parametrize("source", ["plain", "packed"])
def test_single_file_as_without_compression(
    make_once, config: samebits.SamebitsConfig, name: str, dtype: torch.dtype, source: str, tmp_path: Path
) -> None:
    """Other parameters stay in FP32 than from_pretrained keeps so. A compressed file alone gives a plain model."""
    reference = make_once(name)
    file = reference.folder / "diffusion_pytorch_model.safetensors"
    model_class, options = type(reference.model), {"config": str(reference.folder), "dtype": dtype}
    plain = model_class.from_single_file(str(file), **options)
    if source == "packed":
        file = tmp_path / "packed.safetensors"
        run(["compress", str(reference.folder / "diffusion_pytorch_model.safetensors"), str(file)])
        alone = model_class.from_single_file(str(file), **options)
        assert not list(packed_parameters(alone))
        assert_same_bytes(output(name, alone), output(name, plain))
    packed = model_class.from_single_file(str(file), **options, quantization_config=config)
    assert_all_packed(packed, reference)
    assert packed.dtype == plain.dtype
    assert_same_bytes(output(name, packed), output(name, plain))


def test_single_file_given_as_a_dict(flux: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    plain, file = flux.folder / "diffusion_pytorch_model.safetensors", tmp_path / "packed.safetensors"
    run(["compress", str(plain), str(file), "--min-weights", "1024"])
    options: dict[str, Any] = {"config": str(flux.folder), "dtype": torch.bfloat16}
    flux.assert_same(type(flux.model).from_single_file(load_file(file), **options))
    model = type(flux.model).from_single_file(load_file(file), **options, quantization_config=config)
    assert_all_packed(model, flux)
    flux.assert_same(model)
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".sb_packed"))
    tensors[name][:8] = 0
    with pytest.raises(FormatError, match=rf"^{re.escape(name)}: "):
        type(flux.model).from_single_file(tensors, **options)


@pytest.mark.parametrize("damage", ["value", "version"])
def test_single_file_that_differs_from_what_it_says(flux: Reference, tmp_path: Path, damage: str) -> None:
    """Where what is packed is as it was."""
    file = tmp_path / "packed.safetensors"
    run(["compress", str(flux.folder / "diffusion_pytorch_model.safetensors"), str(file), "--min-weights", "1024"])
    content = bytearray(file.read_bytes())
    [bias] = [entry for entry in Checkpoint.open(file) if entry.name == "proj_out.bias"]
    if damage == "value":
        content[bias.spec.start] ^= 1
    else:
        content = content.replace(rb"{\"version\":1,", rb"{\"version\":2,")
    file.write_bytes(content)
    error, message = (
        (DigestError, "proj_out.bias: the bytes differ") if damage == "value" else (VersionError, "upgrade")
    )
    with pytest.raises(error, match=f"packed.safetensors: .*{message}"):
        type(flux.model).from_single_file(str(file), config=str(flux.folder), dtype=torch.bfloat16)


def test_damaged_single_file(flux: Reference, tmp_path: Path) -> None:
    file = tmp_path / "packed.safetensors"
    run(["compress", str(flux.folder / "diffusion_pytorch_model.safetensors"), str(file), "--min-weights", "1024"])
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".sb_packed"))
    tensors[name][:8] = 0
    save_file(tensors, file)
    weight = re.escape(name.replace(".sb_packed", ".weight"))
    with pytest.raises(FormatError, match=rf"packed.safetensors: {weight}: "):
        type(flux.model).from_single_file(str(file), config=str(flux.folder), dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{"variant": "fp16"}, {"safe_serialization": False}])
def test_unsupported_ways_to_save(
    flux: Reference, flux_folder: Path, options: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        flux.load(flux_folder).save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_file(flux: Reference, flux_folder: Path) -> None:
    path = flux_folder / "samebits.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"samebits.safetensors: .* damaged"):
        flux.load(flux_folder)


@pytest.fixture
def flux_shards(flux: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> Path:
    flux.load(quantization_config=config).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "shards without their index"), (b"{", "not a JSON object"), (b"[]", "not a JSON object"),
     (b"\xff", "not a JSON object"), (b"{}", "no weight_map"), (b'{"weight_map": {"a": 3}}', "no name for a"),
     (b'{"weight_map": {"a": "../a.safetensors"}}', "no name for a")],
)  # fmt: skip
def test_damaged_index(flux: Reference, flux_shards: Path, content: bytes | None, message: str) -> None:
    index = flux_shards / "samebits.safetensors.index.json"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    with pytest.raises(FormatError, match=f"{re.escape(str(flux_shards))}.*: .*{message}"):
        flux.load(flux_shards)


def test_missing_shard(flux: Reference, flux_shards: Path) -> None:
    missing = sorted(flux_shards.glob("samebits-*"))[1]
    missing.unlink()
    with pytest.raises(FormatError, match=f"the shard {missing.name} is missing"):
        flux.load(flux_shards)


def test_missing_weights(flux: Reference, flux_folder: Path) -> None:
    (flux_folder / "samebits.safetensors").unlink()
    with pytest.raises(InputError, match="no safetensors files in this folder"):
        flux.load(flux_folder)


def test_the_file_that_is_checked_is_loaded(flux: Reference, flux_folder: Path, tmp_path: Path) -> None:
    """Beside another model's shards and their index, as one that was copied there."""
    other = flux.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    samebits.compress(other, min_weights=1024)
    other.save_pretrained(tmp_path / "other", max_shard_size="60KB")
    for file in (tmp_path / "other").glob("samebits*"):
        file.rename(flux_folder / file.name)
    flux.assert_same(flux.load(flux_folder))


def test_weights_of_another_model(flux: Reference, flux_folder: Path) -> None:
    path = flux_folder / "config.json"
    path.write_text(path.read_text().replace('"joint_attention_dim": 64', '"joint_attention_dim": 32'))
    with pytest.raises(FormatError, match=r"context_embedder.weight: shape .* do not belong to this config"):
        flux.load(flux_folder)


def test_uncompressed_models_are_as_before(flux: Reference, tmp_path: Path) -> None:
    model = flux.load()
    model.to(torch.float16).save_pretrained(tmp_path)
    assert files(tmp_path) == {"config.json", "diffusion_pytorch_model.safetensors"}
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(OSError, match="diffusion_pytorch_model"):
        flux.load(tmp_path)
