"""bitsandbytes' bytes, files and functions, against frozen results of its CUDA kernels (tests/data)."""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import make_bitsandbytes_data as data
import numpy as np
import pytest
from bitsandbytes_rules import differences, unpack
from hypothesis import given, settings, strategies as st
from inputs import BFLOAT16, DTYPES, make, same_values
from safetensors import safe_open

import kbitcupy as kb
from kbitcupy import tables
from kbitcupy.cli import main
from kbitcupy.errors import FileError, FormatError
from kbitcupy.io import bitsandbytes, conversion

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "bitsandbytes_model.safetensors"
F32 = np.float32
FLOAT4 = ("nf4", "fp4")
STATE = "up.weight.quant_state.bitsandbytes__nf4"
NESTED_JSON = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [136, 128], "nested_blocksize": 256'


@pytest.fixture(scope="module")
def frozen():
    with np.load(DATA / "bitsandbytes_codes.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def stored():
    """Every tensor of the frozen checkpoint, as it is stored."""
    return {name: array.copy() for name, array in kb.io.load(MODEL, raw=True).items()}


@pytest.fixture(scope="module")
def decoded():
    return {name: array.copy() for name, array in kb.io.load(DATA / "bitsandbytes_decoded.safetensors").items()}


def as_dtype(x, dtype):
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(BFLOAT16 if dtype == "bfloat16" else dtype)


def frozen_floats(array, dtype):
    return array.view(BFLOAT16) if dtype == "bfloat16" else array


# ---- what the kernels make -----------------------------------------------------------------------------------------


def test_tables(frozen):
    assert tables.NF4.tobytes() == frozen["nf4.map"].tobytes()
    assert (tables.FP4 + F32(0)).tobytes() == frozen["fp4.map"].tobytes()
    assert tables.dynamic_map().tobytes() == frozen["dynamic_map"].tobytes()


def codes_in(frozen, name, kind, size):
    return frozen[f"{name}.codes"].ravel() if kind == "dynamic8" else unpack(frozen[f"{name}.packed"], size)


def compare(frozen, name, x, kind, dtype, block):
    """Number of codes that differ, each of them explained; absmax and decoding are equal to the bit."""
    x = as_dtype(x, dtype)
    q = kb.quantize(x, kind, block=block)
    mine = q.planes["codes"] if kind == "dynamic8" else unpack(q.planes["packed"], x.size)
    places, unexplained = differences(x.astype(F32), kind, block, mine, codes_in(frozen, name, kind, x.size))
    assert unexplained == 0
    theirs = frozen[f"{name}.absmax"]
    of_nothing = theirs < 0  # blocks of NaN alone: their kernel leaves the number its search for a maximum began with
    assert (theirs[of_nothing] == np.finfo(F32).min).all() and not q.planes["absmax"][of_nothing].any()
    assert q.planes["absmax"][~of_nothing].tobytes() == theirs[~of_nothing].tobytes()
    if f"{name}.decoded" in frozen:
        packed = {key: frozen[f"{name}.{key}"].ravel() for key in ("packed", "codes") if f"{name}.{key}" in frozen}
        back = kb.QuantizedArray(q.format, {**packed, "absmax": theirs}, x.shape, x.dtype).dequantize()
        assert same_values(back, frozen_floats(frozen[f"{name}.decoded"].ravel(), dtype))
    return places.size


@pytest.mark.parametrize("kind", [*FLOAT4, "dynamic8"])
def test_every_threshold_and_code(frozen, kind):
    x = frozen[f"{kind}.thresholds.input"]
    block = 256 if kind == "dynamic8" else 64
    assert compare(frozen, f"{kind}.thresholds", x, kind, "float32", block) == 0
    found = codes_in(frozen, f"{kind}.thresholds", kind, x.size)
    assert np.unique(found).size == (256 if kind == "dynamic8" else 16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [*FLOAT4, "dynamic8"])
def test_every_number_of_two_bytes(frozen, kind, dtype):
    assert compare(frozen, f"{kind}.every.{dtype}", data.half_values(dtype), kind, dtype, 64) == 0


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", [*FLOAT4, "dynamic8"])
def test_block_sizes(frozen, kind, dtype):
    sizes = data.BLOCKS[1:] if kind == "dynamic8" else data.BLOCKS
    count = total = 0
    for block in sizes:
        x = frozen["sample"]
        if kind == "dynamic8" or block not in (32, 4096):
            x = x[: 5 * block + 21]
        count += compare(frozen, f"{kind}.{dtype}.{block}", x, kind, dtype, block)
        total += x.size
    assert count < total * 2e-3


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", [*FLOAT4, "dynamic8"])
def test_special_blocks(frozen, kind, dtype):
    for block in (64,) if kind == "dynamic8" else (32, 64):
        differing = compare(frozen, f"{kind}.special.{dtype}.{block}", data.special_rows(block), kind, dtype, block)
        # Four blocks lie beyond 2^126, one of them beyond bfloat16; float16 has none.
        assert differing <= 4 * block and (dtype == "float16") == (differing == 0)


@pytest.mark.parametrize("kind", [*FLOAT4, "dynamic8"])
def test_sizes(frozen, kind):
    for size in data.SIZES:
        x = frozen["sample"][:size]
        if kind == "dynamic8":
            assert compare(frozen, f"dynamic8.size.{size}", x, kind, "float32", 256) == 0
            continue
        for block in (32, 64, 4096):
            assert compare(frozen, f"{kind}.size.{size}.{block}", x, kind, "float32", block) == 0
            packed = frozen[f"{kind}.size.{size}.{block}.packed"]
            assert kb.quantize(x, kind, block=block).planes["packed"].tobytes() == packed.tobytes()  # the spare nibble


@pytest.mark.parametrize("kind", FLOAT4)
def test_double_quantization(frozen, kind):
    names = [f"{kind}.nested.{dtype}.{block}" for dtype, block in itertools.product(data.DTYPES, data.BLOCKS)]
    same_offset = 0
    for name in [*names, f"{kind}.nested.constant"]:
        if name in names:
            dtype, block = name.split(".")[2], int(name.split(".")[3])
            x = frozen["sample"] if block in (32, 4096) else frozen["sample"][: 5 * block + 21]
        else:
            dtype, block, x = "float32", 64, np.full(640, 0.3, F32)
        x = as_dtype(x, dtype)
        q = kb.quantize(x, kind, block=block, double_quant=True)
        offset = frozen[f"{name}.offset"]
        # PyTorch adds up the mean in another order.
        assert np.abs(q.planes["nested_offset"] - offset) <= 4 * np.spacing(offset)
        absmax = kb.quantize(x, kind, block=block).planes["absmax"]
        nested = kb.quantize(absmax - offset, "dynamic8", block=256)
        assert nested.planes["absmax"].tobytes() == frozen[f"{name}.nested_absmax"].tobytes()
        theirs = frozen[f"{name}.absmax"]
        assert differences(absmax - offset, "dynamic8", 256, nested.planes["codes"], theirs)[1] == 0
        if q.planes["nested_offset"] == offset:
            same_offset += 1
            assert q.planes["absmax"].tobytes() == nested.planes["codes"].tobytes()
            assert q.planes["nested_absmax"].tobytes() == nested.planes["absmax"].tobytes()
        if f"{name}.decoded" in frozen:
            keys = {"packed": "packed", "absmax": "absmax", "nested_absmax": "nested_absmax", "nested_offset": "offset"}
            planes = {plane: frozen[f"{name}.{key}"] for plane, key in keys.items()}
            back = kb.QuantizedArray(q.format, planes, x.shape, x.dtype).dequantize()
            assert back.tobytes() == frozen[f"{name}.decoded"].tobytes()
    assert same_offset > len(names) // 3


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_bitsandbytes_decodes_to_the_same(decoded):
    checkpoint = bitsandbytes.load(MODEL)
    assert {name for name in checkpoint if isinstance(checkpoint[name], kb.QuantizedArray)} == set(decoded)
    assert {name for name in checkpoint if name not in decoded} == {
        *(f"{layer}.bias" for layer in ("up", "down", "fsdp", "fsdp16", "fsdp32", "head", "norm")),
        "norm.weight",
    }
    for name, expected in decoded.items():
        q = checkpoint[name]
        if q.format.name == "int8":  # codes * SCB * (1 / 127) there, codes * (SCB / 127) here
            assert np.allclose(q.dequantize(dtype="float32"), expected, rtol=2.0**-22, atol=0)
            assert q.dtype == np.float16
        else:
            assert q.dtype == expected.dtype and same_values(q.dequantize(), expected)
    assert checkpoint.quant_storage["fsdp.weight"] == "bfloat16" and checkpoint.quant_storage["up.weight"] == "uint8"
    assert checkpoint["up.weight"].format == kb.get_format("nf4", block=64, double_quant=True)
    assert checkpoint["norm.weight"].dtype == F32
    assert len(checkpoint.stored("up.weight")) == 6 and len(checkpoint.stored("head.weight")) == 3


def test_reading_needs_neither_torch_nor_bitsandbytes():
    code = f"""
import sys
sys.modules["torch"] = sys.modules["bitsandbytes"] = None  # an import of either fails
import kbitcupy as kb
checkpoint = kb.io.bitsandbytes.load({str(MODEL)!r})
print(sum(float(abs(checkpoint[name].dequantize(dtype="float64")).sum()) for name in checkpoint.quant_storage) > 0)
"""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_every_key_is_written_as_bitsandbytes_writes_it(stored, tmp_path):
    checkpoint = bitsandbytes.load(MODEL)
    bitsandbytes.save(tmp_path / "a.safetensors", checkpoint, quant_storage=checkpoint.quant_storage)
    written = kb.io.load(tmp_path / "a.safetensors", raw=True)
    assert set(written) == set(stored) and written.metadata == {"format": "pt"}
    for name, array in stored.items():
        assert written[name].dtype == array.dtype and written[name].shape == array.shape
        assert written[name].tobytes() == array.tobytes(), name
    text = written[STATE].tobytes().decode()
    assert text.startswith(NESTED_JSON + ', "nested_dtype": "float32", "nested_offset": 0.0')


def test_the_weights_of_a_model_are_quantized_to_its_bytes(stored, decoded):
    """Decoded weights are quantized to what they were decoded from."""
    for name in ("odd.weight", "fsdp32.weight"):
        packed, _ = bitsandbytes.quantize_4bit(decoded[name], quant_type="nf4")
        assert packed.tobytes() == stored[name].tobytes()


def rewritten(tmp_path, tensors, name="changed.safetensors"):
    kb.io.save(tmp_path / name, tensors, force=True)
    return tmp_path / name


def text_array(text):
    return np.frombuffer(text.encode(), np.uint8)


@pytest.mark.parametrize("indent", [None, 3])
def test_json_in_any_order(stored, decoded, tmp_path, indent):
    state = json.loads(stored[STATE].tobytes())
    text = json.dumps(dict(reversed(state.items())), indent=indent)
    checkpoint = bitsandbytes.load(rewritten(tmp_path, {**stored, STATE: text_array(text)}))
    assert same_values(checkpoint["up.weight"].dequantize(), decoded["up.weight"])


@pytest.mark.parametrize("storage", bitsandbytes.STORAGES)
def test_quant_storage(stored, decoded, tmp_path, storage):
    checkpoint = bitsandbytes.load(MODEL)
    weights = {"up.weight": checkpoint["up.weight"], "down.weight": checkpoint["down.weight"]}
    bitsandbytes.save(tmp_path / "a.safetensors", weights, quant_storage=storage)
    written = kb.io.load(tmp_path / "a.safetensors", raw=True)
    assert written["up.weight"].dtype.name == storage and written["up.weight"].shape[1] == 1
    assert written["up.weight"].tobytes() == stored["up.weight"].tobytes()
    again = bitsandbytes.load(tmp_path / "a.safetensors")
    assert again.quant_storage == {"up.weight": storage, "down.weight": storage}
    assert same_values(again["down.weight"].dequantize(), decoded["down.weight"])


def test_packed_data_of_any_shape(stored, decoded, tmp_path):
    for shape in ((1, -1), (-1,), (-1, 64)):
        file = rewritten(tmp_path, {**stored, "up.weight": stored["up.weight"].reshape(shape)})
        assert same_values(bitsandbytes.load(file)["up.weight"].dequantize(), decoded["up.weight"])


def test_shards_that_separate_a_weight_from_its_state(stored, decoded, tmp_path):
    shards = [{}, {}, {}]
    for number, (name, array) in enumerate(sorted(stored.items())):
        shards[number % 3][name] = array
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for file, tensors in zip(files, shards, strict=True):
        kb.io.save(tmp_path / file, tensors)
    weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = bitsandbytes.load(tmp_path)
    assert set(checkpoint) == set(bitsandbytes.load(MODEL))
    for name in checkpoint.quant_storage:
        assert same_values(checkpoint[name].dequantize(), decoded[name])
    report = kb.io.dequantize_file(tmp_path, tmp_path / "restored", device="cpu")
    assert report.converted == 7 and report.nbytes_before == sum(array.nbytes for array in stored.values())
    restored = kb.io.load(tmp_path / "restored")
    assert set(restored) == set(checkpoint)
    assert restored["up.weight"].tobytes() == decoded["up.weight"].tobytes()
    assert restored.index_metadata["total_size"] == report.nbytes_after


def test_saved_in_shards(tmp_path):
    checkpoint = bitsandbytes.load(MODEL)
    bitsandbytes.save(tmp_path / "shards", checkpoint, max_shard_size=6000)
    again = bitsandbytes.load(tmp_path / "shards")
    assert len(again.files) > 1 and set(again) == set(checkpoint)
    assert again.index_metadata["total_size"] == again.nbytes
    for name in checkpoint.quant_storage:
        assert all(np.array_equal(again[name].planes[p], plane) for p, plane in checkpoint[name].planes.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FLOAT4)
@pytest.mark.parametrize("double_quant", [False, True])
def test_save_and_load(tmp_path, kind, dtype, double_quant):
    shapes = [(), (1,), (7, 9), (64, 65), (0, 4), (3, 100, 5)]
    options = enumerate(itertools.product(shapes, (32, 64, 4096)))
    tensors = {}
    for number, (shape, block) in options:
        x = make("normal", int(np.prod(shape)), dtype, number).reshape(shape)
        tensors[f"layer{number}"] = kb.quantize(x, kind, block=block, double_quant=double_quant)
    bitsandbytes.save(tmp_path / "a.safetensors", tensors)
    again = bitsandbytes.load(tmp_path / "a.safetensors")
    for name, q in tensors.items():
        assert again[name].config() == q.config()
        assert all(again[name].planes[p].tobytes() == plane.tobytes() for p, plane in q.planes.items())


def test_offsets_without_end(tmp_path):
    """The mean of an infinite absmax is infinite, which Python's JSON spells as bitsandbytes' does."""
    for value, text in ((np.inf, "Infinity"), (3.0e38, "3.0000000054977558e+38")):
        x = np.full((2, 64), 1, F32)
        x[0, 3] = value
        x[1, 3] = value
        bitsandbytes.save(tmp_path / "a.safetensors", {"w": kb.quantize(x, "nf4", double_quant=True)}, force=True)
        state = kb.io.load(tmp_path / "a.safetensors", raw=True)["w.quant_state.bitsandbytes__nf4"].tobytes().decode()
        assert f'"nested_offset": {text}' in state
        q = bitsandbytes.load(tmp_path / "a.safetensors")["w"]
        assert q.planes["nested_offset"] == F32(value)


def test_float64_is_described_as_float32(tmp_path):
    x = np.linspace(-1, 1, 128).reshape(2, 64)
    bitsandbytes.save(tmp_path / "a.safetensors", {"w": kb.quantize(x, "nf4")})
    assert bitsandbytes.load(tmp_path / "a.safetensors")["w"].dtype == F32


def test_int8_rows(tmp_path):
    x = make("normal", 30 * 50, np.dtype("float16")).reshape(30, 50)
    q = kb.quantize(x, "int8", granularity=("channel", 0))
    bitsandbytes.save(tmp_path / "a.safetensors", {"layer.weight": q, "weight": q})
    plain = kb.io.load(tmp_path / "a.safetensors", raw=True)
    assert plain["layer.weight"].dtype == np.int8 and plain["layer.weight"].shape == x.shape
    assert plain["layer.weight_format"].shape == () and plain["layer.weight_format"] == 0
    assert np.allclose(plain["SCB"], np.abs(x.astype(F32)).max(axis=1), rtol=2.0**-23, atol=0)
    again = bitsandbytes.load(tmp_path / "a.safetensors")
    for name in ("layer.weight", "weight"):
        assert np.array_equal(again[name].planes["codes"], q.planes["codes"])
        assert np.allclose(again[name].planes["scale"], q.planes["scale"], rtol=2.0**-23, atol=0)
    # A layer whose weight is a float is left alone, SCB or not.
    kb.io.save(tmp_path / "b.safetensors", {"layer.weight": x, "layer.SCB": np.ones(30, F32)})
    assert set(bitsandbytes.load(tmp_path / "b.safetensors")) == {"layer.weight", "layer.SCB"}


def test_a_file_may_hold_tensors_of_both_layouts(tmp_path):
    x = make("normal", 4096, np.dtype("float32")).reshape(64, 64)
    kb.io.save(tmp_path / "a.safetensors", {"first": kb.quantize(x, "kbit4"), "second": x})
    kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "fp4", layout="bitsandbytes")
    checkpoint = bitsandbytes.load(tmp_path / "b.safetensors")
    assert checkpoint["first"].format.name == "kbit4" and checkpoint["second"].format.name == "fp4"
    assert checkpoint.metadata == {"format": "pt"}
    report = kb.io.quantize_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "kbit4")
    assert report.converted == 0  # compressed already, in either layout
    assert set(bitsandbytes.load(tmp_path / "c.safetensors")) == {"first", "second"}


