"""Make tests/data/peft: an adapter as PEFT writes it, and what PEFT computes with it.

    pip install peft==0.21.2
    python tests/make_peft_data.py

Two linear layers (one of them with a rank, an alpha and a name that ends as the other's), rank-stabilized, with
dropout, which is off in the forward.
"""

import json
import shutil
import tempfile
from pathlib import Path

TARGET = Path(__file__).resolve().parent / "data" / "peft"


def main():
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(24, 40)
            self.v_proj = torch.nn.Linear(40, 16, bias=False)

        def forward(self, x):
            return self.v_proj(self.q_proj(x))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer())
    tensors = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.25,
        use_rslora=True,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"0.v_proj": 3},
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(5, 24)
    adapted.eval()
    tensors.update(x=x, y=adapted(x).detach())
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        shutil.copy(Path(folder) / "adapter_model.safetensors", TARGET)
        fields = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    fields["target_modules"].sort()  # a set's order
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (TARGET / "adapter_config.json").write_text(text, encoding="utf-8")
    save_file(tensors, TARGET / "forward.safetensors")


if __name__ == "__main__":
    main()
