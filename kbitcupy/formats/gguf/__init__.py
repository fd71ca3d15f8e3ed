"""Types of GGUF, the files of ggml and llama.cpp: a family. A block's bytes are those of a GGUF file."""

from __future__ import annotations

from typing import Any, ClassVar

from ..blocks import BlockFormat, Quantizer

# Threads of a thread block of kernels/gguf.cu and kernels/gguf_search.cu.
_THREADS = 128


class Gguf(BlockFormat):
    """A type of GGUF: its `struct` decodes it, and the struct with ``Encoder`` behind that name quantizes it."""

    family, origin = "gguf", "GGUF (ggml)"
    header = "formats/gguf.cuh"
    #: Threads that share a block while it is quantized, 1 or 8.
    lanes: ClassVar[int] = 1

    def __init_subclass__(cls, **arguments: Any) -> None:
        file, name = ("gguf.cu", "quantize_gguf") if cls.lanes == 1 else ("gguf_search.cu", "quantize_gguf_k")
        cls.quantizer = Quantizer(file, name, f"{cls.struct}Encoder", _THREADS, _THREADS // cls.lanes)
        super().__init_subclass__(**arguments)
        cls.family = "gguf"