def test_reading_is_lazy(tmp_path):
    """A mapping of the file is made when a weight is asked for; other tensors are never looked at."""
    checkpoint = bitsandbytes.load(MODEL)
    q = checkpoint["up.weight"]
    assert not q.planes["packed"].flags.writeable and not q.planes["packed"].flags.owndata


# ---- refused -------------------------------------------------------------------------------------------------------


def edited_state(stored, **changes):
    state = {**json.loads(stored[STATE].tobytes()), **changes}
    return {STATE: text_array(json.dumps({key: value for key, value in state.items() if value != "DROP"}))}


REFUSED = [
    ("truncated packed data", "up.weight", lambda s: {"up.weight": s["up.weight"][:-1]}),
    ("one byte too many", "up.weight", lambda s: {"up.weight": np.zeros((8705, 1), np.uint8)}),
    ("packed data under another dtype", "up.weight", lambda s: {"up.weight": s["up.weight"].view(np.int8)}),
    ("no packed data", "up.weight", lambda s: {"up.weight": None}),
    ("a short absmax", "up.weight.absmax", lambda s: {"up.weight.absmax": s["up.weight.absmax"][:-1]}),
    ("a long absmax", "down.weight.absmax", lambda s: {"down.weight.absmax": np.ones(86, F32)}),
    ("absmax of the wrong dtype", "up.weight.absmax", lambda s: {"up.weight.absmax": np.ones(272, F32)}),
    ("no absmax", "up.weight.absmax", lambda s: {"up.weight.absmax": None}),
    ("no nested_absmax", "up.weight.nested_absmax", lambda s: {"up.weight.nested_absmax": None}),
    ("a short nested_absmax", "up.weight.nested_absmax", lambda s: {"up.weight.nested_absmax": np.ones(1, F32)}),
    ("another table", "up.weight.quant_map", lambda s: {"up.weight.quant_map": np.linspace(-1, 1, 16, dtype=F32)}),
    ("FP4's table", "up.weight.quant_map", lambda s: {"up.weight.quant_map": tables.FP4}),
    ("a short table", "up.weight.quant_map", lambda s: {"up.weight.quant_map": tables.NF4[:15]}),
    (
        "another nested table",
        "up.weight.nested_quant_map",
        lambda s: {"up.weight.nested_quant_map": np.linspace(-1, 1, 256, dtype=F32)},
    ),
    ("a table of NaN", "up.weight.quant_map", lambda s: {"up.weight.quant_map": np.full(16, np.nan, F32)}),
    (
        "an unknown quant_type in the key",
        "up.weight.quant_state.bitsandbytes__int4",
        lambda s: {"up.weight.quant_state.bitsandbytes__int4": s[STATE], STATE: None},
    ),
    ("an unknown quant_type", STATE, lambda s: edited_state(s, quant_type="int4")),
    ("a quant_type that the key denies", STATE, lambda s: edited_state(s, quant_type="fp4")),
    (
        "two states",
        "up.weight.quant_state.bitsandbytes__fp4",
        lambda s: {
            "up.weight.quant_state.bitsandbytes__fp4": text_array(str(bytes(s[STATE]), "ascii").replace("nf4", "fp4"))
        },
    ),
    ("a larger shape", STATE, lambda s: edited_state(s, shape=[136, 129])),
    ("a smaller shape", STATE, lambda s: edited_state(s, shape=[136, 120])),
    ("an enormous shape", STATE, lambda s: edited_state(s, shape=[2**40, 2**40])),
    ("a negative shape", STATE, lambda s: edited_state(s, shape=[-136, -128])),
    ("a shape of floats", STATE, lambda s: edited_state(s, shape=[136.0, 128])),
    ("a shape of booleans", STATE, lambda s: edited_state(s, shape=[True, 128])),
    ("65 dimensions", STATE, lambda s: edited_state(s, shape=[136, 128, *[1] * 63])),
    ("no shape", STATE, lambda s: edited_state(s, shape=None)),
    ("a smaller block", STATE, lambda s: edited_state(s, blocksize=32)),
    ("an odd block", STATE, lambda s: edited_state(s, blocksize=63)),
    ("a block of text", STATE, lambda s: edited_state(s, blocksize="64")),
    ("a block of True", STATE, lambda s: edited_state(s, blocksize=True)),
    ("an unknown dtype", STATE, lambda s: edited_state(s, dtype="float8_e4m3fn")),
    ("no dtype", STATE, lambda s: edited_state(s, dtype="DROP")),
    ("another nested block", STATE, lambda s: edited_state(s, nested_blocksize=64)),
    ("another nested dtype", STATE, lambda s: edited_state(s, nested_dtype="float16")),
    ("no offset", STATE, lambda s: edited_state(s, nested_offset="DROP")),
    ("an offset of text", STATE, lambda s: edited_state(s, nested_offset="0.1")),
    ("JSON that ends early", STATE, lambda s: {STATE: s[STATE][:-1]}),
    ("a JSON list", STATE, lambda s: {STATE: text_array("[1]")}),
    ("JSON with a key twice", STATE, lambda s: {STATE: text_array('{"shape": [1], "shape": [2]}')}),
    ("JSON that is not UTF-8", STATE, lambda s: {STATE: np.full(40, 0xFF, np.uint8)}),
    ("JSON that nests deep", STATE, lambda s: {STATE: text_array("[" * 9000)}),
    ("a state of floats", STATE, lambda s: {STATE: np.ones(30, F32)}),
    ("a long state", STATE, lambda s: {STATE: np.full(1 << 20, 32, np.uint8)}),
    ("a short SCB", "head.SCB", lambda s: {"head.SCB": s["head.SCB"][:-1]}),
    ("SCB of another dtype", "head.SCB", lambda s: {"head.SCB": s["head.SCB"].astype(np.float64)}),
    ("another order of rows", "head.weight_format", lambda s: {"head.weight_format": np.uint8(2)}),
    ("no matrix", "head.weight", lambda s: {"head.weight": s["head.weight"].reshape(24, 4, 10)}),
]


