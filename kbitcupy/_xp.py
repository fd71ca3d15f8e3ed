"""NumPy or CuPy: the only file that asks which library an array belongs to.

CuPy is looked up in ``sys.modules`` and never imported for the question: whoever holds a CuPy array has
imported CuPy already.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from .errors import DeviceError, MissingExtraError

#: dtype names that every format takes and gives back; float64 passes through one cast to float32.
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

_BY_NAME: dict[str, np.dtype] = {name: np.dtype(name) for name in ("float16", "float32", "float64")}


def float_dtype(dtype: Any, argument: str = "dtype") -> np.dtype:
    """The NumPy dtype of one of `FLOAT_DTYPES`, from a name, a dtype or a scalar type.

    Raises
    ------
    TypeError
        When `dtype` is none of `FLOAT_DTYPES`.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or _dtype_name(dtype)
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    if name == "bfloat16":
        import ml_dtypes  # only arrays of this dtype pay for the import

        return _BY_NAME.setdefault("bfloat16", np.dtype(ml_dtypes.bfloat16))
    raise TypeError(f"{argument} is {name}; allowed are {', '.join(FLOAT_DTYPES)}: convert with astype first")


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return getattr(dtype, "__name__", repr(dtype))


def is_cupy(x: Any) -> bool:
    """Whether `x` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_array(x: Any) -> bool:
    """Whether `x` is a NumPy or a CuPy array."""
    return isinstance(x, np.ndarray) or is_cupy(x)


def namespace(*arrays: Any) -> ModuleType:
    """``cupy`` when the arrays are CuPy's, ``numpy`` when they are NumPy's.

    Raises
    ------
    DeviceError
        When the arrays do not all live on one device.
    """
    first = device_of(arrays[0])
    for other in arrays[1:]:
        if device_of(other) != first:
            raise DeviceError(
                f"arrays on different devices: {first} and {device_of(other)}; move one with .to_device(), "
                "cupy.asarray or cupy.asnumpy"
            )
    return np if first == "cpu" else sys.modules["cupy"]


def device_of(x: Any) -> str:
    """``"cpu"`` or ``"cuda:<ordinal>"``."""
    return f"cuda:{x.device.id}" if is_cupy(x) else "cpu"


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


def resolve_device(device: str) -> str:
    """Check a device name, ``"auto"`` included, and return ``"cpu"`` or ``"cuda:<ordinal>"``.

    Raises
    ------
    DeviceError
        When the name is not understood or the device is not there.
    """
    if device == "cpu":
        return device
    if device == "auto":
        try:
            import_cupy()
        except (MissingExtraError, DeviceError):
            return "cpu"
        return "cuda:0"
    kind, _, ordinal = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (ordinal or "0").isdigit():
        raise DeviceError(f"device is {device!r}; allowed are 'auto', 'cpu' and 'cuda:N'")
    count = import_cupy().cuda.runtime.getDeviceCount()
    if int(ordinal or "0") >= count:
        raise DeviceError(f"device is {device!r} but only {count} CUDA device(s) are present")
    return f"cuda:{int(ordinal or '0')}"


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

    Raises
    ------
    TypeError
        When `x` cannot be read as an array.
    """
    if is_array(x):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        return import_cupy().asarray(x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, argument)
    try:
        return np.asarray(x)
    except Exception as error:  # third-party __array__ may raise anything
        raise TypeError(f"{argument} is {type(x).__name__}, which does not convert to an array: {error}") from error


def _from_dlpack(x: Any, argument: str) -> Any:
    kind, _ = x.__dlpack_device__()
    host = 1  # kDLCPU
    try:
        if int(kind) != host:
            return import_cupy().from_dlpack(x)
        if "bfloat16" in str(getattr(x, "dtype", "")):
            # NumPy's DLPack has no bfloat16: the same bytes travel as int16.
            int16 = getattr(sys.modules.get(type(x).__module__.partition(".")[0]), "int16", np.int16)
            return np.from_dlpack(x.view(int16)).view(float_dtype("bfloat16"))
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, AttributeError) as error:
        raise TypeError(
            f"{argument} is {type(x).__name__} and refuses DLPack export ({error}); pass a plain array of it "
            "(for torch: x.detach())"
        ) from error
