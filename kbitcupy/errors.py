"""Errors of kbitcupy: each is also the built-in class that a NumPy user would expect."""

__all__ = [
    "DeviceError",
    "FileError",
    "FormatError",
    "KbitError",
    "KernelCompileError",
    "MissingExtraError",
    "TransposeError",
]


class KbitError(Exception):
    """Base of every error that kbitcupy defines itself."""


class FormatError(KbitError, ValueError):
    """A format, option or plane does not fit its contract."""


class TransposeError(FormatError, AttributeError):
    """An array that is not 2-D has no ``.T``."""


class FileError(KbitError, ValueError):
    """A file is not what it claims to be, or may not be written."""


class DeviceError(KbitError, ValueError):
    """Arrays live on different devices, or on a device that is not there."""


class MissingExtraError(KbitError, ValueError, ImportError):
    """An optional dependency is needed; the message says which extra installs it."""


class KernelCompileError(KbitError, RuntimeError):
    """NVRTC refused a kernel; the message carries file, expression, architecture and log."""
