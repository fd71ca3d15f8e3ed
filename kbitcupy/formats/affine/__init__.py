"""Affine integers: formats ``int8``, ``uint8``, ``int4``, ``uint4``, and the arithmetic behind `kbitcupy.affine`.

An element is stored as the integer ``q = clamp(rint(x / scale) + zero_point, qmin, qmax)`` and comes back as
``scale * (q - zero_point)``. With ``zero="float"`` it is ``q = clamp(rint((x - offset) / scale), qmin, qmax)``, which
comes back as ``scale * q + offset``; an offset need not be a multiple of its scale, and may be much larger.

How many elements share a scale is the granularity; a shape and a granularity make one block shape (`Blocks`), and
everything below works on that.

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
scale        float32, one for each block    in C order of the scales; float16 or bfloat16 with ``scale_dtype``
zero_point   int32, one for each block      only with ``zero="int"`` (``symmetric=False``); int8 or uint8 with
                                            ``zero_dtype``
offset       as scale, one for each block   only with ``zero="float"``
===========  =============================  =================================================================

Rounding: every operation is one IEEE operation in float32, or in float64 where an array is float64 (a plane of scales
is float32 all the same), and subnormal numbers are kept. None is fused: with offsets the product is rounded, then the
sum, both of them in float32 whatever the dtype. rint rounds half to even; its result is clamped before the zero point
is added, so nothing overflows.

Special values: NaN becomes the zero point, infinities the ends of the range. A scale of 0, and on a device also one
that is negative or not finite, gives the zero point, comes back as 0 and has gradient 0. A zero point on a device that
lies outside the range counts as the nearer end of it. Beside offsets NaN becomes the integer 0, which comes back as the
offset; and while no negative scale is found or taken, one in a plane counts, since other projects write them: only one
that is not finite counts as 0. Offsets are added as they are, NaN and infinities too.

Scales that are found: symmetric ``max|x| / qmax`` with zero point 0; an unsigned range takes the zero point in its
middle, ``2^(bits-1)``, and ``max|x| / (2^(bits-1) - 1)``. Asymmetric ``(max - min) / (qmax - qmin)``, the range widened
to hold 0, the difference (which does not overflow) and the quotient in float64, and ``zero_point = qmin - rint(min /
scale)``, clamped. NaN is ignored, an infinity counts as the largest finite number of the array's dtype, and a block of
zeros has the scale 1. With a percentile p the maximum is the value of rank ``ceil(p / 100 * m)`` among the m of a block
(NaN counts as 0), the minimum that of the same rank from above.

What is decoded may lie half a step beyond what was found. A finite number comes back as a finite number of its dtype
all the same: let r be the larger of ``qmax - zero_point`` and ``zero_point - qmin`` (for a symmetric range what max|x|
becomes, unless a percentile below 100 or a scale of 16 bits leaves numbers beyond it), and F the largest float32 that
is rounded to a finite number of the array's dtype (the largest float64, for float64). Where ``scale * r`` exceeds F the
scale is ``F / r`` instead, or the number below that where ``(F / r) * r`` exceeds F too.

Offsets that are found: let low and high be the ends of the range, which is not widened to hold 0; with a percentile
those of that rank. NaN is ignored (as a percentile it counts as 0), and a block of nothing else has the ends 0. What
lies beyond E counts as E, the largest number of the array's dtype (of float32, for float64), or F less a part of it
where that is smaller: 2^-20, but 2^-9 where float16 and 2^-6 where bfloat16 is stored. The scale is ``(high - low) /
(qmax - qmin)`` in float64, rounded to float32, at least the smallest positive number of its dtype and at most M, the
largest of which no product with an integer overflows. Only a range wider than what float32 has on one side of 0 may ask
for more; then its middle is kept, as if low were ``(low + high) / 2 - scale * (qmax - qmin) / 2``. The offset is
``low - scale * qmin`` in float64, rounded to float32, and never -0. A block of equal numbers has the scale 1 and that
number as its offset, so it comes back exactly. What is finite comes back finite.

Scales in float16 and bfloat16: integers are chosen for the numbers that are stored. A scale that is found is rounded
half to even (by way of float32), and zero points are found with what that gives; but it becomes the largest number of
the dtype rather than infinite, and the smallest positive one rather than 0, and ``F / r`` is rounded down. With offsets
the offset is rounded first: down where qmin is 0, else half to even, and to the largest number where it is beyond. The
scale is then what reaches both ends of the range from there, rounded up: the larger of ``(high - offset) / qmax`` and
``(low - offset) / qmin`` in float64, at least and at most as above; it is 1 where low, high and offset are equal. So
nothing is cut off, and an offset that is much larger than its range costs steps: in float16 temperatures near 290 K
have offsets 0.25 K apart. What lies beyond 65504 is cut off there. Scales and offsets that are given are rounded half
to even; those on the host must be finite in that dtype, those on a device become the largest number.

Sources: the quantize family of baracuda-kernels, PyTorch's fake_quantize, the granularities of torchao; offsets as MLX
(``biases``) and, with another spelling, HQQ have them.
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
from .cuda import convert, converted
from .format import Affine
from .levels import MAX_LEVEL, SIGNED8, UNSIGNED8, Levels, check_levels, compute_dtype
from .stored import SCALE_DTYPES

__all__ = [
    "MAX_LEVEL",
    "SCALE_DTYPES",
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
    "convert",
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
