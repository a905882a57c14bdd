"""Compare tokenising, preprocessing and Megatron's order with the libraries that do the same: CPU
seconds by turns.

    python tools/bench_data.py [--mb 8] [--tokens 1e9] [--repeats 5] [--dir DIR] [--json]

Peers: tokenizers and tiktoken; the loop of Megatron's preprocess_data.py with the tokenizer and
    builder of
megatron-core; its GPTDataset and BlendedDataset. Texts are the interpreter's own sources, the
tokenizer is trained on them. Every way is measured by turns with its children; the least of several
times counts, and results are compared. Of preprocessing the time of each further MB counts, without
the start. Exit code 2 for bad input or without the peers.
"""

import argparse
import json
import logging
import multiprocessing
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.tools.options import add_measurement

SEQ_LEN, MEAN_TOKENS, SEED = 4096, 1000, 1234  # of a sample; of a document
VOCAB, EOD = 16_000, "<|endoftext|>"
WEIGHTS = (0.4, 0.3, 0.2, 0.1)


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=8.0, help="10^6 bytes of text (default 8)")
    parser.add_argument(
        "--tokens", type=float, default=1e9, help="of the index that is built (default 1e9)"
    )
    add_measurement(parser)
    arguments = parser.parse_args(argv)
    if not (0.1 <= arguments.mb <= 100 and 1e6 <= arguments.tokens <= 1e11):
        parser.error("--mb is a number from 0.1 to 100, --tokens from 1e6 to 1e11")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import numpy as np

from megatron5d.data.bpe_files import CL100K_PATTERN, byte_signs
from megatron5d.data.documents import Recipe
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import finish_partial
from megatron5d.data.preprocess import Job, preprocess
from megatron5d.data.samples import Samples, open_samples
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools.bench.harness import Calls, least_seconds
from megatron5d.tools.tokenizer import train_byte_level

Row = dict[str, float]  # way -> CPU seconds


def texts(num_bytes: float) -> list[str]:
    """Returns sources of the interpreter, again and again where there are too few."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    found, size = [], 0
    while size < num_bytes:
        for path in files:
            if size < num_bytes and "site-packages" not in path.parts and path.stat().st_size:
                found.append(path.read_bytes().decode("utf-8", "replace"))
                size += path.stat().st_size
    return found


def encoding(folder: Path, documents: list[str], repeats: int) -> Row:
    """Measures BPE encoding, once all engines are loaded."""
    import tiktoken
    import tokenizers

    tokenizer, theirs = (
        load_tokenizer(folder),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    taken = {sign: byte for byte, sign in byte_signs().items()}
    ranks = {
        bytes(taken[sign] for sign in token): i
        for token, i in theirs.get_vocab().items()
        if token != EOD
    }
    tiktokens = tiktoken.Encoding(
        "bench", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    tokenizer.encode_all(documents[:1])
    ways: Calls = {
        "ours": lambda: tokenizer.encode_all(documents),
        "encode_batch_fast": lambda: [  # one by one, which takes it less CPU time
            theirs.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in documents
        ],
        "tiktoken": lambda: [tiktokens.encode_ordinary(text) for text in documents],
    }

    def check(found: dict[str, Any]) -> None:
        assert found["ours"] == found["encode_batch_fast"] == found["tiktoken"]

    return least_seconds(ways, repeats, check)[0]


@cache
def _tokenizer(folder: Path) -> Any:
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(str(folder), use_fast=True)


def _encode(folder: Path, line: str) -> list[int]:
    ids = _tokenizer(folder).text_to_ids(json.loads(line)["text"])
    return [*ids, _tokenizer(folder).eod] if ids else ids


def megatron_preprocess(folder: Path, lines: Path, prefix: Path, workers: int) -> None:
    """Does what preprocess_data.py --append-eod does: a pool that encodes lines, and a builder that
    writes."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with (
        lines.open(encoding="utf-8") as file,
        multiprocessing.Pool(workers, _tokenizer, (folder,)) as pool,
    ):
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype_for_vocab(VOCAB).type)
        for ids in pool.imap(partial(_encode, folder), file, 32):
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")
        pool.close()
        pool.join()


