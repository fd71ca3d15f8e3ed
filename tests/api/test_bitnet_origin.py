"""BitLinear and what belongs to it, under the names of bitnet-quantize: its tests first, then what it leaves open."""

import json

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.backend.xp import float_dtype
from kbitcupy.bitnet import BitLinear, BitNetAdapter, BitNetAdapterConfig, BitNetConfig, TernaryWeight, kernels
from kbitcupy.bitnet.layers import (
    dequantize_activations,
    dequantize_weights,
    int8_ste,
    quantize_activations,
    quantize_ste,
    quantize_weights,
    ste_backward,
    ste_forward,
    ternary_ste,
)

PLAIN = BitNetConfig(use_rms_norm=False)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def away(x):
    return np.trunc(x + np.copysign(0.5, x))


# ---- its tests: configuration ----------------------------------------------------------------------------------------


def test_default_config():
    config = BitNetConfig()
    assert (config.group_size, config.activation_bits, config.per_token_activation) == (64, 8, True)
    assert (config.use_rms_norm, config.eps, config.enable_ste) == (True, 1e-5, True)


def test_inference_config():
    assert not BitNetConfig.inference().enable_ste


def test_training_config():
    assert BitNetConfig.training().enable_ste


def test_config_builder():
    config = BitNetConfig().with_group_size(128).with_activation_bits(4).with_per_token_activation(False)
    config = config.with_rms_norm(False).with_ste(False).with_eps(1e-6)
    assert config == BitNetConfig(128, 4, False, False, 1e-6, False)


@pytest.mark.parametrize("size", [0, 65, -64, 1.0, True, "64"])
def test_invalid_group_size(size):
    with pytest.raises(kb.KbitError, match="group_size"):
        BitNetConfig(group_size=size)


@pytest.mark.parametrize("bits", [0, 1, 9, 16, 8.0, True])
def test_invalid_activation_bits(bits):
    with pytest.raises(kb.KbitError, match="activation_bits"):
        BitNetConfig().with_activation_bits(bits)


# ---- its tests: workflow ---------------------------------------------------------------------------------------------


def test_basic_workflow():
    layer = BitLinear.from_weight(normal(64, 128), None, BitNetConfig().with_group_size(64))
    assert layer.forward(normal(4, 128)).shape == (4, 64)
    assert layer.compression_ratio() > 1


def test_quantization_workflow():
    weight = quantize_weights(normal(64, 128), BitNetConfig())
    assert weight.shape == (64, 128)
    assert 0 <= weight.sparsity() <= 1
    assert dequantize_weights(weight).shape == (64, 128)


def test_activation_quantization():
    found = quantize_activations(normal(4, 64), BitNetConfig())
    assert found.shape == (4, 64) and found.scales.shape == (4,)
    assert dequantize_activations(found).shape == (4, 64)


# ---- its tests: weights ----------------------------------------------------------------------------------------------


def test_quantize_weights_basic():
    weight = quantize_weights(normal(64, 128))
    assert weight.trits().shape == (64, 128) and weight.scales.size == 128
    assert (weight.out_features, weight.in_features, weight.group_size) == (64, 128, 64)


def test_dequantize_roundtrip():
    weight = quantize_weights(normal(64, 128))
    back = dequantize_weights(weight)
    assert back.shape == (64, 128) and back.dtype == np.float32
    assert (back == weight.trits() * weight.scales.repeat(64, axis=1)).all()


def test_quantize_preserves_sign():
    w = np.array([[1, -1, 0.5, -0.5], [2, -2, 0.1, -0.1]], np.float32)
    weight = quantize_weights(w, BitNetConfig(group_size=4))
    assert weight.trits().tolist() == [[1, -1, 1, -1], [1, -1, 0, 0]]
    assert weight.scales.reshape(-1).tolist() == [0.75, float(np.float32(4.2) / 4)]


def test_sparsity():
    w = np.array([[1, 0, 0, 0], [0, -1, 0, 0]], np.float32)
    assert quantize_weights(w, BitNetConfig(group_size=4)).sparsity() == 0.75


def test_compression_ratio():
    weight = quantize_weights(normal(1024, 4096))
    assert weight.compression_ratio() == 12.8
    assert weight.memory_bytes() == 1024 * 128 * 8 + 4 * 1024 * 64


