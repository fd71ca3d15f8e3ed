"""Who owns which tensors of a file: a list of layouts, asked in turn by everything that opens one.

A layout is added by writing a `Layout` and putting it into `LAYOUTS`; readers, writers and commands follow.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import FileError
from ..container import Together
from .base import Compressed, Layout
from .bitnet import CONVENTIONS, BitnetCppLayout, BitnetLayout
from .bitsandbytes import BitsandbytesLayout
from .compressed_tensors import CompressedTensorsLayout
from .gguf import GgufLayout
from .own import OwnLayout

__all__ = ["LAYOUTS", "WEIGHT_SCALES", "Compressed", "Layout", "find_layout", "recognise"]

#: All layouts, in the order in which they are asked: what one has recognised, the next ones do not see.
LAYOUTS: list[Layout] = [
    OwnLayout(),
    BitsandbytesLayout(),
    CompressedTensorsLayout(),
    BitnetLayout(),
    GgufLayout(),
    BitnetCppLayout(),
]
#: What a number beside BitNet's weights of transformers may do.
WEIGHT_SCALES = tuple(CONVENTIONS.values())


def find_layout(name: str) -> Layout:
    """The layout of a name.

    Raises
    ------
    ValueError
        When there is none.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"layout is {name!r}; allowed are {', '.join(layout.name for layout in LAYOUTS)}")


def recognise(reader: Together, weight_scale: str | None = None) -> tuple[dict[str, Compressed], Together]:
    """The compressed tensors of all layouts by their names, and the stored tensors that belong to none of them.

    `weight_scale` is that of `BitnetLayout`.

    Raises
    ------
    FileError
        When stored tensors do not fit together, or two compressed ones have one name.
    """
    compressed: dict[str, Compressed] = {}
    rest = reader
    for layout in LAYOUTS:
        if weight_scale is not None and isinstance(layout, BitnetLayout):
            layout = replace(layout, weight_scale=weight_scale)
        for name, one in layout.recognise(rest).items():
            if name in compressed:
                raise _twice(reader, name, one.stored[0], compressed[name].stored[0])
            compressed[name] = one
        rest = rest.without({stored for one in compressed.values() for stored in one.stored})
    for name in rest.names:
        if name in compressed:
            raise _twice(reader, name, name, compressed[name].stored[0])
    return compressed, rest


def _twice(reader: Together, name: str, *stored: str) -> FileError:
    files = " and ".join(sorted(reader.file_of(each).path.name for each in stored))
    return FileError(f"{reader.path}: tensor {name!r} is in {files}")
