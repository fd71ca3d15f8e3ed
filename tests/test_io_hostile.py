"""Hostile files: each kind of lie is refused with the key named, before memory is taken for it."""

import json
import os
import random
import tracemalloc

import fuzz_files
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io import convert
from kbitcupy.io import safetensors as module

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
    for name in kb.formats():
        try:
            yield kb.get_format(name)
        except (ValueError, TypeError):
            continue


def lies_about(format):
    """Configurations of an array of shape (4, 64) that lie, or nearly."""
    config = kb.quantize(np.ones((4, 64), np.float32), format).config()
    lies = [{**config, key: value} for key in config for value in fuzz_files.VALUES]
    lies += [{**config, "shape": shape} for shape in ([4, 65], [5, 64], [4, 64, 2], [2**31, 2**31], [64])]
    for key in (*config["format"], "block", "bits", "table", "codebook"):
        lies += [{**config, "format": {**config["format"], key: value}} for value in fuzz_files.VALUES]
    return lies + [{**config, "format": other.config()} for other in registered()]


def try_lies(folder, format, lies):
    """Each is refused by name, or decodes to the shape that it says."""
    path = folder / "a"
    kb.io.save(path, {"w": kb.quantize(np.ones((4, 64), np.float32), format)})
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


@pytest.mark.parametrize("format", list(registered()), ids=str)
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
