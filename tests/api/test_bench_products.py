"""The benchmarks of matrix products: what they print, what they refuse, and small runs on NumPy."""

import importlib.metadata
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy._core import _multiarray_umath

from kbitcupy import bench, cli
from kbitcupy.bench import cases, ggml, products
from kbitcupy.bench.report import LinearReport, Product, W8A8Report
from kbitcupy.errors import DeviceError
from kbitcupy.formats.base import get_format, list_formats

ABOUT = {"gpu": "A", "versions": {"NumPy": "2"}}


class Host:
    """Times nothing: runs the call once on NumPy and gives round numbers."""

    cupy = np

    def __init__(self):
        self.calls = []

    def time(self, case, name, inputs):
        call, nbytes = case.prepare(inputs(0))
        case.prepare(inputs(1))[0]()
        found = call()
        self.calls.append((case.operation, name, case.capture, nbytes, getattr(found, "shape", None)))
        return bench.Row("gpu", name, case.operation, "float16", 1, 50.0, nbytes, 0.5, 12.0)


# ---- compressed weights ----


@pytest.mark.parametrize("name", ["kbit2", "kbit4", "nf4"])
def test_linear_is_timed_both_ways(name):
    host, format = Host(), get_format(name)
    weight = cases.random_array(format, (48, 64), np)
    product = products.measure_linear(host, products.Rotated(weight, np), format, (48, 64), 3, {"tinygemm": 5.0})
    assert [call[:4] for call in host.calls] == [
        ("linear", name, True, weight.nbytes),
        ("decode + cuBLAS", name, True, weight.nbytes),
    ]
    assert product == Product(name, 48, 64, 3, 50.0, 12.0, 0.5, {"decode + cuBLAS": 50.0, "tinygemm": 5.0})


@pytest.mark.parametrize("activations", ["bitnet", products.NORMALIZED, products.INT8_TOKENS])
def test_ternary_products_are_timed_with_and_without_their_quantization(activations, monkeypatch):
    seen = []
    for name in ("linear", "bit_linear"):
        product = getattr(products, name)

        def noted(x, *given, _product=product, **options):
            seen.append((str(getattr(x, "format", x.dtype)), options.get("norm") is not None))
            return _product(x, *given, **options)

        monkeypatch.setattr(products, name, noted)
    host, format = Host(), get_format("ternary")
    weight = cases.random_array(format, (48, 64), np)
    product = products.measure_linear(host, products.Rotated(weight, np), format, (48, 64), 3, {}, activations)
    tokens = "int8:granularity=token" if activations == products.INT8_TOKENS else "float16"
    assert set(seen) == {(tokens, activations == products.NORMALIZED)}
    assert product == Product(f"ternary+{activations}", 48, 64, 3, 50.0, 12.0, 0.5, {"decode + cuBLAS": 50.0})


def test_ternary_products_have_cells_at_three_shapes():
    cells = {cell for cell in products.list_cells()["linear"] if cell.startswith("linear/ternary+")}
    of_m8 = {cell for cell in cells if cell.endswith("/8")}
    shapes = "28672x8192", "8192x8192", "4096x4096"
    kinds = "int8-tokens", "bitnet", "rms_norm+bitnet"
    assert of_m8 == {f"linear/ternary+{kind}/{shape}/8" for kind in kinds for shape in shapes}
    assert "linear/int8:granularity=channel:0+int8/4096x4096/64" in products.list_cells()["linear"]


