"""llama.cpp itself, from the package xllamacpp, loads what is written here, and computes what was meant."""

import numpy as np
import pytest

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp, an oracle, is in the extra peers")

WIDTH, INNER, HEADS, HEADS_KV, LAYERS, VOCABULARY = 256, 512, 4, 2, 2, 320
PROMPT = [1, 70, 180, 300, 42, 42, 7]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
}


def model(seed=0):
    """A llama of random weights, as Hugging Face names them."""
    rng = np.random.default_rng(seed)
    narrow = WIDTH // HEADS * HEADS_KV
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "model.norm": (WIDTH,), "lm_head": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        parts = {"q_proj": (WIDTH, WIDTH), "k_proj": (narrow, WIDTH), "v_proj": (narrow, WIDTH)}
        parts = {f"self_attn.{name}": shape for name, shape in (parts | {"o_proj": (WIDTH, WIDTH)}).items()}
        parts |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
        parts |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape) * 0.1 if len(shape) > 1 else 1 + rng.random(shape)
        weights[f"{name}.weight"] = x.astype(np.float32)
    return weights


def log_probabilities(weights, tokens):
    """Of the token that follows, as Hugging Face's model computes them, in float64."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    count, d = len(tokens), WIDTH // HEADS
    angles = np.arange(count)[:, None] / 10000.0 ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def rotated(x):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm")
        q, k, v = ((y @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(count, -1, d) for n in "qkv")
        q, k, v = rotated(q), np.repeat(rotated(k), HEADS // HEADS_KV, 1), np.repeat(v, HEADS // HEADS_KV, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d) + np.triu(np.full((count, count), -np.inf), 1)
        y = np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(count, -1)
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm")
        gate, up = (y @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return np.log(softmax(norm(x[-1], "model.norm") @ w["lm_head.weight"].T))


def tokenizer():
    """Metadata of a tokenizer that has each byte, as llama.cpp's server wants one."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [chr(0x100 + i) for i in range(VOCABULARY - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(VOCABULARY, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def ask(path):
    """The logarithms of the probabilities of all tokens that may follow `PROMPT`, as llama.cpp computes them."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1
    server = xllamacpp.Server(params)
    question = {"prompt": PROMPT, "n_predict": 1, "n_probs": VOCABULARY, "temperature": -1, "cache_prompt": False}
    (answer,) = server.handle_completions(question)["choices"]
    found = {one["id"]: one["logprob"] for one in answer["logprobs"]["content"][0]["top_logprobs"]}
    assert len(found) == VOCABULARY
    return np.array([found[token] for token in range(VOCABULARY)])
