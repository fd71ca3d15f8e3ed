"""The pages that are made from the package itself: one for every public name, one for every format."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import kbitcupy as kb

#: What authors of formats use, beside `kbitcupy.register`.
FOR_AUTHORS = {
    "kbitcupy.formats.base": ("Format", "Plane", "Decoder"),
    "kbitcupy.formats.blocks": ("BlockFormat", "Field", "Quantizer", "Importance"),
    "kbitcupy.backend.compile": ("Template",),
}


@dataclass(frozen=True)
class Namespace:
    """A module and its public names.

    Parameters
    ----------
    name : str
        As users write it, ``"kbitcupy.affine"``.
    summary : str
        The first sentence of its docstring.
    names : tuple of str
        What it offers, modules left out.
    """

    name: str
    summary: str
    names: tuple[str, ...]

    @property
    def page(self) -> str:
        """Name of its page in the folder ``api``."""
        return f"{self.name}.index"


def public(module: types.ModuleType) -> list[str]:
    """The public names of a module: those that it lists, or else those that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def namespaces(module: types.ModuleType = kb, name: str = "kbitcupy") -> Iterator[Namespace]:
    """The package's public face: the top level, and the modules that it and they offer."""
    found = {each: getattr(module, each) for each in public(module)}
    inner = {each: value for each, value in found.items() if isinstance(value, types.ModuleType)}
    plain = [each for each in found if each not in inner and each != "__version__"]
    plain.sort(key=lambda each: (not inspect.isclass(found[each]), callable(found[each]), each.lower()))
    yield Namespace(name, first_sentence(module), tuple(plain))
    for each, value in sorted(inner.items()):
        yield from namespaces(value, f"{name}.{each}")
    if module is kb:
        for other in ("kbitcupy.errors", *FOR_AUTHORS):
            listed = FOR_AUTHORS.get(other) or tuple(public(import_module(other)))
            yield Namespace(other, first_sentence(import_module(other)), tuple(listed))


def first_sentence(value: Any) -> str:
    """The summary of a docstring, in one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def value_of(namespace: Namespace, name: str) -> Any:
    """What a public name stands for."""
    module: Any = kb
    for part in namespace.name.split(".")[1:]:
        module = getattr(module, part, None) or import_module(f"{module.__name__}.{part}")
    return getattr(module, name)


def title(text: str, mark: str = "=") -> list[str]:
    """A heading of reStructuredText."""
    return [text, mark * len(text), ""]


def toctree(*entries: str, caption: str | None = None, hidden: bool = True) -> list[str]:
    """A table of contents for reStructuredText."""
    options = ["   :hidden:"] * hidden + [f"   :caption: {caption}"] * (caption is not None)
    return [".. toctree::", *options, "   :maxdepth: 1", "", *(f"   {entry}" for entry in entries), ""]


def directive(namespace: Namespace, name: str) -> list[str]:
    """What makes Sphinx print the docstring of a public name."""
    value, full = value_of(namespace, name), f"{namespace.name}.{name}"
    if inspect.isclass(value):
        return [f".. autoclass:: {full}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: {full}", ""]
    return [f".. autodata:: {full}", ""]


def api(folder: Path) -> None:
    """A page for every public name, and one for every namespace."""
    folder.mkdir(parents=True)
    found = list(namespaces())
    for namespace in found:
        lines = [*title(namespace.name), f".. py:module:: {namespace.name}", "", namespace.summary, ""]
        lines += [".. list-table::", "   :widths: auto", ""]
        for name in namespace.names:
            page = f"{namespace.name}.{name}"
            value = value_of(namespace, name)
            summary = first_sentence(value) if callable(value) else f"``{value!r}``"
            lines += [f"   * - :doc:`{name} <{page}>`", f"     - {summary}"]
            (folder / f"{page}.rst").write_text("\n".join([*title(page), *directive(namespace, name)]), "utf-8")
        lines += ["", *toctree(*(f"{namespace.name}.{name}" for name in namespace.names))]
        (folder / f"{namespace.page}.rst").write_text("\n".join(lines), "utf-8")
    lines = [*title("Every public name"), "Import the package as ``import kbitcupy as kb``.", ""]
    for namespace in found:
        lines += [f":doc:`{namespace.name} <{namespace.page}>`", f"    {namespace.summary}", ""]
    lines += toctree(*(namespace.page for namespace in found))
    (folder / "index.rst").write_text("\n".join(lines), "utf-8")


#: Captions of the side bar, and the pages below them.
CONTENTS = {
    "Guide": ("docs/install", "docs/python", "docs/commands", "docs/products"),
    "Files": ("docs/files", "docs/bitsandbytes", "docs/gguf"),
    "Reference": ("docs/formats", "docs/api/index", "docs/benchmarks", "docs/comparison"),
    "Project": ("CONTRIBUTING", "CHANGELOG"),
}


def contents(root: Path) -> list[str]:
    """The tables of contents behind the first page, in Markdown."""
    lines: list[str] = []
    notebooks = "docs/notebooks", *(f"notebooks/{path.stem}" for path in sorted((root / "notebooks").glob("*.ipynb")))
    for caption, entries in {**CONTENTS, "Notebooks": notebooks}.items():
        lines += ["", "```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *entries, "```"]
    return [*lines, ""]


def write(folder: Path) -> None:
    """Write all generated pages into `folder`."""
    api(folder / "api")
