"""The generated pages of the documentation: nothing public lacks one, and layouts are drawn as they are."""

import sys
from pathlib import Path

import pytest

import kbitcupy as kb

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def pages():
    """``docs/pages.py``, which needs nothing that the package does not."""
    sys.path.insert(0, str(DOCS))
    try:
        import pages
    finally:
        sys.path.remove(str(DOCS))
    return pages


@pytest.fixture(scope="module")
def written(pages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    pages.write(folder)
    return folder


def test_every_public_name_has_a_page(pages, written):
    found = {path.stem for path in (written / "api").glob("*.rst")}
    for name in kb.__all__:
        assert name == "__version__" or {f"kbitcupy.{name}", f"kbitcupy.{name}.index"} & found, name
    for namespace in pages.namespaces():
        assert namespace.page in found
        assert all(f"{namespace.name}.{name}" in found for name in namespace.names)
    assert {"kbitcupy.quantize", "kbitcupy.bitsandbytes.quantize_kbit", "kbitcupy.io.bitsandbytes.save"} <= found


def test_every_public_name_says_what_it_is(pages):
    for namespace in pages.namespaces():
        assert namespace.summary.endswith((".", ":")), namespace
        for name in namespace.names:
            value = pages.value_of(namespace, name)
            if callable(value):
                assert pages.first_sentence(value).endswith((".", ":")), f"{namespace.name}.{name}"


def test_pages_of_a_name_are_those_of_its_module(pages):
    listed = {namespace.name: namespace.names for namespace in pages.namespaces()}
    assert "get_format" not in listed["kbitcupy.bitsandbytes"]  # imported there, offered elsewhere
    assert "quantize_nf4" in listed["kbitcupy.bitsandbytes"]
    assert "Format" in listed["kbitcupy.formats.base"]
