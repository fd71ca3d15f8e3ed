"""Outputs under attack: racing writers, repeated work, inputs that change, permissions, what killed jobs leave."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.io import atomic, conversion, convert

ROOT = Path(kb.__file__).resolve().parent.parent
INDEX = "model.safetensors.index.json"
POSIX = pytest.mark.skipif(os.name != "posix", reason="locks, limits and permission bits are POSIX's")


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    found = {f"w{i}": rng.standard_normal((32, 64)).astype(np.float32) for i in range(6)}
    return found | {"bias": np.arange(64, dtype=np.float16)}


@pytest.fixture
def source(tmp_path):
    """A checkpoint of several shards."""
    kb.io.save(tmp_path / "in", tensors(), max_shard_size=17_000)
    return tmp_path / "in"


@pytest.fixture
def file(tmp_path):
    kb.io.save(tmp_path / "in.safetensors", tensors())
    return tmp_path / "in.safetensors"


def quantize(source, target, format="kbit4", **options):
    return convert.quantize_file(source, target, format, device="cpu", **options)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else path.read_bytes()


def interrupted(monkeypatch, count, act=None):
    """`quantize_file` is interrupted at its tensor number `count`; `act` happens there instead where it is given."""
    calls = []

    def failing(x, format, **given):
        calls.append(x)
        if len(calls) == count + 1:
            if act is None:
                raise KeyboardInterrupt
            act()
        return kb.quantize(x, format, **given)

    monkeypatch.setattr(conversion, "quantize", failing)


def begun(monkeypatch, source, target, format="kbit4", **options):
    """A folder with finished shards of work that was interrupted."""
    with monkeypatch.context() as patch:
        interrupted(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, target, format, resume=True, **options)
    part = target.with_name(target.name + ".part")
    assert list(part.glob("*.safetensors"))
    return part


# ---- one writer of one output ----


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_being_filled_is_left_alone(tmp_path, resume):
    with atomic.filling(tmp_path / "out", {"a": 1}) as folder:
        (folder / "model.safetensors").write_text("first")
        with (
            pytest.raises(FileError, match="out.part is (being written by another process|in the way)"),
            atomic.filling(tmp_path / "out", {"a": 1}, resume),
        ):
            raise AssertionError("two writers of one folder")
        assert (folder / "model.safetensors").read_text() == "first"
    assert contents(tmp_path / "out") == {"model.safetensors": b"first"}


def test_who_finds_no_folder_and_cannot_make_it_leaves_it_alone(tmp_path, monkeypatch):
    exists = Path.exists
    with atomic.filling(tmp_path / "out", {"a": 1}) as folder:
        (folder / "model.safetensors").write_text("first")
        with monkeypatch.context() as patch:  # the folder appears between a look at it and mkdir
            patch.setattr(Path, "exists", lambda path, **how: not path.name.endswith(".part") and exists(path, **how))
            with pytest.raises(FileError, match="in the way"), atomic.filling(tmp_path / "out", {"a": 1}):
                raise AssertionError("two writers of one folder")
        assert (folder / "model.safetensors").read_text() == "first"
    assert contents(tmp_path / "out") == {"model.safetensors": b"first"}


def test_who_comes_when_the_first_has_just_finished_does_not_work_in_vain(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("first")
    with (
        pytest.raises(FileError, match="out is a directory with files in it"),
        atomic.filling(tmp_path / "out", {"a": 1}, resume=True),
    ):
        raise AssertionError("the work begins although its place is taken")
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_that_appears_in_the_last_moment_is_kept(file, monkeypatch):
    target = file.with_name("out")
    check = atomic.check_file

    def appears(path, force, sources=()):
        found = check(path, force, sources)
        if any(atomic._TEMPORARY.fullmatch(name) for name in os.listdir(file.parent)):
            target.write_text("precious")  # after the last look
        return found

    monkeypatch.setattr(atomic, "check_file", appears)
    with pytest.raises(FileError, match="out"):
        quantize(file, target)
    assert target.read_text() == "precious" and sorted(os.listdir(file.parent)) == [file.name, "out"]


@POSIX
def test_racing_and_killed_writers():
    seed = int(np.random.default_rng().integers(10**9))
    command = [sys.executable, str(ROOT / "tests" / "fuzz_writers.py"), "12", str(seed)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- work that is repeated ----


def codebook(last):
    return np.append(np.linspace(-1, 0.9, 15), last)


OTHERS = {
    "codebook": lambda last: ("kbit4", {"codebook": codebook(last)}),
    "table": lambda last: ("table4", {"codebook": codebook(last)}),
    "scale": lambda last: ("int8", {"scale": last}),
    "zero_point": lambda last: ("int8:symmetric=false", {"scale": 0.1, "zero_point": int(last * 10)}),
    "text": lambda last: f"int8:scale={last}",
    "mapping": lambda last: dict.fromkeys([f"w{i}" for i in range(6)], OTHERS["table"](last)),
}


@pytest.mark.parametrize("given", OTHERS)
def test_resume_knows_the_numbers_that_a_format_was_given(source, tmp_path, monkeypatch, given):
    part = begun(monkeypatch, source, tmp_path / "out", OTHERS[given](1.0))
    before = contents(part)
    with pytest.raises(FileError, match="not the unfinished work of this command"):
        quantize(source, tmp_path / "out", OTHERS[given](0.95), resume=True)
    assert contents(part) == before
    assert quantize(source, tmp_path / "out", OTHERS[given](1.0), resume=True).resumed > 0
    quantize(source, tmp_path / "whole", OTHERS[given](1.0))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("other", [{"x": np.zeros(5)}, tensors(), None])
def test_resume_looks_into_finished_shards(source, tmp_path, monkeypatch, other):
    part = begun(monkeypatch, source, tmp_path / "out")
    shard = min(part.glob("*.safetensors"))
    if other is None:  # the same tensors, by another format
        convert.quantize_file(source / shard.name, shard, "kbit4", keep="w1", device="cpu", force=True)
    else:
        kb.io.save(shard, other, force=True)
    with pytest.raises(FileError, match=f"{shard.name} is not what this command writes"):
        quantize(source, tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["kbitcupy", "bitsandbytes"])
def test_resume_takes_the_shards_that_it_wrote(source, tmp_path, monkeypatch, layout):
    format = kb.get_format("nf4", double_quant=True)  # its JSON turns out shorter than announced
    begun(monkeypatch, source, tmp_path / "out", format, layout=layout)
    assert quantize(source, tmp_path / "out", format, layout=layout, resume=True).resumed > 0
    quantize(source, tmp_path / "whole", format, layout=layout)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    report = quantize(source, tmp_path / "out", format, layout=layout, resume=True)
    assert report.resumed == len(list(source.glob("*.safetensors")))


def test_resume_sees_an_input_that_changed_under_its_old_time(source, tmp_path, monkeypatch):
    begun(monkeypatch, source, tmp_path / "out")
    shard = max(source.glob("*.safetensors"))
    about = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(FileError, match="not the unfinished work of this command, with this input"):
        quantize(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("note", [False, True])
@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_work_that_is_done_is_done(source, tmp_path, monkeypatch, note, command):
    small, out = tmp_path / "small", tmp_path / "out"
    quantize(source, small)

    def work():
        if command == "quantize":
            return quantize(source, out, resume=True)
        return convert.dequantize_file(small, out, device="cpu", resume=True)

    with monkeypatch.context() as patch:
        if note:  # killed between the last rename and what follows
            unlink = Path.unlink
            patch.setattr(Path, "unlink", lambda path, **how: path.name == atomic.JOB or unlink(path, **how))
        work()
    assert (out / atomic.JOB).exists() == note
    before = {name: content for name, content in contents(out).items() if name != atomic.JOB}
    (out / "config.json").write_text("{}")  # a later step of a script put it there
    report = work()
    assert report.resumed == len(list(source.glob("*.safetensors")))
    assert contents(out) == before | {"config.json": b"{}"}


def test_one_file_that_is_done_is_done(file, capsys):
    words = ["quantize", str(file), "-o", str(file.with_name("out")), "--device", "cpu"]
    assert main([*words, "--resume"]) == 0
    before = contents(file.with_name("out"))
    assert main(words) == 1
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    assert "6 tensors quantized to kbit4, 1 copied (1 file was there already); " in capsys.readouterr().out
    assert contents(file.with_name("out")) == before


@pytest.mark.parametrize("change", ["format", "data", "index", "input", "missing"])
@pytest.mark.parametrize("folder", [False, True])
def test_what_is_there_and_differs_is_not_done(source, file, tmp_path, change, folder):
    source, out = source if folder else file, tmp_path / "out"
    if change in ("index", "missing") and not folder:
        out.write_text("precious")
    else:
        quantize(source, out, "kbit3" if change == "format" else "kbit4")
    inside = min(out.glob("*.safetensors")) if folder else out
    if change == "data":
        inside.write_bytes(inside.read_bytes()[:-1] + b"\1")
    elif change == "index" and folder:
        (out / INDEX).write_text((out / INDEX).read_text() + " ")
    elif change == "missing" and folder:
        inside.unlink()
    elif change == "input":
        path = min(source.glob("*.safetensors")) if folder else source
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    before = contents(out)
    with pytest.raises(FileError, match="out is there already, and it is not what this command writes"):
        quantize(source, out, resume=True)
    assert contents(out) == before


# ---- inputs that change ----


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("change", ["rewritten", "shorter"])
def test_an_input_that_changes_while_it_is_read_is_an_error(source, file, monkeypatch, folder, resume, change):
    read = max(source.glob("*.safetensors")) if folder else file
    around = os.listdir(file.parent)

    def rewrite():
        content = read.read_bytes()
        with open(read, "r+b") as opened:  # in place
            opened.write(content)
            if change == "shorter":
                opened.truncate(len(content) // 2)
        os.utime(read)

    if change == "shorter":  # at a tensor of the last file, before it is read
        monkeypatch.setattr(conversion.Job, "run", shrinking(conversion.Job.run, read, rewrite))
    else:
        interrupted(monkeypatch, 5, rewrite)
    with pytest.raises(FileError, match=f"{read.name} was (changed|cut off) while it was read: nothing is kept"):
        quantize(source if folder else file, file.with_name("out"), resume=resume)
    assert sorted(os.listdir(file.parent)) == sorted(around)


def shrinking(run, path, act):
    def first(job, *arguments):
        if job.files[0].path == path:
            act()
        run(job, *arguments)

    return first


def test_an_input_that_changes_when_its_own_shard_is_finished_is_an_error(source, monkeypatch):
    first, last = min(source.glob("*.safetensors")), max(source.glob("*.safetensors"))
    around, part = os.listdir(source.parent), source.with_name("out.part")

    def change():
        assert (part / first.name).exists()
        os.utime(first, ns=(1, 1))

    monkeypatch.setattr(conversion.Job, "run", shrinking(conversion.Job.run, last, change))
    with pytest.raises(FileError, match=f"{first.name} was changed while it was read: nothing is kept"):
        quantize(source, source.with_name("out"))
    assert sorted(os.listdir(source.parent)) == sorted(around)


def test_an_input_that_another_file_replaces_is_read_to_its_end(file, monkeypatch):
    quantize(file, file.with_name("whole"))

    def replace():
        kb.io.save(file, tensors(1), force=True)

    interrupted(monkeypatch, 2, replace)
    quantize(file, file.with_name("out"))
    assert contents(file.with_name("out")) == contents(file.with_name("whole"))


TRUNCATED = """
import os, sys
import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.explore import measurement
from kbitcupy.io import conversion
path, calls = sys.argv[1], []

