"""Write tests/data/gguf_py.gguf and tests/data/llama_quantize.gguf, files that others have written.

``python tests/make_gguf_files.py llama.cpp`` (see `make_llama_quantize_data`), with the package gguf. The first is
written by gguf-py: keys of every type, plain tensors of every dtype, and two rows of two blocks of random bytes of
every type of blocks. The second is what llama-quantize makes of a model of two layers of tiny matrices, by Q4_K_M.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf_files import TYPES

DATA = Path(__file__).parent / "data"
VALUES = {
    "UINT8": 200,
    "INT8": -100,
    "UINT16": 65000,
    "INT16": -32000,
    "UINT32": 4000000000,
    "INT32": -2000000000,
    "FLOAT32": 0.1,
    "BOOL": True,
    "STRING": "Größe 7 ☃",
    "UINT64": 2**64 - 2,
    "INT64": -(2**63),
    "FLOAT64": 0.1,
}


def write_gguf_py(path):
    """Everything that gguf-py writes."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in VALUES.items():
        kind = gguf.GGUFValueType[name]
        writer.add_key_value(f"one.{name}", value, kind)
        writer.add_key_value(f"many.{name}", [value] * 3, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_quantization_version(2)
    writer.add_file_type(1024)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64"):
        writer.add_tensor(name, (rng.standard_normal((3, 5)) * 100).astype(name))
    writer.add_tensor("bfloat16", rng.integers(0, 256, (3, 10), np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name.upper()]
        raw = rng.integers(0, 256, (2, 2 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama_quantize(path, sources):
    """What llama-quantize makes of a tiny model."""
    import gguf
    from make_llama_quantize_data import LlamaQuantize

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        writer = gguf.GGUFWriter(whole, "llama")
        writer.add_name("tiny")
        writer.add_block_count(2)
        writer.add_context_length(128)
        writer.add_embedding_length(256)
        writer.add_feed_forward_length(256)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_vocab_size(4)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_file_type(1)
        writer.add_tokenizer_model("no_vocab")
        writer.add_array("tokens", ["<s>", "süß", "", "☃"])
        writer.add_tensor("output.weight", rng.standard_normal((4, 256)).astype(np.float16))
        writer.add_tensor("token_embd.weight", rng.standard_normal((4, 256)).astype(np.float16))
        writer.add_tensor("output_norm.weight", rng.standard_normal(256).astype(np.float32))
        for layer in range(2):
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal(256).astype(np.float32))
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal((2, 256)).astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        LlamaQuantize(sources).quantize(whole, path, gguf.LlamaFileType.MOSTLY_Q4_K_M)


if __name__ == "__main__":
    write_gguf_py(DATA / "gguf_py.gguf")
    write_llama_quantize(DATA / "llama_quantize.gguf", sys.argv[1])
