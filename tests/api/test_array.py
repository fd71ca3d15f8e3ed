"""QuantizedArray: what it is, rows, shapes, pickle, configuration, and what it refuses."""

import copy
import io
import json
import pickle
import sys
import types
import unittest.mock

import numpy as np
import pytest
from inputs import BFLOAT16, ENCODED

import kbitcupy as kb
from kbitcupy.backend.xp import empty_arrays, pieces
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.formats.base import resolve

X = np.random.default_rng(1).standard_normal((6, 4, 16)).astype(np.float32)


@pytest.fixture
def q():
    return kb.quantize(X, "kbit4")


def test_attributes(q):
    assert (q.shape, q.ndim, q.size, len(q), q.dtype, q.device) == ((6, 4, 16), 3, 384, 6, np.float32, "cpu")
    assert q.nbytes == 12 * 17 + 4 and q.bits_per_element == q.nbytes * 8 / 384
    assert repr(q) == "QuantizedArray(kbit4, shape=(6, 4, 16), dtype=float32, device=cpu, 4.33 bits/element)"
    assert repr(q.format) == "get_format('kbit4')"
    assert "<table>" in q._repr_html_() and "kbit4" in q._repr_html_()
    assert repr(kb.quantize(X[:0], "kbit4")) == "QuantizedArray(kbit4, shape=(0, 4, 16), dtype=float32, device=cpu)"


SHARED = [  # formats, and the planes that rows share
    ("kbit4", {}, "scale"),
    ("kbit3", {"codebook": np.linspace(-1, 1, 8)}, "scale and codebook"),
    ("nf4", {"block": 16, "double_quant": True}, "nested_offset"),
    ("table4", {"block": 16, "codebook": np.linspace(-1, 1, 16)}, "table"),
    ("int8", {}, "scale"),
    ("uint4", {"granularity": ("channel", 1), "symmetric": False}, "scale and zero_point"),
]


@pytest.mark.parametrize(("name", "options", "shared"), SHARED)
@pytest.mark.parametrize("part", [slice(0, 256), slice(256, 512), np.s_[::-1]], ids=str)
def test_a_part_is_no_out(xp, name, options, shared, part):
    """What all rows share would change under the others."""
    format = resolve(name, **options)
    x = xp.asarray(np.random.default_rng(0).standard_normal((512, 32)).astype(np.float32)) * np.float32(1e-3)
    q = kb.quantize(x, format)
    before = q.dequantize()
    if part.step and options.get("double_quant"):
        part = slice(0, 128)
    rows = q[part]
    for out in (rows, rows[:], copy.copy(rows)):
        with pytest.raises(FormatError, match=f"out is a part of another array, whose other rows share its {shared}: "):
            kb.quantize(x[part] * 1e6, format, out=out)
    assert bool((q.dequantize() == before).all())
    alone = kb.quantize(x[part] * 1e6, format, out=rows.copy())
    assert bool((alone.dequantize() == kb.quantize(x[part] * 1e6, format).dequantize()).all())
    assert bool((q.dequantize() == before).all())


