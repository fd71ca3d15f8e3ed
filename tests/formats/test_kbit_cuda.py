"""CUDA against NumPy, bit for bit. Class `TestSmall` is what compute-sanitizer runs."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from inputs import (
    ABSMAX,
    BFLOAT16,
    CODEBOOKS,
    DTYPES,
    KINDS,
    SIZES,
    assert_repeats,
    codebook,
    make,
    repeated,
    same_values,
)

import kbitcupy as kb
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.tables import Codebook, standard_codebook

pytestmark = pytest.mark.gpu
FLAT = {"e4m4": "e4m4", "float16": "fp16", "float32": "fp32"}


def assert_equal_planes(on_device, on_host):
    assert list(on_device.planes) == list(on_host.planes)
    for name, plane in on_host.planes.items():
        found = on_device.planes[name].get()
        assert found.dtype == plane.dtype and found.tobytes() == plane.tobytes(), name


def check_format(cupy, x, name, **options):
    """Planes and every output dtype, between the two libraries."""
    device_options = dict(options)
    host = kb.quantize(x, name, **options)
    device = kb.quantize(cupy.asarray(x), name, **device_options)
    assert_equal_planes(device, host)
    for dtype in DTYPES:
        y = kb.dequantize(device, dtype=dtype)
        assert y.dtype == dtype and same_values(y.get(), kb.dequantize(host, dtype=dtype))


def check_flat(cupy, x, k, values, absmax):
    """`values` None is the default codebook; host values stay on the host for the search, and may for decoding."""
    host = kb.quantize_kbit(x, k, values, absmax)
    device = kb.quantize_kbit(cupy.asarray(x), k, values, absmax)
    for a, b in zip(device, host, strict=True):
        assert a.dtype == b.dtype and a.get().tobytes() == b.tobytes()
    for dtype in DTYPES:
        wanted = kb.dequantize_kbit(*host, k, x.size, dtype)
        assert same_values(kb.dequantize_kbit(*device, k, x.size, dtype).get(), wanted)
        assert same_values(kb.dequantize_kbit(*device[:2], host[2], k, x.size, dtype).get(), wanted)


class TestSmall:
    """Every instantiation once, at sizes around a block and a tile."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("k", range(1, 9))
    def test_every_kernel(self, cupy, k, dtype):
        for absmax in ABSMAX:
            for book in ("nf", "unsorted"):
                for size in (1, 33, 1500):
                    x = make("special", size, dtype)
                    choice = codebook(book, k)
                    check_format(cupy, x, f"kbit{k}", codebook=choice, absmax=absmax)
                    check_flat(cupy, x, k, None if book == "nf" else choice, FLAT[absmax])

    def test_codes(self, cupy):
        codes = np.arange(256, dtype=np.uint8)
        for bias in (-96, 0, 11, 120):
            decoded = kb.decode_absmax_e4m4(cupy.asarray(codes), bias)
            assert decoded.get().tobytes() == kb.decode_absmax_e4m4(codes, bias).tobytes()
        for k in range(1, 9):
            index = codes & ((1 << k) - 1)
            for size in (0, 1, 31, 33, 256):
                packed = kb.pack_kbit(cupy.asarray(index[:size]), k)
                assert packed.get().tobytes() == kb.pack_kbit(index[:size], k).tobytes()
                assert kb.unpack_kbit(packed, k, size).get().tobytes() == index[:size].tobytes()

    @pytest.mark.parametrize("offset", range(1, 16))
    def test_unaligned_arrays(self, cupy, offset):
        """Input, planes and output may start at any element."""
        for dtype in DTYPES:
            x = make("normal", 3000, dtype)
            host = kb.quantize(x, "kbit3")

            def shifted(array):
                room = cupy.zeros(array.size + offset + 64, array.dtype)
                view = room[offset : offset + array.size]
                view[...] = cupy.asarray(array)
                return view

            planes = {name: shifted(np.zeros_like(plane)) for name, plane in host.planes.items()}
            out = kb.QuantizedArray(host.format, planes, host.shape, dtype)
            kb.quantize(shifted(x), "kbit3", out=out)
            assert_equal_planes(out, host)
            for name, plane in planes.items():  # nothing before or behind a plane was touched
                room = plane.base
                assert not room[:offset].any() and not room[offset + plane.size :].any(), name
            y = shifted(np.zeros(x.size, dtype))
            kb.dequantize(out, out=y)
            assert same_values(y.get(), host.dequantize()) and not y.base[offset + y.size :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", range(1, 9))
def test_kinds_and_sizes(cupy, k, kind, dtype):
    for size in SIZES:
        x = make(kind, size, dtype)
        for absmax in ABSMAX:
            check_format(cupy, x, f"kbit{k}", absmax=absmax)
        check_flat(cupy, x, k, None, "e4m4")
    check_format(cupy, make(kind, 70_000, dtype), f"kbit{k}", codebook="nf")


@pytest.mark.parametrize("book", CODEBOOKS)
@pytest.mark.parametrize("k", range(1, 9))
def test_codebooks(cupy, k, book):
    choice = codebook(book, k)
    for kind in ("normal", "wide", "special"):
        x = make(kind, 5000, np.dtype("float32"))
        check_format(cupy, x, f"kbit{k}", codebook=choice)
        values = standard_codebook(book, k).values if isinstance(choice, str) else choice
        check_flat(cupy, x, k, values, "fp32")


def check_custom_codebook(cupy, x, k, values, absmax):
    """Values that the host knows, and values that only the device knows, by both rules of the search."""
    there = cupy.asarray(x)
    host = kb.quantize(x, f"kbit{k}", codebook=values, absmax=absmax)
    packed = kb.quantize_kbit(x, k, values, FLAT[absmax])[0]
    for known in (values, cupy.asarray(values)):
        assert_equal_planes(kb.quantize(there, f"kbit{k}", codebook=known, absmax=absmax), host)
        assert kb.quantize_kbit(there, k, known, FLAT[absmax])[0].get().tobytes() == packed.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", range(1, 9))
def test_device_codebooks(cupy, k, dtype):
    """A CuPy codebook is not read back; the device finds what the host's analysis finds."""
    for book in CODEBOOKS:
        choice = codebook(book, k)
        values = standard_codebook(book, k).values if isinstance(choice, str) else choice
        for kind in ("normal", "special", "wide", "extreme"):
            x = make(kind, 5000, dtype)
            for absmax in ABSMAX:
                check_custom_codebook(cupy, x, k, values, absmax)


@pytest.mark.parametrize("k", range(1, 9))
def test_codebooks_at_the_limits_of_the_analysis(cupy, k):
    """Gaps, thresholds and magnitudes around every limit: host and device draw the same conclusions."""
    rng = np.random.default_rng(k)
    size = 1 << k
    grid = rng.permutation(np.linspace(-1, 1, size, dtype=np.float32))
    books = [np.zeros(size), np.full(size, -0.7), -grid, grid * 1e38, grid * 3.4e38, grid + 1, grid * 2.0**-126]
    for seed in range(6):
        random = np.random.default_rng([seed, k]).standard_normal(size)
        pair = rng.choice(size, 2, replace=False)
        for distance in (0.0, 2.0**-19, 2.0**-18, 2.0**-17, 2.0**-11, 2.0**-10, 2.0**-9):  # from full search to table
            close = grid.copy()
            close[pair[0]] = close[pair[1]] + np.float32(distance)
            books.append(close)
        around_zero = grid.copy()
        around_zero[pair] = 2.0 ** -(13 + seed), -(2.0 ** -(13 + seed))  # their threshold is next to 0
        books += [random, np.round(random, 1), around_zero, random * 2.0 ** rng.integers(-30, 125)]
    x = make("special", 3000, np.dtype("float32"))
    x[1000:] = make("normal", 2000, np.dtype("float32"))
    for book in books:
        book = np.float32(book)
        check_custom_codebook(cupy, x, k, book, "float32")
        thresholds = Codebook(book).thresholds
        if thresholds is not None and thresholds.size:  # quotients next to every threshold: divide by absmax 1
            near = np.float32([thresholds, np.nextafter(thresholds, np.float32(9)), np.nextafter(thresholds, -9)])
            near = near[:, np.abs(thresholds) <= 1].reshape(-1)
            near = np.append(near, np.zeros(-near.size % 31, np.float32)).reshape(-1, 31)
            rows = np.concatenate((np.ones((len(near), 1), np.float32), near), 1).reshape(-1)
            check_custom_codebook(cupy, rows, k, book, "float32")


@pytest.mark.parametrize("k", [1, 3, 8])
def test_device_codebooks_that_are_not_finite(cupy, k):
    """Each value is tried: NaN is never nearest, and quotients are clamped to the values that are numbers."""
    x = make("normal", 3200, np.dtype("float32")).reshape(-1, 32)
    absmax = np.abs(x).max(1, keepdims=True)
    for bad in ([np.nan], [np.inf], [-np.inf, np.nan], [np.nan] * (1 << k)):
        values = codebook("unsorted", k)
        values[: len(bad)] = bad[: values.size]
        lowest, highest = np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)
        y = x / absmax
        y = np.where(y < lowest, lowest, np.where(y > highest, highest, y))
        with np.errstate(invalid="ignore"):
            distance = np.abs(y[..., None] - values)
        index = np.where(np.isnan(distance), np.inf, distance).argmin(-1).astype(np.uint8)
        q = kb.quantize(cupy.asarray(x), f"kbit{k}", codebook=cupy.asarray(values), absmax="float32")
        assert np.array_equal(kb.unpack_kbit(q.planes["packed"], k, x.size).get(), index.reshape(-1))
        assert np.array_equal(q.planes["codebook"].get(), values, equal_nan=True)


