"""Sample text from a checkpoint of ours or from a Hugging Face folder.

    python tools/generate.py --checkpoint DIR --prompt "def " --max-tokens 64 --temperature 0.8 --top-k 50 --seed 0
    torchrun --nproc-per-node 2 tools/generate.py --hf DIR --tp 2 --prompt "Once upon a time"

The tokenizer is the one of the run (data.tokenizer), or of the Hugging Face folder, unless --tokenizer names another.
Generation ends at --max-tokens or at the tokenizer's end-of-document token. Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import print_anywhere


def _seed(text: str) -> int:
    """A number that torch takes as one."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"{text} has more than 64 bits")
    return int(text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint of ours, or a directory of them")
    source.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face folder: config.json and safetensors")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens to add (default 64)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 = likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="draw among K tokens; 0 = all (default 50)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the draws (default 0)")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="sentencepiece, tokenizer.json or tiktoken file")
    parser.add_argument("--dtype", choices=["fp64", "fp32", "bf16"], help="of the computation (default: the source's)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--json", action="store_true", help="print {prompt, text, tokens} instead of the text")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print_anywhere()
    parse(sys.argv[1:])  # answers --help and refuses bad options before the seconds that the imports below take

from tqdm import tqdm

from megatron5d.config.schema import Config
from megatron5d.data.tokenizer import Tokenizer, load_tokenizer
from megatron5d.model.inference import Predictor, Source, open_predictor
from megatron5d.topology.launcher import read_environment
from megatron5d.topology.process import start_process, stop_process


def tokenizer_of(args: argparse.Namespace, config: Config) -> Tokenizer:
    """The tokenizer named on the command line, else the source's own."""
    path = args.tokenizer or args.hf or config.data.tokenizer
    if path is None:
        raise ValueError("the run has no data.tokenizer: name the one its data was made with by --tokenizer PATH")
    return load_tokenizer(path, config.data.eod)


def continue_text(predictor: Predictor, tokenizer: Tokenizer, args: argparse.Namespace) -> list[int]:
    """The prompt's tokens and the new ones."""
    prompt = tokenizer.encode(args.prompt)
    vocab_size = predictor.config.model.vocab_size
    if outside := [token for token in prompt if token >= vocab_size]:
        raise ValueError(
            f"the tokenizer gives id {outside[0]}, the model has model.vocab_size = {vocab_size}: "
            "this is not the tokenizer that the model was trained with"
        )
    settings = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    drawn = predictor.sample(prompt, args.max_tokens, vocab_size=tokenizer.vocab_size, **settings)
    new: list[int] = []
    for token in tqdm(drawn, total=args.max_tokens, unit="token", disable=not sys.stderr.isatty(), leave=False):
        if token == tokenizer.eod:
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
    tokenizer = tokenizer_of(args, config)
    process = start_process(config.parallel.timeout_s, environment)
    try:
        tokens = continue_text(open_predictor(source, config, process), tokenizer, args)
        if process.rank == 0:
            text = tokenizer.decode(tokens)
            print(json.dumps({"prompt": args.prompt, "text": text, "tokens": tokens}) if args.json else text)
    finally:
        stop_process()


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        if read_environment().rank == 0:
            print(f"generate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
