"""Gradients of BitNet's layers against finite differences of the surrogate, and torch's autograd."""

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy import bitnet

TOKENS, OUT, IN = (2, 3), 10, 48


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def case(dtype, granularity="tensor", **options):
    """x, W, dy and the norm's weights, and W quantized."""
    x, w, dy = normal(*TOKENS, IN), normal(OUT, IN, seed=1) * 0.1, normal(*TOKENS, OUT, seed=2)
    g = 1 + 0.1 * normal(IN, seed=3)
    w = w.astype(dtype)
    return x.astype(dtype), w, dy.astype(dtype), g.astype(dtype), kb.quantize(w, "ternary", granularity=granularity)


def rms(x, g, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * g


def slopes(f, x, step=1e-5):
    """Central differences of a number by each element of x."""
    found = np.empty(x.shape)
    for i in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            ends.append(f(moved))
        found[i] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 20)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_finite_differences_of_the_surrogate(with_norm, granularity):
    """The surrogate adds the errors of quantization, at this point, as constants."""
    x, w, dy, g, q = case(np.float64, granularity)
    z = rms(x, g, 1e-5) if with_norm else x
    codes, scale = bitnet.quantize_activations(bitnet.rms_norm(x, g, eps=1e-5) if with_norm else x)
    shift_x, shift_w = codes * scale[..., None].astype(np.float64) - z, q.dequantize() - w

    def loss(x, w, g):
        return (dy * (((rms(x, g, 1e-5) if with_norm else x) + shift_x) @ (w + shift_w).T)).sum()

    found = bitnet.linear_backward(dy, x, q, w, norm=g if with_norm else None, norm_eps=1e-5)
    assert [part.shape for part in found] == [x.shape, w.shape, (OUT,), *([g.shape] if with_norm else [])]
    assert all(part.dtype == np.float64 for part in found)
    assert np.allclose(found[0], slopes(lambda moved: loss(moved, w, g), x), atol=1e-5)
    assert np.allclose(found[1], slopes(lambda moved: loss(x, moved, g), w), atol=1e-5)
    assert np.allclose(found[2], dy.sum(axis=(0, 1)))
    if with_norm:
        assert np.allclose(found[3], slopes(lambda moved: loss(x, w, moved), g), atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_rms_norm_backward(xp, eps):
    x, g, dz = normal(*TOKENS, IN), normal(IN, seed=1), normal(*TOKENS, IN, seed=2)
    dx, dg = bitnet.rms_norm_backward(xp.asarray(dz), xp.asarray(x), xp.asarray(g), eps=eps)
    assert np.allclose(host(dx), slopes(lambda moved: (dz * rms(moved, g, eps)).sum(), x), atol=1e-6)
    assert np.allclose(host(dg), slopes(lambda moved: (dz * rms(x, moved, eps)).sum(), g), atol=1e-6)
    without, ones = bitnet.rms_norm_backward(dz, x, eps=eps), bitnet.rms_norm_backward(dz, x, np.ones(IN), eps=eps)
    assert all((a == b).all() for a, b in zip(without, ones, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(xp, dtype):
    """Master weights keep more digits than the activations."""
    x, w, dy, g, _ = case(np.float32)
    x, dy = x.astype(dtype), dy.astype(dtype)
    q = kb.quantize(xp.asarray(w), "ternary")
    found = bitnet.linear_backward(xp.asarray(dy), xp.asarray(x), q, norm=xp.asarray(g), norm_eps=1e-5)
    assert [part.dtype.name for part in found] == [dtype, "float32", "float32", "float32"]
    exact = bitnet.linear_backward(*(a.astype(np.float64) for a in (dy, x)), q.get() if xp is not np else q, norm=g)
    for part, wanted in zip(found, exact, strict=True):
        assert np.allclose(host(part), wanted, atol=2e-2 if part.dtype == np.float16 else 2e-4)


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 20)])
def test_masks(xp, granularity, rounding):
    x, w, dy, _, _ = case(np.float32)
    q = kb.quantize(w, "ternary", granularity=granularity, rounding=rounding)
    scale = np.abs(q.dequantize())
    for rows in np.ndindex(*((OUT,) if granularity != "tensor" else ())):  # its scale, also where trits are 0
        row = scale[rows]
        blocks = np.split(row, [20, 40], axis=-1) if granularity == ("group", 20) else [row]
        for block in blocks:
            block[...] = block.max()
    with np.errstate(all="ignore"):
        codes = w * (np.float32(1) / scale)
    passes = {
        "none": np.ones(w.shape, bool),
        "inclusive": np.abs(np.rint(codes)) <= 1,
        "strict": bitnet.trits(q) == 0,
    }
    full = host(bitnet.linear_backward(dy, x, q)[1])
    there = kb.QuantizedArray(q.format, {k: xp.asarray(v) for k, v in q.planes.items()}, q.shape, q.dtype)
    for mask, where in passes.items():
        found = bitnet.linear_backward(xp.asarray(dy), xp.asarray(x), there, xp.asarray(w), mask=mask)
        assert np.allclose(host(found[1]), full * where, atol=1e-5) and where.any()
        assert ((host(found[1]) != 0) == where).all()


def test_nothing_passes_a_mask_under_a_scale_of_zero():
    x, w, dy, _, _ = case(np.float32)
    q = kb.quantize(w, "ternary", scale=0)
    for mask in ("inclusive", "strict"):
        assert not bitnet.linear_backward(dy, x, q, w, mask=mask)[1].any()


