"""`kbit quantize`, `dequantize` and `plan`: what they refuse to overwrite, which options go together, what they say."""

import json
import os

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError, FormatError
from kbitcupy.io import bitsandbytes

INDEX = "model.safetensors.index.json"


def tensors():
    rng = np.random.default_rng(0)
    names = ("embed.weight", "up.weight", "lm_head.weight")
    return {name: rng.standard_normal((64, 64)).astype(np.float32) for name in names} | {"bias": np.ones(64)}


@pytest.fixture
def model(tmp_path):
    kb.io.save(tmp_path / "model.safetensors", tensors())
    return tmp_path / "model.safetensors"


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    formats = {name: {"name": "kbit3"} for name in tensors() if name != "bias"}
    path.write_text(json.dumps({"version": 1, "tensors": formats}))
    return path


def compressed(path):
    found = kb.io.load(path)
    return {name for name in found if isinstance(found[name], kb.QuantizedArray)}


# ---- what is never overwritten ----


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((source, target) for source in ("shards", f"shards/{INDEX}", "one") for target in ("a shard", "a hard link")),
        ("shards", "the index"),
        (f"shards/{INDEX}", "the index"),
    ],
)
def test_a_plan_never_overwrites_its_input(tmp_path, monkeypatch, capsys, source, target):
    monkeypatch.chdir(tmp_path)
    kb.io.save("shards", tensors(), max_shard_size=20_000)
    kb.io.save("one", tensors(), max_shard_size=10**6)
    folder = source.partition("/")[0]
    shard = f"{folder}/{min(name for name in os.listdir(folder) if name.endswith('.safetensors'))}"
    out = {"a shard": shard, "the index": f"{folder}/{INDEX}", "a hard link": "link"}[target]
    if target == "a hard link":
        os.link(shard, "link")
    before = {name: (tmp_path / folder / name).read_bytes() for name in os.listdir(folder)}
    assert main(["plan", source, "-o", out, "--force", "--bits", "4", "--formats", "kbit2,kbit4"]) == 1
    assert f"output {out} is the input file {folder}/" in capsys.readouterr().err
    assert before == {name: (tmp_path / folder / name).read_bytes() for name in os.listdir(folder)}


def test_a_file_never_overwrites_its_plan(model, plan, capsys):
    before = plan.read_bytes()
    assert main(["quantize", str(model), "-o", str(plan), "--plan", str(plan), "--force"]) == 1
    assert f"output {plan} is the input file" in capsys.readouterr().err
    assert plan.read_bytes() == before


# ---- options beside --plan ----


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], set()),
        (["--keep", "lm_head*"], {"lm_head.weight"}),
        (["--keep", "*embed*", "--keep", "lm_head.weight"], {"embed.weight", "lm_head.weight"}),
        (["--min-size", "4097"], {"embed.weight", "up.weight", "lm_head.weight"}),
    ],
)
def test_keep_and_min_size_go_beside_a_plan(model, plan, options, kept):
    out = model.with_name("out")
    words = ["quantize", str(model), "-o", str(out), "--plan", str(plan), "--device", "cpu", *options]
    assert main(words) == 0
    assert compressed(out) == {"embed.weight", "up.weight", "lm_head.weight"} - kept
    for name in kept:
        assert kb.io.load(out)[name].tobytes() == tensors()[name].tobytes()


def test_keep_beside_a_plan_that_matches_nothing_is_said(model, plan, capsys):
    words = ["quantize", str(model), "-o", str(model.with_name("out")), "--plan", str(plan), "--keep", "lm_haed"]
    assert main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "kbit: note: --keep 'lm_haed' matches no tensor\n"


def test_options_of_a_format_do_not_go_beside_a_plan(model, plan, capsys):
    out = model.with_name("out")
    words = ["quantize", str(model), "-o", str(out), "--plan", str(plan), "--option", "codebook=nf"]
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("kbit: error: --option is one of --format; the formats of a plan have")
    assert not out.exists()


def test_a_plan_that_names_a_tensor_twice_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"version": 1, "tensors": {"w": {"name": "kbit4"}, "w": {"name": "kbit2"}}}')
    with pytest.raises(FileError, match=r"plan.json is not a plan: .*key 'w' stands twice in one object"):
        kb.explore.read_plan(tmp_path / "plan.json")


