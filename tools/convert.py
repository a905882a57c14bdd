"""Convert checkpoints from and to Hugging Face folders and Megatron-LM, one tensor at a time.

    python tools/convert.py from-hf --hf DIR --out CHECKPOINTS [--mtp]
    python tools/convert.py to-hf --checkpoint CHECKPOINTS --out DIR [--tokenizer PATH]
    python tools/convert.py from-megatron --megatron DIR --out CHECKPOINTS [--vocab-size N]
    python tools/convert.py to-megatron --checkpoint CHECKPOINTS --out DIR
    python tools/convert.py reshard CHECKPOINTS NEW_CHECKPOINTS --world 16 parallel.tp=4
    python tools/convert.py inspect | verify CHECKPOINTS
    python tools/convert.py diff A B [--tolerance 1e-6]
    python tools/convert.py average CHECKPOINTS --last 5 --out NEW_CHECKPOINTS
    python tools/convert.py flags job.sbatch | flags -- --num-layers 12 --bf16 ...
    python tools/convert.py upcycle --checkpoint CHECKPOINTS --out NEW --num-experts 8 --top-k 2

CHECKPOINTS is a directory of checkpoints, whose newest complete one is read, or one of them. Any
layout may have saved it.

from-hf        writes CHECKPOINTS/step-00000000 with the weights and the configuration, for
               logits.py, generate.py and to-hf. To continue training from a Hugging Face folder,
               no conversion is needed: pretrain.py takes model.from_hf=DIR init.from_hf=DIR.
to-hf          writes weights, config.json, generation_config.json and a tokenizer that gives the
               same ids under AutoTokenizer of transformers as in training, which is checked on
               sample texts first. End tokens and chat templates are those of the folder that the
               tokenizer comes from.
from-megatron  reads a GPT model of Megatron-Core, from torch_dist or mp_rank files, and Adam's
               moments if they are saved by parameter.
to-megatron    writes weights for --load and --use-checkpoint-args of Megatron-LM.
reshard        writes the checkpoint that the ranks of another layout would have saved.
flags          prints our command line for one of Megatron-LM, torchtitan, nanotron or Hugging
               Face's Trainer, and what differs (docs/from_megatron.md).
upcycle        writes a mixture of experts that computes what the dense model does
               (docs/experts.md). Train it with init.from_checkpoint=NEW and the
               architecture that is printed.

Families, by model_type: llama, mistral, qwen2, qwen3, olmo2, gemma, gemma2, gemma3_text, gpt2,
gpt_neox, mixtral, qwen3_moe, qwen2_moe, glm4_moe, gpt_oss, deepseek_v3, deepseek_v2; and, written
as one of these: phi3, seed_oss, dots1, hy_v3, glm4_moe_lite, kimi_k2, gemma3 (docs/checkpoints.md).
Exit code 2 for bad input.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import whole_number


def positive(text: str) -> float:
    """Parses a number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return float(text)


def non_negative(text: str) -> float:
    """Parses a number of at least 0."""
    return 0.0 if float(text) == 0 else positive(text)


class Command(NamedTuple):
    """A subcommand. Its function may return an exit code, or raise ValueError or OSError."""

    # of a module of tools/conversion, which is imported only then: importing torch takes seconds
    function: str
    help: str
    options: list[tuple[str, dict[str, Any]]]