def preprocessing(folder: Path, documents: list[str], workers: int, repeats: int) -> Row:
    """Measures preprocessing of half the documents and of all: the difference is the time of what
    is more."""
    _tokenizer(folder)  # before a pool is forked, as Megatron does
    ways: Calls = {}
    sizes = {"some": len(documents) // 2, "all": len(documents)}
    for size, count in sizes.items():
        lines, theirs = folder / f"{size}.jsonl", folder / f"megatron_{size}"
        lines.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in documents[:count]),
            encoding="utf-8",
        )
        job = Job((lines,), str(folder / f"ours_{size}"), Recipe(str(folder), append_eod=True))
        ways[f"ours {size}"] = partial(preprocess, job, workers, overwrite=True)
        ways[f"megatron {size}"] = partial(megatron_preprocess, folder, lines, theirs, workers)

    def check(_: dict[str, Any]) -> None:
        for size in sizes:
            for suffix in (".bin", ".idx"):
                ours, theirs = (
                    (folder / f"{who}_{size}{suffix}").read_bytes() for who in ("ours", "megatron")
                )
                assert ours == theirs, suffix

    found, _ = least_seconds(ways, repeats, check)
    return {who: found[f"{who} all"] - found[f"{who} some"] for who in ("ours", "megatron")}


def write_index(prefix: str, tokens: float, seed: int) -> None:
    """Writes a dataset whose documents have lengths as in text, log-normal; its tokens are a hole
    in the file."""
    random = np.random.default_rng(seed)
    lengths = 1 + random.lognormal(
        np.log(MEAN_TOKENS) - 0.5, 1.0, int(tokens / MEAN_TOKENS)
    ).astype(np.int64)
    lengths.astype("<i4").tofile(f"{prefix}.lengths.partial")
    with open(f"{prefix}.bin.partial", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
    finish_partial(prefix, np.dtype(np.uint16))


def ordering(prefixes: Sequence[str], tokens: float, cache: Path, repeats: int) -> Row:
    """Measures how long the indices of one epoch take, of one dataset or of a blend; they are built
    and stored."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    count, blended = int(tokens // SEQ_LEN), len(prefixes) > 1

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 0, VOCAB, {}  # type: ignore[var-annotated]

    def theirs() -> Any:
        shutil.rmtree(cache, ignore_errors=True)
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=SEQ_LEN,
            split="1,0,0",
            path_to_cache=str(cache),
            tokenizer=Tokenizer(),
            blend=(list(prefixes), list(WEIGHTS) if blended else None),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        return BlendedMegatronDatasetBuilder(
            GPTDataset, [count, 0, 0], lambda: True, config
        ).build()[0]

    def ours() -> Samples:
        shutil.rmtree(cache, ignore_errors=True)
        sources = (
            [f"{weight} {prefix}" for weight, prefix in zip(WEIGHTS, prefixes)]
            if blended
            else list(prefixes)
        )
        return open_samples(
            sources,
            seq_len=SEQ_LEN,
            order="megatron",
            seed=SEED,
            num_samples=count,
            split="1,0,0",
            cache_dir=cache,
        )

    def check(found: dict[str, Any]) -> None:
        mine, other = found["ours"], found["megatron"]
        assert mine.num_samples == len(other)
        for stream, dataset in zip(mine.streams, other.datasets if blended else [other]):
            assert (stream.order.sample_index == dataset.sample_index).all()
            assert (stream.order.shuffle_index == dataset.shuffle_index).all()
        for i in range(0, count, 1 + count // 1000) if blended else ():
            stream, k = mine.locate(i)
            assert (mine.streams.index(stream), k) == (
                other.dataset_index[i],
                other.dataset_sample_index[i],
            )

    return least_seconds({"ours": ours, "megatron": theirs}, repeats, check)[0]


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Row]]:
    """Yields what is measured, and the CPU seconds of each way."""
    import torch.distributed as dist

    documents = texts(arguments.mb * 1e6)
    train_byte_level(documents, VOCAB, folder)
    yield "BPE encoding", encoding(folder, documents, arguments.repeats)
    for workers in (1, 2):
        row = preprocessing(folder, documents, workers, arguments.repeats)
        yield f"preprocessing, {workers} worker{'s' * (workers > 1)}", row
    prefixes = [str(folder / f"index{i}") for i in range(5)]
    for i, prefix in enumerate(prefixes):
        write_index(prefix, arguments.tokens / (4 if i else 1), i)
    # Megatron-Core's datasets ask it
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for what, part in (
            ("order: one dataset", prefixes[:1]),
            ("order: a blend of four", prefixes[1:]),
        ):
            yield what, ordering(part, arguments.tokens, folder / "cache", arguments.repeats)
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    warnings.simplefilter("ignore")  # megatron-core announces what it would do with a GPU
    logging.disable(logging.WARNING)
    found = {}
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            for what, row in rows(arguments, Path(folder)):
                found[what] = row
                ratios = (
                    f"{row['ours'] / s:6.2f} of {name} ({s:.3f})"
                    for name, s in row.items()
                    if name != "ours"
                )
                if not arguments.json:
                    print(f"{what:28}{row['ours']:8.3f} CPU s  {'  '.join(ratios)}", flush=True)
    except (ImportError, ValueError, OSError) as error:
        print(f"bench_data: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