# ---- what is said ----


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"a": np.zeros(5000, np.float32), "ids": np.zeros((64, 64), np.int32)},
            [],
            "no tensor has a float dtype, two or more dimensions, 512 or more elements (--min-size) and a name that "
            "--keep does not match",
        ),
        ({"a": np.zeros((64, 64))}, ["--min-size", "5000"], "5000 or more elements (--min-size)"),
        ({"a": np.zeros((64, 64))}, ["--keep", "*"], "and a name that --keep does not match"),
        (
            {"q": kb.quantize(np.zeros((64, 64)), "kbit4"), "r": kb.quantize(np.zeros((64, 64)), "kbit2")},
            [],
            "2 of 2 tensors are compressed already (kbit dequantize restores them)",
        ),
        (
            {"q": kb.quantize(np.zeros((64, 64)), "kbit4"), "b": np.zeros(3)},
            [],
            "1 of 2 tensors are compressed already (kbit dequantize restores them), and no other tensor has a float",
        ),
    ],
)
def test_a_run_that_compresses_nothing_says_why(tmp_path, capsys, change, options, message):
    kb.io.save(tmp_path / "in", change)
    words = ["quantize", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--device", "cpu", *options]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert said.startswith("kbit: note: nothing was compressed: ") and message in said and said.count("\n") == 1


def test_a_plan_that_compresses_nothing_says_why(model, plan, capsys):
    words = ["quantize", str(model), "-o", str(model.with_name("out")), "--plan", str(plan), "--keep", "*"]
    assert main([*words, "--device", "cpu"]) == 0
    assert "nothing was compressed: no tensor has a format in the plan and a name" in capsys.readouterr().err


def test_the_closing_line_counts_what_is_not_finite(model, capsys):
    x = tensors()
    x["up.weight"][3, 4:7] = np.nan, np.inf, -np.inf
    x["lm_head.weight"][0, 0] = np.nan
    kb.io.save(model, x, force=True)
    words = ["quantize", str(model), "-o", str(model.with_name("out")), "--device", "cpu", "--force"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.endswith(" GB/s; 2 NaN and 2 infinite values, which are not kept, in lm_head.weight, up.weight\n")
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["nan"], document["infinite"]) == (2, 2)
    assert document["not_finite"] == ["lm_head.weight", "up.weight"]
    assert main([*words, "--keep", "up.*", "--keep", "lm_*"]) == 0
    assert capsys.readouterr().out.endswith(" GB/s\n")


# ---- bitsandbytes' states ----


def test_a_weight_whose_offset_is_nan_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    bitsandbytes.save(path, {"w": kb.quantize(np.ones((2, 64), np.float32), "nf4", double_quant=True)})
    stored = {name: array.copy() for name, array in kb.io.load(path, raw=True).items()}
    key = "w.quant_state.bitsandbytes__nf4"
    state = json.loads(stored[key].tobytes())
    text = json.dumps({**state, "nested_offset": float("nan")}).encode()
    kb.io.save(path, {**stored, key: np.frombuffer(text, np.uint8)}, force=True)
    with pytest.raises(FileError, match=r"'w.quant_state.bitsandbytes__nf4'.*nested_offset is 'nan'"):
        bitsandbytes.load(path)


@pytest.mark.parametrize(
    ("inner", "error", "message"),
    [
        (3, TypeError, "state2 is int and has no absmax; it must be a QuantState"),
        (None, FormatError, "a state2 of its own"),
    ],
)
def test_states_that_are_no_states(inner, error, message):
    x = np.ones((4, 64), np.float32)
    four, eight = (
        bitsandbytes.quantize_4bit(x, compress_statistics=True),
        bitsandbytes.quantize_blockwise(x, nested=True),
    )
    decoders = (bitsandbytes.dequantize_4bit, *four), (bitsandbytes.dequantize_blockwise, *eight)
    for decode, codes, state in decoders:
        state.state2 = state if inner is None else inner
        with pytest.raises(error, match=message):
            decode(codes, state)