def test_invalid_weight_shape():
    """A layer is of a matrix; weights of any rank from 1 on are quantized, where the origin refuses them."""
    for shape in ((64,), (2, 64, 64)):
        with pytest.raises(ValueError, match=r"\[out, in\]"):
            BitLinear.from_weight(np.zeros(shape, np.float32))
        assert quantize_weights(np.ones(shape, np.float32)).trits().shape == shape
    with pytest.raises(ValueError, match="no axes"):
        quantize_weights(np.float32(1))


def test_indivisible_group_size():
    """The origin refuses it; here the last group of a row is short."""
    w = normal(32, 100)
    weight = quantize_weights(w)
    assert weight.scales.shape == (32, 2)
    mean = np.abs(w[:, 64:].astype(np.float64)).mean(axis=1).astype(np.float32)
    assert (weight.scales[:, 1] == mean).all()
    assert (weight.trits()[:, 64:] == np.clip(away(w[:, 64:] / mean[:, None]), -1, 1)).all()


# ---- its tests: activations ------------------------------------------------------------------------------------------


def test_quantize_2d():
    found = quantize_activations(normal(4, 128))
    assert found.data.shape == (4, 128) and found.scales.size == 4
    assert (found.batch_size, found.seq_len, found.hidden_dim, found.numel) == (4, 1, 128, 512)


def test_quantize_3d():
    found = quantize_activations(normal(2, 16, 128))
    assert found.data.shape == (2, 16, 128) and found.scales.size == 32
    assert (found.batch_size, found.seq_len, found.hidden_dim, found.numel) == (2, 16, 128, 4096)


def test_activation_dequantize_roundtrip():
    x = normal(4, 128)
    back = dequantize_activations(quantize_activations(x))
    assert back.shape == (4, 128) and np.abs(back - x).max() < 0.02


def test_quantization_range():
    data = quantize_activations(((np.arange(64) - 32) / 10).astype(np.float32)[None]).data
    assert data.min() == -127 and data.max() <= 127


def test_ste_passthrough():
    x = normal(2, 64)
    y = quantize_ste(x, BitNetConfig.training())
    assert y.shape == x.shape and np.abs(x - y).max() < 0.1


def test_zero_activations():
    found = quantize_activations(np.zeros((4, 64), np.float32))
    assert not found.data.any() and (found.scales == 1).all()


def test_any_activation_shape():
    """The origin refuses one axis and four."""
    assert quantize_activations(normal(64)).scales.shape == (1,)
    found = quantize_activations(normal(2, 4, 8, 16))
    assert found.scales.shape == (64,) and (found.batch_size, found.seq_len) == (8, 8)
    with pytest.raises(ValueError, match="no axes"):
        quantize_activations(np.float32(1))


# ---- its tests: straight through -------------------------------------------------------------------------------------


def test_ternary_ste():
    assert ternary_ste(np.array([-2, -0.5, 0, 0.5, 2], np.float32), 1.0).tolist() == [-1, -1, 0, 1, 1]


def test_int8_ste():
    assert int8_ste(np.array([-200, -50, 0, 50, 200], np.float32), 1.0).tolist() == [-127, -50, 0, 50, 127]


def test_ste_with_scale():
    assert ternary_ste(np.array([0.5, 1, 1.5, 2], np.float32), 2.0).tolist() == [0, 2, 2, 2]


def test_ste_backward_identity():
    assert ste_backward(np.array([1, 2, 3], np.float32)).tolist() == [1, 2, 3]


# ---- its tests: layers and kernels -----------------------------------------------------------------------------------


def test_bitlinear_creation():
    layer = BitLinear.from_weight(normal(128, 256))
    assert (layer.in_features, layer.out_features, layer.bias, layer.device) == (256, 128, None, "cpu")


@pytest.mark.parametrize("shape", [(128,), (4, 128), (2, 16, 128), (2, 3, 4, 128), (0, 128)])
def test_bitlinear_forward(shape):
    layer = BitLinear.from_weight(normal(64, 128))
    assert layer(normal(*shape)).shape == (*shape[:-1], 64)


