"""What `quantize` and the others take for an array and a format, and what they refuse with which remedy."""

import functools
import sys
import types
import warnings

import numpy as np
import pytest
import scipy.sparse
from inputs import BFLOAT16, ENCODED, same_values

import kbitcupy as kb
from kbitcupy import affine
from kbitcupy.backend.xp import is_native

X = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
MASKED = np.ma.masked_greater(X, 1)
W = kb.quantize(X, "kbit4")
NO_GPU = types.SimpleNamespace(is_available=lambda: False)
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def as_dtype(x, dtype):
    with np.errstate(over="ignore"):
        return x.astype(BFLOAT16 if dtype == "bfloat16" else dtype)


# ---- arrays ----------------------------------------------------------------------------------------------------------

TAKES_ARRAYS = {
    "quantize": lambda x: kb.quantize(x, "kbit4"),
    "fit_table": kb.fit_table,
    "linear": lambda x: kb.linear(x, W),
    "matmul": lambda x: kb.matmul(x, W.T),
    "quantize_kbit": lambda x: kb.quantize_kbit(x, 4, kb.create_normal_float_codebook(4)),
    "quantize_nf4": lambda x: kb.quantize_nf4(x, 64),
    "affine.quantize": lambda x: affine.quantize(x, 0.1),
    "affine.choose_qparams": affine.choose_qparams,
    "explore.sweep": lambda x: kb.explore.sweep(x, "kbit4"),
    "metrics.sums": lambda x: kb.metrics.sums(x, X),
}


@pytest.mark.parametrize("name", TAKES_ARRAYS)
def test_a_masked_array_is_refused(name):
    with pytest.raises(TypeError, match=r"is a masked array, .*\.filled\(value\), .*\.compressed\(\)"):
        TAKES_ARRAYS[name](MASKED)
    TAKES_ARRAYS[name](MASKED.filled(0))


def test_masked_rows_and_scales_are_refused():
    with pytest.raises(TypeError, match=r"ids is a masked array, .* ids\.filled\(value\)"):
        kb.take(W, np.ma.masked_equal([1, 2, 3], 2))
    with pytest.raises(TypeError, match="scale is a masked array"):
        affine.quantize(X, np.ma.masked_equal(np.ones(8, np.float32), 2), granularity="token")


def matrix(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(x)


@pytest.mark.parametrize("name", TAKES_ARRAYS)
def test_a_matrix_is_an_array(name):
    """Its own rules (every slice has two dimensions) reach no format."""
    found, wanted = TAKES_ARRAYS[name](matrix(X)), TAKES_ARRAYS[name](X)
    if isinstance(wanted, kb.QuantizedArray):
        found, wanted = found.dequantize(), wanted.dequantize()
    if isinstance(wanted, np.ndarray):
        assert type(found) is np.ndarray and np.array_equal(found, wanted)
    elif isinstance(wanted, tuple):
        assert all(type(a) is type(b) and np.all(a == b) for a, b in zip(found, wanted, strict=True))
    else:
        assert found == wanted


@pytest.mark.parametrize("format", ENCODED)
def test_a_matrix_in_every_format(format):
    x = X.reshape(2, 256)
    assert np.array_equal(kb.quantize(matrix(x), format).dequantize(), kb.quantize(x, format).dequantize())


def test_a_mapped_file_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    assert np.array_equal(kb.quantize(mapped, "nf4").dequantize(), kb.quantize(X, "nf4").dequantize())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x is NoneType, which holds no numbers: pass an array"),
        ("text", "x is str, which holds no numbers: pass an array"),
        (b"text", "x is bytes, which holds no numbers: pass an array"),
        (object(), "x is object, which holds no numbers: pass an array"),
        (["a", "b"], r"x is list, of which NumPy makes no array of numbers: convert it with numpy\.asarray"),
        ([1.0, None], "x is list, of which NumPy makes no array of numbers"),
        (np.array([1.0, None]), "x is object; allowed are .*: convert with astype first"),
        ([[1.0], [1.0, 2.0]], "x is list, which does not convert to an array"),
        (scipy.sparse.csr_matrix(X), r"x is csr_matrix, a sparse array: pass its dense form \(\.toarray\(\)\)"),
        (scipy.sparse.coo_array(X), r"x is coo_array, a sparse array: pass its dense form"),
    ],
)
def test_what_is_no_array(x, message):
    with pytest.raises(TypeError, match=message):
        kb.quantize(x, "kbit4")


