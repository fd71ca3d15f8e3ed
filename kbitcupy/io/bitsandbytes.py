"""bitsandbytes' checkpoints and functions, without PyTorch.

What its files hold is written down in `kbitcupy.io.layouts.bitsandbytes`. Functions have its names and arguments; their
codes are those of its CUDA kernels, with the exceptions that `kbitcupy.formats.codebook.table4` lists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .. import tables
from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import DeviceError, FormatError
from ..formats.base import Format, get_format
from ..formats.codebook.search import NESTED_BLOCK
from ..ops import dequantize, quantize
from .checkpoint import Checkpoint, save_as
from .layouts.bitsandbytes import MAP_TOLERANCE, QUANT_MAPS, QUANT_TYPES, STORAGES, BitsandbytesLayout

# ---- public: files -------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of bitsandbytes; its tensors are read when they are asked for.

    Parameters
    ----------
    path : path_like
        As for `kbitcupy.io.load`: a safetensors file, a directory, or the index of shards.

    Returns
    -------
    Checkpoint
        What `kbitcupy.io.load` returns: a `QuantizedArray` for each quantized weight (``nf4``, ``fp4``; ``int8`` with
        ``granularity=("channel", 0)`` for LLM.int8, as float16, with SCB / 127 as scale), an array for every other
        tensor. A table or dynamic map that is a last bit off is read as bitsandbytes' own.

    Raises
    ------
    FileError
        When a file is missing or not a safetensors file, or when the keys of a weight do not fit together: packed data
        or absmax of another length, an unknown quant_type, another table, JSON that lies about the shape. The message
        names the key.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> from kbitcupy.io import bitsandbytes
    >>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bitsandbytes.save(f"{folder}/a.safetensors", {"up.weight": kb.quantize(x, "nf4", double_quant=True)})
    ...     q = bitsandbytes.load(f"{folder}/a.safetensors")["up.weight"].copy()
    >>> q
    QuantizedArray(nf4:double_quant=true, shape=(64, 64), dtype=float16, device=cpu, 4.14 bits/element)
    """
    return Checkpoint(path)


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    quant_storage: str | Mapping[str, str] = "uint8",
) -> None:
    """Write arrays and compressed arrays as a checkpoint that bitsandbytes loads.

    Parameters
    ----------
    path, metadata, force, max_shard_size
        As for `kbitcupy.io.save`. Beside compressed arrays the metadata key ``format`` is ``"pt"`` if it is not given.
    tensors : mapping of str to array_like or QuantizedArray
        Compressed arrays must be ``nf4`` or ``fp4`` in blocks of 32 to 4096, or ``int8`` with
        ``granularity=("channel", 0)`` under a name that ends in ``weight``. Every key gets the bytes that bitsandbytes
        writes for these planes; only of SCB, which is 127 times the scale, the last bit may differ from what `load`
        has read. A float64 array is described as float32.
    quant_storage : str or mapping of str to str, default "uint8"
        dtype under which the bytes of 4-bit weights are stored: ``"uint8"``, ``"float16"``, ``"bfloat16"`` or
        ``"float32"`` for all or by name, such as the `Checkpoint.quant_storage` of what was loaded.

    Raises
    ------
    FileError
        As `kbitcupy.io.save`, and when a compressed array is in a format that bitsandbytes does not have.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.bitsandbytes.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.ones((8, 8)), "fp4")})
    ...     for name, array in kb.io.load(f"{folder}/a.safetensors", raw=True).items():
    ...         print(name, array.dtype, array.shape)
    w.absmax float32 (1,)
    w.quant_map float32 (16,)
    w uint8 (32, 1)
    w.quant_state.bitsandbytes__fp4 uint8 (75,)
    """
    save_as(BitsandbytesLayout(quant_storage), path, tensors, metadata, force=force, max_shard_size=max_shard_size)


# ---- public: functions ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class QuantState:
    """What bitsandbytes keeps beside the codes of an array.

    The functions below take bitsandbytes' own QuantState as well. Where they return one beside torch tensors, its
    arrays are tensors.

    Parameters
    ----------
    absmax : array
        float32[blocks], or uint8[blocks] when it is quantized itself.
    shape : tuple of int, optional
        Shape of the array; None for 8-bit codes, which have it themselves.
    code : array, optional
        float32[16] or float32[256], the table, in host memory.
    blocksize : int
        Elements that share an absmax.
    quant_type : {"nf4", "fp4"}, optional
        None for 8-bit codes.
    dtype : dtype
        dtype of the array.
    offset : array, optional
        float32, what was subtracted from absmax before it was quantized.
    state2 : QuantState, optional
        State of the quantized absmax.
    """

    absmax: Any
    shape: tuple[int, ...] | None = None
    code: Any = None
    blocksize: int = 64
    quant_type: str | None = None
    dtype: Any = None
    offset: Any = None
    state2: QuantState | None = None

    @property
    def nested(self) -> bool:
        """Whether absmax is quantized itself."""
        return self.state2 is not None


