"""``--workers``, ``--device A,B`` and ``--scheduler``: what several workers make is what one makes."""

import json
import sys

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main, workers
from kbitcupy.io import executors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("workers")
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) for i in range(6)}
    kb.io.save(top / "shards", tensors, max_shard_size=40_000)
    kb.io.save(top / "file.safetensors", {"other": tensors["w0"], **tensors})
    return top


def ran(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_files_have_the_same_bytes(folder, tmp_path, capsys):
    sources = [folder / "shards", folder / "file.safetensors"]
    for name, more in (("one", ["--workers", 1]), ("two", ["--workers", 2, "--device", "cpu,cpu"])):
        ran(capsys, "quantize", *sources, "-o", tmp_path / name, "--device", "cpu", *more)
        ran(capsys, "dequantize", tmp_path / name / "shards", "-o", tmp_path / f"{name}-back", "--device", "cpu", *more)
    for one in (path for path in tmp_path.glob("one*/**/*") if path.is_file()):
        two = tmp_path / str(one.relative_to(tmp_path)).replace("one", "two", 1)
        assert two.read_bytes() == one.read_bytes()
    assert len([path for path in tmp_path.glob("two*/**/*") if path.is_file()]) == 2 * 3 + 3


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "--formats", "kbit3,nf4,int8:block=32", "--json"),
        ("compare", "--best", "4.3", "--formats", "kbit4,nf4", "--json"),
        ("plan", "--bits", "4", "--formats", "kbit3,kbit4,kbit5", "-o", "plan.json"),
    ],
    ids=lambda words: words[1],
)
def test_measurements_are_the_same(folder, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    found = []
    for count in (1, 2):
        command, *more = words
        said = ran(capsys, command, folder / "shards", *more, "--workers", count, "--device", "cpu", *FORCE[command])
        found.append(json.loads((tmp_path / "plan.json").read_text() if command == "plan" else said))
    assert found[0].keys() == found[1].keys()
    assert numbers(found[0]) == pytest.approx(numbers(found[1]), rel=1e-9)  # sums are taken in another order
    assert texts(found[0]) == texts(found[1])


FORCE = {"compare": (), "plan": ("--force",)}


def leaves(document):
    if isinstance(document, (dict, list)):
        return [
            leaf for each in (document.values() if isinstance(document, dict) else document) for leaf in leaves(each)
        ]
    return [document]


def numbers(document):
    return [leaf for leaf in leaves(document) if isinstance(leaf, (int, float))]


def texts(document):
    return [leaf for leaf in leaves(document) if not isinstance(leaf, (int, float))]


def test_the_page_of_two_workers_has_every_histogram(folder, tmp_path, capsys):
    pages = []
    for count in (1, 2):
        out = tmp_path / f"{count}.html"
        words = ["--formats", "kbit3,kbit4", "--html", out, "--workers", count, "--device", "cpu"]
        ran(capsys, "compare", folder / "shards", *words)
        pages.append(out.read_text())
    assert pages[0].count("<svg") == pages[1].count("<svg") > 0
    assert all(f"w{i}" in page for page in pages for i in range(6))


@pytest.mark.parametrize("count", ["0", "-1", "two", ""])
def test_a_wrong_number_of_workers_is_bad_usage(folder, capsys, count):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(folder / "shards"), "-o", "x", "--bits", "4", f"--workers={count}"])
    assert ended.value.code == 2 and "is not a positive number of workers" in capsys.readouterr().err


def test_what_is_said_of_schedulers(folder, tmp_path, capsys, monkeypatch):
    words = ["compare", str(folder / "shards"), "--formats", "kbit4", "--device", "cpu"]
    assert main([*words, "--workers", "2", "--scheduler", "tcp://127.0.0.1:1"]) == 1
    assert "leave one away" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "distributed", None)
        assert main([*words, "--scheduler", "tcp://127.0.0.1:1"]) == 1
    assert "pip install 'kbitcupy[dask]'" in capsys.readouterr().err


def test_how_many_work_unasked(folder, tmp_path, monkeypatch):
    """One for little; for much the threads of a GPU, or a process for each core."""
    assert workers.size_of([str(folder / "file.safetensors")]) == (folder / "file.safetensors").stat().st_size
    index = folder / "shards" / "model.safetensors.index.json"
    assert workers.size_of([str(folder / "shards")]) == workers.size_of([str(index)]) > 6 * 64 * 64 * 4
    assert workers.size_of([str(folder / "nothing")]) == 0
    assert executors.default_workers(executors.LARGE - 1, 1) == 1
    for cores, none, one, four in ((3, 3, 8, 8), (20, 8, 8, 20), (64, 8, 8, 32)):
        monkeypatch.setattr(executors, "cores", lambda cores=cores: cores)
        assert [executors.default_workers(executors.LARGE, gpus) for gpus in (0, 1, 4)] == [none, one, four]
    with executors.local(1, ["cuda:0"]) as nobody, executors.local(2, ["cuda:0"]) as threads:
        assert nobody is None and executors.is_local(threads) and executors.workers_of(threads) == 2


@pytest.mark.parametrize(
    ("workers", "gpus", "nbytes", "processes", "threads"),
    [
        (5, 2, executors.APART, 2, 6),
        (9, 2, executors.APART, 4, 12),
        (5, 2, executors.APART - 1, 0, 5),
        (2, 2, executors.APART, 2, 2),
        (2, 3, executors.APART, 0, 2),
    ],
)
def test_each_of_several_gpus_has_processes_where_there_is_much(workers, gpus, nbytes, processes, threads):
    """Here the host stands for all."""
    with executors.local(workers, ["cpu"] * gpus, nbytes) as made:
        assert len(getattr(made, "processes", ())) == processes
        assert executors.workers_of(made) == threads
