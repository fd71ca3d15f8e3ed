"""A format that is not in the package."""

import numpy as np

from kbitcupy.formats.base import Format, Plane


class Toy(Format):
    """One bit an element and the mean magnitude of 16 of them: a whole format in one place."""

    name, bits, block = "toy", 1, 16
    origin, summary = "this test", "signs"

    def __init__(self, *, boost: float = 1.0):
        self.boost = boost

    @classmethod
    def samples(cls):
        return {}, {"boost": 1.5}

    def options(self):
        return {"boost": self.boost}

    def planes(self, shape):
        blocks = -(-int(np.prod(shape, dtype=int)) // 16)
        return {"sign": Plane("uint8", (blocks * 2,), per=2), "mean": Plane("float32", (blocks,))}

    def encode_numpy(self, x, planes, given):
        rows = np.zeros((planes["mean"].size, 16), np.float32)
        rows.reshape(-1)[: x.size] = x.reshape(-1)
        with np.errstate(all="ignore"):
            planes["mean"][:] = np.abs(rows).mean(1) * np.float32(self.boost)
        planes["sign"][:] = np.packbits(rows < 0, axis=1).reshape(-1)

    def decode_numpy(self, planes, out):
        signs = np.unpackbits(planes["sign"]).reshape(-1, 16)
        with np.errstate(all="ignore"):
            values = (1 - 2 * signs.astype(np.float32)) * planes["mean"][:, None]
            out.reshape(-1)[:] = values.reshape(-1)[: out.size]