def test_bitlinear_forward_quantized():
    layer, x = BitLinear.from_weight(normal(64, 128), None, PLAIN), normal(2, 16, 128)
    y = layer.forward_quantized(x)
    assert y.shape == (2, 16, 64) and (y == layer.forward_quantized(quantize_activations(x))).all()


def test_bitlinear_with_bias():
    bias, x = normal(64, seed=1), normal(4, 128)
    with_bias, without = (BitLinear.from_weight(normal(64, 128), b) for b in (bias, None))
    assert with_bias(x).shape == (4, 64) and (with_bias(x) == without(x) + bias).all()


def test_bitlinear_sparsity():
    assert 0.2 < BitLinear.from_weight(normal(64, 128)).sparsity() < 0.4


def test_bitlinear_compression():
    assert BitLinear.from_weight(normal(1024, 4096)).compression_ratio() == 12.8


def test_pack_unpack_ternary():
    trits = np.int8([[1, 0, -1, 1, 0, -1, 0, 1, -1, 0, 1, -1, 0, 0, 1, -1]])
    packed = kernels.pack_ternary_weights(trits)
    codes = [1, 0, 2, 1, 0, 2, 0, 1, 2, 0, 1, 2, 0, 0, 1, 2]
    assert packed.shape == (1, 1) and int(packed[0, 0]) == sum(code << 2 * i for i, code in enumerate(codes))
    assert (kernels.unpack_ternary_weights(packed, 16) == trits).all()


def test_ternary_dequantize():
    found = kernels.ternary_dequantize(np.int8([[1, 0], [-1, 1]]), np.float32([2, 0.5]))
    assert found.tolist() == [[2, 0], [-0.5, 0.5]]


# ---- what its options mean -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("granularity", [("group", 4), ("group", 10), ("channel", 0), "tensor"])
@pytest.mark.parametrize("rounding", ["away", "even"])
def test_trits_are_exact_quotients(xp, rounding, granularity, dtype):
    """Many weights lie at half of their mean: groups of few whole numbers."""
    w = np.random.default_rng(3).integers(-9, 10, (64, 32)).astype(dtype)
    w[5] = 0
    w[6] *= 2.0**-24
    weight = quantize_weights(xp.asarray(w), granularity=granularity, rounding=rounding)
    single, gamma, trits = w.astype(np.float32), np.empty(w.shape, np.float32), np.empty(w.shape)
    step = granularity[1] if granularity[0] == "group" else 32
    for rows in [slice(0, 64)] if granularity == "tensor" else [slice(i, i + 1) for i in range(64)]:
        for first in range(0, 32, step):
            part = rows, slice(first, first + step)
            gamma[part] = np.abs(single[part]).mean(dtype=np.float64).astype(np.float32) or 1
            quotient = single[part] / gamma[part]
            trits[part] = np.clip(away(quotient) if rounding == "away" else np.rint(quotient), -1, 1)
    assert step == 32 or (2 * np.abs(single) == gamma).sum() > 20
    assert (host(weight.trits()) == trits).all()
    assert (host(weight.dequantize()) == (trits * gamma).astype(dtype)).all()
    assert host(weight.scales).tolist() == (gamma[:, ::step].tolist() if granularity != "tensor" else [gamma[0, 0]])


def test_groups_of_the_configuration():
    w = normal(3, 64)
    found = quantize_weights(w, BitNetConfig(group_size=16))
    assert found.group_size == 16 and found.scales.shape == (3, 4)
    assert quantize_weights(w, granularity=("channel", 0)).group_size == 64
    assert quantize_weights(w, granularity="tensor").group_size == 192
    for granularity, size in (("tensor", 256), (("channel", 0), 64), (("group", 32), 32)):
        member = kb.quantize(normal(4, 64), "ternary", granularity=granularity)
        assert TernaryWeight(kb.stack([member, member, member])).group_size == size


def test_weights_that_are_no_numbers():
    w = np.array([[np.nan, np.inf, 1.0, -1e-40], [3e-45, -3e-45, 1e-45, 0]], np.float32)
    weight = quantize_weights(w, BitNetConfig(group_size=4))
    assert weight.trits().tolist() == [[0, 1, 0, 0], [1, -1, 1, 0]]
    assert weight.scales.reshape(-1).tolist() == [np.finfo(np.float32).max / 4, float(np.float32(1.4e-45))]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("each", [True, False])
