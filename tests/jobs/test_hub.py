"""What is on the hub: names, what is downloaded of it, and headers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open

from samebits.df11.checkpoint import Df11Checkpoint, open_checkpoint
from samebits.errors import FormatError, InputError
from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.jobs.hub import CONFIGS, HubFolder, find_on_hub, open_headers, resolve_source
from samebits.jobs.options import RunOptions
from samebits.jobs.summary import by_kind
from tests.jobs.checkpoints import stored, write_folder
from tests.jobs.hub import Hub

DF11 = Path(__file__).parents[1] / "vectors" / "df11" / "tiny-llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """With a model, another revision of it, and a pipeline."""
    write_folder(tmp_path / "some" / "model")
    write_folder(tmp_path / "some" / "model@v2", sharded=False)
    for name in ("transformer", "vae", "parts/text_encoder"):
        write_folder(tmp_path / "some" / "pipeline" / name)
    (tmp_path / "some" / "pipeline" / "model_index.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    return Hub(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("some/model", ("some/model", None, "")),
        ("some/model@v1.0", ("some/model", "v1.0", "")),
        ("some/model/transformer", ("some/model", None, "transformer")),
        ("some/model@0a1b/parts/text_encoder_2", ("some/model", "0a1b", "parts/text_encoder_2")),
        ("some/model@refs/pr/3", ("some/model", "refs/pr/3", "")),
        ("some/model@refs/convert/parquet/vae", ("some/model", "refs/convert/parquet", "vae")),
        ("some/model@a%2Fbranch/vae", ("some/model", "a/branch", "vae")),
    ],
)
def test_names_on_the_hub(text: str, parts: tuple[str, str | None, str]) -> None:
    assert HubFolder.parse(text) == HubFolder(text, *parts)


@pytest.mark.parametrize(
    "text",
    ["gpt2", "no hub id", "./some/model", "../some/model", "/some/model", "some/../model", "some/model/", "some/model@",
     "some/model/../x", "some/model.safetensors", "some/model/x.safetensors", "some/model@v1/x.safetensors", "~/some/x",
     "some/model/vae\0"],
)  # fmt: skip
def test_what_names_nothing_on_the_hub(hub: Hub, text: str) -> None:
    assert resolve_source(text) == Path(text)
    assert not hub.downloaded


def test_a_model_is_downloaded(hub: Hub) -> None:
    announced: list[int] = []
    path = resolve_source("some/model", announce=announced.append)
    assert stored(path) == stored(hub.folder / "some" / "model")
    assert "extra/notes.txt" in hub.downloaded
    assert "pytorch_model.bin" not in hub.downloaded
    assert announced == [sum((path / name).stat().st_size for name in hub.downloaded)]


def test_a_revision_is_downloaded(hub: Hub) -> None:
    assert stored(resolve_source("some/model@v2")) == stored(hub.folder / "some" / "model@v2")
    assert [name for name in hub.downloaded if name.endswith(".safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("folder", ["transformer", "parts/text_encoder"])
def test_a_folder_is_downloaded_alone(hub: Hub, folder: str) -> None:
    """As a model of its own: without weights in another format, with what is in its folders."""
    path = resolve_source(f"some/pipeline/{folder}")
    assert path == hub.snapshots / "some" / "pipeline" / folder
    assert stored(path) == stored(hub.folder / "some" / "pipeline" / folder)
    names = {name.removeprefix(f"{folder}/") for name in hub.downloaded}
    assert {f"{folder}/{name}" for name in names} == set(hub.downloaded)
    assert "extra/notes.txt" in names
    assert "pytorch_model.bin" not in names


def test_a_path_that_exists_wins(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hub.folder)
    for text in ("some/model", "some/model@v2", "some/pipeline/vae"):
        assert resolve_source(text) == Path(text)
        with open_headers(text) as path:
            assert path == Path(text)
    assert find_on_hub("some/model/transfomer") is None  # a slip in a path
    assert find_on_hub("some/other") == HubFolder("some/other", "some/other", None, "")
    assert not hub.downloaded


def test_configs_alone(hub: Hub) -> None:
    path = resolve_source("some/pipeline/vae", only=CONFIGS)
    assert (path / "config.json").is_file()
    assert hub.downloaded == ["vae/config.json"]


@pytest.mark.parametrize("beside", [[], ["flux1-dev.safetensors"]])
@pytest.mark.parametrize("revision", ["", "@v2"])
def test_a_pipeline_is_refused_before_it_is_downloaded(hub: Hub, revision: str, beside: list[str]) -> None:
    text = f"some/pipeline{revision}"
    (hub.folder / "some" / "pipeline").rename(hub.folder / text)
    for name in beside:
        (hub.folder / text / name).write_bytes(b"")
    folders = ", ".join(f"{text}/{folder}" for folder in ("parts/text_encoder", "transformer", "vae"))
    message = f"{text}: a pipeline: its safetensors files are in folders of it; give one of these: {folders}"
    for only in ((), CONFIGS):
        with pytest.raises(InputError) as caught:
            resolve_source(text, only)
        assert str(caught.value) == message
    with pytest.raises(InputError) as caught, open_headers(text):
        pass
    assert str(caught.value) == message
    assert not hub.downloaded
    assert not hub.bytes_read


def test_a_folder_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(InputError, match=r"some/model/vae: no folder vae in some/model; .*OWNER/NAME\[@REVISION\]"):
        resolve_source("some/model/vae")
    assert not hub.downloaded


def test_a_folder_that_was_downloaded_is_found_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it alone is asked for what had been downloaded."""
    names = ["transformer/model.safetensors", "transformer/x.gguf", "transformer/onnx/x.bin", "vae/model.safetensors"]
    asked: list[str] = []
    local: list[bool] = []

    def offline(*_: object, **__: object) -> list[str]:
        raise OfflineModeIsEnabled("offline")

    def download(name: str, revision: str, local_files_only: bool = False, **patterns: list[str]) -> str:
        local.append(local_files_only)
        asked.extend(filter_repo_objects([*names, "transformer/config.json"], **patterns))
        return f"{name}-{revision}"

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    text = "some/pipeline@v1/transformer"
    assert resolve_source(text) == Path("some/pipeline-v1/transformer")
    assert asked == ["transformer/model.safetensors", "transformer/config.json"]
    with open_headers(text) as path:
        assert path == Path("some/pipeline-v1/transformer")
    assert local == [False, True]  # headers are no reason to download weights
    asked.clear()
    resolve_source(text, only=CONFIGS)
    assert asked == ["transformer/config.json"]


