"""The whole configuration as frozen dataclasses, one for each Hydra group, with units and defaults.

They hold plain values only. `checks/__init__.py` refuses values that do not fit together, `load.py`
keys and values that are misspelled. All other code gets these objects and never a Hydra node.
"""

import math
from dataclasses import dataclass, field

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}  # by precision.dtype
GATED = ("swiglu", "geglu_tanh", "swiglu_clamped")  # activations of a gate and an up projection


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts (names as in Hugging Face's
    `rope_scaling`)."""

    type: str = "none"  # none | linear | llama3 | yarn
    factor: float = 1.0  # new context / original context
    original_max_positions: int = 8192  # tokens the model was trained on before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a dim is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a dim is interpolated
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None = 0.1 ln(factor) + 1
    mscale: float = 1.0  # yarn, DeepSeek's variant of attention_factor
    mscale_all_dim: float = (
        0.0  # yarn, DeepSeek's variant: divides attention_factor; mla: scales the softmax
    )
    truncate: bool = True  # yarn: the ramp begins and ends at whole dims


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: everything that changes the function computed, nothing about how it is
    spread over ranks."""

    name: str = "tiny"
    from_hf: str | None = (
        None  # a folder with config.json; when given, the fields below come from it
    )
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 176
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    vocab_size: int = 256  # tokens; the padding that tensor parallelism needs is added internally
    max_positions: int = 4096  # tokens; rows of the position table where position=learned
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    norm_zero_centered: bool = (
        False  # norms scale by 1 + weight (Gemma; Megatron's zero-centered gamma)
    )
    activation: str = "swiglu"  # swiglu | geglu_tanh | swiglu_clamped (gpt-oss) | gelu | gelu_tanh
    position: str = "rope"  # rope | learned
    rope_theta: float = 10000.0
    window_rope_theta: float | None = (
        None  # base in layers with attention_window (Gemma 3); None = as in all layers
    )
    rope_interleaved: bool = False  # False: half-split pairs (Llama); True: neighbouring pairs
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rotary_percent: float = 1.0  # share of head_dim that is rotated: its first features
    qk_norm: bool = False  # RMSNorm over head_dim on q and k (Qwen3)
    qk_norm_all_heads: bool = False  # qk_norm is over all heads together (OLMo 2)
    block_norm: str = (
        "pre"  # pre | post | both: where attention and MLP have their norms (post: OLMo 2)
    )
    parallel_block: str = (
        "none"  # none | two_norms | one_norm: attention and MLP both read the block's input, each
    )
    # through its own norm (NeoX) or through one (PaLM)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # multiplies token embeddings; sqrt(hidden_size) in Gemma
    attention_causal: bool = True  # a query sees no later token; False: the whole row, or document
    attention_window: int | None = (
        None  # tokens that a query sees on each side, itself included; None = all
    )
    window_layers: list[int] | None = (
        None  # the layers with attention_window, counted from 0; None = all
    )
    query_pre_attn_scalar: int | None = (
        None  # scores are divided by its square root (Gemma 2); None = head_dim
    )
    attention_softcap: float = 0.0  # cap·tanh(score/cap); 0 = off
    attention_sinks: bool = (
        False  # a learned logit per head that every query also sees, without a value
    )
    attention_gate: bool = (
        False  # heads' outputs are multiplied by the sigmoid of a projection of the input
    )
    attention: str = (
        "gqa"  # gqa (from MHA to MQA) | mla: queries, keys and values from small latents (DeepSeek)
    )
    q_lora_rank: int | None = (
        None  # mla: features of the query's latent; None = queries are projected directly
    )
    kv_lora_rank: int = 512  # mla: features of the latent that keys and values share
    qk_nope_head_dim: int = (
        128  # mla: features of a head without rotary position; head_dim is not used
    )
    qk_rope_head_dim: int = (
        64  # mla: features with rotary position, even; their key is shared by all heads
    )
    v_head_dim: int = 128  # mla: features of a head's value
    latent_norm_eps: float | None = None  # mla: norm_eps of the latents' norms; None = norm_eps
    logit_softcap: float = 0.0  # logits become cap·tanh(logit/cap); 0 = off
    init_std: float = 0.02  # standard deviation of the initial matrices and embeddings
    init_scale_output: bool = (
        True  # attention and MLP output matrices start with init_std / sqrt(2·num_layers)
    )
    num_experts: int = 0  # routed experts of a MoE layer; 0 = every layer is dense
    top_k: int = 2  # experts that a token is sent to
    moe_ffn_hidden_size: int | None = None  # features inside one expert; None = ffn_hidden_size
    shared_ffn_hidden_size: int = 0  # features inside all shared experts together; 0 = none
    shared_expert_gate: bool = (
        False  # the shared expert's output is multiplied by a sigmoid of the token (Qwen2-MoE)
    )
    first_k_dense: int = 0  # first layers that are dense
    moe_interval: int = 1  # of the layers after them, layer i is MoE if this divides i + 1
    moe_layers: list[int] | None = (
        None  # the MoE layers, counted from 0; None = by first_k_dense and moe_interval
    )
    router_score: str = "softmax"  # softmax | sigmoid
    norm_topk_prob: bool = True  # the chosen scores are divided by their sum
    routed_scaling_factor: float = 1.0  # multiplies the weights of the chosen experts
    num_groups: int = 1  # groups of neighbouring experts; a token chooses groups first
    top_groups: int = 1  # groups that a token may choose experts from
    group_score: str = "max"  # the score of a group: max (DeepSeek-V2) | top2_sum (DeepSeek-V3)
    router_bias: bool = (
        False  # a bias per expert that is used to choose experts and not in their weights
    )
    router_linear_bias: bool = (
        False  # a trained bias per expert, part of the router's logits (gpt-oss)
    )
    num_mtp_layers: int = (
        0  # blocks after the last layer, each predicting one more token ahead (MTP)
    )

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP makes a gate and an up projection."""
        return self.activation in GATED

    @property
    def expert_hidden_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return (
            self.qk_rope_head_dim
            if self.attention == "mla"
            else round(self.head_dim * self.rotary_percent)
        )

    @property
    def latents_travel(self) -> bool:
        """Whether tp sums the gradients of latent attention behind its down-projections, and not
        before them.

        So it does where queries have a latent, too, and all latents together are smaller than the
        hidden state.
        """
        latents = (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim
        return self.q_lora_rank is not None and latents < self.hidden_size

    @property
    def output_init_std(self) -> float:
        """Initial standard deviation of the matrices that write into the residual stream."""
        return (
            self.init_std / math.sqrt(2 * self.num_layers)
            if self.init_scale_output
            else self.init_std
        )


@dataclass(frozen=True)
class InitConfig:
    """Where the first weights come from."""

    from_hf: str | None = None  # folder with *.safetensors; None = random weights from train.seed
    from_checkpoint: str | None = (
        None  # checkpoint of another run, or folder of checkpoints: only its weights are used
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the axes, in ranks; dp = world / (tp·cp·pp) is what remains."""

    tp: int = 1
    sp: bool = False  # sequence parallelism: activations between tensor-parallel layers are sharded by sequence
    tp_overlap: str = "none"  # none | chunked | fused: with sp, collectives in chunks that overlap with their GEMMs
    cp: int = 1
    cp_method: str = "ring"  # ring | allgather | ulysses | two_level
    cp_inner: int = (
        1  # two_level: cp ranks of one node, which exchange heads; the ring runs over the rest
    )
    cp_compress_kv: bool = False  # mla: latents are sent over cp instead of keys and values
    pp: int = 1
    vpp: int = 1  # model chunks per pipeline rank
    ep: int = 1
    etp: int | None = None  # tensor parallelism inside each expert; None = tp
    ep_inner: int = 1  # ep ranks of one node: a token is sent to each node once, then on to its ranks; 1 = directly
    dp_replicate: int = 1  # HSDP: dp = dp_replicate × dp_shard
    zero: int = 0  # what is sharded: 0 nothing, 1 optimiser state, 2 and gradients, 3 and weights
    zero3_gather: str = "per_microbatch"  # zero 3: gather weights per_microbatch | per_step, kept until their last use
    grad_reduce: str = "per_microbatch"  # zero 2, 3: reduce gradients per_microbatch | per_step, kept whole until then
    order: list[str] = field(
        default_factory=lambda: ["pp", "dp", "cp", "tp"]
    )  # the axes of the world, slowest first
    timeout_s: float = 1800.0  # a collective that waits longer ends the run