def test_activation_codes(xp, bits, each):
    x = normal(7, 96)
    x[2] = 0
    x[3] *= 1e-39  # the scale would be under 2^-125
    x[4, :3] = np.nan, np.inf, -1
    x[5] = np.rint(x[5]) / 2  # halves
    x[5, 0] = 2 ** (bits - 1) - 1
    found = quantize_activations(xp.asarray(x), BitNetConfig(activation_bits=bits, per_token_activation=each))
    highest = np.float32(2 ** (bits - 1) - 1)
    finite = np.nan_to_num(x, posinf=np.finfo(np.float32).max)
    a = np.abs(finite).max(axis=1, keepdims=True) if each else np.abs(finite).max(keepdims=True)
    scale = a / highest
    scale[scale < 2.0**-125] = 1
    with np.errstate(under="ignore"):
        codes = np.clip(away(finite.astype(np.float64) / scale), -highest, highest)
    assert (host(found.scales) == scale.reshape(-1)).all()
    assert (host(found.data) == codes).all() and found.data.dtype == np.int8
    if each:
        assert (host(found.data)[5, 0], host(found.scales)[5], host(found.scales)[3]) == (highest, 1, 1)


def test_a_scale_for_all_tokens():
    found = quantize_activations(normal(2, 3, 8), BitNetConfig(per_token_activation=False))
    assert found.scales.shape == (1,) and not found.per_token
    layer = BitLinear.from_weight(normal(4, 8), None, PLAIN.with_per_token_activation(False))
    x = normal(3, 8)
    x[0] *= 1e-4
    assert not layer(x)[0].any()  # the other tokens' scale leaves nothing of it
    assert BitLinear.from_weight(normal(4, 8), None, PLAIN)(x)[0].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("config", [BitNetConfig(eps=0.1), PLAIN, PLAIN.with_activation_bits(4).with_group_size(16)])
def test_forward_is_what_the_options_say(xp, config, dtype):
    dtype = float_dtype(dtype)
    x, w, bias = normal(5, 100).astype(dtype), normal(24, 100, seed=1), normal(24, seed=2)
    layer = BitLinear.from_weight(xp.asarray(w), xp.asarray(bias), config)
    z = x.astype(np.float64)
    if config.use_rms_norm:
        z /= np.sqrt((z * z).mean(axis=1, keepdims=True) + config.eps)
    seen = quantize_activations(z.astype(np.float32), config)
    wh = host(layer.quantized_weight.dequantize()).astype(np.float64)
    wanted = (seen.data * seen.scales[:, None].astype(np.float64)) @ wh.T + bias
    y = layer(xp.asarray(x))
    close = {"float16": 1e-2, "bfloat16": 1e-1}.get(dtype.name, 1e-4)
    assert y.dtype == dtype and np.allclose(host(y).astype(np.float64), wanted, atol=close)
    floats = host(layer(xp.asarray(x), activations="float")).astype(np.float64)
    assert np.allclose(floats, z @ wh.T + bias, atol=close)
    assert not np.allclose(floats, wanted, atol=1e-3 if dtype.itemsize > 2 else 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "config", [BitNetConfig(), PLAIN.with_activation_bits(5), BitNetConfig(32).with_per_token_activation(False)]
)
@pytest.mark.parametrize("granularity", [None, ("channel", 0), "tensor"])
def test_layers_have_the_same_bits_on_a_gpu(cupy, granularity, config, dtype):
    x, w, bias = normal(9, 200).astype(dtype), normal(33, 200, seed=1), normal(33, seed=2)
    x[0] *= 1e-7
    layers = [
        BitLinear.from_weight(xp.asarray(w), xp.asarray(bias), config, granularity=granularity) for xp in (np, cupy)
    ]
    for name, plane in layers[0].quantized_weight.array.planes.items():
        assert (layers[1].quantized_weight.array.planes[name].get() == plane).all()
    y, there = layers[0](x), layers[1](cupy.asarray(x)).get()
    assert y.dtype == there.dtype == dtype and (y == there).all()


