"""Convert checkpoints from and to Hugging Face folders, with one tensor in memory at a time.

    python tools/convert.py from-hf --hf DIR --out CHECKPOINTS [--mtp]
    python tools/convert.py to-hf --checkpoint CHECKPOINTS --out DIR [--dtype bf16] [--tokenizer FILE_OR_DIR]
    python tools/convert.py upcycle --checkpoint CHECKPOINTS --out MORE_CHECKPOINTS --num-experts 8 --top-k 2

from-hf writes CHECKPOINTS/step-00000000 with the weights and the configuration, for logits.py, generate.py and to-hf;
to continue training from a Hugging Face folder, pretrain.py reads it itself: model.from_hf=DIR init.from_hf=DIR.
to-hf and upcycle take the newest whole checkpoint of a directory, or the one that is named, saved on any layout.
upcycle writes a mixture of experts that computes what the dense model does (docs/experts.md); train it with
init.from_checkpoint=MORE_CHECKPOINTS and the architecture that it prints.
Families: Llama, Mistral, Phi-3 (read only), Qwen2, Qwen3, GPT-2, Mixtral, Qwen3-MoE, DeepSeek-V2 and V3.
Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import print_anywhere


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    dtype: dict[str, Any] = {
        "choices": ["fp64", "fp32", "bf16"],
        "help": "of the written weights (default: as they are stored)",
    }
    read = commands.add_parser("from-hf", help="a Hugging Face folder becomes a checkpoint of ours")
    read.add_argument("--hf", type=Path, required=True, metavar="DIR", help="config.json and safetensors files")
    read.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet"
    )
    read.add_argument("--dtype", **dtype)
    read.add_argument("--mtp", action="store_true", help="DeepSeek-V3: its multi-token prediction layers too")
    write = commands.add_parser("to-hf", help="a checkpoint of ours becomes a Hugging Face folder")
    write.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint, or a directory of them"
    )
    write.add_argument("--out", type=Path, required=True, metavar="DIR", help="without safetensors files yet")
    write.add_argument("--dtype", **dtype | {"help": f"{dtype['help']}; of a run in bf16, fp32 writes the masters"})
    write.add_argument("--tokenizer", type=Path, metavar="PATH", help="file or folder to put beside the weights "
                       "(default: the run's data.tokenizer)")  # fmt: skip
    write.add_argument("--max-shard-gb", type=_amount, default=5.0, metavar="GB", help="10^9 bytes a file (default 5)")
    _add_upcycle(commands.add_parser("upcycle", help="a dense checkpoint becomes a mixture of experts"))
    return parser.parse_args(argv)


def _amount(text: str) -> float:
    """A number above 0."""
    amount = float(text)
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no amount above 0")
    return amount


def _noise(text: str) -> float:
    """A number that is not below 0."""
    return 0.0 if float(text) == 0 else _amount(text)


def _add_upcycle(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint, or a directory of them")
    add("--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet")
    add("--num-experts", type=int, required=True, metavar="E", help="of every mixture, slices counted one by one")
    add("--top-k", type=int, required=True, metavar="K", help="experts that a token is sent to")
    add("--granularity", type=int, default=1, metavar="G", help="slices that a copy of the MLP is cut into (default 1)")
    add("--first-k-dense", type=int, default=0, metavar="N", help="layers at the bottom that stay dense (default 0)")
    add("--noise", type=_noise, default=0.0, help="added to the experts, in standard deviations of the MLP's weights")
    add("--seed", type=int, default=1234, help="of routers and noise (default 1234)")


if __name__ == "__main__":
    print_anywhere()
    parse(sys.argv[1:])  # answers --help and refuses bad options before the seconds that the imports below take

from tqdm import tqdm

from megatron5d.checkpoint.folder import read_run, saved_steps
from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.import_config import read_hf_config, read_model_config
from megatron5d.checkpoint.hf.names import IGNORED, hf_copies, hf_entries
from megatron5d.checkpoint.hf.safetensors_folder import Entry, SafetensorsFolder, save_folder, stored_tensors
from megatron5d.checkpoint.hf.weights import hf_weights, prediction_layers, unread
from megatron5d.checkpoint.load import SavedWeights, whole_checkpoint
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.upcycle import upcycled, upcycled_weights
from megatron5d.config.convert import from_dict, to_dict
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.model.gpt import DTYPES
from megatron5d.train.state import Progress, run_record, twin

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_STORED = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}  # 8 bits apart, without loss


def from_hf(hf: Path, out: Path, dtype: str | None, mtp: bool = False) -> Path:
    """Writes a checkpoint of step 0; returns its folder.

    Raises:
        ValueError: the folder is not one of ours to read, or `out` holds checkpoints.
    """
    model = read_model_config(hf)
    _check_empty(out)
    tokenizer = next((str(hf / name) for name in TOKENIZER_FILES[:2] if (hf / name).is_file()), None)
    with SafetensorsFolder(hf) as stored:
        if mtp:
            model = replace(model, num_mtp_layers=len(prediction_layers(model, stored)))
        family = read_hf_config(hf)["model_type"]
        wide = {entry.hf_name for entry in hf_entries(model, family) if entry.wide}
        tables = re.compile("|".join(IGNORED[family]))  # rotary frequencies are fp32 beside weights in bf16, too
        found = {t.dtype for name, t in stored.tensors.items() if name not in wide and not tables.search(name)}
        for line in unread(model, stored):
            print(line, file=sys.stderr)
        dtype = dtype or max((_STORED.get(kind, "fp32") for kind in found), key=["bf16", "fp32", "fp64"].index)
        config = Config(model=model, precision=PrecisionConfig(dtype=dtype), data=DataConfig(tokenizer=tokenizer))
        tensors = hf_weights(model, stored, DTYPES[dtype])
        return _save(out, dict(tensors), config)


def _check_empty(out: Path) -> None:
    if steps := saved_steps(out):
        raise ValueError(f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any")


def _save(out: Path, tensors: dict[str, Any], config: Config) -> Path:
    Saver(out, keep=0).save(0, tensors, run_record(Progress(), to_dict(config)))
    return whole_checkpoint(out, "--out")


def upcycle(args: argparse.Namespace) -> tuple[Path, ModelConfig]:
    """Writes a checkpoint of step 0; returns its folder and what it holds.

    Raises:
        ValueError: no whole checkpoint, one that cannot become such a mixture, or `out` holds checkpoints.
    """
    _check_empty(args.out)
    folder = whole_checkpoint(args.checkpoint, "--checkpoint")
    config = from_dict(read_run(folder)["config"])
    sparse = upcycled(config.model, args.num_experts, args.top_k, args.granularity, args.first_k_dense)
    weights = SavedWeights(folder, DTYPES["fp32"], twin)  # of a run in bf16 its masters, with which training goes on
    tensors = upcycled_weights(weights, config.model, sparse, args.noise, args.seed)
    written = Config(model=sparse, precision=config.precision, data=config.data)
    return _save(args.out, dict(tensors), written), sparse


def to_hf(checkpoint: Path, out: Path, dtype: str | None, tokenizer: Path | None, max_shard_bytes: int) -> int:
    """Writes a Hugging Face folder; returns the size of its weights in bytes.

    Raises:
        ValueError: no whole checkpoint, an architecture that no family computes, or `out` holds weights.
    """
    folder = whole_checkpoint(checkpoint, "--checkpoint")
    config = from_dict(read_run(folder)["config"])
    dtype = dtype or config.precision.dtype
    if tokenizer is None and config.data.tokenizer and Path(config.data.tokenizer).exists():
        tokenizer = Path(config.data.tokenizer)
    elif tokenizer is not None and not tokenizer.exists():
        raise ValueError(f"--tokenizer {tokenizer} does not exist")
    described = hf_config_from_model(config.model, dtype, eos_token_id=_end_of_text(config, tokenizer))
    weights, entries = SavedWeights(folder, DTYPES[dtype], twin), hf_entries(config.model, described["model_type"])
    _check_complete(weights, entries, folder)
    entries += hf_copies(config.model)
    bar = tqdm(entries, unit="tensor", disable=not sys.stderr.isatty())
    size = save_folder(out, stored_tensors(bar, weights.read, DTYPES[dtype]), max_shard_bytes)
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, out)
    return size


def _end_of_text(config: Config, tokenizer: Path | None) -> int | None:
    """The token that ended documents in training: data.eod, or the tokenizer's; None where neither names one."""
    if config.data.eod is not None or tokenizer is None:
        return config.data.eod
    try:
        eod = load_tokenizer(tokenizer).eod
    except ValueError as error:
        print(f"config.json will name no eos_token_id, so that generate() does not stop: {error}", file=sys.stderr)
        return None
    return eod if eod is not None and eod < config.model.vocab_size else None


