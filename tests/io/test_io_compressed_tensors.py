"""compressed-tensors' layout: what it packed is read and written again to the byte; scales are numbers of the model's
dtype before codes are chosen.
"""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from inputs import make

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.io.layouts import find_layout
from kbitcupy.io.layouts.compressed_tensors import _rounded

DATA = Path(__file__).parent.parent / "data"
THEIRS, DECODED = DATA / "compressed_tensors_model.safetensors", DATA / "compressed_tensors_decoded.safetensors"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LAYOUT = find_layout("compressed-tensors")
FORMATS = {
    "int4_groups": "int4:block=32",
    "int4_rows": "int4:granularity=channel:0",
    "int4_zero_points": "int4:block=16,symmetric=false",
    "int8_rows": "int8:granularity=channel:0",
    "int8_zero_points": "int8:block=8,symmetric=false",
    "int8_plain": "int8:granularity=channel:0",
    "int8_plain_zero_points": "int8:granularity=channel:0,symmetric=false",
}
CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{b}": {"weights": {"num_bits": b, "type": "int"}} for b in (4, 8)},
    }
}


def folder(path, tensors, config=CONFIG):
    path.mkdir()
    kb.io.save(path / "model.safetensors", tensors, force=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def theirs(tmp_path):
    return folder(tmp_path / "theirs", kb.io.load(THEIRS, raw=True))


# ---- their files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_what_compressed_tensors_packed_is_read(theirs, name):
    found, wanted = kb.io.load(theirs)[f"{name}.weight"], kb.io.load(DECODED)[f"{name}.weight"]
    assert found.format == kb.get_format(FORMATS[name]) and found.dtype == wanted.dtype
    assert found.dequantize().tobytes() == (wanted + wanted.dtype.type(0)).tobytes()  # theirs has -0


@pytest.mark.parametrize("name", [name for name in FORMATS if "plain" not in name])
def test_it_is_written_again_to_the_byte(theirs, tmp_path, name):
    key = f"{name}.weight"
    kb.io.save(tmp_path / "ours", {key: kb.io.load(theirs)[key]}, layout="compressed-tensors")
    ours, raw = kb.io.load(tmp_path / "ours", raw=True), kb.io.load(theirs, raw=True)
    assert set(ours) == {stored for stored in raw if stored.startswith(f"{name}.")}
    for stored, x in ours.items():
        assert (x.dtype, x.shape, x.tobytes()) == (raw[stored].dtype, raw[stored].shape, raw[stored].tobytes()), stored


def test_every_command_knows_the_layout(theirs, tmp_path, capsys):
    assert main(["inspect", str(theirs), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert {name for name, row in rows.items() if row["format"]} == {f"{name}.weight" for name in FORMATS}
    assert rows["int4_groups.weight"]["shape"] == [6, 96] and rows["int4_groups.weight"]["dtype"] == "bfloat16"
    assert main(["dequantize", str(theirs), "-o", str(tmp_path / "back"), "--device", "cpu"]) == 0
    back, decoded = kb.io.load(tmp_path / "back"), kb.io.load(DECODED)
    for name in FORMATS:
        assert np.array_equal(back[f"{name}.weight"], decoded[f"{name}.weight"])
    # A width that there is no format for stays as it is stored.
    assert {name for name in back if name.startswith("int3")} == {
        f"int3_groups.weight_{part}" for part in ("packed", "scale", "shape")
    }
    assert main(["compare", str(theirs), "--min-size", "1", "--device", "cpu"]) == 0


def test_plain_bytes_need_the_configuration(tmp_path):
    source = folder(tmp_path / "a", kb.io.load(THEIRS, raw=True), config=None)
    loaded = kb.io.load(source)
    assert loaded["int8_plain.weight"].dtype == np.int8 and "int8_plain.weight_scale" in loaded
    assert isinstance(loaded["int8_rows.weight"], kb.QuantizedArray)


# ---- ours ------------------------------------------------------------------------------------------------------------


def quantized(x, format):
    """As `quantize_file` compresses it."""
    choice = kb.formats.base.resolve(format)
    found = LAYOUT.given_by(choice)
    return kb.quantize(x, choice[0], **found(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "token", "channel:0", "channel:-2", "group:8", "group:48"])
@pytest.mark.parametrize("format", ["int8", "int4", "uint8", "uint4"])
def test_arrays_survive_a_file(tmp_path, format, granularity, symmetric, dtype):
    for shape in ((7, 48),) if "group" in granularity else ((7, 48), (5, 9), (1, 35)):
        x = make("normal", int(np.prod(shape)), np.dtype("float32")).reshape(shape) + np.float32(0.3)
        x = x.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
        q = quantized(x, kb.get_format(format, granularity=granularity, symmetric=symmetric))
        kb.io.save(tmp_path / "a", {"a.weight": q, "a.bias": x[0]}, layout="compressed-tensors", force=True)
        loaded = kb.io.load(tmp_path / "a")
        found, stored = loaded["a.weight"], "float32" if dtype == "float64" else dtype
        assert set(loaded) == {"a.weight", "a.bias"} and found.dtype.name == stored
        assert found.format.name == f"int{format[-1]}" and found.shape == shape
        assert np.array_equal(found.dequantize(), q.dequantize(dtype=stored))
        assert len(found.planes["scale"]) == (
            shape[0] * shape[1] // (int(granularity[6:])) if "group" in granularity else shape[0]
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", ["int8", "int4", "int4:symmetric=false", "int8:symmetric=false", "int4:block=16"])
def test_scales_are_numbers_of_the_dtype_before_codes_are_chosen(dtype, format):
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    largest = np.float32(65504) if dtype == np.float16 else np.float32(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(0)
    for scale in (np.float32(1), largest, np.float32(1e-7)):
        x = np.clip(rng.uniform(-1, 1, (32, 32)).astype(np.float32) * scale, -largest, largest)
        x[0, :4] = scale, -scale, 0, scale
        x = x.astype(dtype)
        q = quantized(x, format)
        found = q.planes["scale"]
        plain = kb.quantize(x, format).planes["scale"]
        assert np.array_equal(found, found.astype(dtype).astype(np.float32)) and (found > 0).all()
        assert np.isfinite(q.dequantize().astype(np.float32)).all()
        step = np.spacing(found.astype(dtype)).astype(np.float32)
        most = {1: step / 2, largest: np.maximum(step, plain / 100)}.get(scale, step)
        assert (np.abs(found - plain) <= most).all()
        # The codes are the ones for these scales.
        again = kb.quantize(x, format, **_rounded(q.format, x))
        assert np.array_equal(again.planes["codes"], q.planes["codes"])
        if scale == 1:
            error = np.abs(q.dequantize().astype(np.float32) - x.astype(np.float32))
            assert error.max() <= 0.51 * found.max() + 2.0**-8


def test_float32_needs_no_rounding_and_given_scales_are_taken():
    x = make("normal", 256, np.dtype("float32")).reshape(8, 32)
    assert _rounded(kb.get_format("int4:block=16"), x) == {}
    assert LAYOUT.given_by((kb.get_format("int4"), {"scale": 1.0})) is None
    assert LAYOUT.given_by((kb.get_format("nf4"), {})) is None
    assert _rounded(kb.get_format("int4"), np.zeros((0, 4), np.float16)) == {}


def test_scales_of_another_dtype_are_refused(tmp_path):
    x = make("normal", 256, np.dtype("float32")).reshape(8, 32)
    for q, message in (
        (kb.quantize(x.astype(np.float16), "int4:block=16"), "for which float16 has no number.*scale="),
        (kb.quantize(x, "nf4"), "compressed-tensors holds int8, int4, uint8, uint4"),
        (kb.quantize(x, "int4:block=24"), "one scale for a row, or for whole groups.*--layout kbitcupy"),
        (kb.quantize(x, "int8:granularity=channel:1"), "one scale for a row, or for whole groups"),
        (kb.quantize(x[0], "int8"), r"of shape \(32,\).*matrices called 'weight'"),
        (kb.stack([kb.quantize(x, "int8")] * 2), "matrices called 'weight'"),
    ):
        with pytest.raises(FileError, match=message):
            kb.io.save(tmp_path / "a", {"a.weight": q}, layout="compressed-tensors")
    with pytest.raises(FileError, match="matrices called 'weight'"):
        kb.io.save(tmp_path / "a", {"a": kb.quantize(x, "int8")}, layout="compressed-tensors")
    with pytest.raises(FileError, match="would be stored as 'a.weight_scale' as well"):
        kb.io.save(
            tmp_path / "a", {"a.weight": kb.quantize(x, "int8"), "a.weight_scale": x}, layout="compressed-tensors"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "format",
    [
        "int4:block=32,scale_dtype=bfloat16",
        "int8:block=32,scale_dtype=float16",
        "uint4:block=32,zero=int,scale_dtype=float16,zero_dtype=uint8",
        "int8:block=32,zero=int,zero_dtype=int8",
    ],
)
def test_planes_of_other_dtypes_are_stored_alike(tmp_path, format, dtype):
    x = make("normal", 16 * 64, np.dtype("float32")).reshape(16, 64).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    kb.io.save(tmp_path / "a", {"a.weight": x})
    kb.io.quantize_file(tmp_path / "a", tmp_path / "b", format, layout="compressed-tensors", device="cpu")
    kb.io.save(tmp_path / "own", kb.io.load(tmp_path / "b"))
    found = kb.io.load(tmp_path / "own")["a.weight"]
    most = 0.7 * found.planes["scale"].max() + (2.0**-6 if dtype == "bfloat16" else 0)  # which rounds what comes back
    assert found.dtype == x.dtype and np.abs(found.dequantize().astype("f4") - x.astype("f4")).max() <= most
    with pytest.raises(FileError, match="with an integer for a zero point or none"):
        kb.io.save(tmp_path / "c", {"a.weight": kb.quantize(x, "int4:zero=float")}, layout="compressed-tensors")


def test_a_file_is_compressed_into_the_layout_and_out_of_it(tmp_path):
    x = make("normal", 64 * 128, np.dtype("float32")).reshape(64, 128).astype(BFLOAT16)
    kb.io.save(tmp_path / "a", {"up.weight": x, "embed.weight": x, "norm": x[0]})
    report = kb.io.quantize_file(
        tmp_path / "a", tmp_path / "b", "int4:block=64", layout="compressed-tensors", device="cpu"
    )
    assert report.converted == 1 and report.bits_per_element == 4 + 16 / 64 + 128 / x.size
    assert "embed.weight" in report.notes[0]
    loaded = kb.io.load(tmp_path / "b")
    q = quantized(x, "int4:block=64")
    assert np.array_equal(loaded["up.weight"].planes["codes"], q.planes["codes"])
    # Into the own layout and back: the same bytes.
    kb.io.save(tmp_path / "own", loaded)
    assert np.array_equal(kb.io.load(tmp_path / "own")["up.weight"].dequantize(), q.dequantize())
    kb.io.save(tmp_path / "again", kb.io.load(tmp_path / "own"), {"format": "pt"}, layout="compressed-tensors")
    first, again = kb.io.load(tmp_path / "b", raw=True), kb.io.load(tmp_path / "again", raw=True)
    assert {name: y.tobytes() for name, y in first.items()} == {name: y.tobytes() for name, y in again.items()}


def test_a_gpu_writes_the_same_file(cupy, tmp_path):
    for dtype in ("float16", BFLOAT16, "float32"):
        x = make("normal", 64 * 128, np.dtype("float32")).reshape(64, 128).astype(dtype)
        kb.io.save(tmp_path / "a", {"up.weight": x}, force=True)
        for format in ("int4:block=64", "int8", "uint4:block=32,symmetric=false"):
            for device in ("cpu", "cuda:0"):
                kb.io.quantize_file(
                    tmp_path / "a",
                    tmp_path / device[:3],
                    format,
                    layout="compressed-tensors",
                    device=device,
                    force=True,
                )
            assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cud").read_bytes()


# ---- hostile files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "there is no tensor 'a.weight_scale'"),
        ({"weight_shape": None}, "there is no tensor 'a.weight_shape'"),
        ({"weight_shape": np.array([4, 64, 1])}, "it must be two integers"),
        ({"weight_shape": np.array([4.0, 64.0])}, "it must be two integers"),
        ({"weight_shape": np.array([5, 64])}, "says 5 x 64"),
        ({"weight_shape": np.array([4, -64])}, "says 4 x -64"),
        ({"weight_shape": np.array([4, 1 << 62])}, "says 4 x 4611686018427387904"),
        ({"weight_scale": np.ones((4, 3), np.float32)}, "for each of equal groups"),
        ({"weight_scale": np.ones((3, 2), np.float32)}, "for each of equal groups"),
        ({"weight_scale": np.ones((4, 0), np.float32)}, "for each of equal groups"),
        ({"weight_scale": np.ones((4, 2), np.int32)}, "for each of equal groups"),
        ({"weight_scale": np.full((4, 2), -1, np.float32)}, "a scale must be finite and not negative"),
        ({"weight_scale": np.full((4, 2), np.nan, np.float32)}, "a scale must be finite and not negative"),
        ({"weight_zero_point": np.zeros((2, 2), np.int32)}, "does not fit"),
        ({"weight_zero_point": np.zeros((1, 2), np.int8)}, "does not fit"),
        ({"weight_packed": np.zeros((4, 1), np.int32), "weight_shape": np.array([4, 4])}, "4 or 8 bits of 4 x 4"),
    ],
)
def test_hostile_tensors_are_refused_by_name(tmp_path, change, message):
    good = {
        "weight_packed": np.zeros((4, 8), np.int32),
        "weight_scale": np.ones((4, 2), np.float32),
        "weight_shape": np.array([4, 64]),
    }
    tensors = {f"a.{name}": x for name, x in {**good, **change}.items() if x is not None}
    if "weight_packed" in change:
        tensors["a.weight_scale"] = np.ones((4, 1), np.float32)
    source = folder(tmp_path / "a", tensors)
    with pytest.raises(FileError, match=message):
        kb.io.load(source)["a.weight"]
    with pytest.raises(FileError, match=message):
        kb.io.dequantize_file(source, tmp_path / "b", device="cpu")
    assert not (tmp_path / "b").exists() and set(kb.io.load(source, raw=True)) == set(tensors)


def test_what_is_of_no_such_file_stays_plain(tmp_path):
    tensors = {
        "a.weight_packed": np.zeros((4, 8), np.int32),
        "a.weight_scale": np.ones((4, 2), np.float32),
        "a.weight_shape": np.array([4, 64]),
    }
    for name, change, config in (
        ("order", {"a.weight_g_idx": np.zeros(64, np.int32)}, CONFIG),
        ("float", {"a.weight_packed": np.zeros((4, 32), np.uint8)}, CONFIG),
        ("width", {}, {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}),
        ("odd", {"a.weight_packed": np.zeros((4, 6), np.int32)}, None),
    ):
        source = folder(tmp_path / name, {**tensors, **change}, config)
        assert set(kb.io.load(source)) == {*tensors, *change}, name
    for config in ({"config_groups": 3}, {"config_groups": {"a": 3}}, {"config_groups": {"a": {"weights": 3}}}):
        about = {"quantization_config": {"quant_method": "compressed-tensors", **config}}
        source = folder(tmp_path / re.sub(r"\W", "", str(config)), tensors, about)
        kb.io.load(source)


def test_damaged_files_are_refused_or_read(theirs):
    rng = np.random.default_rng(0)
    good = (theirs / "model.safetensors").read_bytes()
    outcomes = set()
    for _ in range(60):
        bad = bytearray(good)
        for at in rng.integers(0, rng.choice([1800, len(bad)]), 3):
            bad[at] = rng.integers(256)
        (theirs / "model.safetensors").write_bytes(bad)
        try:
            for x in dict(kb.io.load(theirs)).values():
                outcomes.add(type(x.dequantize() if isinstance(x, kb.QuantizedArray) else x))
        except FileError as error:
            outcomes.add(type(error))
    assert outcomes == {np.ndarray, FileError}