@pytest.mark.parametrize("granularity", [None, ("channel", 0), "tensor"])
def test_layers_without_columns_or_rows(xp, granularity):
    bias = np.float32([1, 2, 3])
    layer = BitLinear.from_weight(xp.zeros((3, 0), np.float32), xp.asarray(bias), granularity=granularity)
    assert host(layer(xp.zeros((2, 0), np.float32))).tolist() == [[1, 2, 3]] * 2
    assert [part.shape for part in layer.backward(xp.zeros((2, 3)), xp.zeros((2, 0)))] == [(2, 0), (3, 0), (3,)]
    assert BitLinear.from_weight(xp.zeros((0, 64), np.float32))(xp.zeros((2, 64), np.float32)).shape == (2, 0)


def test_layers_take_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    layer = BitLinear.from_weight(torch.from_numpy(normal(8, 64)))
    x, dy = torch.from_numpy(normal(3, 64)), torch.from_numpy(normal(3, 8))
    adapter = BitNetAdapter(layer)
    assert (layer(x).numpy() == layer(x.numpy())).all() and (adapter(x, dy) == layer(x) + dy).all()
    for part, array in zip(adapter.backward(dy, x), layer.backward(dy.numpy(), x.numpy()), strict=True):
        assert isinstance(part, torch.Tensor) and (part.numpy() == array).all()
    adapter.freeze()
    assert adapter.backward(dy, x)[1] is None
    assert layer(x.to(torch.bfloat16)).dtype == torch.bfloat16
    y = ternary_ste(x, 0.5)
    assert isinstance(y, torch.Tensor) and isinstance(quantize_ste(x), torch.Tensor)


def test_frozen_layers_have_no_gradients():
    layer, x, dy = BitLinear.from_weight(normal(8, 16)), normal(3, 16), normal(3, 8)
    assert not layer.is_frozen and layer.freeze().is_frozen and (layer.freeze()(x) == layer(x)).all()
    assert [g.shape for g in layer.backward(dy, x)] == [(3, 16), (8, 16), (8,)]
    with pytest.raises(kb.KbitError, match="inference"):
        layer.freeze().backward(dy, x)
    with pytest.raises(kb.KbitError, match="inference"):
        BitLinear.from_weight(normal(8, 16), None, BitNetConfig.inference()).backward(dy, x)


def test_backward_is_that_of_the_surrogate():
    """Against the formulas, at the quantized activations and weights, by the layer's own rule."""
    w, x, dy = normal(8, 64), normal(3, 64, seed=1), normal(3, 8, seed=2)
    layer = BitLinear.from_weight(w, None, PLAIN.with_activation_bits(3))
    dx, dw, db = layer.backward(dy, x)
    xh = quantize_activations(x, layer.config).dequantize()
    assert np.allclose(dx, dy @ layer.quantized_weight.dequantize(), atol=1e-5)
    assert np.allclose(dw, dy.T @ xh, atol=1e-5) and np.allclose(db, dy.sum(axis=0), atol=1e-5)
    ratio = np.abs(w) / layer.quantized_weight.scales
    for mask, passes in (("inclusive", ratio < 1.5), ("strict", ratio < 0.5)):
        assert (layer.backward(dy, x, w, mask=mask)[1] == dw * passes).all() and 0.2 < passes.mean() < 0.95


def test_from_quantized(xp):
    q = kb.bitnet.from_trits(xp.asarray(np.int8([[1, 0, -1], [0, 1, 1]])), 0.5)
    layer = BitLinear.from_quantized(q, xp.asarray(np.float32([1, 2])), PLAIN, device="cpu")
    x = np.array([[127, 1, 2]], np.float32)
    assert layer.device == "cpu" and layer(x).tolist() == [[63.5, 3.5]]
    assert layer.quantized_weight.group_size == 6
    assert BitLinear.from_quantized(TernaryWeight(q)).quantized_weight.array is q


def test_bit_planes():
    weight = quantize_weights(np.array([[1, -1] * 20], np.float32))
    plus, minus = weight.bit_planes()
    assert plus.tolist() == [[0x55555555, 0x55]] and minus.tolist() == [[0xAAAAAAAA, 0xAA]]