def test_rows_that_share_nothing_are_an_out(xp):
    x = xp.asarray(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    for name, options in (("nf4", {}), ("int8", {"granularity": "token"}), ("dynamic8", {"block": 64})):
        q = kb.quantize(x, name, **options)
        kb.quantize(x[:3] * 1e6, name, out=q[2:5], **options)
        x_now = xp.concatenate([x[:2], x[:3] * np.float32(1e6), x[5:]])
        assert bool((q.dequantize() == kb.quantize(x_now, name, **options).dequantize()).all())
    experts = kb.stack([kb.quantize(x * 10.0**i, "kbit4") for i in range(3)])
    kb.quantize(x * 1e6, "kbit4", out=experts[1])
    assert bool((experts[1].dequantize() == kb.quantize(x * 1e6, "kbit4").dequantize()).all())
    assert bool((experts[2].dequantize() == kb.quantize(x * 100.0, "kbit4").dequantize()).all())
    q = kb.quantize(x, "kbit4")
    assert bool((kb.quantize(x * 2, "kbit4", out=q[:]).dequantize() == q.dequantize()).all())  # all of it is no part


def test_what_was_joined_is_an_out_of_its_own(xp):
    """A plane that members have in common is not that of the first of them."""
    x = xp.asarray(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    for name in ("kbit4", "int8"):
        q = kb.quantize(x, name)
        before = q.dequantize()
        joined = kb.concatenate([q, q.copy()])
        kb.quantize(xp.concatenate([x, x]) * 1e6, name, out=joined)
        assert bool((q.dequantize() == before).all())


def test_it_is_frozen(q):
    with pytest.raises(AttributeError, match="frozen: cannot set 'shape'"):
        q.shape = (1,)
    with pytest.raises(AttributeError, match="frozen: cannot delete"):
        del q.planes
    with pytest.raises(TypeError):
        q.planes["packed"] = None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (np.asarray, r"a QuantizedArray does not convert .* call \.dequantize\(\)"),
        (lambda q: np.array(q, np.float32), r"call \.dequantize\(\)"),
        (list, r"not iterable: call \.dequantize\(\)"),
        (np.sqrt, r"sqrt does not take a QuantizedArray: call \.dequantize\(\)"),
        (np.add.reduce, r"add.reduce does not take a QuantizedArray: call \.dequantize\(\)"),
        (lambda q: X + q, r"add does not take a QuantizedArray: call \.dequantize\(\)"),
        (lambda q: q + X, r"add does not take a QuantizedArray: call \.dequantize\(\)"),
        (lambda q: q * 2, r"multiply does not take .* call \.dequantize\(\)"),
        (lambda q: 2 * q, r"multiply does not take .* call \.dequantize\(\)"),
        (lambda q: np.float32(2) * q, r"multiply does not take .* call \.dequantize\(\)"),
        (lambda q: -q, r"negative does not take .* call \.dequantize\(\)"),
        (lambda q: q < 1, r"less does not take .* call \.dequantize\(\)"),
        (np.sum, r"sum does not take .* call \.dequantize\(\)"),
        (np.linalg.norm, r"norm does not take .* call \.dequantize\(\)"),
        (lambda q: np.array_equal(q, q), r"array_equal does not take .* call \.dequantize\(\)"),
        (lambda q: np.concatenate([q, q]), r"concatenate does not take .* use kbitcupy.concatenate, or call \.dequ"),
        (lambda q: np.stack([X, q]), r"stack does not take .* use kbitcupy.stack, or call \.dequantize\(\)"),
        (lambda q: np.take(q, [1], axis=0), r"use kbitcupy.take, or call \.dequantize\(\)"),
        (lambda q: np.dot(X, q), r"dot does not take a QuantizedArray: use kbitcupy.matmul, or call \.dequantize\(\)"),
        (lambda q: np.matmul(X, q, dtype="float64"), r"use kbitcupy.matmul, or call \.dequantize\(\)"),
        (lambda q: np.save(io.BytesIO(), q), r"use kbitcupy.io.save\(path, \{name: array\}\), or call"),
        (lambda q: np.savez(io.BytesIO(), weight=q), r"savez does not take .* use kbitcupy.io.save\("),
        (lambda q: q == q.copy(), r"QuantizedArrays are not compared with == or !=: call \.dequantize\(\)"),
        (lambda q: q != q.copy(), r"not compared with == or !=: call \.dequantize\(\)"),
        (lambda q: q == X, r"not compared with == or !=: call \.dequantize\(\)"),
        (lambda q: X.__eq__(q), r"equal does not take a QuantizedArray: call \.dequantize\(\)"),
        (lambda q: q == 0, r"not compared with == or !=: call \.dequantize\(\)"),
    ],
)
def test_nothing_happens_implicitly(q, use, message):
    with pytest.raises(TypeError, match=message):
        use(q)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (np.asarray, r"a TransposedQuantizedArray does not convert .* call \.dequantize\(\)"),
        (lambda t: t + 1, r"add does not take a TransposedQuantizedArray: call \.dequantize\(\)"),
        (lambda t: t == t.T.copy().T, r"TransposedQuantizedArrays are not compared"),
        (kb.dequantize, r"q is TransposedQuantizedArray.* pass q, not q.T, or call q.T.dequantize\(\)"),
        (lambda t: kb.take(t, [0]), r"q is TransposedQuantizedArray.* pass q, not q.T"),
        (kb.to_torch, r"q is TransposedQuantizedArray.* pass q, not q.T"),
    ],
)
def test_nothing_happens_implicitly_to_a_transpose(q, use, message):
    with pytest.raises(TypeError, match=message):
        use(q.reshape(24, 16).T)


