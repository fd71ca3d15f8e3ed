"""`QuantizedArray.to_bytes` and `from_buffer`: equal arrays, no copies, and nothing taken on trust."""

import json
import mmap
import tracemalloc
from pathlib import Path

import fuzz_files
import numpy as np
import pytest
from inputs import BFLOAT16, make

import kbitcupy as kb
from kbitcupy import serial
from kbitcupy.errors import FormatError

DATA = Path(__file__).parent.parent / "data"
FROZEN = kb.io.load(DATA / "frozen_bytes.safetensors")
X = make("normal", 5 * 256, np.dtype("float32")).reshape(5, 256)


def same(a, b):
    """Whether two arrays are equal in everything."""
    planes = {name: (x.dtype, x.shape, x.tobytes()) for name, x in a.get().planes.items()}
    return a.config() == b.config() and planes == {
        name: (x.dtype, x.shape, x.tobytes()) for name, x in b.get().planes.items()
    }


def cases():
    """Arrays of every format, of no elements and of no dimension, of every dtype, and stacks."""
    for name in kb.list_formats():
        try:
            yield name, kb.quantize(X, name)
        except (ValueError, TypeError):  # it needs an option, or only decodes
            continue
        for shape in ((0, 256), (1, 256)):
            yield f"{name} {shape}", kb.quantize(np.resize(X, shape), name)
        for dtype in (np.float16, BFLOAT16, np.float64):
            yield f"{name} {np.dtype(dtype).name}", kb.quantize(X.astype(dtype), name)
    for name in ("kbit4", "nf4", "dynamic8", "int8"):
        for x in (X[0, :1].reshape(()), X[0, :7], X[:, :3]):
            yield f"{name} {x.shape}", kb.quantize(x, name)
    for name in ("kbit4", "nf4:block=32", "int4:granularity=channel:0"):
        yield f"stack of {name}", kb.stack([kb.quantize(X * scale, name) for scale in (1, 2, 3)])
    yield "own codebook", kb.quantize(X, "kbit3", codebook=np.linspace(-1, 1, 8))


CASES = dict(cases())


@pytest.mark.parametrize("case", CASES)
def test_round_trip(xp, case):
    q = CASES[case]
    content = (q if xp is np else q.to_device("cuda:0")).to_bytes()
    again = kb.QuantizedArray.from_buffer(content)
    assert same(again, q) and again.device == "cpu"
    assert again.dequantize().tobytes() == q.dequantize().tobytes()
    assert again.to_bytes() == content


def test_layout():
    """The table in the docstring, read with nothing of kbitcupy."""
    q = kb.quantize(X, "kbit4")
    content = q.to_bytes()
    assert content[:8] == b"\x93KBITQA\n" and content[8:12] == b"\1\0\0\0"
    assert int.from_bytes(content[16:24], "little") == len(content)
    end = 24 + int.from_bytes(content[12:16], "little")
    header = json.loads(content[24:end])
    assert header["config"] == q.config() and end % 64 == 0
    for plane in header["planes"]:
        end += -end % 64
        nbytes = int(np.prod(plane["shape"], dtype=int)) * np.dtype(plane["dtype"]).itemsize
        assert content[end : end + nbytes] == q.planes[plane["name"]].tobytes()
        end += nbytes
    assert end == len(content)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_bytes_are_read(name):
    format, _, case = name.partition(" ")
    wanted = kb.io.load(DATA / "frozen" / f"{format}.safetensors")
    q = kb.QuantizedArray.from_buffer(FROZEN[name])
    assert same(q, wanted[case])
    assert q.dequantize().tobytes() == wanted[f"{case} decoded"].tobytes()


def address(array):
    return array.__array_interface__["data"][0]


