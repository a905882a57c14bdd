"""The memory of other code bases for the same model and layout, to compare it with their measured
runs.

`tools/plan.py memory --as NAME` shows it. There are two ways:

- **megatron**: its layers keep what ours keep, so the forecast of our own code is used and what
  Megatron keeps besides is added (`megatron_terms`).
- **nanotron**: plain PyTorch layers, another division into stages, other gradients. What it keeps
  is computed here from its source code (`nanotron_rank`).

Every figure that was fitted, not read in source code, is a constant below, with the runs it was
fitted on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron5d.config.schema import Config, ModelConfig
from megatron5d.planning.memory.rank_memory import Peak, RankMemory, gemm_workspace, outside_bytes
from megatron5d.topology.grid import Sizes

CONVENTIONS = ("megatron", "nanotron")
MEGATRON_OPTIONS = ("te_fused_loss", "dropout", "unfused_attention")

# Fitted on every second run of the ultra-scale playbook's sweep
# (tests/unit/planning/published_playbook.csv), and rounded. A tensor that a collective reads or writes
# is freed only when the GPU has finished that collective, and the host is usually ahead of the GPU.
# A column is such a waiting tensor [s, b, h], not divided by tp.
HELD_COLUMNS = 8  # where the GPU keeps up with the host
# where the host is ahead: of a whole forward pass, limited by the launch queue
HELD_COLUMNS_AHEAD = 50
HELD_COLUMNS_A_LAYER = 3  # and besides, for each layer, of 1/tp of a column
# in a pipeline, of 1/tp of a column, for each micro-batch in flight: one is the output that was
# sent
SENT_COLUMNS = 6
# of a layer's forward on one rank; with fewer, launching kernels takes longer than running them
KEPT_UP_FLOP = 7.5e11


def with_terms(memory: RankMemory, terms: dict[str, int]) -> RankMemory:
    """Returns the memory of a rank with more activations at its peak, given as kind -> bytes."""
    activations = memory.peak.activations | {kind: count for kind, count in terms.items() if count}
    return dataclasses.replace(
        memory, peak=dataclasses.replace(memory.peak, activations=activations)
    )


def megatron_terms(
    config: Config, memory: RankMemory, num_stages: int, *, last: bool, options: Sequence[str] = ()
) -> dict[str, int]:
    """Returns the bytes that Megatron-LM's layers keep in addition to what ours keep.

    Args:
        config: of the run.
        memory: of the rank, as forecast for our code.
        num_stages: pp·vpp.
        last: whether the rank has the head.
        options: of MEGATRON_OPTIONS. te_fused_loss: `--cross-entropy-fusion-impl te`, whose
            backward overwrites the logits as ours does (the native fusion keeps the softmax too).
            dropout: it is on (Megatron's default is 0.1). unfused_attention: no flash attention, so
            scores are kept in 16 bits, and with dropout also its mask and result.

    Returns:
        kind -> bytes.

    Source: core/tensor_parallel/cross_entropy.py, core/fusions/fused_cross_entropy.py (a softmax in
        fp32 is saved);
    core/fusions/fused_bias_dropout.py (a mask of one byte for each of two sums of a layer);
    Korthikanti et al. 2022 (arXiv:2205.05198), equation 2 (5·a·s²·b bytes of scores).
    """
    t, parallel, model = config.train, config.parallel, config.model
    tokens = t.mbs * t.seq_len // parallel.cp
    layers = memory.peak.in_flight * model.num_layers // num_stages  # of one micro-batch each
    terms = {}
    if last and "te_fused_loss" not in options:
        terms["softmax in fp32"] = (
            (1 + model.num_mtp_layers) * 4 * tokens * model.vocab_size // parallel.tp
        )
    if "dropout" in options:
        mask = tokens * model.hidden_size // (parallel.tp if parallel.sp else 1)
        terms["dropout masks"] = 2 * mask * layers
    if "unfused_attention" in options:
        scores = tokens * t.seq_len * model.num_heads // parallel.tp
        terms["attention scores"] = (5 if "dropout" in options else 2) * scores * layers
    return {f"as megatron/{kind}": count for kind, count in terms.items()}


@dataclasses.dataclass(frozen=True)
class NanotronStage:
    """What a pipeline rank holds: the number of layers, and whether it has the embedding or the
    head."""

    layers: int
    embedding: bool
    head: bool


def nanotron_stages(model: ModelConfig, pp: int) -> list[NanotronStage]:
    """Returns nanotron's division into stages: by the cost of GEMMs, with the head; a rank ends
    with the block that reaches its share.

    Source: src/nanotron/models/base.py, build_model; models/llama.py, get_block_compute_costs.
    """
    h = model.hidden_size
    layer, head = 4 * h * h + 3 * model.ffn_hidden_size * h, model.vocab_size * h
    total = model.num_layers * layer + head
    blocks = [(0, "embedding"), *[(layer, "layer")] * model.num_layers, (head, "head")]
    held: list[list[str]] = [[] for _ in range(pp)]
    rank = done = 0
    for cost, name in blocks:
        done += cost
        held[rank].append(name)
        if done * pp >= total * (rank + 1) and rank < pp - 1:
            rank += 1
    return [
        NanotronStage(each.count("layer"), "embedding" in each, "head" in each) for each in held
    ]


def nanotron_rank(
    config: Config, sizes: Sizes, pp_rank: int, num_microbatches: int, architecture: str = "sm_90"
) -> RankMemory:
    """Returns one pipeline rank of nanotron under AFAB or 1F1B, with gradients accumulated in fp32
    and flash attention.

    Args:
        config: a dense model with gated layers in bf16, ZeRO 0 or 1, no recompute.
        sizes: of the axes.
        pp_rank: the pipeline rank.
        num_microbatches: of a step.
        architecture: of the GPU.

    Raises:
        ValueError: the configuration has something that is not modelled here.

    Source: src/nanotron/optim/gradient_accumulator.py and zero.py (4 + 4 + 8 bytes in fp32, 2 + 2
        in bf16),
    models/llama.py (what layers save), parallel/tensor_parallel/functional.py
    (_ShardedCrossEntropy).
    """
    _check_nanotron(config)
    model, tp, zero = config.model, config.parallel.tp, config.parallel.zero
    stage = nanotron_stages(model, sizes.pp)[pp_rank]
    weights = _nanotron_weights(model, stage, tp)
    tokens = config.train.mbs * config.train.seq_len
    in_flight = min(sizes.pp - pp_rank, num_microbatches)
    shards = sizes.dp if zero else 1
    # gradients in bf16 last from a backward to their addition to those in fp32;
    # DistributedDataParallel has buckets of them besides. With ZeRO-1 it is not used, and a
    # pipeline needs as much all the same: measured, not explained.
    twice = sizes.dp > 1 and (zero == 0 or sizes.pp > 1)
    activations = {
        "layers": in_flight * stage.layers * _nanotron_layer(config),
        "sent outputs": 0 if stage.head else in_flight * SENT_COLUMNS * _column(config) // tp,
        # logits and their softmax in fp32, and the logits or their gradient in bf16
        "loss": 10 * tokens * model.vocab_size // tp if stage.head else 0,
        "held by collectives": _held_by_collectives(config, sizes, stage),
    }
    communicators = sum(size > 1 for size in (sizes.dp, tp, sizes.pp)) + 1
    return RankMemory(
        weights=2 * weights,
        gradients=4 * weights,
        optimizer=12 * weights // shards,
        peak=Peak(
            {kind: count for kind, count in activations.items() if count},
            units=2 * weights * (2 if twice else 1),
            in_flight=in_flight,
        ),
        library=gemm_workspace(architecture),
        outside=outside_bytes(communicators),
    )


def _check_nanotron(config: Config) -> None:
    model, parallel = config.model, config.parallel
    unlike = {
        "model.num_experts": model.num_experts,
        "parallel.cp": parallel.cp - 1,
        "parallel.vpp": parallel.vpp - 1,
        "recompute.mode": config.recompute.mode != "none",
        "precision.fp8": config.precision.fp8 != "none",
        "precision.dtype": config.precision.dtype != "bf16",
        "parallel.zero": parallel.zero > 1,
        "model.attention": model.attention != "gqa",
        "model.activation": model.activation != "swiglu",
    }
    wrong = [key for key, value in unlike.items() if value]
    if wrong:
        raise ValueError(
            f"--as nanotron knows dense models with swiglu in bf16, ZeRO 0 and 1, dp, tp and pp; {wrong[0]} is "
            "something else here"
        )


def _nanotron_weights(model: ModelConfig, stage: NanotronStage, tp: int) -> int:
    """Returns number of parameters of a rank; a tied head is a copy where the embedding is on
    another rank."""
    h, width = model.hidden_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    matrices = h * (2 * width + 2 * keys) + 3 * h * model.ffn_hidden_size
    tables = stage.embedding + (stage.head and not (model.tie_embeddings and stage.embedding))
    return (
        stage.layers * (matrices // tp + 2 * h)
        + tables * model.vocab_size * h // tp
        + h * stage.head
    )


def _nanotron_layer(config: Config) -> int:
    """Returns bytes that one layer keeps of one micro-batch: two norms with their input and output,
    queries, keys, values and the attention's output, gate and up, the activation of the gate, and
    the gated output."""
    model, parallel = config.model, config.parallel
    norms = 4 * model.hidden_size // (parallel.tp if parallel.sp else 1)
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim // parallel.tp
    mlp = 4 * model.ffn_hidden_size // parallel.tp
    return 2 * config.train.mbs * config.train.seq_len * (norms + attention + mlp)


def _column(config: Config) -> int:
    """Returns bytes of one tensor [s, b, h] in bf16."""
    return 2 * config.train.mbs * config.train.seq_len * config.model.hidden_size


def _held_by_collectives(config: Config, sizes: Sizes, stage: NanotronStage) -> int:
    """Returns bytes of tensors that wait for collectives to finish."""
    tp, column = config.parallel.tp, _column(config)
    if _host_is_ahead(config, sizes):
        return HELD_COLUMNS_A_LAYER * stage.layers * column // tp + (
            HELD_COLUMNS_AHEAD * column if tp > 1 else 0
        )
    return HELD_COLUMNS * column if tp > 1 else 0


def _host_is_ahead(config: Config, sizes: Sizes) -> bool:
    """Returns whether the host is so far ahead of the GPU that many tensors wait to be freed.

    It always is without a pipeline, and in a long pipeline, where the GPU waits for other ranks.
    """
    model = config.model
    matrices = 4 * model.hidden_size**2 + 3 * model.ffn_hidden_size * model.hidden_size
    flop = 2 * config.train.mbs * config.train.seq_len * matrices / config.parallel.tp
    return sizes.pp == 1 or sizes.pp >= 4 or flop > KEPT_UP_FLOP
