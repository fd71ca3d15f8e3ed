"""Files: compressed tensors in safetensors, in kbitcupy's layout or that of bitsandbytes."""

from . import bitsandbytes
from .checkpoint import Checkpoint, load, save
from .convert import FileReport, dequantize_file, quantize_file

__all__ = ["Checkpoint", "FileReport", "bitsandbytes", "dequantize_file", "load", "quantize_file", "save"]
