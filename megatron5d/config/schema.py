"""The whole configuration as frozen dataclasses, one per Hydra group; units are said, defaults are here.

Only plain values live here. What does not fit together is refused by `laws.py`, what is spelled wrong by `load.py`;
everything below the door receives these objects and never a Hydra node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts (names as in Hugging Face's `rope_scaling`)."""

    type: str = "none"  # none | linear | llama3 | yarn
    factor: float = 1.0  # new context / original context
    original_max_positions: int = 8192  # tokens the model was trained on before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a dim is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a dim is interpolated
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None = 0.1 ln(factor) + 1
    mscale: float = 1.0  # yarn, DeepSeek's variant of attention_factor
    mscale_all_dim: float = 0.0  # yarn, DeepSeek's variant: divides attention_factor; mla: scales the softmax


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: everything that changes the function computed, nothing about how it is spread over ranks."""

    name: str = "tiny"
    from_hf: str | None = None  # a folder with config.json; when given, the fields below come from it
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 176
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    vocab_size: int = 256  # the true vocabulary; padding to the tensor-parallel size is internal
    max_positions: int = 4096  # tokens; rows of the position table where position=learned
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    activation: str = "swiglu"  # swiglu | gelu | gelu_tanh
    position: str = "rope"  # rope | learned
    rope_theta: float = 10000.0
    rope_interleaved: bool = False  # False: half-split pairs (Llama); True: neighbouring pairs
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qk_norm: bool = False  # RMSNorm over head_dim on q and k (Qwen3)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    attention_causal: bool = True  # a query sees no token behind it; False: the whole row, or document
    attention_window: int | None = None  # tokens that a query sees on a side, itself included; None = all
    attention_softcap: float = 0.0  # cap·tanh(score/cap); 0 = off
    attention_sinks: bool = False  # a learned logit per head that every query also sees, without a value
    attention: str = "gqa"  # gqa (from MHA to MQA) | mla: queries, keys and values from small latents (DeepSeek)
    q_lora_rank: int | None = None  # mla: features of the query's latent; None = queries straight from the hidden state
    kv_lora_rank: int = 512  # mla: features of the latent that keys and values share
    qk_nope_head_dim: int = 128  # mla: features of a head without rotary position; head_dim is not used
    qk_rope_head_dim: int = 64  # mla: features with rotary position, even; their key is shared by all heads
    v_head_dim: int = 128  # mla: features of a head's value
    logit_softcap: float = 0.0  # the same on the logits; 0 = off
    init_std: float = 0.02  # normal initialisation of matrices and embeddings
    init_scale_output: bool = True  # attention and MLP output matrices with init_std / sqrt(2·num_layers)
    num_experts: int = 0  # routed experts of a MoE layer; 0 = every layer is dense
    top_k: int = 2  # experts that a token is sent to
    moe_ffn_hidden_size: int | None = None  # features inside one expert; None = ffn_hidden_size
    shared_ffn_hidden_size: int = 0  # features inside the shared experts, all of them together; 0 = none
    first_k_dense: int = 0  # layers at the bottom that stay dense
    moe_interval: int = 1  # above them every so manyth layer of the model is MoE, counted from 1
    moe_layers: list[int] | None = None  # the MoE layers, counted from 0; None = by first_k_dense and moe_interval
    router_score: str = "softmax"  # softmax | sigmoid
    norm_topk_prob: bool = True  # the chosen scores are divided by their sum
    routed_scaling_factor: float = 1.0  # multiplies the weights of the chosen experts
    num_groups: int = 1  # groups of neighbouring experts; a token chooses groups first
    top_groups: int = 1  # groups that a token may choose experts from
    group_score: str = "max"  # what a group is worth: max (DeepSeek-V2) | top2_sum (DeepSeek-V3)
    router_bias: bool = False  # a bias per expert that counts when experts are chosen and not in their weights
    num_mtp_layers: int = 0  # blocks behind the last layer, each predicting one more token ahead (DeepSeek-V3's MTP)

    @property
    def expert_hidden_size(self) -> int:
        """Features inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def output_init_std(self) -> float:
        """Initial standard deviation of the matrices that write into the residual stream."""
        return self.init_std / math.sqrt(2 * self.num_layers) if self.init_scale_output else self.init_std


