"""Compare tokenizing, preprocessing and Megatron's sample order with libraries that do the same.

    python tools/bench_data.py [--mb 8] [--tokens 1e9] [--repeats 5] [--dir DIR] [--json]

Peers: tokenizers and tiktoken; the loop of Megatron's preprocess_data.py with the tokenizer and
builder of megatron-core; its GPTDataset and BlendedDataset. Texts are the interpreter's own
sources, on which the tokenizer is trained. Figures are CPU seconds, with those of child processes.
Measurements alternate, the least of several counts, and results are compared. Preprocessing is
measured on half of the texts and on all: the difference excludes the start. Exit code 2 for bad
input or where a peer is missing.
"""

import json
import logging
import multiprocessing
import shutil
import sys
import sysconfig
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import add_measurement

SEQ_LEN, MEAN_TOKENS, SEED = 4096, 1000, 1234  # of a sample; of a document
VOCAB, EOD = 16_000, "<|endoftext|>"
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
PROVIDERS = ("ours", "megatron")


def _arguments(argv: Sequence[str] | None = None) -> Namespace:
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
    # answers --help and rejects bad options before the imports below, which take seconds
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
from megatron5d.tools.bench.results import print_rows, seconds_line
from megatron5d.tools.tokenizer import train_byte_level

Seconds = dict[str, float]  # provider -> CPU seconds


def read_texts(num_bytes: float) -> list[str]:
    """Sources of the interpreter, repeated if they are too few."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts, size = [], 0
    while size < num_bytes:
        for path in files:
            if size < num_bytes and "site-packages" not in path.parts and path.stat().st_size:
                texts.append(path.read_bytes().decode("utf-8", "replace"))
                size += path.stat().st_size
    return texts


def measure_encoding(folder: Path, texts: list[str], repeats: int) -> Seconds:
    """Measures BPE encoding, once all engines are loaded."""
    import tiktoken
    import tokenizers

    tokenizer = load_tokenizer(folder)
    peer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    byte_of = {sign: byte for byte, sign in byte_signs().items()}
    ranks = {
        bytes(byte_of[sign] for sign in token): i
        for token, i in peer.get_vocab().items()
        if token != EOD
    }
    encoding = tiktoken.Encoding(
        "bench", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    tokenizer.encode_all(texts[:1])  # loads the engine
    calls: Calls = {
        "ours": lambda: tokenizer.encode_all(texts),
        "encode_batch_fast": lambda: [  # one by one, which takes it less CPU time
            peer.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in texts
        ],
        "tiktoken": lambda: [encoding.encode_ordinary(text) for text in texts],
    }

    def check(results: dict[str, Any]) -> None:
        assert results["ours"] == results["encode_batch_fast"] == results["tiktoken"]

    return least_seconds(calls, repeats, check)[0]


@cache
def _megatron_tokenizer(folder: Path) -> Any:
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(str(folder), use_fast=True)


def _encode(folder: Path, line: str) -> list[int]:
    ids = _megatron_tokenizer(folder).text_to_ids(json.loads(line)["text"])
    return [*ids, _megatron_tokenizer(folder).eod] if ids else ids


def megatron_preprocess(folder: Path, lines: Path, prefix: Path, workers: int) -> None:
    """Does what preprocess_data.py --append-eod does: a pool encodes lines, a builder writes."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with (
        lines.open(encoding="utf-8") as file,
        multiprocessing.Pool(workers, _megatron_tokenizer, (folder,)) as pool,
    ):
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype_for_vocab(VOCAB).type)
        for ids in pool.imap(partial(_encode, folder), file, 32):
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")
        pool.close()
        pool.join()


def measure_preprocessing(folder: Path, texts: list[str], workers: int, repeats: int) -> Seconds:
    """Measures preprocessing of half of the texts and of all, and returns the difference."""
    _megatron_tokenizer(folder)  # before a pool is forked, as Megatron does
    calls: Calls = {}
    counts = {"half": len(texts) // 2, "all": len(texts)}
    for amount, count in counts.items():
        lines, prefix = folder / f"{amount}.jsonl", folder / f"megatron_{amount}"
        lines.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts[:count]), encoding="utf-8"
        )
        job = Job((lines,), str(folder / f"ours_{amount}"), Recipe(str(folder), append_eod=True))
        calls[f"ours {amount}"] = partial(preprocess, job, workers, overwrite=True)
        calls[f"megatron {amount}"] = partial(megatron_preprocess, folder, lines, prefix, workers)

    def check(_: dict[str, Any]) -> None:
        for file in (f"{amount}{suffix}" for amount in counts for suffix in (".bin", ".idx")):
            ours, megatron = ((folder / f"{name}_{file}").read_bytes() for name in PROVIDERS)
            assert ours == megatron, file

    seconds, _ = least_seconds(calls, repeats, check)
    return {name: seconds[f"{name} all"] - seconds[f"{name} half"] for name in PROVIDERS}


