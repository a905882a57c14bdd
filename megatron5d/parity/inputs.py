"""What the runs of a parity check begin with: token rows, micro-batches and initial weights."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import (
    batch_schedule,
    left_out_steps,
    sample_len,
    samples_of_steps,
)
from megatron5d.config.schema import Config
from megatron5d.data.batch import make_micro_batch
from megatron5d.data.samples import Samples
from megatron5d.phases.phase import IGNORED, MicroBatch
from megatron5d.topology.shard_spec import ShardSpec, spec_of

ROWS_SEED = 7  # of the random tokens


class Rows(Samples):
    """Samples of a parity check, as the run's loader reads them.

    Args:
        tokens: int64 `[n, s+1]`.
        starts: offsets at which documents begin, by sample; empty = the tokens tell.
    """

    def __init__(self, tokens: Tensor, starts: Mapping[int, np.ndarray] | None = None) -> None:
        self.streams, self.seq_len, self.num_samples = [], tokens.shape[1] - 1, len(tokens)
        self.tokens, self.starts = tokens, starts or {}

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[i].numpy()

    def document_starts(self, i: int) -> np.ndarray:
        """Offsets in sample `i` at which documents begin."""
        return self.starts[i]

    @property
    def padded(self) -> bool:
        """Whether any token is padding."""
        return bool((self.tokens == IGNORED).any())


def sample_ranges(config: Config, steps: int) -> dict[int, range]:
    """Numbers of the samples of every step, counted from 1, that data.skip_steps does not skip."""
    schedule, skipped = batch_schedule(config), set(left_out_steps(config, 0))
    ends = [samples_of_steps(step, schedule) for step in range(steps + 1)]
    ranges = {step: range(*ends) for step, ends in enumerate(pairwise(ends), 1)}
    return {step: numbers for step, numbers in ranges.items() if step not in skipped}


def make_rows(config: Config, steps: int, *, ignored: float = 0.0) -> Tensor:
    """Random token rows `[n, s+1]` of all samples of the steps, int64.

    In the first step that is made, every token of the vocabulary is both read and predicted, where
    the batch is large enough.

    Args:
        ignored: largest share of a row that is padding, at its end.
    """
    generator = torch.Generator().manual_seed(ROWS_SEED)
    num_rows = samples_of_steps(steps, batch_schedule(config))
    shape = (num_rows, sample_len(config) + 1)
    rows = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    padding = torch.zeros(shape, dtype=torch.bool)
    if ignored:
        shortest = int(shape[1] * (1 - ignored))
        lengths = torch.randint(shortest, shape[1], (shape[0],), generator=generator)
        padding = torch.arange(shape[1])[None] > lengths[:, None]
    first = next(iter(sample_ranges(config, steps).values()), range(0))
    is_first = slice(first.start, first.stop)
    rows[is_first] = _covering_rows(config, ~padding[is_first], generator)
    return rows.masked_fill(padding, IGNORED)


def _covering_rows(config: Config, is_token: Tensor, generator: torch.Generator) -> Tensor:
    """Rows with as many different tokens, read and predicted, as fit.

    A token may be drawn for the first positions of rows only, which nothing predicts: of several
    draws, the one wins in which most tokens are read and most are predicted.
    """
    vocab, count, most_seen = config.model.vocab_size, int(is_token.sum()), -1
    best = torch.full(is_token.shape, IGNORED)
    for _ in range(20):
        permutations = [
            torch.randperm(vocab, generator=generator) for _ in range(-(-count // vocab))
        ]
        tokens = torch.cat(permutations)[:count]
        if config.data.eod is not None:  # documents end in every step
            tokens[vocab::4] = config.data.eod
        rows = torch.full(is_token.shape, IGNORED)
        rows[is_token] = tokens
        shifts = (slice(None, -1), slice(1, None))
        num_seen = sum(rows[:, shift][is_token[:, 1:]].unique().numel() for shift in shifts)
        if num_seen > most_seen:
            best, most_seen = rows, num_seen
    return best


def with_gaps(config: Config, rows: Tensor, steps: int) -> Tensor:
    """Rows with padding inside every other row of the last step, and throughout the last row.

    A run of one step, or of one sequence a step, keeps its rows as they are.
    """
    rows, length = rows.clone(), rows.shape[1]
    ranges = list(sample_ranges(config, steps).values())
    if len(ranges) > 1 and len(last := ranges[-1]) > 1:
        gap = slice(length // 4, length // 2)
        rows[last.start : last.stop : 2, gap] = rows[last.stop - 1] = IGNORED
    return rows


def micro_batch(config: Config, rows: Tensor, numbers: Tensor | None = None) -> MicroBatch:
    """Micro-batch of the rows with these numbers, or of all rows where no numbers are given."""
    data, rows = config.data, rows if numbers is None else rows[numbers]
    batch = make_micro_batch(
        rows,
        document_mask=data.document_mask,
        eod=data.eod,
        eod_mask_loss=data.eod_mask_loss,
        causal=config.model.attention_causal,
    )
    return replace(batch, samples=numbers)


def perturb(parameters: Iterable[Tensor], coarse: bool = False) -> None:
    """Adds noise to vectors, which begin as ones and zeros, so that every gradient path is visible.

    The noise is the same on any layout.

    Args:
        coarse: round all parameters to bf16, vectors before and after the noise.
    """
    parameters = list(parameters)
    specs = {spec_of(parameter).name: spec_of(parameter) for parameter in parameters}
    for parameter in parameters:
        spec = spec_of(parameter)
        if coarse:
            parameter.data.copy_(parameter.data.bfloat16())
        if len(spec.shape) == 1:
            noise = _vector_noise(spec, specs)
            for piece in spec.pieces:
                span = slice(piece.offset[0], piece.offset[0] + piece.shape[0])
                values = parameter.data[piece.row : piece.row + piece.shape[0]]
                if coarse:
                    values.copy_(values.bfloat16() + noise[span].bfloat16())
                else:
                    values += noise[span].to(parameter.dtype)


def _vector_noise(spec: ShardSpec, specs: dict[str, ShardSpec]) -> Tensor:
    """Noise of a whole vector, fp64.

    Larger biases than the values that they are added to would make all tokens alike, and send them
    to the same experts.
    """
    generator = torch.Generator().manual_seed(len(spec.name) * 1009 + spec.shape[0])
    noise = 0.3 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    matrix = specs.get(re.sub(r"\.(linear_)?bias$", ".weight", spec.name))
    if spec.name.endswith("bias") and matrix is not None and len(matrix.shape) == 2:
        noise *= float(matrix.init)
        # Scores are the softmax or sigmoid of w·x, with features of about 1.
        if spec.name.endswith("router.bias"):
            noise *= sqrt(matrix.shape[1]) / matrix.shape[0]
    return noise