def test_what_needs_no_values_is_answered(q):
    assert (np.shape(q), np.ndim(q), np.size(q), np.size(q, 1)) == ((6, 4, 16), 3, 384, 4)
    assert np.shape(q.reshape(24, 16).T) == (16, 24)


def test_identity_stays(q):
    """What is no array compares as any object does; hashing and membership go by identity."""
    other = q.copy()
    assert q in [q, other] and {q: 1, other: 2}[q] == 1 and len({q, other, q}) == 2
    assert q != None and q != "kbit4" and q not in (None, "kbit4") and q == unittest.mock.ANY  # noqa: E711
    transposed = q.reshape(24, 16).T
    assert transposed in [transposed] and {transposed: 1}[transposed] == 1


def test_size_in_memory_counts_the_planes(q):
    assert sys.getsizeof(q) - sys.getsizeof(kb.quantize(X[:0], "kbit4")) == q.nbytes - 4


@pytest.mark.parametrize(
    "key",
    [
        0,
        -1,
        np.int64(3),
        np.array(-2),
        slice(1, 4),
        slice(None, None, -2),
        [0, 5, 5],
        [],
        np.array([[1], [2]]),
        X[:, 0, 0] > 0,
    ],
)
def test_rows_stay_quantized(q, key):
    rows = q[key]
    assert isinstance(rows, kb.QuantizedArray) and rows.format == q.format
    assert np.array_equal(rows.dequantize(), q.dequantize()[key])


@pytest.mark.parametrize("key", [slice(None, None, -1), slice(1, None, 2), slice(5, 0, -3)], ids=str)
@pytest.mark.parametrize(
    ("format", "options"),
    [("kbit4", {}), ("nf4", {"block": 32}), ("dynamic8", {"block": 32}), ("int8", {"granularity": "token"})],
)
def test_steps_leave_no_gaps(format, options, key):
    """The planes of every part are contiguous, as kernels read them and as the constructor demands."""
    q = kb.quantize(X.reshape(12, 32), format, **options)
    part = q[key]
    assert all(plane.flags.c_contiguous for plane in part.planes.values())
    again = kb.QuantizedArray(part.format, part.planes, part.shape, part.dtype)
    assert np.array_equal(again.dequantize(), q.dequantize()[key])


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (6, IndexError, "index 6 is out of bounds for axis 0 with size 6"),
        ([0, 9], IndexError, "out of bounds for axis 0 with size 6"),
        ([-7], IndexError, "out of bounds"),
        ((0, 1), TypeError, "takes one index"),
        (None, TypeError, "takes one index"),
        (1.0, TypeError, "takes one index"),
        ([0.5], TypeError, "integers or booleans"),
        ([True], IndexError, "boolean index"),
    ],
)
def test_bad_indices(q, key, error, message):
    with pytest.raises(error, match=message):
        q[key]


def test_rows_that_are_not_whole_blocks():
    with pytest.raises(FormatError, match=r"rows of shape \(16,\) are not whole blocks of 32 elements"):
        kb.quantize(X[:, 0], "kbit4")[0]
    with pytest.raises(IndexError, match="0-d"):
        kb.quantize(np.float32(1), "kbit4")[0]


def test_take(q):
    ids = np.array([[3, 3], [0, 5]])
    assert np.array_equal(kb.take(q, ids), q.dequantize()[ids])
    out = np.empty((2, 2, 4, 16), np.float16)
    assert kb.take(q, ids, out=out) is out
    with pytest.raises(TypeError, match="must be a QuantizedArray"):
        kb.take(X, ids)


@pytest.mark.parametrize("shape", [(24, 16), (-1,), ((2, 192),), (6, -1, 8)])
def test_reshape(q, shape):
    wanted = X.reshape(*shape).shape
    assert q.reshape(*shape).shape == wanted
    assert np.array_equal(q.reshape(*shape).dequantize(), q.dequantize().reshape(wanted))


def test_bad_reshape(q):
    with pytest.raises(ValueError, match=r"cannot reshape a QuantizedArray of shape \(6, 4, 16\) to \(5, -1\)"):
        q.reshape(5, -1)
    assert kb.quantize(X[:0], "kbit4").reshape(3, 0).shape == (3, 0)


