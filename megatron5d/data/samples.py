"""The global order of samples: sample i has the same tokens on every rank, layout and restart.

The dataset of the i-th sample follows from the datasets' weights, by one of two rules: our own
repeats one evenly mixed cycle (a small index, any number of samples); Megatron's is greedy and
sequential (an index as long as the run).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np

from megatron5d.config.derived import Source, source_of, split_shares
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.sample_order import PackedStream, hash_key

if TYPE_CHECKING:
    from megatron5d.data.megatron_order import MegatronStream

INDEX_VERSION = 1  # raise when the meaning of a cached index changes


Stream = Union[PackedStream, "MegatronStream"]


class Samples:
    """All samples of a run, in their global order.

    Args:
        route: sample -> (index of the dataset, number of the sample in it).
        seq_len: tokens of a sample, without the extra one.
        num_samples: number of samples; None = no limit.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        route: Callable[[int], tuple[int, int]],
        seq_len: int,
        num_samples: int | None,
    ) -> None:
        self.streams, self.seq_len, self.num_samples = list(streams), seq_len, num_samples
        self._route = route

    def __getitem__(self, i: int) -> np.ndarray:
        """Ids of sample `i`, int64 `[seq_len + 1]`."""
        stream, k = self.locate(i)
        return stream.tokens(k).astype(np.int64)

    def document_starts(self, i: int) -> np.ndarray:
        """Offsets in sample `i` at which documents of the index begin, int64 in 1 … seq_len."""
        stream, k = self.locate(i)
        return stream.document_starts(k)

    def locate(self, i: int) -> tuple[Stream, int]:
        """The stream of sample `i`, and its number there.

        Raises:
            IndexError: the sample does not exist.
        """
        i = int(i)  # the shuffle would overflow with numpy's integers
        if i < 0 or (self.num_samples is not None and i >= self.num_samples):
            raise IndexError(
                f"sample {i}: data.order=megatron was built for {self.num_samples} samples; "
                "it requires train.steps · train.gbs of the entire run"
            )
        d, k = self._route(i)
        return self.streams[d], k


def open_samples(
    sources: Sequence[str],
    *,
    seq_len: int,
    order: str = "shuffled",
    seed: int = 0,
    num_samples: int | None = None,
    split: str | None = None,
    split_name: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    unweighted: str = "size",
) -> Samples:
    """Opens token files as one sequence of samples.

    Args:
        sources: `weight prefix` or `prefix` of .bin/.idx pairs.
        seq_len: tokens of a sample, without the extra one.
        order: shuffled (fixed chunks, permuted in each epoch), sequential (the same chunks in file
            order) or megatron (exactly GPTDataset's).
        num_samples: of the entire run; only megatron's order depends on it.
        split: "969,30,1", the shares of each dataset's documents for train, valid and test; None =
            all documents for each.
        part: train, valid or test.
        cache_dir: for megatron's indices; None = a folder `cache` next to the first prefix.
        unweighted: as in `mixing_weights`.

    Returns:
        The samples.

    Raises:
        ValueError: a file is damaged, the split is invalid, or there are too few tokens.
    """
    parsed = [source_of(entry) for entry in sources]
    datasets = [IndexedDataset(source.prefix) for source in parsed]
    if order == "megatron":
        folder = Path(parsed[0].prefix).parent / "cache" if cache_dir is None else Path(cache_dir)
        has_weights = any(source.weighted for source in parsed)
        by_size = unweighted == "size" and len(parsed) > 1 and not has_weights
        return _megatron_samples(
            parsed,
            datasets,
            seq_len,
            seed,
            num_samples,
            (split, split_name),
            folder,
            by_size=by_size,
        )
    streams = []
    for d, dataset in enumerate(datasets):
        documents = split_range(split, split_name, dataset.num_documents)
        # The key includes the index of the dataset, so that a file that is listed twice is not read
        # in the same order.
        key = hash_key(seed, d) if order == "shuffled" else None
        streams.append(PackedStream(dataset, documents, seq_len, key))
    weights = mixing_weights(parsed, [stream.num_tokens for stream in streams], unweighted)
    return Samples(streams, _own_route(weights), seq_len, None)


