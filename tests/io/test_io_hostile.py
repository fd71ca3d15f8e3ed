"""Hostile files: each kind of lie is refused with the key named, before memory is taken for it."""

import json
import os
import random
import tracemalloc

import fuzz_files
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy import serial
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.io import conversion, convert, safetensors as module

GOOD = '{"dtype":"F32","shape":[16],"data_offsets":[0,64]}'


def entry(**change):
    return json.dumps({"x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **change}})


HEADERS = [
    ("[]", "header is a JSON list, not an object"),
    ("7", "header is a JSON int"),
    ("null", "header is a JSON NoneType"),
    ("{", "Expecting"),
    ("", "begins with zeros only"),
    (" ", "Expecting value"),
    ("\xff\xfe", "Expecting value"),
    ("[" * 50_000, "nests too deep"),
    ('{"x":' * 50_000, "nests too deep"),
    (f'{{"x":{GOOD},"x":{GOOD}}}', "key 'x' stands twice"),
    (f'{{"x":{GOOD},"x":{GOOD.replace("F32", "I32")}}}', "key 'x' stands twice"),
    ('{"x":{"dtype":"F32","dtype":"I32","shape":[16],"data_offsets":[0,64]}}', "key 'dtype' stands twice"),
    (f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{GOOD}}}', "key 'a' stands twice"),
    (f'{{"__metadata__":{{"a":"1"}},"__metadata__":{{"b":"1"}},"x":{GOOD}}}', "key '__metadata__' stands twice"),
    (f'{{"__metadata__":{{"a":1}},"x":{GOOD}}}', "metadata key 'a' is not text"),
    (f'{{"__metadata__":["a"],"x":{GOOD}}}', "'__metadata__' is not an object"),
    ('{"x":[]}', "tensor 'x': it is not an object with dtype"),
    ('{"x":{"dtype":"F32","shape":[16]}}', "tensor 'x': it is not an object with dtype, shape and data_offsets"),
    (entry(dtype="F33"), "unknown variant `F33`"),
    (entry(dtype=32), "tensor 'x': dtype is not text"),
    (entry(shape=16), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[-16]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[-4, -4]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[16.0]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=["16"]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[True, 16]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[2**64, 16]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[10**400]), "tensor 'x': shape is not a list of integers"),
    (entry(shape=[2**62, 4]), r"tensor 'x': shape .* has 2\^63 elements or more"),
    (entry(shape=[2**40, 2**40]), r"tensor 'x': shape .* has 2\^63 elements or more"),
    (entry(shape=[2**62] * 5000), r"tensor 'x': shape .* has 2\^63 elements or more"),
    (entry(shape=[15]), r"tensor 'x': F32 of shape \[15\] takes 60 bytes, data_offsets span 64"),
    (entry(shape=[0, 2**62]), "tensor 'x': F32 of shape .* takes 0 bytes"),
    (entry(dtype="F64"), "tensor 'x': F64 of shape .* takes 128 bytes"),
    (entry(data_offsets=[0, 65]), "tensor 'x': data_offsets .* are not a range within the 64 bytes"),
    (entry(data_offsets=[64, 0]), "tensor 'x': data_offsets .* are not a range"),
    (entry(data_offsets=[-64, 0]), "tensor 'x': data_offsets is not a list of integers"),
    (entry(data_offsets=[0, 2**63]), "tensor 'x': data_offsets is not a list of integers"),
    (entry(data_offsets=[0]), "tensor 'x': data_offsets .* are not a range"),
    (entry(data_offsets=[0, 32, 64]), "tensor 'x': data_offsets .* are not a range"),
    (entry(data_offsets=[0, 32], shape=[8]), "its tensors end at byte 32 of the data, which has 64"),
    (entry(data_offsets=[32, 64], shape=[8]), "tensor 'x': its data begins at byte 32, .* ends at 0"),
    (f'{{"x":{GOOD},"y":{GOOD}}}', "tensor 'y': its data begins at byte 0, .* ends at 64"),
    (
        json.dumps(
            {
                "x": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]},
                "y": {"dtype": "F32", "shape": [10], "data_offsets": [24, 64]},
            }
        ),
        "tensor 'y': its data begins at byte 24, .* ends at 40",
    ),
]