def test_transpose():
    q = kb.quantize(X.reshape(24, 16), "kbit4")
    assert q.T.shape == (16, 24) and q.T.T is q and q.T.ndim == 2 and q.T.dtype == np.float32
    assert np.array_equal(q.T.dequantize(), q.dequantize().T)
    with pytest.raises(FormatError, match="needs a 2-D QuantizedArray"):
        _ = kb.quantize(X, "kbit4").T
    assert not hasattr(kb.quantize(X, "kbit4"), "T") and hasattr(q, "T")


@pytest.mark.parametrize("options", [{}, {"absmax": "float16"}, {"codebook": np.linspace(-1, 1, 16)}])
def test_pickle_copy_and_configuration(options):
    q = kb.quantize(X.astype(BFLOAT16), "kbit4", **options)
    config = json.loads(json.dumps(q.config()))
    for other in (pickle.loads(pickle.dumps(q)), q.copy(), q.get(), kb.QuantizedArray.from_config(config, q.planes)):
        assert other.config() == q.config() and other.format == q.format and hash(other.format) == hash(q.format)
        assert np.array_equal(other.dequantize(), q.dequantize())
    assert not np.shares_memory(q.copy().planes["packed"], q.planes["packed"])


def test_what_is_unpickled_is_checked(q):
    made, arguments = q.__reduce__()
    assert made(*arguments).shape == q.shape
    with pytest.raises(FormatError, match="plane 'packed' of kbit4 is"):
        made(*arguments[:2], (600, 4, 16), *arguments[3:])
    with pytest.raises(FormatError, match="non-negative integers"):
        made(*arguments[:2], (6, 4, -16), *arguments[3:])


@pytest.mark.parametrize("name", ENCODED)
def test_pickles_are_small(name):
    q = kb.quantize(np.resize(X, 256), name)
    assert len(pickle.dumps(q)) < 700 + q.nbytes
    assert pickle.loads(pickle.dumps(q.format)) == q.format


@pytest.mark.parametrize("name", ["kbit4", "table4"])
def test_a_format_is_json_only(name):
    """What belongs to one call is not in it: it goes to quantize, and lies in planes."""
    values = np.random.default_rng(0).permutation(np.linspace(-2, 1, 16))
    with pytest.raises(
        FormatError, match=r"codebook is ndarray; a format holds names, .* quantize\(x, name, codebook="
    ):
        kb.get_format(name, codebook=values)
    q = kb.quantize(X, name, codebook=values)
    assert q.format == kb.get_format(name, codebook="custom") and json.dumps(q.format.options())
    again = pickle.loads(pickle.dumps(q.format))
    assert again == q.format and len(pickle.dumps(again)) < 300
    assert np.array_equal(kb.quantize(X, again, codebook=values).dequantize(), q.dequantize())
    with pytest.raises(FormatError, match="codebook='custom' names no values"):
        kb.quantize(X, again)
    with pytest.raises(FormatError, match=f"codebook is given, but get_format\\('{name}'\\) has one of its own"):
        kb.quantize(X, kb.get_format(name), codebook=values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "this kbitcupy reads up to 2: upgrade it"),
        ({"version": True}, "must be a positive integer"),
        ({"version": "1"}, "must be a positive integer"),
        ({"format": {"codebook": "nf"}}, "lacks 'name'"),
        ({"format": {"name": "kbit9"}}, "format is 'kbit9'; registered are"),
        ({"format": {"name": "kbit4", "blok": 3}}, "has no option 'blok'; it takes: codebook, absmax"),
        ({"format": {"name": "kbit4", "absmax": "int8"}}, "absmax is 'int8'; allowed are"),
        ({"format": {"name": "kbit4", "absmax": ["e4m4"]}}, "absmax is"),
        ({"format": 3}, "lacks"),
        ({"format": {"name": "kbit4:absmax=float32"}}, "is malformed"),
        ({"shape": [6, 4, -16]}, "non-negative integers"),
        ({"shape": [6, 4, 16.5]}, "non-negative integers"),
        ({"shape": "abc"}, "non-negative integers"),
        ({"shape": [float("inf")]}, "non-negative integers"),
        ({"shape": [6, 4, 17]}, "plane 'packed' of kbit4 is"),
        ({"shape": [2**62, 2**62]}, "plane 'packed' of kbit4 is"),
        ({"dtype": 7}, "malformed"),
    ],
)
def test_hostile_configurations(q, change, message):
    with pytest.raises(FormatError, match=message):
        kb.QuantizedArray.from_config({**q.config(), **change}, q.planes)
    with pytest.raises(TypeError, match="dtype is int8"):
        kb.QuantizedArray.from_config({**q.config(), "dtype": "int8"}, q.planes)


