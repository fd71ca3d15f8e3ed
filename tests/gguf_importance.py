"""Importance of columns for tests of GGUF's types."""

import numpy as np

IMPORTANCES = ["ones", "uniform", "cubes", "gaps", "wide"]


def importance(kind, columns, seed=0):
    """float32[columns] of one kind."""
    rng = np.random.default_rng([seed, IMPORTANCES.index(kind)])
    if kind == "ones":
        v = np.ones(columns)
    elif kind == "uniform":
        v = rng.random(columns)
    elif kind == "cubes":
        v = rng.exponential(1, columns) ** 3
    elif kind == "gaps":
        v = rng.random(columns) * (rng.random(columns) < 0.3)
    else:
        v = np.exp2(rng.uniform(-20, 20, columns))
    return v.astype(np.float32)
