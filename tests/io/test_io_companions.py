"""What lies beside the tensors of a folder: configuration, tokenizer and text go along, pickles never."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError
from kbitcupy.io import companions, convert

INDEX = "model.safetensors.index.json"
KEPT = {
    "config.json": b"{}",
    "tokenizer.json": "{'é': 1}".encode() + b" " * 5000,
    "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00",  # sentencepiece is protobuf
    "merges.txt": b"a b\n",
    "README.md": b"# A model\n",
    "LICENSE": b"do what you like\n",
    "chat_template.jinja": b"{{ x }}",
    "modeling_own.py": b"x = 1\n",
    "empty.txt": b"",
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../x"}, 3]).encode(),
    "1_Pooling/config.json": b'{"pooling": "mean"}',
    "1_Pooling/model.safetensors": b"whatever it is",
}


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps([1]))
    return path.read_bytes()


@pytest.fixture
def source(tmp_path):
    """Shards, with all that goes along and much that does not."""
    path = tmp_path / "source"
    rng = np.random.default_rng(0)
    kb.io.save(path, {f"{i}.weight": rng.standard_normal((64, 64)) for i in range(3)}, max_shard_size=40_000)
    left = {
        "pytorch_model.bin": zipped(tmp_path / "zip"),
        "old.pt": pickle.dumps({"a": 1}),
        "vocab.pkl": pickle.dumps({"a": 1}, 0),
        "hidden_in_text.txt": pickle.dumps({"a": 1}),
        "hidden.model": pickle.dumps({"a": 1}),
        "zipped.model": zipped(tmp_path / "zip"),
        "archive.json": zipped(tmp_path / "zip"),
        "pytorch_model.bin.index.json": b"{}",
        "consolidated.safetensors": b"other weights",
        "model.gguf": b"GGUF",
        "picture.png": b"\x89PNG\r\n",
        "binary.txt": b"a\0b",
        "1_Pooling/pytorch_model.bin": pickle.dumps(1),
        "onnx/config.json": b"{}",
    }
    for name, content in {**KEPT, **left, ".gitattributes": b"", ".cache/x.json": b"{}"}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    (path / "linked.txt").symlink_to(path / "merges.txt")
    (path / "broken.txt").symlink_to(path / "missing")
    (path / "linked").symlink_to(path / "1_Pooling")
    return path


def inside(path):
    """Name -> bytes, in folders too."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


WANTED = {**KEPT, "linked.txt": KEPT["merges.txt"]}
LEFT = {
    *("pytorch_model.bin", "old.pt", "vocab.pkl", "hidden_in_text.txt", "hidden.model", "zipped.model", "archive.json"),
    *("pytorch_model.bin.index.json", "consolidated.safetensors", "model.gguf", "picture.png", "binary.txt"),
    *("1_Pooling/pytorch_model.bin", "onnx/", "broken.txt", "linked/"),
}


@pytest.mark.parametrize("by_index", [False, True])
def test_a_folder_keeps_what_it_needs_and_says_what_it_left(source, tmp_path, by_index, capsys):
    out, back = tmp_path / "out", tmp_path / "back"
    path = source / INDEX if by_index else source
    report = convert.quantize_file(path, out, "kbit4", device="cpu")
    assert set(report.files_copied) == set(WANTED) and set(report.files_left_out) == LEFT
    found = inside(out)
    assert {name: found[name] for name in WANTED} == WANTED
    tensors = {name for name in found if name.endswith((".safetensors", INDEX)) and "/" not in name}
    assert set(found) == set(WANTED) | tensors and len(tensors) == 4
    report = convert.dequantize_file(out, back, device="cpu")
    assert set(report.files_copied) == set(WANTED) and report.files_left_out == ()
    assert {name: inside(back)[name] for name in WANTED} == WANTED
    assert main(["quantize", str(path), "-o", str(tmp_path / "more"), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert ", 13 other files beside;" in said.out and "kbit: note: left out 1_Pooling/pytorch_model.bin," in said.err


def test_a_file_alone_has_no_companions(source, tmp_path):
    (first, *_) = sorted(source.glob("model*.safetensors"))
    report = convert.quantize_file(first, tmp_path / "out.safetensors", "kbit4", device="cpu")
    assert report.files_copied == report.files_left_out == ()
    report = convert.quantize_file(source, tmp_path / "out.gguf", "q8_0", device="cpu")
    assert report.files_copied == report.files_left_out == () and (tmp_path / "out.gguf").is_file()


def test_the_output_may_lie_in_the_source(source):
    report = convert.quantize_file(source, source / "small", "kbit4", device="cpu", resume=True)
    assert set(report.files_left_out) == LEFT and "small/config.json" not in report.files_copied
    again = convert.quantize_file(source, source / "small", "kbit4", device="cpu", resume=True)
    assert again.resumed == 3 and set(again.files_left_out) == LEFT
    other = convert.quantize_file(source, source / "other", "kbit4", device="cpu")
    assert set(other.files_left_out) == {*LEFT, "small/"}


def test_what_is_done_is_compared_with_the_companions(source, tmp_path):
    convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu")
    assert convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True).resumed == 3
    for name, content in (("merges.txt", b"a c\n"), ("1_Pooling/config.json", b"{}")):
        before = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes(content)
        with pytest.raises(FileError, match=f"is not what this command writes.*{name}"):
            convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)
        (tmp_path / "out" / name).write_bytes(before)


@pytest.mark.parametrize("resume", [False, True])
def test_a_failure_among_the_companions_leaves_nothing_or_resumes(source, tmp_path, monkeypatch, resume):
    real = companions.Companion.copy

    def fail(self, folder):
        if self.name == "README.md":
            raise FileError("no")
        real(self, folder)

    monkeypatch.setattr(companions.Companion, "copy", fail)
    with pytest.raises(FileError, match="no"):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=resume)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.part").exists() == resume
    monkeypatch.undo()
    if resume:
        (tmp_path / "out.part" / "1_Pooling" / "config.json").write_bytes(b"half of i")
        report = convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu", resume=True)
        assert report.resumed == 3
        found = inside(tmp_path / "out")
        assert {name: found[name] for name in WANTED} == WANTED and not list((tmp_path / "out").rglob(".kbit*"))


def test_data_is_no_companion(source, tmp_path, monkeypatch):
    monkeypatch.setattr(companions, "_LARGEST", 4000)
    report = convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu")
    assert set(report.files_left_out) == {*LEFT, "tokenizer.json"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_an_error_before_the_work(source, tmp_path):
    (source / "merges.txt").chmod(0)
    with pytest.raises(FileError, match="cannot be read"):
        convert.quantize_file(source, tmp_path / "out", "kbit4", device="cpu")
    assert not (tmp_path / "out.part").exists()


def test_a_companion_that_grows_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    grown = companions.Companion(tmp_path / "a.txt", "a.txt", 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileError, match=r"a\.txt was changed while it was read"):
        grown.copy(tmp_path / "out")