def _check_complete(weights: SavedWeights, entries: Sequence[Entry], folder: Path) -> None:
    wanted, saved = {entry.name for entry in entries}, set(weights.tensors)
    biases = sorted(name for name in saved - wanted if name.endswith(".router.bias"))
    if biases:
        raise ValueError(
            f"{folder}: experts were chosen with {len(biases)} biases ({biases[0]} ...) that moe.balance=bias moved, "
            f"and the family of this model has none; train with another moe.balance, or DeepSeek-V3's router "
            f"(model.router_score=sigmoid model.router_bias=true)"
        )
    if wanted != saved:
        raise ValueError(
            f"{folder} does not hold the model that its configuration describes: "
            f"missing {sorted(wanted - saved)}, unexpected {sorted(saved - wanted)}"
        )


def _copy_tokenizer(source: Path, out: Path) -> None:
    """A folder's tokenizer files by name; a single file under the name that transformers looks for."""
    if source.is_dir():
        files = {name: source / name for name in TOKENIZER_FILES if (source / name).is_file()}
    else:
        files = {"tokenizer.json" if source.suffix == ".json" else "tokenizer.model": source}
    for name, file in files.items():
        shutil.copyfile(file, out / name)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        if args.command == "from-hf":
            print(f"wrote {from_hf(args.hf, args.out, args.dtype, args.mtp)}")
        elif args.command == "upcycle":
            folder, model = upcycle(args)
            names = ("num_experts", "top_k", "moe_ffn_hidden_size", "first_k_dense", "routed_scaling_factor")
            print(f"wrote {folder}: {' '.join(f'model.{name}={getattr(model, name)}' for name in names)}")
        else:
            size = to_hf(args.checkpoint, args.out, args.dtype, args.tokenizer, round(args.max_shard_gb * 1e9))
            print(f"wrote {size:,} bytes of weights to {args.out}")
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
