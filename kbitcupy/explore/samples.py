"""Seeded samples of the distributions that weights and activations resemble."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_OUTLIER_EVERY, _OUTLIER_FACTOR = 128, 20.0


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1)."""
    return generator.standard_normal(shape, np.float32)


def student_t(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 4 degrees of freedom: heavy tails."""
    return generator.standard_t(4, shape).astype(np.float32)


def laplace(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Laplace(0, 1): a sharp peak."""
    return generator.laplace(size=shape).astype(np.float32)


def outlier_channels(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) with every 128th channel (last axis) 20 times larger."""
    x = normal(generator, shape)
    x[..., ::_OUTLIER_EVERY] *= _OUTLIER_FACTOR
    return x


#: Distributions by name.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": normal,
    "Student-t, 4 df": student_t,
    "Laplace": laplace,
    "normal, outlier channels": outlier_channels,
}


#: Shape of a sample, unless another is asked for.
SHAPE = (1024, 1024)


def draw(name: str, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    """A float32 sample of one of `DISTRIBUTIONS`, the same on every call.

    Examples
    --------
    >>> from kbitcupy.explore.samples import draw
    >>> draw("Laplace", (2, 3)).shape
    (2, 3)
    """
    return DISTRIBUTIONS[name](np.random.default_rng(seed), shape)
