"""Every public call on a GPU, first from eight threads that have not used CUDA, then from the main thread: same bits.

A program of its own, so that its first kernels are the first of the process: ``python tests/threads_program.py``, or
``python tests/threads_program.py 2 8`` for the third of eight parts, which may run beside each other.
"""

import functools
import importlib.util
import itertools
import sys
import threading

import cupy
import ml_dtypes
import numpy as np

import kbitcupy as kb

THREADS = 8
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def numbers(*shape, dtype="float16", seed=0):
    return cupy.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(dtype))


def planes(q):
    return tuple(q.planes.values())


def groups():
    """Functions that yield calls by name."""
    for name in kb.list_formats():
        yield functools.partial(storage, name)
    yield options
    for format in ("kbit4", "nf4", "kbit3", "int8", "kbit8"):
        for shape, tokens in (((4096, 1024), (1, 8, 24, 64, 200)), ((40, 96), (1, 8, 24))):
            for dtype in ("float16", BFLOAT16, "float32"):
                yield functools.partial(products, format, shape, tokens, dtype)
    for format in ("kbit4", "nf4", kb.get_format("int8", granularity="token")):
        yield functools.partial(experts, format)
    yield integers
    yield functions
    yield flat_functions


def storage(name):
    """Quantize, dequantize and what moves compressed rows, of a format."""
    x = numbers(64, 512, dtype="float32", seed=1)
    format = kb.get_format(name)
    if format.can_encode:
        q = kb.quantize(x, name)
        yield f"quantize {name}", lambda: planes(kb.quantize(x, name))
    else:  # GGUF's types that are decoded only
        bytes_of_row = x.shape[1] // format.block * kb.gguf.type_size(name)
        raw = np.random.default_rng(1).integers(0, 64, (len(x), bytes_of_row), np.uint8)
        q = kb.gguf.from_blocks(cupy.asarray(raw), name, x.shape)
    yield f"dequantize {name}", lambda: kb.dequantize(q)
    yield f"take {name}", lambda: kb.take(q, cupy.asarray([3, 1, 60]))
    yield f"index {name}", lambda: planes(q[cupy.asarray([3, 1, 60])])
    yield f"stack {name}", lambda: planes(kb.stack([q[:8], q[8:16]]))
    yield f"concatenate {name}", lambda: planes(kb.concatenate([q[:8], q[8:16]]))


def options():
    """Other granularities, scales of scales, other libraries."""
    x = numbers(64, 512, dtype="float32", seed=1)
    for options in ({"granularity": "token"}, {"granularity": ("channel", 1)}, {"granularity": ("group", 128)}):
        for symmetric in (True, False):
            name = f"{options} {symmetric}"
            q = kb.quantize(x, "int8", symmetric=symmetric, **options)
            yield f"quantize {name}", lambda q=q: planes(kb.quantize(x, q.format))
            yield f"dequantize {name}", lambda q=q: q.dequantize()
    nested = kb.quantize(x, "nf4", double_quant=True)
    yield "quantize nested", lambda: planes(kb.quantize(x, "nf4", double_quant=True))
    yield "dequantize nested", lambda: nested.dequantize()
    yield "take nested", lambda: kb.take(nested, cupy.asarray([7, 2]))
    yield "to and fro", lambda: planes(nested.get().to_device("cuda:0"))
    if importlib.util.find_spec("torch"):
        yield "to_torch", lambda: cupy.from_dlpack(kb.to_torch(nested))
    yield "fit_table", lambda: np.asarray(kb.fit_table(x, 4))


def products(format, shape, tokens, dtype):
    """Every kernel that multiplies: one, few, tile, decoded."""
    w = kb.quantize(numbers(*shape, dtype="float32", seed=2), format)
    for m in tokens:
        x, bias = numbers(m, shape[1], dtype=dtype, seed=m), numbers(shape[0], dtype=dtype)
        yield f"linear {format} {shape} {m} {dtype}", lambda x=x, bias=bias: kb.linear(x, w, bias)


def experts(format):
    """... and experts by both."""
    experts = kb.stack([kb.quantize(numbers(256, 512, dtype="float32", seed=i), format) for i in range(4)])
    for tokens in (2, 150):
        ids = cupy.asarray(np.random.default_rng(0).integers(0, 4, (tokens, 2)))
        x, mixed = numbers(tokens, 512), numbers(tokens, 2, dtype="float32")
        yield (
            f"linear_grouped {format} {tokens}",
            lambda x=x, ids=ids, mixed=mixed: kb.linear_grouped(x, experts, ids, mixed),
        )