@dataclass(frozen=True)
class PipelineConfig:
    """The schedule of micro-batches over stages."""

    schedule: str = "1f1b"
    layout: list[int] | None = (
        None  # layers of each stage in order, MTP blocks after them; None = distributed by split
    )
    split: str = "even"  # even: the same number of layers on each stage | cost: by FLOPs, with those of the head
    balance: str = "auto"  # what is equalised: stages | ranks (all stages of a rank together; a stage may get no layer)
    # | late: with two copies, ranks with the fewest layers in the middle | ends: late, with more
    # layers on the first and last rank
    # | auto: stages; with schedule=auto whatever the search finds faster, also for `split`
    embedding_layers: float = (
        0.0  # even: the embedding on the first stage counts as this many layers
    )
    head_layers: float = 0.0  # even: the head on the last stage counts as this many layers
    memory: float = 1.0  # auto: activations that a rank may hold, in multiples of what 1F1B holds (pp micro-batches)
    copies: int = 1  # auto: 2 admits bidirectional schedules, with two copies of every parameter
    costs: str | None = (
        None  # auto: times as in "F=1,I=1.2,W=0.8,comm=0.1,a2aF=0.5,a2aB=0.5"; None = by FLOPs
    )
    flops_per_byte: float = (
        8000.0  # auto, costs by FLOPs: FLOPs that a device computes while it sends one byte
    )
    evaluations: int = (
        10000  # auto: schedules that the search tries; ends it at the same point on any machine
    )
    search_s: float = 60.0  # auto: seconds after which the search ends, even if it has tried fewer


