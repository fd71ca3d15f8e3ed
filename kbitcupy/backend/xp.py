"""NumPy or CuPy: the only file that asks which library an array belongs to.

CuPy is looked up in ``sys.modules`` and never imported for the question: whoever holds a CuPy array has
imported CuPy already.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError, KbitError, MissingExtraError

#: dtype names that every format takes and gives back; float64 passes through one cast to float32.
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

#: dtypes that arrays are compared with: with the scalar types, NumPy would make dtypes of them first.
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

# Every spelling of a dtype that has been asked for: names, NumPy dtypes, scalar types.
_known: dict[Any, np.dtype] = {}
for _name in ("float16", "float32", "float64"):
    _known[_name] = _known[np.dtype(_name)] = _known[np.dtype(_name).type] = np.dtype(_name)


def float_dtype(dtype: Any, argument: str = "dtype") -> np.dtype:
    """The NumPy dtype of one of `FLOAT_DTYPES`, from a name, a dtype or a scalar type.

    Raises
    ------
    TypeError
        When `dtype` is none of `FLOAT_DTYPES`.
    """
    try:
        found = _known.get(dtype)
    except TypeError:  # does not hash
        found = None
    if found is not None:
        return found
    name = _dtype_name(dtype)
    if name == "bfloat16":
        found = named_dtype(name)
        _known["bfloat16"] = _known[found] = _known[found.type] = found
        return found
    if name in _known:  # another byte order
        return _known[name]
    raise TypeError(f"{argument} is {name}; allowed are {', '.join(FLOAT_DTYPES)}: convert with astype first")


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        if isinstance(dtype, str):  # "bfloat16", as long as NumPy has not heard of it
            return dtype
        return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", repr(dtype))).removeprefix("torch.")


def named_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, ml_dtypes' included.

    Raises
    ------
    AttributeError
        When neither library knows it.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only arrays of these dtypes pay for the import

        return np.dtype(getattr(ml_dtypes, name))


@functools.cache
def dtype_set(names: tuple[str, ...]) -> frozenset[np.dtype]:
    """The native dtypes of these names: ``array.dtype in dtype_set(names)`` is a cheap test."""
    return frozenset(float_dtype(name) for name in names)


def is_cupy(x: Any) -> bool:
    """Whether `x` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_native(x: Any) -> bool:
    """Whether `x` is a NumPy or CuPy array of one of `FLOAT_DTYPES`, and no subclass: nothing of it has to be checked.

    Others may be such arrays, too, as far as this test goes.
    """
    if type(x) is not np.ndarray:
        cupy = sys.modules.get("cupy")
        if cupy is None or type(x) is not cupy.ndarray:
            return False
    dtype = x.dtype
    return _known.get(dtype) is dtype


def is_array(x: Any) -> bool:
    """Whether `x` is a NumPy or a CuPy array."""
    return isinstance(x, np.ndarray) or is_cupy(x)


def namespace(array: Any) -> ModuleType:
    """``numpy`` for a NumPy array, ``cupy`` for a CuPy array."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def same_device(a: Any, b: Any) -> bool:
    """Whether two NumPy or CuPy arrays live on one device."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    found: bool = a.data.device_id == b.data.device_id
    return found


def ordinal(x: Any) -> int:
    """The number of an array's GPU; -1 for one of NumPy's."""
    return -1 if isinstance(x, np.ndarray) else x.data.device_id


def same_gpu(a: Any, b: Any) -> bool:
    """Whether both are CuPy arrays, on one device."""
    return is_cupy(a) and is_cupy(b) and same_device(a, b)


