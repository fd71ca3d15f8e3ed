"""What an earlier version wrote decodes to the same bytes, on either library."""

from pathlib import Path

import numpy as np
import pytest
from inputs import same_values

import kbitcupy as kb

FILE = Path(__file__).parent / "data" / "kbit_version1.safetensors"
TENSORS = kb.io.load(FILE)
NAMES = [name for name, tensor in TENSORS.items() if isinstance(tensor, kb.QuantizedArray)]


def test_the_file_holds_what_its_readme_says():
    assert len(NAMES) == 8 * 3 + 1 and len(TENSORS) == 2 * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_decodes_the_same_bytes(name):
    wanted = TENSORS[f"{name}.decoded"]
    found = TENSORS[name].dequantize()
    assert found.dtype == wanted.dtype and same_values(found, wanted)
    assert (found.tobytes() == wanted.tobytes()) or np.isnan(found.astype(np.float32)).any()


@pytest.mark.parametrize("name", NAMES)
def test_cuda_decodes_the_same_values(cupy, name):
    assert same_values(TENSORS[name].to_device("cuda:0").dequantize().get(), TENSORS[f"{name}.decoded"])
