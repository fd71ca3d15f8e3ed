"""kbitcupy's own layout.

A compressed tensor ``w`` is stored as one tensor for each of its planes, ``w.packed``, ``w.absmax``, ...; the metadata
key ``kbitcupy`` holds ``{"version": 1, "written_by": ..., "tensors": {"w": configuration, ...}}`` as JSON. Every other
tensor and metadata key stays as it is, so other tools read these files as well.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._version import __version__
from ...array import QuantizedArray, read_config
from ...errors import FileError
from ...formats.base import Format
from ...serial import read_json
from ..container import Entry, FileReader, Reader, entry_of
from ..safetensors import SAFETENSORS
from .base import Compressed, Layout

#: Metadata key of the compressed tensors' configurations.
METADATA_KEY = "kbitcupy"
#: Version of what stands under `METADATA_KEY`; what an older version wrote is still read.
FILE_VERSION = 1


class OwnLayout(Layout):
    """One stored tensor for each plane, and the configurations in the metadata."""

    name = "kbitcupy"
    container = SAFETENSORS

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found: dict[str, Compressed] = {}
        for file in reader.files:
            for name, config in _configs(file.metadata, file.path).items():
                if name in found:
                    other = reader.file_of(found[name].stored[0])
                    raise FileError(f"{reader.path}: tensor {name!r} is in {other.path.name} and {file.path.name}")
                try:
                    found[name] = _describe(file, name, config)
                except FileError:
                    raise
                except Exception as error:  # a third party's format may raise anything on options it did not write
                    writer = self.written_by(file.metadata)
                    by = f" (written by {writer})" if writer else ""
                    raise FileError(f"{file.path}: compressed tensor {name!r}{by}: {_brief(error)}") from error
        return found

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        return {f"{name}.{plane}": entry_of(spec) for plane, spec in planes.items()}

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, Any]:
        return {f"{name}.{plane}": array for plane, array in q.planes.items()}

    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        before = _configs(metadata, "the metadata")
        stored = {"version": FILE_VERSION, "written_by": f"kbitcupy {__version__}", "tensors": {**before, **configs}}
        plain = {key: text for key, text in metadata.items() if key != METADATA_KEY}
        return {**plain, METADATA_KEY: json.dumps(stored, separators=(",", ":"))}

    def quantization_config(
        self, formats: Mapping[str, tuple[Format, str]], ignored: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        return {"written_by": f"kbitcupy {__version__}", "read_by": "kbitcupy.io.load"}

    def own_keys(self) -> Collection[str]:
        return (METADATA_KEY,)

    def written_by(self, metadata: Mapping[str, Any]) -> str | None:
        text = metadata.get(METADATA_KEY)
        return _writer(read_json(text)) if isinstance(text, str) else None


def _describe(file: FileReader, name: str, config: Any) -> Compressed:
    """A tensor from its configuration, of which nothing can be trusted."""
    if name in file.entries:
        raise FileError(f"{file.path}: tensor {name!r} is stored twice, as it is and compressed; rename one")
    format, shape, dtype = read_config(config)
    np.broadcast_to(np.zeros((), dtype), shape)  # refuses what no array can have, and takes no memory
    planes = {plane: f"{name}.{plane}" for plane in format.planes(shape)}
    for plane, stored in planes.items():
        if stored not in file.entries:
            raise FileError(
                f"{file.path}: compressed tensor {name!r} lacks its plane {plane!r}: there is no tensor {stored!r} "
                "in the file; compress it again"
            )
    lead = format.lead_of(shape, {plane: file.entries[stored].shape for plane, stored in planes.items()})
    format.check_shape(shape[lead or 0 :])
    for plane, spec in format.planes_of(shape, lead or 0).items():
        found = file.entries[planes[plane]]
        if (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise FileError(
                f"{file.path}: compressed tensor {name!r}: plane {plane!r} is {found}, but {format} of shape {shape} "
                f"needs {entry_of(spec)}; compress it again"
            )
    read = functools.partial(_read, planes)
    return Compressed(format, shape, dtype, tuple(planes.values()), read, lead=lead or 0, as_stored=planes)


def _read(planes: Mapping[str, str], reader: Reader) -> dict[str, np.ndarray]:
    return {plane: reader.array(stored) for plane, stored in planes.items()}


def _configs(metadata: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """The configurations under `METADATA_KEY`, which is text where it is this layout's."""
    text = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        return {}
    try:
        stored = read_json(text)
    except ValueError as error:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} is not JSON: {_brief(error)}") from error
    version = stored.get("version") if isinstance(stored, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} has no version: it was not written by kbitcupy")
    if version > FILE_VERSION:
        raise FileError(
            f"{path}: written by {_writer(stored) or 'a newer kbitcupy'}, needs one that reads file version {version}; "
            f"this is kbitcupy {__version__}, which reads up to {FILE_VERSION}: upgrade it"
        )
    if not isinstance(stored.get("tensors"), dict):
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} lists no tensors")
    return dict(stored["tensors"])


def _writer(stored: Mapping[str, Any]) -> str | None:
    writer = stored.get("written_by")
    return _brief(writer) if isinstance(writer, str) else None


def _brief(text: Any, length: int = 400) -> str:
    """The beginning of what may quote a large part of a file."""
    text = str(text)
    return text if len(text) <= length else f"{text[:length]}..."
