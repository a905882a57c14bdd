"""Sample text from a checkpoint or from a Hugging Face folder.

    python tools/generate.py --checkpoint DIR --prompt "def " --temperature 0.8 --top-k 50 --seed 0
    torchrun --nproc-per-node 2 tools/generate.py --hf DIR --tp 2 --prompt "Once upon a time"

The tokenizer is that of the run (data.tokenizer) or of the Hugging Face folder, unless --tokenizer
names another. Generation ends at --max-tokens, at the tokenizer's end-of-document token, or at any
end token that its folder names (generation_config.json, config.json). With --special-tokens, names
of special tokens in the prompt stand for them, which chat models need:

    --special-tokens --prompt $'<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

Exit code 2 for bad input.
"""

import argparse
import json
import re
import sys
from argparse import Namespace
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


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = OptionParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    for option, kind, default, metavar, text in (
        ("--max-tokens", int, 64, "N", "tokens to generate (default 64)"),
        ("--temperature", float, 0.8, "T", "0 = the likeliest token (default 0.8)"),
        ("--top-k", int, 50, "K", "sample from the K likeliest tokens; 0 = all (default 50)"),
        ("--seed", _seed, 0, "N", "of the random choice (default 0)"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer file of any kind, or its folder"
    )
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin the prompt with the begin-of-text token (default: as the tokenizer's files "
        "say; not for a model trained here)",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read names of special tokens in the prompt as these tokens",
    )
    parser.add_argument(
        "--json", action="store_true", help="print {prompt, text, tokens} instead of the text"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    parse(sys.argv[1:])

from tqdm import tqdm

from megatron5d.checkpoint.hf.import_config import end_tokens, token_source
from megatron5d.config.schema import Config
from megatron5d.data.tokenizer import Tokenizer, load_tokenizer
from megatron5d.data.tokenizer_export import special_tokens
from megatron5d.model.inference import Predictor, Source, open_predictor
from megatron5d.topology.launcher import read_environment
from megatron5d.topology.process import start_process, stop_process


def tokenizer_of(args: Namespace, config: Config) -> tuple[Tokenizer, Path]:
    """The tokenizer of the command line, or else of the model's source, and its path."""
    path = args.tokenizer or args.hf or token_source(config)
    if path is None:
        raise ValueError("the run has no data.tokenizer: name the tokenizer by --tokenizer PATH")
    try:
        return load_tokenizer(path, config.data.eod), path
    except ValueError as error:
        hint = "; name another one by --tokenizer PATH" if path != args.tokenizer else ""
        raise ValueError(f"{error}{hint}") from error


def begin_of_prompt(tokenizer: Tokenizer, args: Namespace, config: Config) -> list[int]:
    """The begin-of-text token, if prompts start with one.

    By default, none is added for a model that was trained here: if its data began with one,
    preprocess.py put it there.
    """
    if args.bos and tokenizer.bos is None:
        raise ValueError(
            "--bos: the tokenizer names no begin-of-text token (bos_token in tokenizer_config.json)"
        )
    begins = args.bos if args.bos is not None else tokenizer.adds_bos and not config.data.train
    return [tokenizer.bos] if begins and tokenizer.bos is not None else []


def encode_prompt(text: str, tokenizer: Tokenizer, special: dict[str, int]) -> list[int]:
    """Ids of a prompt, in which names of special tokens stand for them."""
    names = sorted(filter(None, special), key=len, reverse=True)
    # the longest names first: one may begin with another
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    ids: list[int] = []
    for piece in filter(None, pieces):
        ids += [special[piece]] if piece in special else tokenizer.encode(piece)
    return ids


def continue_text(
    predictor: Predictor,
    tokenizer: Tokenizer,
    prompt: list[int],
    end_ids: set[int | None],
    args: Namespace,
) -> list[int]:
    """Ids of the prompt and of its continuation, without the token that ended it."""
    model = predictor.config.model
    if outside := [token for token in prompt if token >= model.vocab_size]:
        raise ValueError(
            f"the tokenizer gives id {outside[0]}, but model.vocab_size = {model.vocab_size}: "
            "the model was trained with another tokenizer"
        )
    longest = len(prompt) + args.max_tokens
    if longest > model.max_positions and predictor.mesh["world"].rank == 0:
        learned = model.position == "learned"
        effect = "it sees only the last ones" if learned else "it was not trained for more"
        print(
            f"{longest} tokens may exceed the model's {model.max_positions} positions: {effect}",
            file=sys.stderr,
        )
    settings = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    samples = predictor.sample(prompt, args.max_tokens, vocab_size=tokenizer.vocab_size, **settings)
    tokens = list(prompt)
    for token in tqdm(samples, total=args.max_tokens, unit="token", disable=None, leave=False):
        if token in end_ids:
            break
        tokens.append(token)
    return tokens


def run(args: Namespace) -> None:
    environment = read_environment()
    if args.max_tokens < 1 or not args.temperature >= 0 or args.top_k < 0:
        raise ValueError(
            f"--max-tokens {args.max_tokens} must be at least 1, --temperature {args.temperature} "
            f"and --top-k {args.top_k} at least 0"
        )
    source = Source(hf=args.hf, checkpoint=args.checkpoint)
    config = source.config(environment.world, tp=args.tp, dtype=args.dtype)
    tokenizer, path = tokenizer_of(args, config)
    # all ranks read the tokenizer: bad input ends them before they wait for each other
    special = special_tokens(path) if args.special_tokens else {}
    prompt = begin_of_prompt(tokenizer, args, config)
    prompt += encode_prompt(args.prompt, tokenizer, special)
    end_ids = {tokenizer.eod, *end_tokens(args.hf or (path if path.is_dir() else path.parent))}
    process = start_process(config.parallel.timeout_s, environment)
    try:
        predictor = open_predictor(source, config, process)
        tokens = continue_text(predictor, tokenizer, prompt, end_ids, args)
        if process.rank == 0:
            text = tokenizer.decode(tokens)
            record = {"prompt": args.prompt, "text": text, "tokens": tokens}
            print(json.dumps(record) if args.json else text)
    finally:
        stop_process()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return exit_code("generate", lambda: run(args), quiet=read_environment().rank > 0)


if __name__ == "__main__":
    sys.exit(main())