def empty(beside: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array whose values are not set, on the device of `beside`, which is the current one."""
    if isinstance(beside, np.ndarray):
        return np.empty(shape, dtype)
    return sys.modules["cupy"].ndarray(shape, dtype)


def allocate(size: int) -> Any:
    """So many bytes of memory of the current device, as CuPy's ``alloc``."""
    return sys.modules["cupy"].cuda.alloc(size)


def contiguous(x: Any) -> Any:
    """`x`, or a copy of it that is C-contiguous."""
    return x if x.flags.c_contiguous else namespace(x).ascontiguousarray(x)


def check_same_device(*arrays: Any) -> None:
    """Check that all arrays live on one device.

    Raises
    ------
    DeviceError
        When they do not.
    """
    for other in arrays[1:]:
        if not same_device(arrays[0], other):
            raise DeviceError(
                f"arrays on different devices: {device_of(arrays[0])} and {device_of(other)}; move one with "
                ".to_device(), cupy.asarray or cupy.asnumpy"
            )


class _Nowhere:
    """A context that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_nowhere = _Nowhere()


def on_device_of(array: Any) -> Any:
    """A context for work on an array: the device of a CuPy array is the current one in it.

    While a graph is captured, what is allocated in it is kept for the life of the process: the graph writes there
    whenever it is launched, so that CuPy's pool must not give the memory to others. The context costs nothing where
    neither is the case.
    """
    if isinstance(array, np.ndarray):
        return _nowhere
    cuda = sys.modules["cupy"].cuda
    device = array.data.device_id
    if cuda.runtime.getDevice() != device:
        return _elsewhere(cuda, device)
    return _keeping(cuda) if _captures(cuda) else _nowhere


def _captures(cuda: Any) -> bool:
    """Whether the current stream captures a graph; the two default streams of a process cannot."""
    stream = cuda.get_current_stream().ptr
    return stream > 1 and bool(cuda.runtime.streamIsCapturing(stream))


@contextlib.contextmanager
def _elsewhere(cuda: Any, device: int) -> Iterator[None]:
    with cuda.Device(device), _keeping(cuda) if _captures(cuda) else _nowhere:
        yield


_kept: list[Any] = []


@contextlib.contextmanager
def _keeping(cuda: Any) -> Iterator[None]:
    allocate = cuda.get_allocator()

    def kept(size: int) -> Any:
        memory = allocate(size)
        _kept.append(memory)
        return memory

    with cuda.using_allocator(kept):
        yield


class Piece(NamedTuple):
    """An array that lies beside others in one allocation.

    Parameters
    ----------
    name : str
        Its name.
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        Its dtype.
    offset : int
        Where it begins, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


# A multiple of what any kernel, tensor map or vector asks for: arrays begin at multiples of so many bytes.
_PIECE_BYTES = 256


def pieces(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[int, tuple[Piece, ...]]:
    """Bytes of one allocation for arrays of these shapes and dtype names, and where each begins."""
    found, total = [], 0
    for name, (shape, kind) in arrays.items():
        dtype = named_dtype(kind)
        found.append(Piece(name, shape, dtype, total))
        size = math.prod(shape) * dtype.itemsize
        total += -(-size // _PIECE_BYTES) * _PIECE_BYTES
    return total, tuple(found)


def empty_arrays(beside: Any, total: int, arrays: tuple[Piece, ...]) -> dict[str, Any]:
    """Arrays whose values are not set, on the device of `beside`, which is the current one; see `pieces`.

    On a GPU they share one allocation: each of its own would cost the time of half a launch.
    """
    if isinstance(beside, np.ndarray):
        return {name: np.empty(shape, dtype) for name, shape, dtype, _ in arrays}
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.alloc(max(total, _PIECE_BYTES))
    return {name: cupy.ndarray(shape, dtype, memory + offset) for name, shape, dtype, offset in arrays}


def device_of(x: Any) -> str:
    """``"cpu"`` or ``"cuda:<ordinal>"``."""
    return f"cuda:{x.data.device_id}" if is_cupy(x) else "cpu"


def import_cupy() -> ModuleType:
    """CuPy, with a GPU behind it.

    Raises
    ------
    MissingExtraError
        When CuPy is not installed.
    DeviceError
        When CuPy finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(
            "a CUDA device was asked for but CuPy is not installed: pip install 'kbitcupy[cuda12]' or "
            "'kbitcupy[cuda13]'"
        ) from error
    if not cupy.cuda.is_available():
        raise DeviceError("a CUDA device was asked for but CuPy finds none: use device 'cpu', or check nvidia-smi")
    return cupy


def device_name(device: str) -> str:
    """A device name in full: ``"auto"``, ``"cpu"`` or ``"cuda:<ordinal>"``; whether it is there is not asked.

    Raises
    ------
    DeviceError
        When the name is not understood.
    """
    if device in ("auto", "cpu"):
        return device
    kind, _, ordinal = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (ordinal or "0").isdigit():
        raise DeviceError(f"device is {device!r}; allowed are 'auto', 'cpu' and 'cuda:N'")
    return f"cuda:{int(ordinal or '0')}"


def resolve_device(device: str) -> str:
    """Check a device name, ``"auto"`` included, and return ``"cpu"`` or ``"cuda:<ordinal>"``.

    Raises
    ------
    DeviceError
        When the name is not understood or the device is not there.
    """
    name = device_name(device)
    if name == "auto":
        try:
            import_cupy()
        except (MissingExtraError, DeviceError):
            return "cpu"
        return "cuda:0"
    if name != "cpu":
        count = import_cupy().cuda.runtime.getDeviceCount()
        if int(name.partition(":")[2]) >= count:
            raise DeviceError(f"device is {device!r} but only {count} CUDA device(s) are present")
    return name


def to_device(x: Any, device: str) -> Any:
    """A NumPy or CuPy array on `device`; `x` itself when it is there already."""
    if device_of(x) == device:
        return x
    if device == "cpu":
        return x.get()
    cupy = import_cupy()
    with cupy.cuda.Device(int(device.partition(":")[2])):
        return cupy.asarray(x)


def as_array(x: Any, argument: str = "x") -> Any:
    """`x` as a NumPy or CuPy array, without a copy where its protocol allows that.

    Parameters
    ----------
    x : array_like
        A NumPy or CuPy array, an object with ``__cuda_array_interface__`` or ``__dlpack__``, or whatever
        ``numpy.asarray`` takes.
    argument : str
        The name that an error message gives to `x`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of a subclass of NumPy's array, such as ``numpy.matrix`` and ``numpy.memmap``, the plain array of its memory.

    Raises
    ------
    TypeError
        When `x` cannot be read as an array, or has a mask.
    """
    if type(x) is np.ndarray or is_cupy(x):
        return x
    if isinstance(x, np.ndarray):
        return _plain(x, argument)
    # DLPack first: it knows bfloat16 and streams, and what a tensor that may not be exported says can be passed on.
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, argument)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda_interface(x)
    try:
        array = np.asarray(x)
    except Exception as error:  # third-party __array__ may raise anything
        raise TypeError(f"{argument} is {type(x).__name__}, which does not convert to an array: {error}") from error
    if array.dtype.kind in "OUST":
        raise TypeError(f"{argument} is {type(x).__name__}, {_no_numbers(x)}")
    return array


def _plain(x: np.ndarray, argument: str) -> np.ndarray:
    """The memory of a subclass of NumPy's array, whose own rules are left behind."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise TypeError(
            f"{argument} is a masked array, and no format keeps a mask: pass {argument}.filled(value), and keep the "
            f"mask ({argument}.mask) yourself, or {argument}.compressed(), which drops what is masked"
        )
    return x.view(np.ndarray)


def _no_numbers(x: Any) -> str:
    """What is wrong with an object of which NumPy makes no array of numbers, and what to do."""
    kind = type(x)
    if "scipy.sparse" in kind.__module__:
        return "a sparse array: pass its dense form (.toarray()), or its nonzero elements alone (.data)"
    if x is None or isinstance(x, (str, bytes)) or not (hasattr(x, "__array__") or hasattr(x, "__len__")):
        return "which holds no numbers: pass an array"
    return "of which NumPy makes no array of numbers: convert it with numpy.asarray(..., dtype=...) first"


def _from_dlpack(x: Any, argument: str) -> Any:
    host = 1  # kDLCPU
    try:
        kind, _ = x.__dlpack_device__()
        if int(kind) != host:
            array = import_cupy().from_dlpack(x)  # our current stream waits for the producer's
            return _borrowed(array, _torch().cuda.current_stream(x.device).cuda_stream) if is_tensor(x) else array
        if "bfloat16" in str(getattr(x, "dtype", "")):  # unknown to NumPy's DLPack
            if not is_tensor(x):
                return np.asarray(x)  # such as JAX's, which are NumPy's own memory under ml_dtypes' dtype
            return np.from_dlpack(x.view(_torch().int16)).view(float_dtype("bfloat16"))
        return np.from_dlpack(x)
    except KbitError:  # the device of `x` is out of reach
        raise
    except (BufferError, RuntimeError, AttributeError, ValueError) as error:
        raise TypeError(
            f"{argument} is {type(x).__name__} and refuses DLPack export ({error}); pass a plain array of it"
            f"{_torch_remedy(x)}"
        ) from error


def _torch_remedy(x: Any) -> str:
    """What makes a plain array of a tensor that may not be exported."""
    if not is_tensor(x):
        return ""
    if x.is_meta:
        return ", which has values"
    if x.layout is not _torch().strided:
        return " (for torch: x.to_dense())"
    if x.is_conj() or x.is_neg():
        return " (for torch: x.resolve_conj().resolve_neg())"
    if str(x.dtype).removeprefix("torch.") not in FLOAT_DTYPES:
        return f" (for torch: x.to(torch.float32); it is {x.dtype})"
    return " (for torch: x.detach())"


def as_buffer(x: Any, argument: str) -> Any:
    """An array of the caller's own layout: a NumPy or CuPy array, or what shares its memory by a protocol of arrays.

    Raises
    ------
    TypeError
        When it is a list or anything else that would have to be converted.
    """
    if is_array(x) or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        return as_array(x, argument)
    raise TypeError(f"{argument} is {type(x).__name__}; it must be a NumPy or CuPy array, or a torch tensor")


class _Described:
    """Memory of another library, described for CuPy; `owner` keeps it alive."""

    __slots__ = ("__cuda_array_interface__", "owner")

    __cuda_array_interface__: dict[str, Any]
    owner: Any


def _from_cuda_interface(x: Any) -> Any:
    """A CuPy array on the memory of `x`; our current stream waits for the stream that `x` names."""
    cupy = import_cupy()
    described = _Described()
    described.owner = x
    # CuPy would make the host wait for that stream.
    described.__cuda_array_interface__ = {**x.__cuda_array_interface__, "stream": None}
    array = cupy.asarray(described)
    stream = x.__cuda_array_interface__.get("stream")
    if stream is None:
        return array
    device = array.data.device_id
    _order(device, stream, _current_stream(device))
    return _borrowed(array, stream)


# ---- streams of other libraries, by their pointers -------------------------------------------------------------------


def _borrowed(array: Any, theirs: int) -> Any:
    """`array`, on memory whose owner works on the stream `theirs`.

    When the array goes, that stream is told to wait for ours. Else the owner, who knows nothing of our stream, could
    overwrite the memory or give it away while we have yet to read it.
    """
    device = array.data.device_id
    if _current_stream(device) != theirs:
        weakref.finalize(array, _give_back, device, theirs).atexit = False
    return array


def _give_back(device: int, theirs: int) -> None:
    _order(device, _current_stream(device), theirs)


def _current_stream(device: int) -> int:
    return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)


def _order(device: int, first: int, then: int) -> None:
    """Let the stream `then` wait for what the stream `first` has been given so far; the host does not wait."""
    if first == then:
        return
    cuda = sys.modules["cupy"].cuda
    with cuda.Device(device):
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, first)
        cuda.runtime.streamWaitEvent(then, event.ptr)


