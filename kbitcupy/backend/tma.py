"""Tensor maps: how TMA, the tensor memory accelerator of Hopper, is told where a matrix lies."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..errors import DeviceError
from .launch import bind_thread, driver_function

#: Bytes of a row of a box, unless another number is asked for.
BOX_BYTES = 128
#: Bytes of a tensor map, and what the driver wants its address to be a multiple of.
MAP_BYTES, _ALIGNMENT = 128, 64

# Values of the driver's enumerations; a swizzle is named by the bytes that it turns together.
_UINT8, _PLAIN, _FILL_ZERO = 0, 0, 0
_SWIZZLES, _PROMOTIONS = {32: 1, 64: 2, 128: 3}, {128: 2, 256: 3}


def available() -> bool:
    """Whether the driver makes tensor maps."""
    return driver_function("cuTensorMapEncodeTiled") is not None


@functools.lru_cache(maxsize=1024)
def byte_matrix(
    address: int,
    rows: int,
    columns: int,
    pitch: int,
    box_rows: int,
    box_bytes: int = BOX_BYTES,
    swizzled: bool = True,
    promotion: int = 256,
) -> bytes:
    """The tensor map of a byte matrix that is copied in boxes of `box_rows` rows x `box_bytes` bytes.

    What a box has beyond the matrix arrives as zeros.

    Parameters
    ----------
    address : int
        Of the first byte, a multiple of 16.
    rows, columns : int
        Size of the matrix.
    pitch : int
        Bytes from row to row, a multiple of 16.
    box_rows : int
        1 to 256.
    box_bytes : int, default 128
        A multiple of 16, at most 256. Boxes of 32, 64 and 128 bytes arrive in the swizzle of that size, others in
        order.
    swizzled : bool, default True
        False: boxes of any size arrive in order.
    promotion : int, default 256
        Bytes of global memory, 128 or 256, that the L2 cache fetches together.

    Returns
    -------
    bytes
        A kernel argument that is passed by value.

    Raises
    ------
    DeviceError
        When the driver refuses.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    begin = ctypes.addressof(room)
    start = -begin % _ALIGNMENT
    about = _described(rows, columns, pitch, box_rows, box_bytes, swizzled, promotion)
    bind_thread()
    encode = driver_function("cuTensorMapEncodeTiled")
    status = encode(ctypes.c_void_p(begin + start), _UINT8, 2, ctypes.c_void_p(address), *about)
    if status:
        raise DeviceError(
            f"cuTensorMapEncodeTiled refused a matrix of {rows} x {columns} bytes with the status {status}"
        )
    return room.raw[start : start + MAP_BYTES]


@functools.lru_cache(maxsize=1024)
def _described(
    rows: int, columns: int, pitch: int, box_rows: int, box_bytes: int, swizzled: bool, promotion: int
) -> tuple[Any, ...]:
    """What the driver is told behind the address: it only reads it, and matrices of one shape share it."""
    return (
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(pitch),
        (ctypes.c_uint32 * 2)(box_bytes, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _PLAIN,
        _SWIZZLES.get(box_bytes, 0) if swizzled else 0,
        _PROMOTIONS[promotion],
        _FILL_ZERO,
    )
