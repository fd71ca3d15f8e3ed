"""Write ``data/bitnet_transformers.npz``: what transformers makes of a BitNet's layer, and computes with it.

Run with transformers and PyTorch installed; its numbers are from transformers 5.23.0 and PyTorch 2.13.0 on a CPU.
"""

import os
from pathlib import Path

import numpy as np

ROWS, COLUMNS, TOKENS = 24, 256, 6


def main():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the rule as it is written
    import torch
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant, pack_weights

    rng = np.random.default_rng(18)
    weight = torch.from_numpy((rng.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32))
    x = rng.standard_normal((TOKENS, COLUMNS)) * np.array([[1], [1e-3], [40], [1], [1e-7], [0]])
    x = torch.from_numpy(x.astype(np.float32))
    mean = weight.abs().mean().clamp(min=1e-5)
    trits = (weight * (1 / mean)).round().clamp(-1, 1)
    packed = pack_weights(trits.clone())  # adds one to what it is given
    divides = BitLinear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
    divides.weight, divides.weight_scale = packed, (1 / mean).reshape(1)
    multiplies = AutoBitLinear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
    multiplies.weight = torch.nn.Parameter(trits)
    multiplies.weight_scale = mean.reshape(1)
    with torch.no_grad():
        arrays = {
            "weight": weight,
            "x": x,
            "packed": packed,
            "trits": trits.to(torch.int8),
            "divides": divides.weight_scale,
            "multiplies": multiplies.weight_scale,
            "online": WeightQuant.apply(weight),
            "divides_y": divides(x),
            "multiplies_y": multiplies(x),
        }
    target = Path(__file__).parent / "data" / "bitnet_transformers.npz"
    np.savez_compressed(target, **{name: array.numpy() for name, array in arrays.items()})


if __name__ == "__main__":
    main()
