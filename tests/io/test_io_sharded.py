"""Checkpoints in shards, lazy loading, memory, and work that is interrupted: the old output or the new one."""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io import atomic, conversion, convert

ROOT = Path(kb.__file__).resolve().parent.parent
INDEX = "model.safetensors.index.json"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and limits are POSIX's")


def tensors(count=6):
    """Matrices to compress, and tensors to copy, one of a dtype that NumPy cannot hold."""
    rng = np.random.default_rng(0)
    found = {f"layer{i}.weight": rng.standard_normal((64, 64)).astype(np.float32) for i in range(count)}
    found.update((f"layer{i}.bias", np.arange(64, dtype=np.float16) + i) for i in range(count))
    found["fp8"] = rng.standard_normal((32, 32)).astype(ml_dtypes.float8_e4m3fn)
    return found


@pytest.fixture
def source(tmp_path):
    """A checkpoint of several shards."""
    path = tmp_path / "source"
    kb.io.save(path, tensors(), {"format": "pt"}, max_shard_size=40_000)
    assert sum(file.name.endswith(".safetensors") for file in path.iterdir()) >= 3
    return path


def shards(path):
    return sorted(file.name for file in path.glob("*.safetensors"))


def weight_map(path):
    return json.loads((path / INDEX).read_text())["weight_map"]


