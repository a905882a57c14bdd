"""Write a model's logits on given token ids to a .npy file, to check an import or a checkpoint.

    python tools/logits.py --hf DIR --tokens ids.npy --dtype fp64 --out logits.npy
    torchrun --nproc-per-node 4 tools/logits.py --checkpoint DIR --tp 2 --tokens ids.npy --out o.npy

Ids [b, s] of any integer type, or [s] for one row, give logits [b, s, vocab_size]: float64 with
--dtype fp64, else float32. Further ranks than --tp divide the rows. Exit code 2 for bad input.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import add_model


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = OptionParser(description=__doc__)
    add_model(parser)
    parser.add_argument(
        "--tokens", type=Path, required=True, metavar="NPY", help="token ids, [b, s]"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="NPY", help="logits, [b, s, vocab_size]"
    )
    parser.add_argument("--sp", action="store_true", help="sequence parallelism over the tp ranks")
    parser.add_argument(
        "--mbs", type=int, default=1, metavar="N", help="rows per forward pass and rank (default 1)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    parse(sys.argv[1:])

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron5d.comm.collectives import all_gather
from megatron5d.model.inference import Predictor, Source, open_predictor
from megatron5d.topology.launcher import read_environment
from megatron5d.topology.owned_output import check_not_read
from megatron5d.topology.process import start_process, stop_process


def read_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """Reads token ids `[b, s]` of a .npy file.

    Raises:
        ValueError: it is not a file of integers of one or two dims, or an id is outside the
            vocabulary.
    """
    try:
        ids = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"--tokens {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"--tokens {path} is not a .npy file of numbers: {error}") from error
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"--tokens {path} is not a .npy file but an archive of several (.npz)")
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer) or ids.size == 0:
        raise ValueError(
            f"--tokens {path}: expected integers [batch, seq] (got {ids.dtype} {list(ids.shape)})"
        )
    ids = ids.reshape(-1, ids.shape[-1])
    outside = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(outside):
        row, column = outside[0]
        raise ValueError(
            f"--tokens {path}: id {ids[row, column]} at row {row}, column {column} is outside the "
            f"vocabulary 0 ... {vocab_size - 1}"
        )
    return ids.astype(np.int64)


def all_logits(predictor: Predictor, ids: np.ndarray, mbs: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, logits `[rows, s, vocab]` on the CPU) for all rows, on every rank.

    Comm: all_gather dp of the logits of dp · mbs rows at a time.
    """
    dp = predictor.mesh["dp"]
    step = mbs * dp.size
    for first in range(0, len(ids), step):
        rows = torch.from_numpy(ids[first : first + step])
        # every rank takes part in the last all-gather: missing rows repeat the first one
        missing = step - len(rows)
        rows = torch.cat([rows, rows[:1].expand(missing, -1)])
        local = predictor.logits(rows[dp.rank * mbs : (dp.rank + 1) * mbs])
        yield first, all_gather(local.contiguous(), dp).cpu()[: step - missing]


def run(args: Namespace) -> None:
    environment = read_environment()
    source = Source(hf=args.hf, checkpoint=args.checkpoint)
    config = source.config(environment.world, tp=args.tp, sp=args.sp, dtype=args.dtype)
    check_not_read([args.out], [args.tokens])
    ids = read_tokens(args.tokens, config.model.vocab_size)
    if args.mbs < 1:
        raise ValueError(f"--mbs {args.mbs}: at least 1 row per forward pass")
    process = start_process(config.parallel.timeout_s, environment)
    try:
        predictor = open_predictor(source, config, process)
        # rank 0 writes all rows, each as soon as it is computed
        out = None
        if process.rank == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            dtype = np.float64 if config.precision.dtype == "fp64" else np.float32
            shape = (*ids.shape, config.model.vocab_size)
            out = np.lib.format.open_memmap(args.out, mode="w+", dtype=dtype, shape=shape)
        with tqdm(total=len(ids), unit="row", disable=process.rank != 0 or None) as bar:
            for first, logits in all_logits(predictor, ids, args.mbs):
                if out is not None:
                    # numpy has no bfloat16
                    numbers = logits if logits.dtype == torch.float64 else logits.float()
                    out[first : first + len(logits)] = numbers
                bar.update(len(logits))
        if out is not None:
            out.flush()
            print(f"{args.out}: {out.dtype} {list(out.shape)}")
    finally:
        stop_process()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return exit_code("logits", lambda: run(args), args.out, quiet=read_environment().rank > 0)


if __name__ == "__main__":
    sys.exit(main())