def test_wrong_planes(q):
    packed = q.planes["packed"]
    for change, message in (
        ({"packed": packed[:-1]}, r"plane 'packed' of kbit4 is uint32\[47\].* needs uint32\[48\]"),
        ({"packed": packed.astype(np.int64)}, "needs uint32"),
        ({"packed": packed.tolist()}, "must be a NumPy or CuPy array"),
        ({"packed": np.repeat(packed, 2)[::2]}, "not contiguous"),
        ({"more": packed}, "has the planes packed, absmax, scale; got"),
    ):
        with pytest.raises(FormatError, match=message):
            kb.QuantizedArray(q.format, {**q.planes, **change}, q.shape, q.dtype)
    with pytest.raises(FormatError, match="must be a Format"):
        kb.QuantizedArray("kbit4", q.planes, q.shape, q.dtype)


def test_out_reuses_the_planes(q):
    y = -X
    again = kb.quantize(y, "kbit4", out=q)
    assert again is q and np.array_equal(q.dequantize(), kb.quantize(y, "kbit4").dequantize())
    half = kb.quantize(y.astype(np.float16), "kbit4", out=q)
    assert half.dtype == np.float16 and half.planes["packed"] is q.planes["packed"]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"format": "kbit3"}, FormatError, "out is QuantizedArray.*it must be get_format"),
        ({"x": X[:3]}, FormatError, r"of shape \(3, 4, 16\)"),
        ({"out": X}, TypeError, "out is ndarray; it must be a QuantizedArray"),
    ],
)
def test_bad_out_of_quantize(q, bad, error, message):
    arguments = {"x": X, "format": "kbit4", "out": q, **bad}
    with pytest.raises(error, match=message):
        kb.quantize(arguments["x"], arguments["format"], out=arguments["out"])


def test_read_only_planes_are_refused_as_out(q):
    q.planes["packed"].setflags(write=False)
    with pytest.raises(FormatError, match="plane 'packed' of out is read-only"):
        kb.quantize(X, "kbit4", out=q)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.empty(X.shape, np.int32), TypeError, "out.dtype is int32; allowed are float16"),
        (np.empty((6, 64), np.float32), ValueError, "out has shape"),
        (np.empty((16, 4, 6), np.float32).T, ValueError, "not C-contiguous"),
        ([1.0], TypeError, "out is list"),
    ],
)
def test_bad_out_of_dequantize(q, out, error, message):
    with pytest.raises(error, match=message):
        q.dequantize(out=out)


def test_out_of_dequantize(q):
    for dtype in (np.float16, BFLOAT16, np.float32, np.float64):
        out = np.empty(X.shape, dtype)
        assert q.dequantize(out=out) is out and np.array_equal(out, q.dequantize(dtype=dtype))
    out = np.empty(X.shape, np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        q.dequantize(out=out)
    with pytest.raises(TypeError, match="out is float32 but dtype says float16"):
        q.dequantize(out=np.empty(X.shape, np.float32), dtype="float16")
    with pytest.raises(TypeError, match="dtype is int8; allowed are float16, bfloat16, float32, float64"):
        q.dequantize(dtype="int8")
    with pytest.raises(TypeError, match="q is ndarray"):
        kb.dequantize(X)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.arange(4), TypeError, "x is int64; allowed are float16, bfloat16, float32, float64"),
        (np.ones(4, complex), TypeError, "x is complex128"),
        (["a"], TypeError, "x is list, of which NumPy makes no array of numbers"),
        (object(), TypeError, "x is object"),
    ],
)
def test_bad_x(x, error, message):
    with pytest.raises(error, match=message):
        kb.quantize(x, "kbit4")


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("kbit9", {}, "format is 'kbit9'; registered are kbit1"),
        ("kbit0", {}, "format is 'kbit0'"),
        (4, {}, "format is 4"),
        ("kbit4", {"blok": 1}, "format 'kbit4' has no option 'blok'; it takes: codebook, absmax"),
        ("kbit4", {"codebook": "fp"}, "codebook is 'fp'; allowed are 'bnf', 'nf' or an array of 16 numbers"),
        (
            "kbit4",
            {"codebook": np.ones(15)},
            r"codebook is of shape \(15,\); it must be a one-dimensional sequence of 16",
        ),
        ("kbit4", {"codebook": [0.0] * 15 + [np.nan]}, "codebook holds values that are not finite"),
        ("kbit4", {"codebook": [0.0] * 15 + [1e300]}, "not finite in float32"),
        ("kbit4", {"codebook": ["a"] * 16}, "codebook is not numeric"),
        ("kbit4", {"codebook": "custom"}, "names no values"),
        ("kbit4", {"absmax": "fp8"}, "absmax is 'fp8'; allowed are 'e4m4', 'float16', 'float32'"),
        (kb.get_format("kbit4"), {"absmax": "e4m4"}, "go with a format's name"),
    ],
)
def test_bad_formats(format, options, message):
    with pytest.raises(FormatError, match=message):
        kb.quantize(X, format, **options)


