"""Affine integers against torch, on its CPU and on a GPU; every element that differs is one that is known to.

torch's fake_quantize multiplies by 1 / scale where ours divides, and some versions of its quantize_per_tensor and
quantize_per_channel (2.13, not 2.11) add the zero point before they round. Both can only move an element whose
quotient lies at a tie between two integers, or as near to it as the last place of a float32.
"""

import numpy as np
import pytest

from kbitcupy import affine

torch = pytest.importorskip("torch")
# Newer versions warn that quantized tensors will go.
pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
SCALES = [0.5, 0.1, 0.0371, 1 / 3, 1.7e-5, 2.0**-9]


@pytest.fixture
def device(xp):
    if xp is np:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return "cuda"


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def near_a_tie(x, scale, zero=0):
    """Whether x / scale lies within a few units in the last place of the middle between two integers.

    The sum of quotient and zero point has the last place of the larger of them.
    """
    ratio = x.astype(np.float64) / scale
    return abs(ratio - np.floor(ratio) - 0.5) <= 2.0**-21 * np.maximum(abs(ratio), abs(zero))


def numbers(shape, scale, seed=0):
    """Steps of any size within the range of 8-bit integers and beyond it, and some ties."""
    rng = np.random.default_rng(seed)
    steps = (rng.standard_normal(shape) * 80).astype(np.float32)
    steps.reshape(-1)[::97] = np.rint(steps.reshape(-1)[::97]) + np.float32(0.5)
    return steps * np.float32(scale)


def check(ours, theirs, x, scale, zero, share):
    """Equal but for known elements, which are few beside those that were made to be ties."""
    unlike = ours != theirs
    assert near_a_tie(x, scale, zero)[unlike].all()
    assert unlike.mean() < share


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("zero", "qmin", "qmax"), [(0, -128, 127), (3, 0, 255), (-7, -8, 7)])
def test_fake_quantize(xp, device, scale, zero, qmin, qmax):
    scale = float(np.float32(scale))
    x = numbers((256, 512), scale)
    tensor = torch.tensor(x, device=device, requires_grad=True)
    theirs = torch.fake_quantize_per_tensor_affine(tensor, scale, zero, qmin, qmax)
    theirs.backward(torch.ones_like(tensor))
    there = xp.asarray(x)
    ours = affine.fake_quantize(there, scale, zero, qmin=qmin, qmax=qmax)
    check(host(ours), theirs.detach().cpu().numpy(), x, scale, zero, 0.012)
    mask = affine.fake_quantize_backward(xp.ones_like(there), there, scale, zero, qmin=qmin, qmax=qmax)
    check(host(mask), tensor.grad.cpu().numpy(), x, scale, zero, 0.001)


@pytest.mark.parametrize("axis", [0, 1])
def test_fake_quantize_per_channel(xp, device, axis):
    rng = np.random.default_rng(1)
    shape = (200, 300)
    scale = np.exp2(rng.uniform(-6, 3, shape[axis])).astype(np.float32)
    zero = rng.integers(0, 256, shape[axis]).astype(np.int32)
    spread, zeros = (scale[:, None], zero[:, None]) if axis == 0 else (scale, zero)
    x = numbers(shape, 1.0) * spread
    tensor = torch.tensor(x, device=device, requires_grad=True)
    theirs = torch.fake_quantize_per_channel_affine(
        tensor, torch.tensor(scale, device=device), torch.tensor(zero, device=device), axis, 0, 255
    )
    theirs.backward(torch.ones_like(tensor))
    there = xp.asarray(x), xp.asarray(scale), xp.asarray(zero)
    options = {"qmin": 0, "qmax": 255, "granularity": ("channel", axis)}
    check(host(affine.fake_quantize(*there, **options)), theirs.detach().cpu().numpy(), x, spread, zeros, 0.012)
    mask = affine.fake_quantize_backward(xp.ones_like(there[0]), *there, **options)
    check(host(mask), tensor.grad.cpu().numpy(), x, spread, zeros, 0.001)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("zero", "dtype"), [(0, "qint8"), (3, "qint8"), (-128, "qint8"), (3, "quint8"), (128, "quint8")]
)
def test_quantize_per_tensor(xp, device, scale, zero, dtype):
    scale = float(np.float32(scale))
    x = numbers((256, 512), scale)
    theirs = torch.quantize_per_tensor(torch.tensor(x, device=device), scale, zero, getattr(torch, dtype)).int_repr()
    qmin, qmax = (-128, 127) if dtype == "qint8" else (0, 255)
    ours = affine.quantize(xp.asarray(x), scale, zero, qmin=qmin, qmax=qmax)
    check(host(ours).astype(int), theirs.cpu().numpy().astype(int), x, scale, zero, 0.012)
    back = affine.dequantize(xp.asarray(theirs.cpu().numpy()), scale, zero)
    wanted = torch.quantize_per_tensor(torch.tensor(x, device=device), scale, zero, getattr(torch, dtype)).dequantize()
    assert np.array_equal(host(back), wanted.cpu().numpy())


@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_per_channel(xp, axis):
    rng = np.random.default_rng(2)
    shape = (256, 384)
    scale = np.exp2(rng.uniform(-6, 3, shape[axis])).astype(np.float32)
    zero = rng.integers(-128, 128, shape[axis]).astype(np.int32)
    spread, zeros = (scale[:, None], zero[:, None]) if axis == 0 else (scale, zero)
    x = numbers(shape, 1.0) * spread
    theirs = torch.quantize_per_channel(
        torch.tensor(x), torch.tensor(scale).double(), torch.tensor(zero).long(), axis, torch.qint8
    )
    there = xp.asarray(x), xp.asarray(scale), xp.asarray(zero)
    ours = affine.quantize(*there, granularity=("channel", axis))
    check(host(ours).astype(int), theirs.int_repr().numpy().astype(int), x, spread, zeros, 0.012)


def test_a_tie_shows_where_the_zero_point_is_added(xp, device):
    x = np.float32([0.5, 1.5, 2.5, -0.5])
    theirs = torch.quantize_per_tensor(torch.tensor(x, device=device), 1.0, 3, torch.qint8).int_repr().cpu().numpy()
    rounded_first, added_first = [3, 5, 5, 3], [4, 4, 6, 2]
    assert theirs.tolist() in (rounded_first, added_first)  # torch 2.11, torch 2.13
    assert host(affine.quantize(xp.asarray(x), 1.0, 3)).tolist() == rounded_first