def test_configurations_are_json():
    config = BitNetConfig(128, 4, False, False, 1e-6, False)
    assert BitNetConfig.from_json(config.to_json()) == config
    assert BitNetConfig.from_json("{}") == BitNetConfig()
    adapters = BitNetAdapterConfig(config).with_target_modules(["up_proj"])
    assert BitNetAdapterConfig.from_json(adapters.to_json()) == adapters
    assert json.loads(adapters.to_json())["bitnet"]["group_size"] == 128
    for text, message in (("{", "no JSON"), ("[]", "object"), ('{"group": 1}', "no option"), ('{"eps": 0}', "eps")):
        with pytest.raises(kb.KbitError, match=message):
            BitNetConfig.from_json(text)


@pytest.mark.parametrize(
    ("option", "value"),
    [("eps", 0), ("eps", -1.0), ("eps", float("nan")), ("eps", "1"), ("use_rms_norm", 1), ("enable_ste", None)],
)
def test_options_that_are_not_allowed(option, value):
    with pytest.raises(kb.KbitError, match=option):
        BitNetConfig(**{option: value})
    with pytest.raises(AttributeError):
        setattr(BitNetConfig(), option, value)


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_adapter_config():
    config = BitNetAdapterConfig()
    assert config.bitnet == BitNetConfig()
    assert config.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert config.matches("model.layers.3.mlp.down_proj") and not config.matches("model.embed_tokens")
    with pytest.raises(kb.KbitError, match="target_modules"):
        config.with_target_modules("q_proj")


def test_adapter_adds_and_freezes():
    adapter = BitNetAdapter(BitLinear.from_weight(normal(64, 128)))
    x, base, dy = normal(4, 128), normal(4, 64, seed=1), normal(4, 64, seed=2)
    assert adapter.num_parameters() == 8192 and adapter.compression_ratio() > 8 and not adapter.is_frozen
    assert (adapter(x) == adapter.layer(x)).all() and (adapter(x, base) == adapter.layer(x) + base).all()
    before = adapter.backward(dy, x)
    adapter.freeze()
    frozen = adapter.backward(dy, x)
    assert adapter.is_frozen and (frozen[0] == before[0]).all() and frozen[1:] == (None, None)
    adapter.unfreeze()
    assert (adapter.backward(dy, x)[1] == before[1]).all()
    with pytest.raises(ValueError, match="base_output"):
        adapter(x, base[:, :1])


# ---- kernels ---------------------------------------------------------------------------------------------------------


def test_row_kernels(xp):
    w, x = normal(6, 40), normal(3, 40, seed=1)
    w[2] = 0
    trits, scales = kernels.absmean_quantize(xp.asarray(w))
    mean = np.abs(w).mean(axis=1, dtype=np.float64).astype(np.float32)
    assert (host(scales) == mean).all() and host(scales)[2] == 0
    dense = host(kernels.ternary_dequantize(trits, scales))
    wanted = x @ dense.T
    packed = kernels.pack_ternary_weights(trits)
    assert packed.shape == (6, 3) and (kernels.unpack_ternary_weights(packed, 40) == trits).all()
    x = xp.asarray(x)
    for y in (
        kernels.ternary_matmul_raw(x, trits, scales),
        kernels.packed_ternary_matmul(x, packed, scales, 40),
        kernels.ternary_matmul(x, TernaryWeight(kb.bitnet.from_trits(trits, scales, granularity=("channel", 0)))),
    ):
        assert np.allclose(host(y), wanted, atol=1e-5)
    g, b = normal(40, seed=2), normal(40, seed=3)
    z = host(x).astype(np.float64)
    z = (z - z.mean(axis=1, keepdims=True)) / np.sqrt(z.var(axis=1, keepdims=True) + 1e-5) * g + b
    y = kernels.bitlinear_forward(x, xp.asarray(w), xp.asarray(g), xp.asarray(b))
    assert np.allclose(host(y), z @ dense.T, atol=1e-4)


