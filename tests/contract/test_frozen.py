"""What an earlier version wrote decodes to the same bytes, on either library."""

from pathlib import Path

import numpy as np
import pytest
from cases import CASES as CASES_OF_FORMATS
from inputs import same_values
from make_frozen_data import fitted, is_bounded

import kbitcupy as kb

DATA = Path(__file__).parent.parent / "data"
FILE = DATA / "kbit_version1.safetensors"
TENSORS = kb.io.load(FILE)
NAMES = [name for name, tensor in TENSORS.items() if isinstance(tensor, kb.QuantizedArray)]


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


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


# ---- stacks: the file says how many members there are, in the format or by its granularity ---------------------------

STACKS = kb.io.load(DATA / "stacks_version1.safetensors")


@pytest.mark.parametrize("name", [name for name in STACKS if f"{name} decoded" in STACKS])
def test_stacks_decode_to_the_same_bytes(xp, name):
    q, wanted = STACKS[name], STACKS[f"{name} decoded"]
    assert q.members == ({"two axes": 6}.get(name, 3) if "kbit" in name or name == "two axes" else 1)
    q = q if xp is np else q.to_device("cuda:0")
    assert host(q.dequantize()).tobytes() == wanted.tobytes()
    for i in range(len(q)):
        assert host(q[i].dequantize()).tobytes() == wanted[i].tobytes()
    if name != "two axes":
        rows = STACKS[f"{name} rows"]
        assert rows.members == (2 if "kbit" in name else 1)
        assert rows.dequantize().tobytes() == wanted[1:].tobytes()


# ---- a file for each format, with kinds of options; see make_frozen_data.py ------------------------------------------

FORMATS = kb.list_formats()
FROZEN = {path.stem: kb.io.load(path) for path in sorted((DATA / "frozen").glob("*.safetensors"))}
INPUTS = FROZEN.pop("inputs")
CASES = [(name, case) for name, tensors in FROZEN.items() for case in tensors if not case.endswith(" decoded")]


def test_every_format_has_a_file():
    assert sorted(FROZEN) == sorted(FORMATS)


@pytest.mark.parametrize("case", CASES_OF_FORMATS, ids=str)
def test_every_option_set_is_in_its_file(case):
    """What a format names in `samples` is frozen when it is released; a test never writes it."""
    wanted = case.format.counted_from_end(2)
    written = [q for q in FROZEN[case.format.name].values() if isinstance(q, kb.QuantizedArray)]
    found = {q.dtype.name for q in written if q.format.counted_from_end(q.ndim) == wanted}
    assert found == {"float16", "bfloat16", "float32"}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_what_was_written_decodes_to_the_same_bytes(xp, name, case):
    q, wanted = FROZEN[name][case], FROZEN[name][f"{case} decoded"]
    found = q.dequantize() if xp is np else q.to_device("cuda:0").dequantize().get()
    assert found.dtype == wanted.dtype and same_values(found, wanted)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_same_numbers_are_written_as_the_same_bytes(xp, name, case):
    frozen = FROZEN[name][case]
    if not frozen.format.can_encode:
        pytest.skip("nothing is quantized")
    options = frozen.format.config()
    own = next((frozen.planes[key] for key in ("codebook", "table") if key in frozen.planes), None)
    format = kb.get_format(options.pop("name"), **options)
    bounded = "bounded " if is_bounded(name) else ""
    x = fitted(name, INPUTS[bounded + case.split()[-1]])
    found = kb.quantize(xp.asarray(x), format, codebook=own).get()
    assert found.config() == frozen.config()
    for plane, wanted in frozen.planes.items():
        assert found.planes[plane].tobytes() == np.asarray(wanted).tobytes(), plane
