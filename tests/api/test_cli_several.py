"""Several files at once: everything that can be checked is, before the first output is written."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.io import atomic, conversion

CPU = ["--device", "cpu"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A file, an array of NumPy, a directory of shards and its index, in the current directory."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    kb.io.save("a.safetensors", {"w": x, "b": x[0]})
    np.save("c.npy", x)
    kb.io.save("model", {f"{i}.weight": x for i in range(4)}, max_shard_size=20_000)
    (tmp_path / "model" / "config.json").write_text("{}")
    shutil.copytree("model", "other")
    return ["a.safetensors", "c.npy", "model", "other/model.safetensors.index.json"]


def everything(folder="."):
    return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_each_goes_into_the_folder_under_its_name(files, capsys):
    assert main(["quantize", *files, "-o", "out", *CPU]) == 0
    assert sorted(os.listdir("out")) == ["a.safetensors", "c.safetensors", "model", "other"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        os.path.join("out", name) for name in ("a.safetensors", "c.safetensors", "model", "other")
    ]
    for name in ("a.safetensors", "c.npy", "model"):
        kb.io.quantize_file(name, "alone", "kbit4", device="cpu")
        out = os.path.join("out", name.replace(".npy", ".safetensors"))
        if os.path.isdir("alone"):
            assert contents("alone") == contents(out)
            shutil.rmtree("alone")
        else:
            assert kb.io.load("alone", raw=True).nbytes == kb.io.load(out, raw=True).nbytes
            os.unlink("alone")
    # Back again, into a folder that is there.
    os.mkdir("back")
    sources = [os.path.join("out", name) for name in os.listdir("out")]
    assert main(["dequantize", *sources, "-o", "back", "--json", *CPU]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [each["output"] for each in documents] == [os.path.join("back", os.path.basename(s)) for s in sources]
    assert all(each["converted"] for each in documents)
    assert set(kb.io.load("back/model")) == set(kb.io.load("model"))
    assert main(["inspect", *files, "--json"]) == 0
    assert [each["source"] for each in json.loads(capsys.readouterr().out)] == files
    assert main(["inspect", *files]) == 0


def test_gguf_files_are_made_of_each(files):
    assert main(["quantize", *files[:3], "-o", "out", "--layout", "gguf", "--format", "q8_0", *CPU]) == 0
    assert sorted(os.listdir("out")) == ["a.gguf", "c.gguf", "model.gguf"]
    assert main(["dequantize", "out/a.gguf", "out/c.gguf", "-o", "more", *CPU]) == 0
    assert sorted(os.listdir("more")) == ["a.safetensors", "c.safetensors"]


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Path("bad.safetensors").touch(), "bad.safetensors is not a valid safetensors file"),
        (lambda: None, "bad.safetensors does not exist"),
        (lambda: kb.io.save("bad.safetensors", {"x": np.ones((64, 64)), "x.packed": np.ones(3)}), "would be stored as"),
    ],
)
def test_nothing_is_written_when_one_cannot_be(files, capsys, change, message, made):
    change()
    if made:
        os.mkdir("out")
    before = everything()
    assert main(["quantize", *files, "bad.safetensors", "-o", "out", *CPU]) == 1
    assert message in capsys.readouterr().err and everything() == before and os.path.isdir("out") == made


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_what_is_in_the_way_is_said_before_the_first(files, capsys, command):
    assert main(["quantize", *files, "-o", "small", *CPU]) == 0
    sources = files if command == "quantize" else [f"small/{name}" for name in sorted(os.listdir("small"))]
    run = [command, *sources, "-o", "out", *CPU]
    os.makedirs("out/model")
    for path, message in (
        ("out/model/precious", "files in it, which is never overwritten"),
        ("out/c.safetensors", "exists; choose another path"),
    ):
        Path(path).touch()
        before = everything()
        assert main(run) == 1
        assert message in capsys.readouterr().err and everything() == before
        os.unlink(path)
    assert main(run) == 0
    assert main([*run, "--force"]) == 1  # the folders
    assert main([*run, "--resume"]) == 0
    Path("file").touch()
    assert main([*run[:-3], "file", *CPU]) == 1 and "file is a file, but several outputs" in capsys.readouterr().err
    assert main([*run[:-3], "missing/out", *CPU]) == 1 and "cannot be made" in capsys.readouterr().err


def test_two_of_one_name_and_the_input_itself(files, capsys):
    os.mkdir("sub")
    shutil.copy("a.safetensors", "sub/a.safetensors")
    for more, message in (
        (["sub/a.safetensors"], "would both be written to a.safetensors in out"),
        (["a.safetensors"], "would both be written"),
        (["model/model.safetensors.index.json"], "would both be written to model in out"),
    ):
        assert main(["quantize", *files, *more, "-o", "out", *CPU]) == 1
        assert message in capsys.readouterr().err and not os.path.exists("out")
    assert main(["quantize", "a.safetensors", "c.npy", "-o", ".", "--force", *CPU]) == 1
    assert "is the input file" in capsys.readouterr().err and not os.path.exists("c.safetensors")


def test_there_must_be_room_for_all_of_them(files, monkeypatch, capsys):
    reports = [kb.io.quantize_file(file, f"dry{i}", "kbit4", dry_run=True) for i, file in enumerate(files)]
    total = sum(report.nbytes_after for report in reports)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    before = everything()
    assert main(["quantize", *files, "-o", "out", *CPU]) == 1
    assert "no space left in out" in capsys.readouterr().err and everything() == before and not os.path.exists("out")


def test_a_failure_in_between_keeps_what_is_whole(files, monkeypatch, capsys):
    real = conversion.quantize
    calls = []

    def fail(x, *arguments, **options):
        calls.append(x.shape)
        if len(calls) == 2:
            raise ValueError("no")
        return real(x, *arguments, **options)

    monkeypatch.setattr(conversion, "quantize", fail)
    assert main(["quantize", *files[:2], "-o", "out", *CPU]) == 1
    assert os.listdir("out") == ["a.safetensors"] and "no" in capsys.readouterr().err
    assert kb.io.load("out/a.safetensors")["w"].format.name == "kbit4"


@pytest.mark.parametrize("several", [False, True])
def test_a_dry_run_writes_nothing_and_knows_the_sizes(files, capsys, several):
    sources = files if several else files[:1]
    before = everything()
    assert main(["quantize", *sources, "-o", "out", "--dry-run", "--json", *CPU]) == 0
    said = capsys.readouterr()
    assert "nothing was written" in said.err and everything() == before and not os.path.exists("out")
    planned = json.loads(said.out)
    assert main(["quantize", *sources, "-o", "out", "--json", *CPU]) == 0
    done = json.loads(capsys.readouterr().out)
    for first, second in zip(*(each if several else [each] for each in (planned, done)), strict=True):
        for key in ("output", "converted", "copied", "elements", "nbytes_after", "compressed_nbytes", "files_copied"):
            assert first[key] == second[key]
    assert main(["dequantize", "a.safetensors", "-o", "back", "--dry-run", *CPU]) == 1
    assert main(["quantize", *sources, "-o", "out", "--dry-run", *CPU]) == 1
    assert main(["quantize", *sources, "-o", "out", "--dry-run", "--resume", *CPU]) == 0
