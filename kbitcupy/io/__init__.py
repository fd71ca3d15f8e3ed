"""Files: compressed tensors in safetensors."""

from .safetensors import FileReport, dequantize_file, load, quantize_file, save

__all__ = ["FileReport", "dequantize_file", "load", "quantize_file", "save"]
