"""Planes of GGUF's types for tests of products."""

import numpy as np
from host.compiled import random_plane


def planes_of(format, shape, seed=0):
    """Planes of random bytes, whose scales are finite and of ordinary size."""
    rng, planes = np.random.default_rng([seed, *shape]), {}
    for name, spec in format.planes(shape).items():
        plane = random_plane(rng, spec)
        if plane.dtype in (np.float16, np.float32):
            plane = (rng.random(plane.shape) * 0.02 + 0.001).astype(plane.dtype)
        elif format.name == "mxfp4" and name == "scales":
            plane = plane % 8 + np.uint8(118)
        elif format.name == "nvfp4" and name == "scales":
            plane = plane % np.uint8(100)
        elif format.name == "iq1_m" and name == "scales":  # four bits of d in each of four words
            words = plane.view(np.uint16).reshape(-1, 4) & 0xFFF
            d = (rng.random(len(words)) * 0.02 + 0.001).astype(np.float16).view(np.uint16)
            plane = (
                (words | (d[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12).astype("<u2").view(np.uint8)
            )
        planes[name] = np.ascontiguousarray(plane.reshape(spec.shape))
    return planes
