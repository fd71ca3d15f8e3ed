"""The kernels of kernels/blocks.cu on a GPU: what they decode, take and multiply, for every format with a decoder."""

import numpy as np
import pytest
from host import compiled as host
from inputs import same_values

import kbitcupy as kb
from kbitcupy.formats import decoders

FORMATS = host.all_formats()


def on_device(cupy, planes):
    return {name: cupy.asarray(plane) for name, plane in planes.items()}


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_elements(cupy, text, dtype):
    """Planes of random bytes: the kernel of the family, that of storey 1 and NumPy agree."""
    format, rng = kb.get_format(text), np.random.default_rng(0)
    for shape in [shape for shape in ((45,), (3, 33), (200, 259), (256, 512)) if host.fits(format, shape)]:
        planes = host.random_planes(rng, format, shape)
        expected = np.empty(shape, dtype)
        with np.errstate(all="ignore"):
            format.decode(planes, expected)
        there = on_device(cupy, planes)
        for decode in (
            lambda out, there=there: format.decode(there, out),
            lambda out, there=there, shape=shape: decoders.dequantize(format.decoder, there, shape, out),
        ):
            out = cupy.empty(shape, dtype)
            decode(out)
            assert same_values(out.get(), expected)


@pytest.mark.parametrize("text", FORMATS)
def test_stacks_and_rows(cupy, text):
    format, rng = kb.get_format(text), np.random.default_rng(1)
    shape = next(shape for shape in ((6, 96), (6, 256)) if host.fits(format, shape))
    members = [host.random_planes(rng, format, shape) for _ in range(4)]
    stack = {name: np.concatenate([member[name] for member in members]) for name in members[0]}
    if format.decoder.values in stack:  # one table for all
        for member in members:
            member[format.decoder.values] = members[0][format.decoder.values]
        stack[format.decoder.values] = members[0][format.decoder.values]
    expected = np.stack([host.decoded_by_numpy(format, member, shape) for member in members])
    there = on_device(cupy, stack)
    out = cupy.empty(expected.shape, np.float32)
    decoders.dequantize(format.decoder, there, shape, out, 4)
    assert same_values(out.get(), expected)
    ids = np.array([5, -1, 0, 17, 2, 3])
    for lead, whole in ((1, expected), (2, expected.reshape(2, 2, *shape))):
        out = cupy.empty((ids.size, *whole.shape[1:]), np.float32)
        for wide in (np.int32, np.int64):
            decoders.take(format.decoder, there, whole.shape, cupy.asarray(ids, wide), out, lead)
            assert same_values(out.get(), whole[ids % len(whole)])
    one = on_device(cupy, members[0])
    for rows in (shape, (18, shape[1] // 3)):  # a third of a row is no multiple of eight
        if format.planes(rows) == format.planes(shape):
            out = cupy.empty((ids.size, rows[1]), np.float32)
            decoders.take(format.decoder, one, rows, cupy.asarray(ids), out)
            assert same_values(out.get(), expected[0].reshape(rows)[ids % rows[0]])


@pytest.mark.parametrize("text", [text for text in FORMATS if kb.get_format(text).can_encode])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products(cupy, text, dtype):
    format, rng = kb.get_format(text), np.random.default_rng(2)
    shape = next(shape for shape in ((50, 259), (50, 512)) if host.fits(format, shape))
    weights = rng.standard_normal(shape, np.float32)
    given = {"codebook=custom": "codebook"}
    options = format.options()
    for key, name in given.items():
        if key in text:
            options[name] = np.linspace(-1, 1, 1 << int(format.bits))
    q = kb.quantize(cupy.asarray(weights), format.name, **options)
    decoded = q.dequantize().get().astype(np.float64)
    for tokens in (1, 7, 8, 9, 20):
        x = rng.standard_normal((tokens, shape[1]), np.float32).astype(dtype)
        bias = rng.standard_normal(shape[0], np.float32).astype(dtype)
        for added in (None, bias):
            out = [cupy.empty((tokens, shape[0]), dtype) for _ in range(2)]
            for y in out:
                there = None if added is None else cupy.asarray(added)
                decoders.multiply(q.format.decoder, q.planes, shape, cupy.asarray(x), there, y)
            expected = x.astype(np.float64) @ decoded.T + (0 if added is None else added.astype(np.float64))
            error = np.abs(out[0].get() - expected).max() / np.abs(expected).max()
            assert error < (1e-5 if dtype == "float32" else 1e-3)
            assert bool((out[0] == out[1]).all())
