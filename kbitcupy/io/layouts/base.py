"""What a layout is: who owns which stored tensors, and what they mean together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...array import QuantizedArray
from ...errors import FileError
from ...formats.base import Choice, Format, Plane
from ...formats.raw import RawPlanes
from ..container import Container, Entry, Reader


@dataclass(frozen=True)
class Compressed:
    """What a file says about one compressed tensor, understood and checked.

    Parameters
    ----------
    format : Format
        Its format.
    shape : tuple of int
        Shape of the array that was compressed.
    dtype : numpy.dtype
        Its dtype.
    stored : tuple of str
        The stored tensors that it consists of. It belongs to the file of the first.
    planes : callable
        Takes the reader that it was recognised in, and returns the planes.
    options : mapping, optional
        What else the layout has to be told to write the tensor as it was.
    lead : int, default 0
        How many leading lengths count the members of a stack.
    as_stored : mapping of str to str, optional
        The stored tensor of each plane, where all of them are stored as they are.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: tuple[str, ...]
    planes: Callable[[Reader], Mapping[str, np.ndarray]]
    options: Mapping[str, Any] = field(default_factory=dict)
    lead: int = 0
    as_stored: Mapping[str, str] = field(default_factory=dict)

    def specs(self) -> Mapping[str, Plane]:
        """What its planes are."""
        return self.format.planes_of(self.shape, self.lead)

    def read(self, reader: Reader) -> QuantizedArray:
        """The compressed tensor."""
        planes = self.planes(reader)
        if isinstance(planes, RawPlanes):  # as many bytes as its entry says
            return QuantizedArray._wrap(self.format, planes, self.shape, self.dtype, lead=self.lead)
        return QuantizedArray(self.format, planes, self.shape, self.dtype)


class Layout(ABC):
    """How compressed tensors are stored.

    Attributes
    ----------
    name : str
        What it is chosen by.
    container : Container
        The kind of file that it writes.
    linear_only : bool
        Whether transformers loads a folder of it, with the linear layers compressed and nothing else.
    loads : str
        The formats that transformers loads of it, for messages.
    loads_mixed : bool
        Whether it also loads models of which some linear layers are not compressed because their code wants weights:
        mixtures of experts, and T5.
    """

    name: ClassVar[str]
    container: ClassVar[Container]
    linear_only: ClassVar[bool] = False
    loads: ClassVar[str] = ""
    loads_mixed: ClassVar[bool] = False

    @abstractmethod
    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        """The compressed tensors of this layout among the stored ones of `reader`, by their names.

        Raises
        ------
        FileError
            When stored tensors that are of this layout do not fit together; the message names one of them.
        """

    @abstractmethod
    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        """The stored tensors that a compressed one becomes; `planes` are arrays, or what `Format.planes` says of them.

        Raises
        ------
        FileError
            When this layout cannot hold the format.
        """

    @abstractmethod
    def arrays(self, name: str, q: QuantizedArray) -> dict[str, Any]:
        """Their data, in host memory or on the device of the array."""

    @abstractmethod
    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata of a file: what it has, and the configurations of tensors that are compressed now."""

    def about_file(
        self,
        metadata: Mapping[str, Any],
        entries: Mapping[str, Entry],
        part: tuple[int, int, int] = (0, 1, 0),
        changed: bool = False,
    ) -> dict[str, Any]:
        """The metadata with what the container wants beside it.

        Parameters
        ----------
        metadata : mapping
            From `metadata`.
        entries : mapping of str to Entry
            All stored tensors of all parts.
        part : tuple of int
            Number of this file from 0, files, tensors in all of them.
        changed : bool, default False
            Whether tensors are stored in another way than what `metadata` was said of.
        """
        return dict(metadata)

    def is_natural(self, format: Format) -> bool:
        """Whether a model of transformers that is compressed to this format is best stored so."""
        return False

    def given_by(self, choice: Choice) -> Callable[[Any], Mapping[str, Any]] | None:
        """What takes an array and returns what `quantize` is given beside its format, so that this layout can store
        the result as it is; None where nothing is.
        """
        return None

    def quantization_config(
        self, formats: Mapping[str, tuple[Format, str]], ignored: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        """What ``config.json`` says of a model's compressed tensors; nothing where the layout has no such thing.

        Parameters
        ----------
        formats : mapping of str to tuple
            Format and dtype of each compressed tensor, by name.
        ignored : sequence of str
            Layers that are not compressed.
        prefix : str
            What the names of all compressed tensors begin with, and those of a base model do not.

        Raises
        ------
        FileError
            When it has no words for these formats.
        """
        return {}

    def load_note(self, formats: Iterable[Format]) -> str:
        """Who loads a folder of this layout with tensors of these formats."""
        return f"from_pretrained of transformers loads the folder, with the package {self.name}"

    def own_keys(self) -> Collection[str]:
        """Keys of the metadata that describe the compressed tensors, and mean nothing beside others."""
        return ()

    def written_by(self, metadata: Mapping[str, Any]) -> str | None:
        """Which program compressed the tensors of a file with this metadata, where it says so."""
        return None


def free_entries(layout: Layout, name: str, taken: Collection[str], *about: Any) -> dict[str, Entry]:
    """`Layout.entries`, none of which is the name of another tensor.

    Raises
    ------
    FileError
        When a name is `taken`.
    """
    entries = layout.entries(name, *about)
    for stored in entries:
        if stored != name and stored in taken:
            raise FileError(
                f"tensor {name!r} would be stored as {stored!r} as well, but that is the name of another tensor: "
                f"rename one of them, or keep {name!r} as it is"
            )
    return entries
