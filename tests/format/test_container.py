"""Opening checkpoints by their headers, and writing files: FORMAT.md section 7."""

from __future__ import annotations

import errno
import json
import os
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits import api
from samebits.codecs.reference import digest_reference
from samebits.errors import FormatError, InputError, SamebitsError, VersionError
from samebits.format import mapping, safetensors_file
from samebits.format.container import Checkpoint, FileInfo
from samebits.format.folder import JOB
from samebits.format.mapping import SCRATCH_IN_MEMORY, create_mapped, map_file, scratch
from samebits.format.names import stored_name
from samebits.format.safetensors_file import SafetensorsFile, SafetensorsWriter, TensorSpec, header_bytes
from samebits.jobs.compress import Compression
from samebits.jobs.decompress import Decompression
from tests.jobs.checkpoints import files_of, shards, stored, tensors, weights, write_file, write_folder

WORD = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


def write_raw(path: Path, header: str | bytes, data: bytes = b"") -> Path:
    """A file with whatever header."""
    text = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_container(path: Path, info: str | None = '{"version":1}', **changed: Any) -> Path:
    """A container with one packed tensor."""
    packed = api.encode(weights(64, 64)).data
    metadata = {} if info is None else {"samebits": info}
    save_file({"a.sb_packed": packed, "norm": torch.ones(3), **changed}, path, metadata=metadata)
    return path


def set_quantization(folder: Path, entry: object) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))


