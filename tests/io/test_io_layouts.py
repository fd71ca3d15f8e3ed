"""A file is the same thing everywhere: whoever opens it asks the same list of containers and layouts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from inputs import make, same_values

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.formats.base import Plane
from kbitcupy.io import bitsandbytes, checkpoint, layouts
from kbitcupy.io.container import DTYPES, Container, Entry, FileReader, entry_of, parts_of
from kbitcupy.io.layouts import Compressed, Layout
from kbitcupy.io.safetensors import CODES, SAFETENSORS

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "bitsandbytes_model.safetensors"
X = make("normal", 64 * 64, np.dtype("float32")).reshape(64, 64)


def rows(path, capsys):
    """What ``kbit inspect`` says, by name."""
    assert main(["inspect", str(path), "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}


def test_a_file_of_bitsandbytes_is_the_same_to_load_and_to_every_command(tmp_path, capsys):
    loaded, theirs = kb.io.load(MODEL), bitsandbytes.load(MODEL)
    decoded = kb.io.load(DATA / "bitsandbytes_decoded.safetensors")
    assert {name for name, x in loaded.items() if isinstance(x, kb.QuantizedArray)} == set(decoded)
    inspected = rows(MODEL, capsys)
    assert list(loaded) == list(theirs) and set(loaded) == set(inspected)
    kb.io.dequantize_file(MODEL, tmp_path / "restored", device="cpu")
    restored = kb.io.load(tmp_path / "restored")
    assert set(restored) == set(loaded)
    for name, tensor in loaded.items():
        x = tensor.dequantize() if isinstance(tensor, kb.QuantizedArray) else tensor
        assert restored[name].dtype == x.dtype and restored[name].tobytes() == x.tobytes()
        assert inspected[name]["shape"] == list(x.shape)
        if name in decoded and tensor.format.name != "int8":
            assert same_values(x, decoded[name])
            assert inspected[name]["format"] == json.loads(json.dumps(tensor.format.config()))
    chosen = ["--formats", "kbit4"]
    assert main(["compare", str(MODEL), *chosen, "--json", "--min-size", "1", "--device", "cpu"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert {row["name"] for row in result["tensors"]} == set(decoded)


def test_what_is_loaded_is_saved_in_either_layout(tmp_path):
    loaded = kb.io.load(MODEL)
    kb.io.save(tmp_path / "own", loaded)
    again = kb.io.load(tmp_path / "own")
    assert set(again) == set(loaded) and not again.quant_storage
    for name, tensor in loaded.items():
        if isinstance(tensor, kb.QuantizedArray):
            assert again[name].config() == tensor.config()
            assert all(np.array_equal(again[name].planes[p], plane) for p, plane in tensor.planes.items())
    kb.io.bitsandbytes.save(tmp_path / "theirs", again, quant_storage=loaded.quant_storage)
    stored, wanted = kb.io.load(tmp_path / "theirs", raw=True), kb.io.load(MODEL, raw=True)
    for name in set(wanted) - {"head.SCB"}:  # 127 times the scale, which may have another last bit
        assert stored[name].dtype == wanted[name].dtype and stored[name].tobytes() == wanted[name].tobytes()


def both(tmp_path):
    """A file with tensors of both layouts."""
    kb.io.save(tmp_path / "a", {"first": kb.quantize(X, "kbit4"), "second": X, "bias": X[0]})
    kb.io.quantize_file(tmp_path / "a", tmp_path / "both", "fp4", layout="bitsandbytes", device="cpu")
    return tmp_path / "both"


def test_a_file_of_both_layouts(tmp_path, capsys):
    path = both(tmp_path)
    loaded = kb.io.load(path)
    assert {name: getattr(x, "format", None) for name, x in loaded.items()} == {
        "bias": None,
        "first": kb.get_format("kbit4"),
        "second": kb.get_format("fp4"),
    }
    assert set(rows(path, capsys)) == set(loaded) and loaded.metadata == {"format": "pt"}
    assert loaded.written_by == f"kbitcupy {kb.__version__}"
    assert loaded.nbytes == sum(entry.nbytes for name in loaded for entry in loaded.stored(name).values())


def test_raw_tensors_are_those_of_the_file(tmp_path):
    path = both(tmp_path)
    raw = kb.io.load(path, raw=True)
    assert set(raw) == {
        *("bias", "first.packed", "first.absmax", "first.scale"),
        *("second", "second.absmax", "second.quant_map", "second.quant_state.bitsandbytes__fp4"),
    }
    assert not raw.compressed and set(raw.metadata) == {"format", "kbitcupy"}
    assert raw["first.packed"].tobytes() == kb.io.load(path)["first"].planes["packed"].tobytes()


def test_a_damaged_state_is_named_and_the_rest_can_be_had(tmp_path):
    stored = dict(kb.io.load(MODEL, raw=True))
    key = "up.weight.quant_state.bitsandbytes__nf4"
    kb.io.save(tmp_path / "a", {**stored, key: stored[key][:-1]})
    for read in (kb.io.load, lambda path: kb.io.quantize_file(path, tmp_path / "b", "kbit4", device="cpu")):
        with pytest.raises(FileError, match=f"'{key}'"):
            read(tmp_path / "a")
    assert kb.io.load(tmp_path / "a", raw=True)["norm.weight"].tobytes() == stored["norm.weight"].tobytes()


@pytest.mark.parametrize(
    ("save", "other", "stored"),
    [
        (kb.io.save, X, "w"),
        (kb.io.save, kb.quantize(X, "int8"), "w.codes"),
        (kb.io.save, kb.quantize(X, "nf4"), "w.packed"),  # no plane has the name of another's
        (kb.io.bitsandbytes.save, kb.quantize(X, "nf4"), "w"),
    ],
)
def test_one_name_in_two_files_is_refused(tmp_path, save, other, stored):
    kb.io.save(tmp_path / "a.safetensors", {"w": kb.quantize(X, "int8")})
    save(tmp_path / "b.safetensors", {"w": other})
    weight_map = {"w.scale": "a.safetensors", stored: "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileError, match=r"tensor 'w(\.scale)?' is in a\.safetensors and b\.safetensors"):
        kb.io.load(tmp_path)


def test_a_stack_has_no_place_in_the_layout_of_bitsandbytes(tmp_path):
    q = kb.stack([kb.quantize(X * scale, "nf4:double_quant=true") for scale in (1, 2)])
    kb.io.save(tmp_path / "a", {"w": q})
    assert kb.io.load(tmp_path / "a")["w"].dequantize().tobytes() == q.dequantize().tobytes()
    with pytest.raises(FileError, match="'w' is a stack of shape"):
        kb.io.bitsandbytes.save(tmp_path / "b", {"w": q})


# ---- a layout and a container of a third party -----------------------------------------------------------------------


class ToyLayout(Layout):
    """int8 codes ``NAME/codes`` and one float64 ``NAME/scale``, as no format stores it: planes are made on reading."""

    name = "toy"
    container = SAFETENSORS

    def recognise(self, reader):
        found = {}
        for codes in reader.names:
            name, mark, _ = codes.partition("/codes")
            if mark:
                if f"{name}/scale" not in reader.names:
                    raise FileError(f"{reader.path}: tensor {codes!r} has no scale")
                format = kb.get_format("int8", granularity="tensor")
                stored = codes, f"{name}/scale"
                shape = reader.entry(codes).shape
                found[name] = Compressed(format, shape, np.dtype(np.float32), stored, lambda r, s=stored: planes(r, s))
        return found

    def entries(self, name, format, planes, shape, dtype):
        return {f"{name}/codes": entry_of(Plane("int8", shape)), f"{name}/scale": entry_of(Plane("float64", (1,)))}

    def arrays(self, name, q):
        return {
            f"{name}/codes": q.planes["codes"].reshape(q.shape),
            f"{name}/scale": q.planes["scale"].astype(np.float64).reshape(1),
        }

    def metadata(self, metadata, configs):
        return {**metadata, "toy": "1"}

    def own_keys(self):
        return ("toy",)


def planes(reader, stored):
    codes, scale = stored
    return {"codes": reader.array(codes).reshape(-1), "scale": reader.array(scale).astype(np.float32)}


@pytest.fixture
def toy():
    layouts.LAYOUTS.append(ToyLayout())
    yield
    layouts.LAYOUTS.pop()


def test_a_layout_that_is_added_is_known_everywhere(toy, tmp_path, capsys):
    kb.io.save(tmp_path / "a", {"w": X, "bias": X[0]}, {"origin": "here"})
    words = ["quantize", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--layout", "toy", "--device", "cpu"]
    assert main([*words, "--format", "int8:granularity=tensor"]) == 0
    capsys.readouterr()
    assert set(kb.io.load(tmp_path / "b", raw=True)) == {"w/codes", "w/scale", "bias"}
    loaded = kb.io.load(tmp_path / "b")
    q = kb.quantize(X, "int8", granularity="tensor")
    assert set(loaded) == {"w", "bias"} and loaded.metadata == {"origin": "here"}
    assert loaded["w"].dequantize().tobytes() == q.dequantize().tobytes()
    assert rows(tmp_path / "b", capsys)["w"]["nbytes"] == 64 * 64 + 8
    report = kb.io.dequantize_file(tmp_path / "b", tmp_path / "c", device="cpu")
    restored = kb.io.load(tmp_path / "c")
    assert report.converted == 1 and restored.metadata == {"origin": "here"}
    assert restored["w"].tobytes() == q.dequantize().tobytes()
    kb.io.save(tmp_path / "d", {"w/codes": q.planes["codes"]})
    with pytest.raises(FileError, match="'w/codes' has no scale"):
        kb.io.load(tmp_path / "d")


def test_an_unknown_layout_is_refused_with_those_there_are(toy, tmp_path):
    kb.io.save(tmp_path / "a", {"w": X})
    with pytest.raises(
        ValueError, match="layout is 'onnx'; allowed are kbitcupy, .*, compressed-tensors, bitnet, .*, toy"
    ):
        kb.io.quantize_file(tmp_path / "a", tmp_path / "b", "int8", layout="onnx")


class ToyReader(FileReader):
    """A line of JSON, [name, dtype, shape, bytes] of each tensor, and the data."""

    def _header(self, file, size):
        line = file.read(size).partition(b"\n")[0]
        entries, starts, end = {}, {}, len(line) + 1
        for name, dtype, shape, nbytes in json.loads(line[4:]):
            entries[name], starts[name] = Entry(dtype, tuple(shape), nbytes), end
            end += nbytes
        return entries, starts, {}


class ToyContainer(Container):
    """Files that begin with TOY1."""

    name, magic = "toy", b"TOY1"

    def open(self, path, mapped=True):
        return ToyReader(path, mapped)

    def check(self, entries, metadata):
        raise NotImplementedError

    def writing(self, target, entries, metadata, force):
        raise NotImplementedError


def test_another_container_is_read_by_its_first_bytes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checkpoint, "CONTAINERS", [ToyContainer(), *checkpoint.CONTAINERS])
    tensors = [["w", "float32", [64, 64], X.nbytes], ["odd", "Q9_K", [256], 40]]
    path = tmp_path / "a.toy"
    path.write_bytes(b"TOY1" + json.dumps(tensors).encode() + b"\n" + X.tobytes() + bytes(range(40)))
    for loaded in (kb.io.load(path), kb.io.Checkpoint(path, mapped=False)):
        assert np.array_equal(loaded["w"], X) and not loaded["w"].flags.writeable
        with pytest.raises(FileError, match="'odd' has dtype Q9_K, which NumPy cannot hold"):
            loaded["odd"]
        assert loaded.reader.raw("odd").tolist() == list(range(40))
    assert rows(path, capsys)["odd"]["dtype"] == "Q9_K"
    with pytest.raises(FileError, match="tensor 'odd' has dtype Q9_K, which safetensors cannot store"):
        kb.io.quantize_file(path, tmp_path / "b", "kbit4", device="cpu")
    path.write_bytes(b"TOY1" + json.dumps(tensors[:1]).encode() + b"\n" + X.tobytes())
    kb.io.quantize_file(path, tmp_path / "b", "kbit4", device="cpu")
    assert kb.io.load(tmp_path / "b")["w"].dequantize().tobytes() == kb.quantize(X, "kbit4").dequantize().tobytes()


# ---- entries ---------------------------------------------------------------------------------------------------------


def test_safetensors_has_a_code_for_every_dtype():
    assert set(CODES) == set(DTYPES)
    for name in DTYPES:
        assert Entry(name, (), 1).numpy_dtype.name == name
    assert Entry("F4", (2,), 1).numpy_dtype is None and Entry("F8", (), 8).numpy_dtype is None


def test_entries_of_arrays_and_of_descriptions():
    assert entry_of(X) == entry_of(Plane("float32", (64, 64))) == Entry("float32", (64, 64), 16384)
    assert str(entry_of(X[0])) == "float32[64]" and entry_of(X).size == math.prod(X.shape)


def test_parts_of_an_array_are_its_bytes_in_order():
    assert b"".join(part.tobytes() for part in parts_of(X.T)) == np.ascontiguousarray(X.T).tobytes()
    assert b"".join(part.tobytes() for part in parts_of(X.astype(">f4"))) == X.tobytes()
    assert not list(parts_of(X[:0]))
