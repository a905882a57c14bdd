"""The whole configuration as frozen dataclasses, one for each Hydra group.

Each key has its name, type, default, unit, range and help here and nowhere else: `--help`,
`conf/*/default.yaml` and the checks of single values (`checks/values.py`) are derived from them.
`checks/` rejects values that do not fit together, `load.py` misspelled keys and values. All other
code gets these objects and never a Hydra node.
"""

import os
from dataclasses import dataclass, replace

from megatron5d.config.key import group, key, positive
from megatron5d.config.model_schema import ModelConfig
from megatron5d.config.model_schema import RopeScaling as RopeScaling
from megatron5d.config.output_schema import CheckpointConfig, LogConfig
from megatron5d.config.output_schema import WandbConfig as WandbConfig

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}  # by precision.dtype
PROVIDERS = ("auto", "triton", "torch")
IN_LOG_DIR = {"checkpoint.dir": "checkpoints", "log.jsonl": "metrics.jsonl"}  # where auto


@dataclass(frozen=True)
class InitConfig:
    """Where the initial weights come from."""

    from_hf: str | None = key(
        None, "folder with *.safetensors; null = random weights from train.seed"
    )
    from_checkpoint: str | None = key(
        None, "checkpoint of another run, or folder of checkpoints; only its weights are used"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the axes, in ranks; dp = world / (tp·cp·pp) is all remaining ranks."""

    # tensor
    tp: int = positive(1, "tensor parallelism", unit="ranks")
    sp: bool = key(
        False,
        "sequence parallelism: shard activations between tensor-parallel layers by sequence",
    )
    tp_overlap: str = key(
        "none",
        "with sp, collectives overlap with their GEMMs; fused: needs NVLink or one host",
        choices=("none", "chunked", "fused"),
    )
    # context
    cp: int = positive(1, "context parallelism", unit="ranks")
    cp_method: str = key(
        "ring", "how attention crosses cp", choices=("ring", "allgather", "ulysses", "two_level")
    )
    cp_inner: int = positive(
        1,
        "two_level: cp ranks of one node, which exchange heads; the ring connects the nodes",
        unit="ranks",
    )
    cp_compress_kv: bool = key(
        False,
        "mla: send latents over cp instead of keys and values, and project them on arrival",
    )
    # pipeline
    pp: int = positive(1, "pipeline parallelism", unit="ranks")
    vpp: int = positive(1, "model chunks per pipeline rank")
    # experts
    ep: int = positive(1, "expert parallelism", unit="ranks")
    etp: int | None = positive(
        None, "tensor parallelism inside each expert; null = tp", unit="ranks"
    )
    ep_inner: int = positive(
        1,
        "ep ranks of one node: a token is sent to each node once, then on to its ranks; "
        "1 = directly",
        unit="ranks",
    )
    # data
    dp_replicate: int = positive(1, "HSDP: dp = dp_replicate × dp_shard", unit="ranks")
    zero: int = key(
        0,
        "ZeRO: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also weights",
        choices=(0, 1, 2, 3),
    )
    zero3_gather: str = key(
        "per_microbatch",
        "zero 3: when weights are gathered; per_step keeps them until their last use",
        choices=("per_microbatch", "per_step"),
    )
    grad_reduce: str = key(
        "per_microbatch",
        "zero 2, 3: when gradients are reduced; per_step keeps them whole until then",
        choices=("per_microbatch", "per_step"),
    )
    order: list[str] = key(["pp", "dp", "cp", "tp"], "axes of the world, slowest first")
    timeout_s: float = positive(
        1800.0,
        "a collective that waits longer ends the run",
        unit="seconds",
        maximum=10**7,
    )


@dataclass(frozen=True)
class PipelineConfig:
    """The schedule of micro-batches over stages."""

    schedule: str = key(
        "1f1b",
        "gpipe | 1f1b | interleaved | interleaved_zb | interleaved_overlap | bfs | zb_h1 | zb_h2 "
        "| zb_v | v_half | v_min | dualpipe | dualpipe_v | auto | file:<path>",
    )
    layout: list[int] | None = key(
        None, "layers of each stage in order, MTP blocks after them; null = distributed by split"
    )
    split: str = key(
        "even",
        "how layers are distributed over stages: by number, or by FLOPs with those of the head",
        choices=("even", "cost"),
    )
    balance: str = key(
        "auto",
        "what is equalized; ranks: all stages of a rank together (a stage may get no layer); "
        "late, with two copies: ranks with the fewest layers in the middle; ends: late, with "
        "more layers on the first and last rank; auto: stages, and with schedule=auto whatever "
        "the search finds faster, also for split",
        choices=("auto", "stages", "ranks", "late", "ends"),
    )
    embedding_layers: float = key(
        0.0, "even: the embedding on the first stage counts as this many layers"
    )
    head_layers: float = key(0.0, "even: the head on the last stage counts as this many layers")
    # search (schedule=auto)
    memory: float = positive(
        1.0,
        "auto: activations that a rank may hold, in multiples of what 1F1B holds "
        "(pp micro-batches)",
    )
    copies: int = key(
        1,
        "copies of every parameter; with auto, 2 admits bidirectional schedules",
        choices=(1, 2),
    )
    costs: str | None = key(
        None, 'auto: times as in "F=1,I=1.2,W=0.8,comm=0.1,a2aF=0.5,a2aB=0.5"; null = by FLOPs'
    )
    flops_per_byte: float = key(
        8000.0,
        "auto, without costs: FLOPs that a device computes while it sends one byte; "
        "8000 = 400 TFLOP/s with 50 GB/s",
    )
    evaluations: int = key(
        10000, "auto: schedules that the search tries; it ends at the same point on any machine"
    )
    search_s: float = positive(
        60.0,
        "auto: the search ends after this time, even if it has tried fewer schedules",
        unit="seconds",
    )


@dataclass(frozen=True)
class TrainConfig:
    """Length of the training, batch sizes and evaluation."""

    steps: int = positive(100, "optimizer steps")
    gbs: int = positive(8, "global batch", unit="sequences")
    mbs: int = positive(1, "micro-batch on one data-parallel rank", unit="sequences")
    seq_len: int = positive(128, "length of a sequence", unit="tokens")
    seed: int = key(
        1234,
        "seed of initial weights, data order and all other random numbers",
        maximum=2**63 - 1,
    )
    gbs_ramp: list[str] | None = key(
        None,
        "how gbs is reached: [start gbs, increment, ramp length in sequences], or "
        '"0:768 250B:1536", the batch from a number of tokens on (K M B T) or of steps '
        "(500steps); null = constant",
    )
    z_loss: float = key(0.0, "coefficient of mean(logsumexp²) of the logits; 0 = off")
    mtp_loss: float = key(0.1, "coefficient of the mean loss of the multi-token prediction layers")
    eval_every: int = key(0, "steps between evaluations; 0 = only at the end of training")
    eval_batches: int = positive(8, "global batches of the validation data per evaluation")
    cuda_graph: str = key(
        "none",
        "what CUDA graphs replay; phases are captured in the second step",
        choices=("none", "phases"),
    )
    stop_after: int = key(
        0,
        "stop with a checkpoint after this step, while schedules still plan for all steps; "
        "0 = never",
    )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: str = key(
        "adamw",
        "optimizer; muon: orthogonal updates of the layers' matrices, AdamW for the rest",
        choices=("adamw", "muon"),
    )
    # learning rate
    lr: float = positive(3e-4, "peak learning rate, reached after warmup_steps")
    min_lr: float = key(3e-5, "learning rate of the last step")
    schedule: str = key(
        "cosine",
        "learning rate after the warm-up",
        choices=("cosine", "linear", "wsd", "constant"),
    )
    warmup_steps: int = key(0, "steps of linear warm-up from 0")
    decay_steps: int = key(0, "wsd: steps of the final decay")
    schedule_by: str = key(
        "steps",
        "unit of the schedule; samples: a step counts as much as its batch",
        choices=("steps", "samples"),
    )
    # parameters by their names
    weight_decay: float = key(
        0.1, "decoupled, multiplied by the learning rate; norms and biases are not decayed"
    )
    decay_exclude: list[str] = key([], "globs of parameter names that are not decayed")
    lr_scale: list[str] = key(
        [],
        'list of "factor glob", such as "0.1 *.router.*": multiplies lr, by the first glob that '
        "matches a parameter name",
    )
    decay_scale: list[str] = key([], "the same for weight_decay, where it applies")
    freeze: list[str] = key(
        [],
        "globs of parameter names that are never updated: no gradient, no optimizer state",
    )
    # AdamW
    betas: list[float] = key([0.9, 0.95], "adamw: of the first and second moment, each in [0, 1)")
    eps: float = positive(1e-8, "adamw: added to the root of the second moment")
    # Muon
    momentum: float = key(
        0.95, "muon: Nesterov momentum, the share that is kept each step", below=1
    )
    ns_steps: int = positive(5, "muon: steps of the Newton-Schulz iteration")
    muon_per_head: bool = key(
        False, "muon: treat each head's rows of q, k and v as a separate matrix"
    )
    muon_exclude: list[str] = key(
        ["*embedding.*", "head.*", "*.router.*"],
        "muon: globs of parameter names that AdamW updates, besides vectors",
    )
    # updates that are clipped or skipped
    clip: float = key(1.0, "largest global gradient norm; 0 = no clipping")
    on_nonfinite: str = key(
        "stop",
        "a loss or gradient that is not finite stops the run, or its update is skipped",
        choices=("stop", "skip"),
    )
    skip_norm: float = key(0.0, "global gradient norm above which the update is skipped; 0 = never")
    max_skipped: int = key(10, "updates skipped in a row after which the run stops")
    implementation: str = key(
        "auto",
        "code of the update; kernel, which auto selects on a GPU, makes one pass",
        choices=("auto", "torch", "apex", "kernel"),
    )
    offload: bool = key(
        False, "keep master weights and moments in host memory, and update them there"
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Arithmetic of the model; moments are fp32 (fp64 with fp64)."""

    dtype: str = key("fp32", "dtype of weights and activations", choices=("fp64", "fp32", "bf16"))
    fp8: str = key("none", "the layers' GEMMs in fp8", choices=("none", "tensorwise", "blockwise"))
    fp8_pow2_scales: bool = key(
        True, "round scales to powers of two, so that quantizing in other groups loses nothing"
    )
    fp8_skip_first: int = key(0, "first layers whose matrices are multiplied in dtype")
    fp8_skip_last: int = key(0, "last layers whose matrices are multiplied in dtype")
    fp8_exclude: list[str] = key(
        [], 'globs of other matrices that are multiplied in dtype, such as "*.attention.out"'
    )
    fp8_gather: bool = key(
        True, "zero 3: gather these weights in fp8, with the same values; false: in dtype"
    )
    master_weights: bool = key(
        True,
        "update fp32 copies of bf16 weights; false: update bf16 weights, with stochastic rounding",
    )
    grad_dtype: str = key(
        "fp32",
        "main gradients and their reduction (fp64 with dtype=fp64)",
        choices=("fp32", "bf16"),
    )


@dataclass(frozen=True)
class KernelsConfig:
    """Implementations of operations on a GPU; Triton computes what a library cannot."""

    attention: str = key(
        "auto",
        "attention (fa4: pip install flash-attn-4)",
        choices=("auto", "triton", "cudnn", "fa4"),
    )
    fp8: str = key("auto", "GEMMs with scales", choices=PROVIDERS)
    grouped: str = key("auto", "GEMMs of experts", choices=PROVIDERS)
    norm: str = key("auto", "normalization", choices=PROVIDERS)
    deterministic: bool = key(
        True, "use only kernels that give the same bits each time, unlike cuDNN's backward"
    )


@dataclass(frozen=True)
class RecomputeConfig:
    """What the backward recomputes instead of saving it."""

    mode: str = key(
        "none",
        "nothing, parts of a layer, or whole layers",
        choices=("none", "selective", "full"),
    )
    parts: list[str] = key(
        ["norm", "activation"],
        "selective: the parts",
        choices=("norm", "qkv", "attention", "activation", "mlp", "experts", "permute"),
    )
    num_layers: int | None = positive(
        None, "recompute only this many first layers of each stage; null = all"
    )
    stage_layers: list[int] | None = key(
        None, "num_layers stage by stage: the first stages hold the most micro-batches"
    )
    group_layers: int = positive(1, "full: this many adjacent layers save one input together")
    logit_tokens: int | None = positive(
        None,
        "any mode: the head computes the logits of this many tokens at a time; "
        "null = of all, and keeps them",
        unit="tokens",
    )
    offload: list[str] = key(
        [],
        "phases whose saved tensors go to host memory; inputs: those of full recomputation",
        choices=("attention", "mlp", "dispatch", "experts", "combine", "inputs"),
    )
    offload_min_bytes: int = key(
        1 << 20, "smaller tensors stay on the device", unit="bytes", maximum=2**53
    )


@dataclass(frozen=True)
class MoeConfig:
    """Training of the router; its architecture belongs to the model."""

    balance: list[str] = key(
        ["none"],
        "how the load of experts is balanced; a list combines several",
        choices=("none", "aux", "seq_aux", "global_aux", "bias"),
    )
    aux_coef: float = key(0.0, "coefficient of every auxiliary loss in balance")
    z_coef: float = key(0.0, "coefficient of mean(logsumexp²) of the router's logits; 0 = off")
    bias_rate: float = key(0.0, "balance=bias: change of an expert's bias per step")
    capacity_factor: float | None = positive(
        None,
        "limit of a micro-batch's tokens for one expert, in even shares; null = no limit",
    )
    planned_imbalance: float = key(
        1.5,
        "rows of the experts on the busiest rank, in even shares, for the memory forecast",
        minimum=1,
    )
    exchange: str = key(
        "counted",
        "tokens over ep; planned: each rank sends planned_imbalance even shares, and no counts",
        choices=("counted", "planned"),
    )
    # instead of, or besides, the router's own choices
    jitter: float = key(
        0.0,
        "in training, a router's input is multiplied by random factors of 1 ± this; 0 = off",
        below=1,
    )
    force_balanced: bool = key(
        False, "assign experts to tokens in rotation and ignore the router, for benchmarks"
    )
    replay: str | None = key(
        None, "file of the experts that tokens take instead of the router's; null = the router's"
    )
    record: str | None = key(
        None, "file to which the experts of every token are written, for replay"
    )
    drop_by: str = key(
        "probability",
        "which tokens a full expert drops: the least probable, or the last ones",
        choices=("probability", "position"),
    )
    fp8_dispatch: bool = key(
        False,
        "dispatch tokens to their experts in fp8 (1×128 groups), but not results and gradients",
    )
    log_every: int = positive(10, "steps between two records of the load of every layer")


@dataclass(frozen=True)
class DataConfig:
    """Token files and the order in which they are read."""

    train: list[str] = key(
        [],
        'list of "weight prefix" or "prefix", of prefix.bin and prefix.idx in Megatron\'s format',
    )
    weights: str = key(
        "size",
        "weights of a list that gives none: in proportion to tokens, or equal",
        choices=("size", "equal"),
    )
    valid: list[str] = key([], "the same for validation; empty = the valid part of split")
    valid_sets: list[str] = key(
        [],
        'list of "name prefix" or "name weight prefix": a validation loss for each name',
    )
    split: str | None = key(
        None,
        '"969,30,1": shares of train, valid and test in the documents of train; '
        "null = all for training",
    )
    order: str = key(
        "shuffled",
        "order of the samples",
        choices=("shuffled", "sequential", "megatron"),
    )
    sample_len: int | None = positive(
        None,
        "length of a sample; padding fills the rest of train.seq_len; null = no padding",
        unit="tokens",
    )
    document_mask: bool = key(
        False, "separate the documents of a sequence: no attention between them, positions restart"
    )
    eod_mask_loss: bool = key(
        False, "leave the prediction at an end-of-document token out of the loss"
    )
    # documents
    eod: int | None = key(
        None,
        "id of the end-of-document token; null = the tokenizer's, else documents are those of "
        "the .idx files",
    )
    tokenizer: str | None = key(
        None,
        "file that gives the end-of-document token, and with which tools/generate.py decodes",
    )
    cache_dir: str | None = key(None, "folder for sample indices; null = next to the first prefix")
    prefetch: int = key(2, "global batches read ahead", maximum=1024)
    skip_steps: list[str] = key(
        [], "steps, such as 300 or 120-169, whose samples are skipped without an update"
    )


@dataclass(frozen=True)
class Config:
    """One whole run. A path that is `auto` becomes one in log.dir, or null without log.dir."""

    model: ModelConfig = group(ModelConfig)
    init: InitConfig = group(InitConfig)
    parallel: ParallelConfig = group(ParallelConfig)
    pipeline: PipelineConfig = group(PipelineConfig)
    train: TrainConfig = group(TrainConfig)
    optim: OptimConfig = group(OptimConfig)
    precision: PrecisionConfig = group(PrecisionConfig)
    kernels: KernelsConfig = group(KernelsConfig)
    recompute: RecomputeConfig = group(RecomputeConfig)
    moe: MoeConfig = group(MoeConfig)
    data: DataConfig = group(DataConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    log: LogConfig = group(LogConfig)
    plugins: list[str] = key([], "Python files that register attentions, activations, schedules")

    def __post_init__(self) -> None:
        for path, name in IN_LOG_DIR.items():
            group, field = path.split(".")
            settings = getattr(self, group)
            if getattr(settings, field) == "auto":
                value = self.log.dir and os.path.join(self.log.dir, name)
                object.__setattr__(self, group, replace(settings, **{field: value}))