@pytest.mark.parametrize("why", [OfflineModeIsEnabled, HfHubHTTPError.__mro__[1], ConnectionResetError])
def test_headers_that_a_hub_does_not_give(why: type[Exception], hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it does not, or has no such model, is said, and not that nothing was found on the disk."""

    def refuse(*_: object, **__: object) -> list[str]:
        raise why("404: no such model")

    def look(*_: object, local_files_only: bool, **__: object) -> str:
        raise LocalEntryNotFoundError("pass 'local_files_only=False' as input")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", look)
    with (
        pytest.raises(InputError, match=r"some/other: .* not available on the hub \(404: no such model\)"),
        open_headers("some/other"),
    ):
        pass


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_headers_of_plain_files(hub: Hub) -> None:
    plain = hub.folder / "some" / "model"
    with open_headers("some/model") as path:
        checkpoint = Checkpoint.open(path)
    assert {file.path.name: header_bytes(plain / file.path.name) for file in checkpoint.files} == {
        name: count for name, count in hub.bytes_read.items() if name.endswith(".safetensors")
    }
    assert by_kind(checkpoint) == by_kind(Checkpoint.open(plain))
    assert not hub.downloaded
    assert not path.exists()


def test_headers_of_packed_tensors(hub: Hub) -> None:
    packed = hub.folder / "some" / "model@packed"
    Compression(Checkpoint.open(hub.folder / "some" / "model"), packed, None, RunOptions(device="cpu")).run()
    with open_headers("some/model@packed") as path:
        checkpoint = Checkpoint.open(path)
    whole = Checkpoint.open(packed)
    assert {entry.name: entry.header for entry in checkpoint} == {entry.name: entry.header for entry in whole}
    for file in whole.files:
        tensors = sum(entry.is_packed for entry in whole.by_file[file.path])
        assert hub.bytes_read[file.path.name] <= header_bytes(file.path) + 128 * tensors


def test_headers_of_dfloat11(hub: Hub) -> None:
    (hub.folder / "some" / "df11").symlink_to(DF11)
    with open_headers("some/df11") as path:
        checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, Df11Checkpoint)
    assert by_kind(checkpoint) == by_kind(open_checkpoint(DF11))
    for name, count in hub.bytes_read.items():
        if name.endswith(".safetensors"):
            with safe_open(DF11 / name, "numpy") as file:
                large = [key for key in file.keys() if key.endswith(("encoded_exponent", "sign_mantissa"))]  # noqa: SIM118
                assert count <= file_size(DF11 / name) - sum(file.get_tensor(key).nbytes for key in large)


def file_size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, (1000).to_bytes(8, "little") + b"{"])
def test_headers_that_are_none(hub: Hub, content: bytes) -> None:
    """Errors name the file on the hub."""
    (hub.folder / "some" / "model@v2" / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"^some/model@v2/model.safetensors: not a valid safetensors file"):  # noqa: SIM117
        with open_headers("some/model@v2") as path:
            Checkpoint.open(path)
