"""Convert checkpoints from and to Hugging Face folders, with one tensor in memory at a time.

    python tools/convert.py from-hf --hf DIR --out CHECKPOINTS [--mtp]
    python tools/convert.py to-hf --checkpoint CHECKPOINTS --out DIR [--dtype bf16] [--tokenizer PATH | --no-tokenizer]
    python tools/convert.py upcycle --checkpoint CHECKPOINTS --out MORE_CHECKPOINTS --num-experts 8 --top-k 2

from-hf writes CHECKPOINTS/step-00000000 with the weights and the configuration, for logits.py, generate.py and to-hf;
to continue training from a Hugging Face folder, pretrain.py reads it itself: model.from_hf=DIR init.from_hf=DIR.
to-hf and upcycle take the newest whole checkpoint of a directory, or the one that is named, saved on any layout.
upcycle writes a mixture of experts that computes what the dense model does (docs/experts.md); train it with
init.from_checkpoint=MORE_CHECKPOINTS and the architecture that it prints.
to-hf writes weights, config.json, generation_config.json and a tokenizer with which AutoTokenizer of transformers gives
the ids of training; texts are compared before anything is written. End tokens and chat templates are those of the
folder that the tokenizer comes from.
Families: Llama, Mistral, Phi-3 (read only), Qwen2, Qwen3, GPT-2, Mixtral, Qwen3-MoE, DeepSeek-V2 and V3.
Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import print_anywhere
from megatron5d.config.errors import names_file


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
    write.add_argument("--out", type=Path, required=True, metavar="DIR", help="without files that transformers reads")
    kinds = {
        "choices": [*dtype["choices"], "fp16"],
        "help": f"{dtype['help']}; of a run in bf16, fp32 writes the masters",
    }
    write.add_argument("--dtype", **dtype | kinds)
    beside = write.add_mutually_exclusive_group()
    beside.add_argument("--tokenizer", type=Path, metavar="PATH", help="file or folder to put beside the weights "
                        "(default: the run's data.tokenizer, or that of model.from_hf)")  # fmt: skip
    beside.add_argument("--no-tokenizer", action="store_true", help="write none, where it cannot leave with its ids")
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

import torch
from tqdm import tqdm

from megatron5d.checkpoint.folder import read_run, saved_config, saved_steps
from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.files import check_vacant
from megatron5d.checkpoint.hf.import_config import (
    end_tokens,
    read_hf_config,
    read_model_config,
    token_ids,
    token_source,
)
from megatron5d.checkpoint.hf.names import IGNORED, hf_copies, hf_entries
from megatron5d.checkpoint.hf.safetensors_folder import (
    Entry,
    SafetensorsFolder,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.hf.weights import hf_weights, prediction_layers, unread
from megatron5d.checkpoint.load import SavedWeights, whole_checkpoint
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.upcycle import upcycled, upcycled_weights
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron5d.data.tokenizer import load_tokenizer, tokenizer_file
from megatron5d.data.tokenizer_export import exported_tokenizer
from megatron5d.model.block_inputs import DTYPES
from megatron5d.train.state import Progress, run_record, twin

OUT_BIAS = ".attention.out.bias"
_STORED = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}  # 8 bits apart, without loss


def from_hf(hf: Path, out: Path, dtype: str | None, mtp: bool = False) -> Path:
    """Writes a checkpoint of step 0; returns its folder.

    Raises:
        ValueError: the folder is not one of ours to read, or `out` holds checkpoints.
    """
    model = read_model_config(hf)
    _check_empty(out)
    home = str(hf.resolve())
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
        data = DataConfig(tokenizer=home if _holds_tokenizer(hf) else None)
        config = Config(model=replace(model, from_hf=home), precision=PrecisionConfig(dtype=dtype), data=data)
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
    config = saved_config(folder)
    sparse = upcycled(config.model, args.num_experts, args.top_k, args.granularity, args.first_k_dense)
    weights = SavedWeights(folder, DTYPES["fp32"], twin)  # of a run in bf16 its masters, with which training goes on
    tensors = upcycled_weights(weights, config.model, sparse, args.noise, args.seed)
    written = Config(model=sparse, precision=config.precision, data=config.data)
    return _save(args.out, dict(tensors), written), sparse


def to_hf(args: argparse.Namespace) -> int:
    """Writes a Hugging Face folder; returns the size of its weights in bytes.

    Raises:
        ValueError: no whole checkpoint, an architecture that no family computes, a tokenizer that cannot leave with its
            ids, or `out` holds files that transformers would read.
    """
    folder = whole_checkpoint(args.checkpoint, "--checkpoint")
    check_vacant(args.out)
    run, config = read_run(folder), saved_config(folder)
    dtype = args.dtype or config.precision.dtype
    source = _token_source(args, config)
    model = _as_long_as_trained(config, run["progress"]["step"])
    model, files = _settings(config, model, dtype, source, not args.no_tokenizer)
    kind = torch.float16 if dtype == "fp16" else DTYPES[dtype]
    weights = SavedWeights(folder, torch.float32 if dtype == "fp16" else kind, twin)
    entries = hf_entries(model, json.loads(files["config.json"])["model_type"])
    zeros = {entry.name for entry in entries if entry.name.endswith(OUT_BIAS)} - set(weights.tensors)
    zeros = zeros if model.attention_out_bias > config.model.attention_out_bias else set()
    _check_complete(weights, [entry for entry in entries if entry.name not in zeros], folder)
    entries += hf_copies(model)

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape) if name in zeros else weights.read(name, offset, shape)

    bar = tqdm(entries, unit="tensor", disable=not sys.stderr.isatty())
    size = save_folder(args.out, stored_tensors(bar, read, kind), round(args.max_shard_gb * 1e9))
    for name, content in files.items():
        (args.out / name).parent.mkdir(exist_ok=True)
        (args.out / name).write_text(content, encoding="utf-8")
    return size


def _as_long_as_trained(config: Config, step: int) -> ModelConfig:
    """The architecture with as many positions as training used: beyond its max_position_embeddings servers cut."""
    model, seq_len = config.model, config.train.seq_len
    if model.position != "rope" or step == 0 or seq_len <= model.max_positions:
        return model
    print(f"max_position_embeddings becomes train.seq_len = {seq_len}, which is more than model.max_positions = "
          f"{model.max_positions}", file=sys.stderr)  # fmt: skip
    return replace(model, max_positions=seq_len)


def _holds_tokenizer(path: Path) -> bool:
    try:
        return tokenizer_file(path).is_file()
    except ValueError:
        return False


def _token_source(args: argparse.Namespace, config: Config) -> Path | None:
    """The tokenizer to export; None where the run names none, which is told.

    Raises:
        ValueError: one is named and is not there.
    """
    source, otherwise = args.tokenizer or token_source(config), "give it by --tokenizer PATH"
    if args.no_tokenizer:
        return source
    if source is None or not (args.tokenizer or config.data.tokenizer or _holds_tokenizer(source)):
        where = "names no data.tokenizer" if source is None else f"has no data.tokenizer, and {source} holds none"
        print(f"no tokenizer is written: the run {where}; {otherwise}", file=sys.stderr)
    elif not _holds_tokenizer(source):
        knob = "--tokenizer" if args.tokenizer else "the run's data.tokenizer ="
        raise ValueError(f"{knob} {source} is no tokenizer, or not there any more; {otherwise}, or --no-tokenizer")
    return source


def _settings(
    config: Config, model: ModelConfig, dtype: str, source: Path | None, with_tokenizer: bool
) -> tuple[ModelConfig, dict[str, str]]:
    """All files but the weights, and the architecture that they describe.

    transformers reads every model_type qwen2 with Qwen2Tokenizer, whatever tokenizer_config.json names. Another
    tokenizer leaves with a Llama that computes the same: its further biases, behind attention, are zero.
    """
    ids, generation = _token_ids(config, source)
    described, files = hf_config_from_model(model, dtype, ids), dict[str, str]()
    if with_tokenizer and source is not None and _holds_tokenizer(source):
        if (size := load_tokenizer(source, config.data.eod).vocab_size) > model.vocab_size:
            print(f"{source} has {size} tokens, the model has model.vocab_size = {model.vocab_size}", file=sys.stderr)
        try:
            files = exported_tokenizer(source, config.data.eod, described)
        except ValueError as error:
            if described["model_type"] != "qwen2" or model.attention_window is not None:
                raise ValueError(f"{error}; --no-tokenizer writes the rest without one") from error
            model = replace(model, attention_out_bias=True)
            described = hf_config_from_model(model, dtype, ids)
            files = exported_tokenizer(source, config.data.eod, described)
            print(f"written as {described['model_type']}, since as qwen2 {error}", file=sys.stderr)
        if find_spec("transformers") is None:
            print("the ids were compared without AutoTokenizer: transformers is not installed", file=sys.stderr)
    files |= {"generation_config.json": _json(generation), "config.json": _json(described)}
    return model, files


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _token_ids(config: Config, source: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids of special tokens for config.json, and generation_config.json: as the tokenizer's folder has them.

    The token that ended documents in training is among those that end a text.
    """
    eod = config.data.eod
    home = source if source is None or source.is_dir() else source.parent
    ids, generation = token_ids(home) if home is not None else ({}, {})
    if eod is None and source is not None and _holds_tokenizer(source):
        eod = load_tokenizer(source).eod
    ends = [*(end_tokens(home) if home is not None else ()), *([] if eod is None else [eod])]
    known = [i for i in dict.fromkeys(ends) if i < config.model.vocab_size]
    at_end: Any = known if len(known) > 1 else next(iter(known), None)
    named = ids.get("eos_token_id")
    if named is None or not set(named if isinstance(named, list) else [named]) <= set(known):
        named = eod if eod in known else None
    ids = {key: i for key, i in ids.items() if isinstance(i, int) and i < config.model.vocab_size}
    return ids | {"eos_token_id": named}, generation | ids | {"eos_token_id": at_end}


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
            size = to_hf(args)
            print(f"wrote {size:,} bytes of weights to {args.out}")
    except (ValueError, OSError) as error:
        print(f"convert: {names_file(error, args.out)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
