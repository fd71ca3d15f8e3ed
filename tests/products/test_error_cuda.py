"""What products with compressed weights promise of their errors, beside those of cuBLAS."""

import pytest
from measure_error import DTYPES, FORMATS, measured, weight

pytestmark = pytest.mark.gpu

#: Also measured with bfloat16, whose integers go up to 256 only, and which rounds scales of 16 bits.
BFLOAT16 = ("uint4:zero=int,block=32", "int8:block=32", "kbit6", "q4_0", "q4_k")


@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((format, DTYPES[0]) for format in FORMATS), *((format, DTYPES[1]) for format in BFLOAT16)],
    ids=str,
)
def test_error_beside_cublas(cupy, format, dtype):
    for route, tokens, mean, error, limit in measured(weight(format, cupy), cupy, dtype):
        assert error <= limit, f"{route}, {tokens} tokens, mean {mean}: {error:.3f} times that of cuBLAS"
