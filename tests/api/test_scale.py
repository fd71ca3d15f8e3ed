"""The jobs of .ci/scale.py, small and on the host, which stands for both GPUs."""

import contextlib
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb

FILE = Path(__file__).resolve().parent.parent.parent / ".ci" / "scale.py"
SPEC = importlib.util.spec_from_file_location("scale", FILE)
scale = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(scale)


class Array(np.ndarray):
    """NumPy's, with what an array on a GPU has beside."""

    def set(self, x, stream):
        self[...] = x


class Cuda:
    """CuPy, as far as the prototype asks for it."""

    Device = Stream = staticmethod(lambda *_, **__: contextlib.nullcontext())
    alloc_pinned_memory = staticmethod(lambda nbytes: np.empty(nbytes + 100, np.uint8))
    empty = staticmethod(lambda shape, dtype: np.empty(shape, dtype).view(Array))
    asnumpy = staticmethod(lambda x, out: np.copyto(out, x))


Cuda.cuda = Cuda


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(scale, "SHAPE", (32, 64))
    monkeypatch.setattr(scale, "ELEMENTS", 1 << 14)
    monkeypatch.setattr(scale, "_cupy", lambda: Cuda)
    monkeypatch.setattr(scale, "devices", lambda: ["cpu", "cpu"])
    return tmp_path


def test_every_job_has_the_bytes_of_one_worker(small, capsys, monkeypatch):
    """All of them by threads: processes take seconds to begin."""
    threads = scale.executors.local
    monkeypatch.setattr(scale.executors, "local", lambda workers, gpus=(), nbytes=0: threads(workers, ["cpu"]))
    scale.main([str(small), "gpus", "numpy", "--rounds", "1", "--shards", "16"])
    found = capsys.readouterr().out
    assert "NO" not in found.split()
    for direction in ("quantize", "dequantize"):
        for who in ("1 worker", "8 workers on each of two, threads", "4 workers on each of two, processes"):
            assert f"{direction}, {who}, GB/s" in found
        assert f"{direction}, 8 workers on each of two GPUs beside 8 on one" in found
    assert "dequantize, 4 workers beside the prototype" in found
    assert "the RAM disk itself: 2 threads that write beside 1" in found
    assert "dequantize, reading and writing alone: 16 threads beside 8" in found
    assert "NumPy, 8 processes and their start beside one" in found
    assert "0 GB of the RAM disk written to beforehand" in found
    assert not list(small.iterdir())


def test_what_two_gpus_could_gain(capsys):
    """By hand: one thread reads a byte in 4 s and writes one in 2 s, two together in 2 s and 1.5 s."""
    seconds = {"read": {1: 4, 2: 2, 4: 2, 8: 1, 16: 1}, "write": {1: 2, 2: 1.5, 4: 1, 8: 1, 16: 1}}
    scale._say_disk("quantize", 10, 4, seconds, scale.Lines())
    assert re.findall(r"(\d+) threads beside (\d+) +([\d.]+)", capsys.readouterr().out) == [
        ("2", "1", "1.85"),
        ("8", "4", "1.71"),
        ("16", "8", "1.00"),
    ]


def test_some_shards_are_enough_for_one_worker():
    who = ("1 worker", "1 worker on each of two, threads", "prototype of 1")
    assert all(map(scale._alone, who))
    assert not any(map(scale._alone, ("8 workers", "8 workers on each of two, threads", "1 worker of dask-cuda")))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, which says what a process has")
def test_peak_of_memory(small, capsys, monkeypatch):
    kb.io.save(small / "a.safetensors", {"w": np.zeros((64, 64), np.float32)})
    base, counted = scale._peak("quantize", small / "a.safetensors", small / "b.safetensors", 1, "cpu", scale._TRIED)
    assert 1e7 < base < 1e9
    assert kb.io.load(small / "b.safetensors")["w"].shape == (64, 64)
    assert 0.9 * scale._TRIED < counted < 1.1 * scale._TRIED
    with pytest.raises(RuntimeError, match="1, kbit: error: .* does not exist"):
        scale._peak("dequantize", small / "c.safetensors", small / "b.safetensors", 1, "cpu")

    def peak(direction, source, out, workers, device, tried=0):
        if out.name == "out":
            scale.job(direction, source, out, None, device)
        return (1e9, tried * kinds) if tried else (1e9 + workers * 2 * 32 * 64 * 2, 0)

    monkeypatch.setattr(scale, "_peak", peak)
    for kinds in (1, 0):  # what is not counted is said
        assert scale.main([str(small), "memory", "--shards", "2"]) == 1 - kinds
        assert capsys.readouterr().out.count("peak over workers x largest tensor") == 4


