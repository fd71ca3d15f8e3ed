"""`kbit bench`: its rows, tables and errors. Of times only the sign is checked: the rest is the machine's affair."""

import json
import math
import sys
import types

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy import bench
from kbitcupy.backend import xp as _xp
from kbitcupy.bench import cases, peers, timing
from kbitcupy.cli import main
from kbitcupy.formats.base import Format, Plane, unregister

ROW_KEYS = {
    "kind",
    "format",
    "operation",
    "dtype",
    "elements",
    "us",
    "nbytes",
    "fraction",
    "cpu_us",
    "samples",
    "timed_by",
    "peer",
    "gb_per_s",
    "ns_per_element",
    "elements_per_s",
}
TINY = ["bench", "--device", "cpu", "--sizes", "2^10"]


class Half(Format):
    """A toy format: everything as float16."""

    name = "toy-half"
    bits = 16
    block = 1
    origin = "this test"
    summary = "rounds to float16"

    def __init__(self, *, broken: bool = False):
        self.broken = broken

    def options(self):
        return {"broken": self.broken}

    def planes(self, shape):
        return {"half": Plane("float16", (math.prod(shape),))}

    def encode_numpy(self, x, planes, given):
        planes["half"][:] = x.reshape(-1).astype(np.float16)

    def decode_numpy(self, planes, out):
        out[...] = planes["half"].reshape(out.shape)

    encode_cuda, decode_cuda = encode_numpy, decode_numpy


@pytest.fixture
def toy():
    kb.register(Half.name, Half)
    yield
    unregister(Half.name)


@pytest.fixture
def gguf(monkeypatch):
    """A stand-in for gguf-py, which need not be installed."""
    module, quants = types.ModuleType("gguf"), types.ModuleType("gguf.quants")
    module.GGMLQuantizationType = types.SimpleNamespace(Q4_0=2)
    quants.quantize = lambda x, kind: x.astype(np.int8)
    quants.dequantize = lambda q, kind: q.astype(np.float32)
    monkeypatch.setitem(sys.modules, "gguf", module)
    monkeypatch.setitem(sys.modules, "gguf.quants", quants)
    monkeypatch.setattr(peers, "HOST_PEERS", [peer for peer in peers.HOST_PEERS if peer.label == "gguf Q4_0"])
    return quants


def document(capsys, *words):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


# ---- NumPy ----


def test_the_table_has_a_row_for_each_operation(capsys):
    assert main([*TINY, "--formats", "kbit2,kbit8", "--dtypes", "float32,bfloat16", "--no-peers"]) == 0
    output = capsys.readouterr()
    machine, versions, *tables = output.out.splitlines()
    assert machine.endswith("times per core")
    for name in ("kbitcupy", "NumPy", "Python"):
        assert f"{name} " in versions
    rows = [line.split() for line in tables if line.startswith("kbit")]
    wanted = [[name, operation, "2^10"] for name in ("kbit2", "kbit8") for operation in ("quantize", "dequantize")]
    assert [row[:3] for row in rows] == wanted * 2
    assert all(float(number) > 0 for row in rows for number in row[3:])
    assert [line for line in tables if "(one core)" in line] == ["float32 (one core)", "bfloat16 (one core)"]
    done = [line.partition(": ")[0] for line in output.err.splitlines()]  # one line as each cell is done
    assert done == [
        f"{operation}/{name}/{dtype}/2^10"
        for dtype in ("float32", "bfloat16")
        for name in ("kbit2", "kbit8")
        for operation in ("quantize", "dequantize")
    ]