def quantize(x, format, **given):
    calls.append(x)
    if len(calls) == 2:
        os.truncate(path, os.path.getsize(path) // 2)
    return kb.quantize(x, format, **given)

conversion.quantize = quantize
measurement.quantize = quantize
sys.exit(main(sys.argv[2:]))
"""


@POSIX
@pytest.mark.parametrize("command", ["quantize", "compare", "plan"])
def test_a_file_that_shrinks_under_a_command_is_one_error(tmp_path, command):
    rng = np.random.default_rng(0)
    path = tmp_path / "in.safetensors"
    kb.io.save(path, {f"w{i}": rng.standard_normal((256, 256)).astype(np.float32) for i in range(8)})
    words = [command, str(path), "--device", "cpu"]
    if command != "compare":
        words += ["-o", str(tmp_path / "out")]
    if command == "plan":
        words += ["--bits", "9", "--formats", "int8"]
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stderr.startswith(f"kbit: error: {path} was cut off") and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == [path.name]


# ---- permissions ----


@POSIX
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o400])
def test_a_file_that_is_replaced_keeps_its_permissions(file, monkeypatch, mode):
    target = file.with_name("out")
    target.write_text("old")
    target.chmod(mode)
    seen = []
    interrupted(monkeypatch, 0, lambda: seen.extend(path.stat().st_mode for path in file.parent.glob(".kbit-*")))
    quantize(file, target, force=True)
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert len(seen) == 1 and not stat.S_IMODE(seen[0]) & ~mode  # nor was it more open while it was written
    kb.io.save(target, {"x": np.zeros(3)}, force=True)
    assert stat.S_IMODE(target.stat().st_mode) == mode


@POSIX
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_is_replaced_keeps_its_owner(file):
    target = file.with_name("out")
    target.write_text("old")
    os.chown(target, 1234, 5678)
    quantize(file, target, force=True)
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 5678)


# ---- what killed jobs leave ----


@POSIX
def test_what_killed_runs_left_is_said(file, source, capsys):
    folder = file.parent
    dead, old = (folder / f".kbit-{digit * 16}.tmp" for digit in "0f")
    for path in (dead, old):
        path.write_bytes(bytes(2_000_000))
    os.utime(old, (0, 0))
    (folder / "other.part").mkdir()
    (folder / "other.part" / atomic.JOB).write_text("{}")
    (folder / "mine.part").mkdir()  # nobody's job
    assert main(["inspect", str(file)]) == 0
    left = [
        f"kbit: note: a run that was killed has left {path} (2.0 MB): delete it"
        if path.suffix == ".tmp"
        else f"kbit: note: a run that was killed has left {path} (0.0 MB): repeat that run with --resume, or delete it"
        for path in (dead, old, folder / "other.part")
    ]
    assert capsys.readouterr().err.splitlines() == left
    assert main(["quantize", str(file), "-o", str(folder / "out"), "--device", "cpu"]) == 0
    removed = f"kbit: note: removed {old} (2.0 MB), which a run that was killed had left"
    assert capsys.readouterr().err.splitlines() == [removed, left[0], left[2]]
    assert not old.exists() and dead.exists()
    with open(dead, "rb") as opened:  # its owner lives
        atomic.fcntl.flock(opened, atomic.fcntl.LOCK_EX)
        shutil.rmtree(folder / "other.part")
        assert main(["inspect", str(file)]) == 0
        assert capsys.readouterr().err == ""
