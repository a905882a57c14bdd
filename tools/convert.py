"""Convert checkpoints from and to Hugging Face folders and Megatron-LM, with one tensor in memory at a time.

    python tools/convert.py from-hf --hf DIR --out CHECKPOINTS [--mtp]
    python tools/convert.py to-hf --checkpoint CHECKPOINTS --out DIR [--dtype bf16] [--tokenizer PATH | --no-tokenizer]
    python tools/convert.py from-megatron --megatron DIR --out CHECKPOINTS [--vocab-size N]
    python tools/convert.py to-megatron --checkpoint CHECKPOINTS --out DIR
    python tools/convert.py reshard CHECKPOINTS MORE_CHECKPOINTS --world 16 parallel.tp=4 parallel.pp=2
    python tools/convert.py inspect | verify CHECKPOINTS
    python tools/convert.py diff A B [--tolerance 1e-6]
    python tools/convert.py average CHECKPOINTS --last 5 --out MORE_CHECKPOINTS
    python tools/convert.py upcycle --checkpoint CHECKPOINTS --out MORE_CHECKPOINTS --num-experts 8 --top-k 2

reshard writes the checkpoint that the ranks of another layout would have saved (docs/checkpoints.md).
from-hf writes CHECKPOINTS/step-00000000 with the weights and the configuration, for logits.py, generate.py and to-hf;
to continue training from a Hugging Face folder, pretrain.py reads it itself: model.from_hf=DIR init.from_hf=DIR.
to-hf and upcycle take the newest whole checkpoint of a directory, or the one that is named, saved on any layout.
upcycle writes a mixture of experts that computes what the dense model does (docs/experts.md); train it with
init.from_checkpoint=MORE_CHECKPOINTS and the architecture that it prints.
to-hf writes weights, config.json, generation_config.json and a tokenizer with which AutoTokenizer of transformers gives
the ids of training; texts are compared before anything is written. End tokens and chat templates are those of the
folder that the tokenizer comes from.
Families: Llama, Mistral, Phi-3 (read only), Qwen2, Qwen3, OLMo 2, GPT-2, GPT-NeoX, Mixtral, Qwen2-MoE, Qwen3-MoE,
GLM 4.5, DeepSeek-V2 and V3.
from-megatron reads a GPT model of Megatron-Core, torch_dist or mp_rank files, and Adam's moments where they lie by
parameter; to-megatron writes its weights for --load and --use-checkpoint-args of Megatron-LM (docs/checkpoints.md).
Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import names_file
from megatron5d.tools.conversion import arguments


class Command(NamedTuple):
    """A subcommand; its function returns the exit code, or raises ValueError or OSError for bad input."""

    help: str
    add_arguments: Callable[[OptionParser], None]
    module: str  # of tools/conversion, imported when it runs: torch takes seconds
    function: str


COMMANDS = {
    "from-hf": Command(
        "a Hugging Face folder becomes a checkpoint of ours", arguments.add_from_hf, "huggingface", "from_hf"
    ),
    "to-hf": Command("a checkpoint of ours becomes a Hugging Face folder", arguments.add_to_hf, "huggingface", "to_hf"),
    "reshard": Command(
        "a checkpoint as the ranks of another layout would have saved it", arguments.add_reshard, "reshard", "reshard"
    ),
    "from-megatron": Command(
        "a Megatron-LM checkpoint becomes one of ours", arguments.add_from_megatron, "megatron", "from_megatron"
    ),
    "to-megatron": Command(
        "a checkpoint of ours becomes one of Megatron-LM", arguments.add_to_megatron, "megatron", "to_megatron"
    ),
    "inspect": Command("what a checkpoint holds, of which run", arguments.add_inspect, "examine", "inspect"),
    "verify": Command(
        "read every byte of a checkpoint; exit code 1 if damaged", arguments.add_verify, "examine", "verify"
    ),
    "diff": Command(
        "compare tensors, over layouts and formats; exit code 1 if different", arguments.add_diff, "examine", "diff"
    ),
    "average": Command("the mean of the weights of several checkpoints", arguments.add_average, "average", "average"),
    "upcycle": Command("a dense checkpoint becomes a mixture of experts", arguments.add_upcycle, "upcycle", "upcycle"),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    command = COMMANDS[args.command]
    try:
        return getattr(import_module(f"megatron5d.tools.conversion.{command.module}"), command.function)(args)
    except (ValueError, OSError) as error:
        print(f"convert: {names_file(error, getattr(args, 'out', None))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())
