"""One instance of every kernel template compiles, with no GPU. `.ci/compile_kernels.py` compiles all of them."""

import re
from dataclasses import replace

import numpy as np
import pytest

import kbitcupy.gguf  # its products have kernels, too
import kbitcupy.products.functions  # noqa: F401  (registers the kernels of products)
from kbitcupy.backend.compile import Template, architecture_of, compile_offline, kernel_folder, options
from kbitcupy.backend.structs import Constants, Struct
from kbitcupy.errors import KernelCompileError
from kbitcupy.formats.base import kernel_templates

ARCHITECTURE = 75  # the oldest: what compiles here uses nothing newer

TEMPLATES = list(kernel_templates())


@pytest.mark.parametrize("template", TEMPLATES, ids=[template.name for template in TEMPLATES])
def test_one_instance(nvrtc, template):
    # Raises where NVRTC refuses; what ptxas says of the registers is .ci/compile_kernels.py's to read.
    architecture = architecture_of(template.file) or ARCHITECTURE
    assert isinstance(compile_offline(template, next(template.instances()), architecture), str)


def test_error_names_file_expression_and_architecture(nvrtc):
    with pytest.raises(KernelCompileError, match=r"(?s)codes\.cu: no_such_kernel<3> for sm_75: .*no_such_kernel"):
        compile_offline(Template("codes.cu", "no_such_kernel"), "no_such_kernel<3>", ARCHITECTURE)


def test_every_template_is_in_its_file():
    """Or in a header with kernels, of which two files are made."""
    for template in TEMPLATES:
        text = (kernel_folder() / template.file).read_text()
        headers = [
            (kernel_folder() / name).read_text() for name in re.findall(r'^#include "(.*)"$', text, re.MULTILINE)
        ]
        sources = [text, *(header for header in headers if "__global__" in header)]
        assert any(f" {template.name}(" in source for source in sources), template


def test_every_file_has_a_template():
    """The kernels of a file that nobody lists would be compiled, and looked at for spills, by nobody."""
    files = {str(file.relative_to(kernel_folder())) for file in kernel_folder().rglob("*.cu")}
    assert files == {template.file for template in TEMPLATES}


# ---- what stands ahead of a source, and kernels of other packages ----------------------------------------------------

ABOUT = Struct("About", count="u4", scale=("f4", 3), inner=Struct("Inner", start="i8", end="u1"))


def test_structs_are_laid_out_as_cuda_lays_them_out(nvrtc, tmp_path):
    """What stands ahead of the source checks it, and fails where NumPy and the compiler disagree."""
    (tmp_path / "about.cu").write_text("__global__ void about(const About a, long long* y) { *y = a.inner.start; }")
    template = Template("about.cu", "about", folder=tmp_path, structs=(ABOUT,))
    assert isinstance(compile_offline(template, "about", ARCHITECTURE), str)
    packed = ABOUT.pack(count=7, scale=(1, 2, 3))
    assert len(packed) == ABOUT.dtype.itemsize == 32 and packed[:8] == b"\7\0\0\0\0\0\x80?"
    wrong = Struct("About", count="u4", inner=ABOUT._members[-1][1])
    wrong.dtype = np.dtype([("count", "u4"), ("inner", ABOUT.dtype["inner"])], align=False)
    with pytest.raises(KernelCompileError, match="About is what the host packs"):
        compile_offline(replace(template, structs=(wrong,)), "about", ARCHITECTURE)


def test_a_package_brings_its_decoder_to_a_kernel_of_ours(nvrtc, tmp_path):
    """Its header is found by `header`, its file by `folder`, and each of them may include what is ours."""
    (tmp_path / "seven.cuh").write_text("constexpr int SEVEN = 7;")
    (tmp_path / "brought.cu").write_text(
        '#include "common/tiles.cuh"\n#include KBIT_FORMAT_HEADER\n'
        "__global__ void brought(int* y) { *y = SEVEN * WARP; }"
    )
    template = Template("brought.cu", "brought", folder=tmp_path, header="seven.cuh")
    before = options(template)
    assert isinstance(compile_offline(template, "brought", ARCHITECTURE), str)
    assert isinstance(
        compile_offline(Template("codes.cu", "pack_kbit", folder=tmp_path), "pack_kbit", ARCHITECTURE), str
    )
    assert options() == options(Template("codes.cu", "pack_kbit")) != before


def test_errors_of_a_source_have_its_own_line_numbers(nvrtc, tmp_path):
    (tmp_path / "wrong.cu").write_text("\n\n__global__ void wrong() { nonsense; }")
    template = Template("wrong.cu", "wrong", folder=tmp_path, structs=(ABOUT,))
    with pytest.raises(KernelCompileError, match=r"wrong\.cu\(3\): error"):
        compile_offline(template, "wrong", ARCHITECTURE)


def test_a_kernel_notices_that_the_host_reckons_with_other_sizes(nvrtc):
    """Shared memory that is launched is what the kernel lays out, or it does not compile."""
    from kbitcupy.formats.codebook.cuda import DEQUANTIZE

    numbers, shared, *others = DEQUANTIZE.structs
    wrong = Constants(DEQUANTIZE_SHARED=tuple(size + 16 for size in shared.DEQUANTIZE_SHARED))
    template = replace(DEQUANTIZE, structs=(numbers, wrong, *others))
    with pytest.raises(KernelCompileError, match="the host reckons with other sizes"):
        compile_offline(template, "dequantize_kbit<__half, 4, E4M4>", ARCHITECTURE)
