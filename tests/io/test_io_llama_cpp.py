"""llama.cpp itself, from the package xllamacpp, loads what is written here, and computes what was meant."""

import ctypes
import json
import subprocess
import sys

import ggml
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.io.recipes import Model, tensor_types

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp, an oracle, is in the extra peers")
gguf = pytest.importorskip("gguf", reason="gguf-py, an oracle, is in the extra peers")

WIDTH, INNER, HEADS, HEADS_KV, LAYERS, VOCABULARY = 256, 512, 4, 2, 2, 320
PROMPT = [1, 70, 180, 300, 42, 42, 7]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
}


BITNET = {**CONFIG, "architectures": ["BitNetForCausalLM"], "tie_word_embeddings": True}


def model(bitnet=False):
    """A model of random weights, as Hugging Face names them."""
    rng = np.random.default_rng(0)
    narrow = WIDTH // HEADS * HEADS_KV
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "model.norm": (WIDTH,), "lm_head": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        parts = {"q_proj": (WIDTH, WIDTH), "k_proj": (narrow, WIDTH), "v_proj": (narrow, WIDTH)}
        parts = {f"self_attn.{name}": shape for name, shape in (parts | {"o_proj": (WIDTH, WIDTH)}).items()}
        parts |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
        parts |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        if bitnet:
            parts |= {"self_attn.attn_sub_norm": (WIDTH,), "mlp.ffn_sub_norm": (INNER,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape) * 0.1 if len(shape) > 1 else 1 + rng.random(shape)
        weights[f"{name}.weight"] = x.astype(np.float32)
    return weights


def log_probabilities(weights, tokens, scaling=None, activations=lambda x: x):
    """Of the token that follows, as Hugging Face's model computes them, in float64; `scaling` as in its config.json,
    `activations` what becomes of those that the matrices of a layer are multiplied with.
    """
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    count, d = len(tokens), WIDTH // HEADS
    frequencies = 10000.0 ** -(np.arange(0, d, 2) / d)
    if scaling is not None:  # of Llama 3.1
        low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * frequencies / factor + smooth * frequencies
        frequencies = np.where(turns < low, frequencies / factor, np.where(turns > high, frequencies, between))
    angles = np.arange(count)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        if f"{name}.weight" not in w:  # those inside are bitnet's
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def rotated(x):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = activations(norm(x, at + "input_layernorm"))
        q, k, v = ((y @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(count, -1, d) for n in "qkv")
        q, k, v = rotated(q), np.repeat(rotated(k), HEADS // HEADS_KV, 1), np.repeat(v, HEADS // HEADS_KV, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d) + np.triu(np.full((count, count), -np.inf), 1)
        y = np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(count, -1)
        y = activations(norm(y, at + "self_attn.attn_sub_norm"))
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        y = activations(norm(x, at + "post_attention_layernorm"))
        gate, up = (y @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        y = activations(norm(gate / (1 + np.exp(-gate)) * up, at + "mlp.ffn_sub_norm"))
        x = x + y @ w[at + "mlp.down_proj.weight"].T
    return np.log(softmax(norm(x[-1], "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T))


def tokenizer():
    """Metadata of a tokenizer that has each byte, as llama.cpp's server wants one."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [chr(0x100 + i) for i in range(VOCABULARY - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(VOCABULARY, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


# A process of its own: llama.cpp ends the one that it runs in when it does not like a file.
PROGRAM = """
import json, sys, xllamacpp
path, prompt, vocabulary = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, -1
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
question = {"prompt": prompt, "n_predict": 1, "n_probs": vocabulary, "temperature": -1}
question["logit_bias"] = [[vocabulary - 1, 1e4]]  # what is said, for a part of a character would be said with the next
(choice,) = xllamacpp.Server(params).handle_completions(question)["choices"]
found = {one["id"]: one["logprob"] for one in choice["logprobs"]["content"][0]["top_logprobs"]}
print(json.dumps([found[token] for token in range(vocabulary)]))
"""


def ask(path):
    """The logarithms of the probabilities of all tokens that may follow `PROMPT`, as llama.cpp computes them."""
    about = json.dumps([str(path), PROMPT, VOCABULARY])
    program = [sys.executable, "-c", PROGRAM, about]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def converted(folder, config, weights=None):
    """The model as a GGUF file of float32, with a tokenizer."""
    (folder / "config.json").write_text(json.dumps(config))
    kb.io.save(folder / "model.safetensors", weights or model())
    kb.io.save(folder / "vocabulary.gguf", {}, tokenizer())
    about = {"recipe": "f32", "tokenizer": folder / "vocabulary.gguf"}
    kb.io.quantize_file(folder / "model.safetensors", folder / "f32.gguf", **about)
    return folder / "f32.gguf"


@pytest.fixture(scope="module")
def f32(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("llama"), CONFIG)


def test_what_hugging_face_computes(f32):
    assert np.abs(ask(f32) - log_probabilities(model(), PROMPT)).max() < 1e-4


def test_the_rotation_of_llama_3(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    file = converted(tmp_path, {**CONFIG, "rope_scaling": scaling})
    wanted = log_probabilities(model(), PROMPT, scaling)
    assert np.abs(ask(file) - wanted).max() < 1e-4
    assert np.abs(wanted - log_probabilities(model(), PROMPT)).max() > 0.1


def test_bitnet(tmp_path):
    """Its rows keep their order, and its embedding gives the logits."""
    weights = model(bitnet=True)
    file = converted(tmp_path, BITNET, weights)
    assert "output.weight" not in kb.io.load(file)
    del weights["lm_head.weight"]
    assert np.abs(ask(file) - log_probabilities(weights, PROMPT)).max() < 1e-4


def q8_k(x):
    """What ggml makes of activations beside its types of 256 elements: 8 bits under the largest magnitude."""
    blocks = x.astype(np.float32).reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = np.float32(-127) / largest
    return (np.minimum(np.rint(blocks * scale), 127) / scale.astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("type", ["tq2_0", "tq1_0"])
@pytest.mark.parametrize("architecture", ["bitnet", "llama"])
def test_ternary_weights(tmp_path, architecture, type):
    """llama.cpp multiplies by the scales beside the blocks, and has the rows in order."""
    config = BITNET if architecture == "bitnet" else CONFIG
    weights = model(bitnet=architecture == "bitnet")
    weights["model.embed_tokens.weight"] *= np.float32(0.1)
    weights["lm_head.weight"] *= np.float32(0.1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitnet"}})
    )
    kb.io.save(tmp_path / "hf" / "model.safetensors", weights)
    kb.io.save(tmp_path / "vocabulary.gguf", {}, tokenizer())
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "packed", "ternary", layout="bitnet", device="cpu")
    decoded = dict(kb.io.load(tmp_path / "hf"))
    for name, q in kb.io.load(tmp_path / "packed").items():
        if isinstance(q, kb.QuantizedArray):
            decoded[name] = q.dequantize()
    assert sum(not np.array_equal(decoded[name], x) for name, x in weights.items()) == 7 * LAYERS
    if architecture == "bitnet":
        del decoded["lm_head.weight"]
    ternary, f32 = tmp_path / "ternary.gguf", tmp_path / "f32.gguf"
    about = {"tokenizer": tmp_path / "vocabulary.gguf", "device": "cpu"}
    kb.io.quantize_file(tmp_path / "packed", ternary, type, **about)
    kb.io.dequantize_file(ternary, f32, device="cpu")
    plain = log_probabilities(decoded, PROMPT)
    assert np.abs(ask(f32) - plain).max() < 1e-5
    found = ask(ternary)
    assert np.abs(found - log_probabilities(decoded, PROMPT, activations=q8_k)).max() < 1e-4
    assert np.sqrt(((found - plain) ** 2).mean()) < 0.03


def by_ggml(source, target, recipe, importance=None):
    """Quantize a file by the recipe with ggml's bytes, written by gguf-py."""
    checkpoint = kb.io.load(source)
    shapes = {name: checkpoint[name].shape for name in checkpoint}
    types = tensor_types(recipe, shapes, Model("llama", LAYERS, HEADS, HEADS_KV), importance=importance is not None)
    writer = gguf.GGUFWriter(target, "llama")
    for key, value in checkpoint.metadata.items():
        if key not in ("general.architecture", "general.file_type", "general.quantization_version"):
            item = value.type.removesuffix("[]")
            kind = {"string": gguf.GGUFValueType.STRING}.get(item) or gguf.GGUFValueType[item.upper()]
            sub = kind if value.type != item else None
            plain = value.value.tolist() if isinstance(value.value, np.ndarray) else value.value
            writer.add_key_value(key, plain, gguf.GGUFValueType.ARRAY if sub else kind, sub)
    blocks = {}
    for name, x in checkpoint.items():
        if name in types:
            v = None if importance is None else importance.get(name)
            blocks[name] = ggml.quantize(types[name], x, v)
            raw_dtype = gguf.GGMLQuantizationType[types[name].upper()]
            writer.add_tensor(name, blocks[name].reshape(x.shape[0], -1), raw_dtype=raw_dtype)
        else:
            writer.add_tensor(name, np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def tensors_of(path):
    checkpoint = kb.io.load(path, raw=True)
    return {name: bytes(checkpoint.reader.read(name)) for name in checkpoint}


def test_q4_k_m_is_what_ggml_makes(f32, tmp_path):
    """The same bytes, and llama.cpp computes the same from them."""
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    kb.io.quantize_file(f32, ours, recipe="q4_k_m", device="cpu")
    by_ggml(f32, theirs, "q4_k_m")
    assert tensors_of(ours) == tensors_of(theirs)
    found = ask(ours)
    assert np.array_equal(found, ask(theirs))
    # Of the weights as they are restored Hugging Face's model computes it too, but for activations of 8 bits.
    kb.io.dequantize_file(ours, tmp_path / "back.safetensors", device="cpu")
    wanted = log_probabilities(dict(kb.io.load(tmp_path / "back.safetensors")), PROMPT)
    assert np.corrcoef(found, wanted)[0, 1] > 0.99


@pytest.mark.parametrize("recipe", ["q2_k", "q3_k_m", "q4_0", "q5_k_s", "q8_0", "iq4_xs", "tq2_0"])
def test_other_recipes_and_importance(f32, tmp_path, recipe):
    rng = np.random.default_rng(3)
    checkpoint = kb.io.load(f32)
    given = {
        name: rng.standard_normal(checkpoint[name].shape[-1]).astype(np.float32) ** 2
        for name in checkpoint
        if name.endswith(("attn_q.weight", "ffn_down.weight", "attn_v.weight"))
    }
    sums = {f"{name}.in_sum2": v[None] * np.float32(8) for name, v in given.items()}
    counts = {f"{name}.counts": np.full((1, 1), 8, np.float32) for name in given}
    kb.io.save(tmp_path / "imatrix.gguf", sums | counts, {"general.type": "imatrix"})
    target = tmp_path / "ours.gguf"
    kb.io.quantize_file(f32, target, recipe=recipe, importance=tmp_path / "imatrix.gguf", device="cpu")
    blocks = by_ggml(f32, tmp_path / "theirs.gguf", recipe, given)
    found = tensors_of(target)
    assert [name for name in blocks if found[name] != blocks[name].tobytes()] == []


# ---- files that llama.cpp writes -------------------------------------------------------------------------------------


class InitParams(ctypes.Structure):
    """ggml's ``gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p)))


def written_by_llama_cpp(source, target):
    """A file as ggml in xllamacpp writes it."""
    pointer = ctypes.c_void_p
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result, *arguments in (
        ("gguf_init_from_file", pointer, ctypes.c_char_p, InitParams),
        ("gguf_init_empty", pointer),
        ("gguf_set_kv", None, pointer, pointer),
        ("gguf_add_tensor", None, pointer, pointer),
        ("ggml_get_tensor", pointer, pointer, ctypes.c_char_p),
        ("gguf_write_to_file", ctypes.c_bool, pointer, ctypes.c_char_p, ctypes.c_bool),
        ("gguf_free", None, pointer),
        ("ggml_free", None, pointer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    data = pointer()
    read = library.gguf_init_from_file(str(source).encode(), InitParams(False, ctypes.pointer(data)))
    written = library.gguf_init_empty()
    library.gguf_set_kv(written, read)
    for name in kb.io.load(source):
        library.gguf_add_tensor(written, library.ggml_get_tensor(data, name.encode()))
    assert library.gguf_write_to_file(written, str(target).encode(), False)
    for context in (written, read):
        library.gguf_free(context)
    library.ggml_free(data)


def test_a_file_of_llama_cpp_is_written_the_same(f32, tmp_path):
    kb.io.quantize_file(f32, tmp_path / "ours.gguf", recipe="q4_k_m", device="cpu")
    theirs, again = tmp_path / "theirs.gguf", tmp_path / "again.gguf"
    written_by_llama_cpp(tmp_path / "ours.gguf", theirs)
    checkpoint = kb.io.load(theirs)
    kb.io.save(again, checkpoint, checkpoint.metadata)
    assert again.read_bytes() == theirs.read_bytes()
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()  # a writer of ggml's order, too
