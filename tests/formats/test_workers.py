"""``quantize(..., workers=)``: threads of NumPy arrays, whose bits are those of one."""

import threading

import numpy as np
import pytest
from inputs import ENCODED, fitting, make

import kbitcupy as kb
from kbitcupy.errors import FormatError
from kbitcupy.formats import threads
from kbitcupy.formats.base import Format, samples


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Arrays are shared out although they are small; the rows that are quantized at a time."""
    monkeypatch.setattr(threads, "LEAST", 256)
    monkeypatch.setattr(threads, "COLUMNS", 2048)
    found, encode = [], Format.encode

    def spy(self, x, planes, given=None, lead=0):
        found.append(len(x) if x.ndim else 1)
        return encode(self, x, planes, given, lead)

    monkeypatch.setattr(Format, "encode", spy)
    return found


def planes(q):
    return {name: plane.tobytes() for name, plane in q.planes.items()}


@pytest.mark.parametrize("shape", [(48, 512), (24576,), (7, 5, 256), (9, 100), (1, 8192), (0, 256), ()])
@pytest.mark.parametrize("name", ENCODED)
def test_bits_are_those_of_one_thread(name, shape):
    for format in samples(name):
        if format.options().get("codebook") == "custom":  # its values come with a call, see below
            continue
        size = fitting(format, shape)
        x = make("normal", int(np.prod(size)), np.dtype("float16")).reshape(size)
        try:
            wanted = planes(kb.quantize(x, format))
        except FormatError:  # no format of so few axes
            continue
        assert planes(kb.quantize(x, format, workers=3)) == wanted, format
        out = kb.quantize(np.zeros_like(x), format)
        assert planes(kb.quantize(x, format, workers=5, out=out)) == wanted, format


@pytest.mark.parametrize(
    ("format", "shape", "rows"),
    [
        ("kbit4", (48, 512), [16, 16, 16]),
        ("kbit4", (24576,), [4, 4, 4]),
        ("nf4:double_quant=true", (48, 512), [16, 16, 16]),
        ("table4:block=16,double_quant=true", (24576,), [4, 4, 4]),
        ("int4:block=32", (7, 5, 64), [3, 3, 1]),
        ("int4:block=64", (7, 5, 100), [3, 3, 1]),  # with a short last group
        ("int8:granularity=channel:0", (5, 999), [2, 2, 1]),
        ("int8:granularity=tensor", (48, 512), [16, 16, 16]),
        ("uint4:granularity=channel:1,zero=float", (48, 512), [16, 16, 16]),
        ("int8:percentile=99", (48, 512), [48]),
        ("q4_K", (48, 512), [16, 16, 16]),
        ("nvfp4", (48, 512), [16, 16, 16]),
        ("ternary", (48, 512), [16, 16, 16]),
        ("ternary:rule=absmax", (48, 512), [16, 16, 16]),
        ("ternary:rule=fit", (48, 512), [48]),
        ("ternary", (6, 129), [6]),
        ("ternary:granularity=channel:0", (48, 512), [16, 16, 16]),
        ("kbit4", (9, 100), [9]),  # rows that are no whole blocks, and not enough numbers for others
        ("kbit4", (2, 300), [2]),
        ("kbit4", (3, 1, 96), [3]),
    ],
)
def test_who_does_what(parts, format, shape, rows):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wanted = planes(kb.quantize(x, format))
    parts.clear()
    assert planes(kb.quantize(x, format, workers=3)) == wanted
    assert sorted(parts, reverse=True) == rows


@pytest.mark.parametrize("format", ["kbit4", "nf4", "int8", "uint4:block=32", "q8_0", "nvfp4", "ternary"])
def test_threads_take_the_next_part(parts, monkeypatch, format):
    """Of more parts than there are threads, as large arrays have."""
    monkeypatch.setattr(threads, "_PART", 1 << 12)
    x = make("wide", 200 * 512, np.dtype("float32")).reshape(200, 512)
    wanted = planes(kb.quantize(x, format))
    parts.clear()
    assert planes(kb.quantize(x, format, workers=2)) == wanted
    assert len(parts) > 4 and sum(parts) == 200


def test_the_caller_is_one_of_the_threads(monkeypatch):
    """Two parts that wait for each other, in two threads."""
    both, found = threading.Barrier(2), set()

    def meet(self, x, planes, given):
        both.wait(60)
        found.add(threading.current_thread())

    monkeypatch.setattr(type(kb.get_format("nf4")), "encode_numpy", meet)
    kb.quantize(np.zeros((48, 512), np.float32), "nf4", workers=2)
    assert len(found) == 2 and threading.main_thread() in found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("format", ["ternary", "ternary:rule=absmax,rounding=away", "kbit3", "kbit4:absmax=float16"])
def test_numbers_of_the_whole_array(format, dtype):
    """Whose sums are of an order, and whose largest number is in one part only."""
    x = make("wide", 3 * (1 << 18) + 256, np.dtype(dtype)).reshape(-1, 256)
    for row, number in ((5, 6e4), (2000, np.nan), (2001, np.inf)):
        x[row, 3] = number
        wanted = planes(kb.quantize(x, format))
        for workers in (2, 7):
            assert planes(kb.quantize(x, format, workers=workers)) == wanted


def test_what_a_call_brings(parts):
    rng = np.random.default_rng(0)
    x, importance = rng.standard_normal((48, 512)).astype(np.float32), rng.uniform(0, 2, 512).astype(np.float32)
    calls = [
        (3, lambda **o: kb.quantize(x, "q4_0", importance=importance, **o)),
        (3, lambda **o: kb.quantize(x, "kbit2", codebook=[-1, -0.25, 0.3, 1], **o)),
        (1, lambda **o: kb.quantize(x.reshape(3, 16, 512), "q4_0", importance=np.stack([importance] * 3), **o)),
        (1, lambda **o: kb.quantize(x, "int8", granularity=("channel", 0), scale=np.full(48, 0.1), **o)),
    ]
    for shares, call in calls:
        wanted = planes(call())
        parts.clear()
        assert planes(call(workers=3)) == wanted and len(parts) == shares


def test_members_of_a_stack(parts):
    """An earlier result that is a stack has planes for each member."""
    x = np.random.default_rng(0).standard_normal((6, 8, 256)).astype(np.float32)
    for format in ("nf4:double_quant=true", "ternary", "kbit4"):
        out = kb.stack([kb.quantize(part, format) for part in x])
        wanted = planes(out)
        x, y = x[::-1], out.copy()
        again = planes(kb.quantize(x, out.format, out=y))
        parts.clear()
        assert planes(kb.quantize(x, out.format, out=out, workers=4)) == again != wanted
        assert sorted(parts) == [2] * 3 + [8] * 6  # three threads have two members each, of eight rows


def test_a_failing_part_fails_the_call(monkeypatch):
    format, whole = kb.get_format("kbit4"), type(kb.get_format("kbit4")).encode_numpy

    def fails(self, x, planes, given):
        if x[0, 0] == 7:
            raise RuntimeError("part")
        return whole(self, x, planes, given)

    monkeypatch.setattr(type(format), "encode_numpy", fails)
    x = np.zeros((48, 512), np.float32)
    x[32, 0] = 7
    kb.quantize(x, format)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="part"):
        kb.quantize(x, format, workers=3)
    assert threading.active_count() == before


def test_after_a_failing_part_none_is_begun(monkeypatch):
    done = []

    def fails(self, x, planes, given):
        done.append(len(x))
        raise RuntimeError("part")

    monkeypatch.setattr(threads, "_PART", 1 << 12)
    monkeypatch.setattr(type(kb.get_format("int8")), "part_numpy", lambda *_: (np.ones(1), np.ones(1)))
    monkeypatch.setattr(type(kb.get_format("int8")), "encode_numpy", fails)
    with pytest.raises(RuntimeError, match="part"):
        kb.quantize(np.zeros((64, 4096), np.float32), "int8", workers=2)
    assert len(done) <= 2


def test_threads_have_the_callers_error_state(monkeypatch):
    found = []
    monkeypatch.setattr(type(kb.get_format("kbit4")), "encode_numpy", lambda *_: found.append(np.geterr()["divide"]))
    with np.errstate(divide="print"):
        kb.quantize(np.zeros((48, 512), np.float32), "kbit4", workers=3)
    assert found == ["print"] * 3


@pytest.mark.parametrize(
    ("workers", "error", "message"),
    [
        (0, ValueError, "workers is 0; it must be 1 or more"),
        (-2, ValueError, "workers is -2"),
        (True, ValueError, "workers is True"),
        (2.0, TypeError, r"workers is 2\.0; it must be an integer"),
        ("2", TypeError, "workers is '2'"),
    ],
)
def test_bad_numbers_are_refused(workers, error, message):
    with pytest.raises(error, match=message):
        kb.quantize(np.zeros((4, 64), np.float32), "kbit4", workers=workers)


@pytest.mark.gpu
def test_a_gpu_needs_none(cupy):
    x = cupy.zeros((48, 512), np.float32)
    kb.quantize(x, "kbit4", workers=1)
    with pytest.raises(ValueError, match="workers is 2, and x is on a GPU"):
        kb.quantize(x, "kbit4", workers=2)