def test_a_device_codebook_may_change(cupy):
    """The values count that a codebook holds when the work runs, in a captured graph, too."""
    x = make("normal", 40_000, np.dtype("float16"))
    there, values = cupy.asarray(x), cupy.asarray(codebook("unsorted", 4))
    form = ("kbit4", {"codebook": values})
    q = kb.quantize(there, form)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kb.quantize(there, form, out=q)
        graph = stream.end_capture()
    for book in ("asymmetric", "tiny", "duplicate", "unsorted"):
        choice = codebook(book, 4)
        wanted = kb.quantize(x, "kbit4", codebook=choice)
        values.set(choice)
        assert_equal_planes(kb.quantize(there, form), wanted)
        graph.launch(stream)
        stream.synchronize()
        assert_equal_planes(q, wanted)


def test_empty_arrays_and_device_codebooks(cupy):
    x, choice = np.empty(0, np.float32), codebook("unsorted", 4)
    form = ("kbit4", {"codebook": cupy.asarray(choice)})
    assert_equal_planes(kb.quantize(cupy.asarray(x), form), kb.quantize(x, "kbit4", codebook=choice))
    with pytest.raises(FormatError, match="x is not: pass it as codebook"):
        kb.quantize(x, form)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("k", range(1, 9))
def test_every_16_bit_number_under_several_scales(cupy, k, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    finite = every[np.isfinite(every.astype(np.float32))]
    for absmax in (1.0, 0.7, 1.999, 3e-5, 30000.0):
        inside = finite[np.abs(finite.astype(np.float32)) <= absmax]
        inside = np.append(inside, np.zeros(-inside.size % 31, dtype)).reshape(-1, 31)
        blocks = np.concatenate((np.full((len(inside), 1), absmax, dtype), inside), 1).reshape(-1)
        for book in ("bnf", "nf"):
            check_format(cupy, blocks, f"kbit{k}", codebook=book)
            check_format(cupy, blocks, f"kbit{k}", codebook=book, absmax="float32")
            check_flat(cupy, blocks, k, None if book == "nf" else standard_codebook(book, k).values, "fp32")
    check_format(cupy, every, f"kbit{k}")


@pytest.mark.parametrize("book", ["bnf", "nf"])
@pytest.mark.parametrize("k", range(1, 9))
def test_around_every_threshold(cupy, k, book):
    """x = threshold * scale and its neighbours, for scales of any mantissa and magnitude."""
    thresholds = standard_codebook(book, k).thresholds
    rng = np.random.default_rng(k)
    rows = []
    for exponent in (-126, -100, -61, -60, -27, -14, -1, 0, 3, 15, 99, 100, 101, 125):
        for scale in np.exp2(np.float32(exponent)) * (1 + rng.random(40)).astype(np.float32):
            x = thresholds * scale
            near = [x, np.nextafter(x, np.float32(9e37)), np.nextafter(x, np.float32(-9e37))]
            values = np.concatenate(near)
            values = np.append(values, np.zeros(-values.size % 31, np.float32)).reshape(-1, 31)
            rows.append(np.concatenate((np.full((len(values), 1), scale, np.float32), values), 1))
    x = np.concatenate(rows).reshape(-1)
    for absmax in ABSMAX:
        check_format(cupy, x, f"kbit{k}", codebook=book, absmax=absmax)
        check_flat(cupy, x, k, None if book == "nf" else standard_codebook(book, k).values, FLAT[absmax])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("book", ["unsorted", "duplicate", "asymmetric"])
@pytest.mark.parametrize("k", [1, 2, 4, 5, 8])
def test_around_thresholds_of_custom_codebooks(cupy, k, book, dtype):
    """Quotients next to every threshold, down to scales where a short division would lose bits."""
    choice = codebook(book, k)
    thresholds = Codebook(choice).thresholds
    rng = np.random.default_rng(k)
    exponents = (-20, -8, 0, 12) if dtype == np.float16 else (-126, -110, -100, -80, -61, -59, -20, 0, 90, 101, 125)
    rows = []
    for exponent in exponents:
        for scale in (np.exp2(np.float32(exponent)) * (1 + rng.random(60)).astype(np.float32)).astype(dtype):
            with np.errstate(over="ignore"):
                near = np.float32(thresholds) * np.float32(scale)
                values = np.concatenate([near * np.float32(1 + i * 2.0**-8) for i in (-2, -1, 0, 1, 2)]).astype(dtype)
            values = np.append(values, np.zeros(-values.size % 31, dtype)).reshape(-1, 31)
            rows.append(np.concatenate((np.full((len(values), 1), scale, dtype), values), 1))
    x = np.concatenate(rows).reshape(-1)
    for absmax in ABSMAX:
        check_format(cupy, x, f"kbit{k}", codebook=choice, absmax=absmax)
        check_flat(cupy, x, k, choice, FLAT[absmax])


@settings(max_examples=80)
@given(st.data())
def test_any_floats(cupy, data):
    k = data.draw(st.integers(1, 8))
    dtype = data.draw(st.sampled_from(DTYPES))
    absmax = data.draw(st.sampled_from(ABSMAX))
    book = data.draw(st.sampled_from(CODEBOOKS))
    numbers = data.draw(st.lists(st.floats(width=32), max_size=200))
    with np.errstate(over="ignore"):
        x = np.array(numbers, np.float32).astype(dtype)
    check_format(cupy, x, f"kbit{k}", codebook=codebook(book, k), absmax=absmax)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_odd_size(cupy, dtype):
    x = make("normal", (1 << 20) + 7, dtype)
    for k in range(1, 9):
        check_format(cupy, x, f"kbit{k}")
        check_flat(cupy, x, k, None, "e4m4")


def test_codes_of_many_floats(cupy):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.arange(0, 1 << 32, 1 << 15, dtype=np.uint32).view(np.float32)])
    assert kb.encode_absmax_e4m4(cupy.asarray(x)).get().tobytes() == kb.encode_absmax_e4m4(x).tobytes()