HOSTILE = {
    "empty": b"",
    "shorter than a length": b"\1\2\3",
    "length of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "not JSON": struct.pack("<Q", 2) + b"{]",
    "not UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
    "nested without end": struct.pack("<Q", 90000) + b"[" * 90000,
    "no object": struct.pack("<Q", 2) + b"[]",
}
HOSTILE_TENSORS = {
    "data cut": (WORD, b"123"),
    "data too long": (WORD, b"12345"),
    "unknown dtype": ({**WORD, "dtype": "BF17"}, b"1234"),
    "negative dimension": ({**WORD, "shape": [-2]}, b"1234"),
    "shape that overflows": ({**WORD, "shape": [2, 1 << 40, 1 << 40]}, b"1234"),
    "shape that does not fit": ({**WORD, "shape": [3]}, b"1234"),
    "offsets backwards": ({**WORD, "data_offsets": [4, 0]}, b"1234"),
    "a hole": ({**WORD, "data_offsets": [2, 6]}, b"123456"),
    "no offsets": ({"dtype": "BF16", "shape": [2]}, b"1234"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(path)
    assert caught.value.where == str(path)
    assert caught.value.mend


@pytest.mark.parametrize(("entry", "data"), HOSTILE_TENSORS.values(), ids=HOSTILE_TENSORS)
def test_hostile_tensor_entries_are_refused(tmp_path: Path, entry: dict[str, Any], data: bytes) -> None:
    path = write_raw(tmp_path / "model.safetensors", json.dumps({"a": entry}), data)
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(path)
    assert caught.value.where == str(path)


def test_an_entry_that_is_a_list(tmp_path: Path) -> None:
    """The library takes it."""
    path = write_raw(tmp_path / "model.safetensors", json.dumps({"a": list(WORD.values())}), b"1234")
    assert load_file(path)["a"].shape == (2,)
    with pytest.raises(FormatError, match=r"model.safetensors: a: the header does not describe it by a JSON object"):
        Checkpoint.open(path)


def test_a_dtype_that_is_an_object(tmp_path: Path) -> None:
    """The library takes it."""
    text = json.dumps({"a": {**WORD, "dtype": {"BF16": None}}})
    path = write_raw(tmp_path / "model.safetensors", text, b"1234")
    assert load_file(path)["a"].shape == (2,)
    with pytest.raises(FormatError, match=r"model.safetensors: a: the header does not give its dtype as a string"):
        Checkpoint.open(path)


def test_a_name_twice_in_one_header(tmp_path: Path) -> None:
    text = json.dumps(WORD)
    path = write_raw(tmp_path / "model.safetensors", f'{{"a.b": {text}, "a.b": {text}}}', b"1234")
    with pytest.raises(FormatError, match=r"model.safetensors: a.b: the header names it twice"):
        Checkpoint.open(path)


class CountedName(str):
    """Counts comparisons."""

    compared = 0
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_name_twice_among_many() -> None:
    """Found without comparing each with each, which took hours of a file with a million."""
    names = [CountedName(number) for number in (*range(2000), 1999)]
    with pytest.raises(FormatError, match=r"1999: the header names it twice"):
        safetensors_file._unique([(name, {}) for name in names])
    assert 0 < CountedName.compared < 20_000


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    if name == "config.json":
        save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / name)
    for path in {tmp_path, tmp_path / name if name.endswith("safetensors") else tmp_path}:
        with pytest.raises(InputError, match=f"{name}: no regular file; remove it"):
            Checkpoint.open(path)


def test_a_name_twice_in_two_files(tmp_path: Path) -> None:
    for name in ("first.safetensors", "second.safetensors"):
        save_file({"a.weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(FormatError, match=r"second.safetensors: a.weight: the tensor is also in first.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.clause("7.2")
def test_packed_and_unchanged_under_one_name(tmp_path: Path) -> None:
    path = write_container(tmp_path / "samebits.safetensors", **{"a.weight": torch.ones(3)})
    with pytest.raises(FormatError, match=r"a.weight: the tensor is also in"):
        Checkpoint.open(path)


def test_plain_checkpoint_is_listed_without_reading(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_folder(tmp_path / "model"))
    listed = {entry.name: entry.shape for entry in checkpoint}
    assert listed == {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    assert not checkpoint.is_packed
    assert [file.path.name[-22:] for file in checkpoint.files] == [
        f"{i:05}-of-00003.safetensors"[-22:] for i in (1, 2, 3)
    ]
    assert checkpoint.index_metadata["total_parameters"] == 7


@pytest.mark.clause("7.2")
def test_packed_tensor_has_its_original_name_shape_and_size(tmp_path: Path) -> None:
    entry = Checkpoint.open(write_container(tmp_path / "samebits.safetensors")).entries["a.weight"]
    assert entry.is_packed
    assert (entry.dtype, entry.shape, entry.words, entry.original_nbytes) == ("BF16", (64, 64), 4096, 8192)
    assert entry.nbytes == api.encode(weights(64, 64)).nbytes
    assert torch.equal(api.decode(entry.packed()).view(torch.int16), weights(64, 64).view(torch.int16))


@pytest.mark.clause("7.3")
def test_without_samebits_metadata_packed_tensors_are_still_found(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_container(tmp_path / "samebits.safetensors", None))
    assert checkpoint.is_packed
    assert checkpoint.entries["norm"].digest is None


@pytest.mark.clause("7.2")
@pytest.mark.parametrize(
    "tensor", [torch.zeros(100, dtype=torch.int8), torch.zeros(10, 10, dtype=torch.uint8), weights(50)]
)
def test_a_packed_name_with_something_else_behind_it(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = write_container(tmp_path / "samebits.safetensors", **{"b.sb_bare": tensor})
    with pytest.raises(FormatError, match=r"samebits.safetensors: b: stored as"):
        Checkpoint.open(path)


def test_a_packed_tensor_cut_short(tmp_path: Path) -> None:
    packed = api.encode(weights(64, 64)).data
    for kept in (0, 10, 63, 64, packed.numel() - 16):
        path = write_container(tmp_path / "samebits.safetensors", **{"b.sb_bare": packed[:kept].clone()})
        with pytest.raises(FormatError, match=r"samebits.safetensors: b: "):
            Checkpoint.open(path)


@pytest.mark.clause("7.3")
@pytest.mark.parametrize(
    ("info", "error"),
    [
        ('{"version":2}', VersionError),
        ('{"version":"1"}', FormatError),
        ('{"version":true}', FormatError),
        ("{}", FormatError),
        ("[1]", FormatError),
        ("[" * 100000, FormatError),
        ("not JSON", FormatError),
        ('{"version":1,"digests":[]}', FormatError),
        ('{"version":1,"digests":{"norm":"xyz"}}', FormatError),
        ('{"version":1,"digests":{"norm":5}}', FormatError),
        ('{"version":1,"digests":{"norm":"0123456789abcdef0"}}', FormatError),
        ('{"version":1,"digest":5}', FormatError),
        ('{"version":1,"digest":"0123"}', FormatError),
        ('{"version":1,"dhgests":{}}', FormatError),
        ('{"version":1,"file":"../../etc/x.safetensors"}', FormatError),
        ('{"version":1,"file":"config.json"}', FormatError),
        ('{"version":1,"file":7}', FormatError),
        ('{"version":1,"file":"a\\u0000.safetensors"}', FormatError),
        ('{"version":1,"file":"\\ud800.safetensors"}', FormatError),
    ],
)
def test_bad_file_metadata(tmp_path: Path, info: str, error: type[SamebitsError]) -> None:
    path = write_container(tmp_path / "samebits.safetensors", info)
    with pytest.raises(error) as caught:
        Checkpoint.open(path)
    assert caught.value.where == str(path)


@pytest.mark.clause("7.3")
@pytest.mark.parametrize(
    "info",
    [
        FileInfo(),
        FileInfo({}),
        FileInfo(own_digest=7),
        FileInfo({"norm": 0xFEDCBA9876543210, "other": 0}, "model-00001-of-00002.safetensors"),
    ],
)
def test_file_metadata_round_trip(info: FileInfo) -> None:
    assert FileInfo.parse(info.to_json()) == info


@pytest.mark.clause("7.3")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "norm: no digest is recorded for it"),
        (("norm", "ghost"), "ghost: a digest is recorded, but no such tensor"),
        (("norm", "a.weight"), "a.weight: a digest is recorded, but no such tensor"),
    ],
)
def test_digests_are_those_of_the_unchanged_tensors(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    info = FileInfo(dict.fromkeys(names, 0)).to_json()
    path = write_container(tmp_path / "samebits.safetensors", info)
    with pytest.raises(FormatError, match=message):
        Checkpoint.open(path)


@pytest.mark.clause("7.3")
@pytest.mark.parametrize("info", [FileInfo(), FileInfo({"norm": 7}), FileInfo({"norm": 7}, "a.safetensors")], ids=str)
def test_metadata_and_what_a_header_says_have_a_digest(tmp_path: Path, info: FileInfo) -> None:
    path = write_container(tmp_path / "samebits.safetensors")
    stored = stored_in(path)
    lines = [info.original or ""]
    for name, (dtype, shape) in sorted(stored.items()):
        lines += [name, f"{dtype} {','.join(str(size) for size in shape)}"]
        lines += [f"{7:016x}"] if info.digests and name == "norm" else []
    expected = digest_reference("".join(f"{line}\n" for line in lines).encode())
    assert info.sealed(stored) == replace(info, own_digest=expected)
    Checkpoint.open(write_container(path, info.sealed(stored).to_json()))
    write_container(path, replace(info, own_digest=expected ^ 1).to_json())
    with pytest.raises(FormatError, match=r"samebits\.safetensors: its samebits metadata, or names, dtypes and shapes"):
        Checkpoint.open(path)


def stored_in(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (spec.dtype, spec.shape) for name, spec in Checkpoint.open(path).files[0].tensors.items()}


@pytest.mark.clause("7.3")
def test_no_bit_of_the_metadata_can_change_unseen(tmp_path: Path) -> None:
    """But for the key of the entry, without which a file has none."""
    path = write_container(tmp_path / "samebits.safetensors")
    info = FileInfo({"norm": 7}, "model.safetensors").sealed(stored_in(path))
    write_container(path, info.to_json())
    whole = path.read_bytes()
    entry = json.dumps(info.to_json()).encode()
    start = whole.index(entry) + 1
    for place in range(start, start + len(entry) - 2):
        for bit in range(7):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(SamebitsError):
                Checkpoint.open(path)


@pytest.mark.clause("7.4")
@pytest.mark.parametrize(("version", "error"), [(2, VersionError), ("1", FormatError), (None, FormatError)])
def test_config_of_another_version(tmp_path: Path, version: object, error: type[SamebitsError]) -> None:
    write_container(tmp_path / "samebits.safetensors")
    set_quantization(tmp_path, {"quant_method": "samebits", "version": version})
    with pytest.raises(error, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def test_config_that_is_no_object(tmp_path: Path) -> None:
    write_container(tmp_path / "samebits.safetensors")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match=r"config.json: not a JSON object"):
        Checkpoint.open(tmp_path)


@pytest.mark.clause("7.1")
def test_the_container_wins_over_plain_weights_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors")
    write_container(tmp_path / "samebits.safetensors")
    assert [file.path.name for file in Checkpoint.open(tmp_path).files] == ["samebits.safetensors"]


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_variants_beside_the_weights_are_not_taken(tmp_path: Path, stem: str) -> None:
    """As loaders take none that is not asked for."""
    file = write_file(tmp_path / f"{stem}.safetensors")
    write_file(tmp_path / f"{stem}.fp16.safetensors", {name: tensor.half() for name, tensor in tensors().items()})
    assert [opened.path for opened in Checkpoint.open(tmp_path).files] == [file]


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    assert set(Checkpoint.open(folder).entries) == set(tensors())
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"the shard model-00002-of-00003.safetensors is missing"):
        Checkpoint.open(folder)


def test_a_shard_of_the_index_is_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"index.json: the shard model-00002-of-00003.safetensors is missing"):
        Checkpoint.open(folder)


def test_an_index_that_leaves_out_a_shard(tmp_path: Path) -> None:
    """Whose tensors would be lost; one that is not there is nobody's."""
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    index, left_out = json.loads(path.read_text()), "model-00003-of-00003.safetensors"
    weight_map = {name: file for name, file in index["weight_map"].items() if file != left_out}
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=rf"index.json: the index leaves out the shard {left_out}, which is there"):
        Checkpoint.open(folder)
    (folder / left_out).unlink()
    assert Checkpoint.open(folder).entries.keys() == weight_map.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight_map": {f"ghost {i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}},
            "ghost 1: the index puts it into",
        ),
        ({"weight_map": {"a": "../model.safetensors"}}, "is no name for a safetensors file"),
        ({"weight_map": {"a": None}}, "None is no name for a safetensors file"),
        ({"weight_map": {"a": 5}}, "is no name for a safetensors file"),
        ({"weight_map": {"a": "a\0.safetensors"}}, "is no name for a safetensors file"),
        ({"weight_map": {"a": "\ud800.safetensors"}}, "is no name for a safetensors file"),
        ({"weight_map": {}}, "the index has no weight_map"),
        ({"weight_map": []}, "the index has no weight_map"),
        ({"metadata": []}, "the index has no weight_map"),
    ],
)
def test_bad_index(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(change))
    with pytest.raises(FormatError, match=message) as caught:
        Checkpoint.open(folder)
    assert str(path) in str(caught.value)


