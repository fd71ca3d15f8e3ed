"""BitNet b1.58: ternary weights, activations in 8 bits, and the packings of other projects.

Weights are arrays of the format ``ternary`` (`kbitcupy.formats.ternary`): ``kb.quantize(w, "ternary")``, or
`from_trits` where trits and their scale are there already. `linear` multiplies them with activations that it quantizes
on the way, by the rule of `quantize_activations`, behind an RMSNorm where that is asked for. ``kb.linear(x, q)``
multiplies the same weights with the floats as they came, and ``kb.linear(x, q, activations="bitnet")`` is `linear`
without options.

`pack` and `unpack` know the bytes of bitnet.cpp, llama.cpp, transformers, Microsoft's GPU kernel, torchao and
bitnet-quantize.

Arrays may be NumPy, CuPy, or anything with ``__dlpack__`` or ``__cuda_array_interface__``; where the first argument is
a torch tensor, so are the results. NumPy and CuPy give the same bits. On CuPy nothing synchronises and no value is read
back, unless a function says that it checks values.
"""

from .activations import dequantize_activations, quantize_activations, rms_norm
from .linear import linear
from .packing import LAYOUTS, from_trits, pack, packed_scales, sparsity, trits, unpack

__all__ = [
    "LAYOUTS",
    "dequantize_activations",
    "from_trits",
    "linear",
    "pack",
    "packed_scales",
    "quantize_activations",
    "rms_norm",
    "sparsity",
    "trits",
    "unpack",
]