# ---- torch, which is only ever imported by who asks for a tensor -----------------------------------------------------


def _torch() -> Any:
    return sys.modules["torch"]


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def in_torch(function: Any, argument: str, x: Any, *arguments: Any, out: Any = None, **options: Any) -> Any:
    """What `function` makes of the torch tensor `x`, which is its first argument, as tensors.

    Parameters
    ----------
    function : callable
        Takes an array, `arguments` and `options`, and returns an array, or a tuple of arrays.
    argument : str
        The name that an error message gives to `x`.
    x : torch.Tensor
        Taken as an array without a copy.
    out : array or torch.Tensor, optional
        Passed on as an array; it itself is returned then, in the place of the result.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        See `as_tensor`.
    """
    array = as_array(x, argument)
    if out is not None:
        into = as_array(out, "out") if is_tensor(out) else out
        options["out"] = into
    result = function(array, *arguments, **options)
    if not isinstance(result, tuple):
        return as_tensor(result) if out is None else out
    return tuple(out if out is not None and part is into else as_tensor(part) for part in result)


def as_tensor(array: Any) -> Any:
    """A NumPy or CuPy array as a torch tensor, without a copy unless it is read-only or goes backwards.

    On a GPU torch's current stream waits for ours; when the tensor has gone, ours waits for that one before the memory
    is used again.

    Raises
    ------
    TypeError
        When torch has no such dtype.
    DeviceError
        When the array is on a GPU and torch was built without CUDA.
    """
    torch = _torch()
    if not is_cupy(array):
        array = np.asarray(array)
        if not array.flags.writeable or not array.dtype.isnative or min(array.strides, default=0) < 0:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        if array.dtype.kind != "V":
            return _numpy_tensor(torch, array)
        if not array.dtype.name.startswith(("bfloat16", "float8_")) or not hasattr(torch, array.dtype.name):
            raise TypeError(f"torch has no dtype {array.dtype.name}: convert with astype first")
        bits = array.view(f"i{array.dtype.itemsize}")  # of ml_dtypes, which are unknown to torch's NumPy bridge
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    device = array.data.device_id
    if not torch.cuda.is_available():
        raise DeviceError(f"the array is on cuda:{device}, but torch has no CUDA: move it with .get()")
    ours, theirs = _current_stream(device), torch.cuda.current_stream(device).cuda_stream
    if ours != theirs:
        array = array.view()  # the tensor alone keeps it
        weakref.finalize(array, _order, device, theirs, ours).atexit = False
    with sys.modules["cupy"].cuda.Device(device):
        return torch.from_dlpack(array)


def _numpy_tensor(torch: Any, array: np.ndarray) -> Any:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise TypeError(f"torch has no dtype {array.dtype.name}: convert with astype first") from None


def import_torch() -> Any:
    """torch, for who asks for a tensor.

    Raises
    ------
    MissingExtraError
        When it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch is not installed: pip install torch, or call dequantize") from error
    return torch


def empty_tensor(shape: tuple[int, ...], dtype: np.dtype, beside: Any) -> tuple[Any, Any]:
    """A new torch tensor on the device of the array `beside`, and a NumPy or CuPy array on its memory.

    torch's current stream waits for what ours writes there when the array goes.

    Raises
    ------
    MissingExtraError
        When torch is not installed.
    DeviceError
        When `beside` is on a GPU and torch was built without CUDA.
    """
    torch = import_torch()
    try:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), device=device_of(beside))
    except AssertionError as error:
        raise DeviceError(f"q is on {device_of(beside)}, but {error}: move it with .get()") from error
    if is_cupy(beside):
        return tensor, as_array(tensor)
    if dtype.name == "bfloat16":  # unknown to torch's NumPy bridge
        return tensor, tensor.view(torch.int16).numpy().view(dtype)
    return tensor, tensor.numpy()