def write_index(prefix: str, tokens: float, seed: int) -> None:
    """Writes a dataset of log-normal document lengths, whose tokens are a hole in the file."""
    generator = np.random.default_rng(seed)
    count = int(tokens / MEAN_TOKENS)
    lengths = 1 + generator.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, count).astype(np.int64)
    lengths.astype("<i4").tofile(f"{prefix}.lengths.partial")
    # the index alone is read, so the tokens need no bytes on disk
    with open(f"{prefix}.bin.partial", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
    finish_partial(prefix, np.dtype(np.uint16))


class _Tokenizer:
    """What Megatron's datasets read of a tokenizer."""

    eod, vocab_size = 0, VOCAB
    unique_identifiers: dict[str, str] = {}


def megatron_samples(prefixes: Sequence[str], weights: list | None, count: int, cache: Path) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LEN,
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=_Tokenizer(),
        blend=(list(prefixes), weights),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [count, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def measure_order(prefixes: Sequence[str], tokens: float, cache: Path, repeats: int) -> Seconds:
    """Measures building and storing the indices of an epoch, of one dataset or of a blend."""
    count, blended = int(tokens // SEQ_LEN), len(prefixes) > 1

    def build_megatron() -> Any:
        shutil.rmtree(cache, ignore_errors=True)
        return megatron_samples(prefixes, list(WEIGHTS) if blended else None, count, cache)

    def build_ours() -> Samples:
        shutil.rmtree(cache, ignore_errors=True)
        blend = [f"{weight} {prefix}" for weight, prefix in zip(WEIGHTS, prefixes)]
        return open_samples(
            blend if blended else list(prefixes),
            seq_len=SEQ_LEN,
            order="megatron",
            seed=SEED,
            num_samples=count,
            split="1,0,0",
            cache_dir=cache,
        )

    def check(results: dict[str, Any]) -> None:
        ours, megatron = results["ours"], results["megatron"]
        assert ours.num_samples == len(megatron)
        for stream, dataset in zip(ours.streams, megatron.datasets if blended else [megatron]):
            assert (stream.order.sample_index == dataset.sample_index).all()
            assert (stream.order.shuffle_index == dataset.shuffle_index).all()
        # about a thousand samples of a blend
        for i in range(0, count, 1 + count // 1000) if blended else ():
            stream, number = ours.locate(i)
            expected = megatron.dataset_index[i], megatron.dataset_sample_index[i]
            assert (ours.streams.index(stream), number) == expected

    calls: Calls = {"ours": build_ours, "megatron": build_megatron}
    return least_seconds(calls, repeats, check)[0]


def measured_rows(arguments: Namespace, folder: Path) -> Iterator[tuple[str, Seconds]]:
    """Yields the rows of the table."""
    import torch.distributed as dist

    repeats = arguments.repeats
    texts = read_texts(arguments.mb * 1e6)
    train_byte_level(texts, VOCAB, folder)
    yield "BPE encoding", measure_encoding(folder, texts, repeats)
    for workers in (1, 2):
        name = f"preprocessing, {workers} worker{'s' * (workers > 1)}"
        yield name, measure_preprocessing(folder, texts, workers, repeats)
    prefixes = [str(folder / f"index{i}") for i in range(5)]
    for i, prefix in enumerate(prefixes):
        write_index(prefix, arguments.tokens / (4 if i else 1), i)
    # Megatron-Core's datasets need a process group
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for name, blend in (("one dataset", prefixes[:1]), ("a blend of four", prefixes[1:])):
            seconds = measure_order(blend, arguments.tokens, folder / "cache", repeats)
            yield f"order: {name}", seconds
    finally:
        dist.destroy_process_group()


def run(arguments: Namespace) -> None:
    warnings.simplefilter("ignore")  # megatron-core announces what it would do with a GPU
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            print_rows(measured_rows(arguments, Path(folder)), seconds_line, arguments.json)
    except ImportError as error:
        raise ValueError(error) from error


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    return exit_code("bench_data", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
