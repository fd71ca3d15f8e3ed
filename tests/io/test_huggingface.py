"""Models of Hugging Face in llama.cpp's names and order, and back."""

import contextlib
import json
import math
import random

import numpy as np
import pytest

from kbitcupy.errors import FileError
from kbitcupy.io.huggingface import architecture_of, for_hugging_face, for_llama_cpp, read_config, swap_rows

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 100,
}
BITNET = {**CONFIG, "architectures": ["BitNetForCausalLM"], "hidden_act": "relu2"}


def tensors(config, bias=False):
    """Names and shapes of a model."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 4
    narrow = head * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (100, width), "model.norm.weight": (width,), "lm_head.weight": (100, width)}
    parts = {"q_proj": (width, width), "k_proj": (narrow, width), "v_proj": (narrow, width), "o_proj": (width, width)}
    matrices = {f"self_attn.{name}": shape for name, shape in parts.items()}
    matrices |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config is BITNET:
        norms += ["self_attn.attn_sub_norm", "mlp.ffn_sub_norm"]
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (width,) for name in norms}
        if bias:
            shapes |= {f"model.layers.{layer}.{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes


def test_names_are_gguf_pys():
    gguf = pytest.importorskip("gguf", reason="gguf-py has the names")
    for config, arch in ((CONFIG, gguf.MODEL_ARCH.LLAMA), (BITNET, gguf.MODEL_ARCH.BITNET)):
        known = gguf.get_tensor_name_map(arch, 2)
        found = for_llama_cpp(config, tensors(config, bias=config is CONFIG))
        for name, new in found.names.items():
            # gguf-py has only the first models' names of the norms inside.
            first = name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
            assert new == known.get_name(first, try_suffixes=(".weight", ".bias")), name
        assert not set(tensors(config)) - set(found.names) - found.left_out


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("shape", [(24, 5), (24,), (8, 3)])
def test_swapped_rows_come_back(shape, neighbours):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    heads = shape[0] // 8
    there = swap_rows(x, heads, neighbours)
    assert not np.array_equal(there, x)
    assert np.array_equal(swap_rows(there, heads, not neighbours), x)


def test_swapped_rows_rotate_alike():
    """Halves that are rotated as Hugging Face does are neighbours that are rotated as llama.cpp does."""
    rng = np.random.default_rng(1)
    d, position = 16, 7.0
    angle = position / 1e4 ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle), np.sin(angle)

    def halves(x):
        a, b = x[: d // 2], x[d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def neighbours(x):
        a, b = x[::2], x[1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(d)

    w, x, key = rng.standard_normal((d, 5)), rng.standard_normal(5), rng.standard_normal(d)
    theirs = swap_rows(w, 1, neighbours=True)
    assert np.allclose(swap_rows(halves(w @ x), 1, True), neighbours(theirs @ x))
    assert np.isclose(halves(w @ x) @ key, neighbours(theirs @ x) @ swap_rows(key, 1, True))


def test_llama():
    shapes = tensors(CONFIG, bias=True) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    found = for_llama_cpp(CONFIG, shapes)
    assert found.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 100,
    }
    q, k = (f"model.layers.1.self_attn.{name}_proj" for name in "qk")
    assert found.heads[f"{q}.weight"] == found.heads[f"{q}.bias"] == 4
    assert found.heads[f"{k}.weight"] == 2
    assert len(found.heads) == 8
    assert found.left_out == {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert f"{q}.bias" in found.widened and "model.norm.weight" in found.widened and f"{q}.weight" not in found.widened
    assert not found.made and not found.notes
    x = np.arange(64 * 64, dtype=np.float16).reshape(64, 64)
    assert np.array_equal(found.transform(f"{q}.weight")(x), swap_rows(x, 4, True))
    assert found.transform("model.norm.weight") is None


def test_there_and_back():
    for config in (CONFIG, BITNET):
        shapes = tensors(config)
        there = for_llama_cpp(config, shapes)
        renamed = {there.names[name]: shape for name, shape in shapes.items() if name in there.names}
        back = for_hugging_face(there.metadata, {**renamed, "rope_freqs.weight": (8,), "other.weight": (2, 2)})
        assert {back.names[new]: new for new in renamed} == there.names
        assert back.left_out == {"rope_freqs.weight"}
        assert back.notes == ("Hugging Face has no name for 1 tensors (other.weight), which keep theirs",)
        assert {back.names[name]: heads for name, heads in back.heads.items()} == there.heads
        for name in list(there.heads)[:2]:
            x = np.random.default_rng(2).standard_normal(shapes[name])
            assert np.array_equal(back.transform(there.names[name])(there.transform(name)(x)), x)


def test_bitnet():
    found = for_llama_cpp(BITNET, tensors(BITNET))
    assert not found.heads
    assert found.left_out == {"lm_head.weight"}
    assert found.metadata["general.architecture"] == "bitnet"
    assert found.metadata["bitnet.hidden_activation"] == "relu2"
    assert "relu2" in found.notes[0]


def test_frequencies_of_llama_3():
    """As torch computes them, in float32."""
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config = {**CONFIG, "rope_scaling": rope, "head_dim": 64}
    found = for_llama_cpp(config, {})
    made = found.made["rope_freqs.weight"]
    wanted = []
    for i in range(0, 64, 2):
        wavelength = 2 * math.pi * 5e5 ** (i / 64)
        smooth = (8192 / wavelength - 1) / 3
        scaled = 1 / ((1 - smooth) / 32 + smooth)
        wanted.append(1 if wavelength < 2048 else 32 if wavelength > 8192 else scaled)
    assert made.dtype == np.float32 and np.allclose(made, wanted, rtol=1e-6, atol=0)
    assert np.unique(made).size > 1
    assert found.metadata["llama.attention.key_length"] == 64
    for key in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
        assert np.array_equal(for_llama_cpp({**CONFIG, "head_dim": 64, key: rope}, {}).made["rope_freqs.weight"], made)


def test_other_rotations():
    linear = for_llama_cpp({**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}, {})
    assert linear.metadata["llama.rope.scaling.type"] == "linear" and linear.metadata["llama.rope.scaling.factor"] == 2
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    config = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    found = for_llama_cpp({**config, "rope_parameters": yarn}, {})
    assert found.metadata["llama.rope.scaling.original_context_length"] == 64
    assert found.metadata["llama.rope.freq_base"] == 1e6
    assert "longrope" in for_llama_cpp({**CONFIG, "rope_scaling": {"rope_type": "longrope"}}, {}).notes[0]


def test_tensors_without_a_name():
    found = for_llama_cpp(CONFIG, {**tensors(CONFIG), "model.layers.0.mlp.experts.0.w1.weight": (4, 4), "extra": (3,)})
    assert "extra" not in found.names
    assert "no name for 2 tensors" in found.notes[0] and "extra" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"head_dim": 1 << 30, "rope_scaling": {"rope_type": "llama3"}}, "at most 65536"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"num_attention_heads": 5}, "no two halves of 5 heads"),
        ({"num_key_value_heads": 64}, "no two halves of 64 heads"),
    ],
)
def test_configurations_that_do_not_fit(change, why):
    with pytest.raises(FileError, match=why):
        for_llama_cpp({**CONFIG, **change}, tensors(CONFIG))


def test_metadata_that_does_not_fit():
    shapes = {"blk.0.attn_q.weight": (64, 64), "blk.1.attn_k.weight": (32, 64)}
    about = {"general.architecture": "llama", "llama.attention.head_count": 4}
    assert for_hugging_face(about, shapes).heads == {"blk.0.attn_q.weight": 4, "blk.1.attn_k.weight": 4}
    each = {**about, "llama.attention.head_count_kv": np.array([1, 2])}
    assert for_hugging_face(each, shapes).heads["blk.1.attn_k.weight"] == 2
    for wrong in ({"llama.attention.head_count": "4"}, {"llama.attention.head_count_kv": [4]}):
        with pytest.raises(FileError, match="must be a positive integer"):
            for_hugging_face({**about, **wrong}, shapes)
    with pytest.raises(FileError, match="no two halves of 64 heads"):
        for_hugging_face({**about, "llama.attention.head_count": 64}, shapes)
    assert for_hugging_face({"general.architecture": "qwen2"}, shapes) is None
    assert for_hugging_face({}, shapes) is None


def test_configurations(tmp_path):
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(tmp_path) == CONFIG
    for text in ("[1]", "{", "[" * 10**5):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(FileError, match="config"):
            read_config(tmp_path)
    assert architecture_of(CONFIG) == "llama" and architecture_of(BITNET) == "bitnet"
    assert architecture_of({"model_type": "mistral"}) == "llama"
    assert architecture_of({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}) is None
    assert architecture_of({"architectures": [["x"]]}) is None
    with pytest.raises(FileError, match="no architecture"):
        for_llama_cpp({}, {})


def test_configurations_at_random():
    """Whatever stands in a config.json, it is understood or refused."""
    rng = random.Random(0)
    values = [None, 0, -1, 1, 3, 1 << 31, 1 << 70, 1.5, math.nan, math.inf, True, "x", [], [1], {}]
    values += [{"rope_type": "llama3"}, {"rope_type": "yarn"}, {"type": "linear", "factor": "x"}, {"rope_type": [1]}]
    values += [{"rope_type": "llama3", "factor": 1e308, "low_freq_factor": 1e-300, "high_freq_factor": 1e300}]
    keys = [*CONFIG, "head_dim", "rope_scaling", "rope_parameters", "hidden_act", "tie_word_embeddings", "model_type"]
    understood = 0
    for _ in range(1000):
        config = {**rng.choice([CONFIG, BITNET]), **{rng.choice(keys): rng.choice(values) for _ in range(2)}}
        shapes = tensors(CONFIG) | {rng.choice(list(tensors(CONFIG))): rng.choice([(), (0,), (3,), (0, 4), (64, 64)])}
        with contextlib.suppress(FileError):
            found = for_llama_cpp(config, shapes)
            understood += 1
            for name in found.heads:
                assert found.transform(name)(np.zeros(shapes[name], np.float16)).shape == shapes[name]
    assert 100 < understood < 900
