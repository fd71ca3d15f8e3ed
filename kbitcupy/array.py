"""QuantizedArray: an array that stays compressed."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .backend import xp as _xp
from .errors import DeviceError, FormatError, TransposeError
from .formats.base import Format, get_format
from .formats.raw import RawPlanes

#: Version of the JSON configuration; what an older version wrote is still read.
CONFIG_VERSION = 2

# What NumPy's functions may ask of a compressed array: none of these looks at a value.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: math.prod(a.shape) if axis is None else a.shape[axis],
}

# The axes that NumPy names in ``x @= q.T``, of two axes and of one: those of any product.
_LAST_AXES = ([(-2, -1)] * 3, [(-1,), (-2, -1), (-1,)])

# What does the work of NumPy's functions, by their names; everything else decodes first.
_INSTEAD = {
    **dict.fromkeys(("matmul", "dot", "inner", "vecdot", "matvec", "vecmat", "tensordot", "einsum"), "kbitcupy.matmul"),
    **dict.fromkeys(("save", "savez", "savez_compressed"), "kbitcupy.io.save(path, {name: array})"),
    **dict.fromkeys(("concatenate", "vstack", "append"), "kbitcupy.concatenate"),
    **dict.fromkeys(("transpose", "matrix_transpose", "permute_dims", "swapaxes"), ".T of a 2-D array"),
    "stack": "kbitcupy.stack",
    "take": "kbitcupy.take",
    "reshape": ".reshape()",
    "copy": ".copy()",
}


class Compressed(np.lib.mixins.NDArrayOperatorsMixin):
    """How a `QuantizedArray` and its transpose answer operators and NumPy's functions.

    ``@`` and ``np.matmul`` are products with the compressed values. Whatever else needs the values is refused, with the
    remedy: nothing is decoded unasked.
    """

    __slots__ = ()

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} does not convert to an array by itself: call .dequantize()")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        from .products.functions import matmul

        if ufunc is np.matmul and method == "__call__":
            if not options:  # x @ q.T
                return matmul(*inputs)
            if options.pop("axes", _LAST_AXES[0]) in _LAST_AXES and options.keys() == {"out"}:
                return _multiply_into(options["out"][0], inputs, matmul)
        raise self._refusal(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        answer = _ANSWERS.get(function)
        if answer is None:
            raise self._refusal(function.__name__)
        return answer(*arguments, **options)

    def _refusal(self, name: str) -> TypeError:
        instead = _INSTEAD.get(name)
        use = f"use {instead}, or " if instead else ""
        return TypeError(f"{name} does not take a {type(self).__name__}: {use}call .dequantize() and pass the result")

    def __matmul__(self, other: Any) -> Any:
        """Shorthand of `kbitcupy.matmul`."""
        from .products.functions import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        """Shorthand of `kbitcupy.matmul`."""
        from .products.functions import matmul

        return matmul(other, self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, numbers.Number) or hasattr(other, "__array__"):
            raise TypeError(
                f"{type(self).__name__}s are not compared with == or !=: call .dequantize() and compare the results, "
                "or compare the planes; `a is b` says whether two are the same object"
            )
        return NotImplemented

    __ne__ = __eq__  # refuses or leaves it to identity, too
    __hash__ = object.__hash__


class QuantizedArray(Compressed):
    """An array compressed to a few bits per element.

    Made by `kbitcupy.quantize`; the constructor puts one together from planes that exist already, and checks them.

    Parameters
    ----------
    format : Format
        Format of the planes.
    planes : mapping of str to array
        NumPy or CuPy arrays, all on one device, as ``format.planes(shape)`` describes them.
    shape : tuple of int
        Shape of the array that was compressed.
    dtype : dtype_like
        Its dtype: float16, bfloat16, float32 or float64.

    Raises
    ------
    FormatError
        When a plane is missing, unknown, or of the wrong shape or dtype.
    DeviceError
        When the planes are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32), "kbit4")
    >>> q
    QuantizedArray(kbit4, shape=(32, 32), dtype=float32, device=cpu, 4.28 bits/element)
    >>> q[:8].dequantize().shape
    (8, 32)
    """

    __slots__ = ("_borrowed", "_launches", "dtype", "format", "lead", "planes", "shape")

    format: Format
    planes: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: np.dtype
    #: How many leading lengths count the members of a stack, each of which has planes of its own; 0 for most arrays.
    lead: int
    #: Planes that elements of another array are decoded with, too, such as the tensor scale of a slice.
    _borrowed: tuple[str, ...]
    #: What kernels say of the planes when they are launched, by kernel: the planes are the same for life.
    _launches: dict[Any, Any]

    def __init__(self, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: Any):
        shape = _checked_shape(shape)
        lead = check_planes(format, planes, shape)
        self._set(format, planes, shape, _xp.float_dtype(dtype), lead=lead)

    def _set(
        self,
        format: Format,
        planes: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: np.dtype,
        borrowed: tuple[str, ...] = (),
        lead: int = 0,
    ) -> None:
        put = object.__setattr__
        put(self, "format", format)
        put(self, "planes", planes if isinstance(planes, RawPlanes) else MappingProxyType(dict(planes)))
        put(self, "shape", shape)
        put(self, "dtype", dtype)
        put(self, "_borrowed", borrowed)
        put(self, "lead", lead)
        put(self, "_launches", {})

    @classmethod
    def _wrap(
        cls,
        format: Format,
        planes: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: np.dtype,
        borrowed: tuple[str, ...] = (),
        lead: int = 0,
    ) -> QuantizedArray:
        """The constructor without its checks."""
        made = object.__new__(cls)
        made._set(format, planes, shape, dtype, borrowed, lead)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"QuantizedArray is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"QuantizedArray is frozen: cannot delete {name!r}")

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def members(self) -> int:
        """Arrays of which this is a stack, each with planes of its own, one behind the other (see `kbitcupy.stack`); 1
        for most arrays, and where all that a member has belongs to its blocks.
        """
        return math.prod(self.shape[: self.lead]) if self.lead else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(int(array.nbytes) for array in self._arrays())

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes for each element (NaN without elements)."""
        return self.nbytes * 8 / self.size if self.size else float("nan")

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<ordinal>"``."""
        return _xp.device_of(next(iter(self._arrays())))

    def _arrays(self) -> Iterable[Any]:
        """What holds the data."""
        return self.planes.arrays if isinstance(self.planes, RawPlanes) else self.planes.values()

    @property
    def T(self) -> TransposedQuantizedArray:
        """The transpose of a 2-D array, without moving a byte."""
        return TransposedQuantizedArray(self)

    def config(self) -> dict[str, Any]:
        """JSON description of everything but the planes; `from_config` is its inverse."""
        return config_of(self.format, self.shape, self.dtype)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], planes: Mapping[str, Any]) -> QuantizedArray:
        """Put an array together from its `config` and its planes.

        Raises
        ------
        FormatError
            When the configuration is malformed, from a newer version, or does not fit the planes.
        """
        format, shape, dtype = read_config(config)
        return cls(format, planes, shape, dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        bits = f", {self.bits_per_element:.2f} bits/element" if self.size else ""
        return f"QuantizedArray({self.format}, shape={self.shape}, dtype={self.dtype}, device={self.device}{bits})"

    def _repr_html_(self) -> str:
        rows = {
            "format": str(self.format),
            "shape": str(self.shape),
            "dtype": str(self.dtype),
            "device": self.device,
            "MB before": f"{self.size * self.dtype.itemsize / 1e6:.3f}",
            "MB after": f"{self.nbytes / 1e6:.3f}",
            "bits per element": f"{self.bits_per_element:.2f}" if self.size else "",
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td>{_escape(value)}</td></tr>" for name, value in rows.items()
        )
        return f"<table>{cells}</table>"

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def __iter__(self) -> Any:
        raise TypeError("a QuantizedArray is not iterable: call .dequantize() first, or index it")

    def __reduce__(self) -> Any:
        return QuantizedArray, (self.format, dict(self.planes), self.shape, self.dtype)

    def __copy__(self) -> QuantizedArray:
        return self._wrap(self.format, self.planes, self.shape, self.dtype, self._borrowed, self.lead)

    # ---- shorthands of free functions ----------------------------------------------------------------------------

    def dequantize(self, *, dtype: Any = None, out: Any = None) -> Any:
        """Shorthand of `kbitcupy.dequantize`."""
        from .ops import dequantize

        return dequantize(self, dtype=dtype, out=out)

    def to_bytes(self) -> bytes:
        """Shorthand of `kbitcupy.serial.to_bytes`: the array as bytes, for sockets, queues, caches and files."""
        from .serial import to_bytes

        return to_bytes(self)

    @classmethod
    def from_buffer(cls, buffer: Any) -> QuantizedArray:
        """Shorthand of `kbitcupy.serial.from_buffer`: the array of such bytes, without a copy."""
        from .serial import from_buffer

        return from_buffer(buffer)

    # ---- the same bits elsewhere, or part of them ----------------------------------------------------------------

    def to_device(self, device: str) -> QuantizedArray:
        """The array on ``"cpu"`` or ``"cuda:N"``; itself when it is there already."""
        device = _xp.resolve_device(device)
        if device == self.device:
            return self
        if isinstance(self.planes, RawPlanes):
            planes = self.planes.to_device(device)
        else:
            planes = {name: _xp.to_device(plane, device) for name, plane in self.planes.items()}
        return self._wrap(self.format, planes, self.shape, self.dtype, lead=self.lead)

    def get(self) -> QuantizedArray:
        """The array in host memory, as CuPy's ``get``."""
        return self.to_device("cpu")

    def copy(self) -> QuantizedArray:
        """A copy that shares no memory."""
        planes = {name: plane.copy() for name, plane in self.planes.items()}
        return self._wrap(self.format, planes, self.shape, self.dtype, lead=self.lead)

    def reshape(self, *shape: Any) -> QuantizedArray:
        """The same planes under another shape of equal size; one length may be -1.

        Raises
        ------
        ValueError
            When the sizes differ, or the format's planes depend on the shape and would change.
        """
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        try:
            # A view of one byte knows NumPy's rules and messages and allocates nothing.
            new = np.broadcast_to(np.uint8(0), self.size).reshape(wanted).shape if self.size else _empty(wanted)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot reshape a QuantizedArray of shape {self.shape} to {wanted}: {error}") from None
        lead = 0
        if self.lead:
            lead = check_lead(self.format, self.planes, new)
        else:
            self.format.check_shape(new)
        if not self.format.keeps_blocks(self.shape, new, self.lead, lead):
            raise FormatError(f"reshaping {self.shape} to {new} would cut blocks of {self.format}: dequantize first")
        return self._wrap(self.format, self.planes, new, self.dtype, self._borrowed, lead)

    def __getitem__(self, key: Any) -> QuantizedArray:
        """Rows along axis 0, still quantized: an integer, a slice, or an array of integers or booleans.

        Behind it may stand slices that take all of the other axes, ``q[2:5, :]``, and an ellipsis.

        Raises
        ------
        FormatError
            When a row is not made of whole blocks.
        IndexError, TypeError
            As NumPy does.
        """
        if not self.shape:
            raise IndexError("too many indices: a 0-d QuantizedArray cannot be indexed")
        key = _row_key(_first_of(key, self.shape) if isinstance(key, tuple) else key, len(self))
        if not self.format.rows_are_blocks(self.shape):
            raise FormatError(f"{self.format.why_not_blocks(self.shape)}: call .dequantize() and index the result")
        if isinstance(key, int):
            row = self._rows(slice(key, key + 1))
            shape = row.shape[1:]
            if row.lead:
                lead = check_lead(row.format, row.planes, shape)
                return self._wrap(row.format, row.planes, shape, row.dtype, row._borrowed, lead)
            return self._wrap(row.format.of_row(row.shape), row.planes, shape, row.dtype, row._borrowed)
        if isinstance(key, slice) or key.ndim == 1:
            return self._rows(key)
        rows, shape = self._rows(key.reshape(-1)), (*key.shape, *self.shape[1:])
        if not rows.lead and not rows.format.keeps_blocks(rows.shape, shape):
            raise FormatError(
                f"an index of shape {key.shape} gives shape {shape}, for which {self.format!r} shares scales in "
                "another way: index with a flat array, or dequantize first"
            )
        return rows.reshape(shape)

    def _rows(self, key: Any) -> QuantizedArray:
        """Rows by a slice or a flat array of numbers."""
        with _xp.on_device_of(next(iter(self.planes.values()))):
            # Steps other than 1 may leave views with gaps, or of the other direction: kernels know neither.
            selected = self.format.select(self.planes, self.shape, key, self.lead)
            planes = {name: _xp.contiguous(plane) for name, plane in selected.items()}
        count = len(range(*key.indices(len(self)))) if isinstance(key, slice) else key.size
        borrowed = self._borrowed
        if not isinstance(key, slice) or key.indices(len(self)) != (0, len(self), 1):
            borrowed = tuple(name for name, plane in planes.items() if plane is self.planes[name])
        return self._wrap(self.format, planes, (count, *self.shape[1:]), self.dtype, borrowed, self.lead)


class TransposedQuantizedArray(Compressed):
    """The lazy transpose of a 2-D `QuantizedArray`, from its ``.T``.

    Parameters
    ----------
    source : QuantizedArray
        The array whose axes are exchanged.

    Raises
    ------
    TransposeError
        When `source` is not 2-D: an AttributeError as well, so that ``hasattr(q, "T")`` is False.
    """

    __slots__ = ("T",)

    def __init__(self, source: QuantizedArray):
        if source.ndim != 2:
            raise TransposeError(f".T needs a 2-D QuantizedArray, this one has shape {source.shape}: reshape it")
        self.T = source

    @property
    def shape(self) -> tuple[int, int]:
        """Shape, axes exchanged."""
        return self.T.shape[1], self.T.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """dtype of the array that was compressed."""
        return self.T.dtype

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    def dequantize(self, *, dtype: Any = None) -> Any:
        """The decoded transpose, a view in Fortran order."""
        return self.T.dequantize(dtype=dtype).T

    def __repr__(self) -> str:
        return f"{self.T!r}.T"


def _multiply_into(out: Any, operands: tuple[Any, ...], matmul: Callable[..., Any]) -> Any:
    """`matmul` with an `out` that may overlap the operands, as NumPy's may."""
    if not _xp.is_array(out):
        return matmul(*operands, out=out)
    with _xp.on_device_of(out):
        out[...] = matmul(*operands, out=_xp.namespace(out).empty(out.shape, out.dtype))
    return out


def config_of(format: Format, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """The JSON description of an array that is compressed, or is going to be."""
    return {"version": CONFIG_VERSION, "format": format.config(), "shape": list(shape), "dtype": dtype.name}


def read_config(config: Mapping[str, Any]) -> tuple[Format, tuple[int, ...], np.dtype]:
    """Format, shape and dtype from the JSON description of an array; `config_of` is the inverse.

    Raises
    ------
    FormatError
        When the description is malformed or from a newer version.
    TypeError
        When the dtype is no float dtype.
    """
    try:
        version, shape, dtype = config["version"], config["shape"], config["dtype"]
        options = dict(config["format"])
        name = options.pop("name")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the configuration of a quantized array lacks {error}; got {config!r}") from error
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"version of the configuration is {version!r}; it must be a positive integer")
    if version > CONFIG_VERSION:
        raise FormatError(
            f"version of the configuration is {version}; this kbitcupy reads up to {CONFIG_VERSION}: upgrade it"
        )
    if version == 1:
        options.pop("members", None)  # of stacks: the lengths of the planes say it
    plain = not isinstance(name, str) or not set(name) & set(":[")  # its options stand beside it
    if not isinstance(dtype, str) or not plain or not all(isinstance(option, str) for option in options):
        raise FormatError(f"the configuration of a quantized array is malformed: {config!r}")
    return get_format(name, **options), _checked_shape(shape), _xp.float_dtype(dtype)


def check_lead(format: Format, planes: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """`Format.lead_of`, which must know one.

    Raises
    ------
    FormatError
        When the planes are those of no array, and no stack, of `shape`.
    """
    lead = format.lead_of(shape, {name: plane.shape for name, plane in planes.items()})
    if lead is not None:
        format.check_shape(shape[lead:])
        return lead
    format.check_shape(shape)
    specs = format.planes(shape)
    if set(planes) != set(specs):
        raise FormatError(f"{format} has the planes {', '.join(specs)}; got {', '.join(planes) or 'none'}")
    wrong = [name for name, spec in specs.items() if spec.shape != planes[name].shape]
    name = next((name for name in wrong if specs[name].scope == "tensor"), wrong[0])
    remedy = ""
    if specs[name].scope == "tensor":
        remedy = "; a stack keeps its members apart, along its first axes: take one by its index, or dequantize first"
    raise FormatError(
        f"plane {name!r} of {format} is {planes[name].dtype}{list(planes[name].shape)}; an array of shape {shape} "
        f"needs {specs[name].dtype}{list(specs[name].shape)}{remedy}"
    )


def check_planes(format: Format, planes: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """Check that `planes` are what `format` needs for an array, or a stack, of `shape`; how many of its lengths count
    members (see `Format.lead_of`).

    Raises
    ------
    FormatError, DeviceError
        See `QuantizedArray`.
    """
    if not isinstance(format, Format):
        raise FormatError(f"format is {type(format).__name__}; it must be a Format, see kbitcupy.get_format")
    for name, plane in planes.items():
        if not _xp.is_array(plane):
            raise FormatError(f"plane {name!r} is {type(plane).__name__}; it must be a NumPy or CuPy array")
    lead = check_lead(format, planes, shape)
    for name, spec in format.planes_of(shape, lead).items():
        plane = planes[name]
        if plane.dtype.name != spec.dtype:
            raise FormatError(
                f"plane {name!r} of {format} is {plane.dtype}{list(plane.shape)}; an array of shape {shape} needs "
                f"{spec.dtype}{list(spec.shape)}"
            )
        if not plane.flags.c_contiguous:
            raise FormatError(f"plane {name!r} of {format} is not contiguous; pass a copy of it")
    try:
        _xp.check_same_device(*planes.values())
    except DeviceError as error:
        raise DeviceError(f"planes of {format}: {error}") from None
    return lead


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        lengths = tuple(int(length) for length in shape)
        exact = all(length == given and length >= 0 for length, given in zip(lengths, shape, strict=True))
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise FormatError(f"shape is {shape!r}; it must be a sequence of non-negative integers")
    return lengths


def _first_of(key: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """What an index of several axes asks of the first one; the key itself where it asks for more."""
    dots = [place for place, each in enumerate(key) if each is Ellipsis]
    if len(dots) == 1 and len(key) <= len(shape) + 1:
        whole = (slice(None),) * (len(shape) + 1 - len(key))
        key = (*key[: dots[0]], *whole, *key[dots[0] + 1 :])
    if not 0 < len(key) <= len(shape):
        return key
    first, *others = key
    all_of = (
        isinstance(each, slice) and each.indices(n) == (0, n, 1) for each, n in zip(others, shape[1:], strict=False)
    )
    return first if all(all_of) else key


def _row_key(key: Any, length: int) -> Any:
    """An int in range, a slice, or an array of integers in range (host arrays only: devices are not read back)."""
    if isinstance(key, slice):
        return key
    if isinstance(key, np.ndarray) and key.ndim == 0:
        key = key[()]
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -length <= key < length:
            raise IndexError(f"index {key} is out of bounds for axis 0 with size {length}")
        return int(key) % length
    if isinstance(key, (tuple, type(None), type(Ellipsis), float, str)):
        raise TypeError(
            f"a QuantizedArray takes one index, along axis 0, got {key!r}: dequantize for the others, or take all of "
            "them, q[rows, :]"
        )
    array = key if _xp.is_array(key) else np.asarray(key)
    if array.dtype.kind == "b":
        if array.shape != (length,):
            raise IndexError(f"a boolean index must have shape ({length},), got {array.shape}")
        return array.nonzero()[0]
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"a QuantizedArray is indexed by integers or booleans, got {array.dtype}")
    if not _xp.is_cupy(array) and array.size and not (-length <= array.min() and array.max() < length):
        raise IndexError(f"an index is out of bounds for axis 0 with size {length}")
    return array


def _empty(shape: Any) -> tuple[int, ...]:
    return np.empty(0, np.uint8).reshape(shape).shape


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# ---- what Dask is told -----------------------------------------------------------------------------------------------


def weight(q: QuantizedArray) -> int:
    """Bytes of the planes. A worker of Dask asks for them before it keeps a result, and then it has imported what it is
    made of, which may have been after this module: the program that starts a cluster is imported first of all.
    """
    _tell_dask_cuda()
    return q.nbytes


def _tell_dask_cuda() -> None:
    """Where it is loaded, it moves arrays from a GPU that is full to the host. While it is being loaded it has no such
    function yet: importing it first imports Dask, which imports this package where that is installed.
    """
    told = getattr(sys.modules.get("dask_cuda.is_device_object"), "is_device_object", None)
    if told is not None:
        told.register(QuantizedArray, _is_on_gpu)


def _is_on_gpu(q: QuantizedArray) -> bool:
    return q.device != "cpu"


# Of an installed package Dask learns by an entry point, too.
if "dask.sizeof" in sys.modules:
    sys.modules["dask.sizeof"].sizeof.register(QuantizedArray, weight)
_tell_dask_cuda()