def quantize_4bit(
    A: Any,
    absmax: Any = None,
    out: Any = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: str = "uint8",
) -> tuple[Any, QuantState]:
    """Quantize an array to 4 bits, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        float16, bfloat16, float32 or float64, flattened in C order.
    absmax, out : array, optional
        Receive a copy of the state's absmax and of the codes.
    blocksize : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096 (bitsandbytes itself begins with 32).
    compress_statistics : bool, default False
        Quantize absmax itself.
    quant_type : {"fp4", "nf4"}, default "fp4"
        The table.
    quant_storage : str, default "uint8"
        dtype under which the bytes of the codes are returned: ``"uint8"``, ``"float16"``, ``"bfloat16"`` or
        ``"float32"``.

    Returns
    -------
    codes : array
        ``quant_storage`` [(n + 1) // 2 / itemsize, 1], on the device of `A`.
    state : QuantState

    Raises
    ------
    FormatError
        When an argument is not allowed, or the codes are no whole number of `quant_storage`.
    TypeError
        When `A` is not a float array.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> packed, state = bitsandbytes.quantize_4bit(np.linspace(-1, 1, 128, dtype=np.float32), quant_type="nf4")
    >>> packed.shape, state.absmax
    ((64, 1), array([1., 1.], dtype=float32))
    """
    if _xp.is_tensor(A):
        options: dict[str, Any] = {"blocksize": blocksize, "compress_statistics": compress_statistics}
        options |= {"quant_type": quant_type, "quant_storage": quant_storage}
        return _in_torch(quantize_4bit, A, absmax, out, options)
    format = _four_bit_format(quant_type, 64 if blocksize is None else blocksize, compress_statistics)
    if quant_storage not in STORAGES:
        raise FormatError(f"quant_storage is {quant_storage!r}; allowed is {' or '.join(STORAGES)}")
    q = quantize(A, format)
    planes = q.planes
    packed = planes["packed"]
    storage = _xp.named_dtype(quant_storage)
    if packed.size % storage.itemsize:
        raise FormatError(f"the codes are {packed.size} bytes, no whole number of {quant_storage}: use 'uint8'")
    state = QuantState(
        _copied(planes["absmax"], absmax, "absmax"),
        shape=q.shape,
        code=QUANT_MAPS[quant_type],
        blocksize=format.block,
        quant_type=quant_type,
        dtype=q.dtype,
    )
    if compress_statistics:
        state.offset = planes["nested_offset"].reshape(())
        state.state2 = _blockwise_state(planes["nested_absmax"], NESTED_BLOCK, np.dtype(np.float32))
    return _copied(packed.view(storage).reshape(-1, 1), out, "out"), state


