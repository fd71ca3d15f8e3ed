"""Check an installed kbitcupy from outside the repository: `wheel`, or `checkout FOLDER` for an editable install."""

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder

KBIT = str(Path(sysconfig.get_path("scripts")) / "kbit")


def kbit(*arguments):
    done = subprocess.run([KBIT, *map(str, arguments)], check=True, capture_output=True, text=True)
    print("$ kbit", *arguments)
    print(done.stdout, end="")
    return done.stdout


def round_trip(folder):
    """A file there and back through the installed command."""
    rng = np.random.default_rng(0)
    before = {"weight": rng.standard_normal((96, 64)).astype(np.float32), "steps": np.arange(7)}
    save_file(before, folder / "in.safetensors", {"made by": "a check"})
    kbit("quantize", folder / "in.safetensors", "-o", folder / "small.safetensors", "--format", "kbit4")
    kbit("dequantize", folder / "small.safetensors", "-o", folder / "out.safetensors")
    after = load_file(folder / "out.safetensors")
    assert {n: (x.shape, x.dtype) for n, x in after.items()} == {n: (x.shape, x.dtype) for n, x in before.items()}
    assert np.array_equal(after["steps"], before["steps"])
    assert kb.metrics.sqnr_db(before["weight"], after["weight"]) > 20
    assert (folder / "small.safetensors").stat().st_size < (folder / "in.safetensors").stat().st_size / 4


def main(kind, checkout=None):
    assert kbit("--version").split() == ["kbitcupy", kb.__version__]
    kernels = kernel_folder()
    print("kernels:", kernels, *sorted(path.relative_to(kernels).as_posix() for path in kernels.rglob("*.cu*")))
    if kind == "wheel":
        assert kernels.is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
        assert importlib.util.find_spec("kernels") is None, "a wheel must not make `import kernels` work"
    else:
        assert kernels == Path(checkout).resolve() / "kernels"
    assert any(kernels.rglob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        round_trip(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
