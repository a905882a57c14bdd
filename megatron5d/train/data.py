"""The data of a run: which samples this data-parallel rank reads, for training and for validation."""

from __future__ import annotations

import numpy as np
import torch

from megatron5d.config.schema import Config
from megatron5d.data.loader import Loader
from megatron5d.data.sampler import samples_of_steps
from megatron5d.data.samples import Samples, open_samples
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.model.context import SequenceSharding
from megatron5d.topology.mesh import Mesh


def end_of_document(config: Config) -> int | None:
    """The id after which a new document begins: data.eod, or the tokenizer's."""
    if config.data.eod is not None or config.data.tokenizer is None:
        return config.data.eod
    return load_tokenizer(config.data.tokenizer).eod


class BlankSamples(Samples):
    """What the middle stages of a pipeline read: nothing. Their micro-batches have positions alone, and no file is
    opened for them."""

    def __init__(self, seq_len: int) -> None:
        super().__init__([], lambda i: (0, i), seq_len, None)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(self.seq_len + 1, dtype=np.int64)


def train_loader(config: Config, mesh: Mesh, consumed_samples: int, *, reads: bool = True) -> Loader:
    """The training data of this data-parallel rank, from `consumed_samples` on.

    Args:
        config: data, train, and the model's vocabulary.
        mesh: whose dp rank reads.
        consumed_samples: sequences of all steps so far.
        reads: this rank needs the tokens, not only their positions.
    """
    data, train = config.data, config.train
    if not reads:
        samples: Samples = BlankSamples(train.seq_len)
        return _loader(config, mesh, samples, consumed_samples, train.gbs_ramp, 0)
    samples = _train_samples(config)
    return _loader(config, mesh, samples, consumed_samples, train.gbs_ramp, data.prefetch)


def _train_samples(config: Config) -> Samples:
    data, train = config.data, config.train
    return open_samples(
        data.train,
        seq_len=train.seq_len,
        order=data.order,
        seed=train.seed,
        num_samples=samples_of_steps(train.steps, train.gbs, train.gbs_ramp),
        split=data.split,
        part="train",
        cache_dir=data.cache_dir,
    )


def first_rows(config: Config, steps: int) -> torch.Tensor:
    """int64 `[steps·gbs, s+1]`: the samples of a run's first steps, all of each global batch.

    Raises:
        ValueError: the files cannot be read so, or a token is not in the model's vocabulary.
    """
    samples = _train_samples(config)
    rows = torch.from_numpy(np.stack([samples[i] for i in range(steps * config.train.gbs)]))
    if rows.max() >= config.model.vocab_size:
        raise ValueError(f"data.train has token id {rows.max()}, model.vocab_size is {config.model.vocab_size}")
    return rows


def valid_loader(config: Config, mesh: Mesh, *, reads: bool = True) -> Loader | None:
    """The validation data from its beginning, the same batches at every evaluation; None where there is none."""
    data, train = config.data, config.train
    has_part = data.split is not None and float((data.split.split(",") + ["0"])[1]) > 0
    if not data.valid and not has_part:
        return None
    if not reads:
        return _loader(config, mesh, BlankSamples(train.seq_len), 0, None, 0)
    samples = open_samples(
        data.valid or data.train,
        seq_len=train.seq_len,
        order="megatron" if data.order == "megatron" else "sequential",
        seed=train.seed,
        num_samples=train.eval_batches * train.gbs,
        split=None if data.valid else data.split,
        part="valid",
        cache_dir=data.cache_dir,
    )
    return _loader(config, mesh, samples, 0, None, 0)


def _loader(config: Config, mesh: Mesh, samples, consumed: int, ramp: list[int] | None, prefetch: int) -> Loader:
    data, train = config.data, config.train
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Loader(
        samples,
        gbs=train.gbs,
        mbs=train.mbs,
        dp_rank=mesh["dp"].rank,
        dp_size=mesh["dp"].size,
        consumed_samples=consumed,
        gbs_ramp=ramp,
        document_mask=data.document_mask,
        eod=end_of_document(config),
        eod_mask_loss=data.eod_mask_loss,
        vocab_size=config.model.vocab_size,
        prefetch=prefetch,
        pin_memory=torch.cuda.is_available(),
        transform=SequenceSharding(config, mesh, device),
    )