@pytest.mark.parametrize("missing", [None, types.SimpleNamespace(cuda=NO_GPU, ndarray=type("ndarray", (), {}))])
def test_memory_out_of_reach(monkeypatch, missing):
    """What says that a GPU is out of reach says it of a tensor, too."""
    monkeypatch.setitem(sys.modules, "cupy", missing)
    there = types.SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 0))
    with pytest.raises(kb.KbitError, match="CuPy is not installed" if missing is None else "CuPy finds none"):
        kb.quantize(there, "kbit4")


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_the_format_by_keyword():
    wanted = kb.quantize(X, "kbit3", codebook="nf")
    for found in (
        kb.quantize(X, format="kbit3", codebook="nf"),
        kb.quantize(X, format=kb.get_format("kbit3", codebook="nf")),
        kb.quantize(X, codebook="nf", format="KBIT3"),
    ):
        assert found.format == wanted.format and np.array_equal(found.dequantize(), wanted.dequantize())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r'quantize needs a format: quantize\(x, "kbit4"\), or .*"int4:block=32".*; registered are kbit1, '),
        ({"bits": 4}, r'quantize needs a format; bits=4 alone names none: quantize\(x, "kbit4"\)'),
        ({"block": 32, "symmetric": False}, "; block=32, symmetric=False alone names none: "),
    ],
)
def test_no_format(options, message):
    with pytest.raises(TypeError, match=message):
        kb.quantize(X, **options)


# ---- check_finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["kbit4", "nf4", "int8"])
def test_finite_arrays_pass(xp, dtype, format):
    largest = 65504 if dtype == "float16" else 3e38
    x = as_dtype(X, dtype)
    x[0, :3] = -largest, 1e-45, -0.0
    for given in (x, x.T, x[:, ::3], x[:0], x[0, 0]):
        there = xp.asarray(given)
        found = kb.quantize(there, format, check_finite=True)
        wanted = kb.quantize(there, format)
        assert all(bool((found.planes[name] == wanted.planes[name]).all()) for name in wanted.planes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["kbit4", "nf4", "int8"])
def test_nan_and_infinities_are_counted(xp, dtype, format):
    x = as_dtype(X, dtype)
    x[3, 5] = x[7, 63] = np.nan
    x[4, 0] = -np.inf
    message = r"x holds 2 NaN and 1 infinities.* among 512 elements, the first at index \(3, 5\); replace them"
    out = kb.quantize(xp.asarray(as_dtype(X, dtype)), format)
    before = out.copy()
    for options in ({}, {"out": out}):
        with pytest.raises(ValueError, match=message):
            kb.quantize(xp.asarray(x), format, check_finite=True, **options)
    assert all(bool((out.planes[name] == before.planes[name]).all()) for name in out.planes), "nothing was written"
    with pytest.raises(ValueError, match=r"the first at index \(0, 4\)"):
        kb.quantize(xp.asarray(x).T, format, check_finite=True)
    kb.quantize(xp.asarray(x), format)


def test_signaling_nan_and_other_byte_orders():
    x = X.copy()
    x.view(np.uint32)[0, 1] = 0xFF800001
    for given in (x, x.astype(">f4")):
        with pytest.raises(ValueError, match=r"1 NaN and 0 infinities among .* index \(0, 1\)"):
            kb.quantize(given, "kbit4", check_finite=True)
    with pytest.raises(ValueError, match=r"1 NaN .* index \(\);"):
        kb.quantize(np.float32("nan"), "kbit4", check_finite=True)


def test_float64_beyond_float32():
    x = X.astype(np.float64)
    x[1, 2] = 1e300
    with pytest.raises(ValueError, match=r"1 infinities \(so is float64 beyond float32, to which it is rounded\)"):
        kb.quantize(x, "kbit4", check_finite=True)
    kb.quantize(x, "int8", check_finite=True)  # which takes float64 as it is


def test_fit_table_arguments():
    fit = functools.partial(kb.fit_table, X, 2)
    for tolerance in ("a", None, np.nan, np.inf, -1e-9, True, [1]):
        with pytest.raises(ValueError, match="tolerance is .*; it must be a finite number from 0 on"):
            fit(tolerance=tolerance)
    for iterations in ("a", 0, -1, 2.0, True):
        with pytest.raises(ValueError, match="iterations is .*; it must be a positive integer"):
            fit(iterations=iterations)
    assert same_values(fit(tolerance=0, iterations=np.int64(3)), fit(tolerance=np.float32(0), iterations=3))


@pytest.mark.parametrize("x", [X.astype(np.float64) * 1e200, X.astype(np.float64) * 1e-200, 0 * X, X[:0], X * np.inf])
def test_fit_table_without_numbers(x):
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="x holds no finite number but 0, .*: scale"):
        kb.fit_table(x, 2)


@pytest.mark.parametrize("scale", [1e38, 1e-37])
def test_fit_table_at_the_ends_of_float32(scale):
    x = np.clip(X, -3, 3)
    assert np.allclose(kb.fit_table((x * scale).astype(np.float32), 3), kb.fit_table(x, 3), atol=1e-5)
    far = np.append(x.astype(np.float64), [1e300, -1e300])
    assert np.allclose(kb.fit_table(far, 3), kb.fit_table(np.append(x, [np.inf, -np.inf]), 3))


def test_arrays_of_which_nothing_has_to_be_checked():
    for dtype in ("float16", "float32", "float64"):
        x = np.zeros(4, dtype)
        assert is_native(x) and is_native(x[::2])
        assert not is_native(x.astype(x.dtype.newbyteorder())) and not is_native(x.view(np.matrix))
        assert not is_native(np.ma.array(x)) and not is_native(list(x))
    assert not is_native(np.zeros(4, np.int8)) and not is_native(np.zeros(4, "V2"))
