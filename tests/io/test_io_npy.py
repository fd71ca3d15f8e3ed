""".npy and .npz as input: every array as NumPy loads it, and never a pickle."""

import io
import json
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError

DTYPES = ["bool", "u1", "<i8", "<f2", "<f4", ">f4", ">i2", "<f8", "<c8"]
RNG = np.random.default_rng(0)


def array(dtype, shape=(6, 8)):
    return (RNG.standard_normal(shape) * 50).astype("c8" if dtype == "<c8" else "f8").astype(dtype)


def same(found, wanted):
    plain = wanted.astype(wanted.dtype.newbyteorder("="))
    return found.dtype == plain.dtype and found.shape == plain.shape and found.tobytes() == plain.tobytes()


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_what_numpy_loads(tmp_path, dtype, order):
    for shape in ((6, 8), (5,), (), (0, 3), (2, 3, 4)):
        x = array(dtype, shape)
        x = np.asfortranarray(x) if order == "F" else x[::-1] if order == "strided" and shape else x
        np.save(tmp_path / "x.npy", x)
        np.savez(tmp_path / "plain.npz", x, other=x.T)
        np.savez_compressed(tmp_path / "small.npz", x, other=x.T)
        loaded = kb.io.load(tmp_path / "x.npy")
        assert set(loaded) == {"x"} and same(loaded["x"], x) and not loaded["x"].flags.writeable
        for name in ("plain.npz", "small.npz"):
            loaded = kb.io.load(tmp_path / name)
            assert set(loaded) == {"arr_0", "other"} and loaded.metadata == {}
            assert same(loaded["arr_0"], x) and same(loaded["other"], x.T)


def test_what_lies_in_place_is_mapped(tmp_path):
    x = RNG.standard_normal((64, 64)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(3, dtype=np.int8))
    np.save(tmp_path / "x.npy", x)
    for name in ("x.npy", "x.npz"):
        loaded = kb.io.load(tmp_path / name)
        assert np.shares_memory(loaded.reader.raw("x"), loaded.reader.raw("x")), name
    np.savez_compressed(tmp_path / "x.npz", x=x)
    assert not np.shares_memory(*(kb.io.load(tmp_path / "x.npz").reader.raw("x") for _ in range(2)))


