"""quantize, dequantize, take, stack, concatenate."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .array import Compressed, QuantizedArray, check_lead
from .backend import xp as _xp
from .errors import DeviceError, FormatError
from .formats import affine, threads
from .formats.base import Choice, Format, list_formats, resolve


def quantize(
    x: Any,
    /,
    format: str | Format | Choice | None = None,
    *,
    scale: Any = None,
    zero_point: Any = None,
    offset: Any = None,
    codebook: Any = None,
    importance: Any = None,
    out: QuantizedArray | None = None,
    check_finite: bool = False,
    workers: int | None = None,
    **options: Any,
) -> QuantizedArray:
    """Compress an array.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 array of any shape and memory layout: NumPy, CuPy, or anything with
        ``__dlpack__`` or ``__cuda_array_interface__``. float64 is rounded to float32 first.
    format : str, Format or tuple of one of them and a dict
        Name of a registered format (see `list_formats`), with options of its own where it has some
        (``"int4:block=32"``), or a Format (see `get_format`); with a dict beside it also more of the arguments below,
        as lists of formats have them: ``("kbit4", {"codebook": values})``.
    scale, zero_point, offset : number or array, optional
        Of affine formats: scales to use instead of finding them, one number or one for each block, and their zero
        points (for ``zero="int"``) or offsets (for ``zero="float"``), 0 by default. Host values are checked, those on
        a device are not looked at. Of ``nvfp4`` `scale` is one number, the scale of the whole array.
    codebook : str or array_like, optional
        Of ``kbit1`` to ``kbit8`` and ``table4``: the option of that name, or the 2^k values themselves, in any order.
        They are stored with the array, and its format has ``codebook="custom"``.
    importance : array_like, optional
        Of formats that weigh errors: how much those of a column count, as a rule the mean square of the activations
        that it meets. From 0 to 2^64, of shape [K] for `x` of [..., K]; for stacks of matrices, such as experts of
        [E, N, K], also one row for each: [E, K]. Taken to float32 and to the device of `x`; host values are checked,
        those on a device are not looked at.
    out : QuantizedArray, optional
        An earlier result of the same format, shape and device, whose planes are overwritten.
    check_finite : bool, default False
        Refuse NaN and infinities, for which most formats store some number (each says which). On a GPU this
        synchronises, and cannot be captured in a graph.
    workers : int, optional
        Threads that share the rows of a NumPy array, this one included, 1 by default; the bits are the same. One does
        all the work where rows cannot be told apart: with a percentile, `scale`, `zero_point` or `offset`, where rows
        are not whole blocks, and where an array is small for it (131072 elements each).
    **options
        The format's own options, when `format` is a name.

    Returns
    -------
    QuantizedArray
        On the device of `x`; `out` itself where it is given and has x's dtype. On CuPy the call does not synchronise
        and uses the current stream.

    Raises
    ------
    TypeError
        When `x` is not a float array, or has a mask, or `format` is missing.
    FormatError
        When the format or an option is not known, or `out` does not fit.
    ValueError
        When `check_finite` is true and `x` holds NaN or infinities; when `workers` is below 1, or above it on a GPU.
    DeviceError
        When `out` is on another device.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float16)
    >>> q = kb.quantize(x, "kbit3", codebook="nf")
    >>> q.nbytes, x.nbytes
    (6660, 32768)
    >>> round(kb.metrics.sqnr_db(x, kb.dequantize(q)), 1)
    15.1
    """
    array = _xp.as_array(x)
    dtype = _xp.float_dtype(array.dtype, "x")
    shape = array.shape
    if format is None:
        raise TypeError(_no_format({**({} if codebook is None else {"codebook": codebook}), **options}))
    given: Mapping[str, Any] | None = None
    if isinstance(codebook, str):  # the name of one: an option
        options["codebook"], codebook = codebook, None
    if not (scale is zero_point is offset is codebook is importance is None):
        brought = {"scale": scale, "zero_point": zero_point, "offset": offset}
        brought |= {"codebook": codebook, "importance": importance}
        format, given = resolve(format, brought, **options)
    elif options:
        format, given = resolve(format, **options)
    elif not isinstance(format, Format):
        format, given = resolve(format)
    if not format.can_encode:
        raise FormatError(f"{format} can be decoded but not made: quantize to another format, see list_formats()")
    if out is not None:
        _check_quantized_out(out, format, array)
    array = source(array, format.dtypes)
    encode = format.encode  # one call less than `threads.encode` makes, which counts on a GPU
    if workers is not None and (many := threads.check_workers(workers, array)) > 1:
        encode = functools.partial(threads.encode, format, workers=many)
    if check_finite:
        _check_finite(array, dtype)
    with _xp.on_device_of(array):
        if out is not None:
            encode(array, out.planes, given, out.lead)
            return out if out.dtype == dtype else QuantizedArray._wrap(format, out.planes, shape, dtype, lead=out.lead)
        planes = _xp.empty_arrays(array, *_allocation(format, shape))
        encode(array, planes, given, 0)
    return QuantizedArray._wrap(format, planes, shape, dtype)


def dequantize(q: QuantizedArray, /, *, dtype: Any = None, out: Any = None) -> Any:
    """Decompress an array.

    Parameters
    ----------
    q : QuantizedArray
        The array to decompress.
    dtype : dtype_like, optional
        float16, bfloat16, float32 or float64; by default the dtype that was compressed, or that of `out`.
    out : array, optional
        C-contiguous array of q's shape on q's device, which receives the result.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Shape of `q`; `out` itself where it is given. On CuPy the call does not synchronise.

    Raises
    ------
    TypeError
        When `q` or `out` is of the wrong type or dtype.
    ValueError
        When `out` has the wrong shape or order, or is read-only.
    DeviceError
        When `out` is on another device.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.arange(6, dtype=np.float32).reshape(2, 3), "kbit8")
    >>> kb.dequantize(q, dtype="float16").dtype
    dtype('float16')
    """
    if not isinstance(q, QuantizedArray):
        raise _not_quantized(q)
    first = next(iter(q.planes.values()))
    with _xp.on_device_of(first):
        if out is None:
            out = _xp.namespace(first).empty(q.shape, q.dtype if dtype is None else _xp.float_dtype(dtype))
        else:
            check_out(out, q.shape, first, dtype)
        decode(q.format, q.planes, out, q.lead)
    return out


def to_torch(q: Any, /, *, dtype: Any = None) -> Any:
    """Decompress an array into a torch tensor; or give a plain array to torch.

    Parameters
    ----------
    q : QuantizedArray or array
        The array to decompress, or a NumPy or CuPy array, such as a bfloat16 one that `kbitcupy.io.load` returned.
    dtype : dtype_like or torch.dtype, optional
        float16, bfloat16, float32 or float64; by default the dtype that was compressed, or that of the plain array.

    Returns
    -------
    torch.Tensor
        Shape of `q`, on its device, in memory of torch's own allocator; the values are decoded into it without a copy.
        On a GPU the call does not synchronise: CuPy's current stream decodes, and torch's current stream waits for it.
        A plain array shares its memory with the tensor, unless it is read-only, as those from a file are, or `dtype`
        is another one.

    Raises
    ------
    TypeError
        When `q` or `dtype` is of the wrong type.
    MissingExtraError
        When torch is not installed.
    DeviceError
        When `q` is on a GPU and torch was built without CUDA.

    Notes
    -----
    The other way needs no function: `quantize` takes a torch tensor as it is, and functions that return arrays, such as
    `linear`, return tensors where their first argument is one. Outside of this function kbitcupy never imports torch.

    Examples
    --------
    >>> import torch, kbitcupy as kb  # doctest: +SKIP
    >>> q = kb.quantize(torch.randn(64, 64, dtype=torch.bfloat16), "kbit4")  # doctest: +SKIP
    >>> kb.to_torch(q).dtype  # doctest: +SKIP
    torch.bfloat16
    """
    if _xp.is_array(q):
        _xp.import_torch()
        with _xp.on_device_of(q), np.errstate(over="ignore"):
            return _xp.as_tensor(q if dtype is None else q.astype(_xp.float_dtype(dtype), copy=False))
    if not isinstance(q, QuantizedArray):
        raise _not_quantized(q, " or a plain array")
    first = next(iter(q.planes.values()))
    with _xp.on_device_of(first):
        tensor, out = _xp.empty_tensor(q.shape, q.dtype if dtype is None else _xp.float_dtype(dtype), first)
        decode(q.format, q.planes, out, q.lead)
        del out  # the tensor is torch's again, in the order of its stream
    return tensor


# Of row numbers, as kernels take them. (To ask a dtype for its name takes a microsecond.)
_IDS = frozenset((np.dtype(np.int32), np.dtype(np.int64)))


def take(q: QuantizedArray, ids: Any, /, *, dtype: Any = None, out: Any = None) -> Any:
    """Decode some rows of a compressed array (an embedding lookup).

    Parameters
    ----------
    q : QuantizedArray
        Its rows along axis 0 must be whole blocks of the format.
    ids : array_like of int
        Row numbers, of any shape. On CuPy the values are not checked: they wrap as CuPy's own indexing does.
    dtype, out
        As for `dequantize`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Shape ``ids.shape + q.shape[1:]``.

    Raises
    ------
    FormatError
        When rows are not whole blocks.
    IndexError
        When a host index is out of range.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> table = kb.quantize(np.eye(64, dtype=np.float32), "kbit4")
    >>> kb.take(table, [3, 3, 5]).shape
    (3, 64)
    """
    if not isinstance(q, QuantizedArray):
        raise _not_quantized(q)
    ids = _xp.as_array(ids, "ids")
    if not ids.size and ids.dtype.kind == "f":  # an empty list
        ids = ids.astype(np.int64)
    first = next(iter(q.planes.values()))
    if ids.dtype.kind not in "iu" or not q.format.rows_are_blocks(q.shape):
        return dequantize(q[ids], dtype=dtype, out=out)
    shape = (*ids.shape, *q.shape[1:])
    with _xp.on_device_of(first):
        xp = _xp.namespace(first)
        if isinstance(ids, np.ndarray):
            if ids.size and not (-len(q) <= ids.min() and ids.max() < len(q)):
                raise IndexError(f"an index is out of bounds for axis 0 with size {len(q)}")
            ids = xp.asarray(ids)
        elif xp is np:
            raise DeviceError(f"ids is on {_xp.device_of(ids)} and q on cpu; move one with .get() or .to_device()")
        if out is None:
            out = xp.empty(shape, q.dtype if dtype is None else _xp.float_dtype(dtype))
        else:
            check_out(out, shape, first, dtype)
        if out.size:
            ids = _xp.contiguous(ids if ids.dtype in _IDS else ids.astype(np.int64))
            written = out if out.dtype in _xp.dtype_set(q.format.dtypes) else xp.empty(shape, np.float32)
            if not (q.size and q.format.decode_rows(q.planes, q.shape, ids, written, q.lead, q._launches)):
                rows = q[ids.reshape(-1)]
                decode(rows.format, rows.planes, written.reshape(rows.shape), rows.lead)
            if written is not out:
                widen(written, out)
    return out


def _not_quantized(q: Any, also: str = "") -> TypeError:
    remedy = ": pass q, not q.T, or call q.T.dequantize()" if isinstance(q, Compressed) else ", as quantize returns"
    return TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray{also}{remedy}")


def stack(qs: Sequence[QuantizedArray], /) -> QuantizedArray:
    """Compressed arrays of one shape as one array with a new first axis, such as the experts of a layer.

    Parameters
    ----------
    qs : sequence of QuantizedArray
        Of one format, shape, dtype and device; their sizes are whole blocks of the format.

    Returns
    -------
    QuantizedArray
        Shape ``(len(qs), *shape)``; ``stack(qs)[i]`` has the bytes of ``qs[i]``. Every member keeps its own tensor
        scale, scales of channels and whatever else belongs to a whole array: see `QuantizedArray.members`.

    Raises
    ------
    TypeError
        When `qs` is not a sequence of QuantizedArrays.
    FormatError
        When they differ, or are not whole blocks, or differ in a plane that they would have to share, such as a
        codebook. Such planes are compared by value, for which arrays on a GPU are read back.
    DeviceError
        When they are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> experts = kb.stack([kb.quantize(np.full((4, 32), 10.0**i, np.float32), "kbit4") for i in range(3)])
    >>> experts.shape, experts[1].shape, experts.members
    ((3, 4, 32), (4, 32), 3)
    """
    first = _check_members(qs)
    for number, q in enumerate(qs):
        if q.shape != first.shape:
            raise FormatError(f"qs[{number}] has shape {q.shape} and qs[0] {first.shape}; they must be equal")
    ndim = first.ndim - max(q.lead for q in qs)
    return _join(qs, first.format.counted_from_end(ndim), (len(qs), *first.shape), 1)


def concatenate(qs: Sequence[QuantizedArray], /) -> QuantizedArray:
    """Compressed arrays one behind the other along axis 0.

    Parameters
    ----------
    qs : sequence of QuantizedArray
        Of one format, dtype and device, and of one shape but for the first length; their rows are whole blocks.

    Returns
    -------
    QuantizedArray
        Slices of it have the bytes of its parts.

    Raises
    ------
    TypeError
        When `qs` is not a sequence of QuantizedArrays.
    FormatError
        When they do not fit together, or differ in a plane that they would have to share, such as the tensor scale.
        Such planes are compared by value, for which arrays on a GPU are read back.
    DeviceError
        When they are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    >>> q = kb.quantize(x, "kbit4")
    >>> bool((kb.concatenate([q[:2], q[2:]]).dequantize() == q.dequantize()).all())
    True
    """
    first = _check_members(qs)
    for number, q in enumerate(qs):
        if q.shape[1:] != first.shape[1:] or not q.shape:
            raise FormatError(
                f"qs[{number}] has shape {q.shape} and qs[0] {first.shape}; they must agree but for axis 0"
            )
    return _join(qs, first.format, (sum(map(len, qs)), *first.shape[1:]), 0)


def _check_members(qs: Any) -> QuantizedArray:
    if not isinstance(qs, (list, tuple)) or not qs or not all(isinstance(q, QuantizedArray) for q in qs):
        raise TypeError("qs must be a list or tuple of one or more QuantizedArrays")
    first: QuantizedArray = qs[0]
    for number, q in enumerate(qs):
        if q.format != first.format or q.dtype != first.dtype:
            raise FormatError(
                f"qs[{number}] is {q.format!r} of {q.dtype} and qs[0] {first.format!r} of {first.dtype}; they must be "
                "equal: quantize them alike"
            )
        if q.device != first.device:
            raise DeviceError(f"qs[{number}] is on {q.device} and qs[0] on {first.device}; move one with .to_device()")
    return first


def _join(qs: Sequence[QuantizedArray], format: Format, shape: tuple[int, ...], axes: int) -> QuantizedArray:
    """The planes of `qs` behind each other, under so many new axes."""
    first = qs[0]
    if not format.rows_are_blocks(shape):
        raise FormatError(f"{format.why_not_blocks(shape)}: dequantize first")
    inner = max(q.lead for q in qs)
    for number, q in enumerate(qs):
        if any(spec.shape != q.planes[name].shape for name, spec in q.format.planes_of(q.shape, inner).items()):
            raise FormatError(
                f"qs[{number}] has planes of {q.members} array{'s' * (q.members != 1)}, others of one for each member "
                "of a stack: stack the members of all alike"
            )
    specs = format.planes(shape[inner + axes :])
    lead = inner + axes
    if not lead:
        _check_cuts(format, shape, [len(q) for q in qs])
    xp = _xp.namespace(next(iter(first.planes.values())))
    planes = {}
    with _xp.on_device_of(next(iter(first.planes.values()))):
        for name, spec in specs.items():
            members = [q.planes[name] for q in qs]
            if not (spec.scope == "constant" or (spec.scope == "tensor" and not lead)):
                planes[name] = xp.concatenate(members)
            elif all(member is members[0] or bool((member == members[0]).all()) for member in members[1:]):
                planes[name] = members[0].copy()
            else:
                raise FormatError(
                    f"the arrays differ in their plane {name!r}, which all rows would share in {format!r} of shape "
                    f"{shape}: quantize them as one array, or dequantize first"
                )
    lead = check_lead(format, planes, shape)
    return QuantizedArray._wrap(format, planes, shape, first.dtype, lead=lead)


def _check_cuts(format: Format, shape: tuple[int, ...], rows: Sequence[int]) -> None:
    """Check that an array of `shape` can be cut into parts of so many rows."""
    # Planes of one repeated byte are enough to ask.
    hollow = {name: np.broadcast_to(np.uint8(0), spec.shape) for name, spec in format.planes(shape).items()}
    start = 0
    for count in rows:
        format.select(hollow, shape, slice(start, start + count))
        start += count


def decode(format: Format, planes: Mapping[str, Any], out: Any, lead: int = 0) -> None:
    """`Format.decode` to any float dtype: what the format does not write itself goes through float32."""
    if out.dtype in _xp.dtype_set(format.dtypes):
        format.decode(planes, out, lead)
    else:
        single = _xp.namespace(out).empty(out.shape, np.float32)
        format.decode(planes, single, lead)
        widen(single, out)


def widen(single: Any, out: Any) -> None:
    """Fill a C-contiguous array of any float dtype from a float32 one on its device, which is the current one."""
    if out.dtype == np.float64 and not isinstance(out, np.ndarray):
        affine.convert(single, out)  # CuPy's own cast flushes subnormal numbers
    else:
        out[...] = single


def _check_out_dtype(out: Any, dtype: Any) -> None:
    found = _xp.float_dtype(out.dtype, "out.dtype")
    if dtype is not None and found != _xp.float_dtype(dtype):
        raise TypeError(f"out is {found} but dtype says {_xp.float_dtype(dtype)}; leave dtype away")
    if found != out.dtype:
        raise TypeError(
            f"out has the dtype {out.dtype!r}; it must be native: allocate it with empty(shape, {found.name!r})"
        )


def check_out(out: Any, shape: tuple[int, ...], beside: Any, dtype: Any = None) -> None:
    """Check an output array.

    Raises
    ------
    TypeError, ValueError, DeviceError
        When it cannot receive a result of that shape and dtype on the device of `beside`.
    """
    as_asked = _xp.is_native(out) and out.dtype is dtype
    if not as_asked and not _xp.is_array(out):
        raise TypeError(f"out is {type(out).__name__}; it must be a NumPy or CuPy array")
    if not _xp.same_device(out, beside):
        device = _xp.device_of(beside)
        raise DeviceError(f"out is on {_xp.device_of(out)}; the result is on {device}: allocate it there")
    if not as_asked:
        _check_out_dtype(out, dtype)
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has shape {shape}")
    flags = out.flags
    if not flags.c_contiguous:
        raise ValueError("out is not C-contiguous; allocate it with empty(shape, dtype)")
    if isinstance(out, np.ndarray) and not flags.writeable:
        raise ValueError("out is read-only; pass a writable array")


def _no_format(options: Mapping[str, Any]) -> str:
    """What to say to a call that names no format."""
    given = f"; {', '.join(f'{name}={value!r}' for name, value in options.items())} alone names none" if options else ""
    return (
        f'quantize needs a format{given}: quantize(x, "kbit4"), or with options quantize(x, "int4:block=32"); '
        f"registered are {', '.join(list_formats())}"
    )


def _check_finite(x: Any, dtype: np.dtype) -> None:
    """Refuse NaN and infinities in `x`, which has been an array of `dtype`."""
    layout = np.finfo(np.float32) if x.dtype.name == "bfloat16" else np.finfo(x.dtype)
    bits = 8 * x.dtype.itemsize
    exponent = ((1 << layout.nexp) - 1) << (bits - 1 - layout.nexp)
    with _xp.on_device_of(x):
        # By its bits, as CuPy has no isfinite for bfloat16.
        words = x.reshape(-1).view(f"u{x.dtype.itemsize}") & ((1 << (bits - 1)) - 1)
        nan, infinite = int((words > exponent).sum()), int((words == exponent).sum())
        if not nan and not infinite:
            return
        first = int((words >= exponent).argmax())
    index = tuple(map(int, np.unravel_index(first, x.shape)))
    beyond = f" (so is {dtype} beyond {x.dtype}, to which it is rounded)" if infinite and dtype != x.dtype else ""
    raise ValueError(
        f"x holds {nan} NaN and {infinite} infinities{beyond} among {x.size} elements, the first at index {index}; "
        "replace them, such as with nan_to_num, or leave check_finite away"
    )


def _check_quantized_out(out: Any, format: Format, array: Any) -> None:
    if not isinstance(out, QuantizedArray):
        raise TypeError(f"out is {type(out).__name__}; it must be a QuantizedArray")
    if out.shape != array.shape or out.format != format:
        raise FormatError(f"out is {out!r}; it must be {format!r} of shape {array.shape}, as an earlier result is")
    if not _xp.same_device(next(iter(out.planes.values())), array):
        raise DeviceError(f"out is on {out.device} and x on {_xp.device_of(array)}; move one with .to_device()")
    if out._borrowed:
        raise FormatError(
            f"out is a part of another array, whose other rows share its {' and '.join(out._borrowed)}: "
            "overwrite the whole array, or pass out.copy() and stack or concatenate the copies"
        )
    if isinstance(array, np.ndarray):
        for name, plane in out.planes.items():
            if not plane.flags.writeable:
                raise FormatError(f"plane {name!r} of out is read-only; pass out.copy()")


def source(array: Any, dtypes: tuple[str, ...]) -> Any:
    """The input as `Format.encode` takes it: C-contiguous, native, one of `dtypes`."""
    if array.dtype in _xp.dtype_set(dtypes):
        if array.flags.c_contiguous:
            return array
        with _xp.on_device_of(array):
            return _xp.namespace(array).ascontiguousarray(array)
    target = _xp.float_dtype(array.dtype)
    if target.name not in dtypes:
        target = _xp.float_dtype("float32")
    with _xp.on_device_of(array), np.errstate(over="ignore"):
        if array.dtype == np.float64 and not isinstance(array, np.ndarray):
            return affine.converted(array, target)  # CuPy's own cast flushes subnormal numbers
        return array.astype(target, order="C")


@functools.lru_cache(maxsize=512)
def _allocation(format: Format, shape: tuple[int, ...]) -> tuple[int, tuple[_xp.Piece, ...]]:
    """The planes of an array as `backend.xp.empty_arrays` takes them."""
    format.check_shape(shape)
    return _xp.pieces({name: (plane.shape, plane.dtype) for name, plane in format.planes(shape).items()})
