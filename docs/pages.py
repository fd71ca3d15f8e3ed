"""The pages that are made from the package itself: one for every public name, one for every format."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import layout

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.formats.base import Format

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


# ---- formats ---------------------------------------------------------------------------------------------------------

_HOW_TO_READ = """
Each page has a drawing of how the elements of one block lie in the planes of an array. It is not drawn by hand: every
bit is turned over, and the elements that decode to something else afterwards are the ones whose numbers it bears. So
one colour is for the bits of codes, of which each belongs to one element, another for those of scales, which several
share. Bit 7 of a byte is on top; a range such as ``0, 2 … 62`` goes from byte to byte.
"""


def described(name: str) -> dict[str, Any]:
    """What ``kbit formats NAME --json`` says of a format."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["formats", name, "--json"])
    (about,) = json.loads(printed.getvalue())["formats"]
    return dict(about)


def contracts(format: Format) -> list[str]:
    """The modules whose docstrings are the contract of a format."""
    own = type(format).__module__
    names = [own, own.rpartition(".")[0]]
    # A file of one format of several says where the contract is.
    names += re.findall(r"`(kbitcupy\.[\w.]+)` has the contract", inspect.getdoc(sys.modules[own]) or "")
    found = {name: len(inspect.getdoc(import_module(name)) or "") for name in names}
    return [max(found, key=lambda name: found[name])]


def contract(module: str) -> list[str]:
    """The docstring of a module; tables that are for the eye, and break the rules of reStructuredText, as they are."""
    lines = (inspect.getdoc(sys.modules[module]) or "").splitlines()
    found: list[str] = []
    while lines:
        if not re.fullmatch(r"=+( +=+)+", lines[0]):
            parts = re.split("(``.*?``)", lines.pop(0))  # |x| is a magnitude, not a name to be replaced
            found.append("".join(part if part.startswith("``") else part.replace("|", r"\|") for part in parts))
            continue
        edges = [number for number, line in enumerate(lines) if line == lines[0]]
        end = edges[2] if len(edges) > 2 and "" not in lines[: edges[2]] else edges[1]
        table, lines = lines[: end + 1], lines[end + 1 :]
        margins = [at for at, mark in enumerate(table[0]) if mark == " "]
        # A row without a name goes on with the one above: as a table it would run into that, as text it stands below.
        lists = any(line.startswith(" ") and ":" in line[margins[0] : margins[-1]] for line in table)
        broken = any(line[at : at + 1].strip() for line in table for at in margins)
        if lists or broken or re.search(r"\s\|\S", "\n".join(table)):
            found += ["::", "", *(f"   {line}" for line in table), ""]
        else:
            found += table
    return found


def list_table(*rows: tuple[str, ...], header: bool = False) -> list[str]:
    """A table of reStructuredText."""
    lines = [".. list-table::", "   :widths: auto", *(["   :header-rows: 1"] if header else []), ""]
    for row in rows:
        lines += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
    return [*lines, ""]


