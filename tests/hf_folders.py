"""Folders as transformers writes them, with everything in them random."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def save_config(config, folder: Path, **changes) -> Path:
    """Writes the configuration as transformers 5 does, then applies changes to the JSON; "absent"
    takes a key out."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in written.items() if value != "absent"}))
    return folder


def random_model(config, std: float = 0.3):
    """transformers' model of a configuration; every parameter and router bias is random, norms are
    about one."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm.weight" in name else 0.0, std=std)
    return model


def in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 and the scale of each 128×128 block, as DeepSeek publishes V3; and what they stand for,
    block by block."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // 128) for size in weight.shape])
    means = torch.empty(weight.shape)
    for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scales[i, j] = weight[block].abs().max() / 448
        values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        means[block] = values[block].float() * scales[i, j]
    return values, scales, means