@pytest.mark.skipif(not hasattr(scale.os, "sched_getaffinity"), reason="needs a system that tells its CPUs")
@pytest.mark.parametrize(
    ("siblings", "cores"), [(str, "4 CPUs, of 4 cores"), (lambda cpu: str(cpu // 2), "of 2 cores")]
)
def test_two_threads(small, monkeypatch, capsys, siblings, cores):
    seconds = {"nf4 of float32": ([2.0, 1.9, 2.0], [1.0, 1.0, 2.0]), scale.HASHING: ([2.0], [1.5])}
    monkeypatch.setattr(scale.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(scale, "_siblings", siblings)
    monkeypatch.setattr(scale, "ProcessPoolExecutor", lambda *_: Inline(seconds))
    assert not scale.main([str(small), "cores"])
    printed = capsys.readouterr().out
    assert cores in printed and ("may share" in printed) == (siblings is not str)
    assert re.search(r"workers=2 beside 1: nf4 of float32 +1.90  at least 1.7 +met +medians 2.00, of 3 and 3", printed)
    assert "ms: 1900.0 1900.0 2000.0 and 1000.0" in printed and "shards" not in printed


def test_times_of_two_threads(small, monkeypatch):
    """Threads stand for the processes."""
    monkeypatch.setattr(
        scale, "ProcessPoolExecutor", lambda count, _, *begin: scale.ThreadPoolExecutor(count, "", *begin)
    )
    found = scale._two_threads(0, 9)
    what = [*(f"{format} of {dtype}" for format, dtype in scale.CORES), scale.HASHING, scale.APART]
    assert list(found) == what
    assert all(len(one) == len(two) == scale.LEAST_ROUNDS and min(*one, *two) > 0 for one, two in found.values())


def test_turns_end_in_time():
    told = []
    calls = {name: lambda is_first, name=name: told.append((name, is_first)) or len(told) for name in "ab"}
    assert scale.in_turns(calls, 0, 9) == {"a": [1, 3], "b": [2, 4]}
    assert told == [("a", True), ("b", True), ("a", False), ("b", False)]
    assert scale.in_turns(calls, float("inf"), 1) == {"a": [5], "b": [6]}
    assert len(scale.in_turns(calls, float("inf"), 7)["a"]) == 7


def test_memory_that_there_is_not_is_left_alone(small, monkeypatch):
    monkeypatch.setattr(scale, "TOUCHED", 1 << 10)
    monkeypatch.setattr(scale, "MOMENT", 0)
    left = [8e9, 8e9, 0]
    monkeypatch.setattr(scale, "available", lambda: left.pop(0) if len(left) > 1 else left[0])
    assert scale.touch(small / "touched", (1 << 12) - 1) == 1 << 11
    left[:] = [0, 0, 8e9]
    assert scale.touch(small / "touched", (1 << 12) - 1) == 1 << 12
    assert not list(small.iterdir())


class Inline(scale.executors.Inline):
    """Gives what was not measured."""

    def __init__(self, found):
        self.found = found

    def submit(self, function, *arguments):
        return super().submit(lambda: self.found)


def test_bytes_that_differ_are_seen(small):
    for name in ("a", "b"):
        scale.write_checkpoint(small / name, 2)
    assert scale.same(small / "a", small / "b")
    path = small / "b" / scale._name(1, 2)
    data = np.fromfile(path, np.uint8)
    data[-1] ^= 1
    data.tofile(path)
    assert not scale.same(small / "a", small / "b")
    (small / "c").mkdir()
    assert not scale.same(small / "c", small / "a")


def test_what_falls_short_is_named(capsys):
    lines = scale.Lines()
    lines.add("a", 1.6, 1.7), lines.add("b", 1.8, 1.7), lines.add("c", 3.0, most=2.5), lines.add("d", 1.0)
    lines.right("e", True), lines.right("f", False)
    lines.ratio("g", [3.0, 4.0], [2.0, 2.5], 1.7), lines.ratio("h", [3.0, 4.0], [1.5, 9.0], 1.7)
    assert [line[0] for line in lines.short] == ["a", "c", "f", "g"]
