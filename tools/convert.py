"""Convert checkpoints from and to Hugging Face folders and Megatron-LM, with one tensor in memory
at a time.

    python tools/convert.py from-hf --hf DIR --out CHECKPOINTS [--mtp] python tools/convert.py to-hf
    --checkpoint CHECKPOINTS --out DIR [--dtype bf16] [--tokenizer PATH | --no-tokenizer] python
    tools/convert.py from-megatron --megatron DIR --out CHECKPOINTS [--vocab-size N] python
    tools/convert.py to-megatron --checkpoint CHECKPOINTS --out DIR python tools/convert.py reshard
    CHECKPOINTS MORE_CHECKPOINTS --world 16 parallel.tp=4 parallel.pp=2 python tools/convert.py
    inspect | verify CHECKPOINTS python tools/convert.py diff A B [--tolerance 1e-6] python
    tools/convert.py average CHECKPOINTS --last 5 --out MORE_CHECKPOINTS python tools/convert.py
    upcycle --checkpoint CHECKPOINTS --out MORE_CHECKPOINTS --num-experts 8 --top-k 2

reshard writes the checkpoint that the ranks of another layout would have saved
(docs/checkpoints.md). from-hf writes CHECKPOINTS/step-00000000 with the weights and the
configuration, for logits.py, generate.py and to-hf; to continue training from a Hugging Face
folder, pretrain.py reads it itself: model.from_hf=DIR init.from_hf=DIR. to-hf and upcycle take the
newest whole checkpoint of a directory, or the one that is named, saved on any layout. upcycle
writes a mixture of experts that computes what the dense model does (docs/experts.md); train it with
init.from_checkpoint=MORE_CHECKPOINTS and the architecture that it prints. to-hf writes weights,
config.json, generation_config.json and a tokenizer with which AutoTokenizer of transformers gives
the ids of training; texts are compared before anything is written. End tokens and chat templates
are those of the folder that the tokenizer comes from. Families, by model_type: llama, mistral,
qwen2, qwen3, olmo2, gemma, gemma2, gemma3_text, gpt2, gpt_neox, mixtral, qwen3_moe, qwen2_moe,
glm4_moe, gpt_oss, deepseek_v3, deepseek_v2; and, written as one of these: phi3, seed_oss, dots1,
hy_v3, glm4_moe_lite, kimi_k2, gemma3 (docs/checkpoints.md). from-megatron reads a GPT model of
Megatron-Core, torch_dist or mp_rank files, and Adam's moments where they lie by parameter;
to-megatron writes its weights for --load and --use-checkpoint-args of Megatron-LM
(docs/checkpoints.md). Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import whole_number


def amount(text: str) -> float:
    """Parses a number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no amount above 0")
    return float(text)


def noise(text: str) -> float:
    """Parses a number that is not below 0."""
    return 0.0 if float(text) == 0 else amount(text)


class Command(NamedTuple):
    """A subcommand; its function returns the exit code, or raises ValueError or OSError for bad
    input."""

    function: str  # of a module of tools/conversion, imported when it runs: torch takes seconds
    help: str
    options: list[tuple[str, dict[str, Any]]]