@pytest.mark.parametrize(("header", "message"), HEADERS, ids=range(len(HEADERS)))
def test_hostile_headers_are_refused_by_name(tmp_path, header, message):
    head = header.encode("latin-1")
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(64))
    for read in (kb.io.load, lambda p: convert.quantize_file(p, tmp_path / "out", "kbit4", device="cpu")):
        with pytest.raises(FileError, match=message) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path} is not a valid safetensors file: ")
        assert len(str(raised.value)) < 1000
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**12, 200_000_000, 65])
def test_a_huge_header_length_takes_no_memory(tmp_path, length):
    path = tmp_path / "a"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(60))
    if length == 200_000_000:
        os.truncate(path, 300_000_000)  # sparse: the header would be there, but is longer than any may be
    tracemalloc.start()
    with pytest.raises(FileError, match=f"announce a header of {length} bytes"):
        kb.io.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_long_hostile_header_is_not_read_into_python(tmp_path):
    head = b'{"x":' + b"[[]," * 5_000_000 + b"0" + b"]" * 5_000_000 + b"}"
    path = tmp_path / "a"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    tracemalloc.start()
    with pytest.raises(FileError, match="not a valid safetensors file"):
        kb.io.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


EMPTY = '"t%d":{"dtype":"F32","shape":[0,1],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    "head",
    [
        lambda: '{"__metadata__":{"kbitcupy":"[' + "{}," * 2_500_000 + '{}]"}}',
        lambda: "{" + ",".join(EMPTY % number for number in range(600_000)) + "}",
    ],
    ids=["configurations", "empty tensors"],
)
def test_a_header_of_too_many_values_is_refused_before_it_takes_memory(tmp_path, head):
    path = tmp_path / "a"
    content = head().encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    tracemalloc.start()
    with pytest.raises(FileError, match=f"^{path} is not a valid safetensors file: it has more than 4194304 values"):
        kb.io.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_an_index_of_too_many_values_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map":{},"metadata":[' + "{}," * 2_200_000 + "{}]}")
    tracemalloc.start()
    with pytest.raises(FileError, match="is not an index of shards: it has more than 4194304 values"):
        kb.io.load(path)
    assert tracemalloc.get_traced_memory()[1] < 30_000_000  # the text, and little else
    tracemalloc.stop()


