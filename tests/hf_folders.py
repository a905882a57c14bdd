"""Folders as transformers writes them, with everything in them random."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def save_config(config, folder: Path, **changes) -> Path:
    """Writes the configuration as transformers 5 does, then applies changes to the JSON; "absent" takes a key out."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in written.items() if value != "absent"}))
    return folder


def random_model(config, std: float = 0.3):
    """transformers' model of a configuration; every parameter and router bias is random, norms are about one."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm.weight" in name else 0.0, std=std)
    return model