def test_layouts_of_the_input(cupy):
    base = cupy.asarray(make("normal", 64 * 48, np.dtype("float32"))).reshape(64, 48)
    for x in (base.T, cupy.asfortranarray(base), base[::-1, ::3], base[5:, 1:], base.astype("f8"), base[3, 3]):
        assert_equal_planes(kb.quantize(x, "kbit4"), kb.quantize(x.get(), "kbit4"))
    q = kb.quantize(base.astype("f8"), "kbit4")
    y = q.dequantize()
    assert y.dtype == np.float64 and np.array_equal(y.get(), q.get().dequantize())


def test_rows_and_devices(cupy):
    x = make("normal", 64 * 96, np.dtype("float16")).reshape(64, 96)
    host, device = kb.quantize(x, "kbit5"), kb.quantize(cupy.asarray(x), "kbit5")
    for key in (3, slice(5, 40, 7), [1, 1, 60], np.array([[0, 63]])):
        assert_equal_planes(device[key], host[key])
    ids = cupy.asarray([5, 0, 63])
    assert np.array_equal(kb.take(device, ids).get(), kb.take(host, ids.get()))
    assert device.device == "cuda:0" and device.get().device == "cpu"
    assert_equal_planes(host.to_device("cuda:0"), host)
    with pytest.raises(DeviceError, match="arrays on different devices|planes of"):
        kb.QuantizedArray(host.format, {**host.planes, "packed": device.planes["packed"]}, host.shape, host.dtype)
    with pytest.raises(DeviceError, match="out is on cpu and x on cuda:0"):
        kb.quantize(cupy.asarray(x), "kbit5", out=host)
    with pytest.raises(DeviceError, match="out is on cpu; the result is on cuda:0"):
        kb.dequantize(device, out=np.empty_like(x))
    with pytest.raises(DeviceError, match="different devices"):
        kb.metrics.mse(x, cupy.asarray(x))
    packed, absmax, values = kb.quantize_kbit(cupy.asarray(x))
    with pytest.raises(DeviceError, match="different devices"):
        kb.dequantize_kbit(packed, absmax.get(), values, 4, x.size)
    with pytest.raises(DeviceError, match="codebook is on cuda:0 and the data on cpu"):
        kb.quantize_kbit(x, 4, values)
    with pytest.raises(DeviceError, match="only"):
        host.to_device("cuda:99")