def test_json_has_the_whole_environment(capsys):
    found = document(capsys, *TINY, "--formats", "kbit4", "--no-peers")
    assert set(found) == {"kbitcupy", "device", "environment", "copy_gb_per_s", "launch_us", "rows", "notes"}
    assert found["kbitcupy"] == kb.__version__
    assert found["device"] == "cpu"
    assert set(found["environment"]) == {"cpu", "cpus", "platform", "versions"}
    assert found["notes"] == []
    nbytes = 1024 * 4 + kb.quantize(np.zeros(1024, np.float32), "kbit4").nbytes
    for row, operation in zip(found["rows"], ("quantize", "dequantize"), strict=True):
        assert set(row) == ROW_KEYS
        assert (row["kind"], row["format"], row["operation"], row["dtype"]) == ("numpy", "kbit4", operation, "float32")
        assert (row["elements"], row["nbytes"], row["fraction"], row["peer"]) == (1024, nbytes, None, False)
        assert row["samples"] == 3
        assert row["gb_per_s"] == pytest.approx(nbytes / row["us"] / 1e3)
        assert row["ns_per_element"] * row["elements_per_s"] == pytest.approx(1e9)


def test_markdown_stands_between_its_markers(capsys):
    assert main([*TINY, "--formats", "kbit1,kbit3", "--markdown", "--no-peers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("<!-- bench -->", "<!-- /bench -->")
    assert "| operation | dtype | kbit1 | kbit3 |" in lines
    assert sum(line.startswith(("| quantize | float32 |", "| dequantize | float32 |")) for line in lines) == 2


@pytest.mark.usefixtures("toy")
def test_every_registered_format_appears_by_itself(capsys):
    found = document(capsys, *TINY, "--no-peers", "--quick")
    assert list(dict.fromkeys(row["format"] for row in found["rows"])) == kb.list_formats(default=True)
    assert Half.name in kb.list_formats()


@pytest.mark.usefixtures("gguf")
def test_gguf_is_timed_beside_ours(capsys):
    found = document(capsys, *TINY, "--formats", "kbit4")
    peers = [(row["format"], row["operation"], row["dtype"]) for row in found["rows"] if row["peer"]]
    assert peers == [("gguf Q4_0", "quantize", "float32"), ("gguf Q4_0", "dequantize", "float32")]
    assert found["environment"]["versions"]["gguf"]


def test_bitsandbytes_and_torch_are_timed_on_one_core_too(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    threads, seen = torch.get_num_threads(), []
    time_on_core = timing.time_on_core

    def watched(*arguments, **options):
        seen.append(torch.get_num_threads())
        return time_on_core(*arguments, **options)

    monkeypatch.setattr(cases, "time_on_core", watched)
    monkeypatch.setattr(peers, "HOST_PEERS", [peer for peer in peers.HOST_PEERS if peer.label != "gguf Q4_0"])
    found = document(capsys, *TINY, "--formats", "kbit4")
    assert found["notes"] == []
    assert [(row["format"], row["operation"]) for row in found["rows"] if row["peer"]] == [
        ("bitsandbytes NF4", "quantize_4bit"),
        ("bitsandbytes NF4", "dequantize_4bit"),
        ("torch", "copy_"),
        ("torch", "clone"),
    ]
    assert {"torch", "bitsandbytes"} <= set(found["environment"]["versions"])
    assert seen[-4:] == [1] * 4 and torch.get_num_threads() == threads


def test_a_format_with_options_is_timed(capsys):
    found = document(capsys, *TINY, "--formats", "kbit4,nf4:block=32,double_quant=true", "--no-peers")
    names = ["kbit4", "kbit4", "nf4:block=32,double_quant=true", "nf4:block=32,double_quant=true"]
    assert [row["format"] for row in found["rows"]] == names
    assert main([*TINY, "--formats", "nf4:block=32", "--no-peers", "--markdown"]) == 0
    assert "| operation | dtype | nf4:block=32 |" in capsys.readouterr().out


def test_a_peer_that_fails_costs_one_line(gguf, capsys):
    def refuse(*_):
        raise RuntimeError("no blocks\nof 1024" + " and so on" * 100)

    gguf.dequantize = refuse
    assert main([*TINY, "--formats", "kbit4"]) == 0
    output = capsys.readouterr()
    assert "dequantize/gguf-Q4_0/float32/2^10: left out" in output.err.splitlines()
    (note,) = [line for line in output.err.splitlines() if line.startswith("kbit: note: ")]
    assert note.startswith("kbit: note: gguf Q4_0 left out: no blocks of 1024") and len(note) < 300
    assert "gguf Q4_0  quantize" in output.out and "gguf Q4_0  dequantize" not in output.out


def test_a_peer_that_is_not_installed_is_no_news(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    nothing = peers.Peer("nothing", ("no_such_module_at_all",), None, ("decode",))
    gguf = [peer for peer in peers.HOST_PEERS if peer.label == "gguf Q4_0"]
    monkeypatch.setattr(peers, "HOST_PEERS", [nothing, *gguf])
    assert main([*TINY, "--formats", "kbit4"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 2  # those of kbit4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--formats", "kbit9"], "format is 'kbit9'; registered are kbit1, "),
        (["--formats", "kbit4,"], "format"),
        (["--sizes", "2^41"], "size is '2^41'; it must be a number of elements from 1 to 2^40"),
        (["--sizes", "2^99999"], "size is '2^99999'; it must be "),
        (["--sizes", "1M"], "size is '1M'; it must be "),
        (["--sizes", "2^10,"], "size is ''; it must be "),
        (["--sizes", "0"], "size is '0'; it must be "),
        (["--sizes", "-5"], "size is '-5'; it must be "),
        (["--dtypes", "int8"], "dtype is int8; allowed are float16, "),
        (["--device", "tpu"], "device is 'tpu'; allowed are 'auto', 'cpu' and 'cuda:N'"),
    ],
)
def test_bad_input_exits_1_with_one_line(capsys, words, message):
    assert main([*TINY, *words]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("kbit: error: " + message)
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--json", "--markdown"], ["--sizes"], ["file"], ["--repeat", "3"]])
def test_bad_usage_exits_2(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    assert stop.value.code == 2
    assert "usage: kbit" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_has_a_remedy(capsys):
    if _xp.resolve_device("auto") != "cpu":
        pytest.skip("there is a GPU")
    assert main(["bench", "--device", "cuda:0"]) == 1
    assert capsys.readouterr().err.startswith("kbit: error: a CUDA device was asked for but CuPy ")


@pytest.mark.usefixtures("toy")
def test_a_format_that_fails_is_named(monkeypatch, capsys):
    def encode(self, x, planes, given):
        raise ValueError("odd")

    monkeypatch.setattr(Half, "encode_numpy", encode)
    monkeypatch.setattr(Half, "encode_cuda", encode)
    assert main([*TINY, "--formats", Half.name]) == 1
    assert capsys.readouterr().err == "kbit: error: quantize/toy-half/float32/2^10: odd\n"


# ---- cells ----


def test_cells_are_chosen_by_name(capsys):
    assert main([*TINY, "--no-peers", "--cells", "quantize/kbit[23]/*,dequantize/nf4/float32/2^10"]) == 0
    output = capsys.readouterr()
    names = ["quantize/kbit2/float32/2^10", "quantize/kbit3/float32/2^10", "dequantize/nf4/float32/2^10"]
    assert [line.partition(": ")[0] for line in output.err.splitlines()] == names
    rows = [line.split()[:2] for line in output.out.splitlines() if line.startswith(("kbit2", "kbit3", "nf4"))]
    assert rows == [["kbit2", "quantize"], ["kbit3", "quantize"], ["nf4", "dequantize"]]


def test_cells_are_listed_without_being_timed(capsys):
    assert main([*TINY, "--formats", "kbit4", "--no-peers", "--list-cells"]) == 0
    assert capsys.readouterr().out.split() == ["quantize/kbit4/float32/2^10", "dequantize/kbit4/float32/2^10"]
    assert main(["bench", "--device", "cuda:0", "--list-cells", "--cells", "*/nf4/*"]) == 0
    names = capsys.readouterr().out.split()
    for name in (
        "quantize/nf4/float16/2^28",
        "dequantize:block-4096/nf4/bfloat16/2^28",
        "cpu/nf4/float16/2^12",
        "linear/nf4/28672x8192/512",
        "linear_grouped/nf4/128x768x2048/8",
    ):
        assert name in names
    assert len(set(names)) == len(names)


def test_a_run_stops_at_its_limit(capsys):
    assert main([*TINY, "--no-peers", "--formats", "kbit2,kbit4", "--limit", "1e-9"]) == 0
    output = capsys.readouterr()
    note = "kbit: note: stopped after 1e-09 s: 4 of 4 cells are left, from quantize/kbit2/float32/2^10\n"
    assert output.err == note and "times per core" in output.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cells", "quantise/*"], "no cell is named 'quantise/*': kbit bench --list-cells prints their names"),
        (["--linear", "--dtypes", "float16"], "--linear has shapes of its own"),
    ],
)
def test_cells_that_are_not_there(capsys, words, message):
    assert main(["bench", "--device", "cpu", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_what_memory_does_not_hold_is_left_out():
    def refuse():
        raise MemoryError

    done, notes = [], []
    cells = [timing.Cell("large", ("a",), refuse), timing.Cell("small", ("b",), lambda: "1 us")]
    timing.Selection(say=done.append).time(cells, notes, lambda: None)
    assert (done, notes) == (["small: 1 us"], ["large: not enough GPU memory"])


# ---- what a GPU run is made of ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rescaled_data_needs_a_tensor_scale(dtype):
    dtype = _xp.float_dtype(dtype)
    assert "quantize, s != 1" in [case.operation for case in cases.gpu_cases(kb.get_format("kbit4"), dtype)]
    unscaled = cases.gpu_cases(kb.get_format("kbit4", absmax="float32"), dtype)
    assert "quantize, s != 1" not in [case.operation for case in unscaled]
    assert [case.operation for case in cases.gpu_cases(Half(), dtype)] == ["quantize", "dequantize"]


def test_every_case_runs_and_counts_its_bytes():
    x = timing.Source(1000).array(1000, np.dtype("float16"))
    for case in cases.gpu_cases(kb.get_format("kbit3"), x.dtype):
        call, nbytes = case.prepare(x)
        call()
        compressed = 32 * (3 * 4 + 1)  # blocks of 32: 3 words and 1 byte; then padding, tensor scale or codebook
        assert 2000 + compressed <= nbytes <= 2000 + compressed + 36


@pytest.mark.parametrize("name", ["q4_k", "mxfp4"])
def test_raw_blocks_are_timed(name):
    x = timing.Source(1024).array(1024, np.dtype("float16"))
    raw = [case for case in cases.gpu_cases(kb.get_format(name), x.dtype) if case.operation.startswith("raw")]
    assert [case.operation for case in raw] == ["raw, from blocks", "raw, to blocks"]
    for case in raw:
        call, nbytes = case.prepare(x)
        call()
        assert nbytes == 2 * 1024 // kb.gguf.block_size(name) * kb.gguf.type_size(name)
    others = cases.gpu_cases(kb.get_format(name), np.dtype("float32"))  # once is enough: no number is looked at
    assert [case.operation for case in others] == ["quantize", "dequantize"]


def test_source_repeats_beyond_its_pool(monkeypatch):
    monkeypatch.setattr(timing, "_POOL", 100)
    source = timing.Source(1000)
    x = source.array(250, np.dtype("float32"))
    assert np.array_equal(x[:50], x[200:]) and 0.5 < x.std() < 1.5
    first, second = (source.array(30, np.dtype("float16"), number=number) for number in range(2))
    assert first.dtype == np.float16 and not np.array_equal(first, second)


def test_report_of_a_gpu():
    versions = {"kbitcupy": "1", "CuPy": "2"}
    about = {"gpu": "Some GPU", "driver": None, "driver_cuda": "13.0", "cuda_runtime": "13.0", "nvrtc": "13.0"}
    report = bench.Report("cuda:0", {**about, "versions": versions}, 4000.0, 4.2)
    for elements, us in ((1 << 12, 2.0), (1 << 20, 3.0)):
        for name in ("kbit1", "kbit2"):
            report.rows.append(
                bench.Row("gpu", name, "quantize", "float16", elements, us, 6_000_000, 0.5, 7.0, 15, "graph")
            )
    report.rows.append(bench.Row("gpu", "kbit2", "dequantize", "float16", 1 << 20, 1.0, 6_000_000, 0.75))
    report.rows.append(bench.Row("gpu", "other", "decode", "float16", 1 << 20, 9.0, 6_000_000, 0.25, peer=True))
    report.rows.append(bench.Row("cpu", "kbit1", "quantize(out=)", "float16", 4096, 6.25))
    text = [line.split() for line in report.text().splitlines()]
    assert ["kbit1", "quantize", "2^12", "2.00", "3000.0", "0.50", "7.0"] in text
    assert ["kbit2", "dequantize", "2^20", "1.00", "6000.0", "0.75"] in text
    assert ["kbit1", "6.2"] in text
    lines = report.markdown().splitlines()
    assert (lines[0], lines[-1]) == ("<!-- bench -->", "<!-- /bench -->")
    assert "| operation | dtype | kbit1 | kbit2 |" in lines
    assert "| quantize | float16 | 0.50 | 0.50 |" in lines
    assert "| dequantize | float16 |  | 0.75 |" in lines
    assert "| other | decode | float16 | 0.25 |" in lines
    assert lines[-2] == ("Some GPU, driver unknown (CUDA 13.0), CUDA runtime 13.0, NVRTC 13.0; kbitcupy 1, CuPy 2.")
    assert json.loads(report.json())["rows"][0]["gb_per_s"] == pytest.approx(3000)


# ---- CUDA ----


@pytest.mark.usefixtures("cupy")
def test_on_a_gpu(capsys):
    found = document(capsys, "bench", "--quick", "--sizes", "2^12", "--formats", "kbit4", "--no-peers")
    assert found["device"] == "cuda:0"
    assert {"gpu", "compute_capability", "l2_bytes", "driver", "cuda_runtime", "nvrtc"} <= set(found["environment"])
    assert "CuPy" in found["environment"]["versions"]
    assert found["copy_gb_per_s"] > 0 and found["launch_us"] > 0
    assert found["notes"] == []
    timed = {row["operation"]: row for row in found["rows"] if row["kind"] == "gpu"}
    assert set(timed) == {
        "quantize",
        "quantize, s != 1",
        "dequantize",
        "quantize_kbit",
        "dequantize_kbit",
        "quantize, unsorted",
        "quantize, device codebook",
    }
    for row in timed.values():
        assert set(row) == ROW_KEYS
        assert (row["dtype"], row["elements"], row["timed_by"]) == ("float16", 4096, "graph")
        assert min(row[key] for key in ("us", "nbytes", "fraction", "cpu_us", "gb_per_s", "samples")) > 0
    calls = {row["operation"]: row["us"] for row in found["rows"] if row["kind"] == "cpu"}
    assert set(calls) == {
        "quantize",
        "quantize(out=)",
        "dequantize",
        "dequantize(out=)",
        "quantize_kbit",
        "dequantize_kbit",
    }
    assert min(calls.values()) > 0


@pytest.mark.usefixtures("cupy", "toy")
def test_a_format_that_synchronises_is_timed_without_a_graph(monkeypatch, capsys):
    encode = Half.encode_cuda

    def synchronising(self, x, planes, given):
        encode(self, x, planes, given)
        x.reshape(-1)[0].get()

    monkeypatch.setattr(Half, "encode_cuda", synchronising)
    found = document(capsys, "bench", "--quick", "--sizes", "2^12", "--formats", Half.name, "--no-peers")
    how = {row["operation"]: row["timed_by"] for row in found["rows"] if row["kind"] == "gpu"}
    assert how == {"quantize": "events", "dequantize": "graph"}
