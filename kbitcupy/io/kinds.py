"""Files of kinds that are not read, told by their first bytes, and the line of Python that converts them."""

from __future__ import annotations

from pathlib import Path

#: Bytes of a file that `what_it_is` wants to see.
HEAD = 512

_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".hdf5", ".keras")
_ARRAYS = (".npy", ".npz")
_TORCH = (
    "import torch, safetensors.torch as st; st.save_file({{k: v.contiguous().clone() for k, v in "
    "torch.load({path!r}, map_location='cpu', weights_only=True).items()}}, {target!r})"
)
_LINES = {
    "torch": _TORCH,
    "onnx": "import onnx, kbitcupy as kb; kb.io.save({target!r}, {{t.name: onnx.numpy_helper.to_array(t) for t in "
    "onnx.load({path!r}).graph.initializer}})",
    "hdf5": "import h5py, kbitcupy as kb; d = {{}}; h5py.File({path!r}).visititems(lambda name, x: d.update({{name: "
    "x[()]}}) if isinstance(x, h5py.Dataset) else None); kb.io.save({target!r}, d)",
}
_MAGIC = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "hdf5"),
    (b"\x1f\x8b", "compressed by gzip", "unpack"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack"),
    (b"BZh", "compressed by bzip2", "unpack"),
    (b"\xfd7zXZ\x00", "compressed by xz", "unpack"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack"),
)


def what_it_is(path: Path, head: bytes) -> str | None:
    """What a file is that is no safetensors file, and what to do about it.

    Parameters
    ----------
    path : pathlib.Path
        The file.
    head : bytes
        Its first `HEAD` bytes, or all that it has.

    Returns
    -------
    str or None
        One line; None when the file is not known.
    """
    if not head:
        return "it is empty (0 bytes): download or copy it again"
    if not head.strip(b"\0"):
        return "it begins with zeros only, as an unfinished download does: download or copy it again"
    if head.startswith(b"version https://git-lfs.github.com/"):
        return "it is a pointer of git-lfs, and the data is still on the server: run `git lfs pull` in its directory"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<error", b"<head")):
        return "it is a web page, as a refused or redirected download leaves: download the file itself"
    for magic, name, key in _MAGIC:
        if head.startswith(magic):
            return f"it is {name}; {_remedy(key, path)}"
    if head.startswith(b"PK\x03\x04"):
        return _zip(path, head)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"it is a pickle, as torch.save wrote before PyTorch 1.6; {_remedy('torch', path)}"
    if head[257:262] == b"ustar":
        return f"it is a tar archive; {_remedy('unpack', path)}"
    if path.suffix == ".onnx":
        return f"its name is that of an ONNX model; {_remedy('onnx', path)}"
    if text.startswith((b"{", b"[")):
        return "it is JSON text; the name of an index of shards ends in .safetensors.index.json"
    return None


def _zip(path: Path, head: bytes) -> str:
    """A zip archive is told by the name of its first member."""
    member = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if member.endswith((b"/data.pkl", b"/byteorder", b"/version", b"/.format_version")):
        return f"it is a checkpoint of PyTorch (torch.save); {_remedy('torch', path)}"
    return f"it is a zip archive; {_remedy('unpack', path)}"


def _remedy(key: str, path: Path) -> str:
    if key == "unpack":
        return "unpack it first"
    target = str(path.with_suffix(".safetensors" if path.suffix != ".safetensors" else ".converted.safetensors"))
    return f"convert it in Python: {_LINES[key].format(path=str(path), target=target)}"


def other_checkpoints(names: list[str]) -> str:
    """What to do about a folder without safetensors files, from the names in it; empty when nothing is known."""
    arrays = [name for name in names if Path(name).suffix in _ARRAYS]
    found = [name for name in names if Path(name).suffix in _OTHERS]
    if not found:
        return f"it holds {', '.join(arrays[:3])}: pass such a file itself" if arrays else ""
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    if any(Path(name).suffix == ".bin" for name in found):
        return (
            f"it holds {shown}, a checkpoint of PyTorch: save it anew in Python with `transformers."
            "AutoModel.from_pretrained(folder).save_pretrained(another, safe_serialization=True)`, or pass a file "
            "of it to be told how to convert that file"
        )
    return f"it holds {shown}: pass such a file to be told how to convert it"
