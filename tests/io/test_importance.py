"""Importance matrices of llama.cpp."""

import struct

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io.importance import importance_for, read_importance

NAME = "blk.0.ffn_down.weight"


def write(path, tensors, kind="imatrix"):
    about = {"imatrix.chunk_count": 2, "imatrix.chunk_size": 512, "imatrix.datasets": ["text"]}
    kb.io.save(path, tensors, {**({} if kind is None else {"general.type": kind}), **about})
    return path


def matrix(columns=8, experts=1, count=3.0):
    sums = np.arange(experts * columns, dtype=np.float32).reshape(experts, columns)
    return {f"{NAME}.in_sum2": sums, f"{NAME}.counts": np.full((experts, 1), count, np.float32)}


def test_mean_squares(tmp_path):
    found = read_importance(write(tmp_path / "a.gguf", matrix()))
    assert list(found) == [NAME]
    assert found[NAME].dtype == np.float32 and found[NAME].shape == (8,)
    assert np.array_equal(found[NAME], np.arange(8, dtype=np.float32) / np.float32(3))


def test_experts(tmp_path):
    tensors = matrix(4, 3)
    tensors[f"{NAME}.counts"][1] = 0
    found = read_importance(write(tmp_path / "a.gguf", tensors))[NAME]
    assert found.shape == (3, 4)
    assert np.array_equal(found[0], np.arange(4, dtype=np.float32) / np.float32(3))
    assert np.array_equal(found[1], np.ones(4))
    assert np.array_equal(found[2], np.arange(8, 12, dtype=np.float32) / np.float32(3))


def test_as_gguf_py_writes_it(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf-py writes the file")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type("imatrix")
    for name, array in matrix(16, 2).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_importance(tmp_path / "a.gguf")[NAME].shape == (2, 16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({f"{NAME}.counts": None}, "but not"),
        ({f"{NAME}.in_sum2": None}, "but not"),
        ({f"{NAME}.counts": np.ones((1, 1), np.float16)}, "must be float32"),
        ({f"{NAME}.in_sum2": np.ones((1, 8), np.int32)}, "must be float32"),
        ({f"{NAME}.counts": np.ones((3, 1), np.float32)}, "for 3 counts"),
        ({f"{NAME}.counts": np.ones((0, 1), np.float32)}, "for 0 counts"),
        ({f"{NAME}.in_sum2": np.full((1, 8), np.nan, np.float32)}, "not finite"),
        ({f"{NAME}.in_sum2": np.full((1, 8), -1, np.float32)}, "at least 0"),
        ({f"{NAME}.counts": None, f"{NAME}.in_sum2": None, "x": np.zeros(3, np.float32)}, "of no tensor"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, why):
    tensors = {name: array for name, array in {**matrix(), **change}.items() if array is not None}
    with pytest.raises(FileError, match=why):
        read_importance(write(tmp_path / "a.gguf", tensors))


def test_other_files(tmp_path):
    for kind in (None, "model", 3):
        with pytest.raises(FileError, match=r"general\.type is not 'imatrix'"):
            read_importance(write(tmp_path / f"{kind}.gguf", matrix(), kind))
    with pytest.raises(FileError, match="does not exist"):
        read_importance(tmp_path / "nothing.gguf")
    with pytest.raises(TypeError, match="importance"):
        read_importance(3)


def dat(entries, tail=b""):
    """The older kind of file."""
    data = struct.pack("<i", len(entries))
    for name, calls, sums in entries:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(sums))
        data += np.asarray(sums, "<f4").tobytes()
    return data + tail


def test_imatrix_dat(tmp_path):
    sums = np.arange(8, dtype=np.float32)
    tail = struct.pack("<ii", 7, 4) + b"text"
    (tmp_path / "i.dat").write_bytes(dat([(NAME, 3, sums), ("b", 0, sums)], tail))
    found = read_importance(tmp_path / "i.dat")
    assert list(found) == [NAME, "b"]
    assert np.array_equal(found[NAME], sums / np.float32(3)) and np.array_equal(found["b"], sums)
    assert importance_for(NAME, (2, 3, 4), found, "a").shape == (2, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\0",
        b"text of some kind, which is no importance matrix",
        dat([(NAME, 3, np.ones(8))])[:-1],
        dat([(NAME, 3, np.ones(8))] * 2),
        dat([(NAME, 3, [])]),
        dat([(NAME, 3, [np.nan])]),
        dat([(NAME, 3, [-1.0])]),
        struct.pack("<ii", 1, -5) + b"x" * 20,
        struct.pack("<ii", 1, 2**31 - 1) + b"x" * 20,
        struct.pack("<ii1sii", 1, 1, b"a", 3, 2**30) + b"x" * 20,
        struct.pack("<i", 2**31 - 1),
    ],
)
def test_hostile_imatrix_dat(tmp_path, data):
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(FileError):
        read_importance(tmp_path / "i.dat")


def test_which_tensor():
    one, stack = np.ones(8, np.float32), np.ones((2, 8), np.float32)
    matrices = {NAME: one, "token_embd.weight": one, "experts": stack}
    for name, shape, wanted in ((NAME, (4, 8), one), ("experts", (2, 4, 8), stack), ("mla", (2, 4, 4), one)):
        found = importance_for(name, shape, matrices | {"mla": one}, "a")
        assert np.array_equal(found, wanted.reshape(found.shape)) and found.shape == shape[-3:-2] + shape[-1:]
    assert importance_for("other", (4, 8), matrices, "a") is None
    assert importance_for("token_embd.weight", (4, 16), matrices, "a") is None
    for name, shape in ((NAME, (4, 16)), (NAME, (2, 4, 8)), ("experts", (4, 8))):
        with pytest.raises(FileError, match="another model"):
            importance_for(name, shape, matrices, "a")