def contents(path):
    """Everything in a folder: name -> bytes."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


# ---- load and save ----


def test_save_makes_an_index_that_says_where_everything_is(source):
    wanted = tensors()
    index = json.loads((source / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in wanted.values())}
    assert index["weight_map"].keys() == wanted.keys()
    count = len(shards(source))
    assert shards(source) == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name in shards(source):
        inside = kb.io.load(source / name)
        assert inside.nbytes <= 40_000
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == set(inside)


def test_load_is_a_mapping_of_all_shards(source):
    wanted = tensors()
    for path in (source, source / INDEX, str(source)):
        found = kb.io.load(path)
        assert len(found) == len(wanted) and set(found) == set(wanted)
        assert found.metadata == {"format": "pt"}
        for name, x in wanted.items():
            assert found[name].dtype == x.dtype and found[name].tobytes() == x.tobytes()
        with pytest.raises(KeyError):
            found["missing"]
    assert "13 tensors, 0 of them compressed" in repr(found)


def test_one_shard_needs_no_index(tmp_path):
    kb.io.save(tmp_path / "a", tensors(), max_shard_size=10**9)
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    assert len(kb.io.load(tmp_path / "a")) == len(tensors())


def test_what_was_loaded_is_saved_tensor_by_tensor(source, tmp_path):
    convert.quantize_file(source, tmp_path / "small", "kbit4", device="cpu")
    kb.io.save(tmp_path / "one.safetensors", kb.io.load(tmp_path / "small"), {"format": "pt"})
    kb.io.save(tmp_path / "many", kb.io.load(tmp_path / "one.safetensors"), {"format": "pt"}, max_shard_size=6000)
    assert len(shards(tmp_path / "many")) > 2
    first, last = kb.io.load(tmp_path / "small"), kb.io.load(tmp_path / "many")
    for name in first:
        if isinstance(first[name], kb.QuantizedArray):
            assert first[name].config() == last[name].config()
            assert np.array_equal(first[name].dequantize(), last[name].dequantize())
        else:
            assert first[name].tobytes() == last[name].tobytes()


def test_a_file_may_be_saved_over_itself(tmp_path):
    path = tmp_path / "a"
    kb.io.save(path, {"x": np.arange(100_000)})
    loaded = kb.io.load(path)
    view = loaded["x"]
    kb.io.save(path, {"y": loaded["x"], "more": np.zeros(3)}, force=True)
    assert np.array_equal(view, np.arange(100_000)) and np.array_equal(loaded["x"], view)
    assert set(kb.io.load(path)) == {"y", "more"}


@pytest.mark.parametrize("size", [0, -1, 1.5, "5GB", True])
def test_shard_sizes_that_are_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size is"):
        kb.io.save(tmp_path / "a", tensors(), max_shard_size=size)
    assert os.listdir(tmp_path) == []


def test_a_failure_in_the_middle_of_shards_leaves_nothing(tmp_path):
    class Breaking(dict):
        reads = 0

        def __getitem__(self, name):
            Breaking.reads += 1
            if Breaking.reads > 12:
                raise RuntimeError("gone")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError):
        kb.io.save(tmp_path / "a", Breaking(tensors()), max_shard_size=20_000)
    assert os.listdir(tmp_path) == []


def test_data_that_changes_between_two_looks_is_refused(tmp_path):
    class Growing(dict):
        def __getitem__(self, name):
            return np.zeros(5)

    with pytest.raises(FileError, match="'x' has 40 bytes; 24 were announced"):
        kb.io.save(tmp_path / "a", Growing(x=np.zeros(3)))
    assert os.listdir(tmp_path) == []


# ---- quantize and dequantize ----


def test_shards_keep_their_names_and_everything_else(source, tmp_path):
    small, back = tmp_path / "small", tmp_path / "back"
    report = convert.quantize_file(source, small, "kbit4", keep="layer0.*", device="cpu")
    assert (report.converted, report.copied, report.resumed) == (5, 8, 0)
    assert shards(small) == shards(source) and sorted(os.listdir(small)) == sorted(os.listdir(source))
    assert "layer1.weight.packed" in weight_map(small) and "layer1.weight" not in weight_map(small)
    index = json.loads((small / INDEX).read_text())
    assert index["metadata"]["total_size"] == report.nbytes_after == kb.io.load(small).nbytes
    report = convert.dequantize_file(small, back, device="cpu")
    assert (report.converted, report.copied) == (5, 8)
    assert (back / INDEX).read_bytes() == (source / INDEX).read_bytes()
    before, after = kb.io.load(source), kb.io.load(back)
    assert before.metadata == after.metadata
    for name in before:
        if name in {f"layer{i}.weight" for i in range(1, 6)}:
            assert after[name].tobytes() == kb.dequantize(kb.quantize(before[name], "kbit4")).tobytes()
        else:
            assert after[name].tobytes() == before[name].tobytes()


def test_a_folder_with_one_file_becomes_a_folder(tmp_path):
    kb.io.save(tmp_path / "a", tensors(), max_shard_size=10**9)
    convert.quantize_file(tmp_path / "a", tmp_path / "b", "kbit4", device="cpu")
    assert os.listdir(tmp_path / "b") == ["model.safetensors"]


def test_an_empty_folder_is_filled(source, tmp_path):
    (tmp_path / "empty").mkdir()
    convert.quantize_file(source, tmp_path / "empty", "kbit4", device="cpu")
    assert shards(tmp_path / "empty") == shards(source)


@pytest.mark.parametrize("force", [False, True])
def test_folders_that_are_refused(source, tmp_path, force):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name, message in {
        "full": "files in it, which is never overwritten",
        "file": "is a file, but a checkpoint in shards becomes a directory",
        "link": "is a symbolic link",
        "source": "files in it",
        "missing/out": "missing does not exist",
    }.items():
        with pytest.raises(FileError, match=message):
            convert.quantize_file(source, tmp_path / name, "kbit4", device="cpu", force=force)
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "link", "source"]
    assert (tmp_path / "full" / "precious").read_text() == "precious"


def test_planes_do_not_take_the_name_of_a_tensor_in_another_shard(tmp_path):
    x = np.ones((64, 64), np.float32)
    kb.io.save(tmp_path / "a", {"w": x, "w.packed": np.zeros(4000)}, max_shard_size=20_000)
    with pytest.raises(FileError, match="'w' would be stored as 'w.packed'"):
        convert.quantize_file(tmp_path / "a", tmp_path / "b", "kbit4", device="cpu")
    assert os.listdir(tmp_path) == ["a"]


# ---- hostile indices ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: [], "weight_map"),
        (lambda index: {}, "weight_map"),
        (lambda index: {"weight_map": []}, "weight_map"),
        (lambda index: {"weight_map": {}}, "weight_map"),
        (lambda index: {**index, "metadata": [1]}, "'metadata' is not an object"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": 7}}, "tensor 'x' into '7'"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "../a.safetensors"}}, "'../a.safetensors'"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "/etc/a.safetensors"}}, "'/etc/a.safetensors'"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "..\\a.safetensors"}}, "the same directory"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "c:a.safetensors"}}, "the same directory"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": ".safetensors"}}, "the same directory"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "a\0.safetensors"}}, "the same directory"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "passwd"}}, "the same directory"),
        (lambda index: {"weight_map": {**index["weight_map"], "x": "no.safetensors"}}, "no.safetensors does not exist"),
        (
            lambda index: {"weight_map": {**index["weight_map"], "x": index["weight_map"]["fp8"]}},
            "tensor 'x' is not in model-",
        ),
    ],
)
def test_hostile_indices_are_refused(source, tmp_path, change, message):
    index = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps(change(index)))
    for read in (kb.io.load, lambda path: convert.quantize_file(path, tmp_path / "out", "kbit4", device="cpu")):
        with pytest.raises(FileError, match=message.replace("\\", "\\\\")):
            read(source)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an index"),
        ("{", "not an index"),
        ("[" * 100_000, "nests too deep"),
        ('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "key 'a' stands twice"),
        (b"\xff\xfe\x00", "not an index"),
    ],
)
def test_what_is_no_index_is_refused(source, text, message):
    (source / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError, match=message):
        kb.io.load(source)


def test_a_tensor_in_two_shards_is_refused(source):
    first, second = shards(source)[:2]
    shutil.copy(source / first, source / second)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(kb.io.load(source / first), first) | {"fp8": shards(source)[-1]}
    index["weight_map"][next(iter(index["weight_map"]))] = second
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(FileError, match=f"is in {first} and {second}"):
        kb.io.load(source)


def test_folders_that_hold_no_checkpoint(tmp_path):
    for content, message in (
        ([], "0 indices .* and 0 safetensors files"),
        (["a.safetensors", "b.safetensors"], r"2 safetensors files \(a.safetensors, b.safetensors\)"),
        (["a" + INDEX, "b" + INDEX], "2 indices"),
    ):
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        for name in content:
            (folder / name).write_text("{}")
        with pytest.raises(FileError, match=message):
            kb.io.load(folder)


def test_links_to_shards_are_followed(source, tmp_path):
    # Download caches keep the data elsewhere and fill a folder with links to it.
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    assert set(kb.io.load(linked)) == set(tensors())


# ---- memory ----


def peak_of(*words):
    """Peak resident MB of a command."""
    code = (
        "import sys; from kbitcupy.cli import main; status = main(sys.argv[1:]); "
        "print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0]); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-2]) / 1e3


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@LINUX
def test_memory_follows_the_largest_tensor_and_not_the_file(tmp_path):
    x = np.random.default_rng(0).standard_normal((4096, 2048)).astype(np.float32)  # 34 MB
    largest = x.nbytes / 1e6
    kb.io.save(tmp_path / "a", {f"w{i}": x for i in range(8)} | {"ids": x.view(np.int32)}, max_shard_size=3 * x.nbytes)
    least = peak_of("formats")
    small, back = tmp_path / "small", tmp_path / "back"
    peaks = {
        "quantize": peak_of("quantize", tmp_path / "a", "-o", small, "--device", "cpu"),
        "dequantize": peak_of("dequantize", small, "-o", back, "--device", "cpu"),
        "inspect": peak_of("inspect", small),
    }
    assert peaks["quantize"] - least < 2 * largest and peaks["dequantize"] - least < 2 * largest, (least, peaks)
    assert peaks["inspect"] - least < 10, (least, peaks)


@LINUX
def test_views_are_unmapped_with_their_last_reference(tmp_path):
    path = tmp_path / "a"
    kb.io.save(path, {"x": np.arange(1 << 20), "q": kb.quantize(np.ones((64, 64), np.float32), "kbit4")})

    def mapped():
        return Path("/proc/self/maps").read_text().count(str(path))

    loaded = kb.io.load(path)
    assert mapped() == 0
    view, q = loaded["x"][5:], loaded["q"]
    assert mapped() == 1
    del loaded
    gc.collect()
    assert view[0] == 5 and np.allclose(q.dequantize(), 1, atol=0.1)
    del view, q
    gc.collect()
    assert mapped() == 0


# ---- interruption ----


def failing_after(monkeypatch, count, failure):
    calls = []

    def quantize(x, format):
        calls.append(x)
        if len(calls) > count:
            raise failure
        return kb.quantize(x, format)

    monkeypatch.setattr(conversion, "quantize", quantize)
    return calls


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")])
def test_without_resume_nothing_is_left(source, tmp_path, monkeypatch, failure):
    failing_after(monkeypatch, 4, failure)
    with pytest.raises(OSError if isinstance(failure, OSError) else failure) as raised:
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu")
    assert not isinstance(failure, OSError) or raised.value is failure  # it is not the output's
    assert os.listdir(tmp_path) == ["source"]


def test_resume_continues_at_the_first_missing_shard(source, tmp_path, monkeypatch):
    convert.quantize_file(source, tmp_path / "whole", "kbit4", device="cpu")
    out, part = tmp_path / "out", tmp_path / "out.part"
    arguments = {"device": "cpu", "resume": True}
    failing_after(monkeypatch, 4, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        convert.quantize_file(source, out, "kbit4", **arguments)
    assert not out.exists()
    done = shards(part)
    assert 0 < len(done) < len(shards(source))
    before = {name: (part / name).stat().st_mtime_ns for name in done}
    monkeypatch.undo()
    with pytest.raises(FileError, match=r"out.part is in the way: .*--resume"):
        convert.quantize_file(source, out, "kbit4", device="cpu")
    with pytest.raises(FileError, match="not the unfinished work of this command"):
        convert.quantize_file(source, out, "kbit3", **arguments)
    with pytest.raises(FileError, match="not the unfinished work of this command"):
        convert.quantize_file(source, out, "kbit4", keep="layer0*", **arguments)
    with pytest.raises(FileError, match="not the unfinished work of this command"):
        convert.dequantize_file(tmp_path / "whole", out, **arguments)
    assert shards(part) == done
    report = convert.quantize_file(source, out, "kbit4", **arguments)
    assert report.resumed == len(done)
    assert {name: (out / name).stat().st_mtime_ns for name in done} == before
    assert contents(out) == contents(tmp_path / "whole")
    assert not part.exists()


def test_resume_refuses_an_input_that_has_changed(source, tmp_path, monkeypatch):
    failing_after(monkeypatch, 4, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)
    monkeypatch.undo()
    os.utime(source / shards(source)[0])
    with pytest.raises(FileError, match="not the unfinished work of this command, with this input"):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)


def test_resume_never_takes_a_folder_of_others(source, tmp_path):
    part = tmp_path / "out.part"
    part.mkdir()
    (part / "precious.safetensors").write_text("precious")
    with pytest.raises(FileError, match="not the unfinished work"):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)
    assert (part / "precious.safetensors").read_text() == "precious"
    shutil.rmtree(part)
    part.symlink_to(source)
    with pytest.raises(FileError, match="in the way"):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)


@POSIX
def test_what_a_killed_process_left_is_swept(tmp_path):
    old, locked, young = (tmp_path / f".kbit-{digit * 16}.tmp" for digit in "0af")
    users = [tmp_path / f".kbit-{name}.tmp" for name in ("notes", "0123456789abcde", "0123456789ABCDEF", "0" * 17)]
    for path in (old, locked, young, *users):
        path.write_text("half")
    for path in (old, locked, *users):
        os.utime(path, (time.time() - 3600,) * 2)
    with open(locked, "rb") as file:
        atomic.fcntl.flock(file, atomic.fcntl.LOCK_EX)
        kb.io.save(tmp_path / "a", {"x": np.zeros(3)})
    assert set(os.listdir(tmp_path)) == {locked.name, young.name, "a", *(path.name for path in users)}


WORKER = """
import sys
from kbitcupy.io import quantize_file
print("ready", flush=True)
quantize_file(sys.argv[1], sys.argv[2], sys.argv[3], device="cpu", force=True, resume=len(sys.argv) > 4)
"""


def start(*words):
    """A process that has imported everything and begins to work."""
    command = [sys.executable, "-c", WORKER, *map(str, words)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


@POSIX
def test_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    rng = np.random.default_rng(0)
    kb.io.save(tmp_path / "in", {f"w{i}": rng.standard_normal((512, 512)).astype(np.float32) for i in range(12)})
    whole = {}
    for format in ("kbit2", "kbit3"):
        convert.quantize_file(tmp_path / "in", tmp_path / format, format, device="cpu")
        whole[format] = (tmp_path / format).read_bytes()
    out = tmp_path / "out"
    shutil.copy(tmp_path / "kbit2", out)
    draw = random.Random(0)
    began = time.monotonic()
    start(tmp_path / "in", out, "kbit3").communicate(timeout=60)
    longest = time.monotonic() - began
    assert out.read_bytes() == whole["kbit3"]
    for round in range(6):
        process = start(tmp_path / "in", out, ("kbit2", "kbit3")[round % 2])
        time.sleep(draw.random() * longest / 4)
        process.kill()
        process.communicate()
        assert out.read_bytes() in whole.values()
        kb.io.load(out)


@POSIX
def test_a_killed_sharded_job_resumes(source, tmp_path):
    convert.quantize_file(source, tmp_path / "whole", "kbit4", device="cpu")
    out = tmp_path / "out"
    draw = random.Random(1)
    for _ in range(6):
        process = start(source, out, "kbit4", "resume")
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.communicate()
        if out.exists():
            break
    if not out.exists():
        convert.quantize_file(source, out, "kbit4", device="cpu", resume=True)
    found = contents(out)
    found.pop(atomic.JOB, None)  # a kill between the last two steps leaves this note
    assert found == contents(tmp_path / "whole")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from kbitcupy.cli import main
sys.exit(main(sys.argv[1:]))
"""


