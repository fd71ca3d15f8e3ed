"""What a compressed array weighs: Dask plans memory and work with it, on every worker."""

from __future__ import annotations

from typing import Any


def register(sizeof: Any) -> None:
    """Tell Dask's ``sizeof``, which calls this when it is imported; kbitcupy is imported with the first such array."""

    def tell() -> None:
        from .array import QuantizedArray, weight

        sizeof.register(QuantizedArray, weight)

    sizeof.register_lazy("kbitcupy", tell)
