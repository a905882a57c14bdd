"""What the runs of a parity check begin with: token rows, micro-batches and initial weights."""

import re
from collections.abc import Iterable
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from megatron5d.config.schema import Config
from megatron5d.data.batch import make_micro_batch
from megatron5d.phases.phase import IGNORED, MicroBatch
from megatron5d.topology.shard_spec import ShardSpec, spec_of

ROWS_SEED = 7  # of the random tokens


def make_rows(config: Config, steps: int, *, ignored: float = 0.0) -> Tensor:
    """Random token rows `[steps·gbs, s+1]`, int64.

    In the first step every token of the vocabulary is both read and predicted, where the batch is
    large enough.

    Args:
        ignored: largest share of a row that is padding, at its end.
    """
    generator = torch.Generator().manual_seed(ROWS_SEED)
    gbs, vocab = config.train.gbs, config.model.vocab_size
    shape = (steps * gbs, config.train.seq_len + 1)
    rows = torch.randint(0, vocab, shape, generator=generator)
    padding = torch.zeros(shape, dtype=torch.bool)
    if ignored:
        shortest = int(shape[1] * (1 - ignored))
        lengths = torch.randint(shortest, shape[1], (shape[0],), generator=generator)
        padding = torch.arange(shape[1])[None] > lengths[:, None]

    is_token, most_seen = ~padding[:gbs], -1
    # A token may be drawn for the first positions of rows only, which nothing predicts: of several
    # draws, the one wins in which most tokens are read and most are predicted.
    for _ in range(20):
        count = int(is_token.sum())
        permutations = [
            torch.randperm(vocab, generator=generator) for _ in range(-(-count // vocab))
        ]
        tokens = torch.cat(permutations)[:count]
        if config.data.eod is not None:  # documents end in every step
            tokens[vocab::4] = config.data.eod
        first_step = torch.full((gbs, shape[1]), IGNORED)
        first_step[is_token] = tokens
        shifts = (slice(None, -1), slice(1, None))
        num_seen = sum(first_step[:, shift][is_token[:, 1:]].unique().numel() for shift in shifts)
        if num_seen > most_seen:
            rows[:gbs], most_seen = first_step, num_seen
    return rows.masked_fill(padding, IGNORED)


def with_gaps(rows: Tensor, gbs: int) -> Tensor:
    """Rows with padding inside every other row of the last step, and throughout the last row.

    A run of one step, or of one sequence a step, keeps its rows as they are.
    """
    rows, length = rows.clone(), rows.shape[1]
    if len(rows) > gbs > 1:
        rows[-gbs::2, length // 4 : length // 2] = rows[-1] = IGNORED
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