@pytest.mark.parametrize("name", ["kbit4", "nf4"])
def test_experts_are_measured(name, monkeypatch):
    monkeypatch.setattr(products, "EXPERTS", (6, 16, 64, 2))
    host = Host()
    product = products.measure_experts(host, None, get_format(name), 1)
    whole = cases.random_array(get_format(name), (6 * 16, 64), np)
    assert host.calls == [("linear_grouped", name, True, whole.nbytes * 2 // 6, (1, 2, 16))]  # those that are chosen
    assert product == Product(f"{name}, 2 of 6", 16, 64, 1, 50.0, 12.0, 0.5, {})


@pytest.mark.parametrize("name", list_formats())
def test_random_arrays_are_ordinary_numbers(name):
    x = cases.random_array(get_format(name), (64, 256), np).dequantize(dtype="float32")
    assert np.isfinite(x).all() and x.std() > 0


def test_linear_reports():
    found = [
        Product("kbit4", 64, 32, 1, 10.0, 12.5, 0.75, {"cuBLAS bf16": 30.0}),
        Product("nf4", 64, 32, 512, 100.0, 12.5, 0.25, {}),
    ]
    report = LinearReport("cuda:0", ABOUT, 4000.0, found, ["left out"])
    document = json.loads(report.json())
    assert document["copy_gb_per_s"] == 4000 and document["products"][0]["peers"] == {"cuBLAS bf16": 30.0}
    lines = report.text().splitlines()
    assert lines[-2].split() == ["kbit4", "64", "x", "32", "1", "10.0", "12.5", "0.75", "30.0"]
    assert report.markdown().splitlines()[3].startswith("| nf4 | 64 x 32 | 512 | 100.0 | 12.5 | 0.25 |")


# ---- ggml ----


@pytest.fixture(scope="module")
def ggml_on_cpu():
    files = list(importlib.metadata.files("pywhispercpp") or ()) if find_spec("pywhispercpp") else []
    found = [f.locate() for f in files if f.name.startswith("libggml-cpu")]
    if not found:
        pytest.skip("compiled ggml is not installed: pip install --no-deps pywhispercpp")
    backend = ggml.Backend(Path(str(found[0])), None)
    yield backend
    backend.close()


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "iq4_xs", "mxfp4", "q6_k", "tq1_0"])
def test_ggml_multiplies_what_is_timed(name, ggml_on_cpu):
    format = get_format(name)
    q = cases.random_array(format, (24, 512), np)
    blocks = format.to_blocks(q.planes).reshape(24, -1)
    x = np.random.default_rng(1).standard_normal((3, 512), np.float32)
    made = ggml.Products(ggml_on_cpu, format.ggml_type, blocks, x, 2, 4)
    made.compute()
    expected = x @ q.dequantize(dtype="float32").T
    assert np.abs(made.result(3) - expected).max() < 0.02 * np.abs(expected).max()  # it rounds tokens to 8 bits
    assert made.microseconds(1) > 0
    made.close()
    assert ggml.timed(ggml_on_cpu, format.ggml_type, blocks, 2, q.shape, 4 * blocks.nbytes, rounds=1) > 0


def test_ggml_is_asked_for_no_other_product(ggml_on_cpu):
    x = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="one of tokens"):
        ggml.Products(ggml_on_cpu, get_format("q8_1").ggml_type, np.zeros((2, 72), np.uint8), x, 1, 1)
    with pytest.raises(ValueError, match="a weight of 70 bytes, and ggml has 72"):
        ggml.Products(ggml_on_cpu, get_format("q4_0").ggml_type, np.zeros((2, 35), np.uint8), x, 1, 1)
    with pytest.raises(OSError, match="has no ggml_backend_cuda_init"):
        ggml.Backend(Path(ggml_on_cpu.library._name), 0)


def test_ggml_is_left_out_with_a_note(monkeypatch, tmp_path):
    report = LinearReport("cuda:0", ABOUT, 4000.0)
    session = SimpleNamespace(gpu=SimpleNamespace(ordinal=0, cold=1, stream=SimpleNamespace(synchronize=int)))
    others = products._Others(report, session, (32, 64))
    monkeypatch.delenv(ggml.VARIABLE, raising=False)
    monkeypatch.setattr(ggml, "_PACKAGES", ("no-such-package",))
    assert others.ggml(get_format("q4_0"), 1) == {} and "KBITCUPY_GGML may name one" in report.notes[0]
    (tmp_path / "libggml-cuda.so").write_text("no library")
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path / "libggml-cuda.so"))
    assert others.ggml(get_format("q4_0"), 1) == {} and report.notes[1].startswith("ggml left out: OSError")
    monkeypatch.setenv(ggml.VARIABLE, _multiarray_umath.__file__)  # a library, of something else
    assert others.ggml(get_format("q4_0"), 1) == {} and "is it a library of ggml?" in report.notes[2]
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path))
    assert others.ggml(get_format("q4_0"), 1) == {} and str(tmp_path) in report.notes[3] and len(report.notes) == 4


