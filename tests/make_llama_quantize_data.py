"""Write tests/data/llama_quantize.json: which types llama-quantize gives the tensors of some models.

``python tests/make_llama_quantize_data.py llama.cpp``, where the folder holds llama.cpp's sources as they are in the
source distribution of the installed xllamacpp (``pip download --no-deps --no-binary xllamacpp xllamacpp``, then its
``thirdparty/llama.cpp``), with the package gguf and g++. xllamacpp is compiled without llama-quant.cpp: that file
alone is compiled here, with a function of ours that asks it, and linked with what xllamacpp has.

``types`` are letters for types, ``-`` for a tensor that stays as it is. ``models`` holds for each model its
``architecture`` and metadata, ``top`` and ``blocks`` with the shapes of tensors (rows first, those of ``blocks`` once
for each layer), and ``recipes``: by recipe (with ``+importance`` behind it where an importance matrix changes anything)
a word for each tensor of ``top`` and ``blocks``, which is one letter, or one for each layer where they differ.
``files`` holds by recipe the sha256 of the file that llama-quantize makes of `write_small`'s model.
"""

import ctypes
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).parent / "data" / "llama_quantize.json"

SHIM = r"""
#include "llama-quant.cpp"

// A line "name type" for each tensor of a file, "-" for one that is not quantized.
extern "C" int types_of(const char * path, int ftype, int has_imatrix, char * out, int room) {
    try {
        llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype = (llama_ftype) ftype;
        std::vector<std::string> splits;
        llama_model_loader loader(nullptr, nullptr, nullptr, path, splits, nullptr, LLAMA_LOAD_MODE_MMAP, false, true,
                                  true, nullptr, nullptr);
        std::unique_ptr<llama_model> owner(llama_model_create(loader, llama_model_default_params()));
        auto & model = dynamic_cast<llama_model_base &>(*owner);
        model.load_hparams(loader);
        quantize_state_impl state(model, &params);
        state.has_imatrix = has_imatrix;
        std::vector<tensor_metadata> about;
        for (const auto & weight : loader.weights_map) {
            about.emplace_back();
            about.back().name = weight.first;
        }
        init_quantize_state_counters(state, about);
        std::string text;
        size_t i = 0;
        for (const auto & weight : loader.weights_map) {
            const ggml_tensor * tensor = weight.second.tensor;
            const bool allowed = tensor_allows_quantization(&params, model.arch, tensor);
            const ggml_type own = llama_ftype_get_default_type(params.ftype);
            const ggml_type type = llama_tensor_get_type(state, &params, tensor, own, about[i++]);
            text += weight.first + " " + (allowed ? ggml_type_name(type) : "-") + "\n";
        }
        return snprintf(out, room, "%s", text.c_str());
    } catch (const std::exception & error) {
        snprintf(out, room, "%s", error.what());
        return -1;
    }
}

// llama-quantize itself.
extern "C" int quantize(const char * in, const char * out, int ftype, int count, const char ** names,
                        const float ** data, const size_t * sizes) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (llama_ftype) ftype;
    params.nthread = 1;
    std::vector<llama_model_imatrix_data> importance;
    for (int i = 0; i < count; ++i) importance.push_back({names[i], data[i], sizes[i]});
    importance.push_back({nullptr, nullptr, 0});
    if (count) params.imatrix = importance.data();
    return (int) llama_model_quantize(in, out, &params);
}
"""


