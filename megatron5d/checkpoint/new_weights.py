"""What a model has beyond the weights that it starts from: rows of a larger vocabulary, a head of
its own, MTP blocks.

New rows of the embedding and the head are the mean of the old ones. A new token then gets about the
average probability, and the loss hardly moves. Rows as in a new model give logits near 0, and where
a trained model's other logits lie far below they take all probability. A head that was tied starts
as the embedding, which it was. Blocks for multi-token prediction start as in a new run.
Source: Hewitt 2021, Initializing New Word Embeddings for Pretrained Language Models; transformers'
    `mean_resizing`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.config.derived import blocks
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.init_weights import initialize_rectangle
from megatron5d.topology.shard_spec import ShardSpec

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
Held = Sequence[tuple[ShardSpec, ShardedTensor]]

EMBEDDING, HEAD = "embedding.weight", "head.weight"
_CHUNK = 1 << 24  # elements that are read at a time


def new_weight_notes(model: ModelConfig, saved: Iterable[str], rows: int) -> list[str]:
    """Returns a line for each kind of part that a model has and its source does not."""
    saved, told = set(saved), []
    if rows < model.vocab_size:
        told.append(
            f"rows {rows} to {model.vocab_size - 1} of the vocabulary start as the mean of the {rows} old ones"
        )
    if not model.tie_embeddings and HEAD not in saved:
        told.append("the head, which was tied, starts as the embedding")
    if lacking := [i for i in blocks(model)[model.num_layers :] if not _of_block(i, saved)]:
        told.append(
            f"multi-token prediction layers {', '.join(map(str, lacking))} start as in a new run"
        )
    return told


@torch.no_grad()
def fill_new_weights(
    held: Held, model: ModelConfig, saved: Mapping[str, Sequence[int]], read: Read, seed: int
) -> list[tuple[ShardSpec, ShardedTensor]]:
    """Fills the tensors of a rank that have new parts. No communication.

    Args:
        held: what the rank holds of the model, in any dtype.
        saved: global shape of each of the source's tensors, by our names.
        read: returns the rectangle of a source's tensor with a (name, offset, shape).
        seed: of blocks that are drawn.

    Returns:
        The other tensors, which the source holds whole.
    """
    rest, means = [], dict[str, Tensor]()
    ahead = [i for i in blocks(model)[model.num_layers :] if not _of_block(i, saved)]
    for spec, tensor in held:
        source = EMBEDDING if spec.name == HEAD and HEAD not in saved else spec.name
        if any(_of_block(i, [spec.name]) for i in ahead):
            for offset, view in tensor.shards.items():
                initialize_rectangle(view, offset, spec, seed)
        elif spec.name in (EMBEDDING, HEAD) and _starts_from(spec, source, saved):
            rows = saved[source][0]
            for (row, column), view in tensor.shards.items():
                old = min(max(rows - row, 0), len(view))
                if old:
                    view[:old] = read(source, (row, column), (old, view.shape[1])).to(view.dtype)
                if old < len(view):
                    if source not in means:
                        means[source] = _mean(source, saved[source], read)
                    view[old:] = means[source][column : column + view.shape[1]].to(view.dtype)
        else:
            rest.append((spec, tensor))
    return rest


def _of_block(i: int, names: Iterable[str]) -> bool:
    return any(name.startswith(f"layers.{i}.") for name in names)


def _starts_from(spec: ShardSpec, source: str, saved: Mapping[str, Sequence[int]]) -> bool:
    """Returns whether a table has other rows than its source, all of which it keeps."""
    if (
        source not in saved
        or tuple(saved[source][1:]) != spec.shape[1:]
        or saved[source][0] > spec.shape[0]
    ):
        return False
    return source != spec.name or saved[source][0] < spec.shape[0]


def _mean(source: str, shape: Sequence[int], read: Read) -> Tensor:
    """Returns the mean of the rows, `[h]` fp64; every rank reads all of them in the same order."""
    rows, width = shape
    total, step = torch.zeros(width, dtype=torch.float64), max(1, _CHUNK // width)
    for row in range(0, rows, step):
        total += read(source, (row, 0), (min(step, rows - row), width)).double().sum(0)
    return total / rows
