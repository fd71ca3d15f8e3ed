"""The package as a whole: its public face, what an import costs, and which module may know which."""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kbitcupy as kb

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "kbitcupy"

# Modules import downwards only. A floor is one line; a name ending in ".*" stands for the modules of a folder.
FLOORS = [
    ["errors", "tables", "text", "_version"],
    ["backend.*"],
    ["formats", "formats.*"],
    ["array", "ops", "serial"],
    ["metrics", "dask_size", "products", "products.*", "io", "io.*"],
    ["affine", "bitnet.*", "gguf", "lora", "raw", "dask", "compat.*", ""],  # "": kbitcupy itself
    ["explore", "explore.*", "bench", "bench.*"],
    ["cli", "cli.*", "__main__"],
]

# Who knows whom on one floor, beside the modules of one folder.
NEIGHBOURS = {
    ("ops", "array"),
    ("serial", "array"),
    ("tables", "errors"),
    ("", "affine"),
    ("", "bitnet"),
    ("", "dask"),
    ("", "gguf"),
    ("", "lora"),
    ("", "raw"),
    ("bitnet.activations", "affine"),
    ("bitnet.export", "gguf"),
    ("", "compat.bitsandbytes"),
    ("__main__", "cli"),
}

# Methods that are shorthands of a free function import it when they are called.
SHORTHANDS = {("array", "ops"), ("array", "serial"), ("array", "products.functions")}

HEAVY = ["cupy", "cupy_backends", "dask", "matplotlib", "ml_dtypes", "safetensors", "scipy", "torch", "tqdm"]

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """Name within the package: "formats.base"; "" for kbitcupy itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in SOURCES}


def floor_of(module):
    for number, floor in enumerate(FLOORS):
        if module in floor:
            return number
    for number, floor in enumerate(FLOORS):
        if module and f"{module.partition('.')[0]}.*" in floor:
            return number
    raise LookupError(f"module {module!r} has no floor: give it one in FLOORS")


def only_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def imports_of(path):
    """(imported module of this package, whether a function imports it); type checkers' imports are none."""
    return tuple(_imports_of(path))


def _imports_of(path):
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in filter(only_for_types, ast.walk(tree)):
        node.body = []
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "kbitcupy":
                    yield alias.name.partition(".")[2], node in inside
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").partition(".")[0] != "kbitcupy":
                continue
            if node.level:
                parts = package.split(".") if package else []
                base = parts[: len(parts) - node.level + 1]
                base += node.module.split(".") if node.module else []
            else:
                base = node.module.split(".")[1:]
            for alias in node.names:
                # `from . import tables` names a module, `from .tables import Codebook` something in one.
                submodule = ".".join([*base, alias.name])
                yield (submodule if submodule in NAMES else ".".join(base)), node in inside


# ---- public face ---------------------------------------------------------------------------------------------------


def test_top_level_is_small_and_sorted_out():
    assert len(kb.__all__) < 30
    assert len(set(kb.__all__)) == len(kb.__all__)


@pytest.mark.parametrize("name", kb.__all__)
def test_public_name_exists_and_is_documented(name):
    value = getattr(kb, name)
    if name != "__version__":
        assert (inspect.getdoc(value) or "").strip()
    if inspect.isfunction(value):
        assert ">>> " in value.__doc__, "a public function has an example"


def test_version_is_the_changelogs():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert versions[0] == kb.__version__


def test_tab_offers_the_public_names_and_no_others():
    assert dir(kb) == sorted(kb.__all__)


def test_types_know_what_is_loaded_later():
    """mypy reads tests/typed_use.py as well; here only that no namespace was forgotten."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name
        for block in filter(only_for_types, tree.body)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    later = {*vars(kb)["_LATER"], *vars(kb)["_FUNCTIONS"]}
    code = f"import kbitcupy; print(*(name for name in {kb.__all__} if name not in vars(kbitcupy)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert typed == later and later & set(kb.__all__) == set(done.stdout.split())


def test_typed_marker():
    assert (PACKAGE / "py.typed").is_file()


def test_runs_from_a_checkout_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kbitcupy", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["kbitcupy", kb.__version__]


# ---- what an import costs --------------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy_and_says_nothing():
    code = f"import sys, kbitcupy; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [] and done.stderr == ""


# ---- who knows whom --------------------------------------------------------------------------------------------------


def family_of(module):
    """The folder of a family of formats; "" for what all families share."""
    parts = module.split(".")
    in_folder = len(parts) > 2 or (PACKAGE / Path(*parts)).is_dir()
    return parts[1] if parts[0] == "formats" and len(parts) > 1 and in_folder else ""


def may_know(importer, imported):
    if floor_of(imported) != floor_of(importer):
        return floor_of(imported) < floor_of(importer)
    if (importer, imported) in NEIGHBOURS:
        return True
    # A family knows what all share, and itself.
    known = family_of(imported) in ("", family_of(importer)) or importer == "formats"
    return importer.partition(".")[0] == imported.partition(".")[0] and known


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path) or "kbitcupy")
def test_imports_go_down(path):
    importer = module_name(path)
    for imported, inside_function in imports_of(path):
        if inside_function and (importer, imported) in SHORTHANDS:
            continue
        assert may_know(importer, imported), f"{importer or 'kbitcupy'} imports {imported or 'kbitcupy'}"


def test_no_imports_go_round():
    sorter = graphlib.TopologicalSorter()
    for path in SOURCES:
        importer = module_name(path)
        known = {imported for imported, _ in imports_of(path) if (importer, imported) not in SHORTHANDS}
        sorter.add(importer, *known - {importer})
    sorter.prepare()  # raises graphlib.CycleError


def test_the_import_reader_sees_every_form():
    found = dict(imports_of(PACKAGE / "array.py"))
    assert found["backend.xp"] is False and found["formats.base"] is False and found["ops"] is True
    assert "formats.codebook.kbit" in dict(imports_of(PACKAGE / "formats" / "__init__.py"))
    names = set(dict(imports_of(PACKAGE / "formats" / "codebook" / "cuda.py")))
    assert {"backend.compile", "tables", "formats.codebook.scales"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path) or "kbitcupy")
def test_one_file_compiles_and_one_asks_for_the_library(path):
    text = path.read_text(encoding="utf-8")
    name = module_name(path)
    if name != "backend.compile":
        named = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        assert not named & {"RawModule", "RawKernel"}
    if name not in ("backend.xp",):
        asks = r"""sys\.modules\.get\(["']cupy|["']cupy["'] (not )?in sys\.modules|find_spec\(["']cupy"""
        assert not re.search(asks, text), "ask _xp.is_cupy or _xp.namespace"


def test_the_citation_names_this_version_and_no_person():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0" and found["title"] == "kbitcupy" and found["type"] == "software"
    assert found["version"] == kb.__version__ and found["license"] == "MIT"
    assert found["authors"] == [{"name": "kbitcupy contributors"}] and {"message", "abstract"} <= found.keys()
