"""Files: compressed tensors in safetensors."""

from .checkpoint import Checkpoint, load, save
from .convert import FileReport, dequantize_file, quantize_file
from .layouts import bitsandbytes

__all__ = ["Checkpoint", "FileReport", "bitsandbytes", "dequantize_file", "load", "quantize_file", "save"]