def test_should_use_gpu():
    assert not kernels.should_use_gpu(np.ones((1, 256)), np.ones((1, 256)))
    assert kernels.should_use_gpu(np.ones((1, 256)), np.ones((2, 256))) == kernels.cuda_available()


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["tq1_0", "tq2_0"])
@pytest.mark.parametrize("granularity", [("group", 256), ("group", 512), ("channel", 0), "tensor"])
def test_exported_layers_are_read_by_gguf_py(tmp_path, granularity, format):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[peers]'")
    layer = BitLinear.from_weight(normal(8, 1024), normal(8, seed=1), granularity=granularity)
    kb.bitnet.export_gguf(layer, tmp_path / "layer.gguf", "blk.0.attn_q.weight", format=format)
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "layer.gguf").tensors}
    weight = there["blk.0.attn_q.weight"]
    assert weight.tensor_type.name == format.upper() and weight.shape.tolist() == [1024, 8]
    decoded = gguf.quants.dequantize(weight.data, weight.tensor_type).reshape(8, 1024)
    trits, scales = layer.quantized_weight.trits(), layer.quantized_weight.scales
    assert (np.sign(decoded) == trits).all()
    halves = scales.astype(np.float16).astype(np.float32)
    each = halves.repeat(1024 // halves.shape[1], axis=1) if halves.ndim == 2 else halves
    assert (decoded == trits * each).all()
    assert (there["blk.0.attn_q.bias"].data == layer.bias).all()
    assert ("blk.0.attn_q.scale" in there) == (granularity == "tensor")
    if granularity == "tensor":
        exact = halves * there["blk.0.attn_q.scale"].data
        assert np.allclose(exact, scales, rtol=2.0**-23)


def test_what_cannot_be_exported(tmp_path):
    path = tmp_path / "layer.gguf"
    with pytest.raises(ValueError, match="group_size=256"):
        kb.bitnet.export_gguf(BitLinear.from_weight(normal(4, 256)), path, "a.weight")
    with pytest.raises(ValueError, match="columns"):
        kb.bitnet.export_gguf(BitLinear.from_weight(normal(4, 64), granularity="tensor"), path, "a.weight")
    with pytest.raises(ValueError, match="q4_0"):
        kb.bitnet.export_gguf(BitLinear.from_weight(normal(4, 256)), path, "a.weight", format="q4_0")
    with pytest.raises(TypeError, match="BitLinear"):
        kb.bitnet.export_gguf(normal(4, 256), path, "a.weight")
    assert not path.exists()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BitLinear.from_weight(normal(4, 8), normal(5)), ValueError, "bias"),
        (lambda: BitLinear.from_weight(normal(4, 8))(normal(2, 9)), ValueError, "x has shape"),
        (lambda: BitLinear.from_weight(normal(4, 8))(normal(2, 8), activations="int4"), ValueError, "activations"),
        (lambda: BitLinear.from_weight(normal(4, 8), config={}), TypeError, "config"),
        (lambda: BitLinear(kb.quantize(normal(4, 8), "ternary")), TypeError, "weight"),
        (lambda: TernaryWeight(kb.quantize(normal(4, 8), "kbit4")), ValueError, "ternary"),
        (lambda: TernaryWeight(normal(4, 8)), TypeError, "array"),
        (lambda: quantize_weights(np.ones((4, 8), int)), TypeError, "W"),
        (lambda: quantize_activations(np.ones(8, int)), TypeError, "x"),
        (lambda: ste_forward(normal(4), 0.0, -1, 1), ValueError, "scale"),
        (lambda: ste_forward(normal(4), normal(3) ** 2, -1, 1), ValueError, "scale|broadcast"),
        (lambda: ste_forward(normal(4), 1.0, 1, -1), ValueError, "range"),
        (lambda: BitNetAdapter(normal(4, 4)), TypeError, "layer"),
        (lambda: kernels.absmean_quantize(normal(4)), ValueError, "W"),
        (lambda: kernels.unpack_ternary_weights(np.uint32([1]), 4), ValueError, "packed"),
        (lambda: kernels.ternary_matmul_raw(normal(1, 4), np.int8([1, 0, 1, 0]), 1.0), ValueError, "trits"),
        (lambda: kernels.bitlinear_forward(normal(1, 4), normal(2, 3), normal(4)), ValueError, "x has shape"),
        (lambda: kernels.bitlinear_forward(normal(1, 4), normal(2, 4), normal(4), eps=-1), ValueError, "eps"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
