"""Models of Hugging Face and of llama.cpp by recipes: types, names, rows, importance; and the command line."""

import json

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError, FormatError
from kbitcupy.io.huggingface import for_llama_cpp, swap_rows
from kbitcupy.io.recipes import Model, order, tensor_types

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
}
MODEL = Model("llama", 2, 4, 2)
Q, K, DOWN = (f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))


def weights(dtype=np.float16):
    """A model of Hugging Face."""
    rng = np.random.default_rng(0)
    parts = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256)}
    shapes = {"model.embed_tokens.weight": (32, 256), "model.norm.weight": (256,), "lm_head.weight": (32, 256)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in parts.items()}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": (288, 256) for name in ("gate", "up")}
        shapes |= {f"model.layers.{layer}.mlp.down_proj.weight": (256, 288)}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (256,) for name in ("input", "post_attention")}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of Hugging Face, and the same in GGUF, of float32."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    kb.io.save(path / "model.safetensors", weights(), {"format": "pt"})
    kb.io.quantize_file(path / "model.safetensors", path / "f32.gguf", recipe="f32")
    return path


def raw(path):
    checkpoint = kb.io.load(path, raw=True)
    return {name: (checkpoint.reader.entry(name), bytes(checkpoint.reader.read(name))) for name in checkpoint}


_NAMES = for_llama_cpp(CONFIG, {name: x.shape for name, x in weights().items()}).names


@pytest.mark.parametrize("recipe", ["q4_k_m", "Q3_K_L", "q8_0", "iq4_xs", "tq2_0", "bf16"])
def test_from_hugging_face(folder, tmp_path, recipe):
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "a.gguf", recipe=recipe, device="cpu")
    found = raw(tmp_path / "a.gguf")
    types = tensor_types(recipe, {_NAMES[name]: x.shape for name, x in weights().items()}, MODEL)
    assert list(found) == sorted(_NAMES.values(), key=order)
    for name, x in weights().items():
        new = _NAMES[name]
        type = types.get(new, "float32")
        x = x.astype(np.float32)
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            x = swap_rows(x, 4 if "q_proj" in name else 2, neighbours=True)
        entry, data = found[new]
        assert (entry.dtype, entry.shape) == (type, x.shape), new
        plain = type in ("float32", "float16", "bfloat16")
        wanted = kb.io.load(folder / "f32.gguf")[new].astype(entry.numpy_dtype) if plain else kb.gguf.quantize(x, type)
        assert data == wanted.tobytes(), new
    about = kb.io.load(tmp_path / "a.gguf").metadata
    assert about["general.architecture"].value == "llama"
    assert about["llama.attention.head_count_kv"].value == 2
    assert about["general.quantization_version"].value == 2
    assert "format" not in about


def test_from_gguf(folder, tmp_path):
    """Another way to the same tensors, with the file's own metadata."""
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "a.gguf", recipe="q4_k_m")
    kb.io.quantize_file(folder / "f32.gguf", tmp_path / "b.gguf", recipe="q4_k_m")
    assert raw(tmp_path / "a.gguf") == raw(tmp_path / "b.gguf")
    a, b = (kb.io.load(tmp_path / name).metadata for name in ("a.gguf", "b.gguf"))
    assert dict(a) == dict(b)
    assert a["general.file_type"].value == 15


def test_back_to_hugging_face(folder, tmp_path):
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "a.gguf", recipe="q8_0")
    kb.io.dequantize_file(tmp_path / "a.gguf", tmp_path / "b.safetensors")
    restored = kb.io.load(tmp_path / "b.safetensors")
    assert set(restored) == set(weights())
    for name, x in weights().items():
        assert restored[name].shape == x.shape
        assert np.abs(restored[name] - x.astype(np.float32)).max() <= np.abs(x).max() / 200, name
    # Of one precision all comes back as it was.
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "f16.gguf", recipe="f16")
    assert kb.io.load(tmp_path / "f16.gguf")["blk.1.attn_q.weight"].dtype == np.float16