def test_devices_that_are_not_there(q, monkeypatch):
    with pytest.raises(DeviceError, match="device is 'gpu'; allowed are 'auto', 'cpu' and 'cuda:N'"):
        q.to_device("gpu")
    with pytest.raises(DeviceError, match="device is 'cuda:x'"):
        q.to_device("cuda:x")
    assert q.to_device("cpu") is q
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'kbitcupy\[cuda12\]'"):
        q.to_device("cuda:0")
    assert q.to_device("auto") is q


def test_cupy_without_a_gpu(q, monkeypatch):
    cuda = types.SimpleNamespace(is_available=lambda: False)
    fake = types.SimpleNamespace(cuda=cuda, ndarray=type("ndarray", (), {}))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(DeviceError, match="CuPy finds none: use device 'cpu', or check nvidia-smi"):
        q.to_device("cuda:0")
    with pytest.raises(DeviceError, match="CuPy finds none"):
        kb.create_normal_float_codebook(4, "cuda:0")
    assert q.to_device("auto") is q
    assert kb.quantize(X, "kbit4").device == "cpu"  # host arrays do not mind


class Host:
    """An array that is known by its DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Both(Host):
    """A tensor whose other protocol raises what `hasattr` lets through, as one with a gradient does."""

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("this tensor requires grad")


class Private(Host):
    """A tensor that may not be exported."""

    def __dlpack__(self, **options):
        raise BufferError("use detach()")


def test_dlpack_comes_before_the_other_protocol():
    assert kb.quantize(Both(X), "kbit4").shape == X.shape
    with pytest.raises(TypeError, match=r"x is Private and refuses DLPack export \(use detach\(\)\)"):
        kb.quantize(Private(X), "kbit4")


def test_dlpack_input():
    assert np.array_equal(kb.quantize(Host(X), "kbit4").planes["packed"], kb.quantize(X, "kbit4").planes["packed"])
    assert kb.quantize([[1.0, 2.0]], "kbit4").shape == (1, 2)


def test_planes_in_one_allocation_do_not_overlap():
    wanted = {"a": ((3, 5), "float16"), "b": ((0,), "float32"), "c": ((300,), "uint8"), "d": ((1,), "bfloat16")}
    total, found = pieces(wanted)
    ends = [piece.offset + np.prod(piece.shape, dtype=int) * piece.dtype.itemsize for piece in found]
    assert [piece.name for piece in found] == ["a", "b", "c", "d"]
    assert all(piece.offset % 256 == 0 for piece in found) and ends[-1] <= total
    assert all(end <= piece.offset for end, piece in zip(ends, found[1:], strict=False))
    made = empty_arrays(np.empty(0), total, found)
    assert {name: (array.shape, array.dtype.name) for name, array in made.items()} == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODED)
def test_planes_begin_where_any_kernel_reads(cupy, name):
    q = kb.quantize(cupy.ones((4, 512), np.float16), name)
    assert all(plane.data.ptr % 256 == 0 for plane in q.planes.values())
    assert len({plane.data.mem.ptr for plane in q.planes.values()}) == 1