@dataclass(frozen=True)
class TrainConfig:
    """Length of the training, batch sizes, evaluation."""

    steps: int = 100  # optimiser steps
    gbs: int = 8  # global batch, in sequences
    mbs: int = 1  # micro-batch on one data-parallel rank, in sequences
    seq_len: int = 128  # tokens
    seed: int = 1234
    gbs_ramp: list[str] | None = (
        None  # how gbs is reached: [start gbs, increment, ramp length in sequences], or
    )
    # "0:768 250B:1536", the batch from a number of tokens on (K M B T), or of steps (500steps);
    # None = constant
    z_loss: float = 0.0  # coefficient of mean(logsumexp²) of the logits; 0 = off
    mtp_loss: float = 0.1  # coefficient of the mean loss of the multi-token prediction layers
    eval_every: int = 0  # steps between evaluations; 0 = only at the end of training
    eval_batches: int = 8  # global batches of the validation data per evaluation
    cuda_graph: str = (
        "none"  # none | phases: on a GPU, phases are captured in the second step, then replayed
    )
    stop_after: int = 0  # stop with a checkpoint after this step, while schedules still plan for all steps; 0 = never


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule."""

    name: str = (
        "adamw"  # adamw | muon: orthogonal updates of the layers' matrices, AdamW for the rest
    )
    lr: float = 3e-4
    min_lr: float = 3e-5  # reached exactly at the last step
    schedule: str = "cosine"  # cosine | linear | wsd | constant: of the rate after the warm-up
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: steps of the final decay
    schedule_by: str = (
        "steps"  # steps | samples: a step counts as much as its batch, whatever train.gbs_ramp says
    )
    weight_decay: float = 0.1
    decay_exclude: list[str] = field(
        default_factory=list
    )  # parameter-name globs that are not decayed
    lr_scale: list[str] = field(
        default_factory=list
    )  # "factor glob": multiplies lr of parameters, by the first that fits
    decay_scale: list[str] = field(
        default_factory=list
    )  # the same for weight_decay, where it applies
    freeze: list[str] = field(default_factory=list)  # parameter-name globs that are never updated
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = (
        0.95  # muon: share of the momentum that is kept each step, in [0, 1); Nesterov
    )
    ns_steps: int = 5  # muon: steps of the Newton-Schulz iteration
    muon_per_head: bool = False  # muon: each head's rows of q, k and v are a matrix of their own
    muon_exclude: list[str] = (
        field(  # muon: parameter-name globs that AdamW updates, besides vectors
            default_factory=lambda: ["*embedding.*", "head.*", "*.router.*"]
        )
    )
    clip: float = 1.0  # global gradient norm; 0 = no clipping
    on_nonfinite: str = "stop"  # what a loss or gradient that is not finite stops or skips: stop (the run) | skip (the update)
    skip_norm: float = 0.0  # gradient norm above which the update is skipped; 0 = never
    max_skipped: int = 10  # updates skipped in a row after which the run stops
    implementation: str = (
        "auto"  # auto | torch | apex | kernel: kernel, which auto takes on a GPU, makes one pass
    )
    offload: bool = (
        False  # True: master weights and moments are in the host's memory and updated there
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Arithmetic of the model; moments are fp32 (fp64 with fp64)."""

    dtype: str = "fp32"  # fp64 | fp32 | bf16
    fp8: str = "none"  # none | tensorwise | blockwise: the layers' GEMMs in fp8
    fp8_pow2_scales: bool = (
        True  # True: scales are powers of two, so quantising again in other groups loses nothing
    )
    fp8_skip_first: int = 0  # first layers whose matrices are multiplied in dtype
    fp8_skip_last: int = 0  # last layers whose matrices are multiplied in dtype
    fp8_exclude: list[str] = field(
        default_factory=list
    )  # globs of other matrices that are multiplied in `dtype`
    fp8_gather: bool = (
        True  # zero 3 gathers these weights in fp8, the same numbers; False: in dtype
    )
    master_weights: bool = True  # fp32 copies of bf16 weights are updated; False: bf16 weights, with stochastic rounding
    grad_dtype: str = (
        "fp32"  # main gradients and their reduction: fp32 | bf16 (fp64 with dtype=fp64)
    )