def test_planes_are_views_of_what_holds_the_bytes(tmp_path):
    q = kb.quantize(X, "kbit4")
    (tmp_path / "a").write_bytes(q.to_bytes())
    with open(tmp_path / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(q.to_bytes(), np.uint8)
    for buffer in (
        q.to_bytes(),
        bytearray(q.to_bytes()),
        memoryview(q.to_bytes()),
        mapped,
        array,
        array.reshape(2, -1),
    ):
        again = kb.QuantizedArray.from_buffer(buffer)
        assert same(again, q)
        first = address(np.frombuffer(buffer, np.uint8))
        for plane in again.planes.values():
            assert first < address(plane) < first + len(array) and not plane.flags.writeable
            assert plane.size == 0 or (address(plane) - first) % 64 == 0
    again = kb.QuantizedArray.from_buffer(mapped)
    with pytest.raises(BufferError):
        mapped.close()
    assert same(again, q)


def test_planes_at_any_address():
    q = kb.quantize(X, "kbit4")
    content = q.to_bytes()
    again = kb.QuantizedArray.from_buffer(memoryview(b"x" + content)[1:])
    assert same(again, q) and all(plane.flags.aligned for plane in again.planes.values())


def test_a_copy_is_independent():
    q = kb.quantize(X, "kbit4")
    content = bytearray(q.to_bytes())
    again = kb.QuantizedArray.from_buffer(content).copy()
    content[:] = bytes(len(content))
    assert same(again, q)


def edited(change, x=X, more=b""):
    """Bytes of a good array whose header was changed, and more behind them."""
    content = kb.quantize(x, "kbit4").to_bytes() + more
    end = 24 + int.from_bytes(content[12:16], "little")
    header = json.loads(content[24:end])
    change(header)
    return fuzz_files.bytes_of(header, content[end:])


def put(*path, value):
    """A change of one value of the header."""

    def change(header):
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = value

    return lambda: edited(change)


def twice(header):
    header["planes"].append(header["planes"][-1])


def empty(shape):
    """An array without elements, whose planes are right for many a shape."""
    return lambda: edited(lambda header: header["config"].update(shape=shape), X[:0])


GOOD = kb.quantize(X, "kbit4").to_bytes()
REFUSED = [
    (lambda: b"", "has 0 bytes"),
    (lambda: GOOD[:23], "has 23 bytes"),
    (lambda: b"PK" + GOOD[2:], "begins with b'PK"),
    (lambda: GOOD.replace(b"\n", b"\r\n", 1), "begins with"),
    (lambda: GOOD[:8] + b"\2" + GOOD[9:], "version 2; this kbitcupy reads up to 1: upgrade"),
    (lambda: GOOD[:8] + b"\0" + GOOD[9:], "version 0"),
    (lambda: GOOD[:-1], "cut off"),
    (lambda: GOOD + b"\0", "cut off, or more than one array"),
    (lambda: GOOD * 2, "cut off, or more than one array"),
    (lambda: GOOD[:12] + b"\xff\xff\xff\xff" + GOOD[16:], "header is said to have 4294967295 bytes"),
    (lambda: GOOD[:12] + (len(GOOD) - 23).to_bytes(4, "little") + GOOD[16:], "header is said to have"),
    (lambda: fuzz_files.bytes_of(b"{", b""), "Expecting"),
    (lambda: fuzz_files.bytes_of(b"\xff\xfe", b""), "codec can't decode"),
    (lambda: fuzz_files.bytes_of(b"[" * 50_000, b""), "nests too deep"),
    (lambda: fuzz_files.bytes_of([], b""), "header is not an object"),
    (lambda: fuzz_files.bytes_of({"planes": {}}, b""), "header is not an object"),
    (lambda: fuzz_files.bytes_of({"planes": []}, b""), "configuration"),
    (lambda: fuzz_files.bytes_of(b'{"config":1,"config":2}', b""), "stands twice"),
    (put("config", "version", value=99), "upgrade"),
    (put("config", "format", value={"name": "kbit9"}), "kbit9"),
    (put("config", "format", value={"name": "kbit5"}), "'packed'"),
    (put("config", "shape", value=[5, 257]), "plane"),
    (put("config", "shape", value=[2**40, 2**40]), "buffer"),
    (put("config", "shape", value=[1] * 70), "buffer"),
    (put("config", "dtype", value="int8"), "int8"),
    (put("planes", value=[]), "'packed' of kbit4 is missing"),
    (lambda: edited(twice, more=bytes(64)), "stands there twice"),
    (empty([0] * 70), "buffer"),
    (empty([0, 2**62]), "buffer"),
    (lambda: fuzz_files.bytes_of(b" " * (1 << 18) + b"{}", b""), "header is said to have"),
    (put("planes", 0, value=7), "not an object with name"),
    (put("planes", 0, "name", value="absmax"), "stands there twice|has it as"),
    (put("planes", 0, "name", value=["packed"]), "is not one of"),
    (put("planes", 0, "dtype", value="float64"), "has it as"),
    (put("planes", 0, "dtype", value="O"), "has it as"),
    (put("planes", 0, "shape", value=[2**62]), "does not end within"),
    (put("planes", 0, "shape", value=[2**63]), "non-negative lengths"),
    (put("planes", 0, "shape", value=[-1]), "non-negative lengths"),
    (put("planes", 0, "shape", value=[True]), "non-negative lengths"),
    (put("planes", 0, "shape", value=[1] * 65), "non-negative lengths"),
    (put("planes", 0, "shape", value=[0, 2**62]), "buffer"),
    (put("planes", 0, "shape", value=[0]), "buffer"),
    (put("planes", 1, "shape", value=[0]), "planes end at byte"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_by_name_before_memory_is_taken(content, message):
    content = content()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            kb.QuantizedArray.from_buffer(content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("buffer") and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        ([1, 2], TypeError, "buffer is list; it must be bytes"),
        ("text", TypeError, "buffer is str"),
        (None, TypeError, "buffer is NoneType"),
        (memoryview(GOOD)[::2], FormatError, "not contiguous: pass a copy"),
        (np.zeros((0, 3)), FormatError, "has 0 bytes"),
        (np.zeros((40, 3), BFLOAT16), FormatError, "not to be had"),
    ],
)
def test_what_holds_no_bytes(buffer, error, message):
    with pytest.raises(error, match=message):
        kb.QuantizedArray.from_buffer(buffer)


def test_bytes_of_a_gpu_are_asked_back_first(cupy):
    with pytest.raises(TypeError, match="CuPy array"):
        kb.QuantizedArray.from_buffer(cupy.zeros(100, np.uint8))


def test_a_header_that_would_not_be_read_is_not_written(monkeypatch):
    monkeypatch.setattr(serial, "_LONGEST_HEADER", 100)
    with pytest.raises(FormatError, match="takes 296 bytes of JSON; at most 100"):
        CASES["kbit4"].to_bytes()


@pytest.mark.parametrize("name", ["kbit4", "int8"])
def test_every_cut_is_refused(name):
    content = CASES[name].to_bytes()
    for length in range(len(content)):
        with pytest.raises(FormatError, match="^buffer"):
            kb.QuantizedArray.from_buffer(memoryview(content)[:length])


def test_fuzzed_bytes_are_read_or_refused():
    outcomes, slowest, failures = fuzz_files.run_bytes(2000, seed=int(np.random.default_rng().integers(10**9)))
    assert failures == []
    assert slowest < fuzz_files.SECONDS
    assert min(outcomes["read"], outcomes["refused"]) > 100
