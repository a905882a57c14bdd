"""Memory of other code bases for the same model and layout, for comparison with published runs.

`tools/plan.py memory --as NAME` shows it:

- **megatron**: its layers keep what ours keep and more. The forecast of our code is used, and
  `megatron_terms` adds the difference.
- **nanotron**: plain PyTorch layers, another division into stages, other gradients.
  `nanotron_rank` computes its memory from what its source code keeps.

Figures that were fitted, not read in source code, are constants below, with the runs they were
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
# (tests/unit/planning/published_playbook.csv), and rounded. A tensor that a collective reads or
# writes is freed only when the GPU has finished the collective, and the host is usually ahead of
# the GPU. A column is such a waiting tensor [s, b, h], not divided by tp.
HELD_COLUMNS = 8  # if the GPU keeps up with the host
# If the host is ahead: those of a full forward pass, limited by the launch queue.
HELD_COLUMNS_AHEAD = 50
HELD_COLUMNS_A_LAYER = 3  # and in addition, for each layer, of 1/tp of a column
# In a pipeline, of 1/tp of a column, for each micro-batch in flight: one is the sent output.
SENT_COLUMNS = 6
# FLOPs of a layer's forward on one rank, below which launching kernels takes longer than running.
KEPT_UP_FLOP = 7.5e11


def with_terms(memory: RankMemory, terms: dict[str, int]) -> RankMemory:
    """Memory of a rank with additional activations at its peak, kind -> bytes."""
    activations = memory.peak.activations | {kind: count for kind, count in terms.items() if count}
    return dataclasses.replace(
        memory, peak=dataclasses.replace(memory.peak, activations=activations)
    )


def megatron_terms(
    config: Config, memory: RankMemory, num_stages: int, *, last: bool, options: Sequence[str] = ()
) -> dict[str, int]:
    """Bytes that Megatron-LM's layers keep in addition to what ours keep.

    Args:
        config: of the run.
        memory: of the rank, as forecast for our code.
        num_stages: pp·vpp.
        last: whether the rank has the head.
        options: of MEGATRON_OPTIONS. te_fused_loss: `--cross-entropy-fusion-impl te`, whose
            backward overwrites the logits as ours does (the native fusion keeps the softmax, too).
            dropout: it is on (Megatron's default is 0.1). unfused_attention: no flash attention;
            scores are kept in 16 bits, and with dropout also its mask and result.

    Returns:
        kind -> bytes.

    Source: core/tensor_parallel/cross_entropy.py, core/fusions/fused_cross_entropy.py (a softmax in
        fp32 is saved); core/fusions/fused_bias_dropout.py (a mask of one byte for each of two sums
        of a layer); Korthikanti et al. 2022 (arXiv:2205.05198), equation 2 (5·a·s²·b bytes of
        scores).
    """
    t, parallel, model = config.train, config.parallel, config.model
    tokens = t.mbs * t.seq_len // parallel.cp
    layers = memory.peak.in_flight * model.num_layers // num_stages  # of one micro-batch each
    terms = {}
    if last and "te_fused_loss" not in options:
        logits = (1 + model.num_mtp_layers) * tokens * model.vocab_size
        terms["softmax in fp32"] = 4 * logits // parallel.tp
    if "dropout" in options:
        mask = tokens * model.hidden_size // (parallel.tp if parallel.sp else 1)
        terms["dropout masks"] = 2 * mask * layers
    if "unfused_attention" in options:
        scores = tokens * t.seq_len * model.num_heads // parallel.tp
        terms["attention scores"] = (5 if "dropout" in options else 2) * scores * layers
    return {f"as megatron/{kind}": count for kind, count in terms.items()}


@dataclasses.dataclass(frozen=True)
class NanotronStage:
    """Contents of a pipeline rank: number of layers, embedding, head."""

    layers: int
    embedding: bool
    head: bool


def nanotron_stages(model: ModelConfig, pp: int) -> list[NanotronStage]:
    """Nanotron's division into stages, by the cost of GEMMs including the head.

    A rank ends with the block that reaches its share.

    Source: src/nanotron/models/base.py, build_model; models/llama.py, get_block_compute_costs.
    """
    h = model.hidden_size
    layer, head = 4 * h * h + 3 * model.ffn_hidden_size * h, model.vocab_size * h
    total = model.num_layers * layer + head
    blocks = [(0, "embedding"), *[(layer, "layer")] * model.num_layers, (head, "head")]
    names: list[list[str]] = [[] for _ in range(pp)]
    rank = assigned = 0
    for cost, name in blocks:
        assigned += cost
        names[rank].append(name)
        if assigned * pp >= total * (rank + 1) and rank < pp - 1:
            rank += 1
    return [
        NanotronStage(of_rank.count("layer"), "embedding" in of_rank, "head" in of_rank)
        for of_rank in names
    ]


def nanotron_rank(
    config: Config, sizes: Sizes, pp_rank: int, num_microbatches: int, architecture: str = "sm_90"
) -> RankMemory:
    """Memory of one pipeline rank of nanotron: AFAB or 1F1B, fp32 gradients, flash attention.

    Args:
        config: a dense model with gated layers in bf16, ZeRO 0 or 1, no recompute.
        sizes: of the axes.
        pp_rank: the pipeline rank.
        num_microbatches: of a step.
        architecture: of the GPU.

    Raises:
        ValueError: the configuration uses a feature that is not modeled here.

    Source: src/nanotron/optim/gradient_accumulator.py and zero.py (4 + 4 + 8 bytes in fp32, 2 + 2
        in bf16), models/llama.py (what layers save), parallel/tensor_parallel/functional.py
        (_ShardedCrossEntropy).
    """
    _check_nanotron(config)
    model, tp, zero = config.model, config.parallel.tp, config.parallel.zero
    stage = nanotron_stages(model, sizes.pp)[pp_rank]
    weights = _nanotron_weights(model, stage, tp)
    tokens = config.train.mbs * config.train.seq_len
    in_flight = min(sizes.pp - pp_rank, num_microbatches)
    shards = sizes.dp if zero else 1
    # Gradients in bf16 live from a backward to their addition to those in fp32, and
    # DistributedDataParallel has buckets for them in addition. ZeRO-1 does not use it, but a
    # pipeline needs as much: measured, not explained.
    has_buckets = sizes.dp > 1 and (zero == 0 or sizes.pp > 1)
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
            units=2 * weights * (2 if has_buckets else 1),
            in_flight=in_flight,
        ),
        library=gemm_workspace(architecture),
        outside=outside_bytes(communicators),
    )


def _check_nanotron(config: Config) -> None:
    model, parallel = config.model, config.parallel
    unsupported = {
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
    wrong = [key for key, value in unsupported.items() if value]
    if wrong:
        raise ValueError(
            "--as nanotron requires a dense swiglu model in bf16, ZeRO 0 or 1, and only dp, tp "
            f"and pp (got another {wrong[0]})"
        )


def _nanotron_weights(model: ModelConfig, stage: NanotronStage, tp: int) -> int:
    """Number of parameters of a rank; a tied head is a copy if the embedding is elsewhere."""
    h, width = model.hidden_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    matrices = h * (2 * width + 2 * keys) + 3 * h * model.ffn_hidden_size
    tables = stage.embedding + (stage.head and not (model.tie_embeddings and stage.embedding))
    layers = stage.layers * (matrices // tp + 2 * h)
    return layers + tables * model.vocab_size * h // tp + h * stage.head


def _nanotron_layer(config: Config) -> int:
    """Bytes that one layer keeps of one micro-batch.

    Two norms with their input and output, queries, keys, values and attention's output, gate and
    up, the activation of the gate, and the gated output.
    """
    model, parallel = config.model, config.parallel
    norms = 4 * model.hidden_size // (parallel.tp if parallel.sp else 1)
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim // parallel.tp
    mlp = 4 * model.ffn_hidden_size // parallel.tp
    return 2 * config.train.mbs * config.train.seq_len * (norms + attention + mlp)


def _column(config: Config) -> int:
    """Bytes of one tensor [s, b, h] in bf16."""
    return 2 * config.train.mbs * config.train.seq_len * config.model.hidden_size


def _held_by_collectives(config: Config, sizes: Sizes, stage: NanotronStage) -> int:
    """Bytes of tensors that wait for collectives to finish."""
    tp, column = config.parallel.tp, _column(config)
    if not _host_is_ahead(config, sizes):
        return HELD_COLUMNS * column if tp > 1 else 0
    of_layers = HELD_COLUMNS_A_LAYER * stage.layers * column // tp
    return of_layers + (HELD_COLUMNS_AHEAD * column if tp > 1 else 0)


def _host_is_ahead(config: Config, sizes: Sizes) -> bool:
    """Whether the host is so far ahead of the GPU that many tensors wait to be freed.

    It always is without a pipeline, and in a long one, where the GPU waits for other ranks.
    """
    model = config.model
    matrices = 4 * model.hidden_size**2 + 3 * model.ffn_hidden_size * model.hidden_size
    flop = 2 * config.train.mbs * config.train.seq_len * matrices / config.parallel.tp
    return sizes.pp == 1 or sizes.pp >= 4 or flop > KEPT_UP_FLOP
