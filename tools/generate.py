"""Sample text from a checkpoint of ours or from a Hugging Face folder.

    python tools/generate.py --checkpoint DIR --prompt "def " --max-tokens 64 --temperature 0.8 --top-k 50 --seed 0
    torchrun --nproc-per-node 2 tools/generate.py --hf DIR --tp 2 --prompt "Once upon a time"

The tokenizer is the one of the run (data.tokenizer), or of the Hugging Face folder, unless --tokenizer names another.
Generation ends at --max-tokens, at the tokenizer's end-of-document token, or at any end token that its folder names
(generation_config.json, config.json). To try a chat model, --special-tokens reads special tokens that the prompt spells
out: --special-tokens --prompt $'<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'.
Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import add_model


def _seed(text: str) -> int:
    """Parses a seed that torch takes."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"{text} has more than 64 bits")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens to add (default 64)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 = likeliest token (default 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="draw among K tokens; 0 = all (default 50)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the draws (default 0)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer's file of any kind, or its folder",
    )
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin the prompt with the begin-of-text token (default: as the tokenizer's files say; no after training)",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens that the prompt spells out",
    )
    parser.add_argument(
        "--json", action="store_true", help="print {prompt, text, tokens} instead of the text"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    parse(sys.argv[1:])

from tqdm import tqdm

from megatron5d.checkpoint.hf.import_config import end_tokens, token_source
from megatron5d.config.schema import Config
from megatron5d.data.tokenizer import Tokenizer, load_tokenizer
from megatron5d.data.tokenizer_export import special_tokens
from megatron5d.model.inference import Predictor, Source, open_predictor
from megatron5d.topology.launcher import read_environment
from megatron5d.topology.process import start_process, stop_process


def tokenizer_of(args: argparse.Namespace, config: Config) -> tuple[Tokenizer, Path]:
    """Returns the tokenizer named on the command line, else the source's own, and where it is."""
    path = args.tokenizer or args.hf or token_source(config)
    if path is None:
        raise ValueError(
            "the run has no data.tokenizer: name the one its data was made with by --tokenizer PATH"
        )
    try:
        return load_tokenizer(path, config.data.eod), path
    except ValueError as error:
        raise ValueError(
            f"{error}; name another by --tokenizer PATH" if path != args.tokenizer else str(error)
        ) from error


def begin_of_prompt(tokenizer: Tokenizer, args: argparse.Namespace, config: Config) -> list[int]:
    """Returns what stands before a prompt: nothing for our own runs, unless preprocess.py has put a
    token there."""
    if args.bos and tokenizer.bos is None:
        raise ValueError(
            "--bos: the tokenizer names no begin-of-text token (bos_token in tokenizer_config.json)"
        )
    begins = args.bos if args.bos is not None else tokenizer.adds_bos and not config.data.train
    return [tokenizer.bos] if begins and tokenizer.bos is not None else []


def encode_prompt(text: str, tokenizer: Tokenizer, special: dict[str, int]) -> list[int]:
    """Returns the ids of a prompt in which the names of some special tokens stand for them."""
    names = sorted(filter(None, special), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [
        i
        for part in parts
        if part
        for i in ([special[part]] if part in special else tokenizer.encode(part))
    ]


def continue_text(
    predictor: Predictor,
    tokenizer: Tokenizer,
    prompt: list[int],
    ends: set[int | None],
    args: argparse.Namespace,
) -> list[int]:
    """Returns the prompt's tokens and the new ones, without the token that ended them."""
    model = predictor.config.model
    vocab_size = model.vocab_size
    if outside := [token for token in prompt if token >= vocab_size]:
        raise ValueError(
            f"the tokenizer gives id {outside[0]}, the model has model.vocab_size = {vocab_size}: "
            "this is not the tokenizer that the model was trained with"
        )
    if (longest := len(prompt) + args.max_tokens) > model.max_positions and predictor.mesh[
        "world"
    ].rank == 0:
        kept = (
            "only the last of them are seen"
            if model.position == "learned"
            else "the model was not trained for more"
        )
        print(
            f"{longest} tokens may exceed the model's {model.max_positions} positions: {kept}",
            file=sys.stderr,
        )
    settings = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    drawn = predictor.sample(prompt, args.max_tokens, vocab_size=tokenizer.vocab_size, **settings)
    new: list[int] = []
    for token in tqdm(drawn, total=args.max_tokens, unit="token", disable=None, leave=False):
        if token in ends:
            break
        new.append(token)
    return prompt + new


def run(args: argparse.Namespace) -> None:
    environment = read_environment()
    if args.max_tokens < 1 or not args.temperature >= 0 or args.top_k < 0:
        raise ValueError(
            f"--max-tokens {args.max_tokens} must be 1 or more, --temperature {args.temperature} and "
            f"--top-k {args.top_k} 0 or more"
        )
    source = Source(hf=args.hf, checkpoint=args.checkpoint)
    config = source.config(environment.world, tp=args.tp, dtype=args.dtype)
    tokenizer, path = tokenizer_of(args, config)
    special = special_tokens(path) if args.special_tokens else {}
    prompt = begin_of_prompt(tokenizer, args, config) + encode_prompt(
        args.prompt, tokenizer, special
    )
    ends = {tokenizer.eod, *end_tokens(args.hf or (path if path.is_dir() else path.parent))}
    process = start_process(config.parallel.timeout_s, environment)
    try:
        tokens = continue_text(
            open_predictor(source, config, process), tokenizer, prompt, ends, args
        )
        if process.rank == 0:
            text = tokenizer.decode(tokens)
            print(
                json.dumps({"prompt": args.prompt, "text": text, "tokens": tokens})
                if args.json
                else text
            )
    finally:
        stop_process()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return exit_code("generate", lambda: run(args), quiet=read_environment().rank > 0)


if __name__ == "__main__":
    sys.exit(main())