class LlamaQuantize:
    """llama-quantize, compiled from a folder with llama.cpp's sources."""

    def __init__(self, sources):
        import xllamacpp  # its functions are what the compiled file needs

        package = ctypes.CDLL(xllamacpp.xllamacpp.__file__, mode=ctypes.RTLD_GLOBAL)
        silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._silent = silent(lambda level, text, data: None)
        package.llama_log_set(self._silent, None)
        with tempfile.TemporaryDirectory() as folder:
            shim, library = Path(folder) / "shim.cpp", Path(folder) / "shim.so"
            shim.write_text(SHIM)
            includes = [f"-I{Path(sources) / part}" for part in ("src", "include", "ggml/include", "ggml/src")]
            # Wheels of manylinux2014 have the C++ library's older strings.
            flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=0"]
            subprocess.run(["g++", *flags, *includes, str(shim), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))

    def types(self, path, file_type, importance=False):
        """Types by tensor, in llama.cpp's order."""
        text = ctypes.create_string_buffer(1 << 20)
        if self._library.types_of(os.fsencode(path), file_type, int(importance), text, len(text)) < 0:
            raise ValueError(text.value.decode())
        return dict(line.rsplit(" ", 1) for line in text.value.decode().splitlines())

    def quantize(self, source, target, file_type, importance=None):
        """Quantize a file; `importance` has float32 arrays by tensor."""
        importance = importance or {}
        count = len(importance)
        names = (ctypes.c_char_p * count)(*(name.encode() for name in importance))
        data = (ctypes.c_void_p * count)(*(v.ctypes.data for v in importance.values()))
        sizes = (ctypes.c_size_t * count)(*(v.size for v in importance.values()))
        if self._library.quantize(os.fsencode(source), os.fsencode(target), file_type, count, names, data, sizes):
            raise ValueError(f"{source}: llama-quantize failed")


# ---- models ----------------------------------------------------------------------------------------------------------


def dense(layers, width, inner, heads, heads_kv, vocabulary, tied=False, architecture="llama"):
    """The tensors of a model without experts."""
    narrow = width // heads * heads_kv
    blocks = {
        "attn_norm.weight": [width],
        "attn_q.weight": [width, width],
        "attn_k.weight": [narrow, width],
        "attn_v.weight": [narrow, width],
        "attn_output.weight": [width, width],
        "ffn_norm.weight": [width],
        "ffn_gate.weight": [inner, width],
        "ffn_up.weight": [inner, width],
        "ffn_down.weight": [width, inner],
    }
    top = {"token_embd.weight": [vocabulary, width], "output_norm.weight": [width]}
    if not tied:
        top["output.weight"] = [vocabulary, width]
    metadata = {"block_count": layers, "attention.head_count": heads, "attention.head_count_kv": heads_kv}
    return {"architecture": architecture, "metadata": metadata, "top": top, "blocks": blocks}


def of_experts(layers, width, inner, heads, heads_kv, vocabulary, experts, shared=0):
    """The tensors of a model of experts."""
    model = dense(layers, width, inner, heads, heads_kv, vocabulary)
    model["metadata"] |= {"expert_count": experts}
    blocks = {name: shape for name, shape in model["blocks"].items() if not name.startswith(("ffn_gate", "ffn_up"))}
    del blocks["ffn_down.weight"]
    for name in ("gate", "up", "down"):
        shape = [width, inner] if name == "down" else [inner, width]
        blocks[f"ffn_{name}_exps.weight"] = [experts, *shape]
        if shared:
            blocks[f"ffn_{name}_shexp.weight"] = [width, shared] if name == "down" else [shared, width]
    model["blocks"] = {**blocks, "ffn_gate_inp.weight": [experts, width]}
    return model


def special():
    """Names that are looked for, whatever the model."""
    model = dense(10, 512, 1024, 8, 4, 1024)
    top = "position_embd token_types per_layer_token_embd per_layer_model_proj a.rvq.codebook mm.a.code_embd cls"
    top += " v.patch_embd v.position_embd mm.patch_merger sam.neck.0 sam.net_2 sam.pos_embd x.rel_pos altup_proj"
    blocks = "ffn_gate_inp ffn_gate_tid2eid laurel_l altup_router ssm_conv1d ssm_in shortconv.conv shortconv.in_proj"
    blocks += " indexer.k_proj indexer.q_proj attn_rel_b attn_q_norm attn_kv_b attn_q_a post_ffw_norm"
    parts = "first decay w0 w1 w2 v0 v1 v2 a0 a1 a2 g1 g2 decay_w1 decay_w2 lerp_fused key"
    blocks += "".join(f" time_mix_{part}" for part in parts.split())
    model["top"] |= {f"{name}.weight": [64, 512] for name in top.split()}
    model["top"] |= {"rope_freqs.weight": [32], "one_row.weight": [1, 512], "one_column.weight": [512, 1]}
    model["top"] |= {"stack.weight": [3, 64, 512], "some.weights": [64, 512], "token_embd.bias": [512, 512]}
    model["blocks"] |= {f"{name}.weight": [64, 512] for name in blocks.split()}
    return model


