"""The benchmark of products with compressed weights: what it prints, what it refuses, and a small run on NumPy."""

import json

import numpy as np
import pytest

from kbitcupy import bench, cli
from kbitcupy.bench import linear as bench_linear
from kbitcupy.errors import DeviceError
from kbitcupy.formats.base import get_format, list_formats


class Host:
    """Times nothing: runs the call once on NumPy and gives round numbers."""

    cupy = np

    def __init__(self):
        self.calls = []

    def time(self, case, name, inputs):
        call, nbytes = case.prepare(inputs(0))
        case.prepare(inputs(1))[0]()
        call()
        self.calls.append((case.operation, name, nbytes))
        return bench.Row("gpu", name, case.operation, "float16", 1, 50.0, nbytes, 0.5, 12.0)


@pytest.fixture
def report():
    products = [
        bench_linear.Product("kbit4", 64, 32, 1, 10.0, 12.5, 0.75, {"cuBLAS bf16": 30.0}),
        bench_linear.Product("nf4", 64, 32, 512, 100.0, 12.5, 0.25, {}),
    ]
    return bench_linear.Report("cuda:0", {"gpu": "A", "versions": {"NumPy": "2"}}, 4000.0, products, ["left out"])


@pytest.mark.parametrize("name", ["kbit2", "kbit4", "nf4"])
def test_measure_runs_both_ways(name):
    host, format = Host(), get_format(name)
    products = bench_linear.measure(host, format, (48, 64), (3, 5), {3: {"tinygemm": 5.0}})
    nbytes = bench_linear.random_weight(format, (48, 64), np).nbytes
    assert host.calls == [("linear", name, nbytes), ("decode + cuBLAS", name, nbytes)] * 2
    assert products == [
        bench_linear.Product(name, 48, 64, tokens, 50.0, 12.0, 0.5, {"decode + cuBLAS": 50.0, **peers})
        for tokens, peers in ((3, {"tinygemm": 5.0}), (5, {}))
    ]


@pytest.mark.parametrize("name", ["kbit4", "nf4"])
def test_experts_are_measured(name, monkeypatch):
    monkeypatch.setattr(bench_linear, "EXPERTS", (6, 16, 64, 2))
    host = Host()
    product = bench_linear.measure_experts(host, None, get_format(name), 1)
    whole = bench_linear.random_weight(get_format(name), (6 * 16, 64), np)
    assert host.calls == [("linear_grouped", name, whole.nbytes * 2 // 6)]  # those that are chosen
    assert product == bench_linear.Product(f"{name}, 2 of 6", 16, 64, 1, 50.0, 12.0, 0.5, {})


def test_random_weights_are_ordinary_numbers():
    for name in {*bench_linear.FORMATS, *bench_linear.EXTRA_FORMATS} & set(list_formats()):
        w = bench_linear.random_weight(get_format(name), (64, 128), np).dequantize(dtype="float32")
        assert np.isfinite(w).all() and 0.01 < w.std() < 10 and np.unique(w).size > 20


def test_reports(report):
    document = json.loads(report.json())
    assert document["copy_gb_per_s"] == 4000 and document["products"][0]["peers"] == {"cuBLAS bf16": 30.0}
    lines = report.text().splitlines()
    assert lines[-2].split() == ["kbit4", "64", "x", "32", "1", "10.0", "12.5", "0.75", "30.0"]
    assert report.markdown().splitlines()[3].startswith("| nf4 | 64 x 32 | 512 | 100.0 | 12.5 | 0.25 |")


def test_there_must_be_a_gpu(capsys):
    with pytest.raises(DeviceError, match="device is 'cpu'"):
        bench_linear.run(device="cpu")
    assert cli.main(["bench", "--linear", "--device", "cpu"]) == 1
    assert "timed on a GPU only" in capsys.readouterr().err
    assert cli.main(["bench", "--linear", "--sizes", "8"]) == 1
    assert "leave --sizes" in capsys.readouterr().err


def test_a_small_run(cupy):
    report = bench_linear.run([(256, 512)], tokens=[1, 40], quick=True)
    assert [(p.format, p.tokens) for p in report.products[:4]] == [("kbit4", 1), ("kbit4", 40), ("nf4", 1), ("nf4", 40)]
    assert all(p.us > 0 and p.peers["decode + cuBLAS"] > 0 for p in report.products)