@dataclass(frozen=True)
class InitConfig:
    """Where the first weights come from."""

    from_hf: str | None = None  # a folder with *.safetensors; None = random from train.seed
    from_checkpoint: str | None = None  # another run's checkpoint, or folder of them: its weights, nothing else of it


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the axes, in ranks; dp = world / (tp·cp·pp) is what remains."""

    tp: int = 1
    sp: bool = False  # sequence parallelism: activations between tp regions are cut along the sequence
    tp_overlap: str = "none"  # none | chunked | fused: under sp, a collective goes in chunks under its layer's product
    cp: int = 1
    cp_method: str = "ring"  # ring | allgather | ulysses | two_level
    cp_inner: int = 1  # two_level: neighbouring cp ranks (of one node) that exchange heads; the ring runs over the rest
    cp_compress_kv: bool = False  # mla: latents travel over cp instead of keys and values, projected where they arrive
    pp: int = 1
    vpp: int = 1  # model chunks per pipeline rank
    ep: int = 1
    etp: int | None = None  # tensor parallelism inside an expert; None = tp
    ep_inner: int = 1  # ep ranks of one node: a token crosses to a node once, then goes on inside; 1 = straight
    dp_replicate: int = 1  # HSDP: dp = dp_replicate × dp_shard
    zero: int = 0  # 0 nothing sharded, 1 optimiser state, 2 and gradients, 3 and weights
    regather: str = "per_microbatch"  # zero 3: per_microbatch | per_step: gathered weights stay until their last use
    reduce: str = "per_microbatch"  # zero 2, 3: gradients are reduced per_microbatch | per_step: kept whole until then
    order: list[str] = field(default_factory=lambda: ["pp", "dp", "cp", "tp"])  # slowest axis first
    timeout_s: float = 1800.0  # a collective that waits longer ends the run


@dataclass(frozen=True)
class PipelineConfig:
    """The schedule of micro-batches over stages."""

    schedule: str = "1f1b"
    layout: list[int] | None = None  # layers per stage; None = dealt out by `split`
    split: str = "even"  # even: as many layers on each stage as on the next | cost: by FLOPs, the head's included
    balance: str = "auto"  # what is evened: stages | ranks, each with all its stages, of which some may get no layer |
    # auto: stages; with schedule=auto this and `split` as the search finds it faster
    embedding_layers: float = 0.0  # even: what the embedding counts for on the first stage, in layers
    head_layers: float = 0.0  # even: what the head counts for on the last stage, in layers
    memory: float = 1.0  # auto: activations that a rank may hold, in multiples of what 1F1B holds (pp micro-batches)
    copies: int = 1  # auto: 2 admits schedules that run both ways, with two copies of every parameter
    costs: str | None = None  # auto: times such as "F=1,I=1.2,W=0.8,comm=0.1,a2aF=0.5,a2aB=0.5"; None = by FLOPs
    flops_per_byte: float = 8000.0  # auto, costs by FLOPs: what a device computes while it sends a byte
    evaluations: int = 10000  # auto: schedules that the search tries
    search_s: float = 60.0  # auto: seconds after which the search ends, however few it has tried


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once."""

    steps: int = 100  # optimiser steps
    gbs: int = 8  # global batch, in sequences
    mbs: int = 1  # micro-batch on one data-parallel rank, in sequences
    seq_len: int = 128  # tokens
    seed: int = 1234
    gbs_ramp: list[int] | None = None  # [start gbs, increment, ramp length in sequences]; None = constant
    z_loss: float = 0.0  # coefficient of mean(logsumexp²) of the logits; 0 = off
    mtp_loss: float = 0.1  # coefficient of the mean loss of the model's multi-token prediction layers
    eval_every: int = 0  # steps; 0 = only when training ends
    eval_batches: int = 8  # global batches of the valid split per evaluation
    stop_after: int = 0  # leave, with a checkpoint, after this step; the schedules still plan for `steps`; 0 = never


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule."""

    name: str = "adamw"  # adamw | muon
    lr: float = 3e-4
    min_lr: float = 3e-5  # reached exactly at the last step
    schedule: str = "cosine"  # cosine | linear | wsd | constant
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: steps of the final decay
    weight_decay: float = 0.1
    decay_exclude: list[str] = field(default_factory=list)  # parameter-name globs that are not decayed
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.95  # muon: of the gradients, looked ahead by (Nesterov)
    ns_steps: int = 5  # muon: steps of the Newton-Schulz iteration
    muon_exclude: list[str] = field(  # muon: globs of parameters that AdamW updates, besides norms and biases
        default_factory=lambda: ["*embedding.*", "head.*", "*.router.*"]
    )
    clip: float = 1.0  # global gradient norm; 0 = no clipping
    on_nonfinite: str = "stop"  # a loss or gradient that is not finite: stop | skip the update
    skip_norm: float = 0.0  # gradient norm above which the update is skipped; 0 = never
    max_skipped: int = 10  # skipped updates in a row after which the run stops
    implementation: str = "auto"  # auto | torch | apex | kernel: clipping, update and cast in one pass
    offload: bool = False  # master weights and moments in the host's memory, updated there


@dataclass(frozen=True)
class PrecisionConfig:
    """Arithmetic of the model; moments are fp32 (fp64 with fp64)."""

    dtype: str = "fp32"  # fp64 | fp32 | bf16
    fp8: str = "none"  # none | tensorwise | blockwise: how the layers' matrices are multiplied
    fp8_pow2_scales: bool = True  # scales are powers of two: quantising again in other groups then loses nothing
    fp8_skip_first: int = 0  # layers at the bottom whose matrices are multiplied in `dtype`
    fp8_skip_last: int = 0  # the same at the top
    fp8_exclude: list[str] = field(default_factory=list)  # globs of matrices that are, too: "*.attention.out"
    fp8_gather: bool = True  # ZeRO-3 gathers these matrices in 8 bits, which changes no number; false: in `dtype`
    master_weights: bool = True  # fp32 copies that the optimiser moves; false: it moves bf16, rounding at random
    grad_dtype: str = "fp32"  # main gradients and their reduction: fp32 | bf16 (fp64 with dtype=fp64)


@dataclass(frozen=True)
class RecomputeConfig:
    """What is computed again in the backward instead of being kept."""

    mode: str = "none"  # none | selective | full
    parts: list[str] = field(default_factory=lambda: ["norm", "activation"])  # selective: which parts of a layer
    num_layers: int | None = None  # only the first so many layers of each stage; None = all
    stage_layers: list[int] | None = None  # the same stage by stage: the first stages hold the most micro-batches
    group_layers: int = 1  # full: so many neighbouring layers keep one input together
    logit_tokens: int | None = None  # tokens whose logits the head makes at a time; None = all, and keeps them
    offload: list[str] = field(default_factory=list)  # phases whose kept tensors wait on the host; full: inputs
    offload_min_bytes: int = 1 << 20  # bytes; smaller tensors stay on the device


@dataclass(frozen=True)
class MoeConfig:
    """Training of the router (the router's own architecture belongs to the model)."""

    balance: list[str] = field(default_factory=lambda: ["none"])  # none | aux | seq_aux | global_aux | bias
    aux_coef: float = 0.0  # coefficient of every auxiliary loss in `balance`
    z_coef: float = 0.0  # coefficient of mean(logsumexp²) of the router's logits
    bias_rate: float = 0.0  # balance=bias: change of an expert's bias per step
    capacity_factor: float | None = None  # tokens an expert takes of a micro-batch / its even share; None = all
    planned_imbalance: float = 1.5  # predicted memory: rows that the busiest rank's experts get, of an even share
    jitter: float = 0.0  # in training, what a router reads is multiplied by up to 1 ± this at random; 0 = off
    drop_by: str = "probability"  # whom a full expert refuses: probability (the smallest) | position (the last)
    fp8_dispatch: bool = False  # tokens travel to their experts in 8 bits (1×128 groups); back, and gradients, as ever
    log_every: int = 10  # steps between two records of every layer's load


@dataclass(frozen=True)
class DataConfig:
    """Token files and the order in which they are read."""

    train: list[str] = field(default_factory=list)  # "weight prefix" or "prefix" of Megatron .bin/.idx pairs
    valid: list[str] = field(default_factory=list)  # the same; empty = the valid part of `split`
    valid_sets: list[str] = field(default_factory=list)  # "name prefix" or "name weight prefix": a loss for each name
    split: str | None = None  # Megatron's "969,30,1" over the documents of `train`; None = all of it trains
    order: str = "shuffled"  # shuffled | sequential | megatron
    document_mask: bool = False  # documents of one sequence do not attend to each other; positions restart
    eod_mask_loss: bool = False  # no loss on the prediction made at an end-of-document token
    eod: int | None = None  # id of the end-of-document token; None = the tokenizer's
    tokenizer: str | None = None  # file that names the token that ends a document; tools/generate.py decodes with it
    cache_dir: str | None = None  # for sample indices; None = beside the first prefix
    prefetch: int = 2  # global batches read ahead


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved and what it starts from."""

    dir: str | None = None  # None = no checkpoints
    every: int = 0  # steps; 0 = only at the end and on a signal
    keep: int = 2  # newest checkpoints kept; 0 = all
    async_save: bool = field(default=False, metadata={"key": "async"})  # write in the background; in YAML: async
    resume: str = "auto"  # auto: newest whole checkpoint if there is one | none | a checkpoint folder


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; one run for the whole job, written by rank 0."""

    mode: str = "disabled"  # online | offline | disabled
    project: str = "megatron5d"
    name: str | None = None
    entity: str | None = None
    dir: str | None = None  # None = the run directory


@dataclass(frozen=True)
class LogConfig:
    """What is written where."""

    dir: str | None = None  # the run directory (config.yaml, W&B files); None = nothing is written there
    jsonl: str | None = None  # one JSON object a step
    wandb: WandbConfig = field(default_factory=WandbConfig)
    every: int = 1  # steps between two records
    slow_rank: float | None = None  # work over that of peers above which a rank is named; None = 1.2 on GPUs; 0 = never
    progress: bool = True  # on rank 0: a bar on a terminal, elsewhere a line every 10 s
    traceback: bool = False  # the calls that led to a fault, also where one message tells it
    peak_tflops: float | None = None  # of one device, for MFU; None = known devices only
    memory_check: str = "warn"  # predicted memory at start-up: refuse what cannot fit | warn | off
    device_memory_gb: float | None = None  # 10⁹ bytes of one device; None = as this process's GPU says
    memory_snapshot: str | None = None  # folder for snapshots of GPU memory, taken when it runs out; None = none
    memory_snapshot_step: int = 0  # and after this step; 0 = never
    profile: str | None = None  # folder for the time of every phase in one step, and a trace of the next; None = none
    profile_step: int = 5  # which one, counted from this start of the run
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # who looks


@dataclass(frozen=True)
class Config:
    """One whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    init: InitConfig = field(default_factory=InitConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
