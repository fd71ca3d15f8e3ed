"""`kbitcupy.DecodedCache`: the same bits from weights that are kept decoded, and what is kept for how long."""

import gc
import threading

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.products import ternary

FORMATS = ["kbit4", "nf4:double_quant=true", "int4:block=32", "q4_0", "ternary", "ternary:block=64"]


def weight(rows, depth, format, seed=0):
    w = np.random.default_rng(seed).standard_normal((rows, depth)).astype(np.float32)
    return kb.quantize(w, format)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("format", FORMATS)
def test_products_have_the_same_bits(format, dtype):
    q = weight(300, 4096, format)  # more rows than are decoded at a time
    rng = np.random.default_rng(1)
    x, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, 4096), (300,)))
    wanted = kb.linear(x, q, bias)
    cache = kb.DecodedCache(1 << 24)
    for _ in range(2):
        with cache:
            assert kb.linear(x, q, bias).tobytes() == wanted.tobytes()
        assert len(cache) == 1 and cache.nbytes == q.size * (8 if dtype == "float64" else 4)


@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 128)])
@pytest.mark.parametrize("shape", [(1, 1), (47, 256), (49, 384), (100, 130), (300, 2048)])
@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_bitlinear_has_the_same_bits(tokens, shape, granularity, monkeypatch):
    q = weight(*shape, "ternary:rule=fit").dequantize()
    q = kb.quantize(q, "ternary", granularity=granularity)
    rng = np.random.default_rng(tokens)
    x, bias = (rng.standard_normal(s).astype(np.float32) for s in ((tokens, shape[1]), shape[:1]))
    calls = [
        lambda: kb.bitnet.linear(x, q, bias),
        lambda: kb.bitnet.linear(x, q, granularity="tensor", norm=True),
        lambda: kb.linear(x, q, activations="int8"),
    ]
    wanted = [call() for call in calls]
    monkeypatch.setattr(ternary, "_RESULTS", 2 * shape[0])
    with kb.DecodedCache(1 << 24) as cache:
        assert [call().tobytes() for call in calls] == [y.tobytes() for y in wanted]
    assert len(cache) == (granularity != ("group", 128) or shape[1] <= 128)


@pytest.mark.parametrize("depth", [255, 256, 257, 1024, 131071])
@pytest.mark.parametrize("code", [0, 2, 3])
def test_the_largest_sums_of_three_rows(depth, code):
    """All of one sign, also by a code that comes back as 2: no lane reaches into the next one."""
    q = kb.bitnet.from_trits(np.ones((4, depth), np.int8))
    q.planes["codes"][:] = 85 * code
    x = np.ones((2, depth), np.float32)
    x[1] = -1
    codes, scales = kb.bitnet.quantize_activations(x)
    with kb.DecodedCache(1 << 26):
        y = kb.bitnet.linear(x, q)
    assert (y == ((code - 1) * depth * codes[:, :1].astype(np.int64)).astype(np.float32) * scales[:, None]).all()


def test_the_weight_that_was_used_longest_ago_goes_first():
    q = [weight(16, 64, "kbit4", seed) for seed in range(3)]
    x = np.ones((1, 64), np.float32)
    with kb.DecodedCache(2 * 16 * 64 * 4) as cache:
        for which in (0, 1, 0, 2):
            kb.linear(x, q[which])
        assert len(cache) == 2 and cache.nbytes == cache.max_bytes
        made = []
        for which in (0, 2, 1):
            before = dict(cache._entries)
            kb.linear(x, q[which])
            made.append(cache._entries.keys() != before.keys())
        assert made == [False, False, True]
        cache.clear()
        assert (len(cache), cache.nbytes) == (0, 0)
        kb.linear(x, weight(64, 64, "kbit4"))  # larger than all
        assert len(cache) == 0


def test_what_is_kept_goes_with_the_weight():
    cache, x = kb.DecodedCache(1 << 20), np.ones((1, 64), np.float32)
    q = weight(16, 64, "kbit4")
    with cache:
        kb.linear(x, q)
        kb.linear(x, q[:8])
    gc.collect()
    assert len(cache) == 1
    again = kb.QuantizedArray(q.format, q.planes, q.shape, q.dtype)
    with cache:
        kb.linear(x, again)
    assert len(cache) == 1
    del q, again
    gc.collect()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_it_is_asked_for_by_each_thread_and_inside_another():
    q, x = weight(16, 64, "kbit4"), np.ones((1, 64), np.float32)
    outer, inner = kb.DecodedCache(1 << 20), kb.DecodedCache(1 << 20)
    with outer:
        with inner, inner:
            kb.linear(x, q)
        thread = threading.Thread(target=kb.linear, args=(x, q))
        thread.start()
        thread.join()
        assert (len(outer), len(inner)) == (0, 1)
        kb.linear(x, q)
    kb.linear(x, weight(8, 64, "kbit4"))
    assert (len(outer), len(inner)) == (1, 1)
    assert repr(outer) == "DecodedCache(4096 of 1048576 bytes, 1 weight)"


def test_many_threads_share_one():
    q = [weight(16, 64, "kbit4", seed) for seed in range(4)]
    x = np.ones((1, 64), np.float32)
    wanted = [kb.linear(x, one).tobytes() for one in q]
    cache, wrong = kb.DecodedCache(2 * 16 * 64 * 4), []

    def work():
        with cache:
            wrong.extend(i for i in range(200) if kb.linear(x, q[i % 4]).tobytes() != wanted[i % 4])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.nbytes <= cache.max_bytes


@pytest.mark.parametrize(
    ("bytes", "error", "message"),
    [
        (1.5, TypeError, r"max_bytes is 1\.5; it must be an integer"),
        (True, TypeError, "max_bytes is True"),
        ("1", TypeError, "max_bytes is '1'"),
        (-1, ValueError, "max_bytes is -1; it must be 0 or more"),
    ],
)
def test_bad_sizes_are_refused(bytes, error, message):
    with pytest.raises(error, match=message):
        kb.DecodedCache(bytes)