@pytest.mark.parametrize(("what", "key", "change"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_with_the_key(stored, tmp_path, what, key, change):
    tensors = {name: array for name, array in {**stored, **change(stored)}.items() if array is not None}
    file = rewritten(tmp_path, tensors)
    with pytest.raises(FileError) as caught:
        bitsandbytes.load(file)
    assert repr(key) in str(caught.value) and len(str(caught.value)) < 1000
    with pytest.raises(FileError):
        kb.io.dequantize_file(file, tmp_path / "restored.safetensors")
    assert not (tmp_path / "restored.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "make_q", "match"),
    [
        ("w", lambda x: kb.quantize(x, "kbit4"), "'w'.*bitsandbytes' layout holds"),
        ("w", lambda x: kb.quantize(x, "nf4", block=16), "'w'.*blocks of 32 to 4096"),
        ("w", lambda x: kb.quantize(x, "table4"), "'w'.*layout holds nf4 and fp4"),
        ("x.weight", lambda x: kb.quantize(x, "int8"), "'x.weight'.*granularity"),
        ("x.weight", lambda x: kb.quantize(x, "int8", granularity=("channel", 0), symmetric=False), "symmetric"),
        ("w", lambda x: kb.quantize(x, "int8", granularity=("channel", 0)), "'w' is int8.*'weight' of a layer"),
        ("lightweight", lambda x: kb.quantize(x, "int8", granularity=("channel", 0)), "'lightweight' is int8"),
        ("taken", lambda x: kb.quantize(x, "nf4"), "'taken' would be stored as 'taken.absmax'"),
    ],
)
def test_what_the_layout_cannot_hold(tmp_path, name, make_q, match):
    x = make("normal", 4096, np.dtype("float32")).reshape(64, 64)
    with pytest.raises(FileError, match=match):
        bitsandbytes.save(tmp_path / "a.safetensors", {name: make_q(x), "taken.absmax": np.ones(3, F32)})
    assert not list(tmp_path.iterdir())


def test_bad_storage(tmp_path):
    q = kb.quantize(np.ones((3, 3), F32), "nf4")
    with pytest.raises(FileError, match="quant_storage is 'int8'"):
        bitsandbytes.save(tmp_path / "a.safetensors", {"w": q}, quant_storage="int8")
    with pytest.raises(FileError, match="'w' packs to 5 bytes, which are no whole number of bfloat16"):
        bitsandbytes.save(tmp_path / "a.safetensors", {"w": q}, quant_storage={"w": "bfloat16"})
    bitsandbytes.save(tmp_path / "a.safetensors", {"w": q}, quant_storage={"v": "bfloat16"})
    with pytest.raises(ValueError, match="layout is 'onnx'"):
        kb.io.quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "nf4", layout="onnx")


# ---- functions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", FLOAT4)
def test_four_bit_functions(frozen, xp, kind, dtype):
    x = xp.asarray(as_dtype(frozen["sample"][: 5 * 64 + 21], dtype).reshape(11, 31))
    name = f"{kind}.{dtype}.64"
    packed, state = bitsandbytes.quantize_4bit(x, quant_type=kind)
    assert packed.shape == (171, 1) and packed.tobytes() == frozen[f"{name}.packed"].tobytes()
    assert state.absmax.tobytes() == frozen[f"{name}.absmax"].tobytes()
    assert (state.shape, state.blocksize, state.quant_type, state.nested) == ((11, 31), 64, kind, False)
    assert state.code.tobytes() == frozen[f"{kind}.map"].tobytes()
    y = bitsandbytes.dequantize_4bit(packed, state)
    assert type(y) is type(x) and y.shape == x.shape and y.dtype == x.dtype
    assert y.tobytes() == frozen[f"{name}.decoded"].tobytes()
    out = xp.empty_like(x)
    again = bitsandbytes.dequantize_4bit(packed, absmax=state.absmax, out=out, quant_type=kind)
    assert again is out and out.tobytes() == y.tobytes()


@pytest.mark.parametrize("kind", FLOAT4)
def test_nested_functions(frozen, xp, kind):
    x = xp.asarray(frozen["sample"][: 5 * 64 + 21])
    packed, state = bitsandbytes.quantize_4bit(x, quant_type=kind, compress_statistics=True)
    q = kb.quantize(x, kind, double_quant=True)
    assert state.nested and state.absmax.dtype == np.uint8 and state.offset.shape == ()
    assert state.absmax.tobytes() == q.planes["absmax"].tobytes()
    assert state.state2.absmax.tobytes() == q.planes["nested_absmax"].tobytes()
    assert state.state2.blocksize == 256 and state.state2.dtype == F32
    y = bitsandbytes.dequantize_4bit(packed, state)
    assert y.tobytes() == q.dequantize().tobytes()
    # The absmax alone, as bitsandbytes takes the two steps.
    absmax = bitsandbytes.dequantize_blockwise(state.absmax, state.state2) + state.offset
    state.absmax, state.state2 = absmax, None
    assert bitsandbytes.dequantize_4bit(packed, state).tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_eight_bit_functions(frozen, xp, dtype):
    x = xp.asarray(as_dtype(frozen["sample"][: 5 * 64 + 21], dtype).reshape(11, 31))
    codes, state = bitsandbytes.quantize_blockwise(x, blocksize=64)
    name = f"dynamic8.{dtype}.64"
    assert codes.shape == x.shape and codes.tobytes() == frozen[f"{name}.codes"].tobytes()
    assert state.absmax.tobytes() == frozen[f"{name}.absmax"].tobytes()
    y = bitsandbytes.dequantize_blockwise(codes, state)
    assert y.dtype == x.dtype and y.tobytes() == frozen[f"{name}.decoded"].tobytes()
    plain = bitsandbytes.dequantize_blockwise(codes, absmax=state.absmax, blocksize=64)
    assert plain.dtype == F32 and plain.astype(x.dtype).tobytes() == y.tobytes()
    out = xp.empty_like(x)
    assert bitsandbytes.dequantize_blockwise(codes, absmax=state.absmax, blocksize=64, out=out) is out
    assert out.tobytes() == y.tobytes()


def test_nested_eight_bits(xp):
    x = xp.asarray(make("normal", 70 * 64, np.dtype("float32")))
    codes, state = bitsandbytes.quantize_blockwise(x, blocksize=64, nested=True)
    plain, simple = bitsandbytes.quantize_blockwise(x, blocksize=64)
    assert codes.tobytes() == plain.tobytes()
    assert state.nested and state.absmax.dtype == np.uint8 and state.state2.absmax.shape == (2,)
    difference = abs(bitsandbytes.dequantize_blockwise(codes, state) - bitsandbytes.dequantize_blockwise(plain, simple))
    assert 0 < float(difference.max()) < 0.01 * float(simple.absmax.max())


@pytest.mark.parametrize("storage", bitsandbytes.STORAGES)
def test_functions_in_another_storage(xp, storage):
    x = xp.asarray(make("normal", 4096, np.dtype("float16")).reshape(64, 64))
    packed, state = bitsandbytes.quantize_4bit(x, quant_type="nf4", quant_storage=storage)
    assert packed.dtype.name == storage and packed.shape == (2048 // packed.dtype.itemsize, 1)
    assert bitsandbytes.dequantize_4bit(packed, state).tobytes() == kb.quantize(x, "nf4").dequantize().tobytes()


def test_outputs_are_filled(xp):
    x = xp.asarray(make("normal", 4096, np.dtype("float32")))
    out, absmax = xp.empty((2048, 1), np.uint8), xp.empty(64, F32)
    packed, state = bitsandbytes.quantize_4bit(x, absmax, out, quant_type="nf4")
    expected, plain = bitsandbytes.quantize_4bit(x, quant_type="nf4")
    assert packed is out and state.absmax is absmax
    assert out.tobytes() == expected.tobytes() and absmax.tobytes() == plain.absmax.tobytes()
    codes = xp.empty(4096, np.uint8)
    assert bitsandbytes.quantize_blockwise(x, out=codes)[0] is codes


def test_bad_arguments():
    x = np.ones(128, F32)
    packed, state = bitsandbytes.quantize_4bit(x)
    assert state.quant_type == "fp4"
    for bad in ({"quant_type": "int4"}, {"blocksize": 48}, {"quant_storage": "int8"}, {"out": np.empty(64, np.uint8)}):
        with pytest.raises(FormatError, match=next(iter(bad)).replace("blocksize", "block")):
            bitsandbytes.quantize_4bit(x, **bad)
    with pytest.raises(FormatError, match="no whole number of float32"):
        bitsandbytes.quantize_4bit(np.ones(3, F32), quant_storage="float32")
    with pytest.raises(FormatError, match="both absmax and out"):
        bitsandbytes.dequantize_4bit(packed, absmax=state.absmax)
    with pytest.raises(TypeError, match="A is int64"):
        bitsandbytes.dequantize_4bit(packed.astype(np.int64), state)
    with pytest.raises(FormatError, match="packed"):
        bitsandbytes.dequantize_4bit(packed[:-1], state)
    with pytest.raises(TypeError, match="quant_state is tuple"):
        bitsandbytes.dequantize_4bit(packed, (1, 2))
    with pytest.raises(FormatError, match="has no shape"):
        bitsandbytes.dequantize_4bit(packed, bitsandbytes.quantize_blockwise(x)[1])
    with pytest.raises(FormatError, match="absmax is needed"):
        bitsandbytes.dequantize_blockwise(packed)
    with pytest.raises(FormatError, match="code must be"):
        bitsandbytes.quantize_blockwise(x, code=np.linspace(-1, 1, 256, dtype=F32))
    assert bitsandbytes.quantize_blockwise(x, code=tables.dynamic_map().copy())[0].shape == (128,)
    nested = bitsandbytes.quantize_4bit(x, compress_statistics=True)[1]
    nested.state2.blocksize = 64
    with pytest.raises(FormatError, match=r"state2.blocksize is 64"):
        bitsandbytes.dequantize_4bit(packed, nested)
    nested.state2 = 3
    with pytest.raises(TypeError, match="state2 is int and has no absmax; it must be a QuantState"):
        bitsandbytes.dequantize_4bit(packed, nested)
    nested.state2 = nested
    with pytest.raises(FormatError, match="state2 has a state2 of its own"):
        bitsandbytes.dequantize_4bit(packed, nested)
    nested.offset = None
    with pytest.raises(FormatError, match="a state2 but no offset"):
        bitsandbytes.dequantize_4bit(packed, nested)


@pytest.fixture(scope="session")
def origin():
    """bitsandbytes itself, on the CPU."""
    pytest.importorskip("torch", reason="torch is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says while it is imported is about the machine
        return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_states_of_bitsandbytes_itself(origin, quant_type, nested, dtype):
    """Its tensors and its own QuantState, and ours given to it."""
    import torch

    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    packed, state = origin.quantize_4bit(x, quant_type=quant_type, compress_statistics=nested)
    y = bitsandbytes.dequantize_4bit(packed, state)
    assert isinstance(y, torch.Tensor) and y.dtype == x.dtype and torch.equal(y, origin.dequantize_4bit(packed, state))
    out = torch.empty_like(x)
    assert bitsandbytes.dequantize_4bit(packed, state, out=out) is out and torch.equal(out, y)
    ours, mine = bitsandbytes.quantize_4bit(x, quant_type=quant_type, compress_statistics=nested)
    assert ours.shape == packed.shape and ours.dtype == packed.dtype and torch.equal(mine.code, state.code)
    # Its CPU code divides where the GPU's, and ours, multiplies; and its mean of absmax is summed in another order.
    assert torch.isclose(bitsandbytes.dequantize_4bit(ours, mine), y, rtol=1e-2).float().mean() > 0.997
    absmax = torch.empty_like(mine.absmax)
    again, stored = bitsandbytes.quantize_4bit(
        x, absmax=absmax, out=torch.empty_like(ours), quant_type=quant_type, compress_statistics=nested
    )
    assert stored.absmax is absmax and torch.equal(absmax, mine.absmax) and torch.equal(again, ours)


@pytest.mark.parametrize("nested", [False, True])
def test_blockwise_states_of_bitsandbytes_itself(origin, nested):
    import torch

    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
    codes, state = origin.quantize_blockwise(x, nested=nested)
    assert torch.equal(bitsandbytes.dequantize_blockwise(codes, state), origin.dequantize_blockwise(codes, state))
    ours, mine = bitsandbytes.quantize_blockwise(x, nested=nested)
    assert ours.shape == x.shape and bitsandbytes.dequantize_blockwise(ours, mine).shape == x.shape
    _, state = origin.quantize_blockwise(x, code=torch.linspace(-1, 1, 256))
    with pytest.raises(FormatError, match="code must be bitsandbytes' dynamic map"):
        bitsandbytes.dequantize_blockwise(codes, state)


# ---- command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def float_file(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal((48, 64)).astype(np.float16) for name in ("up", "down")}
    kb.io.save(tmp_path / "a.safetensors", {**tensors, "up.bias": np.ones(48, F32)})
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    ("options", "format"),
    [
        (["--format", "nf4", "--option", "double_quant=true"], kb.get_format("nf4", double_quant=True)),
        (["--format", "fp4", "--option", "block=128"], kb.get_format("fp4", block=128)),
        (
            ["--format", "int8", "--option", 'granularity=["channel", 0]'],
            kb.get_format("int8", granularity=("channel", 0)),
        ),
    ],
)
def test_commands(float_file, tmp_path, capsys, options, format):
    out = str(tmp_path / "b.safetensors")
    given = kb.io.load(float_file)
    command = [
        "quantize",
        str(float_file),
        "-o",
        out,
        *options,
        "--layout",
        "bitsandbytes",
        "--device",
        "cpu",
        "--json",
    ]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    with safe_open(out, framework="np") as file:  # the library reads it, whatever was shorter than announced
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    assert "up.bias" in names and "up.weight.packed" not in names
    assert report["converted"] == 2 and report["nbytes_after"] == kb.io.load(out).nbytes
    per_weight = sum(entry.nbytes for entry in bitsandbytes.load(out).stored("up.weight").values())
    assert abs(report["compressed_nbytes"] - 2 * per_weight) < 30  # offsets are spelled in more or fewer digits
    checkpoint = bitsandbytes.load(out)
    for name in ("up.weight", "down.weight"):
        q = kb.quantize(given[name], format)
        assert checkpoint[name].format == format
        # SCB is 127 times the scale: a scale may come back with another last bit.
        assert np.allclose(
            checkpoint[name].dequantize(dtype="float32"), q.dequantize(dtype="float32"), rtol=2.0**-22, atol=0
        )
    assert main(["inspect", out, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert set(rows) == set(given)
    assert rows["up.weight"]["format"] == json.loads(json.dumps(format.config()))
    assert rows["up.weight"]["nbytes"] == per_weight and rows["up.weight"]["shape"] == [48, 64]
    assert main(["compare", out, "--formats", format.name, "--json", "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"][0]["tensors"]) == 2
    back = str(tmp_path / "c.safetensors")
    assert main(["dequantize", out, "-o", back, "--device", "cpu"]) == 0
    restored = kb.io.load(back)
    for name in given:
        assert restored[name].dtype == given[name].dtype and restored[name].shape == given[name].shape
        assert kb.metrics.sqnr_db(given[name], restored[name]) > 15


def test_commands_refuse(float_file, tmp_path, capsys):
    out = str(tmp_path / "b.safetensors")
    assert main(["quantize", str(float_file), "-o", out, "--format", "kbit4", "--layout", "bitsandbytes"]) == 1
    assert "bitsandbytes' layout holds nf4 and fp4" in capsys.readouterr().err
    assert not Path(out).exists()
    with pytest.raises(SystemExit):
        main(["quantize", str(float_file), "-o", out, "--layout", "onnx"])


def test_a_job_in_shards_is_resumed(float_file, tmp_path, monkeypatch):
    """What a finished shard really takes is counted, though its JSON turned out shorter than it might have."""
    kb.io.save(tmp_path / "shards", dict(kb.io.load(float_file)), max_shard_size=7000)
    options = {"format": kb.get_format("nf4", double_quant=True), "layout": "bitsandbytes", "device": "cpu"}
    whole = kb.io.quantize_file(tmp_path / "shards", tmp_path / "whole", **options)
    run = conversion.Job.run

    def interrupted(job, *arguments):
        if "00002-of" in job.files[0].path.name:
            raise KeyboardInterrupt
        run(job, *arguments)

    monkeypatch.setattr(conversion.Job, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kb.io.quantize_file(tmp_path / "shards", tmp_path / "target", **options, resume=True)
    monkeypatch.undo()
    report = kb.io.quantize_file(tmp_path / "shards", tmp_path / "target", **options, resume=True)
    assert report.resumed == 1 and report.nbytes_after == whole.nbytes_after
    for folder in ("whole", "target"):
        checkpoint = bitsandbytes.load(tmp_path / folder)
        assert checkpoint.nbytes == checkpoint.index_metadata["total_size"] == whole.nbytes_after
        assert checkpoint["down.weight"].format == options["format"]


@settings(max_examples=200)
@given(st.data())
def test_damaged_files_are_refused_or_read(tmp_path_factory, data):
    """Bytes of the header and of the JSON are changed at random: nothing but a FileError comes out."""
    damaged = bytearray(MODEL.read_bytes())
    header = 8 + int.from_bytes(damaged[:8], "little")
    start = data.draw(st.sampled_from([0, 8, header // 2, damaged.index(b'{"quant_type": "nf4"')]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = start + data.draw(st.integers(0, 180))
        damaged[place] = data.draw(st.sampled_from([*b'0123456789",:[]{}abnft\x00\xff']))
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    path.write_bytes(damaged)
    try:
        checkpoint = bitsandbytes.load(path)
        tensors = dict(checkpoint)
    except FileError:
        return
    for tensor in tensors.values():
        if isinstance(tensor, kb.QuantizedArray):
            tensor.dequantize()