def test_shards_become_one_file(folder, tmp_path):
    (tmp_path / "many").mkdir()
    kb.io.save(tmp_path / "shards", weights(), max_shard_size=200_000)
    (tmp_path / "shards" / "config.json").write_text(json.dumps(CONFIG))
    kb.io.quantize_file(tmp_path / "shards", tmp_path / "a.gguf", recipe="q4_k_m")
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "b.gguf", recipe="q4_k_m")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def importance_file(path, names, columns=None, seed=1):
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in names:
        count = columns or (288 if "ffn_down" in name else 256)
        tensors[f"{name}.in_sum2"] = rng.random((1, count)).astype(np.float32)
        tensors[f"{name}.counts"] = np.full((1, 1), 7, np.float32)
    kb.io.save(path, tensors, {"general.type": "imatrix"})
    return {name: tensors[f"{name}.in_sum2"][0] / np.float32(7) for name in names}


def _takes(type):
    return "importance" in kb.get_format(type).takes


@pytest.mark.parametrize("source", ["model.safetensors", "f32.gguf"])
def test_importance(folder, tmp_path, source):
    given = importance_file(tmp_path / "i.gguf", ["blk.1.attn_q.weight", "blk.0.ffn_up.weight", "token_embd.weight"])
    about = {"recipe": "q4_k_s", "importance": tmp_path / "i.gguf"}
    report = kb.io.quantize_file(folder / source, tmp_path / "a.gguf", **about)
    found = raw(tmp_path / "a.gguf")
    takes = [name for name, (entry, _) in found.items() if entry.dtype[0] in "qi" and _takes(entry.dtype)]
    assert len(report.without_importance) == len(takes) - 3
    x = kb.io.load(folder / "f32.gguf")
    for name in ("blk.1.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.attn_q.weight"):
        wanted = kb.gguf.quantize(x[name], "q4_k", importance=given.get(name))
        assert found[name][1] == wanted.tobytes(), name


def test_importance_of_a_format(folder, tmp_path):
    given = importance_file(tmp_path / "i.gguf", ["blk.1.attn_q.weight"])
    for target in ("a.gguf", "a.safetensors"):
        report = kb.io.quantize_file(
            folder / "model.safetensors",
            tmp_path / target,
            "q4_k",
            keep=["*down_proj*", "*embed*"],
            importance=tmp_path / "i.gguf",
        )
        assert Q not in report.without_importance and K in report.without_importance
    x = weights()[Q].astype(np.float32)
    found = kb.io.load(tmp_path / "a.safetensors")[Q]
    assert np.array_equal(
        kb.gguf.to_blocks(found).ravel(), kb.gguf.quantize(x, "q4_k", importance=given["blk.1.attn_q.weight"]).ravel()
    )


def test_files_with_compressed_tensors(folder, tmp_path):
    """They cannot become another model's, but what is plain in them takes importance as ever."""
    tensors = {name: x.astype(np.float32) for name, x in weights().items()}
    tensors[K] = kb.quantize(tensors[K], "kbit4")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    kb.io.save(tmp_path / "a.safetensors", tensors)
    with pytest.raises(FileError, match="dequantize first"):
        kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "b.gguf", recipe="q4_k_m")
    importance_file(tmp_path / "i.gguf", ["blk.1.attn_q.weight", "blk.1.attn_k.weight"])
    about = {"importance": tmp_path / "i.gguf", "keep": "*down_proj*"}
    report = kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "q4_k", **about)
    assert report.converted == 13 and Q not in report.without_importance and not report.notes


