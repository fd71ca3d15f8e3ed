"""Affine integers: formats ``int8``, ``uint8``, ``int4``, ``uint4``, and the arithmetic behind `kbitcupy.affine`.

An element is stored as the integer ``q = clamp(rint(x / scale) + zero_point, qmin, qmax)`` and comes back as
``scale * (q - zero_point)``. How many elements share a scale is the granularity; a shape and a granularity make one
block shape (`Blocks`), and everything below works on that.

==========  ==============================================================  ===================
granularity  elements that share a scale, of an array of shape [..., N, D]   scales
==========  ==============================================================  ===================
tensor      all                                                             [1]
channel, a  all with the same index on axis a                               [C], C = shape[a]
token       those of one row along the last axis                            [..., N]
group, g    g neighbours along the last axis, the last group may be short   [..., N, ceil(D/g)]
==========  ==============================================================  ===================

===========  =============================  =================================================================
plane        dtype, entries                 contents
===========  =============================  =================================================================
codes        int8 or uint8, n               the integers in C order; ``int4`` and ``uint4``: uint8, ceil(n / 2),
                                            element 2i in the low nibble (two's complement), a last odd high
                                            nibble is 0
scale        float32, one for each block    in C order of the scales
zero_point   int32, one for each block      only with ``symmetric=False``
===========  =============================  =================================================================

Rounding: every operation is one IEEE operation in float32, or in float64 where an array is float64 (a plane of scales
is float32 all the same), and subnormal numbers are kept. rint rounds half to even; its result is clamped before the
zero point is added, so nothing overflows.

Special values: NaN becomes the zero point, infinities the ends of the range. A scale of 0, and on a device also one
that is negative or not finite, gives the zero point, comes back as 0 and has gradient 0. A zero point on a device that
lies outside the range counts as the nearer end of it.

Scales that are found: symmetric ``max|x| / qmax`` with zero point 0; an unsigned range takes the zero point in its
middle, ``2^(bits-1)``, and ``max|x| / (2^(bits-1) - 1)``. Asymmetric ``(max - min) / (qmax - qmin)``, the range widened
to hold 0, the difference (which does not overflow) and the quotient in float64, and ``zero_point = qmin - rint(min /
scale)``, clamped. NaN is ignored, an infinity counts as the largest finite number of the array's dtype, and a block of
zeros has the scale 1. With a percentile p the maximum is the value of rank ``ceil(p / 100 * m)`` among the m of a block
(NaN counts as 0), the minimum that of the same rank from above.

What is decoded may lie half a step beyond what was found. A finite number comes back as a finite number of its dtype
all the same: let r be the larger of ``qmax - zero_point`` and ``zero_point - qmin`` (for a symmetric range what max|x|
becomes, unless a percentile below 100 leaves numbers beyond it), and F the largest float32 that is rounded to a finite
number of the array's dtype (the largest float64, for float64). Where ``scale * r`` exceeds F the scale is ``F / r``
instead, or the number below that where ``(F / r) * r`` exceeds F too.

Sources: the quantize family of baracuda-kernels, PyTorch's fake_quantize, the granularities of torchao.
"""

from ..granularity import Blocks, Granularity, blocks_of, check_granularity, granularity_of, stack_blocks
from .arithmetic import (
    backward,
    check_percentile,
    check_scale,
    check_zero_point,
    dequantize,
    fake_quantize,
    find,
    multiply,
    quantize,
    quantize_dynamic,
)
from .cuda import converted
from .format import Affine
from .levels import MAX_LEVEL, SIGNED8, UNSIGNED8, Levels, check_levels, compute_dtype

__all__ = [
    "MAX_LEVEL",
    "SIGNED8",
    "UNSIGNED8",
    "Affine",
    "Blocks",
    "Granularity",
    "Levels",
    "backward",
    "blocks_of",
    "check_granularity",
    "check_levels",
    "check_percentile",
    "check_scale",
    "check_zero_point",
    "compute_dtype",
    "converted",
    "dequantize",
    "fake_quantize",
    "find",
    "granularity_of",
    "multiply",
    "quantize",
    "quantize_dynamic",
    "stack_blocks",
]
