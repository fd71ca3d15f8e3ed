"""bitsandbytes itself in the same process, on the GPU: `pip install '.[oracle]'`, else skipped.

Its kernels are compiled with fast math: they multiply by the GPU's approximate reciprocal (within one last bit of the
true one that kbitcupy uses, the same for all but an eighth of the numbers) and flush subnormals. So every test computes
the codes from that reciprocal, too, and these must be equal to the last one: nothing else differs.
"""

import itertools
import math
import warnings

import numpy as np
import pytest
from bitsandbytes_rules import codes_of
from make_bitsandbytes_data import special_rows

import kbitcupy as kb
from kbitcupy.backend.xp import float_dtype
from kbitcupy.io import bitsandbytes
from kbitcupy.io.layouts.bitsandbytes import BLOCKS

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says about the machine is not about us
    bnb = pytest.importorskip("bitsandbytes")
if not torch.cuda.is_available():
    pytest.skip("bitsandbytes' CUDA kernels need a GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

SHAPES = [
    *((1,), (2,), (3,), (31,), (33,), (64,), (65,), (1000,), (4096,), (4097,), (7, 9), (64, 64), (127, 129), (1, 4099)),
    *((255, 257), (2, 3, 5), (3, 1000, 7), (2048, 513), (1030, 1024), (2, 4, 8, 33)),
]
DTYPES = ["float16", "bfloat16", "float32"]
KINDS = ["nf4", "fp4"]


@pytest.fixture(scope="module")
def reciprocal(cupy):
    """The reciprocal of bitsandbytes' kernels."""
    return cupy.ElementwiseKernel(
        "float32 a", "float32 r", 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a))', "approximate_reciprocal"
    )


def tensor(x, dtype):
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(x)).cuda().to(getattr(torch, dtype))


def as_cupy(cupy, t):
    """A CuPy array on the memory of a tensor."""
    if t.dtype == torch.bfloat16:
        return cupy.from_dlpack(t.view(torch.int16)).view(float_dtype("bfloat16"))
    return cupy.from_dlpack(t)


def codes_of_blocks(cupy, x, absmax, kind, block, reciprocal):
    """The codes that bitsandbytes' arithmetic gives."""
    flat = cupy.pad(x.reshape(-1).astype(cupy.float32), (0, -x.size % block)).reshape(-1, block)
    y = flat * reciprocal(absmax)[:, None]  # CuPy's own kernels flush subnormals as well
    return codes_of(y, kind, cupy).reshape(-1)[: x.size]


def unpack(cupy, packed, size):
    packed = packed.reshape(-1)
    return cupy.stack((packed >> 4, packed & 15), axis=-1).reshape(-1)[:size]


def different_bits(cupy, a, b):
    """How many elements differ; any NaN equals any NaN."""
    a, b = a.reshape(-1), b.reshape(-1)
    unsigned = {1: cupy.uint8, 2: cupy.uint16, 4: cupy.uint32}[a.dtype.itemsize]
    same = a.view(unsigned) == b.view(unsigned)
    if a.dtype.kind != "u":
        wide = a.astype(cupy.float32), b.astype(cupy.float32)
        same |= cupy.isnan(wide[0]) & cupy.isnan(wide[1])
    return int((~same).sum())