def test_importance_of_another_model(folder, tmp_path):
    importance_file(tmp_path / "i.gguf", ["blk.1.attn_q.weight"], columns=128)
    with pytest.raises(FileError, match="another model"):
        kb.io.quantize_file(folder / "f32.gguf", tmp_path / "a.gguf", recipe="q4_k_m", importance=tmp_path / "i.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_tokenizer(folder, tmp_path):
    """From a GGUF file of the same model; without one a note says so."""
    about = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(32)]}
    kb.io.save(tmp_path / "vocab.gguf", {}, {**about, "general.architecture": "llama", "llama.context_length": 7})
    report = kb.io.quantize_file(
        folder / "model.safetensors", tmp_path / "a.gguf", recipe="q8_0", tokenizer=tmp_path / "vocab.gguf"
    )
    assert not report.notes
    found = kb.io.load(tmp_path / "a.gguf").metadata
    assert {key: found[key].value for key in about} == about
    assert found["llama.context_length"].value == 128
    without = kb.io.quantize_file(folder / "model.safetensors", tmp_path / "b.gguf", recipe="q8_0")
    assert "has no tokenizer" in without.notes[0]
    assert kb.io.load(tmp_path / "b.gguf").metadata["tokenizer.ggml.model"].value == "no_vocab"
    kb.io.quantize_file(tmp_path / "b.gguf", tmp_path / "c.gguf", recipe="q8_0", tokenizer=tmp_path / "vocab.gguf")
    assert dict(kb.io.load(tmp_path / "c.gguf").metadata) == dict(found)


def test_tokenizers_that_do_not_fit(folder, tmp_path):
    source, target = folder / "model.safetensors", tmp_path / "a.gguf"
    with pytest.raises(FileError, match="has no tokenizer"):
        kb.io.quantize_file(source, target, recipe="q8_0", tokenizer=folder / "f32.gguf")
    kb.io.save(tmp_path / "vocab.gguf", {}, {"tokenizer.ggml.tokens": ["a", "b"]})
    with pytest.raises(FileError, match="2 tokens, but token_embd.weight has 32 rows"):
        kb.io.quantize_file(source, target, recipe="q8_0", tokenizer=tmp_path / "vocab.gguf")
    with pytest.raises(FileError, match="gguf"):
        kb.io.quantize_file(source, tmp_path / "a.safetensors", "q8_0", tokenizer=tmp_path / "vocab.gguf")
    with pytest.raises(TypeError, match="tokenizer"):
        kb.io.quantize_file(source, target, recipe="q8_0", tokenizer=3)
    assert not target.exists()


def test_compressed_tensors_keep_their_types(folder, tmp_path):
    kb.io.quantize_file(folder / "f32.gguf", tmp_path / "a.gguf", recipe="q8_0")
    report = kb.io.quantize_file(tmp_path / "a.gguf", tmp_path / "b.gguf", recipe="q4_k_m")
    assert report.converted == 0 and report.compressed_already == 16
    assert "16 tensors are compressed already" in report.notes[0]
    assert raw(tmp_path / "b.gguf") == raw(tmp_path / "a.gguf")
    assert kb.io.load(tmp_path / "b.gguf").metadata["general.file_type"].value == 7  # still q8_0


def test_kept_tensors(folder, tmp_path):
    kb.io.quantize_file(folder / "model.safetensors", tmp_path / "a.gguf", recipe="q4_k_m", keep="*q_proj*")
    found = raw(tmp_path / "a.gguf")
    assert found["blk.1.attn_q.weight"][0].dtype == "float16"
    wanted = swap_rows(weights()[Q], 4, neighbours=True)
    assert found["blk.1.attn_q.weight"][1] == wanted.tobytes()
    assert found["blk.1.attn_k.weight"][0].dtype == "q4_k"


def test_half_precision_overflows(tmp_path):
    x = np.array([[1e5, -1e5, 1, 0] * 8], np.float32).repeat(4, 0)
    kb.io.save(tmp_path / "a.gguf", {"blk.0.attn_q.weight": x}, {"general.architecture": "x", "x.block_count": 1})
    kb.io.quantize_file(tmp_path / "a.gguf", tmp_path / "b.gguf", recipe="f16")
    assert np.isinf(kb.io.load(tmp_path / "b.gguf")["blk.0.attn_q.weight"]).sum() == 64