@POSIX
@pytest.mark.parametrize("folder", [False, True])
def test_a_file_that_cannot_grow_is_one_clear_error(tmp_path, folder):
    size = 4_000_000 if folder else None
    kb.io.save(tmp_path / "in", {"w": np.ones((512, 512), np.float32)}, max_shard_size=size)
    command = [sys.executable, "-c", LIMITED, "quantize", tmp_path / "in", "-o", tmp_path / "out", "--device", "cpu"]
    done = subprocess.run([str(word) for word in command], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("kbit: error: ") and done.stderr.count("\n") == 1
    assert "cannot be written: File too large" in done.stderr
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_disk_without_room_is_an_error_before_the_work(tmp_path, monkeypatch, folder):
    kb.io.save(tmp_path / "in", tensors(), max_shard_size=40_000 if folder else None)
    calls = failing_after(monkeypatch, 0, AssertionError)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(FileError, match=r"no space left in .*: 0\.0 MB are needed and 0\.0 MB are free; make room"):
        convert.quantize_file(tmp_path / "in", tmp_path / "out", "kbit4", device="cpu")
    assert calls == [] and os.listdir(tmp_path) == ["in"]


@POSIX
def test_signals_other_than_kill_clean_up(source, tmp_path):
    code = WORKER.replace(
        "import sys\n", "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "out", "kbit4"]
    process = subprocess.Popen(
        [str(word) for word in command], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert set(os.listdir(tmp_path)) <= {"source", "out"}
