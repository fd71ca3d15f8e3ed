"""Types of GGUF, the files of ggml and llama.cpp: a family. A block's bytes are those of a GGUF file."""

from __future__ import annotations

from typing import Any, ClassVar

from ..blocks import BlockFormat, Quantizer
from ..integer_codes import INNER, OFFSETS, IntegerCodes, of_blocks
from ..planes import Fragments, Records
from .fragments import FRAGMENTS, RECORDS

# Threads of a thread block of kernels/gguf.cu and kernels/gguf_search.cu.
_THREADS = 128
# Elements that one of kernels/gguf.cu quantizes.
_ELEMENTS = 8192


class Gguf(BlockFormat):
    """A type of GGUF: its `struct` decodes it, and the struct with ``Encoder`` behind that name quantizes it.

    With importance that is the struct with ``Weighed`` behind that name, whatever there is without.
    """

    family, origin = "gguf", "GGUF (ggml)"
    header = "formats/gguf.cuh"
    #: Threads that share a block while its scales are searched for, 1, 8 or 16; 0 where nothing is searched for.
    lanes: ClassVar[int] = 0
    #: ggml's number of the type.
    ggml_type: ClassVar[int]
    all_fragments = tuple(FRAGMENTS.values())

    def __init_subclass__(cls, **arguments: Any) -> None:
        made = cls.struct and cls.quantizes()
        if made:
            at_a_time = _THREADS // cls.lanes if cls.lanes else _ELEMENTS // cls.block
            file, name = ("gguf_search.cu", "search_gguf") if cls.lanes else ("gguf.cu", "quantize_gguf")
            cls.quantizer = Quantizer(file, name, f"{cls.struct}Encoder", _THREADS, at_a_time)
        if made and "importance" in cls.takes:
            name, struct, means = "search_gguf_weighed", f"{cls.struct}Weighed", "row_means" if cls.row_mean else ""
            at_a_time = _THREADS // max(cls.lanes, 1)
            cls.weigher = Quantizer("gguf_search.cu", name, struct, _THREADS, at_a_time, weighs=True, means=means)
        super().__init_subclass__(**arguments)
        cls.family = "gguf"
        if "ggml_type" in cls.__dict__:  # what several types have in common is no type
            cls.all_records = _records(cls)

    def fragments(self, ndim: int = 2) -> Fragments | None:
        return FRAGMENTS.get(self.name)

    def integer_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        if self.name not in _INTEGERS or len(shape) <= lead:
            return None
        (bits, width, signed, zero), *beside = _INTEGERS[self.name]
        blocks = of_blocks(_SUB, shape[-1])
        return IntegerCodes(bits, width, signed, zero, "qs", "d", "float16", blocks, False, *beside)

    def staged_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        if self.name not in _STAGED or len(shape) <= lead:
            return None
        about = _STAGED[self.name]
        blocks = of_blocks(_SUB, shape[-1])
        signed = "table" in about  # what their codes stand for is
        return IntegerCodes(bits=4, signed=signed, zero=0, codes="qs", scale_of=blocks, positive=False, **about)


# Elements that share a scale, or an inner one.
_SUB = 32
# Of formats that are integers with scales: bits, width, signed and zero; and what stands beside scales.
_INTEGERS: dict[str, tuple[Any, ...]] = {
    "q8_0": ((8, 1, True, 0),),
    "q4_0": ((4, 16, False, 8),),
    "q4_k": ((4, 32, False, 0), INNER, "scales", "uint8"),
}
# Of those whose codes of 4 bits stand for integers, what `IntegerCodes` says of them.
_STAGED: dict[str, dict[str, Any]] = {
    "q4_1": {"width": 16, "scales": "d", "scale_dtype": "float16", "added": OFFSETS},
    "iq4_nl": {"width": 16, "scales": "d", "scale_dtype": "float16", "table": True},
    "iq4_xs": {
        "width": 16,
        "scales": "d",
        "scale_dtype": "float16",
        "added": INNER,
        "beside": "scales_l",
        "beside_dtype": "uint8",
        "high": "scales_h",
        "table": True,
    },
    "mxfp4": {"width": 1, "scales": "scales", "scale_dtype": "uint8", "table": True},
}


def _records(kind: type[Gguf]) -> tuple[Records, ...]:
    """How the streaming product kernel decodes a type, where it does."""
    about = RECORDS.get(kind.name)
    if about is None:
        return ()
    fields = tuple((field.name, field.nbytes * Records.ELEMENTS // kind.block) for field in kind.fields)
    kernels = "lanes" if about.lanes else "records"
    return (
        Records(
            f"linear/gguf_{'grid_' if about.table else ''}{kernels}.cuh",
            f"{kind.struct}_{{way}}",
            fields,
            about.sub,
            about.summed,
            about.table,
            kind.tensor_scale,
            kind.declared,
            about.work,
            about.lanes,
            about.folded,
            about.gap,
            about.apart,
            about.integers,
            about.columns,
            about.halves,
        ),
    )
