"""The benchmark of W8A8 products: what it prints, what it refuses, and a small run."""

import json

import numpy as np
import pytest

from kbitcupy import bench, cli
from kbitcupy.bench import w8a8 as bench_w8a8
from kbitcupy.errors import DeviceError


class Host:
    """Times nothing: runs the call once on NumPy and gives round numbers."""

    cupy = np

    def __init__(self):
        self.calls = []

    def time(self, case, name, inputs):
        call, nbytes = case.prepare(inputs(0))
        other, _ = case.prepare(inputs(1))
        other()
        self.calls.append((case.operation, case.capture, call().shape, nbytes))
        return bench.Row("gpu", name, case.operation, "int8", 1, 50.0, nbytes, 0.5, 12.0)


@pytest.fixture
def report():
    products = [
        bench_w8a8.Product(64, 32, 1, 10.0, 12.5, 0.75, None, 30.0),
        bench_w8a8.Product(64, 32, 512, 100.0, 12.5, 0.25, 90.0, None),
    ]
    return bench_w8a8.Report("cuda:0", {"gpu": "A", "versions": {"NumPy": "2"}}, 4000.0, products, ["left out"])


def test_measure_runs_the_product():
    host = Host()
    products = bench_w8a8.measure(host, None, (48, 64), (3, 5))
    assert host.calls == [("product", True, (count, 48), 48 * 64) for count in (3, 5)]
    assert products == [bench_w8a8.Product(48, 64, count, 50.0, 12.0, 0.5) for count in (3, 5)]


def test_measure_runs_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    host = Host()
    (product,) = bench_w8a8.measure(host, torch, (48, 64), (20,))
    assert [call[1:] for call in host.calls] == [
        (True, (20, 48), 48 * 64),
        (False, (20, 48), 48 * 64),
        (False, (20, 48), 2 * 48 * 64),
    ]
    assert product.of_int8 == product.of_bfloat16 == 1
    assert bench_w8a8.measure(host, torch, (48, 64), (16,))[0].int8_us is None  # fewer than torch takes


def test_reports(report):
    document = json.loads(report.json())
    assert document["copy_gb_per_s"] == 4000 and document["notes"] == ["left out"]
    assert [(p["of_int8"], p["of_bfloat16"]) for p in document["products"]] == [(None, 3.0), (0.9, None)]
    lines = report.text().splitlines()
    assert lines[-2].split() == ["64", "x", "32", "1", "10.0", "12.5", "0.75", "30.0", "3.00"]
    assert lines[-1].split() == ["64", "x", "32", "512", "100.0", "12.5", "0.25", "90.0", "0.90"]
    table = report.markdown().splitlines()
    assert (
        table[0].startswith("| N x K | M | us |")
        and table[3] == "| 64 x 32 | 512 | 100.0 | 12.5 | 0.25 | 90.0 | 0.90 |  |  |"
    )


def test_needs_a_gpu():
    with pytest.raises(DeviceError, match="timed on a GPU only; device is 'cpu'"):
        bench_w8a8.run(device="cpu")


def test_command(monkeypatch, capsys, report):
    monkeypatch.setattr(bench_w8a8, "run", lambda *, device, quick: report)
    assert cli.main(["bench", "--w8a8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"] == "cuda:0" and "left out" in err
    assert cli.main(["bench", "--w8a8", "--sizes", "1000"]) == 1
    assert "--w8a8 has shapes of its own" in capsys.readouterr().err
    assert cli.main(["bench", "--w8a8", "--device", "cpu"]) == 0


def test_small_run(cupy):
    report = bench_w8a8.run([(512, 256)], tokens=[1, 32], quick=True)
    assert [(p.channels, p.depth, p.tokens) for p in report.products] == [(512, 256, 1), (512, 256, 32)]
    assert all(p.us > 0 and p.cpu_us > 0 for p in report.products)