@pytest.mark.parametrize("options", [{"bits": 3}, {"granularity": "tensor"}, {"rounding": "away", "qmin": -127}])
def test_options_of_activations(options):
    x, _, dy, _, q = case(np.float32)
    codes, scale = bitnet.quantize_activations(x, **options)
    xh = bitnet.dequantize_activations(codes, scale)
    found = bitnet.linear_backward(dy, x, q, **options)[1]
    assert np.allclose(found, np.einsum("abn,abk->nk", dy, xh), atol=1e-5)


def test_activations_that_are_not_quantized_here():
    x, _, dy, _, q = case(np.float32)
    assert np.allclose(bitnet.linear_backward(dy, x, q, bits=None)[1], np.einsum("abn,abk->nk", dy, x), atol=1e-5)
    x8 = kb.quantize(x, "int8", granularity="token")
    found = bitnet.linear_backward(dy, x8, q)
    assert np.allclose(found[1], np.einsum("abn,abk->nk", dy, x8.dequantize()), atol=1e-5)
    assert found[0].shape == x.shape


def test_any_format_without_a_mask():
    x, w, dy, _, _ = case(np.float32)
    q = kb.quantize(w, "kbit4")
    assert np.allclose(bitnet.linear_backward(dy, x, q)[0], dy @ q.dequantize(), atol=1e-5)
    with pytest.raises(ValueError, match="ternary"):
        bitnet.linear_backward(dy, x, q, w, mask="strict")


@pytest.mark.parametrize("tokens", [(), (0,), (1,)])
def test_few_tokens(tokens):
    _, _, _, g, q = case(np.float32)
    found = bitnet.linear_backward(np.ones((*tokens, OUT), np.float32), np.ones((*tokens, IN), np.float32), q, norm=g)
    assert [part.shape for part in found] == [(*tokens, IN), (OUT, IN), (OUT,), (IN,)]


def test_autograd_of_torch():
    """The same layer with ``x + (quantized - x).detach()``, as BitNet's own code has it."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w, dy, g, q = case(np.float32)
    tx, tw, tg = (torch.tensor(a, requires_grad=True) for a in (x, w, g))
    bias = torch.zeros(OUT, requires_grad=True)
    z = tx * torch.rsqrt((tx * tx).mean(-1, keepdim=True) + 1e-5) * tg
    s = 127 / z.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    zh = z + ((z * s).round().clamp(-128, 127) / s - z).detach()
    gamma = tw.abs().mean().clamp(min=1e-5)
    wh = tw + ((tw / gamma).round().clamp(-1, 1) * gamma - tw).detach()
    torch.nn.functional.linear(zh, wh, bias).backward(torch.tensor(dy))
    found = bitnet.linear_backward(dy, x, q, w, norm=g, norm_eps=1e-5)
    for ours, theirs in zip(found, (tx, tw, bias, tg), strict=True):
        assert np.allclose(ours, theirs.grad.numpy(), atol=2e-5)
    tensors = bitnet.linear_backward(torch.tensor(dy), torch.tensor(x), q, torch.tensor(w), norm=torch.tensor(g))
    assert all(isinstance(part, torch.Tensor) for part in tensors)
    dx, dg = bitnet.rms_norm_backward(torch.tensor(x), torch.tensor(x))
    assert isinstance(dx, torch.Tensor) and isinstance(dg, torch.Tensor)


def test_a_few_steps_fit_a_ternary_teacher():
    """The share of outputs' variance that is left falls: the gradients go downhill."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 32)).astype(np.float32)
    teacher = rng.integers(-1, 2, (8, 32)).astype(np.float32)
    y = x @ teacher.T
    w = 0.1 * rng.standard_normal((8, 32)).astype(np.float32)
    losses = []
    for _ in range(60):
        q = kb.quantize(w, "ternary")
        error = bitnet.linear(x, q) - y
        losses.append((error**2).mean() / y.var())
        w -= 0.2 * bitnet.linear_backward(error / len(x), x, q)[1]
    assert losses[0] > 0.5 and losses[-1] < 0.02


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": "soft"}, ValueError, "mask"),
        ({"mask": "strict"}, ValueError, "needs the float weights"),
        ({"W": normal(3, IN)}, ValueError, "W has shape"),
        ({"dy": normal(*TOKENS, 3)}, ValueError, "dy"),
        ({"x": normal(*TOKENS, 3)}, ValueError, "x has shape"),
        ({"x": np.ones((*TOKENS, IN), int)}, TypeError, "x"),
        ({"q": normal(OUT, IN)}, TypeError, "q"),
        ({"q": kb.quantize(normal(2, OUT, IN), "ternary")}, ValueError, r"\[N, K\]"),
        ({"norm": normal(3)}, ValueError, "norm"),
        ({"norm": True, "norm_eps": -1}, ValueError, "norm_eps"),
        ({"bits": 9}, ValueError, "bits"),
        ({"x": kb.quantize(normal(*TOKENS, IN), "int8", granularity="token"), "norm": True}, ValueError, "norm"),
    ],
)
def test_refusals(change, error, message):
    x, _, dy, _, q = case(np.float64)
    with pytest.raises(error, match=message):
        bitnet.linear_backward(**{"dy": dy, "x": x, "q": q, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dz": normal(3)}, "dz"),
        ({"x": np.float64(1)}, "axis"),
        ({"weight": normal(3)}, "weight"),
        ({"eps": -1}, "eps"),
    ],
)
def test_refusals_of_the_norm(change, message):
    with pytest.raises(ValueError, match=message):
        bitnet.rms_norm_backward(**{"dz": normal(2, 4), "x": normal(2, 4), **change})
