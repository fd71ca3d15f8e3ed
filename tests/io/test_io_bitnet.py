"""BitNet's files: transformers' checkpoints, GGUF's ternary types with a scale beside them, and bitnet.cpp's I2_S."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.io.bitnet import is_linear, scale_of_ternary
from kbitcupy.io.container import Entry
from kbitcupy.io.gguf import GGUF
from kbitcupy.io.layouts import trits
from kbitcupy.io.layouts.bitnet import BitnetCppLayout, BitnetLayout
from kbitcupy.io.layouts.gguf import GgufLayout

#: What transformers packs and computes, see ``make_bitnet_data.py``.
THEIRS = np.load(Path(__file__).parent.parent / "data" / "bitnet_transformers.npz")
#: -1 0 1 -1 ... under .75, the example of which the bytes are known by heart.
EXAMPLE = (np.arange(512) % 3 - 1).astype(np.int8)

WIDTH, INNER, HEADS, HEADS_KV, LAYERS, VOCABULARY = 256, 512, 4, 2, 1, 40
CONFIG = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def ternary(t, scale, shape=None, **options):
    """An array of the format from trits and one scale for all."""
    x = (np.asarray(t, np.float32) * np.float32(scale)).reshape(shape or np.shape(t))
    return kb.quantize(x, "ternary", rule="absmax", **options)


def codes(q):
    return np.asarray(q.planes["codes"])


def model(dtype="float32", bitnet=True, head=False):
    rng = np.random.default_rng(3)
    at = "model.layers.0."
    shapes = {f"{at}self_attn.{n}_proj": (WIDTH // 2 if n in "kv" else WIDTH, WIDTH) for n in "qkvo"}
    shapes |= {f"{at}mlp.{n}_proj": (INNER, WIDTH) for n in ("gate", "up")} | {f"{at}mlp.down_proj": (WIDTH, INNER)}
    shapes |= {f"{at}{n}_layernorm": (WIDTH,) for n in ("input", "post_attention")}
    if bitnet:
        shapes |= {f"{at}self_attn.attn_sub_norm": (WIDTH,), f"{at}mlp.ffn_sub_norm": (INNER,)}
    shapes |= {"model.embed_tokens": (VOCABULARY, WIDTH), "model.norm": (WIDTH,)}
    if head:
        shapes["lm_head"] = (VOCABULARY, WIDTH)
    found = {f"{name}.weight": rng.standard_normal(shape) * 0.05 for name, shape in shapes.items()}
    return {name: x.astype(np.float32).astype(dtype) for name, x in found.items()}


def folder(path, tensors, config, **about):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, **about}))
    kb.io.save(path / "model.safetensors", tensors)
    return path


def linears(names):
    return sorted(name for name in names if name.endswith("_proj.weight"))


def packed_folder(path, about=None, **tensors):
    """A checkpoint as transformers writes it, of one layer."""
    found = {"layer.weight": THEIRS["packed"], "layer.weight_scale": THEIRS["divides"], **tensors}
    about = {"quant_method": "bitnet"} if about is None else about
    return folder(path, {name: x for name, x in found.items() if x is not None}, CONFIG, quantization_config=about)


def ulps(a, b):
    return (np.abs(a - b) / np.spacing(np.maximum(np.maximum(np.abs(a), np.abs(b)), np.float32(1e-30)))).max()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_the_example_in_every_layout(tmp_path):
    q = ternary(EXAMPLE, 0.75, (2, 256))
    assert codes(q)[:4].tobytes().hex() == "18618618"
    blocks, factor = trits.to_blocks("q", q, "tq2_0")
    assert blocks.tobytes()[:4].hex() == "18618618" and blocks.tobytes()[64:66].hex() == "003a" and factor == [1.0]
    blocks, factor = trits.to_blocks("q", q, "tq1_0")
    assert blocks.tobytes()[:4].hex() == "456ccf45" and blocks.tobytes()[48:52].hex() == "3092bb30"
    assert blocks.tobytes()[52:54].hex() == "003a" and len(blocks) == 2 * 54
    i2_s = trits.to_i2_s("q", q).tobytes()
    assert i2_s[:4].hex() == "24499224" and i2_s[128:132].hex() == "0000403f" and i2_s[132:] == bytes(28)
    column = np.array([[-1], [1], [0], [1], [0], [-1], [1], [0]], np.int8)
    assert trits.to_transformers(column.reshape(-1), (8, 1)).tobytes().hex() == "944a"


@pytest.mark.parametrize("seed", range(3))
def test_every_layout_keeps_all_trits(seed):
    rng = np.random.default_rng(seed)
    t = rng.integers(-1, 2, (8 + 4 * seed, 512)).astype(np.int8)
    t[0] = 0
    q = ternary(t, rng.uniform(0.01, 2))
    assert np.array_equal(trits.from_transformers("q", trits.to_transformers(trits.trits_of("q", q), q.shape)), t)
    packed = {"transformers": trits.to_transformers(trits.trits_of("q", q), q.shape), "i2_s": trits.to_i2_s("q", q)}
    packed |= {type: trits.to_blocks("q", q, type)[0] for type in trits.TYPES}
    for layout, found in packed.items():  # kb.bitnet has an own packer
        wanted = kb.bitnet.pack(q, layout)
        if layout in trits.TYPES:  # ... where the scale's half has no part beside it
            size = len(found) * 256 // q.size
            wanted, found = (x.reshape(-1, size)[:, :-2] for x in (wanted, found))
        assert np.array_equal(found.reshape(-1), np.asarray(wanted).reshape(-1)), layout
    again = trits.from_i2_s("q", trits.to_i2_s("q", q), q.size)
    assert np.array_equal(again["codes"], codes(q)) and again["scale"] == q.planes["scale"]
    for type in trits.TYPES:
        found = trits.from_blocks("q", trits.to_blocks("q", q, type)[0], type, trits.to_blocks("q", q, type)[1])
        assert np.array_equal(found["codes"], codes(q)), type
        assert ulps(found["scale"], q.planes["scale"]) <= 1


@pytest.mark.parametrize("scale", [1e-42, 3e-8, 1e-5, 0.016, 1.56, 7e4, 3e38, 0.0])
def test_a_scale_that_no_half_has(scale):
    """It is that of the array but for the last bit, and without the tensor beside it as near as a half can be."""
    q = kb.quantize(EXAMPLE.astype(np.float32).reshape(2, 256), "ternary", scale=scale)
    blocks, factor = trits.to_blocks("q", q, "tq2_0")
    found = trits.from_blocks("q", blocks, "tq2_0", factor)["scale"]
    assert np.abs(found - np.float32(scale)).max() <= np.spacing(np.float32(scale))
    bare = blocks.reshape(2, 66)[:, 64:].copy().view(np.float16).astype(np.float64)
    if 1e-4 < scale < 6e4:
        assert np.abs(bare / np.float32(scale) - 1).max() < 5e-4


def test_scales_of_rows_and_groups_are_rounded_to_halves(tmp_path):
    x = (
        np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
        * np.arange(1, 7, dtype=np.float32)[:, None]
    )
    for options in ({"granularity": ("channel", 0)}, {"block": 256}, {"block": 512}):
        q = kb.quantize(x, "ternary", **options)
        kb.io.save(tmp_path / "a.gguf", {"a.weight": q}, force=True)
        again = kb.io.load(tmp_path / "a.gguf")["a.weight"]
        assert again.format == kb.get_format("ternary:block=256") and np.array_equal(codes(again), codes(q))
        assert np.allclose(again.dequantize(), q.dequantize(), rtol=2.0**-11, atol=0)
    for options in ({"block": 128}, {"block": 384}):
        with pytest.raises(FileError, match=r"'a\.weight' has a scale for .* granularity='tensor'"):
            kb.io.save(tmp_path / "b.gguf", {"a.weight": kb.quantize(x, "ternary", **options)})
    with pytest.raises(FileError, match=r"'a\.weight' of shape .*whole blocks of 256"):
        kb.io.save(tmp_path / "b.gguf", {"a.weight": kb.quantize(x[:, :384], "ternary")})
    assert not (tmp_path / "b.gguf").exists()


@pytest.mark.parametrize("scale", [(), (1,), (3,)])
@pytest.mark.parametrize("type", trits.TYPES)
def test_gguf_types_are_multiplied_by_what_stands_beside_them(tmp_path, type, scale):
    x = np.random.default_rng(1).integers(-1, 2, (3, 2, 512)).astype(np.float32)
    factor = np.linspace(0.5, 1.5, 3, dtype=np.float32)[: 3 if scale == (3,) else 1]
    q = kb.quantize(x, type)
    kb.io.save(tmp_path / "a.gguf", {"a.weight": q, "a.scale": factor.reshape(scale)})
    found = kb.io.load(tmp_path / "a.gguf")
    assert list(found) == ["a.weight"] and found["a.weight"].format.name == "ternary"
    assert np.array_equal(found["a.weight"].dequantize(), q.dequantize() * factor.reshape(-1, 1, 1))
    kb.io.save(tmp_path / "plain.gguf", {"a.weight": q})
    assert kb.io.load(tmp_path / "plain.gguf")["a.weight"].format.name == type


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.ones(2, np.float32), r"'a\.scale' is float32\[2\], no scale of 'a\.weight'"),
        (np.ones(1, np.float16), r"'a\.scale' is float16\[1\], no scale"),
        (np.full(1, np.nan, np.float32), "has the scale nan"),
        (np.full(1, -1, np.float32), "has the scale -2"),
        (np.full(1, 3e38, np.float32), "has the scale inf"),
    ],
)
@pytest.mark.parametrize("type", trits.TYPES)
def test_hostile_scales_beside_blocks_are_refused(tmp_path, type, scale, message):
    kb.io.save(tmp_path / "a.gguf", {"a.weight": kb.quantize(np.full((3, 256), 2, np.float32), type), "a.scale": scale})
    with pytest.raises(FileError, match=message):
        kb.io.load(tmp_path / "a.gguf")["a.weight"]
    with pytest.raises(FileError, match=message):
        kb.io.dequantize_file(tmp_path / "a.gguf", tmp_path / "b.safetensors", device="cpu")
    assert not (tmp_path / "b.safetensors").exists()


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["divides", "multiplies"])
def test_what_transformers_packs_and_computes(tmp_path, convention):
    about = {"quant_method": "bitnet", "linear_class": "autobitlinear" if convention == "multiplies" else "bitlinear"}
    source = packed_folder(tmp_path / "a", about, **{"layer.weight_scale": THEIRS[convention]})
    q = kb.io.load(source)["layer.weight"]
    assert q.format == kb.get_format("ternary") and q.shape == (24, 256)
    assert np.array_equal(trits.trits_of("q", q).reshape(q.shape), THEIRS["trits"])
    assert ulps(q.dequantize(), THEIRS["online"]) <= 2
    wanted = THEIRS[f"{convention}_y"]
    if convention == "divides":
        assert ulps(kb.bitnet.linear(THEIRS["x"], q), wanted) <= 4
    else:  # which adds up what it has divided by the scale of activations
        assert np.abs(kb.bitnet.linear(THEIRS["x"], q) - wanted).max() <= 1e-6 * np.abs(wanted).max()
    # And ours of the same weights has the same bytes.
    written = BitnetLayout(weight_scale=convention).arrays("layer.weight", kb.quantize(THEIRS["weight"], "ternary"))
    assert np.array_equal(written["layer.weight"], THEIRS["packed"])
    assert ulps(written["layer.weight_scale"], THEIRS[convention]) <= 1


def test_weight_scale_says_it_where_the_configuration_does_not(tmp_path, capsys):
    source = packed_folder(tmp_path / "a")
    scale = float(THEIRS["divides"][0])
    assert kb.io.load(source)["layer.weight"].planes["scale"][0] == np.float32(1 / np.float32(scale))
    other = kb.io.load(source, weight_scale="multiplies")["layer.weight"]
    assert other.planes["scale"][0] == np.float32(scale)
    kb.io.dequantize_file(source, tmp_path / "b", weight_scale="multiplies", device="cpu")
    assert np.array_equal(kb.io.load(tmp_path / "b")["layer.weight"], other.dequantize())
    command = ["dequantize", str(source), "-o", str(tmp_path / "c"), "--weight-scale", "multiplies", "--device", "cpu"]
    assert main(command) == 0
    assert np.array_equal(kb.io.load(tmp_path / "c")["layer.weight"], other.dequantize())
    with pytest.raises(ValueError, match="weight_scale is 'times'"):
        kb.io.load(source, weight_scale="times")
    unknown = packed_folder(tmp_path / "u", {"quant_method": "bitnet", "linear_class": "bittern"})
    with pytest.raises(FileError, match="linear_class is 'bittern'"):
        kb.io.load(unknown)
    assert kb.io.load(unknown, weight_scale="divides")["layer.weight"].format.name == "ternary"


def test_without_bitnet_in_the_configuration_bytes_are_bytes(tmp_path):
    source = packed_folder(tmp_path / "a", {"quant_method": "other"})
    assert kb.io.load(source)["layer.weight"].dtype == np.uint8
    (source / "config.json").unlink()
    assert kb.io.load(source)["layer.weight"].dtype == np.uint8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer.weight_scale": None}, "'layer.weight' lacks its scale"),
        ({"layer.weight_scale": np.ones(2, np.float32)}, r"'layer\.weight_scale' is float32\[2\]"),
        ({"layer.weight_scale": np.ones(1, np.int8)}, r"'layer\.weight_scale' is int8"),
        ({"layer.weight_scale": np.zeros(1, np.float32)}, "must be a positive number"),
        ({"layer.weight_scale": np.full(1, np.nan, np.float32)}, "must be a positive number"),
        ({"layer.weight_scale": np.full(1, -1, np.float32)}, "must be a positive number"),
        ({"layer.weight_scale": np.full(1, 1e-45, np.float32)}, "whose inverse"),
        ({"layer.weight": np.full((6, 256), 0b00110000, np.uint8)}, "has a code 3"),
    ],
)
def test_hostile_checkpoints_are_refused(tmp_path, change, message):
    source = packed_folder(tmp_path / "a", **change)
    with pytest.raises(FileError, match=message):
        kb.io.load(source)["layer.weight"]
    with pytest.raises(FileError, match=message):
        kb.io.dequantize_file(source, tmp_path / "b", device="cpu")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_a_folder_for_transformers(tmp_path, dtype, linear_class, capsys):
    weights = model(np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else dtype)
    about = {"quantization_config": {"quant_method": "bitnet", "linear_class": linear_class, "use_rms_norm": False}}
    source = folder(tmp_path / "hf", weights, CONFIG, **(about if linear_class == "autobitlinear" else {}))
    command = ["quantize", str(source), "-o", str(tmp_path / "out"), "--layout", "bitnet", "--format", "ternary"]
    assert main([*command, "--device", "cpu"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == CONFIG
    assert said["quant_method"] == "bitnet" and said["linear_class"] == linear_class
    assert said["quantization_mode"] == "offline" and said["modules_to_not_convert"] == ["lm_head"]
    stored = kb.io.load(tmp_path / "out", raw=True)
    assert stored[DOWN].shape == (WIDTH // 4, INNER) and stored[DOWN].dtype == np.uint8
    assert stored[f"{DOWN}_scale"].shape == (1,) and stored[f"{DOWN}_scale"].dtype == weights[DOWN].dtype
    loaded = kb.io.load(tmp_path / "out")
    assert sorted(loaded.compressed) == linears(weights)
    for name, x in weights.items():
        if name not in loaded.compressed:
            assert loaded[name].tobytes() == x.tobytes()
            continue
        q = kb.quantize(x, "ternary")
        assert np.array_equal(codes(loaded[name]), codes(q)) and loaded[name].dtype == x.dtype
        exact = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
        assert abs(loaded[name].planes["scale"][0] / q.planes["scale"][0] - 1) < exact
    # Once more the same, and continued it is compared.
    assert main([*command, "--device", "cpu", "--resume"]) == 0
    (tmp_path / "out" / "config.json").write_text("{}")
    assert main([*command, "--device", "cpu", "--resume"]) == 1
    assert "config.json is another one" in capsys.readouterr().err


def test_shards_for_transformers(tmp_path):
    weights = model()
    kb.io.save(tmp_path / "hf", weights, max_shard_size=400_000)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "out", "ternary", layout="bitnet", device="cpu")
    loaded = kb.io.load(tmp_path / "out")
    assert len(loaded.files) > 1 and loaded.index is not None and sorted(loaded.compressed) == linears(weights)
    assert np.array_equal(codes(loaded[DOWN]), codes(kb.quantize(weights[DOWN], "ternary")))
    with pytest.raises(FileError, match="'bitnet' writes a folder"):
        kb.io.quantize_file(tmp_path / "hf", tmp_path / "out.gguf", "ternary", layout="bitnet", device="cpu")


def test_what_is_left_out_is_named(tmp_path):
    weights = model(head=True)
    weights["model.layers.0.mlp.router.weight"] = np.ones((2, 16), np.float32)
    source = folder(tmp_path / "hf", weights, LLAMA)
    report = kb.io.quantize_file(source, tmp_path / "out", "ternary", layout="bitnet", keep="*.o_proj.*", device="cpu")
    assert report.converted == 6
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    wanted = ["lm_head", "model.layers.0.mlp.router", "model.layers.0.self_attn.o_proj"]
    assert said["modules_to_not_convert"] == wanted
    again = folder(tmp_path / "hf2", weights, LLAMA, quantization_config=said)
    assert kb.io.quantize_file(again, tmp_path / "out2", "ternary", layout="bitnet", device="cpu").converted == 6


def test_what_transformers_cannot_have_is_refused(tmp_path):
    odd = folder(tmp_path / "odd", {"a.weight": np.ones((6, 256), np.float32)}, CONFIG)
    with pytest.raises(FileError, match=r"'a\.weight' of shape \(6, 256\).*multiple of 4"):
        kb.io.quantize_file(odd, tmp_path / "out", "ternary", layout="bitnet")
    beside = {"a.weight": np.ones((8, 256), np.float32), "a.weight_scale": np.ones(1, np.float32)}
    for layout, target in (("bitnet", "out"), ("gguf", "out.gguf")):
        source = folder(tmp_path / f"beside {layout}", beside, CONFIG)
        with pytest.raises(FileError, match=r"'a\.weight' has a scale beside it.*but is not packed"):
            kb.io.quantize_file(source, tmp_path / target, "ternary", layout=layout)
    good = folder(tmp_path / "good", {"a.weight": np.ones((8, 256), np.float32)}, CONFIG)
    with pytest.raises(FileError, match="holds the format ternary, not"):
        kb.io.quantize_file(good, tmp_path / "out", "kbit4", layout="bitnet")
    x = np.arange(2048, dtype=np.float32).reshape(8, 256)
    with pytest.raises(FileError, match="8 different scales"):
        kb.io.save(tmp_path / "a", {"a.weight": kb.quantize(x, "ternary:granularity=channel:0")}, layout="bitnet")
    with pytest.raises(FileError, match="float16 has no number"):
        tiny = ternary(np.ones((4, 32), np.float32), 1.0)
        tiny = kb.QuantizedArray(
            tiny.format, {**tiny.planes, "scale": np.full(1, 1e-6, np.float32)}, (4, 32), "float16"
        )
        kb.io.save(tmp_path / "a", {"a.weight": tiny}, layout="bitnet")
    members = kb.stack([ternary(np.ones((4, 32)), 1.0), ternary(np.ones((4, 32)), 2.0)])
    with pytest.raises(FileError, match="is a stack"):
        kb.io.save(tmp_path / "a", {"a.weight": members}, layout="bitnet")
    (good / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(FileError, match="quantized by 'gptq'"):
        kb.io.quantize_file(good, tmp_path / "out", "ternary", layout="bitnet")
    (good / "config.json").unlink()
    for layout in ("bitnet", "bitnet.cpp"):
        with pytest.raises(FileError, match="pass the folder of a checkpoint of Hugging Face"):
            kb.io.quantize_file(good, tmp_path / "out", "ternary", layout=layout)
    assert not (tmp_path / "out").exists() and not (tmp_path / "a").exists()


def test_packed_weights_stay_ternary_in_other_layouts(tmp_path):
    """Without config.json their bytes would mean nothing."""
    source = packed_folder(tmp_path / "a", **{"other.weight": np.ones((32, 64), np.float32)})
    kb.io.quantize_file(source, tmp_path / "b", "kbit4", device="cpu")
    before, after = kb.io.load(source), kb.io.load(tmp_path / "b")
    assert after["layer.weight"].format == kb.get_format("ternary") and after["other.weight"].format.name == "kbit4"
    assert np.array_equal(after["layer.weight"].dequantize(), before["layer.weight"].dequantize())
    kb.io.save(tmp_path / "c.safetensors", before)
    assert np.array_equal(
        kb.io.load(tmp_path / "c.safetensors")["layer.weight"].planes["codes"], codes(before["layer.weight"])
    )


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def order_of(rows, heads):
    """llama.cpp's order of a head's rows, which are rotated as neighbours there."""
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, 2, half).swapaxes(1, 2).reshape(-1)


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["bitnet", "llama"])
@pytest.mark.parametrize("type", ["tq2_0", "tq1_0"])
def test_gguf_from_weights_and_from_ternary_ones(tmp_path, config, type):
    """The trits are those of the whole matrix, whatever they come from."""
    bitnet = config is CONFIG
    weights = model(bitnet=bitnet, head=True)
    source = folder(tmp_path / "hf", weights, config, quantization_config={"quant_method": "bitnet"})
    kb.io.quantize_file(source, tmp_path / "packed", "ternary", layout="bitnet", device="cpu")
    linear = {name: x for name, x in weights.items() if name in linears(weights)}
    decoded = {name: kb.quantize(x, "ternary").dequantize() for name, x in linear.items()}
    dense = folder(tmp_path / "dense", {**weights, **decoded}, config, quantization_config={"quant_method": "bitnet"})
    own = folder(
        tmp_path / "own", {**weights, **{name: kb.quantize(x, "ternary") for name, x in linear.items()}}, config
    )
    bytes_of = {}
    for path in (source, tmp_path / "packed", dense, own):
        target = tmp_path / f"{path.name}.gguf"
        command = ["quantize", str(path), "-o", str(target), "--layout", "gguf", "--format", type, "--device", "cpu"]
        assert main(command) == 0
        bytes_of[path.name] = target.read_bytes()
    # The scale in a packed file may differ in its last bit.
    assert bytes_of["hf"] == bytes_of["dense"] == bytes_of["own"]
    stored, loaded = kb.io.load(tmp_path / "hf.gguf", raw=True), kb.io.load(tmp_path / "hf.gguf")
    packed = kb.io.load(tmp_path / "packed.gguf")
    assert loaded.metadata["general.file_type"].value == {"tq1_0": 36, "tq2_0": 37}[type]
    assert loaded.metadata["general.architecture"].value == config["model_type"]
    assert ("output.weight" in loaded) != bitnet and "token_embd.weight" not in loaded.compressed
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    for name, x in linear.items():
        kind = name.split(".")[-2]
        new = f"blk.0.{names[kind]}"
        q = kb.quantize(x, "ternary")
        rows = np.arange(len(x))
        if not bitnet and kind in ("q_proj", "k_proj"):
            rows = order_of(len(x), HEADS if kind == "q_proj" else HEADS_KV)
        wanted = trits.trits_of("q", q).reshape(q.shape)[rows]
        for file in (loaded, packed):
            found = file[f"{new}.weight"]
            assert np.array_equal(trits.trits_of("q", found).reshape(found.shape), wanted)
            assert ulps(found.planes["scale"], q.planes["scale"][0]) <= (1 if file is loaded else 2)
        assert stored.reader.entry(f"{new}.weight").dtype == type
        assert stored[f"{new}.scale"].shape == (1,) and stored[f"{new}.scale"].dtype == np.float32
        # Who reads the blocks alone is off by the rounding of their scale.
        d = stored.reader.read(f"{new}.weight").reshape(-1, {"tq1_0": 54, "tq2_0": 66}[type])[:, -2:].copy().view("<f2")
        assert np.abs(d.astype(np.float64) / q.planes["scale"] - 1).max() < 5e-4
    # And back: Hugging Face's names and order.
    kb.io.dequantize_file(tmp_path / "hf.gguf", tmp_path / "back.safetensors", device="cpu")
    back = kb.io.load(tmp_path / "back.safetensors")
    assert all(ulps(back[name], x) <= 1 for name, x in decoded.items())


def test_a_llama_of_no_bitnet_keeps_ggmls_rule(tmp_path):
    weights = model(bitnet=False)
    source = folder(tmp_path / "hf", weights, LLAMA)
    kb.io.quantize_file(source, tmp_path / "a.gguf", "tq2_0", device="cpu")
    loaded = kb.io.load(tmp_path / "a.gguf")
    found = loaded["blk.0.ffn_down.weight"]
    assert found.format.name == "tq2_0" and np.array_equal(
        found.dequantize(), kb.quantize(weights[DOWN], "tq2_0").dequantize()
    )
    kb.io.quantize_file(source, tmp_path / "b.gguf", "ternary", device="cpu")  # asked for, it is BitNet's
    assert kb.io.load(tmp_path / "b.gguf").metadata["general.file_type"].value == 37
    assert "token_embd.weight" not in kb.io.load(tmp_path / "b.gguf").compressed


@pytest.mark.parametrize("recipe", ["tq2_0", "tq1_0"])
def test_recipes_of_a_bitnet(tmp_path, recipe):
    weights = model()
    source = folder(tmp_path / "hf", weights, CONFIG)
    kb.io.quantize_file(source, tmp_path / "packed", "ternary", layout="bitnet", device="cpu")
    for path in (source, tmp_path / "packed"):
        target = tmp_path / f"{path.name}.gguf"
        report = kb.io.quantize_file(path, target, recipe=recipe, device="cpu")
        assert not any("begin with a file of none" in note for note in report.notes)
        loaded = kb.io.load(target)
        found = loaded["blk.0.ffn_down.weight"]
        assert np.array_equal(codes(found), codes(kb.quantize(weights[DOWN], "ternary")))
        assert loaded.metadata["general.file_type"].value == {"tq1_0": 36, "tq2_0": 37}[recipe]
        assert loaded["token_embd.weight"].format.name == "q6_k"


def test_ternary_weights_are_not_scaled_twice():
    t = np.array([[1, 0, -1, 0, 0, 0, 1, 0]], np.float32)
    assert scale_of_ternary(t * np.float32(0.7)) == {"scale": float(np.float32(0.7))}
    assert scale_of_ternary((t * 0.7).astype(ml_dtypes.bfloat16))["scale"] == pytest.approx(0.7, rel=4e-3)
    for x in (t * 0, t + np.float32(0.5), np.zeros((0, 4), np.float32), t / np.float32(0.5) + np.float32(np.nan)):
        assert scale_of_ternary(x) == {}
    assert scale_of_ternary(np.full((2, 2), np.inf, np.float32)) == {}
    late = np.ones((2, 4096), np.float32)
    late[1, -1] = 0.5
    assert scale_of_ternary(late) == {}


def test_which_layers_are_linear():
    assert is_linear("model.layers.0.mlp.up_proj.weight") and is_linear("weight")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight", "a.bias", "score.weight"):
        assert not is_linear(name)


def test_relu2_is_told(tmp_path):
    source = folder(tmp_path / "hf", model(), CONFIG, hidden_act="relu2")
    report = kb.io.quantize_file(source, tmp_path / "a.gguf", "tq2_0", device="cpu")
    assert any("relu2, where llama.cpp computes silu" in note for note in report.notes)
    assert kb.io.load(tmp_path / "a.gguf").metadata["bitnet.hidden_activation"].value == "relu2"
    report = kb.io.quantize_file(source, tmp_path / "b.gguf", "ternary", layout="bitnet.cpp", device="cpu")
    assert not any("computes" in note for note in report.notes)  # which bitnet.cpp does


# ---- bitnet.cpp ------------------------------------------------------------------------------------------------------


def test_i2_s_out_and_in(tmp_path):
    weights = model(head=True)
    source = folder(tmp_path / "hf", weights, CONFIG, hidden_act="relu2")
    target = tmp_path / "a.gguf"
    command = ["quantize", str(source), "-o", str(target), "--layout", "bitnet.cpp", "--format", "ternary"]
    assert main([*command, "--device", "cpu"]) == 0
    stored, loaded = kb.io.load(target, raw=True), kb.io.load(target)
    assert loaded.metadata["general.architecture"].value == "bitnet-b1.58"
    assert loaded.metadata["bitnet-b1.58.block_count"].value == LAYERS
    assert loaded.metadata["general.file_type"].value == 40 and "output.weight" not in loaded
    q = kb.quantize(weights[DOWN], "ternary")
    entry = stored.reader.entry("blk.0.ffn_down.weight")
    assert entry.dtype == "type36" and entry.nbytes == q.size // 4 + 32
    found = loaded["blk.0.ffn_down.weight"]
    assert found.format == kb.get_format("ternary") and np.array_equal(codes(found), codes(q))
    assert found.planes["scale"] == q.planes["scale"]
    kb.io.save(tmp_path / "again.gguf", loaded, loaded.metadata, layout="bitnet.cpp")
    assert (tmp_path / "again.gguf").read_bytes() == target.read_bytes()
    kb.io.dequantize_file(target, tmp_path / "back.safetensors", device="cpu")
    assert np.array_equal(kb.io.load(tmp_path / "back.safetensors")[DOWN], q.dequantize())


def i2_s_file(path, raw, type=36, architecture="bitnet-b1.58"):
    """A file with one tensor of type 36."""
    entries = {"a.weight": Entry(f"type{type}", (2, 256), len(raw))}
    with GGUF.writing(path, entries, {"general.architecture": architecture}, False) as writer:
        writer.put("a.weight", raw)
    return path


def test_hostile_i2_s_is_refused(tmp_path):
    raw = trits.to_i2_s("q", ternary(EXAMPLE, 0.75, (2, 256)))
    assert kb.io.load(i2_s_file(tmp_path / "good.gguf", raw))["a.weight"].format.name == "ternary"
    three = raw.copy()
    three[5] |= 3
    with pytest.raises(FileError, match="code 3"):
        kb.io.load(i2_s_file(tmp_path / "three.gguf", three))["a.weight"]
    for number, scale in enumerate((np.nan, np.inf, -1)):
        bad = raw.copy()
        bad[128:132] = np.array([scale], "<f4").view(np.uint8)
        with pytest.raises(FileError, match="must be finite"):
            kb.io.load(i2_s_file(tmp_path / f"{number}.gguf", bad))["a.weight"]
    # Of other lengths it is what ggml once had under this number, which nobody reads.
    for number, length in enumerate((128, 288)):
        old = i2_s_file(tmp_path / f"old{number}.gguf", np.zeros(length, np.uint8))
        assert not kb.io.load(old).compressed
    # TL2, which has the number of MXFP4.
    other = kb.io.load(i2_s_file(tmp_path / "tl2.gguf", np.zeros(96, np.uint8), 39))
    assert not other.compressed and other.reader.entry("a.weight").dtype == "type39"
    mxfp4 = i2_s_file(tmp_path / "mxfp4.gguf", np.zeros(272, np.uint8), 39, "llama")
    assert kb.io.load(mxfp4)["a.weight"].format.name == "mxfp4"
    odd = kb.quantize(np.ones((4, 64), np.float32), "ternary")
    with pytest.raises(FileError, match="multiples of 128"):
        kb.io.save(tmp_path / "odd.gguf", {"a.weight": odd}, layout="bitnet.cpp")
    bad = kb.QuantizedArray(odd.format, {**odd.planes, "codes": np.full(64, 255, np.uint8)}, (4, 64), "float32")
    with pytest.raises(FileError, match="code 3"):
        BitnetLayout().arrays("a.weight", bad)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_or_read(tmp_path, seed):
    rng = np.random.default_rng(seed)
    weights = {name: model()[name] for name in (Q, DOWN)}
    source = folder(tmp_path / "hf", weights, CONFIG)
    for layout, target in (("bitnet", "out"), ("gguf", "tq.gguf"), ("bitnet.cpp", "i2_s.gguf")):
        kb.io.quantize_file(source, tmp_path / target, "ternary", layout=layout, device="cpu")
        file = tmp_path / target / "model.safetensors" if layout == "bitnet" else tmp_path / target
        good = file.read_bytes()
        outcomes = set()
        for _ in range(40):
            bad = bytearray(good)
            for at in rng.integers(0, rng.choice([600, len(bad)]), 2):
                bad[at] = rng.integers(256)
            file.write_bytes(bad if rng.random() < 0.8 else bad[: rng.integers(len(bad))])
            try:
                for x in dict(kb.io.load(tmp_path / target)).values():
                    outcomes.add(type(x.dequantize() if isinstance(x, kb.QuantizedArray) else x))
            except FileError as error:
                outcomes.add(type(error))
        assert outcomes == {np.ndarray, FileError}


def test_layouts_are_told_by_their_options():
    assert GgufLayout() == GgufLayout("tq2_0") != GgufLayout("tq1_0") and BitnetCppLayout().name == "bitnet.cpp"


# ---- beside transformers itself --------------------------------------------------------------------------------------

PROGRAM = """
import sys, numpy as np, torch
from transformers import BitNetForCausalLM
model = BitNetForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
x = torch.from_numpy(np.load(sys.argv[2]))
with torch.no_grad():
    layers = {name: layer for name, layer in model.named_modules() if name.endswith("_proj")}
    arrays = {name: layer(x[:, : layer.in_features]).numpy() for name, layer in layers.items()}
assert all(type(layer).__name__ == "BitLinear" for layer in layers.values())
np.savez(sys.argv[3], **arrays)
"""


def test_transformers_loads_what_is_written(tmp_path):
    pytest.importorskip("transformers", reason="transformers, an oracle, is not installed")
    pytest.importorskip("accelerate", reason="transformers loads BitNet with accelerate")
    source = folder(tmp_path / "hf", model(), CONFIG)
    kb.io.quantize_file(source, tmp_path / "out", "ternary", layout="bitnet", device="cpu")
    x = np.random.default_rng(0).standard_normal((5, INNER)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    files = [str(tmp_path / name) for name in ("out", "x.npy", "y.npz")]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *files],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, loaded = np.load(tmp_path / "y.npz"), kb.io.load(tmp_path / "out")
    assert len(found) == 7
    for name, y in found.items():
        q = loaded[f"{name}.weight"]
        assert ulps(kb.bitnet.linear(x[:, : q.shape[1]], q), y) <= 4, name