def test_nothing_is_written_that_would_not_be_read(tmp_path, monkeypatch):
    for each in (module, serial):
        monkeypatch.setattr(each, "MOST_VALUES", 1000)
    with pytest.raises(FileError, match="one that kbitcupy would not read: it has more than 1000 values.*use shards"):
        kb.io.save(tmp_path / "a", {f"x{i}": np.zeros(3) for i in range(200)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("depth", [101, 150, 900, 2000, 50_000])
def test_deep_json_is_refused_before_any_work(tmp_path, depth):
    kb.io.save(tmp_path / "in", {f"w{i}": np.ones((32, 64), np.float32) for i in range(4)}, max_shard_size=9000)
    index = tmp_path / "in" / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    metadata = f'{{"deep":{"[" * depth}{"]" * depth}}}'
    index.write_text(f'{{"metadata":{metadata},"weight_map":{json.dumps(stored["weight_map"])}}}')
    with pytest.raises(FileError, match="is not an index of shards: it nests too deep"):
        convert.quantize_file(tmp_path / "in", tmp_path / "out", "kbit4", device="cpu")
    assert os.listdir(tmp_path) == ["in"]


def test_json_as_deep_as_allowed_is_passed_on(tmp_path):
    kb.io.save(tmp_path / "in", {f"w{i}": np.ones((32, 64), np.float32) for i in range(4)}, max_shard_size=9000)
    index = tmp_path / "in" / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    deep = json.loads("[" * 90 + "]" * 90)
    index.write_text(json.dumps({**stored, "metadata": {"deep": deep}}))
    convert.quantize_file(tmp_path / "in", tmp_path / "out", "kbit4", device="cpu")
    assert kb.io.load(tmp_path / "out").index_metadata["deep"] == deep


@pytest.mark.parametrize("path", ["a" * 300, "b/" * 3000 + "c", "a\0b", "\ud800", ""], ids=repr)
@pytest.mark.parametrize("action", ["load", "save", "shards", "source", "target", "dequantize", "folder"])
def test_paths_that_no_file_can_have(tmp_path, monkeypatch, path, action):
    monkeypatch.chdir(tmp_path)
    kb.io.save("in", {"w": np.ones((32, 64), np.float32)})
    kb.io.save("shards", {f"w{i}": np.ones((32, 64), np.float32) for i in range(4)}, max_shard_size=9000)
    work = {
        "load": lambda: kb.io.load(path),
        "save": lambda: kb.io.save(path, {"x": np.zeros(3)}),
        "shards": lambda: kb.io.save(path, {"x": np.zeros(3)}, max_shard_size=8),
        "source": lambda: convert.quantize_file(path, "out", "kbit4", device="cpu"),
        "target": lambda: convert.quantize_file("in", path, "kbit4", device="cpu"),
        "folder": lambda: convert.quantize_file("shards", path, "kbit4", device="cpu", resume=True),
        "dequantize": lambda: convert.dequantize_file(path, "out", device="cpu"),
    }
    monkeypatch.setattr(conversion, "quantize", None)  # no work begins
    with pytest.raises(FileError) as raised:
        work[action]()
    assert repr(path)[1:20] in str(raised.value) or path[:20] in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == ["in", "shards"]


def zipped(member):
    return b"PK\x03\x04" + bytes(22) + len(member).to_bytes(2, "little") + bytes(2) + member + bytes(50)


KINDS = [
    ("a.pt", zipped(b"archive/data.pkl"), "a checkpoint of PyTorch", "torch.load('{path}'"),
    ("pytorch_model.bin", zipped(b"pytorch_model/data.pkl"), "a checkpoint of PyTorch", "st.save_file"),
    ("a.bin", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a pickle", "torch.load('{path}'"),
    ("a.npy", b"\x93NUMPY\x01\x00v\x00{", "a valid .npy file", "{path}"),
    ("a.npz", zipped(b"w.npy"), "a valid .npz file", "{path}"),
    ("a.zip", zipped(b"weights.safetensors"), "a zip archive", "unpack it first"),
    ("a.onnx", b"\x08\x07\x12\x07pytorch", "an ONNX model", "onnx.load('{path}')"),
    ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file", "h5py.File('{path}')"),
    ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "git-lfs", "git lfs pull"),
    ("a.safetensors", b"\n<!DOCTYPE html><html>", "a web page", "download the file itself"),
    ("a.safetensors", b"<?xml version='1.0'?><Error>", "a web page", "download the file itself"),
    ("a.safetensors", b"", "empty", "download or copy it again"),
    ("a.safetensors", bytes(5000), "zeros only", "download or copy it again"),
    ("a.json", b'{"weight_map": {}}', "JSON text", "ends in .safetensors.index.json"),
    ("a.safetensors.gz", b"\x1f\x8b\x08" + bytes(20), "compressed by gzip", "unpack it first"),
    ("a.tar", b"a" * 257 + b"ustar", "a tar archive", "unpack it first"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[2])
@pytest.mark.parametrize("command", ["load", "inspect", "compare", "quantize", "dequantize", "plan"])
def test_other_kinds_of_files_are_named(tmp_path, capsys, kind, command):
    name, content, what, remedy = kind
    path, out = tmp_path / name, str(tmp_path / "out")
    path.write_bytes(content)
    words = {"quantize": ["-o", out], "dequantize": ["-o", out], "plan": ["-o", out, "--bits", "4"]}
    if command == "load":
        with pytest.raises(FileError) as raised:
            kb.io.load(path)
        message = str(raised.value)
    else:
        assert main([command, str(path), *words.get(command, [])]) == 1
        message = capsys.readouterr().err
    assert what in message and remedy.format(path=path) in message
    assert len(message) < 1000 and os.listdir(tmp_path) == [name]


def line_of(path):
    """The Python line of a refusal."""
    with pytest.raises(FileError) as raised:
        kb.io.load(path)
    return str(raised.value).partition("convert it in Python: ")[2]


@pytest.mark.parametrize("kind", ["pt", "legacy"])
def test_the_line_that_converts_a_file_converts_it(tmp_path, kind):
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    path = tmp_path / f"it's {kind}"
    torch = pytest.importorskip("torch")
    state = {"x": torch.from_numpy(x), "y": torch.from_numpy(x).T}  # shared, and not contiguous
    torch.save(state, path, _use_new_zipfile_serialization=kind == "pt")
    exec(line_of(path), {})
    found = kb.io.load(path.with_suffix(".safetensors"))
    assert np.array_equal(found["x"], x) and len(found) == 2


def test_a_folder_of_another_kind_is_named(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileError, match=r"0 safetensors files; it holds pytorch_model-00001-of-00002\.bin.*save_pretr"):
        kb.io.load(tmp_path)


def test_standard_input_and_output_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="standard input is not read"):
        kb.io.load("-")
    with pytest.raises(FileError, match="standard output is not written"):
        kb.io.save("-", {"x": np.zeros(3)})
    kb.io.save("./-", {"x": np.zeros(3)})
    assert "x" in kb.io.load("./-")


@pytest.mark.parametrize("size", [1, 4, 20, 100, 300, 5000])
def test_a_file_that_is_cut_off_is_said_to_be(tmp_path, size):
    kb.io.save(tmp_path / "a", {f"w{i}": np.zeros((40, 40), np.float32) for i in range(4)})
    os.truncate(tmp_path / "a", size)
    with pytest.raises(FileError, match=r"cut off, download or copy it again|ends within its first 8 bytes"):
        kb.io.load(tmp_path / "a")


def test_a_pipe_is_not_waited_for(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no pipes with names")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="is not a regular file"):
        kb.io.load(tmp_path / "pipe")


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = tmp_path / "a"
    kb.io.save(path, {"x": np.zeros(100_000)})
    loaded = kb.io.load(path)
    os.truncate(path, 5000)
    with pytest.raises(FileError, match="was it changed meanwhile"):
        loaded["x"]


def registered():
    """Every registered format that needs no option."""
    for name in kb.list_formats():
        try:
            yield kb.get_format(name)
        except (ValueError, TypeError):
            continue


def lies_about(format):
    """Configurations of an array of shape (4, 256) that lie, or nearly."""
    config = kb.quantize(np.ones((4, 256), np.float32), format).config()
    lies = [{**config, key: value} for key in config for value in fuzz_files.VALUES]
    lies += [{**config, "shape": shape} for shape in ([4, 257], [5, 256], [4, 256, 2], [2**31, 2**31], [256])]
    for key in (*config["format"], "block", "bits", "table", "codebook"):
        lies += [{**config, "format": {**config["format"], key: value}} for value in fuzz_files.VALUES]
    return lies + [{**config, "format": other.config()} for other in registered()]


def try_lies(folder, format, lies):
    """Each is refused by name, or decodes to the shape that it says."""
    path = folder / "a"
    kb.io.save(path, {"w": kb.quantize(np.ones((4, 256), np.float32), format)})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    ours = json.loads(header["__metadata__"]["kbitcupy"])
    refused = 0
    for lie in lies:
        header["__metadata__"]["kbitcupy"] = json.dumps({**ours, "tensors": {"w": lie}})
        path.write_bytes(fuzz_files.with_header(header, data))
        try:
            q = kb.io.load(path)["w"]
            assert q.dequantize().shape == q.shape
        except FileError as error:
            refused += 1
            refusal = str(error)
            assert "'w'" in refusal and len(refusal) < 2000, lie
    return refused


@pytest.mark.parametrize("format", [format for format in registered() if format.can_encode], ids=str)
def test_lies_about_a_format_are_refused(tmp_path, format):
    lies = random.Random(str(format)).sample(lies_about(format), 100)
    assert try_lies(tmp_path, format, lies) > 50


def test_no_lie_takes_memory(tmp_path):
    tracemalloc.start()
    try_lies(tmp_path, "kbit4", lies_about("kbit4"))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_a_newer_file_names_its_writer(tmp_path):
    path = tmp_path / "a"
    kb.io.save(path, {"w": kb.quantize(np.ones((4, 64), np.float32), "kbit4")})
    content = path.read_bytes()
    newer = content.replace(
        b'\\"version\\":1,\\"written_by\\":\\"kbitcupy 0.', b'\\"version\\":2,\\"written_by\\":\\"kbitcupy 9.', 1
    )
    assert newer != content
    path.write_bytes(newer)
    with pytest.raises(
        FileError,
        match=rf"written by kbitcupy 9\..*, needs one that reads file version 2; this is kbitcupy {kb.__version__}",
    ):
        kb.io.load(path)


def test_fuzzed_files_are_read_or_refused():
    outcomes, slowest, failures = fuzz_files.run(1000, seed=int(np.random.default_rng().integers(10**9)))
    assert failures == []
    assert slowest < fuzz_files.SECONDS
    assert min(outcomes["read"], outcomes["refused"]) > 100


def test_the_fuzzer_notices_a_crash(monkeypatch):
    def crash(*_):
        raise KeyError("shape")

    monkeypatch.setattr(module, "_read_entry", crash)
    _, _, failures = fuzz_files.run(20)
    assert any("KeyError" in failure for failure in failures)
