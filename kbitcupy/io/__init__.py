"""Files: compressed tensors in safetensors, in kbitcupy's layout or in those of bitsandbytes, compressed-tensors and
BitNet, and in GGUF.
"""

from . import bitsandbytes
from .checkpoint import Checkpoint, load, save
from .convert import FileReport, dequantize_file, quantize_file
from .gguf import GgufValue
from .importance import read_importance

__all__ = [
    "Checkpoint",
    "FileReport",
    "GgufValue",
    "bitsandbytes",
    "dequantize_file",
    "load",
    "quantize_file",
    "read_importance",
    "save",
]
