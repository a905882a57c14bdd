"""Weights that a model has beyond those that it starts from: rows of a larger vocabulary, a head
that is not tied, blocks for multi-token prediction.

New rows of the embedding and the head are the mean of the old ones, so a new token gets about the
average probability and the loss hardly moves. Rows as in a new model would give logits near 0 and
take all probability wherever a trained model's other logits lie far below. A head that was tied
starts as the embedding. Blocks for multi-token prediction start as in a new run.

Source: Hewitt 2021, Initializing New Word Embeddings for Pretrained Language Models; transformers'
    `mean_resizing`.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron5d.checkpoint.layout import ParameterShards, ReadRectangle
from megatron5d.config.derived import blocks
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.init_weights import initialize_rectangle
from megatron5d.topology.shard_spec import ShardSpec

EMBEDDING, HEAD = "embedding.weight", "head.weight"
_CHUNK = 1 << 24  # elements of one read


def new_weight_notes(model: ModelConfig, saved: Iterable[str], rows: int) -> list[str]:
    """A log line for each kind of weights that a model has and its source does not.

    Args:
        saved: names of the source's tensors.
        rows: of the source's embedding.
    """
    saved, notes = set(saved), []
    if rows < model.vocab_size:
        notes.append(
            f"rows {rows} to {model.vocab_size - 1} of the vocabulary start as the mean of the "
            f"{rows} old ones"
        )
    if not model.tie_embeddings and HEAD not in saved:
        notes.append("the head, which was tied, starts as the embedding")
    if new_blocks := _new_blocks(model, saved):
        notes.append(
            f"multi-token prediction layers {', '.join(map(str, new_blocks))} start as in a new run"
        )
    return notes


@torch.no_grad()
def fill_new_weights(
    shards: ParameterShards,
    model: ModelConfig,
    saved: Mapping[str, Sequence[int]],
    read: ReadRectangle,
    seed: int,
) -> ParameterShards:
    """Fills a rank's tensors that have rows or blocks which the source lacks. No communication.

    Args:
        shards: what the rank holds of the model, in any dtype.
        saved: global shape of each of the source's tensors, by our names.
        read: reads a rectangle of a source's tensor.
        seed: of blocks that are initialized.

    Returns:
        The other tensors, which the source holds completely.
    """
    in_source, means = [], dict[str, Tensor]()
    new_blocks = _new_blocks(model, saved)
    for spec, tensor in shards:
        source = EMBEDDING if spec.name == HEAD and HEAD not in saved else spec.name
        if any(_in_block(i, [spec.name]) for i in new_blocks):
            for offset, view in tensor.shards.items():
                initialize_rectangle(view, offset, spec, seed)
        elif spec.name in (EMBEDDING, HEAD) and _grows(spec, source, saved):
            rows = saved[source][0]
            for (row, column), view in tensor.shards.items():
                num_old = min(max(rows - row, 0), len(view))
                if num_old:
                    old = read(source, (row, column), (num_old, view.shape[1]))
                    view[:num_old] = old.to(view.dtype)
                if num_old < len(view):
                    if source not in means:
                        means[source] = _mean(source, saved[source], read)
                    columns = slice(column, column + view.shape[1])
                    view[num_old:] = means[source][columns].to(view.dtype)
        else:
            in_source.append((spec, tensor))
    return in_source


def _new_blocks(model: ModelConfig, saved: Iterable[str]) -> list[int]:
    """Blocks for multi-token prediction that the source lacks."""
    return [i for i in blocks(model)[model.num_layers :] if not _in_block(i, saved)]


def _in_block(i: int, names: Iterable[str]) -> bool:
    return any(name.startswith(f"layers.{i}.") for name in names)


def _grows(spec: ShardSpec, source: str, saved: Mapping[str, Sequence[int]]) -> bool:
    """Whether a table keeps all rows of its source and has more, or is another table."""
    if source not in saved:
        return False
    rows, *columns = saved[source]
    if tuple(columns) != spec.shape[1:] or rows > spec.shape[0]:
        return False
    return source != spec.name or rows < spec.shape[0]


def _mean(source: str, shape: Sequence[int], read: ReadRectangle) -> Tensor:
    """Mean of the rows, `[h]` fp64; every rank reads all of them in the same order."""
    rows, width = shape
    total, step = torch.zeros(width, dtype=torch.float64), max(1, _CHUNK // width)
    for row in range(0, rows, step):
        total += read(source, (row, 0), (min(step, rows - row), width)).double().sum(0)
    return total / rows