def dequantize_4bit(
    A: Any,
    quant_state: QuantState | None = None,
    absmax: Any = None,
    out: Any = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> Any:
    """Decode what `quantize_4bit` returned, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        The codes, under any dtype that `quantize_4bit` returns them in.
    quant_state : QuantState, optional
        Their state, of this module's or bitsandbytes' own class. Without it `absmax` and `out` are needed, and
        `blocksize` and `quant_type` say what `A` is.
    absmax : array, optional
        float32[blocks]; ignored beside `quant_state`.
    out : array, optional
        Receives the result.
    blocksize : int, default 64
        Ignored beside `quant_state`.
    quant_type : {"fp4", "nf4"}, default "fp4"
        Ignored beside `quant_state`.

    Returns
    -------
    array
        Shape and dtype of the state, or `out`.

    Raises
    ------
    FormatError
        When `A` or absmax has not the length that the shape needs.
    TypeError, DeviceError
        When an array is of the wrong type or on another device.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> x = np.linspace(-1, 1, 128, dtype=np.float16).reshape(2, 64)
    >>> y = bitsandbytes.dequantize_4bit(*bitsandbytes.quantize_4bit(x, quant_type="nf4"))
    >>> y.shape, y.dtype, float(abs(x - y).max()) < 0.16
    ((2, 64), dtype('float16'), True)
    """
    if _xp.is_tensor(A):
        options = {"blocksize": blocksize, "quant_type": quant_type}
        return _xp.in_torch(dequantize_4bit, "A", A, quant_state, absmax, out=out, **options)
    if quant_state is None:
        if absmax is None or out is None:
            raise FormatError("without quant_state both absmax and out are needed")
        quant_state = QuantState(
            absmax, shape=out.shape, blocksize=64 if blocksize is None else blocksize, quant_type=quant_type,
            dtype=out.dtype,
        )  # fmt: skip
    state = _checked_state(quant_state)
    if state.shape is None:
        raise FormatError("quant_state has no shape: it belongs to 8-bit codes, see dequantize_blockwise")
    format = _four_bit_format(state.quant_type, state.blocksize, state.nested)
    codes = _xp.contiguous(_xp.as_array(A, "A"))
    if codes.dtype.name not in STORAGES:
        raise TypeError(f"A is {codes.dtype}; codes are stored as {', '.join(STORAGES)}")
    planes = {
        "packed": codes.reshape(-1).view(np.uint8),
        "absmax": _xp.contiguous(_xp.as_array(state.absmax, "absmax")),
    }
    if state.state2 is not None:
        if state.state2.blocksize != NESTED_BLOCK:
            raise FormatError(f"state2.blocksize is {state.state2.blocksize}; it must be {NESTED_BLOCK}")
        planes["nested_absmax"] = _xp.contiguous(_xp.as_array(state.state2.absmax, "state2.absmax"))
        planes["nested_offset"] = _xp.as_array(state.offset, "offset").reshape(1)
    return dequantize(QuantizedArray(format, planes, state.shape, state.dtype), out=out)


def quantize_blockwise(
    A: Any, code: Any = None, absmax: Any = None, out: Any = None, blocksize: int = 4096, nested: bool = False
) -> tuple[Any, QuantState]:
    """Quantize an array to 8 bits by the dynamic map, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        float16, bfloat16, float32 or float64.
    code : array, optional
        The dynamic map, float32[256] in host memory: the only table there is.
    absmax, out : array, optional
        Receive a copy of the state's absmax and of the codes.
    blocksize : int, default 4096
        Elements that share an absmax: a power of two from 16 to 4096 (bitsandbytes itself begins with 64).
    nested : bool, default False
        Quantize absmax itself.

    Returns
    -------
    codes : array
        uint8, of the shape of `A`.
    state : QuantState

    Raises
    ------
    FormatError
        When an argument is not allowed.
    TypeError
        When `A` is not a float array.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> codes, state = bitsandbytes.quantize_blockwise(np.array([[0.5, -1.0, 0.0, 1.0]], np.float32))
    >>> codes
    array([[219,   0, 127, 255]], dtype=uint8)
    """
    if _xp.is_tensor(A):
        return _in_torch(quantize_blockwise, A, absmax, out, {"code": code, "blocksize": blocksize, "nested": nested})
    _check_code(code)
    q = quantize(A, get_format("dynamic8", block=blocksize))
    maxima = q.planes["absmax"]
    if nested:
        with _xp.on_device_of(maxima):
            offset = maxima.mean(dtype=np.float64).astype(np.float32)
            inner = quantize(maxima - offset, q.format)
        maxima = inner.planes["codes"]
    state = _blockwise_state(_copied(maxima, absmax, "absmax"), q.format.block, q.dtype)
    if nested:
        state.offset = offset
        state.state2 = _blockwise_state(inner.planes["absmax"], q.format.block, np.dtype(np.float32))
    return _copied(q.planes["codes"].reshape(q.shape), out, "out"), state


def dequantize_blockwise(
    A: Any,
    quant_state: QuantState | None = None,
    absmax: Any = None,
    code: Any = None,
    out: Any = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> Any:
    """Decode what `quantize_blockwise` returned, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        uint8 codes.
    quant_state : QuantState, optional
        Their state, of this module's or bitsandbytes' own class. Without it `absmax` is needed, and the result is
        float32 or what `out` is.
    absmax : array, optional
        float32[blocks]; ignored beside `quant_state`.
    code : array, optional
        The dynamic map, float32[256] in host memory: the only table there is.
    out : array, optional
        Receives the result.
    blocksize : int, default 4096
        Ignored beside `quant_state`.
    nested : bool, default False
        Has no effect, as in bitsandbytes: the state knows.

    Returns
    -------
    array
        The shape of `A`; dtype of the state, or `out`.

    Raises
    ------
    FormatError
        When absmax has not the length that the codes need.
    TypeError, DeviceError
        When an array is of the wrong type or on another device.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> bitsandbytes.dequantize_blockwise(np.array([219, 0, 127, 255], np.uint8), absmax=np.array([2.0], np.float32))
    array([ 1.0015625, -1.9859375,  0.       ,  2.       ], dtype=float32)
    """
    if _xp.is_tensor(A):
        arguments = quant_state, absmax, code
        options = {"blocksize": blocksize, "nested": nested}
        return _xp.in_torch(dequantize_blockwise, "A", A, *arguments, out=out, **options)
    if quant_state is None:
        if absmax is None:
            raise FormatError("without quant_state absmax is needed")
        quant_state = _blockwise_state(absmax, blocksize, np.dtype(np.float32) if out is None else out.dtype)
        quant_state.code = code
    state = _checked_state(quant_state)
    _check_code(state.code)
    codes = _xp.contiguous(_xp.as_array(A, "A"))
    maxima = _xp.contiguous(_xp.as_array(state.absmax, "absmax"))
    if state.state2 is not None:
        with _xp.on_device_of(maxima):
            maxima = dequantize_blockwise(maxima, state.state2) + _xp.as_array(state.offset, "offset")
    planes = {"codes": codes.reshape(-1), "absmax": maxima}
    format = get_format("dynamic8", block=state.blocksize)
    return dequantize(QuantizedArray(format, planes, codes.shape, state.dtype), out=out)


def _four_bit_format(quant_type: Any, block: Any, nested: bool) -> Format:
    if quant_type not in QUANT_TYPES:
        raise FormatError(f"quant_type is {quant_type!r}; allowed is {' or '.join(QUANT_TYPES)}")
    return get_format(quant_type, block=block, double_quant=bool(nested))


def _blockwise_state(absmax: Any, blocksize: int, dtype: np.dtype) -> QuantState:
    return QuantState(absmax, code=tables.dynamic_map(), blocksize=blocksize, dtype=dtype)


def _checked_state(state: Any, argument: str = "quant_state") -> QuantState:
    """A state of this module's class, from one of any class with the same attributes, such as bitsandbytes' own."""
    missing = [field.name for field in fields(QuantState) if not hasattr(state, field.name)]
    if missing:
        raise TypeError(
            f"{argument} is {type(state).__name__} and has no {missing[0]}; it must be a QuantState, as these "
            "functions or bitsandbytes' return"
        )
    made = QuantState(**{field.name: getattr(state, field.name) for field in fields(QuantState)})
    if made.shape is not None:
        made.shape = tuple(made.shape)
    if made.state2 is not None:
        if argument != "quant_state":
            raise FormatError(f"{argument} has a state2 of its own; what is quantized twice has none")
        if made.offset is None:
            raise FormatError("quant_state has a state2 but no offset")
        made.state2 = _checked_state(made.state2, "state2")
    return made


def _check_code(code: Any) -> None:
    if code is None or code is tables.dynamic_map():
        return
    if _xp.is_tensor(code):  # bitsandbytes' own states hold it on the device of the codes
        code = _xp.to_device(_xp.as_array(code, "code"), "cpu")
    table = None if _xp.is_cupy(code) else np.asarray(code)
    if table is None or table.shape != (256,) or not np.allclose(table, tables.dynamic_map(), MAP_TOLERANCE, 0):
        raise FormatError("code must be bitsandbytes' dynamic map in host memory: leave it away")


def _in_torch(function: Any, A: Any, absmax: Any, out: Any, options: dict[str, Any]) -> tuple[Any, QuantState]:
    """The tensors that `function` makes of the tensor `A`."""
    given = [_xp.as_array(x, name) if _xp.is_tensor(x) else x for x, name in ((absmax, "absmax"), (out, "out"))]
    codes, state = function(_xp.as_array(A, "A"), absmax=given[0], out=given[1], **options)
    state = _state_of_tensors(state)
    if absmax is not None:
        state.absmax = absmax
    return _xp.as_tensor(codes) if out is None else out, state


def _state_of_tensors(state: QuantState) -> QuantState:
    names = [name for name in ("absmax", "code", "offset") if getattr(state, name) is not None]
    inner = None if state.state2 is None else _state_of_tensors(state.state2)
    return replace(state, **{name: _xp.as_tensor(getattr(state, name)) for name in names}, state2=inner)


def _copied(result: Any, given: Any, argument: str) -> Any:
    """`result`, or the array of the caller with a copy of it."""
    if given is None:
        return result
    if not _xp.is_array(given) or given.dtype != result.dtype or given.shape != result.shape:
        got = f"{given.dtype}{list(given.shape)}" if _xp.is_array(given) else type(given).__name__
        raise FormatError(f"{argument} is {got}; it must be an array {result.dtype}{list(result.shape)}")
    if not _xp.same_device(given, result):
        raise DeviceError(f"{argument} is on {_xp.device_of(given)}; the result is on {_xp.device_of(result)}")
    with _xp.on_device_of(given):
        given[...] = result
    return given
