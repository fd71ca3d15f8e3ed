"""Write the frozen bytes of bitsandbytes that tests/io/test_io_bitsandbytes.py and others read.

    pip install '.[oracle]' && python tests/make_bitsandbytes_data.py tests/data

It needs a GPU: the CUDA kernels of bitsandbytes are the contract, and its CPU code differs from them. Two files of
results and one checkpoint come out; tests/data/README.md says which versions made the ones in the repository.
"""

import sys
from pathlib import Path

import numpy as np

# As the kernels of bitsandbytes have them; NF4 decides at the float32 midpoints, or at the next float32 to one.
FP4_THRESHOLDS = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)
TYPES = ("nf4", "fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SIZES = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 4095, 4097)
DTYPES = ("float16", "bfloat16", "float32")


def neighbours(values):
    """The float32 values, what is next below and above them, and one further."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.int32)
    return np.concatenate([(bits + step).view(np.float32) for step in (-2, -1, 0, 1, 2)])


def at_absmax_one(values, block):
    """Rows of one block each: 1.0, then up to block - 1 of the values; zeros fill the last."""
    values = np.asarray(values, np.float32)
    rows = -(-values.size // (block - 1))
    out = np.zeros((rows, block), np.float32)
    out[:, 0] = 1
    out[:, 1:].flat[: values.size] = values
    return out.ravel()


def half_values(dtype):
    """Every finite value of a two-byte dtype in [-1, 1], -0.0 and NaN among them, in rows that begin with 1."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float16":
        values = bits.view(np.float16).astype(np.float32)
    else:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return at_absmax_one(values[np.isnan(values) | (np.abs(values) <= 1)], 64)


def special_rows(block):
    """Blocks of everything out of the ordinary."""
    ramp = np.linspace(-1, 1, block, dtype=np.float32)
    rows = [np.zeros(block), np.full(block, -0.0), np.full(block, np.nan), -ramp, np.where(ramp < 0, np.nan, ramp)]
    rows += [np.where(ramp == ramp[place], value, ramp) for place in (1, block - 1) for value in (np.inf, -np.inf)]
    rows += [np.full(block, value) for value in (0.3, -0.3, np.inf, -np.inf)]
    exponents = (-149, -148, -140, -130, -129, -128, -127, -126, -125, -100, -24, -14, 100, 125, 126, 127)
    with np.errstate(over="ignore"):
        rows += [np.ldexp(ramp * scale, exponent) for exponent in exponents for scale in (1, 1.5)]
        rows.append(ramp * np.finfo(np.float32).max)
    rows.append(np.where(np.arange(block) == 5, 1, ramp * np.float32(2.0**-130)))  # subnormals beside 1
    return np.concatenate(rows).astype(np.float32)


def host(tensor):
    """Tensor to NumPy; bfloat16 as its bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def codes():
    """Results of bitsandbytes.functional, by name; inputs that are no formula of this file are among them."""
    import torch
    from bitsandbytes import functional

    out = {}
    sample = np.random.default_rng(5).standard_normal(2 * 4096 + 37).astype(np.float32)
    sample *= np.exp(np.random.default_rng(6).standard_normal(sample.size // 32 + 1).repeat(32)[: sample.size] * 0.5)
    out["sample"] = sample
    dynamic = functional.create_dynamic_map().numpy()
    out["dynamic_map"] = dynamic

    def device(x, dtype):
        return torch.from_numpy(np.ascontiguousarray(x, np.float32)).cuda().to(getattr(torch, dtype))

    def four(name, x, dtype, kind, block, nested=False, decoded=True):
        packed, state = functional.quantize_4bit(
            device(x, dtype), blocksize=block, quant_type=kind, compress_statistics=nested
        )
        torch.cuda.synchronize()
        out[f"{name}.packed"] = host(packed).ravel()
        out[f"{name}.absmax"] = host(state.absmax)
        if nested:
            out[f"{name}.offset"] = host(state.offset).reshape(1)
            out[f"{name}.nested_absmax"] = host(state.state2.absmax)
        if decoded:
            out[f"{name}.decoded"] = host(functional.dequantize_4bit(packed, state)).ravel()
        return state

    def eight(name, x, dtype, block, decoded=True):
        codes, state = functional.quantize_blockwise(device(x, dtype), blocksize=block)
        torch.cuda.synchronize()
        out[f"{name}.codes"] = host(codes)
        out[f"{name}.absmax"] = host(state.absmax)
        if decoded:
            out[f"{name}.decoded"] = host(functional.dequantize_blockwise(codes, state))

    for kind in TYPES:
        table = functional.get_4bit_type(kind).cpu().numpy()
        out[f"{kind}.map"] = table
        if kind == "nf4":
            thresholds = (table[1:] + table[:-1]) * np.float32(0.5)
        else:
            thresholds = np.array([sign * t for t in FP4_THRESHOLDS for sign in (1, -1)], np.float32)
        x = at_absmax_one(np.concatenate([neighbours(thresholds), table, [0.0, -0.0, np.nan]]), 64)
        out[f"{kind}.thresholds.input"] = x
        four(f"{kind}.thresholds", x, "float32", kind, 64)
        for dtype in ("float16", "bfloat16"):
            four(f"{kind}.every.{dtype}", half_values(dtype), dtype, kind, 64, decoded=False)
        for block in (32, 64):
            for dtype in DTYPES:
                four(f"{kind}.special.{dtype}.{block}", special_rows(block), dtype, kind, block, decoded=block == 64)
        for dtype in DTYPES:
            for block in BLOCKS:
                x = sample if block in (32, 4096) else sample[: 5 * block + 21]
                four(f"{kind}.{dtype}.{block}", x, dtype, kind, block, decoded=block == 64)
                four(f"{kind}.nested.{dtype}.{block}", x, dtype, kind, block, nested=True, decoded=block == 64)
        for size in SIZES:
            for block in (32, 64, 4096):
                four(f"{kind}.size.{size}.{block}", sample[:size], "float32", kind, block, decoded=False)
        four(f"{kind}.nested.constant", np.full(640, 0.3), "float32", kind, 64, nested=True)

    with np.errstate(invalid="ignore"):
        midpoints = (dynamic[1:] + dynamic[:-1]) * np.float32(0.5)
    x = at_absmax_one(np.concatenate([neighbours(midpoints), dynamic, [0.0, -0.0, np.nan, -1.0]]), 256)
    out["dynamic8.thresholds.input"] = x
    eight("dynamic8.thresholds", x, "float32", 256)
    for dtype in ("float16", "bfloat16"):
        eight(f"dynamic8.every.{dtype}", half_values(dtype), dtype, 64, decoded=False)
    for dtype in DTYPES:
        eight(f"dynamic8.special.{dtype}.64", special_rows(64), dtype, 64)
        for block in BLOCKS[1:]:
            eight(f"dynamic8.{dtype}.{block}", sample[: min(5 * block + 21, sample.size)], dtype, block, block == 64)
    for size in SIZES:
        eight(f"dynamic8.size.{size}", sample[:size], "float32", 256, decoded=False)
    return out


def checkpoint():
    """State dict of a small model in bitsandbytes' layers, and what its weights decode to."""
    import torch
    from bitsandbytes import functional, nn

    torch.manual_seed(3)

    def four(rows, columns, dtype, kind, nested, bias=True, storage=torch.uint8):
        layer = nn.Linear4bit(
            columns, rows, bias=bias, compress_statistics=nested, quant_type=kind, quant_storage=storage
        )
        return layer.to(dtype)

    model = torch.nn.ModuleDict(
        {
            "up": four(136, 128, torch.bfloat16, "nf4", nested=True),
            "down": four(40, 136, torch.float16, "fp4", nested=False),
            "fsdp": four(16, 40, torch.bfloat16, "nf4", nested=True, storage=torch.bfloat16),
            "fsdp16": four(16, 40, torch.float16, "fp4", nested=False, storage=torch.float16),
            "fsdp32": four(16, 40, torch.float32, "nf4", nested=False, storage=torch.float32),
            "odd": four(7, 9, torch.float32, "nf4", nested=False, bias=False),
            "head": nn.Linear8bitLt(40, 24, has_fp16_weights=False).half(),
            "norm": torch.nn.LayerNorm(24),
        }
    ).cuda()
    state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    decoded = {}
    for name, layer in model.items():
        if isinstance(layer, nn.Linear4bit):
            decoded[f"{name}.weight"] = functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
        elif isinstance(layer, nn.Linear8bitLt):
            weight = layer.weight
            decoded[f"{name}.weight"] = functional.int8_vectorwise_dequant(weight.CB, weight.SCB)
    return state, {name: tensor.detach().cpu().contiguous() for name, tensor in decoded.items()}


def main(folder):
    """Write the three files into a folder."""
    import bitsandbytes
    import safetensors.torch
    import torch

    folder = Path(folder)
    versions = {
        "bitsandbytes": bitsandbytes.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    np.savez_compressed(folder / "bitsandbytes_codes.npz", **codes())
    state, decoded = checkpoint()
    safetensors.torch.save_file(state, folder / "bitsandbytes_model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(decoded, folder / "bitsandbytes_decoded.safetensors", metadata=versions)
    print(versions)


if __name__ == "__main__":
    main(sys.argv[1])