def _own_route(weights: list[float]) -> Callable[[int], tuple[int, int]]:
    """The `route` of our own mixture."""
    if len(weights) == 1:
        return lambda i: (0, i)
    ids, numbers, counts = mixing_cycle(weights)

    def route(i: int) -> tuple[int, int]:
        cycle, slot = divmod(i, len(ids))
        d = int(ids[slot])
        return d, int(numbers[slot]) + cycle * int(counts[d])

    return route


def _megatron_samples(
    sources: list[Source],
    datasets: list[IndexedDataset],
    seq_len: int,
    seed: int,
    num_samples: int | None,
    split_part: tuple[str | None, str],
    folder: Path,
    *,
    by_size: bool,
) -> Samples:
    """Samples in Megatron's order.

    As in Megatron, they are a blend if there are several datasets, or one with an explicit weight
    and a split; a list without weights is mixed by size, each dataset once. Megatron has no longer
    runs; here they continue as if the sizes were weights.
    """
    from megatron5d.data.megatron_order import SURPLUS, megatron_sizes

    def stream(d: int, size: int | None) -> MegatronStream:
        return _megatron_stream(datasets[d], split_part, seq_len, size, seed, folder)

    blended = len(sources) > 1 or (sources[0].weighted and split_part[0] is not None)
    if not blended:
        single = stream(0, num_samples)
        return Samples([single], lambda i: (0, i), seq_len, single.num_samples)
    shares = [source.weight for source in sources]
    if by_size:
        streams = [stream(d, None) for d in range(len(sources))]
        shares = [float(s.num_samples) for s in streams]
        if num_samples is None or num_samples <= sum(shares):
            size = int(sum(shares)) if num_samples is None else num_samples
            return _blend(sources, streams, normalized(shares), size, seq_len, folder)
    if num_samples is None:
        raise ValueError(
            "data.order=megatron with weights requires the number of samples of the run"
        )
    weights = normalized(shares)
    sizes = megatron_sizes(weights, num_samples, SURPLUS)
    streams = [stream(d, size) for d, size in enumerate(sizes)]
    size = sum(megatron_sizes(weights, num_samples, 0.0))
    # Megatron divides by the sum twice, which can change the last bit.
    weights = normalized(weights)
    return _blend(sources, streams, weights, size, seq_len, folder)


def _blend(
    sources: list[Source],
    streams: list[MegatronStream],
    weights: list[float],
    size: int,
    seq_len: int,
    folder: Path,
) -> Samples:
    """Megatron's mixture of streams, of `size` samples, by normalized weights."""
    from megatron5d.data.megatron_order import cached_arrays, megatron_blend

    def build() -> dict[str, np.ndarray]:
        ids, numbers = megatron_blend(weights, size)
        return {"ids": ids, "numbers": numbers}

    inputs = {"version": INDEX_VERSION, "kind": "megatron blend", "weights": weights, "size": size}
    blend = cached_arrays(folder, inputs, ("ids", "numbers"), build)
    ids, numbers = blend["ids"], blend["numbers"]
    for d, (stream, needed) in enumerate(zip(streams, np.bincount(ids, minlength=len(streams)))):
        if needed > (stream.num_samples or 0):
            raise ValueError(
                f"data.order=megatron: the blend takes {needed} samples of {sources[d].prefix}, "
                f"which was built for {stream.num_samples}; raise its weight {sources[d].weight} "
                "slightly"
            )
    return Samples(streams, lambda i: (int(ids[i]), int(numbers[i])), seq_len, size)