def test_metrics_agree(cupy):
    x = make("normal", 10_000, np.dtype("float32"))
    host, device = kb.quantize(x, "kbit4"), kb.quantize(cupy.asarray(x), "kbit4")
    a, b = kb.metrics.sums(x, host.dequantize()), kb.metrics.sums(cupy.asarray(x), device.dequantize())
    assert a.sqnr_db == pytest.approx(b.sqnr_db, rel=1e-12) and a.largest == b.largest
    assert kb.metrics.error_bound(cupy.asarray(x), device) == kb.metrics.error_bound(x, host)


@pytest.mark.parametrize("options", [{}, {"absmax": "float16"}, {"absmax": "float32"}, {"codebook": "unsorted"}])
def test_graph_capture(cupy, options):
    """quantize(out=) and dequantize(out=) allocate, copy and wait for nothing: a graph takes them whole."""
    if "codebook" in options:
        options = {"codebook": codebook("unsorted", 4)}
    x, y = cupy.empty(100_003, "f4"), cupy.empty(100_003, "f4")
    x[...] = 1
    q = kb.quantize(x, "kbit4", **options)  # compiles
    kb.dequantize(q, out=y)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kb.quantize(x, "kbit4", out=q, **options)
        kb.dequantize(q, out=y)
        graph = stream.end_capture()
    for seed, factor in enumerate((1, 1e6, 1e-7, 1)):
        data = make("normal", x.size, np.dtype("float32"), seed) * np.float32(factor)
        x.set(data)
        cupy.cuda.Device().synchronize()
        with stream:
            graph.launch()
        stream.synchronize()
        wanted = kb.quantize(data, "kbit4", **options)
        assert_equal_planes(q, wanted)
        assert same_values(y.get(), wanted.dequantize())