def option(name: str, help: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """Returns what `add_argument` takes; `metavar` of a path is given as `path`."""
    if "path" in settings:
        settings |= {"type": Path, "metavar": settings.pop("path")}
    return name, {"help": help, **settings}


ONE, NEWEST = (
    "a checkpoint, or a directory of them",
    "a checkpoint, or a directory of them: its newest whole one",
)
CHECKPOINT = option("--checkpoint", ONE, path="DIR", required=True)
OUT = option("--out", "directory of checkpoints, without any yet", path="DIR", required=True)
KINDS, STORED = ["fp64", "fp32", "bf16"], "of the written weights (default: as they are stored)"
DTYPE = option("--dtype", STORED, choices=KINDS)
WORKERS = option(
    "--workers",
    "processes (default: one per core)",
    type=whole_number(),
    default=os.cpu_count() or 1,
    metavar="N",
)

COMMANDS = {
    "from-hf": Command(
        "huggingface.from_hf",
        "a Hugging Face folder becomes a checkpoint of ours",
        [
            option("--hf", "config.json and safetensors files", path="DIR", required=True),
            OUT,
            DTYPE,
            option(
                "--mtp", "DeepSeek-V3: its multi-token prediction layers too", action="store_true"
            ),
        ],
    ),
    "to-hf": Command(
        "huggingface.to_hf",
        "a checkpoint of ours becomes a Hugging Face folder",
        [
            CHECKPOINT,
            option("--out", "without files that transformers reads", path="DIR", required=True),
            option(
                "--dtype",
                f"{STORED}; of a run in bf16, fp32 writes the masters",
                choices=[*KINDS, "fp16"],
            ),
            option(
                "--tokenizer",
                "file or folder to put beside the weights (default: the run's data.tokenizer, or that of "
                "model.from_hf)",
                path="PATH",
            ),
            option(
                "--no-tokenizer",
                "write none, where it cannot leave with its ids",
                action="store_true",
            ),
            option(
                "--max-shard-gb",
                "10^9 bytes a file (default 5)",
                type=amount,
                default=5.0,
                metavar="GB",
            ),
        ],
    ),
    "reshard": Command(
        "reshard.reshard",
        "a checkpoint as the ranks of another layout would have saved it",
        [
            option("source", NEWEST, path="SRC"),
            option(
                "out",
                "directory of checkpoints, without any yet, as checkpoint.dir takes it",
                path="DST",
            ),
            option(
                "--world",
                "ranks of the target (default: the fewest that the layout takes)",
                type=whole_number(),
                metavar="N",
            ),
            WORKERS,
            option(
                "overrides",
                "of the layout: parallel.*, pipeline.*, ...",
                nargs="*",
                metavar="key=value",
            ),
        ],
    ),
    "from-megatron": Command(
        "megatron.from_megatron",
        "a Megatron-LM checkpoint becomes one of ours",
        [
            option(
                "--megatron",
                "a checkpoint of Megatron-LM, or a directory of them",
                path="DIR",
                required=True,
            ),
            OUT,
            DTYPE,
            option(
                "--vocab-size",
                "tokens; rows beyond them are padding (default: as saved)",
                type=whole_number(),
                metavar="N",
            ),
        ],
    ),
    "to-megatron": Command(
        "megatron.to_megatron",
        "a checkpoint of ours becomes one of Megatron-LM",
        [
            CHECKPOINT,
            option(
                "--out",
                "directory for Megatron-LM's --load, without any yet",
                path="DIR",
                required=True,
            ),
            DTYPE,
            option(
                "--optimizer",
                "Adam's state and the step, too, to continue the run",
                action="store_true",
            ),
        ],
    ),
    "inspect": Command(
        "examine.inspect",
        "what a checkpoint holds, of which run",
        [
            option("path", ONE, path="PATH"),
            option("--json", "for programs, with the size of every file", action="store_true"),
        ],
    ),
    "verify": Command(
        "examine.verify",
        "read every byte of a checkpoint; exit code 1 if damaged",
        [
            option("path", NEWEST, path="PATH"),
            WORKERS,
        ],
    ),
    "diff": Command(
        "examine.diff",
        "compare tensors, over layouts and formats; exit code 1 if different",
        [
            option("one", "a checkpoint, a directory of them, or a Hugging Face folder", path="A"),
            option("other", "as A", path="B"),
            option(
                "--tolerance",
                "of a tensor's largest value (default 0: exact)",
                type=noise,
                default=0.0,
                metavar="T",
            ),
        ],
    ),
    "average": Command(
        "new_checkpoint.average",
        "the mean of the weights of several checkpoints",
        [
            option("path", "checkpoints, or directories of them", path="PATH", nargs="+"),
            OUT,
            option(
                "--last",
                "the K newest whole ones of one directory",
                type=whole_number(),
                metavar="K",
            ),
            option(
                "--weights",
                "one for each checkpoint (default: equal)",
                type=float,
                nargs="+",
                metavar="W",
            ),
        ],
    ),
    "upcycle": Command(
        "new_checkpoint.upcycle",
        "a dense checkpoint becomes a mixture of experts",
        [
            CHECKPOINT,
            OUT,
            option(
                "--num-experts",
                "of every mixture, slices counted one by one",
                type=int,
                required=True,
                metavar="E",
            ),
            option(
                "--top-k", "experts that a token is sent to", type=int, required=True, metavar="K"
            ),
            option(
                "--granularity",
                "slices that an MLP's copy is cut into (default 1)",
                type=int,
                default=1,
                metavar="G",
            ),
            option(
                "--first-k-dense",
                "layers at the bottom that stay dense (default 0)",
                type=int,
                default=0,
                metavar="N",
            ),
            option(
                "--noise",
                "added to the experts, in standard deviations of the MLP's weights",
                type=noise,
                default=0.0,
            ),
            option("--seed", "of routers and noise (default 1234)", type=int, default=1234),
        ],
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        options = commands.add_parser(name, help=command.help)
        either = options.add_mutually_exclusive_group() if name == "to-hf" else options
        for option, settings in command.options:
            adding = either if option.endswith("tokenizer") else options
            (options.add_words if option == "overrides" else adding.add_argument)(
                option, **settings
            )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    module, _, function = COMMANDS[args.command].function.partition(".")
    work, out = f"megatron5d.tools.conversion.{module}", getattr(args, "out", None)
    made = [folder for folder in (out, *out.parents) if not folder.exists()] if out else []
    code = exit_code("convert", lambda: getattr(import_module(work), function)(args), out)
    for folder in made if code else []:
        with suppress(OSError):  # it holds what the same command continues with, or was not made
            folder.rmdir()
    return code


if __name__ == "__main__":
    print_anywhere(
        "interrupted" + ("; the same command continues" if "reshard" in sys.argv[1:2] else "")
    )
    sys.exit(main())