def models():
    """All models by name."""
    falcon = dense(18, 1024, 4096, 16, 1, 6500, architecture="falcon")
    left_out = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_norm.weight")
    blocks = {name: shape for name, shape in falcon["blocks"].items() if name not in left_out}
    falcon["blocks"] = {**blocks, "attn_norm.bias": [1024], "attn_qkv.weight": [1152, 1024]}
    bitnet = dense(26, 3200, 8640, 32, 32, 32002, tied=True, architecture="bitnet")
    bitnet["blocks"] |= {"attn_sub_norm.weight": [3200], "ffn_sub_norm.weight": [8640]}
    return {
        "llama 3 8B": dense(32, 4096, 14336, 32, 8, 128256),
        "llama 3.2 1B": dense(16, 2048, 8192, 32, 8, 128256, tied=True),
        "llama 2 70B": dense(80, 8192, 28672, 64, 8, 32000),
        "llama 65B": dense(80, 8192, 22016, 64, 64, 32000),
        "qwen 2 72B": dense(80, 8192, 29568, 64, 8, 152064, architecture="qwen2"),
        "mixtral 8x7B": of_experts(32, 4096, 14336, 32, 8, 32000, 8),
        "four experts": of_experts(12, 512, 1024, 8, 8, 1024, 4, shared=256),
        "smollm 135M": dense(30, 576, 1536, 9, 3, 49152, tied=True),
        "bitnet 3B": bitnet,
        "falcon": falcon,
        "two layers": dense(2, 256, 512, 4, 4, 320),
        "one layer": dense(1, 512, 768, 8, 2, 256, tied=True),
        "rows of 80": dense(3, 80, 288, 4, 2, 100),
        "rows of 96": dense(3, 96, 160, 4, 2, 100, tied=True),
        "special names": special(),
    }


def names_of(model):
    """The tensors of a model: their names, shapes, names without a layer, and layers (None for those of none)."""
    for name, shape in model["top"].items():
        yield name, shape, name, None
    for layer in range(model["metadata"]["block_count"]):
        for name, shape in model["blocks"].items():
            yield f"blk.{layer}.{name}", shape, name, layer