def option(name: str, help: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """Arguments of `add_argument`; `path` is the metavar of a path."""
    if "path" in settings:
        settings |= {"type": Path, "metavar": settings.pop("path")}
    return name, {"help": help, **settings}


ONE = "a checkpoint, or a directory of them: its newest complete one"
CHECKPOINT = option("--checkpoint", ONE, path="DIR", required=True)
OUT = option("--out", "directory without checkpoints", path="DIR", required=True)
DTYPES, STORED = ["fp64", "fp32", "bf16"], "dtype of the written weights (default: as stored)"
DTYPE = option("--dtype", STORED, choices=DTYPES)
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
        "turn a Hugging Face folder into a checkpoint",
        [
            option("--hf", "folder of config.json and safetensors", path="DIR", required=True),
            OUT,
            DTYPE,
            option(
                "--mtp",
                "DeepSeek-V3: include layers of multi-token prediction",
                action="store_true",
            ),
        ],
    ),
    "to-hf": Command(
        "huggingface.to_hf",
        "turn a checkpoint into a Hugging Face folder",
        [
            CHECKPOINT,
            option("--out", "folder without files of a model", path="DIR", required=True),
            option(
                "--dtype",
                f"{STORED}; of a run in bf16, fp32 writes the master weights",
                choices=[*DTYPES, "fp16"],
            ),
            option(
                "--tokenizer",
                "file or folder (default: the run's data.tokenizer, or that of model.from_hf)",
                path="PATH",
            ),
            option("--no-tokenizer", "write no tokenizer", action="store_true"),
            option(
                "--max-shard-gb",
                "10^9 bytes of each file (default 5)",
                type=positive,
                default=5.0,
                metavar="GB",
            ),
        ],
    ),
    "reshard": Command(
        "reshard.reshard",
        "write a checkpoint as the ranks of another layout would have saved it",
        [
            option("source", ONE, path="SRC"),
            option("out", "directory without checkpoints, for checkpoint.dir", path="DST"),
            option(
                "--world",
                "number of ranks (default: the fewest for the layout)",
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
        "turn a Megatron-LM checkpoint into one of ours",
        [
            option(
                "--megatron",
                "a Megatron-LM checkpoint, or a directory of them",
                path="DIR",
                required=True,
            ),
            OUT,
            DTYPE,
            option(
                "--vocab-size",
                "tokens; further rows are padding (default: as saved)",
                type=whole_number(),
                metavar="N",
            ),
            option(
                "--ignore-arguments",
                "unknown saved arguments that do not change what the model computes",
                nargs="+",
                default=[],
                metavar="NAME",
            ),
        ],
    ),
    "to-megatron": Command(
        "megatron.to_megatron",
        "turn a checkpoint into one of Megatron-LM",
        [
            CHECKPOINT,
            option(
                "--out",
                "directory for --load of Megatron-LM, without checkpoints",
                path="DIR",
                required=True,
            ),
            DTYPE,
            option(
                "--optimizer",
                "include Adam's state and the step, to continue the run",
                action="store_true",
            ),
        ],
    ),
    "flags": Command(
        "flags.flags",
        "print our command line for one of another code base",
        [
            option(
                "--source",
                "whose names they are (default: of whom most are known)",
                choices=["megatron", "torchtitan", "nanotron", "huggingface"],
            ),
            option(
                "words",
                "after --, a command or its flags; or a file: job script, .yaml, .toml, .json",
                nargs="+",
                metavar="FILE|WORD",
            ),
        ],
    ),
    "inspect": Command(
        "examine.inspect",
        "print what a checkpoint contains, and its run",
        [
            option("path", ONE, path="PATH"),
            option("--json", "print JSON, with the size of every file", action="store_true"),
        ],
    ),
    "verify": Command(
        "examine.verify",
        "read every byte of a checkpoint; exit code 1 if damaged",
        [option("path", ONE, path="PATH"), WORKERS],
    ),
    "diff": Command(
        "examine.diff",
        "compare tensors, of any layouts and formats; exit code 1 if different",
        [
            option("one", "a checkpoint, a directory of them, or a Hugging Face folder", path="A"),
            option("other", "as A", path="B"),
            option(
                "--tolerance",
                "relative to a tensor's largest value (default 0: exact)",
                type=non_negative,
                default=0.0,
                metavar="T",
            ),
            option(
                "--bf16", "accept values that are the others, rounded to bf16", action="store_true"
            ),
        ],
    ),
    "average": Command(
        "average.average",
        "average the weights of several checkpoints",
        [
            option(
                "path",
                "checkpoints, directories of them, or Hugging Face folders",
                path="PATH",
                nargs="+",
            ),
            OUT,
            option(
                "--last",
                "take the K newest complete ones of one directory",
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
            option(
                "--decay",
                "weights that imitate this decay of a constant learning rate (WSM)",
                choices=["linear", "cosine", "1-sqrt"],
            ),
        ],
    ),
    "upcycle": Command(
        "upcycle.upcycle",
        "turn a dense checkpoint into a mixture of experts",
        [
            CHECKPOINT,
            OUT,
            option(
                "--num-experts",
                "of every mixture; each slice counts",
                type=whole_number(),
                required=True,
                metavar="E",
            ),
            option("--top-k", "experts per token", type=whole_number(), required=True, metavar="K"),
            option(
                "--granularity",
                "slices of each copy of the MLP (default 1)",
                type=whole_number(),
                default=1,
                metavar="G",
            ),
            option(
                "--first-k-dense",
                "first layers that stay dense (default 0)",
                type=whole_number(0),
                default=0,
                metavar="N",
            ),
            option(
                "--noise",
                "added to the experts, in standard deviations of the MLP's weights (default 0)",
                type=non_negative,
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
        exclusive = options.add_mutually_exclusive_group() if name == "to-hf" else options
        for option, settings in command.options:
            # overrides may stand anywhere on the command line
            if option == "overrides":
                options.add_words(option, **settings)
            else:
                group = exclusive if option.endswith("tokenizer") else options
                group.add_argument(option, **settings)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    module, _, function = COMMANDS[args.command].function.partition(".")

    def run() -> int | None:
        return getattr(import_module(f"megatron5d.tools.conversion.{module}"), function)(args)

    return exit_code("convert", run, getattr(args, "out", None))


if __name__ == "__main__":
    print_anywhere(
        "interrupted" + ("; the same command continues" if "reshard" in sys.argv[1:2] else "")
    )
    sys.exit(main())