def test_index_of_another_stem(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    path.rename(folder / "diffusion_pytorch_model.safetensors.index.json")
    assert Checkpoint.open(folder).index_metadata["total_parameters"] == 7


@pytest.mark.parametrize("name", ["missing", "missing.safetensors"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        Checkpoint.open(tmp_path / name)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no safetensors files in this folder"):
        Checkpoint.open(tmp_path)
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(InputError, match="not a safetensors file"):
        Checkpoint.open(path)
    with pytest.raises(InputError, match=r"but weights of another format \(model\.bin\); load the model and save"):
        Checkpoint.open(tmp_path)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"but in folders of it; give one of these: transformer$"):
        Checkpoint.open(tmp_path)
    (tmp_path / JOB).mkdir()
    with pytest.raises(InputError, match=r"a job has not finished this folder; run the same command again"):
        Checkpoint.open(tmp_path)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("Anonymous:")))


def test_reading_takes_no_anonymous_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    size = 256 << 20
    spec = TensorSpec("a", "BF16", (size // 2,), 0, size)
    header = header_bytes([spec], {})
    data = create_mapped(path, len(header) + size)
    data[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    before = anonymous_bytes()
    tensor = Checkpoint.open(path).entries["a"].tensor()
    assert int(tensor.view(torch.int16)[1000:].max()) == 0
    assert anonymous_bytes() - before < size // 8


def test_row_ranges_are_views(tmp_path: Path) -> None:
    entry = Checkpoint.open(write_file(tmp_path / "model.safetensors")).entries["lm_head.weight"]
    rows = entry.tensor()[100:102]
    assert torch.equal(rows.view(torch.int16), tensors()["lm_head.weight"][100:102].view(torch.int16))
    assert rows.data_ptr() - entry.tensor().data_ptr() != rows.numel()  # two mappings
    assert rows.untyped_storage().nbytes() == entry.nbytes


def test_a_tensor_at_an_odd_place(tmp_path: Path) -> None:
    """Other writers do not align; the words must come out right all the same."""
    words = weights(3, 5)
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "b": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [1, 31]}}  # fmt: skip
    data = b"\7" + words.view(torch.uint8).numpy().tobytes()
    entry = Checkpoint.open(write_raw(tmp_path / "model.safetensors", json.dumps(header), data)).entries["b"]
    assert torch.equal(entry.tensor().view(torch.int16), words.view(torch.int16))
    assert entry.data().data_ptr() % 2 == 1
    assert entry.tensor().data_ptr() % 2 == 0


def test_writer_is_read_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    content = shards()[1]
    with SafetensorsWriter(path, 4096) as writer:
        for entry in Checkpoint.open(write_file(tmp_path / "in.safetensors", content)):
            writer.append(entry.name, entry.dtype, entry.shape, entry.data())
        assert not path.exists()
        writer.finish(reversed(content), {"key": "value"})
    assert stored(path) == stored(tmp_path / "in.safetensors")
    assert SafetensorsFile.open(path).metadata == {"key": "value"}
    assert list(SafetensorsFile.open(path).tensors) == list(reversed(content))
    assert {path.name for path in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}


def test_room_that_is_filled_later(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with SafetensorsWriter(path, 512) as writer:
        writer.append("first", "U8", (2,), torch.tensor([1, 2], dtype=torch.uint8))
        write = writer.allocate("later", "U8", (2, 3), 6)
        writer.append("last", "U8", (1,), torch.tensor([9], dtype=torch.uint8))
        write(4, memoryview(b"\7\10"))
        write(0, memoryview(b"\3\4\5\6"))
        writer.finish(["first", "later", "last"], {})
    content = {name: tensor.tolist() for name, tensor in load_file(path).items()}
    assert content == {"first": [1, 2], "later": [[3, 4, 5], [6, 7, 8]], "last": [9]}


def test_large_tensors_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_COPY_BYTES", 7)
    path = tmp_path / "out.safetensors"
    with SafetensorsWriter(path, 256) as writer:
        writer.append("a", "U8", (100,), torch.arange(100, dtype=torch.uint8))
        writer.finish(["a"], {})
    assert load_file(path)["a"].tolist() == list(range(100))


def test_a_system_that_writes_less_than_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does of more than 2 GiB."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: pwrite(file, data[:7], place))
    path = tmp_path / "out.safetensors"
    with SafetensorsWriter(path, 256) as writer:
        write = writer.allocate("a", "U8", (100,), 100)
        write(50, memoryview(bytes(range(50, 100))))
        write(0, memoryview(bytes(range(50))))
        writer.finish(["a"], {})
    assert load_file(path)["a"].tolist() == list(range(100))


def test_an_interrupted_writer_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with SafetensorsWriter(path, 4096) as writer:
        writer.append("a", "U8", (4,), torch.zeros(4, dtype=torch.uint8))
    assert not path.exists()


def test_header_is_what_the_library_writes(tmp_path: Path) -> None:
    path = write_file(tmp_path / "in.safetensors")
    file = SafetensorsFile.open(path)
    first = min(spec.start for spec in file.tensors.values())
    specs = [replace(spec, start=spec.start - first, stop=spec.stop - first) for spec in file.tensors.values()]
    assert header_bytes(specs, file.metadata) == path.read_bytes()[:first]


def test_names_in_any_script(tmp_path: Path) -> None:
    name = 'слой.0.权重 "quoted"\\.weight'
    path = write_file(tmp_path / "model.safetensors", {name: weights(8, 8)})
    assert list(Checkpoint.open(path).entries) == [name]
    with SafetensorsWriter(tmp_path / "out.safetensors", 512) as writer:
        writer.append(stored_name(name), "U8", (1,), torch.ones(1, dtype=torch.uint8))
        writer.finish([stored_name(name)], {})
    assert list(load_file(tmp_path / "out.safetensors")) == [stored_name(name)]


def test_a_file_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """Systems take any bytes; Python has half of a surrogate pair for each that it cannot decode."""
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / os.fsdecode(b"\xff.safetensors"))
    Compression(Checkpoint.open(tmp_path / "source"), tmp_path / "packed").run()
    Decompression(Checkpoint.open(tmp_path / "packed"), tmp_path / "back").run()
    assert files_of(tmp_path / "back") == files_of(tmp_path / "source")


def test_scratch_space_beyond_memory_is_a_file() -> None:
    before = anonymous_bytes()
    space = scratch(4 * SCRATCH_IN_MEMORY)
    space.fill_(7)
    assert int(space[-1]) == 7
    assert anonymous_bytes() - before < SCRATCH_IN_MEMORY
    assert scratch(100).tolist() == [0] * 100


def test_scratch_space_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "SCRATCH_IN_MEMORY", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert scratch(1000).tolist() == [0] * 1000
    assert list(tmp_path.iterdir()) == []

    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapping, "_reserve", fill_disk)
    with pytest.raises(OSError, match=f"'{tmp_path}/samebits-"):  # it is there that it would be
        scratch(1000)
    assert list(tmp_path.iterdir()) == []


def test_mapping_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    assert create_mapped(path, 0).numel() == 0
    assert path.exists()
    assert map_file(path, 0, 0).numel() == 0


@pytest.mark.clause("7.3")
@pytest.mark.parametrize(
    ("old", "new"),
    [('"shape":[0,3]', '"shape":[0,2]'), ('"shape":[4,6]', '"shape":[6,4]'), ('"dtype":"F32"', '"dtype":"I32"')],
)
def test_what_the_header_says_of_unchanged_tensors_cannot_change_unseen(tmp_path: Path, old: str, new: str) -> None:
    """Their bytes are the same, but not what they stand for."""
    save_file({"empty": torch.zeros(0, 3), "table": torch.zeros(4, 6)}, tmp_path / "plain.safetensors")
    Compression(Checkpoint.open(tmp_path / "plain.safetensors"), tmp_path / "packed.safetensors").run()
    whole = (tmp_path / "packed.safetensors").read_bytes()
    assert old.encode() in whole
    (tmp_path / "packed.safetensors").write_bytes(whole.replace(old.encode(), new.encode(), 1))
    with pytest.raises(FormatError, match="names, dtypes and shapes of its tensors, are not what was written"):
        Checkpoint.open(tmp_path / "packed.safetensors")
