"""Dask arrays of compressed chunks."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.errors import FormatError

da = pytest.importorskip("dask.array", reason="needs dask: the extra `dask`")
sizeof = pytest.importorskip("dask.sizeof").sizeof

ROWS, COLUMNS, CHUNK = 96, 64, 40


@pytest.fixture
def x():
    numbers = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    return numbers, da.from_array(numbers, chunks=(CHUNK, COLUMNS))


def computed(array):
    return array.compute(scheduler="sync")


@pytest.mark.parametrize("format", ["nf4", "int8:block=32", "q8_0", "kbit4", "ternary:block=32"])
def test_every_chunk_is_what_quantize_makes(x, format):
    numbers, lazy = x
    q = kb.dask.quantize(lazy, format)
    assert q.chunks == lazy.chunks and q.dtype == lazy.dtype and isinstance(q._meta, kb.QuantizedArray)
    for i, start in enumerate(range(0, ROWS, CHUNK)):
        whole, block = kb.quantize(numbers[start : start + CHUNK], format), computed(q.blocks[i])
        assert block.format == whole.format and block.shape == whole.shape
        assert all((block.planes[name] == plane).all() for name, plane in whole.planes.items())
    back = kb.dask.dequantize(q)
    assert back.chunks == lazy.chunks and isinstance(back._meta, np.ndarray)
    expected = [kb.quantize(numbers[i : i + CHUNK], format).dequantize() for i in range(0, ROWS, CHUNK)]
    assert (computed(back) == np.concatenate(expected)).all()
    assert computed(kb.dask.dequantize(q, dtype="float16")).dtype == np.float16
    assert computed(back.mean(axis=0)).shape == (COLUMNS,)


def test_rows_are_taken_and_chunks_put_together(x):
    numbers, lazy = x
    q, whole = kb.dask.quantize(lazy, "nf4"), kb.quantize(numbers, "nf4")
    for rows in (slice(None), slice(10, 90), slice(41, 43), [3, 41, 80, 2]):
        found = computed(q[rows])
        assert isinstance(found, kb.QuantizedArray) and (found.dequantize() == whole.dequantize()[rows]).all()
        assert (computed(q[rows, :]).dequantize() == found.dequantize()).all()
    beside = kb.dask.quantize(lazy.rechunk((CHUNK, 32)), "nf4")
    assert computed(kb.dask.dequantize(beside)).shape == numbers.shape
    with pytest.raises(FormatError, match=r"beside each other along axis 1.*rechunk"):
        computed(beside)


@pytest.mark.parametrize("formats", ["nf4", ("nf4", {"block": 32}), ["kbit3", "nf4:double_quant=true"]], ids=str)
def test_compare_adds_up_what_chunks_lose(x, formats):
    numbers, lazy = x
    formats = "nf4:block=32" if isinstance(formats, tuple) else formats
    rows = kb.dask.compare(lazy.rechunk((5, COLUMNS)), formats).compute(scheduler="sync")
    for row, each in zip(rows, [formats] if isinstance(formats, str) else formats, strict=True):
        restored = np.concatenate([kb.quantize(numbers[i : i + 5], each).dequantize() for i in range(0, ROWS, 5)])
        assert row["format"] == each and row["elements"] == numbers.size and row["nbytes_before"] == numbers.nbytes
        assert row["sqnr_db"] == pytest.approx(kb.metrics.sqnr_db(numbers, restored))
        assert row["max_error"] == kb.metrics.max_abs(numbers, restored)
        assert row["bits_per_element"] == row["nbytes_after"] * 8 / numbers.size


def test_wrong_arguments_are_refused_before_anything_is_computed(x):
    numbers, lazy = x
    for call in (lambda: kb.dask.quantize(numbers, "kbit4"), lambda: kb.dask.compare(numbers, "kbit4")):
        with pytest.raises(TypeError, match=r"x is ndarray; it must be a dask.array.Array"):
            call()
    with pytest.raises(TypeError, match="q is QuantizedArray; it must be"):
        kb.dask.dequantize(kb.quantize(numbers, "kbit4"))
    with pytest.raises(TypeError, match="dtype is int32"):
        kb.dask.quantize(lazy.astype(np.int32), "kbit4")
    with pytest.raises(FormatError, match="kbit9"):
        kb.dask.quantize(lazy, "kbit9")
    with pytest.raises(FormatError, match="only decoded"):
        kb.dask.quantize(lazy, "iq1_s")
    with pytest.raises(FormatError, match="empty"):
        kb.dask.compare(lazy, [])
    with pytest.raises(TypeError, match="takes one index"):
        computed(kb.dask.quantize(lazy, "nf4")[:, [2, 1]])


def test_without_dask_the_remedy_is_named():
    program = (
        "import sys; sys.modules['dask'] = None\n"
        "import kbitcupy as kb, numpy as np\n"
        "try: kb.dask.quantize(np.ones(3), 'kbit4')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'kbitcupy[dask]'" in done.stdout


def test_one_name_for_one_work(x):
    _, lazy = x
    names = [kb.dask.quantize(lazy, *how).name for how in (("nf4",), ("nf4",), ("nf4:block=32",), ("kbit4",))]
    assert names[0] == names[1] and len(set(names)) == 3
    codebooks = [kb.dask.quantize(lazy, "kbit1", codebook=np.float32([-1, end])).name for end in (1, 1, 2)]
    assert codebooks[0] == codebooks[1] != codebooks[2]


def test_a_compressed_array_weighs_its_planes(x):
    kb.dask.quantize(x[1], "kbit4")  # a checkout that is not installed has no entry point: importing the module tells
    q = kb.quantize(x[0], "kbit4")
    assert sizeof(q) == q.nbytes


def test_planes_travel_beside_the_pickle(x):
    """Protocol 5: what a scheduler sends between workers is not copied into a pickle."""
    q, buffers = kb.quantize(x[0], "nf4:double_quant=true"), []
    data = pickle.dumps(q, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1500 and sum(memoryview(each).nbytes for each in buffers) == q.nbytes
    again = pickle.loads(data, buffers=buffers)
    assert (again.dequantize() == q.dequantize()).all()
    assert all(np.shares_memory(again.planes[name], plane) for name, plane in q.planes.items() if plane.size)


@pytest.mark.parametrize("first", ["dask_cuda.is_device_object", "dask.sizeof", "kbitcupy"])
def test_spilling_is_told_to_dask_cuda_where_that_is_loaded(tmp_path, first):
    """`dask_cuda.is_device_object` as far as it is asked: by a worker, which has weighed the array before.

    A worker has imported it before its first task, but before that the program that started the cluster.
    """
    (tmp_path / "dask_cuda").mkdir()
    (tmp_path / "dask_cuda" / "__init__.py").write_text("")
    (tmp_path / "dask_cuda" / "is_device_object.py").write_text(
        "from dask.utils import Dispatch\nis_device_object = Dispatch()\nis_device_object.register(object, bool)\n"
    )
    program = (
        f"import {first}, numpy as np, kbitcupy as kb\n"
        "import dask.sizeof, dask_cuda.is_device_object as m, kbitcupy.dask\n"
        "q = kb.quantize(np.ones((2, 64), np.float32), 'nf4')\n"
        "assert dask.sizeof.sizeof(q) == q.nbytes\n"
        "print(m.is_device_object(q), m.is_device_object(5))"
    )
    path = [str(tmp_path), *filter(None, sys.path)]
    code = f"import sys; sys.path[:0] = {path!r}\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.gpu
def test_chunks_on_a_gpu_stay_there(x, cupy):
    _, lazy = x
    q = kb.dask.quantize(lazy.map_blocks(cupy.asarray), "kbit4")
    block, back = computed(q.blocks[0]), computed(kb.dask.dequantize(q))
    assert block.device == "cuda:0" and isinstance(back, cupy.ndarray)
    assert (back.get() == computed(kb.dask.dequantize(kb.dask.quantize(lazy, "kbit4")))).all()