@pytest.mark.parametrize("kind", ["npy", "npz", "packed"])
def test_every_command_takes_them(tmp_path, kind, capsys):
    x = RNG.standard_normal((64, 128)).astype(np.float32)
    big = x.astype(">f4")
    source, out, back = tmp_path / f"x.{kind[:3]}", tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    if kind == "npy":
        np.save(source, big)
    elif kind == "npz":
        np.savez(source, x=big, y=x.T, bias=x[0], count=np.arange(3))
    else:
        source = tmp_path / "x.npz"
        np.savez_compressed(source, x=big, y=x.T, bias=x[0], count=np.arange(3))
    assert main(["inspect", str(source), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["x"]["shape"] == [64, 128] and rows["x"]["dtype"] == "float32"
    assert main(["compare", str(source), "--device", "cpu"]) == 0
    assert main(["quantize", str(source), "-o", str(out), "--device", "cpu"]) == 0
    assert main(["dequantize", str(out), "-o", str(back), "--device", "cpu"]) == 0
    restored = kb.io.load(back)
    assert set(restored) == set(rows)
    assert np.array_equal(restored["x"], kb.quantize(x, "kbit4").dequantize())
    if kind != "npy":
        assert np.array_equal(restored["y"], kb.quantize(np.ascontiguousarray(x.T), "kbit4").dequantize())
        assert same(restored["bias"], x[0]) and same(restored["count"], np.arange(3))
    report = kb.io.quantize_file(source, tmp_path / "x.gguf", "q8_0", device="cpu")
    assert report.converted == (1 if kind == "npy" else 2)
    with pytest.raises(FileError, match="exists"):
        kb.io.quantize_file(tmp_path / "x.gguf", source, "kbit4", device="cpu")


def npy(x, **options):
    file = io.BytesIO()
    np.save(file, x, **options)
    return file.getvalue()


def header(text, version=b"\x01\x00"):
    raw = text.encode() + b" " * (118 - len(text)) + b"\n"
    return b"\x93NUMPY" + version + len(raw).to_bytes(2 if version == b"\x01\x00" else 4, "little") + raw


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
HOSTILE = {
    "objects": (npy(np.array([{}, 1], object), allow_pickle=True), "holds Python objects, which are a pickle"),
    "hidden objects": (header(GOOD.replace("'<f4'", "[('a', '|O')]")), "its dtype is a structure"),
    "text": (npy(np.array(["abc"])), "is of dtype <U3; read are bool"),
    "bfloat16": (npy(np.ones(3, ml_dtypes.bfloat16)), "is of dtype .*kb.io.save"),
    "structure": (npy(np.zeros(2, [("a", "f4")])), "its dtype is a structure"),
    "double": (npy(np.ones(2, np.complex128)), "is of dtype complex128"),
    "cut": (npy(np.ones((2, 3), np.float32))[:-1], "has 151 bytes, but float32 of shape .* takes 152"),
    "more": (npy(np.ones((2, 3), np.float32)) + b"x", "has 153 bytes, but"),
    "huge": (header(GOOD.replace("(2, 3)", "(1000000000000, 3)")), "but float32 of shape"),
    "overflow": (header(GOOD.replace("(2, 3)", "(4611686018427387904, 4)")), "which no array has"),
    "negative": (header(GOOD.replace("(2, 3)", "(-2, 3)")), "which no array has|is not a valid"),
    "no shape": (header(GOOD.replace("(2, 3)", "'ab'")), "is not a valid .npy file"),
    "no dict": (header("3"), "is not a valid .npy file"),
    "code": (header("__import__('os').system('touch pwned')"), "is not a valid .npy file"),
    "deep": (header("(" * 100), "is not a valid .npy file"),
    "deep dtype": (header(GOOD.replace("'<f4'", "[" * 90 + "]" * 90)), "is not a valid .npy file"),
    "version": (header(GOOD, b"\x07\x00"), "its version is 7.0"),
    "long": (header(GOOD, b"\x02\x00")[:8] + (1 << 30).to_bytes(4, "little") + b"{" * 20_000, "is not a valid .npy"),
    "magic alone": (b"\x93NUMPY", "is not a valid .npy file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = HOSTILE[name]
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(FileError, match=message):
        kb.io.load("a.npy")
    assert main(["quantize", "a.npy", "-o", "out"]) == 1
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile("a.npz", "w", method) as archive:
            archive.writestr("a.npy", content)
        with pytest.raises(FileError, match=message):
            kb.io.load("a.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"a.npy", "a.npz"}


def test_hostile_archives_are_refused(tmp_path):
    good = npy(np.ones((2, 3), np.float32))
    for members, message in (
        ([("a.npy", good), ("readme.txt", b"x")], "'readme.txt' is no array"),
        ([("a.npy", good), ("a.npy", good)], "'a.npy' is there twice"),
        ([("a.npy", good), (".npy", good)], "'.npy' is no array"),
    ):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a name is there twice
            for name, content in members:
                archive.writestr(name, content)
        with pytest.raises(FileError, match=message):
            kb.io.load(tmp_path / "a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_archives_are_refused_or_read(tmp_path, save):
    save(tmp_path / "good.npz", a=array("<f4", (40, 8)), b=array(">f4", (4, 8)), c=array("u1"))
    good, outcomes = (tmp_path / "good.npz").read_bytes(), set()
    for _ in range(300):
        bad = bytearray(good)
        for at in RNG.integers(0, len(bad), 3):
            bad[at] = RNG.integers(256)
        (tmp_path / "bad.npz").write_bytes(bad if RNG.random() < 0.8 else bad[: RNG.integers(5, len(bad))])
        try:
            outcomes.update(type(x) for x in dict(kb.io.load(tmp_path / "bad.npz")).values())
        except FileError as error:
            outcomes.add(type(error))
    assert FileError in outcomes and outcomes <= {np.ndarray, FileError}


def test_an_array_that_is_written_to_while_it_is_read_is_an_error(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=RNG.standard_normal((300, 300)))
    loaded = kb.io.load(tmp_path / "a.npz")
    content = (tmp_path / "a.npz").read_bytes()
    with open(tmp_path / "a.npz", "r+b") as file:
        file.write(content[:200] + bytes(len(content) - 200))
    with pytest.raises(FileError, match="cannot be unpacked|cut off"):
        loaded["a"]
    with pytest.raises(FileError, match="changed while it was read"):
        loaded.check_unchanged()


def test_they_are_not_written(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((64, 64)))
    kb.io.quantize_file(tmp_path / "a.npy", tmp_path / "b.npy", "kbit4", device="cpu")
    assert kb.io.load(tmp_path / "b.npy").files["b.npy"].reader.kind == "safetensors"