def integers():
    """Products by their other names, and of integers."""
    w = kb.quantize(numbers(512, 256, dtype="float32"), "kbit4")
    x = numbers(3, 256)
    yield "matmul", lambda: kb.matmul(x, w.T)
    yield "operator", lambda: w @ x.T
    w = kb.quantize(numbers(512, 256, dtype="float32"), "int8", granularity=("channel", 0))
    for granularity in ("token", "tensor"):
        q = kb.quantize(numbers(20, 256), "int8", granularity=granularity)
        yield f"linear_w8a8 of int8 {granularity}", lambda q=q, w=w: kb.affine.linear_w8a8(q, w)
    wide = numbers(20, 256, dtype="float64")
    yield "linear_w8a8 of float64", lambda w=w: kb.affine.linear_w8a8(wide, w)
    for shape in ((1024, 2048), (40, 99)):
        w = kb.quantize(numbers(*shape, dtype="float32", seed=3), "int8", granularity=("channel", 0))
        smooth = cupy.abs(numbers(shape[1], dtype="float32")) + 0.5
        for m in (1, 16, 100, 300):
            x = numbers(m, shape[1], seed=m)
            yield f"linear_w8a8 {shape} {m}", lambda x=x, w=w: kb.affine.linear_w8a8(x, w)
            yield f"linear_smoothquant {shape} {m}", lambda x=x, w=w, s=smooth: kb.affine.linear_smoothquant(x, w, s)


def functions():
    """The functions of affine integers."""
    affine = kb.affine
    x, scale = numbers(24, 512, dtype="float32"), cupy.asarray(np.full(24, 0.02, np.float32))
    options = {"qmin": -8, "qmax": 7, "granularity": "token"}
    yield "fake_quantize", lambda: affine.fake_quantize(x, scale, **options)
    yield "fake_quantize_backward", lambda: affine.fake_quantize_backward(x, x, scale, **options)
    for granularity in ("tensor", "token", ("channel", 1), ("group", 64)):
        found = affine.choose_qparams(x, granularity=granularity)
        codes = affine.quantize(x, found[0], granularity=granularity)
        yield f"choose_qparams {granularity}", lambda g=granularity: affine.choose_qparams(x, granularity=g)
        yield f"quantize {granularity}", lambda g=granularity, f=found: affine.quantize(x, f[0], granularity=g)
        yield (
            f"dequantize {granularity}",
            lambda g=granularity, f=found, c=codes: affine.dequantize(c, f[0], granularity=g),
        )
        yield f"dynamic_range {granularity}", lambda g=granularity: affine.dynamic_range(x, granularity=g)
    backward = {**options, "mask": "strict"}
    yield "quantize_backward", lambda: affine.quantize_backward(x, x, scale, **backward)
    yield "dequantize_backward", lambda: affine.dequantize_backward(x, scale, granularity="token")
    yield "dynamic_range_backward", lambda: affine.dynamic_range_backward(x, x, scale, **backward)
    wide = x.astype(np.float64)
    yield "fake_quantize of float64", lambda: affine.fake_quantize(wide, 0.02, qmin=-8, qmax=7)
    yield "calibration", lambda: affine.Calibration().update(x).absmax
    smooth = affine.smooth_scales(affine.Calibration().update(x).absmax, x)
    yield "smooth_scales", lambda: affine.smooth_scales(affine.Calibration().update(x).absmax, x)
    yield "smooth_weight", lambda: affine.smooth_weight(x, smooth)


def flat_functions():
    """The flat ones."""
    x = numbers(24, 512, dtype="float32")
    packed = kb.quantize_kbit(x, k=4)
    yield "quantize_kbit", lambda: kb.quantize_kbit(x, k=4)
    yield "dequantize_kbit", lambda: kb.dequantize_kbit(*packed, k=4, n=x.size)
    nf4 = kb.quantize_nf4(x)
    yield "quantize_nf4", lambda: kb.quantize_nf4(x)
    yield "dequantize_nf4", lambda: kb.dequantize_nf4(*nf4, x.size)
    yield "encode_absmax_e4m4", lambda: kb.encode_absmax_e4m4(cupy.abs(x[0]))
    yield "decode_absmax_e4m4", lambda: kb.decode_absmax_e4m4(cupy.arange(256, dtype=np.uint8))
    codes = cupy.arange(64, dtype=np.uint8) % 16
    yield "pack_kbit", lambda: kb.pack_kbit(codes, 4)
    yield "unpack_kbit", lambda: kb.unpack_kbit(kb.pack_kbit(codes, 4), 4, 64)
    yield "metrics", lambda: np.asarray([kb.metrics.sqnr_db(x, x * 1.01), kb.metrics.mse(x, x + 1)])


def bits(result):
    """The bytes of what a call returns."""
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(cupy.asnumpy(part).tobytes() for part in parts if hasattr(part, "dtype"))


def in_threads(call):
    """What the call returns, or raises, in threads that have used nothing of CUDA and begin together."""
    found = [None] * THREADS
    together = threading.Barrier(THREADS)

    def run(i):
        together.wait()
        try:
            found[i] = call()
        except Exception as error:  # whatever it is, it is what the thread got
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main():
    wrong = count = 0
    part, parts = map(int, sys.argv[1:]) if sys.argv[1:] else (0, 1)
    for name, call in itertools.chain.from_iterable(group() for group in itertools.islice(groups(), part, None, parts)):
        found = in_threads(call)
        wanted = bits(call())
        count += 1
        for result in found:
            if isinstance(result, Exception) or bits(result) != wanted:
                wrong += 1
                said = f"{type(result).__name__}: {result}" if isinstance(result, Exception) else "other bits"
                print(f"{name}: {said[:200]}", flush=True)
                break
    print(f"{count} calls, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
