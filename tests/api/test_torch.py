"""torch tensors in and out: no copy, both libraries' streams in order; JAX and numba arrays where installed."""

import contextlib
import gc
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.backend import xp as _xp
from kbitcupy.errors import DeviceError, MissingExtraError

DTYPES = ["float16", "bfloat16", "float32"]
SHAPES = [(96, 64), (5, 33), (0, 4), ()]

# Long enough that what is queued behind it on a stream has not happened when another stream gets there.
CYCLES = 300_000_000


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def gpu(torch, cupy):
    """torch with CUDA, beside CuPy."""
    if not torch.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    return torch


def random(torch, shape, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))


def plain(tensor):
    """Its numbers in a float32 NumPy array, by a copy."""
    return np.array(tensor.detach().cpu().float().tolist(), np.float32).reshape(tensor.shape)


# ---- on the CPU ----------------------------------------------------------------------------------------------------


def test_torch_is_never_imported_by_itself():
    code = (
        "import sys, numpy as np, kbitcupy as kb; q = kb.quantize(np.ones(64), 'kbit4'); kb.dequantize(q);"
        "kb.explore.sweep(np.ones(64), 'kbit4'); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"], done.stderr


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch is not installed"):
        kb.to_torch(kb.quantize(np.ones(64), "kbit4"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu(torch, dtype, shape):
    tensor = random(torch, shape, dtype)
    array = _xp.as_array(tensor)
    assert array.shape == shape and array.dtype == _xp.float_dtype(dtype)
    assert array.size == 0 or array.ctypes.data == tensor.data_ptr(), "no copy"
    q = kb.quantize(tensor, "kbit4")
    assert (q.shape, q.dtype.name, q.device) == (shape, dtype, "cpu")
    wanted = kb.dequantize(kb.quantize(plain(tensor).astype(q.dtype), "kbit4"))
    restored = kb.to_torch(q)
    assert isinstance(restored, torch.Tensor) and str(restored.dtype) == f"torch.{dtype}"
    assert restored.shape == shape and np.array_equal(plain(restored), wanted.astype(np.float32))
    assert kb.to_torch(q, dtype=torch.float16).dtype == torch.float16
    assert kb.dequantize(q, dtype=torch.float32).dtype == np.float32


def test_views_are_taken_as_they_are(torch):
    tensor = random(torch, (64, 96), "float32")
    for view in (tensor.T, tensor[1:, ::3], tensor[3]):
        assert _xp.as_array(view).ctypes.data == view.data_ptr()
        wanted = kb.quantize(plain(view), "kbit4").planes
        got = kb.quantize(view, "kbit4").planes
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_numpy_results_go_to_torch_by_themselves(torch):
    y = kb.dequantize(kb.quantize(random(torch, (64, 64), "float32"), "kbit4"))
    assert torch.from_dlpack(y).data_ptr() == y.ctypes.data


def test_a_tensor_with_a_gradient_is_refused(torch):
    with pytest.raises(TypeError, match=r"refuses DLPack export .*x\.detach\(\)"):
        kb.quantize(random(torch, (64,), "float32").requires_grad_(), "kbit4")


def test_tensors_that_are_no_plain_arrays(torch):
    tensor = random(torch, (4, 64), "float32")
    for given, remedy in [
        (tensor.to(torch.float8_e4m3fn), r"x\.to\(torch\.float32\); it is torch\.float8_e4m3fn"),
        (tensor.to(torch.float8_e5m2), r"x\.to\(torch\.float32\); it is torch\.float8_e5m2"),
        (tensor.requires_grad_(), r"x\.detach\(\)"),
        (tensor.detach().to_sparse(), r"x\.to_dense\(\)"),
        (torch.complex(tensor.detach(), tensor.detach()).conj(), r"x\.resolve_conj\(\)\.resolve_neg\(\)"),
        (tensor.to("meta"), "pass a plain array of it, which has values"),
    ]:
        with pytest.raises(TypeError, match=f"refuses DLPack export .*{remedy}"):
            kb.quantize(given, "kbit4")


@pytest.mark.parametrize("argument", [[1.0], None])
def test_to_torch_takes_arrays(argument):
    with pytest.raises(TypeError, match="q is .*; it must be a QuantizedArray or a plain array"):
        kb.to_torch(argument)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int8", "uint8", "int64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_arrays_to_torch(torch, shape, dtype):
    array = (np.arange(np.prod(shape, dtype=int)) % 9).reshape(shape).astype(_xp.named_dtype(dtype))
    tensor = kb.to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.shape == shape
    assert array.size == 0 or tensor.data_ptr() == array.ctypes.data, "no copy"
    assert np.array_equal(plain(tensor), array.astype(np.float32))


def test_plain_arrays_that_torch_cannot_share(torch):
    x = np.arange(6, dtype=np.float32)
    read_only = x.view()
    read_only.flags.writeable = False
    for array in (read_only, x[::-1], x.astype(">f4")):
        assert np.array_equal(kb.to_torch(array).numpy(), array)
    kb.to_torch(read_only)[0] = 7
    assert x[0] == 0
    assert kb.to_torch(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    for name in ("longdouble", "int4"):
        with pytest.raises(TypeError, match="torch has no dtype"):
            kb.to_torch(x.astype(_xp.named_dtype(name)))


def test_a_bfloat16_array_of_a_file_goes_to_torch(torch, tmp_path):
    tensor = random(torch, (6, 8), "bfloat16")
    kb.io.save(tmp_path / "file.safetensors", {"w": _xp.as_array(tensor)})
    assert torch.equal(kb.to_torch(kb.io.load(tmp_path / "file.safetensors")["w"]), tensor)


def calls(torch, dtype, device="cpu"):
    """Every public function that takes an array first and returns arrays: name, what to call with it, the array."""
    x = random(torch, (6, 64), dtype, device)
    w = random(torch, (32, 64), "float32", device)
    q = kb.quantize(w, "kbit4")
    stack = kb.stack([q, q])
    int8 = kb.quantize(w, "int8", granularity=("channel", 0))
    ones = kb.dequantize(kb.quantize(w.abs() + 1, "kbit8"))[0]  # float32 [64], of the other library
    affine, levels = kb.affine, {"qmin": -8, "qmax": 7}
    packed, absmax, codebook = kb.quantize_kbit(x)
    nf4 = kb.quantize_nf4(x)
    codes = affine.quantize(x, 0.1)
    bnb = kb.io.bitsandbytes
    four = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
    eight = bnb.quantize_blockwise(x, nested=True)
    return {
        "linear": (lambda t: kb.linear(t, q), x),
        "matmul": (lambda t: kb.matmul(t, q.T), x),
        "@": (lambda t: t @ q.T, x),
        "q @": (lambda t: q @ t, w.T.contiguous().to(x.dtype)),
        "matmul, decoded": (lambda t: kb.matmul(t, q), x[:, :32].contiguous()),
        "linear_grouped": (lambda t: kb.linear_grouped(t, stack, [[0, 1]] * 6), x),
        "affine.quantize": (lambda t: affine.quantize(t, 0.1), x),
        "affine.dequantize": (lambda t: affine.dequantize(t, 0.1, dtype=dtype), codes),
        "affine.fake_quantize": (lambda t: affine.fake_quantize(t, 0.1, **levels), x),
        "affine.choose_qparams": (lambda t: affine.choose_qparams(t, granularity="token", symmetric=False), x),
        "affine.dynamic_range": (lambda t: affine.dynamic_range(t, granularity="token"), x),
        "affine.quantize_backward": (lambda t: affine.quantize_backward(t, x, 0.1), x),
        "affine.dynamic_range_backward": (lambda t: affine.dynamic_range_backward(t, x, 0.1), x),
        "affine.fake_quantize_backward": (lambda t: affine.fake_quantize_backward(t, x, 0.1, **levels), x),
        "affine.dequantize_backward": (lambda t: affine.dequantize_backward(t, 0.1), x),
        "affine.linear_w8a8": (lambda t: affine.linear_w8a8(t, int8), x),
        "affine.linear_smoothquant": (lambda t: affine.linear_smoothquant(t, int8, ones), x),
        "affine.smooth_scales": (lambda t: affine.smooth_scales(t, w), x[0].abs()),
        "affine.smooth_weight": (lambda t: affine.smooth_weight(t, ones), x),
        "quantize_kbit": (kb.quantize_kbit, x),
        "quantize_kbit, codebook": (lambda t: kb.quantize_kbit(t, 4, codebook), x),
        "dequantize_kbit": (lambda t: kb.dequantize_kbit(t, absmax, codebook, 4, 384, dtype), packed),
        "pack_kbit": (lambda t: kb.pack_kbit(t, 4), kb.unpack_kbit(packed, 4, 384)),
        "unpack_kbit": (lambda t: kb.unpack_kbit(t, 4, 384), packed),
        "encode_absmax_e4m4": (kb.encode_absmax_e4m4, x),
        "decode_absmax_e4m4": (kb.decode_absmax_e4m4, absmax),
        "quantize_nf4": (kb.quantize_nf4, x),
        "dequantize_nf4": (lambda t: kb.dequantize_nf4(t, nf4[1], 384, dtype=dtype), nf4[0]),
        "bitsandbytes.quantize_4bit": (lambda t: bnb.quantize_4bit(t)[0], x),
        "bitsandbytes.dequantize_4bit": (lambda t: bnb.dequantize_4bit(t, four[1]), four[0]),
        "bitsandbytes.quantize_blockwise": (lambda t: bnb.quantize_blockwise(t)[0], x),
        "bitsandbytes.dequantize_blockwise": (lambda t: bnb.dequantize_blockwise(t, eight[1]), eight[0]),
    }


CALLS = [
    "linear", "matmul", "@", "q @", "matmul, decoded", "linear_grouped",
    *(f"affine.{name}" for name in kb.affine.__all__ if name not in ("Calibration", "from_hqq", "from_mlx")),
    "quantize_kbit", "quantize_kbit, codebook", "dequantize_kbit", "pack_kbit", "unpack_kbit", "encode_absmax_e4m4",
    "decode_absmax_e4m4", "quantize_nf4", "dequantize_nf4",
    *(f"bitsandbytes.{verb}_{how}" for verb in ("quantize", "dequantize") for how in ("4bit", "blockwise")),
]  # fmt: skip


def parts_of(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_give_tensors(torch, name, dtype):
    """... with the bytes that an array gives."""
    call, tensor = calls(torch, dtype)[name]
    results, arrays = parts_of(call(tensor)), parts_of(call(_xp.as_array(tensor)))
    assert len(results) == len(arrays)
    for result, array in zip(results, arrays, strict=True):
        assert isinstance(result, torch.Tensor) and isinstance(array, np.ndarray)
        assert result.shape == array.shape and str(result.dtype) == f"torch.{array.dtype}"
        assert np.array_equal(plain(result), array.astype(np.float32))
    with pytest.raises(TypeError, match=r"refuses DLPack export .*x\.detach\(\)"):
        call(random(torch, (6, 64), "float32").requires_grad_())


def test_every_call_is_among_them(torch):
    assert set(CALLS) == set(calls(torch, "float32"))


def test_out_of_either_library(torch):
    """What is given is what comes back."""
    x, q = random(torch, (6, 64), "bfloat16"), kb.quantize(random(torch, (32, 64), "float32"), "kbit4")
    wanted = kb.linear(x, q)
    tensor, array = torch.empty(6, 32, dtype=torch.bfloat16), np.empty((6, 32), _xp.float_dtype("bfloat16"))
    assert kb.linear(x, q, out=tensor) is tensor and torch.equal(tensor, wanted)
    assert kb.linear(x, q, out=array) is array and np.array_equal(array, _xp.as_array(wanted))
    codes = torch.empty(6, 64, dtype=torch.int8)
    found, scale, _ = kb.affine.dynamic_range(x, granularity="token", out=codes)
    assert found is codes and isinstance(scale, torch.Tensor)
    assert torch.equal(codes, kb.affine.dynamic_range(x, granularity="token")[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_codebooks_that_are_tensors(torch, dtype):
    values = torch.linspace(-1, 1, 16).to(getattr(torch, dtype))
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    wanted = np.array(values.float().tolist(), np.float32)
    for call in (
        lambda codebook: kb.quantize(x, "kbit4", codebook=codebook).planes["packed"],
        lambda codebook: kb.quantize_kbit(x, 4, codebook)[0],
        lambda codebook: kb.dequantize_kbit(*kb.quantize_kbit(x)[:2], codebook, 4, 64),
    ):
        assert np.array_equal(call(values), call(wanted))


def test_rows_by_a_tensor_of_indices(torch):
    q = kb.quantize(random(torch, (96, 64), "float32"), "kbit4")
    assert np.array_equal(kb.take(q, torch.tensor([5, 5, 90])), kb.dequantize(q)[[5, 5, 90]])


@pytest.mark.gpu
def test_torch_without_cuda(torch, cupy):
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA here")
    with pytest.raises(DeviceError, match=r"q is on cuda:0.*\.get\(\)"):
        kb.to_torch(kb.quantize(cupy.ones(64), "kbit4"))


# ---- what is asked of CUDA, with no GPU ------------------------------------------------------------------------------


class FakeCuPy(types.ModuleType):
    """As much of CuPy as the order of streams needs; writes down what waits for what."""

    class ndarray:
        def __init__(self):
            self.data = types.SimpleNamespace(device_id=0)

    def __init__(self, current):
        super().__init__("cupy")
        self.waits, self.described = [], []
        recorded = {}
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            get_current_stream=lambda device: types.SimpleNamespace(ptr=current),
            Device=lambda device: contextlib.nullcontext(),
            Event=lambda disable_timing: types.SimpleNamespace(ptr=len(recorded)),
            runtime=types.SimpleNamespace(
                getDevice=lambda: 0,
                eventRecord=recorded.__setitem__,
                streamWaitEvent=lambda stream, event: self.waits.append((stream, recorded[event])),
            ),
        )

    def asarray(self, described):
        self.described.append(described.__cuda_array_interface__)
        return self.ndarray()


@pytest.mark.parametrize(
    ("ours", "theirs", "before", "after"),
    [(5, 7, [(5, 7)], [(5, 7), (7, 5)]), (5, 5, [], []), (5, None, [], [])],
    ids=["two streams", "one stream", "no stream"],
)
def test_streams_wait_for_each_other(monkeypatch, ours, theirs, before, after):
    """(who waits, for whom): ours for theirs before we read, theirs for ours when the array is gone."""
    fake = FakeCuPy(ours)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    interface = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, "stream": theirs}
    array = _xp.as_array(types.SimpleNamespace(__cuda_array_interface__=interface))
    assert fake.waits == before
    assert fake.described == [{**interface, "stream": None}], "CuPy would synchronise with the stream"
    del array
    gc.collect()
    assert fake.waits == after


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(gpu, cupy, dtype, shape):
    tensor = random(gpu, shape, dtype, "cuda")
    array = _xp.as_array(tensor)
    assert array.size == 0 or array.data.ptr == tensor.data_ptr(), "no copy"
    q = kb.quantize(tensor, "kbit4")
    assert (q.shape, q.dtype.name, q.device) == (shape, dtype, "cuda:0")
    wanted = kb.dequantize(kb.quantize(plain(tensor).astype(q.dtype), "kbit4"))
    restored = kb.to_torch(q)
    assert str(restored.dtype) == f"torch.{dtype}" and restored.shape == shape and restored.is_cuda
    assert np.array_equal(plain(restored), wanted.astype(np.float32))
    y = kb.dequantize(q)
    assert gpu.from_dlpack(y).data_ptr() == y.data.ptr or array.size == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_give_tensors_on_a_gpu(gpu, cupy, name, dtype):
    call, tensor = calls(gpu, dtype, "cuda")[name]
    results, arrays = parts_of(call(tensor)), parts_of(call(_xp.as_array(tensor)))
    for result, array in zip(results, arrays, strict=True):
        assert isinstance(result, gpu.Tensor) and result.is_cuda and isinstance(array, cupy.ndarray)
        assert result.shape == array.shape and str(result.dtype) == f"torch.{array.dtype}"
        assert np.array_equal(plain(result), array.get().astype(np.float32))


@pytest.mark.parametrize("ours", ["default", "non-blocking"])
def test_torch_waits_for_a_result(gpu, cupy, ours):
    """A tensor that a product returned is whole for torch's own stream, and its memory is not used again too early."""
    q = kb.quantize(random(gpu, (1024, 1024), "float32", "cuda"), "kbit4")
    x = random(gpu, (64, 1024), "float16", "cuda")
    wanted = plain(kb.linear(x, q))
    stream, side = (
        cupy.cuda.Stream.null if ours == "default" else cupy.cuda.Stream(non_blocking=True),
        gpu.cuda.Stream(),
    )
    gpu.cuda.synchronize()
    for _ in range(3):
        busy(gpu, stream)
        with gpu.cuda.stream(side), stream:
            y = kb.linear(x, q)
            seen = y.clone()
            gpu.cuda._sleep(CYCLES)
            again = y.clone()  # queued behind the delay
            del y
            cupy.zeros((64, 1024), "f2"), cupy.zeros((64, 1024), "f2")
        gpu.cuda.synchronize()
        assert np.array_equal(plain(seen), wanted) and np.array_equal(plain(again), wanted)


class Unordered:
    """A tensor whose export asks nobody to wait: what a stream reads too early."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.dtype = tensor.dtype

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**{**options, "stream": -1})


class ByInterface:
    """Memory of CuPy, known only by the CUDA array interface, which names a stream (as numba's arrays do)."""

    def __init__(self, array, stream):
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


def late_values(gpu, size=1 << 16):
    """(tensor, its final values, the stream that writes them): zeros for a while yet."""
    values = random(gpu, size, "float32", "cuda")
    tensor = gpu.zeros_like(values)
    gpu.cuda.synchronize()
    side = gpu.cuda.Stream()
    with gpu.cuda.stream(side):
        gpu.cuda._sleep(CYCLES)
        tensor.copy_(values)
    return tensor, plain(values), side


def shown(scene, ordered):
    """Have `scene` happen, which returns whether what was queued was still to come, and whether the bytes are right.

    They always are where streams are `ordered`, and else wrong if it was still to come. If it was not, the scene showed
    nothing and happens again: the driver keeps a process waiting while another one allocates many gigabytes. A host
    that always waits is a fault.
    """
    for _ in range(6):
        early, right = scene()
        assert right or not ordered
        if early:
            assert right == ordered
            return
        time.sleep(0.5)
    pytest.fail("the host waited, or the delay is too short to show anything")


def same_planes(q, x):
    wanted = kb.quantize(x, "kbit4").planes
    return all(np.array_equal(q.get().planes[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "without the wait"])
@pytest.mark.parametrize("ours", ["default", "non-blocking"])
def test_quantize_waits_for_torch(gpu, cupy, ours, ordered):
    kb.quantize(cupy.ones(1 << 16, np.float32), "kbit4")  # compiled by now
    stream = cupy.cuda.Stream.null if ours == "default" else cupy.cuda.Stream(non_blocking=True)

    def scene():
        tensor, values, side = late_values(gpu)
        with gpu.cuda.stream(side), stream:
            q = kb.quantize(tensor if ordered else Unordered(tensor), "kbit4")
            early = not side.query()
            stream.synchronize()
        right = same_planes(q, values)
        gpu.cuda.synchronize()
        return early, right

    shown(scene, ordered)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "without the wait"])
def test_quantize_waits_for_the_stream_of_the_interface(gpu, cupy, ordered):
    kb.quantize(cupy.ones(1 << 16, np.float32), "kbit4")

    def scene():
        tensor, values, side = late_values(gpu)
        with gpu.cuda.stream(gpu.cuda.default_stream()):
            memory = cupy.from_dlpack(Unordered(tensor))
        with cupy.cuda.Stream(non_blocking=True) as stream:
            q = kb.quantize(ByInterface(memory, side.cuda_stream if ordered else None), "kbit4")
            early = not side.query()
            stream.synchronize()
        right = same_planes(q, values)
        gpu.cuda.synchronize()
        return early, right

    shown(scene, ordered)


@pytest.fixture(params=[True, False], ids=["ordered", "without the wait"])
def ordered(request, monkeypatch):
    """Whether torch's stream is told to wait for ours."""
    if not request.param:
        monkeypatch.setattr(_xp, "_give_back", lambda device, theirs: None)
    return request.param


def busy(gpu, stream):
    """Keep a stream of CuPy's busy for a while."""
    with gpu.cuda.stream(gpu.cuda.ExternalStream(stream.ptr)):
        gpu.cuda._sleep(CYCLES)


def test_torch_waits_for_to_torch(gpu, cupy, ordered):
    q = kb.quantize(random(gpu, 1 << 16, "float32", "cuda"), "kbit4")
    wanted = plain(kb.to_torch(q))
    ours, side = cupy.cuda.Stream(non_blocking=True), gpu.cuda.Stream()
    seen = gpu.empty(1 << 16, device="cuda")

    def scene():
        # torch's allocator hands out this memory again, which is zero until the decoder has written it.
        with gpu.cuda.stream(side):
            zeros = gpu.zeros(1 << 16, device="cuda")
            pointer = zeros.data_ptr()
            del zeros
        gpu.cuda.synchronize()
        busy(gpu, ours)
        with gpu.cuda.stream(side), ours:
            tensor = kb.to_torch(q)
            assert tensor.data_ptr() == pointer
            seen.copy_(tensor)
            early = not ours.done
            side.synchronize()
        gpu.cuda.synchronize()
        assert np.array_equal(plain(tensor), wanted)
        return early, np.array_equal(plain(seen), wanted)

    shown(scene, ordered)


@pytest.mark.parametrize("deleted", [False, True], ids=["overwritten", "deleted"])
@pytest.mark.parametrize("protocol", ["DLPack", "interface"])
def test_torch_waits_until_a_tensor_has_been_read(gpu, cupy, ordered, protocol, deleted):
    """What torch writes to the memory later, on its own stream, is not what is quantized."""
    kb.quantize(cupy.ones(1 << 16, np.float32), "kbit4")
    values = random(gpu, 1 << 16, "float32")
    side, ours = gpu.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)

    def scene():
        with gpu.cuda.stream(side):
            tensor = values.cuda()
        gpu.cuda.synchronize()
        busy(gpu, ours)
        with gpu.cuda.stream(side), ours:
            x = tensor if protocol == "DLPack" else ByInterface(cupy.from_dlpack(tensor), side.cuda_stream)
            q = kb.quantize(x, "kbit4")
            if deleted:
                pointer = tensor.data_ptr()
                del tensor, x
                assert gpu.zeros(1 << 16, device="cuda").data_ptr() == pointer, "torch uses the memory again"
            else:
                tensor.zero_()
            early = not ours.done
            ours.synchronize()
        gpu.cuda.synchronize()
        return early, same_planes(q, plain(values))

    shown(scene, ordered)


# ---- other libraries -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # what JAX says while it looks for a device is about the machine
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(dtype):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = np.random.default_rng(2).standard_normal((64, 96)).astype(np.float32)
    array = jax.numpy.asarray(x, dtype)
    q = kb.quantize(array, "kbit4")
    assert q.shape == x.shape and q.dtype == _xp.float_dtype(dtype)
    assert same_planes(q, np.asarray(array))
    if array.devices().pop().platform == "cpu":
        assert _xp.as_array(array).ctypes.data == array.unsafe_buffer_pointer()


def test_numba(cupy):
    cuda = pytest.importorskip("numba.cuda", reason="numba is not installed")
    x = np.random.default_rng(2).standard_normal((64, 96)).astype(np.float32)
    stream = cuda.stream()
    array = cuda.to_device(x, stream=stream)
    assert _xp.as_array(array).data.ptr == array.device_ctypes_pointer.value
    assert same_planes(kb.quantize(array, "kbit4"), x)
