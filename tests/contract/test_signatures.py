"""What launchers say of the arguments of kernels is what the compiled kernels say, with no GPU."""

import struct

import numpy as np
import pytest

from kbitcupy import tables
from kbitcupy.backend import launch
from kbitcupy.backend.compile import architecture_of, offline
from kbitcupy.compat import bitsandbytes
from kbitcupy.formats import fields
from kbitcupy.formats.affine import cuda as affine
from kbitcupy.formats.codebook import cuda as codebook, search
from kbitcupy.products import decoded

HALF, SINGLE, DOUBLE = (np.dtype(name) for name in ("float16", "float32", "float64"))
PARAMETER = 0x17  # EIATTR_KPARAM_INFO, a value of 12 bytes


def affine_kernels():
    for name in affine._SIGNATURES:
        instances = [e for template in affine.KERNELS if template.name == name for e in template.instances()]
        for expression in (instances[0], next((e for e in instances if "<double" in e), instances[-1])):
            yield affine._kernel(name, tuple(expression.partition("<")[2].removesuffix(">").split(", ")))


def kernels():
    known = tables.standard_codebook("nf", 3)
    for dtype in (HALF, SINGLE):
        yield codebook._kbit_launch("quantize", 3, "e4m4", dtype, known)._kernel
        yield codebook._kbit_launch("quantize", 8, "float32", dtype, None)._kernel
        yield codebook._kbit_launch("dequantize", 3, "float16", dtype, known)._kernel
        yield codebook._quantize_launch(dtype, search.fp4_table())._kernel
        yield codebook._quantize_launch(dtype, None)._kernel
        yield codebook._dequantize_launch(dtype, None, True)._kernel
        yield codebook._dequantize_launch(dtype, None, False)._kernel
        yield codebook._dynamic_dequantize_launch(dtype)._kernel
    for each in codebook._nested_launches():
        yield getattr(each, "_kernel", each)
    yield from affine_kernels()
    yield from bitsandbytes._CODES.values()
    yield from map(fields._kernel, fields._TEMPLATES)
    yield from (value for value in vars(decoded).values() if isinstance(value, launch.Kernel))


KERNELS = {kernel.expression: kernel for kernel in kernels()}


@pytest.fixture(scope="module")
def nvrtc():
    missing = "needs the extra `compile`: pip install -e '.[compile]'"
    pathfinder = pytest.importorskip("cuda.pathfinder", reason=missing, exc_type=ImportError)
    cuda = pytest.importorskip("cupy.cuda", reason=missing, exc_type=ImportError)
    try:
        cuda.nvrtc.getVersion()
    except RuntimeError as error:  # CuPy loads the library on the first call
        pytest.skip(f"{missing} ({error})")
    include = pathfinder.find_nvidia_header_directory("cudart")
    if include is None:
        pytest.skip(missing)
    return cuda.nvrtc, include


def parameter_sizes(cubin, name):
    """Sizes of the parameters of the kernel of that name, in order."""
    table, (entry, count, names) = struct.unpack_from("<Q", cubin, 0x28)[0], struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]
    sections = ((head, cubin[heads[names][4] + head[0] :].partition(b"\0")[0]) for head in heads)
    mangled = f".nv.info._Z{len(name)}{name}".encode()
    (info,) = (head for head, section in sections if section.startswith(mangled))
    at, end, sizes = info[4], info[4] + info[5], {}
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        if attribute == PARAMETER:
            _, ordinal, _, about = struct.unpack_from("<IHHI", cubin, at + 4)
            sizes[ordinal] = about >> 18
        at += 4 + (size if kind == 4 else 0)  # else the value stands in place of a size
    return [sizes[i] for i in range(len(sizes))]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_arguments_have_the_sizes_that_the_kernel_takes(nvrtc, kernel):
    compiler, include = nvrtc
    source, options = offline(kernel.template, kernel.expression)
    program = compiler.createProgram(source, "kernel.cu", (), ())
    architecture = architecture_of(kernel.template.file) or "75"
    try:
        compiler.addNameExpression(program, kernel.expression)
        compiler.compileProgram(program, (*options, f"-I{include}", f"-arch=sm_{architecture}", "-ftz=true"))
        taken = parameter_sizes(compiler.getCUBIN(program), kernel.template.name)
    finally:
        compiler.destroyProgram(program)
    assert [struct.calcsize("=" + launch._letters(each)) for each in kernel.signature] == taken