def test_ggml_has_a_column_where_it_was_timed():
    products_ = [
        Product("q4_0", 64, 32, 1, 10.0, 12.5, 0.75, {"ggml": 30.0}),
        Product("nf4", 64, 32, 1, 10.0, 12.5, 0.75, {}),
    ]
    assert "ggml" not in LinearReport("cuda:0", ABOUT, 4000.0, products_[1:]).markdown()
    table = LinearReport("cuda:0", ABOUT, 4000.0, products_).markdown().splitlines()
    assert (
        table[0].endswith("| tinygemm | ggml |") and table[2].endswith("|  | 30.0 |") and table[3].endswith("|  |  |")
    )


# ---- int8 activations ----


def test_w8a8_is_measured():
    host = Host()
    assert products.measure_w8a8(host, None, (48, 64), 3) == Product("int8", 48, 64, 3, 50.0, 12.0, 0.5, {})
    assert host.calls == [("product", "w8a8", True, 48 * 64, (3, 48))]


def test_torch_is_measured_beside_w8a8():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    host = Host()
    assert products.measure_w8a8(host, torch, (48, 64), 20).peers == {"int8": 50.0, "bf16": 50.0}
    assert [call[2:4] for call in host.calls] == [(True, 48 * 64), (False, 48 * 64), (False, 2 * 48 * 64)]
    assert products.measure_w8a8(host, torch, (48, 64), 16).peers == {"bf16": 50.0}  # fewer than torch takes


def test_w8a8_reports():
    found = [
        Product("int8", 64, 32, 1, 10.0, 12.5, 0.75, {"bf16": 30.0}),
        Product("int8", 64, 32, 512, 100.0, 12.5, 0.25, {"int8": 90.0}),
    ]
    report = W8A8Report("cuda:0", ABOUT, 4000.0, found, ["left out"])
    assert json.loads(report.json())["notes"] == ["left out"]
    lines = report.text().splitlines()
    assert lines[-2].split() == ["64", "x", "32", "1", "10.0", "12.5", "0.75", "30.0", "3.00"]
    assert lines[-1].split() == ["64", "x", "32", "512", "100.0", "12.5", "0.25", "90.0", "0.90"]
    table = report.markdown().splitlines()
    assert table[0].startswith("| N x K | M | us |")
    assert table[3] == "| 64 x 32 | 512 | 100.0 | 12.5 | 0.25 | 90.0 | 0.90 |  |  |"


# ---- runs ----


@pytest.mark.parametrize("run", [products.run_linear, products.run_w8a8])
def test_there_must_be_a_gpu(run):
    with pytest.raises(DeviceError, match="timed on a GPU only; device is 'cpu'"):
        run(device="cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--linear"], "timed on a GPU only"),
        (["--cells", "linear_w8a8/int8/4096x4096/*"], "timed on a GPU only"),
        (["--linear", "--sizes", "8"], "leave --sizes"),
        (["--w8a8", "--sizes", "1000"], "--w8a8 has shapes of its own"),
    ],
)
def test_the_command_refuses(capsys, words, message):
    assert cli.main(["bench", "--device", "cpu", *words]) == 1
    assert message in capsys.readouterr().err


def test_cells_of_several_parts_make_one_document(monkeypatch, capsys):
    linear, w8a8 = LinearReport("cuda:0", ABOUT, 4000.0, [], ["one"]), W8A8Report("cuda:0", ABOUT, 4000.0, [], ["one"])
    monkeypatch.setattr(products, "run_linear", lambda **_: linear)
    monkeypatch.setattr(products, "run_w8a8", lambda **_: w8a8)
    assert cli.main(["bench", "--json", "--cells", "linear*/4096x4096/1,linear*/*/4096x4096/1"]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)) == {"linear", "w8a8"} and err == "kbit: note: one\n"
    assert cli.main(["bench", "--json", "--w8a8"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cuda:0"


def test_a_small_run(cupy):
    report = products.run_linear([(256, 512)], tokens=[1, 40], quick=True)
    assert [(p.format, p.tokens) for p in report.products[:4]] == [("kbit4", 1), ("kbit4", 40), ("nf4", 1), ("nf4", 40)]
    assert all(p.us > 0 and p.peers["decode + cuBLAS"] > 0 for p in report.products)


def test_a_small_run_of_w8a8(cupy):
    report = products.run_w8a8([(512, 256)], tokens=[1, 32], quick=True)
    assert [(p.channels, p.depth, p.tokens) for p in report.products] == [(512, 256, 1), (512, 256, 32)]
    assert all(p.us > 0 and p.cpu_us > 0 for p in report.products)