def _megatron_stream(
    dataset: IndexedDataset,
    split_part: tuple[str | None, str],
    seq_len: int,
    num_samples: int | None,
    seed: int,
    folder: Path,
) -> MegatronStream:
    from megatron5d.data.megatron_order import (
        MegatronStream,
        SampleOrder,
        build_sample_order,
        cached_arrays,
    )

    sequences = split_range(*split_part, dataset.num_sequences)

    def build() -> dict[str, np.ndarray]:
        try:
            order = build_sample_order(
                dataset.sequence_lengths, sequences, seq_len, num_samples, seed
            )
        except ValueError as error:
            raise ValueError(f"{dataset.prefix}: {error}") from error
        return vars(order)

    stat = dataset.idx_path.stat()
    inputs = {
        "version": INDEX_VERSION,
        "kind": "megatron order",
        "idx": [str(dataset.idx_path.resolve()), stat.st_size, stat.st_mtime_ns],
        "sequences": list(sequences),
        "seq_len": seq_len,
        "num_samples": num_samples,
        "seed": seed,
    }
    names = [field.name for field in fields(SampleOrder)]
    return MegatronStream(
        dataset, SampleOrder(**cached_arrays(folder, inputs, names, build)), seq_len
    )


PARTS = ("train", "valid", "test")


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in Megatron's arithmetic (numpy fp64), which decides ties."""
    array = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        total = np.sum(array)
    return (array / total).tolist() if np.isfinite(total) else normalized(array / array.max())


def mixing_weights(sources: Sequence[Source], sizes: Sequence[int], unweighted: str) -> list[float]:
    """Weight of each dataset of a list, on any scale.

    Args:
        sources: entries of the list.
        sizes: tokens or samples of each.
        unweighted: data.weights, the meaning of a list without weights: size or equal. In a list
            with weights, a prefix without one has weight 1.
    """
    if unweighted == "size" and not any(source.weighted for source in sources):
        return [float(size) for size in sizes]
    return [source.weight for source in sources]


def split_range(split: str | None, split_name: str, num_items: int) -> tuple[int, int]:
    """Contiguous range of items that a split string gives to one part.

    Args:
        split: as in `split_shares`; None = everything belongs to every part.
        part: train, valid or test.
        num_items: documents or sequences of the dataset.

    Returns:
        (begin, end) of the part; both are rounded half to even, as in Megatron.

    Raises:
        ValueError: the string is not up to three numbers, or gives the part nothing.
    """
    assert split_name in PARTS, split_name
    if split is None:
        return 0, num_items
    bounds = [0.0]
    for share in normalized(split_shares(split)):
        bounds.append(bounds[-1] + share)
    low, high = bounds[PARTS.index(split_name)], bounds[PARTS.index(split_name) + 1]
    begin, end = round(low * num_items), round(high * num_items)
    if begin >= end:
        raise ValueError(
            f"data.split={split!r} gives {split_name} {end - begin} of {num_items} documents; "
            f"raise its share to at least 1/{num_items}, or name files in data.{split_name}"
        )
    return begin, end


CYCLE = 1 << 16  # samples of a cycle of our own mixture; weights are exact to 1 / CYCLE


def mixing_cycle(
    weights: Sequence[float], cycle: int = CYCLE
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One cycle of our own mixture, with the datasets everywhere in proportion to their weights.

    The k-th of a dataset's c samples has the time (k + ½)/c of the cycle; sorting by time gives the
    order. In any prefix a dataset then differs from its exact share by less than one sample per
    other dataset.

    Args:
        weights: one per dataset, any positive scale.
        cycle: samples in a cycle.

    Returns:
        Dataset of each sample int32 `[cycle]`, its number within the dataset int64 `[cycle]`, and
        samples of each dataset per cycle int64 `[datasets]`.
    """
    num = len(weights)
    cycle = max(cycle, num)
    shares = np.array(normalized(weights)) * (cycle - num)
    # Every dataset has at least one sample, however small its weight.
    counts = np.floor(shares).astype(np.int64) + 1
    by_remainder = np.argsort(np.floor(shares) - shares, kind="stable")
    counts[by_remainder[: cycle - counts.sum()]] += 1
    ids = np.repeat(np.arange(num), counts)
    rank = np.arange(cycle) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((ids, (rank + 0.5) / counts[ids]))
    return ids[order].astype(np.int32), rank[order], counts