def format_page(name: str) -> list[str]:
    """The page of a format."""
    format, about = kb.get_format(name), described(name)
    first = about["summary"][:1].upper() + about["summary"][1:]
    facts = [
        ("bits of a code", f"{about['bits']:g}"),
        ("elements that share a scale", "the shape says it" if about["block"] == 1 else str(about["block"])),
        ("bits per element", f"{about['bits per element']:.3f}, scales included, with default options"),
        ("dtypes", ", ".join(about["dtypes"])),
        ("origin", about["origin"]),
    ]
    if not format.can_encode:
        facts.append(("quantizing", "no: arrays of other programs are decoded"))
    if format.takes:
        facts.append(("a call may bring", ", ".join(f"``{each}=``" for each in format.takes)))
    drawn = layout.layout_of(format)
    lines = [*title(name), f"{first}.", "", *list_table(*facts), *title("Layout", "-")]
    picture = [".. raw:: html", "", '   <div class="layout">']
    picture += [f"   {line}" for line in layout.draw(drawn, name).splitlines()]
    lines += [*picture, "   </div>", "", f":doc:`How to read it <index>`. {planes_in_words(drawn)}", ""]
    lines += title("Options", "-")
    rows = [(f"``{c['name']}={c['default']}``", c["allowed"], c["meaning"]) for c in about["choices"] if c["meaning"]]
    lines += list_table(("option", "allowed", "what it does"), *rows, header=True) if rows else ["It has none.", ""]
    lines += [*title("Use", "-"), ".. code-block:: python", ""]
    if format.can_encode:
        lines += [f'   q = kb.quantize(x, "{name}")', "   y = kb.dequantize(q)", ""]
        commands = [f"kbit quantize FILE -o OUT --format {name}", f"kbit compare --formats {name}"]
    else:
        lines += ['   q = kb.io.load("model.gguf")["blk.0.ffn_up.weight"]', "   y = kb.dequantize(q)", ""]
        commands = ["kbit dequantize model.gguf -o model.safetensors"]
    lines += [".. code-block:: console", "", *(f"   $ {command}" for command in commands), ""]
    lines += title("Contract", "-")
    for module in contracts(format):
        lines += [*contract(module), ""]
    return lines


def planes_in_words(drawn: layout.Layout) -> str:
    """What belongs to the whole array rather than to a block."""
    others = [f"``{field.name}``" for field in drawn.fields if field.scope == "tensor"]
    if not others:
        return ""
    verb = "belongs" if len(others) == 1 else "belong"
    return f"{' and '.join(others)} {verb} to all elements of an array, so long as one scale is for all."


def formats(folder: Path) -> None:
    """A page for every format, and one in front of them."""
    folder.mkdir(parents=True)
    lines = [*title("Formats, one by one"), _HOW_TO_READ.strip(), ""]
    families: dict[str, list[str]] = {}
    for name in kb.list_formats():
        origin = kb.get_format(name).origin
        families.setdefault(origin, []).append(name)
        (folder / f"{name}.rst").write_text("\n".join(format_page(name)), "utf-8")
    rows = [(origin, ", ".join(f":doc:`{name}`" for name in names)) for origin, names in families.items()]
    lines += [*list_table(("origin", "formats"), *rows, header=True), *toctree(*kb.list_formats())]
    (folder / "index.rst").write_text("\n".join(lines), "utf-8")


#: Captions of the side bar, and the pages below them.
CONTENTS = {
    "Guide": ("docs/install", "docs/python", "docs/commands", "docs/products"),
    "How to": (
        "docs/transformers",
        "docs/howto/many_gpus",
        "docs/howto/dask_array",
        "docs/howto/search",
        "docs/howto/field",
        "docs/howto/fake_quantization",
        "docs/howto/kernel",
    ),
    "Files": ("docs/files", "docs/bitsandbytes", "docs/gguf"),
    "Reference": ("docs/formats", "docs/formats/index", "docs/api/index", "docs/benchmarks", "docs/comparison"),
    "Project": ("CONTRIBUTING", "CHANGELOG"),
}


def contents(root: Path) -> list[str]:
    """The tables of contents behind the first page, in Markdown."""
    lines: list[str] = []
    listed = {entry for entries in CONTENTS.values() for entry in entries}
    more = [f"docs/{path.stem}" for path in sorted((root / "docs").glob("*.md"))]
    more += [name for name in ("SECURITY",) if (root / f"{name}.md").exists()]
    project = tuple(name for name in more if name not in {*listed, "docs/notebooks"})
    notebooks = "docs/notebooks", *(f"notebooks/{path.stem}" for path in sorted((root / "notebooks").glob("*.ipynb")))
    for caption, entries in {**CONTENTS, "Project": (*CONTENTS["Project"], *project), "Notebooks": notebooks}.items():
        lines += ["", "```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *entries, "```"]
    return [*lines, ""]


def write(folder: Path) -> None:
    """Write all generated pages into `folder`."""
    api(folder / "api")
    formats(folder / "formats")