@dataclass(frozen=True)
class KernelsConfig:
    """Which implementation computes an operation on a GPU; what a library does not take, Triton
    does."""

    attention: str = "auto"  # auto | triton | cudnn | fa4
    fp8: str = "auto"  # auto | triton | torch: GEMMs with scales
    grouped: str = "auto"  # auto | triton | torch: GEMMs of experts
    norm: str = "auto"  # auto | triton | torch
    deterministic: bool = (
        True  # only what gives the same bits each time, which cuDNN's backward does not
    )


@dataclass(frozen=True)
class RecomputeConfig:
    """What is recomputed in the backward instead of being saved."""

    mode: str = "none"  # none | selective | full
    parts: list[str] = field(
        default_factory=lambda: ["norm", "activation"]
    )  # selective: which parts of a layer
    num_layers: int | None = None  # recompute only this many first layers of each stage; None = all
    stage_layers: list[int] | None = (
        None  # the same for each stage: the first stages hold the most micro-batches
    )
    group_layers: int = 1  # full: this many neighbouring layers save one input together
    logit_tokens: int | None = (
        None  # tokens whose logits the head computes at a time; None = all, which are then kept
    )
    offload: list[str] = field(
        default_factory=list
    )  # phases whose saved tensors go to the host; full: inputs
    offload_min_bytes: int = 1 << 20  # bytes; smaller tensors stay on the device


@dataclass(frozen=True)
class MoeConfig:
    """Training of the router (the router's own architecture belongs to the model)."""

    balance: list[str] = field(
        default_factory=lambda: ["none"]
    )  # none | aux | seq_aux | global_aux | bias
    aux_coef: float = 0.0  # coefficient of every auxiliary loss in `balance`
    z_coef: float = 0.0  # coefficient of mean(logsumexp²) of the router's logits
    bias_rate: float = 0.0  # balance=bias: change of an expert's bias per step
    capacity_factor: float | None = (
        None  # tokens of a micro-batch that an expert takes at most / its even share
    )
    planned_imbalance: float = (
        1.5  # for the memory forecast: rows of the busiest rank's experts / an even share
    )
    exchange: str = "counted"  # counted | planned: a rank sends each other one planned_imbalance even shares, unasked
    jitter: float = (
        0.0  # in training, a router's input is multiplied by random factors of 1 ± this; 0 = off
    )
    force_balanced: bool = False  # True: experts by turns, whatever the router says: for benchmarks
    replay: str | None = (
        None  # file of the experts that tokens take, whatever the router says; None = the router's
    )
    record: str | None = None  # file to which the experts of every token are written, for `replay`
    drop_by: str = "probability"  # which tokens a full expert drops: probability (the smallest) | position (the last)
    fp8_dispatch: bool = False  # tokens are dispatched to their experts in fp8 (1×128 groups); results and gradients are not
    log_every: int = 10  # steps between two records of the load of every layer