def write_empty(path, model):
    """A GGUF file with these tensors in float32, all of them holes."""
    import gguf
    import numpy as np

    architecture = model["architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    vocabulary, width = model["top"]["token_embd.weight"]
    numbers = {"context_length": 512, "embedding_length": width, "feed_forward_length": 1024, "vocab_size": vocabulary}
    if "expert_count" in model["metadata"]:
        numbers["expert_used_count"] = 2
    for key, number in {**numbers, **model["metadata"]}.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        writer.add_float32(f"{architecture}.{key}", 1e-5)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    nbytes = 0
    for name, shape, _, _ in names_of(model):
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) * 4)
        nbytes += -(-math.prod(shape) * 4 // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-os.path.getsize(path) // 32) * 32 + nbytes)


def write_small(folder):
    """A small model with values, and an importance matrix of it: the paths of both."""
    import numpy as np

    import kbitcupy as kb

    rng = np.random.default_rng(0)
    model = dense(1, 256, 288, 4, 2, 32)
    architecture = model["architecture"]
    tensors = {}
    for name, shape, _, _ in names_of(model):
        tensors[name] = (rng.integers(-999, 1000, (3, *shape)).sum(0) / 4096).astype(np.float32)
    numbers = {"context_length": 512, "embedding_length": 256, "feed_forward_length": 288, "vocab_size": 32}
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": number for key, number in {**numbers, **model["metadata"]}.items()}
    metadata |= {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "no_vocab"}
    kb.io.save(f"{folder}/model.gguf", tensors, metadata)
    given = {}
    for name, x in tensors.items():
        if x.ndim == 2 and "token_embd" not in name:
            given[f"{name}.in_sum2"] = rng.integers(1, 1000, (1, x.shape[1])).astype(np.float32)
            given[f"{name}.counts"] = np.full((1, 1), 64, np.float32)
    kb.io.save(f"{folder}/imatrix.gguf", given, {"general.type": "imatrix"})
    return f"{folder}/model.gguf", f"{folder}/imatrix.gguf"


# ---- the file --------------------------------------------------------------------------------------------------------

LETTERS = {
    "-": "-",
    "f32": "F",
    "f16": "H",
    "bf16": "B",
    "q4_0": "4",
    "q4_1": "a",
    "q5_0": "5",
    "q5_1": "b",
    "q8_0": "8",
    "q2_K": "2",
    "q3_K": "3",
    "q4_K": "k",
    "q5_K": "l",
    "q6_K": "6",
    "iq4_nl": "n",
    "iq4_xs": "x",
    "tq1_0": "t",
    "tq2_0": "u",
    "mxfp4": "m",
}


def letters(model, types):
    """A recipe as the file has it."""
    found = {}
    for name, _, short, layer in names_of(model):
        letter = LETTERS[types[name]]
        found[short] = letter if layer is None else found.get(short, "") + letter
    return " ".join(text[0] if len(set(text)) == 1 else text for text in found.values())


def files(oracle):
    """What llama-quantize makes of the small model, by recipe."""
    from kbitcupy.io.importance import read_importance
    from kbitcupy.io.recipes import RECIPES

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source, importance = write_small(folder)
        for recipe, about in RECIPES.items():
            for suffix, given in (("", None), ("+importance", read_importance(importance))):
                if about.needs_importance and given is None:
                    continue
                oracle.quantize(source, f"{folder}/target.gguf", about.file_type, given)
                found[recipe + suffix] = hashlib.sha256(Path(f"{folder}/target.gguf").read_bytes()).hexdigest()
    return found


def main(sources):
    from kbitcupy.io.recipes import RECIPES

    oracle = LlamaQuantize(sources)
    written = {}
    for name, model in models().items():
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.gguf"
            write_empty(path, model)
            recipes = {}
            for recipe, about in RECIPES.items():
                if name == "special names" and recipe not in ("q4_k_m", "tq2_0", "mxfp4_moe", "f16"):
                    continue
                recipes[recipe] = letters(model, oracle.types(path, about.file_type))
                other = letters(model, oracle.types(path, about.file_type, importance=True))
                if other != recipes[recipe]:
                    recipes[f"{recipe}+importance"] = other
            assert list(oracle.types(path, 0)) == sorted(oracle.types(path, 0), key=_order)
        written[name] = {**model, "recipes": recipes}
    types = {letter: name.lower() for name, letter in LETTERS.items() if letter != "-"}
    lines = [f" {json.dumps(name)}: {json.dumps(model)}" for name, model in written.items()]
    about = "llama.cpp b11549 (MIT), as xllamacpp 2026.10.11549 has it; written by tests/make_llama_quantize_data.py"
    head = f'{{"origin": {json.dumps(about)},\n"types": {json.dumps(types)},\n"models": {{\n'
    FILE.write_text(head + ",\n".join(lines) + f'\n}},\n"files": {json.dumps(files(oracle))}}}\n')


def _order(name):
    from kbitcupy.io.recipes import order

    return order(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