def sample(shape, seed):
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape).astype(np.float32)
    return x * np.exp(rng.standard_normal((shape[0],) + (1,) * (len(shape) - 1))).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_absmax_and_decoding(cupy, reciprocal, record_property, kind, dtype):
    elements = different = 0
    for shape, block in itertools.product(SHAPES, BLOCKS):
        t = tensor(sample(shape, 1), dtype)
        x = as_cupy(cupy, t)
        packed, state = bnb.functional.quantize_4bit(t, blocksize=block, quant_type=kind)
        torch.cuda.synchronize()
        theirs, absmax = as_cupy(cupy, packed), as_cupy(cupy, state.absmax)
        q = kb.quantize(x, kind, block=block)
        assert different_bits(cupy, q.planes["absmax"], absmax) == 0
        codes = unpack(cupy, theirs, x.size)
        assert different_bits(cupy, codes_of_blocks(cupy, x, absmax, kind, block, reciprocal), codes) == 0
        different += different_bits(cupy, unpack(cupy, q.planes["packed"], x.size), codes)
        elements += x.size
        back = kb.QuantizedArray(q.format, {"packed": theirs.reshape(-1), "absmax": absmax}, shape, x.dtype)
        expected = as_cupy(cupy, bnb.functional.dequantize_4bit(packed, state))
        assert different_bits(cupy, back.dequantize(), expected) == 0
    record_property("different", different)
    print(f"{kind} {dtype}: {different} of {elements} codes differ, all by the reciprocal; absmax and decoding: none")
    assert different < elements * 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_double_quantization(cupy, reciprocal, kind, dtype):
    blocks = different = offsets = tensors = 0
    for shape, block in itertools.product(SHAPES, BLOCKS):
        t = tensor(sample(shape, 2), dtype)
        x = as_cupy(cupy, t)
        packed, state = bnb.functional.quantize_4bit(t, blocksize=block, quant_type=kind, compress_statistics=True)
        torch.cuda.synchronize()
        q = kb.quantize(x, kind, block=block, double_quant=True)
        offset = as_cupy(cupy, state.offset.reshape(1))
        offsets += int(cupy.asnumpy(q.planes["nested_offset"] != offset)[0])
        tensors += 1
        # Given its offset: what is left is the quantization of the differences.
        difference = kb.quantize(x, kind, block=block).planes["absmax"] - offset
        nested = kb.quantize(difference, "dynamic8", block=256)
        theirs = {"absmax": as_cupy(cupy, state.absmax), "nested_absmax": as_cupy(cupy, state.state2.absmax)}
        assert different_bits(cupy, nested.planes["absmax"], theirs["nested_absmax"]) == 0
        arithmetic = codes_of_blocks(cupy, difference, theirs["nested_absmax"], "dynamic8", 256, reciprocal)
        assert different_bits(cupy, arithmetic, theirs["absmax"]) == 0
        different += different_bits(cupy, nested.planes["codes"], theirs["absmax"])
        blocks += difference.size
        planes = {"packed": as_cupy(cupy, packed).reshape(-1), **theirs, "nested_offset": offset}
        back = kb.QuantizedArray(q.format, planes, shape, x.dtype).dequantize()
        expected = as_cupy(cupy, bnb.functional.dequantize_4bit(packed, state))
        assert different_bits(cupy, back, expected) == 0
    print(
        f"{kind} {dtype}: {different} of {blocks} codes of absmax differ, all by the reciprocal; nested absmax and "
        f"decoding: none; {offsets} of {tensors} means by the order of addition"
    )
    assert different <= max(2, blocks * 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits(cupy, reciprocal, dtype):
    elements = different = 0
    for shape, block in itertools.product(SHAPES, BLOCKS[1:]):
        t = tensor(sample(shape, 3), dtype)
        x = as_cupy(cupy, t)
        codes, state = bnb.functional.quantize_blockwise(t, blocksize=block)
        torch.cuda.synchronize()
        theirs, absmax = as_cupy(cupy, codes).reshape(-1), as_cupy(cupy, state.absmax)
        q = kb.quantize(x, "dynamic8", block=block)
        assert different_bits(cupy, q.planes["absmax"], absmax) == 0
        assert different_bits(cupy, codes_of_blocks(cupy, x, absmax, "dynamic8", block, reciprocal), theirs) == 0
        different += different_bits(cupy, q.planes["codes"], theirs)
        elements += x.size
        back = kb.QuantizedArray(q.format, {"codes": theirs, "absmax": absmax}, shape, x.dtype).dequantize()
        expected = as_cupy(cupy, bnb.functional.dequantize_blockwise(codes, state))
        assert different_bits(cupy, back, expected) == 0
    print(f"dynamic8 {dtype}: {different} of {elements} codes differ, all by the reciprocal; absmax and decoding: none")
    assert different < elements * 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_special_blocks(cupy, reciprocal, kind, dtype):
    """Infinities, NaN, subnormals and absmax to the ends of float32 follow the same arithmetic."""
    t = tensor(special_rows(64), dtype)
    x = as_cupy(cupy, t)
    packed, state = bnb.functional.quantize_4bit(t, blocksize=64, quant_type=kind)
    torch.cuda.synchronize()
    absmax = as_cupy(cupy, state.absmax)
    theirs = unpack(cupy, as_cupy(cupy, packed), x.size)
    assert different_bits(cupy, codes_of_blocks(cupy, x, absmax, kind, 64, reciprocal), theirs) == 0
    q = kb.quantize(x, kind)
    different = unpack(cupy, q.planes["packed"], x.size).reshape(-1, 64) != theirs.reshape(-1, 64)
    # kbitcupy scales blocks beyond 2^126, whose reciprocal they flush to zero.
    assert not bool((different.any(axis=1) & ~((absmax > 2.0**126) & cupy.isfinite(absmax))).any())
    # Blocks of NaN alone: theirs is the number that the search for a maximum begins with, kbitcupy's is 0.
    mine = cupy.where(absmax < 0, 0, absmax)
    assert different_bits(cupy, q.planes["absmax"], mine) == 0


# ---- files that kbitcupy wrote -------------------------------------------------------------------------------------


def load_with_torch(path):
    from safetensors.torch import load_file

    return load_file(path)


def parameter(tensors, name):
    """A 4-bit weight from the keys of a file, as model loaders make it."""
    stats = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
    return bnb.nn.Params4bit.from_prequantized(tensors[name], stats, requires_grad=False, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("double_quant", [False, True])
def test_bitsandbytes_loads_what_was_saved(cupy, tmp_path, kind, dtype, double_quant):
    tensors = {}
    for number, (shape, block) in enumerate(itertools.product([(64, 96), (7, 9), (130, 257)], (32, 64, 4096))):
        x = as_cupy(cupy, tensor(sample(shape, number), dtype))
        tensors[f"layer{number}.weight"] = kb.quantize(x, kind, block=block, double_quant=double_quant)
    whole = [name for name, q in tensors.items() if math.prod(q.shape) % 8 == 0]
    bitsandbytes.save(tmp_path / "a.safetensors", tensors, quant_storage=dict.fromkeys(whole[1:], dtype))
    loaded = load_with_torch(tmp_path / "a.safetensors")
    for name, q in tensors.items():
        weight = parameter(loaded, name)
        expected = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert tuple(expected.shape) == q.shape
        assert different_bits(cupy, q.dequantize(), as_cupy(cupy, expected)) == 0


def test_a_model_gives_the_same_outputs(tmp_path):
    """The frozen checkpoint of bitsandbytes, and what kbitcupy read of it and wrote again."""
    from test_io_bitsandbytes import MODEL

    checkpoint = bitsandbytes.load(MODEL)
    bitsandbytes.save(tmp_path / "a.safetensors", checkpoint, quant_storage=checkpoint.quant_storage)
    outputs = []
    for path in (MODEL, tmp_path / "a.safetensors"):
        tensors = {name: t.cuda() for name, t in load_with_torch(path).items()}
        up = bnb.nn.Linear4bit(128, 136, compute_dtype=torch.bfloat16, quant_type="nf4")
        down = bnb.nn.Linear4bit(136, 40, compute_dtype=torch.float16, quant_type="fp4")
        for name, layer in (("up", up), ("down", down)):
            layer.weight = parameter(tensors, f"{name}.weight")
            layer.bias = torch.nn.Parameter(tensors[f"{name}.bias"], requires_grad=False)
        head = bnb.nn.Linear8bitLt(40, 24, has_fp16_weights=False).half().cuda()
        head.load_state_dict({key: tensors[f"head.{key}"] for key in ("weight", "bias", "SCB")})
        x = torch.from_numpy(sample((5, 128), 9)).cuda()
        hidden = down(up(x.bfloat16()).half())
        outputs.append((hidden, head(hidden)))
        assert hidden.shape == (5, 40) and bool(torch.isfinite(outputs[-1][1]).all())
    for first, second in zip(*outputs, strict=True):
        assert torch.equal(first, second)


def test_functions_agree(cupy):
    t = tensor(sample((100, 77), 4), "bfloat16")
    packed, state = bnb.functional.quantize_4bit(t, quant_type="fp4", compress_statistics=True)
    mine, my_state = bitsandbytes.quantize_4bit(as_cupy(cupy, t), quant_type="fp4", compress_statistics=True)
    assert mine.shape == tuple(packed.shape) and my_state.absmax.shape == tuple(state.absmax.shape)
    assert my_state.blocksize == state.blocksize and my_state.state2.blocksize == state.state2.blocksize
    assert np.array_equal(my_state.code, state.code.cpu().numpy())
    assert np.array_equal(my_state.state2.code, state.state2.code.cpu().numpy())
