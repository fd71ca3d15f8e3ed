"""Write what tests/io/test_io_compressed_tensors.py reads: matrices that compressed-tensors packed, as it stores them,
what it decodes them to, and the configurations that it and transformers write for a model.

    pip install '.[frameworks]' && python -W ignore tests/make_compressed_tensors_data.py tests/data

No GPU is needed. tests/data/README.md says which versions made the files in the repository.
"""

import json
import sys
from pathlib import Path

# name: (format of the file, bits, group or None for one scale a row, symmetric, dtype, shape)
CASES = {
    "int4_groups": ("pack-quantized", 4, 32, True, "bfloat16", (6, 96)),
    "int4_rows": ("pack-quantized", 4, None, True, "float32", (5, 33)),
    "int4_zero_points": ("pack-quantized", 4, 16, False, "bfloat16", (10, 48)),
    "int8_rows": ("pack-quantized", 8, None, True, "float16", (7, 30)),
    "int8_zero_points": ("pack-quantized", 8, 8, False, "float32", (9, 24)),
    "int8_plain": ("int-quantized", 8, None, True, "float32", (4, 12)),
    "int8_plain_zero_points": ("int-quantized", 8, None, False, "float32", (4, 12)),
    "int3_groups": ("pack-quantized", 3, 32, True, "float32", (4, 96)),  # a width that kbitcupy has no format for
}


def made(case, generator):
    """What is stored of a matrix, and what it is decoded to."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind, bits, group, symmetric, dtype, (rows, columns) = case
    weights = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
    count = columns // group if group else 1
    x = torch.randn(rows, columns, generator=generator).to(getattr(torch, dtype))
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    scale = (x.float().reshape(rows, count, -1).abs().amax(-1) / high).to(x.dtype)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    if not symmetric:
        zero = torch.randint(low, high + 1, zero.shape, generator=generator, dtype=torch.int8)
    state = {"weight": x, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(dict(state), scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    return {key: value.contiguous() for key, value in stored.items()}, decoded.contiguous()


def configurations():
    """What stands in ``config.json`` for a model, by the programs' own classes."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from transformers import BitsAndBytesConfig

    found = {}
    for name, bits, group in (("int4:block=128", 4, 128), ("int8:granularity=channel:0", 8, None)):
        strategy = "group" if group else "channel"
        weights = QuantizationArgs(num_bits=bits, symmetric=True, strategy=strategy, group_size=group)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            ignore=["lm_head"],
            quantization_status="compressed",
            format="pack-quantized",
        )
        found[f"compressed-tensors {name}"] = config.model_dump(mode="json")
    for name, options in (
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("fp4:double_quant=true", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
        ("int8:granularity=channel:0", {"load_in_8bit": True}),
    ):
        found[f"bitsandbytes {name}"] = BitsAndBytesConfig(llm_int8_skip_modules=["lm_head"], **options).to_dict()
    return found


def main(folder):
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    stored, decoded = {}, {}
    for name, case in CASES.items():
        tensors, decoded[f"{name}.weight"] = made(case, generator)
        stored.update((f"{name}.{key}", value) for key, value in tensors.items())
    save_file(stored, folder / "compressed_tensors_model.safetensors", {"format": "pt"})
    save_file(decoded, folder / "compressed_tensors_decoded.safetensors")
    (folder / "quantization_configs.json").write_text(json.dumps(configurations(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