def test_models_that_are_not_known(tmp_path):
    """Each matrix is like another, and a note says what will become of it."""
    kb.io.save(tmp_path / "a.safetensors", {"a.weight": np.ones((4, 256), np.float32), "b": np.ones(3, np.float32)})
    report = kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "b.gguf", recipe="q4_k_m")
    assert "no config.json" in report.notes[0] and "llama.cpp will not know" in report.notes[0]
    assert [entry.dtype for entry, _ in raw(tmp_path / "b.gguf").values()] == ["q4_k", "float32"]
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    report = kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "c.gguf", "q8_0", min_size=0)
    assert "Qwen3ForCausalLM" in report.notes[0]


def test_other_models_of_llama_cpp_keep_their_names(tmp_path):
    q = kb.quantize(np.ones((4, 32), np.float32), "q8_0")
    for architecture, noted in (("qwen3", True), (None, False)):
        about = {} if architecture is None else {"general.architecture": architecture}
        kb.io.save(tmp_path / "a.gguf", {"blk.0.attn_q.weight": q}, about, force=True)
        report = kb.io.dequantize_file(tmp_path / "a.gguf", tmp_path / "b.safetensors", force=True)
        assert list(kb.io.load(tmp_path / "b.safetensors")) == ["blk.0.attn_q.weight"]
        assert bool(report.notes) == noted and (not noted or "not of qwen3" in report.notes[0])


def test_what_is_refused(folder, tmp_path):
    source, target = folder / "f32.gguf", tmp_path / "a.gguf"
    with pytest.raises(FormatError, match="'q9'"):
        kb.io.quantize_file(source, target, recipe="q9")
    with pytest.raises(TypeError, match="recipe"):
        kb.io.quantize_file(source, target, "q4_k", recipe="q4_k_m")
    with pytest.raises(TypeError, match="recipe"):
        kb.io.quantize_file(source, target)
    with pytest.raises(FileError, match="gguf"):
        kb.io.quantize_file(source, tmp_path / "a.safetensors", recipe="q4_k_m")
    with pytest.raises(FormatError, match="useless without importance"):
        kb.io.quantize_file(source, target, recipe="q2_k_s")
    kb.io.save(tmp_path / "b.gguf", {"a.weight": np.ones((4, 256), np.float32)}, {"general.architecture": "llama"})
    with pytest.raises(FormatError, match=r"llama\.block_count"):
        kb.io.quantize_file(tmp_path / "b.gguf", target, recipe="q4_k_m")
    assert not target.exists()


def test_command_line(folder, tmp_path, capsys):
    importance_file(tmp_path / "i.gguf", ["blk.1.attn_q.weight"])
    target = str(tmp_path / "a.gguf")
    begin = ["quantize", str(folder / "model.safetensors"), "-o", target, "--layout", "gguf", "--device", "cpu"]
    assert main([*begin, "--recipe", "Q4_K_M", "--importance", str(tmp_path / "i.gguf")]) == 0
    output = capsys.readouterr()
    assert "by recipe Q4_K_M" in output.out
    assert "has no importance for" in output.err
    assert main(["inspect", target]) == 0
    assert "q6_k" in capsys.readouterr().out
    assert main([*begin, "--recipe", "q4_k_m", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["converted"] == 16
    assert main([*begin, "--recipe", "f16", "--force"]) == 0
    assert "nothing was compressed" not in capsys.readouterr().err
    back = str(tmp_path / "b.safetensors")
    assert main([*begin, "--recipe", "q4_k_m", "--force"]) == 0
    assert main(["dequantize", target, "-o", back, "--device", "cpu"]) == 0
    assert set(kb.io.load(back)) == set(weights())
    with pytest.raises(SystemExit):
        main([*begin, "--recipe", "q4_k_m", "--format", "q4_k"])
    assert main([*begin, "--recipe", "q9", "--force"]) == 1
    assert "allowed are" in capsys.readouterr().err
    assert main([*begin, "--recipe", "q4_k_m", "--option", "block=32", "--force"]) == 1
    assert "leave it away" in capsys.readouterr().err
    (tmp_path / "i.gguf").rename(target)
    assert main([*begin, "--recipe", "q4_k_m", "--importance", target, "--force"]) == 1
    assert "is the input" in capsys.readouterr().err