@dataclass(frozen=True)
class DataConfig:
    """Token files and the order in which they are read."""

    train: list[str] = field(
        default_factory=list
    )  # "weight prefix" or "prefix" of Megatron .bin/.idx pairs
    weights: str = (
        "size"  # of a list without any weight: size (in proportion to its tokens) | equal
    )
    valid: list[str] = field(default_factory=list)  # the same; empty = the valid part of `split`
    valid_sets: list[str] = field(
        default_factory=list
    )  # "name prefix" or "name weight prefix": a loss for each name
    split: str | None = (
        None  # Megatron's "969,30,1" over the documents of `train`; None = all of it trains
    )
    order: str = "shuffled"  # shuffled | sequential | megatron
    sample_len: int | None = (
        None  # tokens of a sample; padding fills the rest of train.seq_len; None = no padding
    )
    document_mask: bool = (
        False  # True: documents in a sequence do not attend to each other, and positions restart
    )
    eod_mask_loss: bool = False  # True: no loss for the prediction at an end-of-document token
    eod: int | None = None  # id of the end-of-document token; None = the tokenizer's
    tokenizer: str | None = (
        None  # file that gives the end-of-document token, and with which tools/generate.py decodes
    )
    cache_dir: str | None = None  # for sample indices; None = beside the first prefix
    prefetch: int = 2  # global batches read ahead
    skip_steps: list[str] = field(
        default_factory=list
    )  # steps, "300" or "120-169", whose samples are passed over


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved and what it starts from."""

    dir: str | None = None  # folder of the checkpoints; None = none are written
    every: int = 0  # steps; 0 = only at the end and on a signal
    keep: str = (
        "2"  # K or last:K newest | every:N steps | best:K by validation loss, joined by +; 0 = all
    )
    async_save: bool = field(
        default=True, metadata={"key": "async"}
    )  # write in the background; in YAML: async
    hf_export: str | None = (
        None  # every:N steps | last: a Hugging Face folder, hf/step-… in dir; None = never
    )
    resume: str = (
        "auto"  # auto: from the newest whole one in dir, if any | none | a checkpoint folder
    )


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; one run for the whole job, written by rank 0."""

    mode: str = "disabled"  # online | offline | disabled
    project: str = "megatron5d"
    name: str | None = None  # of the run; None = the last part of log.dir
    group: str | None = None  # of runs that belong together; None = model.name
    tags: list[str] = field(
        default_factory=list
    )  # empty = precision.dtype and the dimensions that are cut
    entity: str | None = None
    dir: str | None = None  # None = the run directory


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and where it is written."""

    dir: str | None = None  # the run directory (config.yaml, W&B files); None = nothing is written
    jsonl: str | None = None  # file with one JSON object per step; None = none
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: str | None = None  # folder for TensorBoard's event files; None = none
    every: int = 1  # steps between two records
    slow_rank: float | None = (
        None  # name a rank whose work is above this multiple of its peers'; None = 1.2 on GPUs; 0 = never
    )
    progress: bool = True  # on rank 0: a bar on a terminal, otherwise a line every 10 s
    traceback: bool = False  # True: print the call stack even where one message explains the error
    peak_tflops: float | None = None  # of one device, for MFU; None = known devices only
    memory_check: str = (
        "warn"  # refuse | warn | off: at the start, if the predicted memory of a rank does not fit
    )
    device_memory_gb: float | None = (
        None  # memory of one device, 10⁹ bytes; None = that of this process's GPU
    )
    memory_snapshot: str | None = (
        None  # folder for snapshots of GPU memory when it runs out; None = none
    )
    memory_snapshot_step: int = 0  # also take one after this step; 0 = never
    profile: str | None = (
        None  # folder for the times of all phases in one step and a trace of the next; None = none
    )
    profile_step: int = 5  # the step to profile, counted from this start of the run
    profile_ranks: list[int] = field(
        default_factory=lambda: [0]
    )  # the ranks that measure and write both


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
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
