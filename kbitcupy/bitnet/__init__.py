"""BitNet b1.58: ternary weights, activations in 8 bits, and the packings of other projects.

Weights are arrays of the format ``ternary`` (`kbitcupy.formats.ternary`): ``kb.quantize(w, "ternary")``, or
`from_trits` where trits and their scale are there already. `linear` multiplies them with activations that it quantizes
on the way, by the rule of `quantize_activations`, behind an RMSNorm where that is asked for. ``kb.linear(x, q)``
multiplies the same weights with the floats as they came, and ``kb.linear(x, q, activations="bitnet")`` is `linear`
without options.

`linear_backward` and `rms_norm_backward` are the gradients for training, straight through the rounding. `BitLinear` is
a layer with the names and the arithmetic of bitnet-quantize, whose other functions are in `layers` and `kernels`.

`pack` and `unpack` know the bytes of bitnet.cpp, llama.cpp, transformers, Microsoft's GPU kernel, torchao and
bitnet-quantize.

Arrays may be NumPy, CuPy, or anything with ``__dlpack__`` or ``__cuda_array_interface__``; where the first argument is
a torch tensor, so are the results. NumPy and CuPy give the same bits. On CuPy nothing synchronises and no value is read
back, unless a function says that it checks values.
"""

from . import kernels, layers
from .activations import dequantize_activations, quantize_activations, rms_norm
from .config import BitNetAdapterConfig, BitNetConfig
from .export import export_gguf
from .layers import BitLinear, BitNetAdapter, QuantizedActivations, TernaryWeight
from .linear import linear
from .packing import LAYOUTS, from_trits, pack, packed_scales, sparsity, trits, unpack
from .training import linear_backward, rms_norm_backward

__all__ = [
    "LAYOUTS",
    "BitLinear",
    "BitNetAdapter",
    "BitNetAdapterConfig",
    "BitNetConfig",
    "QuantizedActivations",
    "TernaryWeight",
    "dequantize_activations",
    "export_gguf",
    "from_trits",
    "kernels",
    "layers",
    "linear",
    "linear_backward",
    "pack",
    "packed_scales",
    "quantize_activations",
    "rms_norm",
    "rms_norm_backward",
    "sparsity",
    "trits",
    "unpack",
]
