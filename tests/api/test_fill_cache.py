"""Kernels that are compiled on another machine: CuPy finds them by the names that `.ci/fill_cache.py` gives them."""

import importlib.util
import os
from pathlib import Path

import pytest

import kbitcupy as kb
from kbitcupy.backend import compile as compiling
from kbitcupy.formats.base import kernel_templates

CI = Path(__file__).resolve().parent.parent.parent / ".ci"


@pytest.fixture
def fill_cache(monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location("fill_cache", CI / "fill_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instance_of(fill_cache, name, expression, only=""):
    template = next(template for template in kernel_templates() if template.name == name)
    source, options = compiling.offline(template, expression)
    return fill_cache.cubins.Instance(template.file, expression, name, True, only, 0, False, source, tuple(options))


def test_options_have_the_order_of_cupy(fill_cache):
    """Its own headers ahead, what a module asks for, then CuPy's other headers and those of CUDA."""
    found = fill_cache.options_of(instance_of(fill_cache, "dequantize_kbit", "", only="90a"), "/there")
    own = compiling.options()
    assert found[3 : 3 + len(own)] == own and found[3 + len(own)] == "-arch=sm_90a"
    assert all(option.startswith("-I/there/cupy/") for option in found[:3])
    assert found[-3:] == ("-I/there/cupy/_core/include", "-I/there/nvidia/cu13/include", "-ftz=true")


def test_names_are_those_of_cupy(cupy, fill_cache):
    site = Path(cupy.__file__).parent.parent
    if not (site / "nvidia" / "cu13" / "include").is_dir():
        pytest.skip("CUDA's headers are not those of the package nvidia-cuda-runtime for CUDA 13")
    kb.quantize(cupy.ones(64, "float32"), "kbit4")
    instance = instance_of(fill_cache, "quantize_kbit", "quantize_kbit<float, 4, E4M4, ORDERED>")
    name = fill_cache.name_of(instance, site, cupy.cuda.Device().compute_capability)
    assert (Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser() / name).is_file()