def test_work_goes_to_the_current_stream(cupy):
    """Another stream is busy for a while; a call on the current one neither waits nor runs ahead."""
    x = cupy.asarray(make("normal", 1 << 22, np.dtype("float32")))
    kb.quantize(x, "kbit4").dequantize()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.random.standard_normal((8192, 8192), dtype="f4")
    with stream:
        late = x * 1
        for _ in range(20):
            busy = busy @ busy * 1e-4
        late *= 3
        q = kb.quantize(late, "kbit4")  # right only if it runs behind the matrix products
        y = q.dequantize()
        assert not stream.done  # nothing above has waited for the device
    stream.synchronize()
    wanted = kb.quantize(x.get() * np.float32(3), "kbit4")
    assert_equal_planes(q, wanted)
    assert same_values(y.get(), wanted.dequantize())


def test_threads(cupy):
    """Two threads, two streams, kernels that neither has compiled before."""
    results, errors = {}, []
    start = threading.Barrier(2)

    def work(seed):
        try:
            x = make("normal", 50_000, np.dtype("float32"), seed)
            start.wait()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for i in range(20):
                    q = kb.quantize(cupy.asarray(x), f"kbit{1 + i % 8}", codebook="nf", absmax="float16")
                    y = q.dequantize(dtype=BFLOAT16)
                    stream.synchronize()
                    results[seed, i] = (q.get(), y.get())
        except Exception as error:  # raised again in the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (seed, i), (q, y) in results.items():
        x = make("normal", 50_000, np.dtype("float32"), seed)
        wanted = kb.quantize(x, f"kbit{1 + i % 8}", codebook="nf", absmax="float16")
        assert all(np.array_equal(q.planes[p], wanted.planes[p]) for p in q.planes)
        assert same_values(y, wanted.dequantize(dtype=BFLOAT16))


@pytest.mark.parametrize(("k", "dtype"), [(2, "float16"), (5, "bfloat16"), (3, "float32")])
def test_more_than_two_to_the_31_elements(cupy, large_memory, k, dtype):
    """2^31 + 64 elements there and back: repetitions of a tensor whose planes NumPy knows."""
    period, size = 1 << 20, (1 << 31) + 64
    large_memory(45)
    piece = make("normal", period, np.dtype("float32")).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    piece[0] = 4.75  # the largest of every repetition, and of the tail
    wanted = kb.quantize(piece, f"kbit{k}")
    q = kb.quantize(repeated(cupy, piece, size), f"kbit{k}")
    for name in ("packed", "absmax"):
        assert_repeats(q.planes[name], wanted.planes[name])
    assert_repeats(q.dequantize(), wanted.dequantize())


def test_compile_errors_say_what_and_where(cupy):
    from kbitcupy.backend.launch import Kernel
    from kbitcupy.errors import KernelCompileError
    from kbitcupy.formats.codebook.cuda import DEQUANTIZE

    with pytest.raises(KernelCompileError, match=r"kbit\.cu: dequantize_kbit<short, 4, E4M4> for sm_\d+: "):
        Kernel(DEQUANTIZE, ("short", "4", "E4M4"), 128)(cupy.empty(1), 1, ())
