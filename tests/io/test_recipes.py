"""Recipes: the types that llama-quantize gives the tensors of many models."""

import hashlib
import json
from pathlib import Path

import make_llama_quantize_data
import pytest

import kbitcupy as kb
from kbitcupy.errors import FormatError
from kbitcupy.io.recipes import RECIPES, Model, find_recipe, order, tensor_types

DATA = json.loads((Path(__file__).parents[1] / "data" / "llama_quantize.json").read_text())
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def shapes_of(model):
    shapes = {name: tuple(shape) for name, shape in model["top"].items()}
    for layer in range(model["metadata"]["block_count"]):
        shapes |= {f"blk.{layer}.{name}": tuple(shape) for name, shape in model["blocks"].items()}
    return shapes


def model_of(model):
    architecture = model["architecture"]
    metadata = {f"{architecture}.{key}": number for key, number in model["metadata"].items()}
    return Model.of({"general.architecture": architecture, **metadata})


def wanted_types(model, words):
    letters = dict(zip((*model["top"], *model["blocks"]), words.split(), strict=True))
    wanted = {name: letters[name] for name in model["top"]}
    layers = model["metadata"]["block_count"]
    for name in model["blocks"]:
        each = letters[name] if len(letters[name]) > 1 else letters[name] * layers
        wanted |= {f"blk.{layer}.{name}": letter for layer, letter in enumerate(each)}
    return {name: DATA["types"][letter] for name, letter in wanted.items() if letter != "-"}


@pytest.mark.parametrize("name", DATA["models"])
def test_types_are_llama_quantizes(name):
    model = DATA["models"][name]
    shapes = shapes_of(model)
    about = model_of(model)
    for recipe, words in model["recipes"].items():
        plain, _, importance = recipe.partition("+")
        for given in (
            (True,) if importance else (False,) if f"{recipe}+importance" in model["recipes"] else (False, True)
        ):
            types = tensor_types(plain, shapes, about, importance=given)
            assert {key: SHORT.get(type, type) for key, type in types.items()} == wanted_types(model, words), recipe
            assert list(types) == sorted(types, key=order)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_llama_quantize_data.write_small(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("recipe", DATA["files"])
def test_files_are_llama_quantizes(small, tmp_path, recipe):
    """Every byte: the header, the order of tensors, and what is in them."""
    plain, _, given = recipe.partition("+")
    target = tmp_path / "a.gguf"
    kb.io.quantize_file(small[0], target, recipe=plain, importance=small[1] if given else None, device="cpu")
    assert hashlib.sha256(target.read_bytes()).hexdigest() == DATA["files"][recipe]


def test_every_recipe_was_asked():
    assert set(RECIPES) == {recipe.partition("+")[0] for recipe in DATA["models"]["llama 3 8B"]["recipes"]}
    assert any("+importance" in recipe for recipe in DATA["models"]["llama 3 8B"]["recipes"])


def test_the_order_of_shapes_does_not_matter():
    model = DATA["models"]["llama 3 8B"]
    shapes = shapes_of(model)
    about = model_of(model)
    backwards = dict(reversed(shapes.items()))
    assert tensor_types("q4_k_m", backwards, about) == tensor_types("q4_k_m", shapes, about)


def test_names_of_recipes():
    assert find_recipe("Q4_K_M") == find_recipe("q4_k") == "q4_k_m"
    assert find_recipe("Q5_K") == "q5_k_m"
    for name, why in (("iq2_xxs", "can be read but not made"), ("q9", "not known")):
        with pytest.raises(FormatError, match=why):
            find_recipe(name)
    with pytest.raises(TypeError, match="q4_k_m"):
        find_recipe(4)


def test_file_types():
    assert {name: RECIPES[name].file_type for name in ("q4_k_m", "q8_0", "tq2_0", "f16")} == {
        "q4_k_m": 15,
        "q8_0": 7,
        "tq2_0": 37,
        "f16": 1,
    }
    gguf = pytest.importorskip("gguf", reason="gguf-py has the numbers")
    for name, recipe in RECIPES.items():
        known = {"mxfp4_moe": "MOSTLY_MXFP4_MOE", "f32": "ALL_F32"}.get(name, f"MOSTLY_{name.upper()}")
        assert gguf.LlamaFileType[known] == recipe.file_type


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "general.architecture"),
        ({"general.architecture": 4}, "general.architecture"),
        ({"general.architecture": "llama"}, "llama.block_count"),
        ({"general.architecture": "llama", "llama.block_count": "two"}, "llama.block_count"),
        ({"general.architecture": "llama", "llama.block_count": float("inf")}, "llama.block_count"),
        ({"general.architecture": "llama", "llama.block_count": True}, "llama.block_count"),
        ({"general.architecture": "llama", "llama.block_count": []}, "llama.block_count"),
        ({"general.architecture": "llama", "llama.block_count": -1}, "between"),
        ({"general.architecture": "llama", "llama.block_count": 2**40}, "between"),
    ],
)
def test_metadata_that_says_too_little(metadata, why):
    with pytest.raises(FormatError, match=why):
        Model.of(metadata)


def test_heads_of_each_layer():
    metadata = {"general.architecture": "deci", "deci.block_count": 2, "deci.attention.head_count": [32, 16]}
    assert Model.of(metadata) == Model("deci", 2, 32, 32, 0)
    assert Model.of({**metadata, "deci.attention.head_count_kv": [0, 8]}).sharing == 0
    assert Model.of({**metadata, "deci.attention.head_count_kv": [4, 8]}).sharing == 8


def test_experts_outside_of_the_layers():
    model = Model("llama", 2, 8, 8, 8)
    for name in ("ffn_down_exps.weight", "blk.2.ffn_down_exps.weight", "blk.2.ffn_up_exps.weight"):
        with pytest.raises(FormatError, match="2 layers of a model of 8 experts"):
            tensor_types("q4_k_m", {name: (8, 256, 256)}, model)
