"""What every registered format promises: the tests go through the registry, so a new format is in them by itself."""

import json

import numpy as np
import pytest
from inputs import BFLOAT16, make, same_values

import kbitcupy as kb
from kbitcupy.formats.base import Format, Plane, kernel_templates, unregister

SHAPES = [(0,), (), (1,), (31,), (3, 32), (5, 7, 33), (4, 0, 2)]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def sample(shape, dtype):
    size = int(np.prod(shape, dtype=int))
    return make("normal", size, np.dtype("float32")).reshape(shape).astype(BFLOAT16 if dtype == "bfloat16" else dtype)


def check_round_trip(name, tmp_path):
    """Shapes, dtypes, planes, configuration, slices and files of one format."""
    format = kb.get_format(name)
    for dtype in DTYPES:
        for shape in SHAPES:
            x = sample(shape, dtype)
            q = kb.quantize(x, name)
            assert (q.shape, q.dtype, q.format) == (x.shape, x.dtype, format.stored())
            specs = q.format.planes(shape)
            assert {p: (a.dtype.name, a.shape) for p, a in q.planes.items()} == {
                p: (s.dtype, s.shape) for p, s in specs.items()
            }
            y = kb.dequantize(q)
            assert y.shape == x.shape and y.dtype == x.dtype
            again = kb.QuantizedArray.from_config(json.loads(json.dumps(q.config())), q.planes)
            assert same_values(again.dequantize(), y)
            assert same_values(kb.quantize(x, name, out=q).dequantize(), y)
    wide = sample((64, 128), "float32")
    q = kb.quantize(wide, name)
    y = q.dequantize()
    assert kb.metrics.sqnr_db(wide, y) > 3  # half of a bit: whatever it is, it resembles the input
    if format.rows_are_blocks(wide.shape):
        assert np.array_equal(q[10:20].dequantize(), y[10:20])
    if format.error_bound(wide, q.planes) is not None:
        assert kb.metrics.error_bound(wide, q).violations == 0
    kb.io.save(tmp_path / f"{name}.safetensors", {"w": q})
    assert np.array_equal(kb.io.load(tmp_path / f"{name}.safetensors")["w"].dequantize(), y)


def check_metadata(name):
    format = kb.get_format(name)
    assert format.name == name and format.bits >= 1 and format.block >= 1
    assert format.origin and format.summary
    assert kb.get_format(name, **format.options()) == format
    assert repr(format).startswith(f"get_format({name!r}")
    with pytest.raises(kb.KbitError, match="has no option 'no_such_option'"):
        kb.get_format(name, no_such_option=1)


@pytest.mark.parametrize("name", kb.formats())
def test_round_trip(name, tmp_path):
    check_round_trip(name, tmp_path)


@pytest.mark.parametrize("name", kb.formats())
def test_metadata(name):
    check_metadata(name)


class Toy(Format):
    """One bit an element and the mean magnitude of 16 of them: a whole format in one place."""

    name, bits, block = "toy", 1, 16
    origin, summary = "this test", "signs"

    def __init__(self, *, boost: float = 1.0):
        self.boost = boost

    def options(self):
        return {"boost": self.boost}

    def planes(self, shape):
        blocks = -(-int(np.prod(shape, dtype=int)) // 16)
        return {"sign": Plane("uint8", (blocks * 2,), 2), "mean": Plane("float32", (blocks,), 1)}

    def encode(self, x, planes):
        rows = np.zeros((planes["mean"].size, 16), np.float32)
        rows.reshape(-1)[: x.size] = x.reshape(-1)
        planes["mean"][:] = np.abs(rows).mean(1) * self.boost
        planes["sign"][:] = np.packbits(rows < 0, axis=1).reshape(-1)

    def decode(self, planes, out):
        signs = np.unpackbits(planes["sign"]).reshape(-1, 16)
        out.reshape(-1)[:] = ((1 - 2.0 * signs) * planes["mean"][:, None]).reshape(-1)[: out.size]


@pytest.fixture
def toy():
    kb.register("toy", Toy)
    yield "toy"
    unregister("toy")


def test_a_new_format_is_picked_up(toy, tmp_path, capsys):
    from kbitcupy.cli import main

    assert toy in kb.formats()
    for name in kb.formats():
        check_metadata(name)
    check_round_trip(toy, tmp_path)
    assert kb.quantize(np.ones(16, np.float32), toy, boost=2.0).dequantize()[0] == 2
    assert main(["compare", "--device", "cpu", "--json"]) == 0  # the toy knows NumPy only
    rows = json.loads(capsys.readouterr().out)
    assert toy in json.dumps(rows)
    assert toy not in [t.name for t in kernel_templates()]  # no kernels: nothing to compile


def test_registration():
    with pytest.raises(kb.KbitError, match="registered already; pass replace=True"):
        kb.register("kbit4", Toy)
    with pytest.raises(kb.KbitError, match="must be a non-empty string"):
        kb.register("", Toy)
    with pytest.raises(kb.KbitError, match="must be callable"):
        kb.register("other", 3)


def test_entry_points_are_asked_for_unknown_names_only(monkeypatch):
    asked = []

    class Entry:
        def load(self):
            return Toy

    def entry_points(*, group, name):
        asked.append((group, name))
        return [Entry()] if name == "toy" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    try:
        assert isinstance(kb.get_format("toy"), Toy)
        kb.get_format("kbit4")
        assert asked == [("kbitcupy.formats", "toy")]
        with pytest.raises(kb.KbitError, match="format is 'nothing'; registered are kbit1, "):
            kb.get_format("nothing")
    finally:
        unregister("toy")
