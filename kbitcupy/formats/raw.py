"""Planes of blocks as their origin has them, which are split when the first plane is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ..backend import xp as _xp
from .blocks import BlockFormat

_SPLITTING = threading.Lock()


class RawPlanes(Mapping[str, Any]):
    """The planes of raw blocks.

    Until a plane is asked for, there are the blocks alone: an array of a file goes to a GPU as it is and is split
    there, and an array that is only copied to another file is never split.

    Parameters
    ----------
    format : BlockFormat
        The format.
    blocks : array
        The origin's bytes, uint8, whole blocks.
    others : mapping of str to array
        Planes that do not lie in blocks, such as a tensor scale.
    """

    __slots__ = ("_blocks", "_format", "_others", "_planes")

    def __init__(self, format: BlockFormat, blocks: Any, others: Mapping[str, Any]):
        self._format, self._others = format, dict(others)
        self._blocks: Any = blocks
        self._planes: dict[str, Any] | None = None

    @property
    def blocks(self) -> Any:
        """The blocks, as long as nobody has asked for a plane; then None."""
        return self._blocks

    @property
    def arrays(self) -> list[Any]:
        """What holds the data now."""
        blocks = self._blocks  # another thread may ask for a plane
        return list(self.values()) if blocks is None else [blocks, *self._others.values()]

    def _split(self) -> dict[str, Any]:
        planes = self._planes
        if planes is None:
            with _SPLITTING:  # kernels remember where planes are: there must never be others
                if self._planes is None:
                    self._planes = {**self._format.from_blocks(self._blocks), **self._others}
                    self._blocks = None
                planes = self._planes
        return planes

    def __getitem__(self, name: str) -> Any:
        return self._split()[name]

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)

    def __iter__(self) -> Iterator[str]:
        yield from (field.name for field in self._format.fields)
        yield from self._others

    def __len__(self) -> int:
        return len(self._format.fields) + len(self._others)

    def __repr__(self) -> str:
        return repr(dict(self))

    def to_device(self, device: str) -> Mapping[str, Any]:
        """The same planes on a device."""
        blocks = self._blocks
        if blocks is None:
            return {name: _xp.to_device(plane, device) for name, plane in self.items()}
        others = {name: _xp.to_device(plane, device) for name, plane in self._others.items()}
        return RawPlanes(self._format, _xp.to_device(blocks, device), others)
