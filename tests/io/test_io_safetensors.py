"""Files: every dtype and the metadata survive, hostile files are refused by name, failures leave nothing behind."""

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from inputs import ENCODED, fitting
from safetensors import deserialize, safe_open

import kbitcupy as kb
from kbitcupy.errors import DeviceError, FileError, FormatError
from kbitcupy.io import atomic, conversion, convert, safetensors as module

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}


def write(path, tensors, metadata=None):
    """A safetensors file from (dtype code, shape, bytes), in the order given, by nothing of kbitcupy."""
    header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (code, shape, content) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def contents(path):
    """What the safetensors library finds in a file: name -> (dtype code, shape, bytes)."""
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in deserialize(path.read_bytes())}


def metadata(path):
    with safe_open(path, framework="np") as file:
        return file.metadata()


def stored(code, shape, seed=0):
    size = math.prod(shape) * BITS[code] // 8
    return (
        code,
        list(shape),
        np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, size, "u1").tobytes(),
    )


def weights(shape=(64, 64), code="F32", seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(FLOATS[code])
    return code, list(shape), x.tobytes()


@pytest.fixture
def model(tmp_path):
    """A small model: two matrices, a bias, a position table."""
    return write(
        tmp_path / "model.safetensors",
        {
            "a.weight": weights(seed=1),
            "b.weight": weights((32, 96), "F16", seed=2),
            "a.bias": weights((64,), seed=3),
            "positions": stored("I64", (1, 1024)),
        },
        {"format": "pt", "note": "ü"},
    )


def compressed(model, **options):
    target = model.with_name("compressed.safetensors")
    convert.quantize_file(model, target, "kbit4", device="cpu", **options)
    return target


# ---- round trips ----


@pytest.mark.parametrize("code", BITS)
def test_copied_tensors_keep_every_byte(tmp_path, code):
    tensors = {
        "matrix": stored(code, (16, 24)),  # below min_size
        "vector": stored(code, (2048,)),
        "empty": stored(code, (0, 7)),
        "w": weights(),
    }
    if BITS[code] >= 8:
        tensors["scalar"] = stored(code, ())
    source = write(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    small, back = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    convert.quantize_file(source, small, "kbit4", device="cpu")
    convert.dequantize_file(small, back, device="cpu")
    del tensors["w"]
    for path in (small, back):
        found = contents(path)
        assert {name: found[name] for name in tensors} == tensors
    assert contents(back).keys() == {*tensors, "w"}
    assert contents(back)["w"][:2] == ("F32", [64, 64])
    assert metadata(back) == {"format": "pt"}


@pytest.mark.parametrize("code", FLOATS)
def test_compressed_tensors_come_back_in_their_dtype(tmp_path, code):
    source = write(tmp_path / "a.safetensors", {"odd": stored("U8", (3,)), "w": weights(code=code)})
    small, back = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    report = convert.quantize_file(source, small, "kbit4", device="cpu")
    assert (report.converted, report.copied, report.elements) == (1, 1, 4096)
    assert contents(small).keys() == {"odd", "w.packed", "w.absmax", "w.scale"}
    assert report.nbytes_after == sum(len(data) for _, _, data in contents(small).values())
    assert report.bits_per_element == pytest.approx(4.25, abs=0.01)
    report = convert.dequantize_file(small, back, device="cpu")
    assert (report.converted, report.copied) == (1, 1)
    x = np.frombuffer(weights(code=code)[2], FLOATS[code]).reshape(64, 64)
    restored = kb.io.load(back)["w"]
    assert restored.dtype == x.dtype
    assert restored.tobytes() == kb.dequantize(kb.quantize(x, "kbit4")).tobytes()
    assert metadata(back) is None


def test_metadata_describes_the_compressed_tensors(model):
    found = metadata(compressed(model))
    ours = json.loads(found.pop("kbitcupy"))
    assert found == {"format": "pt", "note": "ü"}
    assert ours["version"] == 1
    assert ours["written_by"] == f"kbitcupy {kb.__version__}"
    x = np.zeros((32, 96), np.float16)
    assert ours["tensors"]["b.weight"] == kb.quantize(x, "kbit4").config()
    assert list(ours["tensors"]) == ["a.weight", "b.weight"]


def test_data_is_aligned_to_its_dtype(tmp_path):
    codes = ["U8", "F4", "F64", "BOOL", "F16", "F6_E2M3", "I32"]
    tensors = {code: stored(code, (4,)) for code in codes} | {"e": stored("I64", (0,)), "w": weights()}
    small = tmp_path / "b.safetensors"
    convert.quantize_file(write(tmp_path / "a.safetensors", tensors), small, "kbit4", device="cpu")
    data = small.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for tensor in (t for name, t in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"):
        assert tensor["data_offsets"][0] % max(BITS[tensor["dtype"]] // 8, 1) == 0


@pytest.mark.parametrize(
    ("tensor", "options", "chosen"),
    [
        (weights((16, 32)), {}, True),
        (weights((16, 31)), {}, False),
        (weights((16, 31)), {"min_size": 496}, True),
        (weights((64, 64)), {"min_size": 4097}, False),
        (weights((4, 8, 32)), {}, True),
        (weights((1, 2048)), {}, True),
        (weights((2048,)), {}, False),
        (weights((0, 64)), {"min_size": 0}, False),
        (stored("I32", (64, 64)), {}, False),
        (stored("BOOL", (64, 64)), {}, False),
        (stored("F8_E4M3", (64, 64)), {}, False),
        (weights(), {"keep": "lm_*"}, False),
        (weights(), {"keep": ["x", "*.head"]}, False),
        (weights(), {"keep": "LM_*"}, True),
        (weights(), {"keep": ("embed*",)}, True),
    ],
)
def test_which_tensors_are_compressed(tmp_path, tensor, options, chosen):
    source = write(tmp_path / "a.safetensors", {"lm_.head": tensor})
    report = convert.quantize_file(source, tmp_path / "b.safetensors", "kbit4", device="cpu", **options)
    assert report.converted == chosen
    assert report.copied == 1 - chosen


def test_patterns_that_match_nothing_are_reported(model):
    target = model.with_name("t")
    report = convert.quantize_file(model, target, "kbit4", keep=("a*", "lm_haed"), device="cpu")
    assert report.unused_keep == ("lm_haed",)
    assert math.isnan(convert.quantize_file(model, model.with_name("u"), "kbit4", keep="*").bits_per_element)


def test_options_of_the_format_travel_with_the_file(model):
    codebook = np.linspace(-1, 1, 8)
    small, back = model.with_name("b"), model.with_name("c")
    convert.quantize_file(model, small, ("kbit3:absmax=float32", {"codebook": codebook}), device="cpu")
    convert.dequantize_file(small, back, device="cpu")
    x = kb.io.load(model)["a.weight"]
    expected = kb.dequantize(kb.quantize(x, "kbit3", codebook=codebook, absmax="float32"))
    assert np.array_equal(kb.io.load(back)["a.weight"], expected)


def test_what_is_compressed_already_passes_through(model):
    first = compressed(model, keep="b*")
    second, back = model.with_name("second"), model.with_name("back")
    report = convert.quantize_file(first, second, "kbit8", device="cpu")
    assert (report.converted, report.copied) == (1, 3)
    tensors = kb.io.load(second)
    assert tensors["a.weight"].format.name == "kbit4"
    assert tensors["b.weight"].format.name == "kbit8"
    assert contents(second)["a.weight.packed"] == contents(first)["a.weight.packed"]
    convert.dequantize_file(second, back, device="cpu")
    assert {name: t[:2] for name, t in contents(back).items()} == {n: t[:2] for n, t in contents(model).items()}


def test_a_file_without_anything_to_compress_returns_unchanged(model):
    back = model.with_name("back")
    convert.dequantize_file(compressed(model, keep="*"), back)
    assert contents(back) == contents(model)
    assert metadata(back) == metadata(model)


def test_a_gpu_writes_the_same_files(cupy, tmp_path):
    source = write(tmp_path / "source", {code: weights((33, 97), code) for code in FLOATS} | {"b": stored("U8", (3,))})
    for device in ("cpu", "cuda:0"):
        convert.quantize_file(source, tmp_path / f"small {device}", "kbit4", device=device)
        convert.dequantize_file(tmp_path / "small cpu", tmp_path / f"back {device}", device=device)
    for name in ("small", "back"):
        assert (tmp_path / f"{name} cpu").read_bytes() == (tmp_path / f"{name} cuda:0").read_bytes()
    kb.io.save(tmp_path / "arrays", {"x": cupy.arange(6), "q": kb.quantize(cupy.ones((4, 32)), "kbit4")})
    assert kb.io.load(tmp_path / "arrays")["x"].tolist() == list(range(6))


# ---- load and save ----


@pytest.mark.parametrize("name", module.CODES)
def test_load_and_save_every_dtype(tmp_path, name):
    dtype = np.dtype(name) if hasattr(np, name) else np.dtype(getattr(ml_dtypes, name))
    x = np.arange(6).astype(dtype).reshape(2, 3)
    kb.io.save(tmp_path / "a", {"x": x, "scalar": x[1, 1], "empty": x[:0], "turned": x.T})
    tensors = kb.io.load(tmp_path / "a")
    assert tensors["x"].dtype == dtype
    assert not tensors["x"].flags.writeable and tensors["x"].flags.aligned
    assert tensors["scalar"].shape == ()
    assert tensors["empty"].shape == (0, 3)
    for key, expected in {"x": x, "scalar": x[1, 1], "turned": x.T}.items():
        assert tensors[key].tobytes() == np.ascontiguousarray(expected).tobytes()


def test_save_takes_what_numpy_takes(tmp_path):
    big = np.arange(6, dtype=">f4").reshape(2, 3)
    kb.io.save(tmp_path / "a", {"big": big, "list": [1.0, 2.0], "part": np.arange(10)[::3]}, {"key": "value"})
    tensors = kb.io.load(tmp_path / "a")
    assert np.array_equal(tensors["big"], big)
    assert tensors["list"].tolist() == [1.0, 2.0]
    assert tensors["part"].tolist() == [0, 3, 6, 9]
    assert metadata(tmp_path / "a") == {"key": "value"}


@pytest.mark.parametrize("format", ENCODED)
def test_compressed_arrays_survive_a_file(tmp_path, format):
    shape = fitting(kb.get_format(format), (5, 77))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = kb.quantize(x, format)
    kb.io.save(tmp_path / "a", {"q": q, "empty": kb.quantize(x[:0], format)})
    back = kb.io.load(tmp_path / "a")
    assert back["q"].config() == q.config()
    assert all(np.array_equal(back["q"].planes[name], plane) for name, plane in q.planes.items())
    assert np.array_equal(back["q"].dequantize(), q.dequantize())
    assert back["empty"].shape == (0, *shape[1:])


@pytest.mark.parametrize(
    ("tensors", "information", "message"),
    [
        ({"x": np.zeros(2, complex)}, None, "complex128"),
        ({"x": np.array(["text"])}, None, "tensor 'x' has dtype"),
        ({1: np.zeros(2)}, None, "name is 1"),
        ({"__metadata__": np.zeros(2)}, None, "reserves"),
        ({"\ud800": np.zeros(2)}, None, "Unicode"),
        ({"x": np.zeros(2)}, {"a": 1}, "'a': 1"),
        ({"x": np.zeros(2)}, {"kbitcupy": "{}"}, "belongs to kbitcupy"),
        ({"x": kb.quantize(np.zeros(2), "kbit2"), "x.scale": np.zeros(2)}, None, "'x.scale'"),
    ],
)
def test_save_refuses_what_cannot_be_stored(tmp_path, tensors, information, message):
    with pytest.raises(FileError, match=message):
        kb.io.save(tmp_path / "a", tensors, information)
    assert os.listdir(tmp_path) == []


MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np, kbitcupy as kb
path = sys.argv[1]
q = kb.quantize(np.ones((2, 32), np.float32), "kbit4")
kb.io.save(path, {f"w{i}": q if i % 3 == 0 else np.full(3, i) for i in range(3000)})
tensors = dict(kb.io.load(path))
assert len(tensors) == 3000
assert all(np.allclose(x.dequantize(), 1, atol=0.1) if isinstance(x, kb.QuantizedArray) else (x == int(n[1:])).all()
           for n, x in tensors.items())
"""


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")
def test_thousands_of_tensors_need_few_descriptors(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path / "a")],
        env={**os.environ, "PYTHONPATH": str(Path(kb.__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_views_of_one_file_share_a_mapping_and_outlive_what_loaded_them(tmp_path):
    kb.io.save(tmp_path / "a", {"x": np.arange(5), "y": np.arange(7)})
    loaded = kb.io.load(tmp_path / "a")
    x, y = loaded["x"], loaded["y"]

    def owner(view):
        while isinstance(view, np.ndarray):
            view = view.base
        return view.obj if isinstance(view, memoryview) else view

    assert owner(x) is owner(y)
    del loaded
    kb.io.save(tmp_path / "a", {"x": np.zeros(5)}, force=True)
    assert x.tolist() == list(range(5)) and y.tolist() == list(range(7))


def test_a_closed_mapping_of_a_cut_file_is_an_error(tmp_path):
    kb.io.save(tmp_path / "a", {"x": np.arange(5000), "y": np.arange(5000)})
    loaded = kb.io.load(tmp_path / "a")
    view = loaded["x"]  # keeps the mapping
    os.truncate(tmp_path / "a", 300)
    with pytest.raises(FileError, match="was it changed meanwhile"):
        loaded["y"]
    assert view.shape == (5000,)


ORDER = r"the order is save\(path, {'name': array, ...}\)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda path, q: (path, q), f"tensors is QuantizedArray; it must be a mapping .*{ORDER}"),
        (lambda path, q: (path, np.zeros(3)), f"tensors is ndarray; .*{ORDER}"),
        (lambda path, q: (path, [("x", np.zeros(3))]), f"tensors is list; .*{ORDER}"),
        (lambda path, q: ({"x": q}, path), f"path is dict; it must be a str or pathlib.Path: {ORDER}"),
        (lambda path, q: (q, path), f"path is QuantizedArray; .*{ORDER}"),
        (lambda path, q: (3, {"x": q}), f"path is int; .*{ORDER}"),
        (lambda path, q: (str(path).encode(), {"x": q}), f"path is bytes; .*{ORDER}"),
        (lambda path, q: (path, {"x": q}, "pt"), "metadata is str; it must be a mapping of str to str, or None"),
    ],
)
@pytest.mark.parametrize("save", [kb.io.save, kb.io.bitsandbytes.save])
def test_save_says_what_its_arguments_are(tmp_path, save, arguments, message):
    with pytest.raises(TypeError, match=message):
        save(*arguments(tmp_path / "a", kb.quantize(np.zeros((4, 32)), "nf4")))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [3, None, b"a", ["a"], np.zeros(3)], ids=repr)
@pytest.mark.parametrize("argument", ["path", "source", "target"])
def test_what_is_no_path_is_a_type_error(model, path, argument):
    work = {
        "path": lambda: kb.io.load(path),
        "source": lambda: convert.quantize_file(path, model.with_name("out"), "kbit4"),
        "target": lambda: convert.quantize_file(model, path, "kbit4"),
    }
    with pytest.raises(TypeError, match=f"{argument} is {type(path).__name__}; it must be a path: a str or pathlib"):
        work[argument]()
    assert os.listdir(model.parent) == [model.name]


@pytest.mark.parametrize("code", FLOATS)
@pytest.mark.parametrize("size", [64, 1 << 13])
def test_what_is_not_finite_is_counted(xp, tmp_path, code, size):
    device = "cpu" if xp is np else "cuda:0"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, size // 64 * 32)).astype(FLOATS[code])
    y, large = x.copy(), np.full_like(x, ml_dtypes.finfo(x.dtype).max)
    large[::2] *= FLOATS[code](-1)
    y[3, 5], y[63, -1], y[0, 0], y[40, 7] = np.nan, -np.nan, np.inf, -np.inf
    y[41, 0] = np.nan
    kb.io.save(tmp_path / "a", {"x": x, "y": y, "large": large, "z": -np.abs(y), "bias": y[3]})
    report = convert.quantize_file(tmp_path / "a", tmp_path / "b", "kbit4", device=device)
    assert (report.nan, report.infinite, report.not_finite) == (6, 4, ("y", "z"))
    report = convert.quantize_file(tmp_path / "a", tmp_path / "c", "kbit4", keep="y", device=device)
    assert (report.nan, report.infinite, report.not_finite) == (3, 2, ("z",))
    assert convert.dequantize_file(tmp_path / "b", tmp_path / "d", device=device).not_finite == ()


def test_a_mapping_of_formats_goes_with_keep_and_min_size(model):
    formats = {"a.weight": "kbit4", "b.weight": "kbit8"}

    def compressed_by(**options):
        convert.quantize_file(model, model.with_name("out"), formats, device="cpu", force=True, **options)
        found = kb.io.load(model.with_name("out"))
        return {name: found[name].format.name for name in found if isinstance(found[name], kb.QuantizedArray)}

    assert compressed_by() == formats
    assert compressed_by(keep="a.*") == {"b.weight": "kbit8"}
    assert compressed_by(min_size=4096) == {"a.weight": "kbit4"}
    assert compressed_by(min_size=4096, keep="a.*") == {}
    with pytest.raises(FileError, match="tensor 'a.bias', which cannot be compressed"):
        convert.quantize_file(model, model.with_name("c"), {"a.bias": "kbit4"}, keep="a.*", device="cpu")


def test_a_mapping_compresses_what_is_small(tmp_path):
    source = write(tmp_path / "a", {"w": weights((8, 32))})
    assert convert.quantize_file(source, tmp_path / "b", {"w": "kbit4"}, device="cpu").converted == 1
    assert convert.quantize_file(source, tmp_path / "c", "kbit4", device="cpu").converted == 0


def test_load_names_a_tensor_that_numpy_cannot_hold(tmp_path):
    path = write(tmp_path / "a", {"small": stored("F4", (2, 8))})
    with pytest.raises(FileError, match=r"'small' has dtype F4.*byte for byte"):
        kb.io.load(path)["small"]
    path = write(tmp_path / "b", {"deep": stored("U8", (1,) * 70)})
    with pytest.raises(FileError, match="'deep' of shape"):
        kb.io.load(path)["deep"]


def test_planes_may_lie_at_any_byte(model):
    aligned, shifted, back = compressed(model), model.with_name("shifted"), model.with_name("back")
    write(shifted, {"one": stored("U8", (1,)), **contents(aligned)}, metadata(aligned))
    expected = kb.io.load(aligned)["b.weight"].dequantize()
    q = kb.io.load(shifted)["b.weight"]
    assert np.array_equal(q.dequantize(), expected) and all(plane.flags.aligned for plane in q.planes.values())
    convert.dequantize_file(shifted, back, device="cpu")
    assert contents(back)["one"] == stored("U8", (1,))
    assert np.array_equal(kb.io.load(back)["b.weight"], expected)


# ---- bad files ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a valid safetensors file"),
        (b"\x80\x02}q\x00.", "not a valid safetensors file"),
        (b"PK\x03\x04" + bytes(100), "not a valid safetensors file"),
        (b"\xff" * 8 + b"{}", "not a valid safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "not a valid safetensors file"),
        (None, "does not exist"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path, content, message):
    path = tmp_path / "weights.bin"
    if content is not None:
        path.write_bytes(content)
    for read in (
        kb.io.load,
        lambda p: convert.quantize_file(p, tmp_path / "out", "kbit4", device="cpu"),
        lambda p: convert.dequantize_file(p, tmp_path / "out", device="cpu"),
    ):
        with pytest.raises(FileError, match=message) as raised:
            read(path)
        assert str(path) in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_directory_is_not_a_file(tmp_path):
    with pytest.raises(FileError, match="is a directory"):
        kb.io.load(tmp_path)


def test_truncated_file(model):
    model.write_bytes(model.read_bytes()[:-10])
    with pytest.raises(FileError, match="not a valid safetensors file"):
        convert.quantize_file(model, model.with_name("out"), "kbit4", device="cpu")


def test_dequantize_refuses_a_file_of_others(model):
    with pytest.raises(FileError, match="no tensors compressed by kbitcupy"):
        convert.dequantize_file(model, model.with_name("out"), device="cpu")


@pytest.mark.parametrize("plane", ["packed", "absmax", "scale"])
@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda tensor: (tensor[0], [tensor[1][0] - 1], tensor[2][: -BITS[tensor[0]] // 8]),
        lambda tensor: (tensor[0], [1, *tensor[1]], tensor[2]),
        lambda tensor: ({"U32": "I32", "U8": "I8", "F32": "U32"}[tensor[0]], *tensor[1:]),
        lambda tensor: ("F4", [2 * len(tensor[2])], tensor[2]),
    ],
    ids=["missing", "short", "reshaped", "other dtype", "no NumPy dtype"],
)
def test_planes_that_do_not_fit_are_named(model, plane, change):
    path = compressed(model)
    tensors = contents(path)
    tensor = tensors.pop(f"b.weight.{plane}")
    if change is not None:
        tensors[f"b.weight.{plane}"] = change(tensor)
    write(path, tensors, metadata(path))
    with pytest.raises(FileError, match=r"'b\.weight") as raised:
        convert.dequantize_file(path, model.with_name("out"), device="cpu")
    assert plane in str(raised.value)
    assert not model.with_name("out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "'w'.*upgrade"),
        ({"version": "1"}, "'w'.*version"),
        ({"shape": None}, "'w'.*shape"),
        ({"shape": [64, -64]}, "'w'.*shape"),
        ({"shape": [64, 1e999]}, "'w'"),
        ({"shape": [64, 65]}, "'w'.*plane"),
        ({"shape": [10**30, 0]}, "'w'"),
        ({"shape": {"a": 1}}, "'w'"),
        ({"shape": "64"}, "'w'"),
        ({"dtype": "int8"}, "'w'.*int8"),
        ({"dtype": ["float32"]}, "'w'"),
        ({"format": "kbit4"}, "'w'"),
        ({"format": {}}, "'w'.*name"),
        ({"format": {"name": "kbit9"}}, "'w'.*registered"),
        ({"format": {"name": ["kbit4"]}}, "'w'.*registered"),
        ({"format": {"name": "kbit4", "speed": 1}}, "'w'.*no option 'speed'"),
        ({"format": {"name": "kbit4", "codebook": {}}}, "'w'.*codebook"),
        ({"format": {"name": "kbit4", "codebook": [[1]]}}, "'w'.*codebook"),
        ({"format": {"name": "kbit4", "absmax": []}}, "'w'.*absmax"),
        ({"format": {"name": "kbit4", "codebook": "custom"}}, "'w'.*codebook"),
        ({"format": {"name": "kbit5"}}, "'w'.*packed"),
    ],
)
def test_hostile_configurations_are_refused_by_name(tmp_path, change, message):
    kb.io.save(tmp_path / "a", {"w": kb.quantize(np.ones((64, 64), np.float32), "kbit4")})
    ours = json.loads(metadata(tmp_path / "a")["kbitcupy"])
    ours["tensors"]["w"].update(change)
    write(tmp_path / "b", contents(tmp_path / "a"), {"kbitcupy": json.dumps(ours)})
    with pytest.raises((FileError, FormatError), match=message):
        convert.dequantize_file(tmp_path / "b", tmp_path / "c", device="cpu")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no version"),
        ('{"version": true}', "no version"),
        ('{"version": 0}', "no version"),
        ('{"version": 2, "written_by": "kbitcupy 9.9"}', "written by kbitcupy 9.9, needs .* file version 2.*upgrade"),
        ('{"version": 2}', "written by a newer kbitcupy"),
        ('{"version": 1}', "lists no tensors"),
        ('{"version": 1, "tensors": ["w"]}', "lists no tensors"),
        ('{"version": 1, "tensors": {"w": null}}', "'w'"),
        ('{"version": 1, "tensors": {"a.bias": {}}}', "'a.bias' is stored twice"),
    ],
)
def test_hostile_metadata_is_refused(model, text, message):
    write(model, contents(model), {"kbitcupy": text})
    for read in (kb.io.load, lambda p: convert.quantize_file(p, p.with_name("out"), "kbit4", device="cpu")):
        with pytest.raises(FileError, match=message):
            read(model)


def test_reserved_name_in_a_configuration(tmp_path):
    kb.io.save(tmp_path / "a", {"w": kb.quantize(np.ones((64, 64), np.float32), "kbit4")})
    ours = metadata(tmp_path / "a")["kbitcupy"].replace('"w"', '"__metadata__"')
    tensors = {name.replace("w.", "__metadata__."): t for name, t in contents(tmp_path / "a").items()}
    with pytest.raises(FileError, match="reserves"):
        convert.dequantize_file(write(tmp_path / "b", tensors, {"kbitcupy": ours}), tmp_path / "c", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutations")


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_header_loads_or_is_refused(folder, data):
    whole = folder / "whole"
    if not whole.exists():
        codebook = [-1.0, -0.25, 0.25, 1.0]
        kb.io.save(whole, {"w": kb.quantize(np.ones((8, 32)), "kbit2", codebook=codebook), "b": np.ones(3)})
    content = bytearray(whole.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged"
    damaged.write_bytes(content)
    tensors, refusal = {}, str(damaged)
    try:
        tensors = kb.io.load(damaged)
    except FileError as error:
        refusal = str(error)
    assert str(damaged) in refusal
    for tensor in tensors.values():
        if isinstance(tensor, kb.QuantizedArray):
            tensor.dequantize()


# ---- targets ----


@pytest.mark.parametrize("action", ["quantize", "dequantize", "save"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("exists", "exists; choose another path, or overwrite it with force=True"),
        ("folder", "is a directory"),
        ("missing/out", "directory .*missing does not exist"),
        ("model.safetensors", "is the input file|exists"),
        ("link", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
    ],
)
def test_targets_that_are_refused(model, action, target, message):
    folder = model.parent
    (folder / "exists").write_text("precious")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(model)
    (folder / "dangling").symlink_to(folder / "elsewhere")
    if action == "dequantize":
        os.replace(compressed(model), model)
    before = {path.name for path in folder.iterdir()}, model.read_bytes()
    with pytest.raises(FileError, match=message):
        if action == "quantize":
            convert.quantize_file(model, folder / target, "kbit4", device="cpu")
        elif action == "dequantize":
            convert.dequantize_file(model, folder / target, device="cpu")
        else:
            kb.io.save(folder / target, {"x": np.zeros(3)})
    assert before == ({path.name for path in folder.iterdir()}, model.read_bytes())
    assert (folder / "exists").read_text() == "precious"


def test_force_overwrites_but_never_the_input(model):
    target = model.with_name("out")
    target.write_text("old")
    convert.quantize_file(model, target, "kbit4", device="cpu", force=True)
    assert "a.weight.packed" in contents(target)
    with pytest.raises(FileError, match="is the input file"):
        convert.quantize_file(model, model, "kbit4", device="cpu", force=True)
    with pytest.raises(FileError, match="is a directory"):
        convert.quantize_file(model, model.parent, "kbit4", device="cpu", force=True)


@pytest.mark.skipif(os.name != "posix", reason="device files and permission bits are POSIX's")
def test_devices_are_refused_and_permissions_follow_the_umask(model):
    with pytest.raises(FileError, match="not a regular file"):
        convert.quantize_file(model, "/dev/null", "kbit4", device="cpu", force=True)
    before = os.umask(0o027)
    try:
        assert stat.S_IMODE(compressed(model).stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, MemoryError, OSError(28, "No space left")])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing_behind(model, monkeypatch, failure, existing):
    target = model.with_name("out")
    if existing:
        target.write_text("precious")
    calls = []

    def failing(x, format):
        calls.append([path for path in model.parent.iterdir() if path.suffix == ".tmp"])
        if len(calls) == 2:
            raise failure
        return kb.quantize(x, format)

    monkeypatch.setattr(conversion, "quantize", failing)
    with pytest.raises(OSError if isinstance(failure, OSError) else failure) as raised:
        convert.quantize_file(model, target, "kbit4", device="cpu", force=True)
    assert not isinstance(failure, OSError) or raised.value is failure  # it is not the output's
    assert len(calls[1]) == 1  # the file was being written
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.safetensors"] + ["out"] * existing
    assert not existing or target.read_text() == "precious"


@pytest.mark.parametrize("function", ["fsync", "open", "replace"])
def test_a_disk_that_fails_is_named_and_leaves_nothing(model, monkeypatch, function):
    def failing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, function, failing)
    monkeypatch.setattr(atomic.os, "link", failing)  # then the file is renamed
    with pytest.raises(FileError, match="out cannot be written: No space left on device"):
        convert.quantize_file(model, model.with_name("out"), "kbit4", device="cpu")
    assert os.listdir(model.parent) == ["model.safetensors"]


def test_a_target_that_appears_while_writing_is_kept(model, monkeypatch):
    target = model.with_name("out")

    def quantize(x, format):
        target.write_text("precious")
        return kb.quantize(x, format)

    monkeypatch.setattr(conversion, "quantize", quantize)
    with pytest.raises(FileError, match="exists"):
        convert.quantize_file(model, target, "kbit4", device="cpu")
    assert target.read_text() == "precious"
    assert len(os.listdir(model.parent)) == 2


# ---- arguments ----


@pytest.mark.parametrize("name", ["w.packed", "w.absmax"])
def test_name_collisions_are_refused(tmp_path, name):
    source = write(tmp_path / "a", {"w": weights(), name: weights((8,))})
    with pytest.raises(FileError, match=f"'w' would be stored as '{name}'"):
        convert.quantize_file(source, tmp_path / "b", "kbit4", device="cpu")
    convert.quantize_file(source, tmp_path / "b", "kbit4", keep="w", device="cpu")
    write(source, {"w": weights(), name: weights()})
    with pytest.raises(FileError, match=f"'{name}'"):
        convert.quantize_file(source, tmp_path / "c", "kbit4", device="cpu")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "kbit9"}, FormatError, "kbit9"),
        ({"format": None}, TypeError, "give either a format"),
        ({"min_size": -1}, ValueError, "min_size is -1"),
        ({"min_size": True}, ValueError, "min_size is True"),
        ({"min_size": "9"}, ValueError, "min_size is '9'"),
        ({"device": "tpu"}, DeviceError, "device is 'tpu'"),
    ],
)
def test_arguments_that_are_refused(model, options, error, message):
    options = {"format": "kbit4", "device": "cpu", **options}
    with pytest.raises(error, match=message):
        convert.quantize_file(model, model.with_name("out"), options.pop("format"), **options)
    assert os.listdir(model.parent) == ["model.safetensors"]


def test_a_codebook_without_values_names_the_tensor(model):
    with pytest.raises(FileError, match=r"'a\.weight'.*codebook"):
        convert.quantize_file(model, model.with_name("out"), kb.get_format("kbit4", codebook="custom"), device="cpu")


def test_a_shape_that_a_format_cannot_have_is_refused_before_any_work(tmp_path, monkeypatch):
    source = write(tmp_path / "a", {"w": weights((64, 64)), "odd": weights((64, 48))})
    monkeypatch.setattr(conversion, "quantize", None)
    with pytest.raises(FileError, match=r"a: tensor 'odd': shape is \(64, 48\).*keep it as it is"):
        convert.quantize_file(source, tmp_path / "b", "q4_k", device="cpu", keep="w")
    assert os.listdir(tmp_path) == ["a"]


def test_progress_bar(model, capsys):
    convert.quantize_file(model, Path(model.with_name("out")), "kbit4", device="cpu", progress=True)
    assert "quantize" in capsys.readouterr().err
