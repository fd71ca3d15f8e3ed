"""One instance of every kernel template compiles, with no GPU. `.ci/compile_kernels.py` compiles all of them."""

import pytest

import kbitcupy.affine  # noqa: F401  (registers the kernels of its products)
from kbitcupy.backend import cuda as _cuda
from kbitcupy.errors import KernelCompileError
from kbitcupy.formats.base import kernel_templates

ARCHITECTURE = 75  # the oldest: what compiles here uses nothing newer

TEMPLATES = list(kernel_templates())


@pytest.fixture(scope="module")
def nvrtc():
    missing = "needs the extra `compile`: pip install -e '.[compile]'"
    pathfinder = pytest.importorskip("cuda.pathfinder", reason=missing, exc_type=ImportError)
    cuda = pytest.importorskip("cupy.cuda", reason=missing, exc_type=ImportError)
    try:
        cuda.nvrtc.getVersion()
    except RuntimeError as error:  # CuPy loads the library on the first call
        pytest.skip(f"{missing} ({error})")
    if pathfinder.find_nvidia_header_directory("cudart") is None:
        pytest.skip(missing)
    return cuda.nvrtc


@pytest.mark.parametrize("template", TEMPLATES, ids=[template.name for template in TEMPLATES])
def test_one_instance(nvrtc, template):
    # Raises where NVRTC refuses; what ptxas says of the registers is .ci/compile_kernels.py's to read.
    architecture = _cuda.architecture_of(template.file) or ARCHITECTURE
    assert isinstance(_cuda.compile_offline(template.file, next(template.instances()), architecture), str)


def test_error_names_file_expression_and_architecture(nvrtc):
    with pytest.raises(KernelCompileError, match=r"(?s)codes\.cu: no_such_kernel<3> for sm_75: .*no_such_kernel"):
        _cuda.compile_offline("codes.cu", "no_such_kernel<3>", ARCHITECTURE)


def test_every_template_is_in_its_file():
    for template in TEMPLATES:
        assert f" {template.name}(" in (_cuda.kernel_folder() / template.file).read_text(), template
