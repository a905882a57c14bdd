"""Checks of two keys as tables: A requires B, and A is at most B.

A condition is a text: `key = a|b` (one of the values, or a list that has one of them),
`key != a`, or `key > n`.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron5d.config.checks.check import Check, Faults, fault
from megatron5d.config.convert import default_of, spelled, value_of
from megatron5d.config.errors import Fault, alternatives
from megatron5d.config.schema import Config


class Condition:
    """Condition on the value of one key."""

    def __init__(self, text: str) -> None:
        self.key, self.operator, words = text.split(" ")
        self.words = words.split("|")

    def __str__(self) -> str:
        if self.operator == "!=":
            return self.key
        if self.operator == ">":
            return f"{self.key} > {self.words[0]}"
        return f"{self.key}={alternatives(self.words)}"

    def holds(self, config: Config) -> bool:
        """Whether a configuration meets the condition."""
        value = value_of(config, self.key)
        if self.operator == ">":
            return value > int(self.words[0])
        items = value if isinstance(value, list) and value else [value]
        return any(spelled(item) in self.words for item in items) == (self.operator == "=")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table; rows of one id are one check, which has these options."""

    needs: tuple[str, ...] = ()
    local: bool = False


@dataclass(frozen=True)
class Requirement(Row):
    """Keys that require a condition on another key."""

    id: str
    # keys, which require it if they differ from their default; or one condition, if it holds
    subject: str
    required: str  # condition; several are joined by " or "
    fix: str = ""  # overrides; empty = the keys' defaults, or a list without the words

    @cached_property
    def conditions(self) -> list[Condition]:
        return [Condition(text) for text in self.required.split(" or ")]

    @cached_property
    def use(self) -> Condition | None:
        """Condition under which the subject is in use."""
        return Condition(self.subject) if " = " in self.subject else None

    @cached_property
    def subject_keys(self) -> list[str]:
        return [self.use.key] if self.use else self.subject.split()

    @property
    def knobs(self) -> list[str]:
        """Keys that the row depends on."""
        return [*self.subject_keys, *(condition.key for condition in self.conditions)]

    def error(self, config: Config) -> Fault | None:
        """Fault of a configuration; None where it meets the requirement."""
        used = [key for key in self.subject_keys if value_of(config, key) != default_of(key)]
        if not used or (self.use and not self.use.holds(config)):
            return None
        if any(condition.holds(config) for condition in self.conditions):
            return None
        subject = ", ".join(f"{key}={spelled(value_of(config, key))}" for key in used)
        verb = "requires" if len(used) == 1 else "require"
        required = " or ".join(map(str, self.conditions))
        actual = ", ".join(spelled(value_of(config, item.key)) for item in self.conditions)
        fix = self.fix or " ".join(f"{key}={spelled(self._unused(config, key))}" for key in used)
        return fault(f"{subject} {verb} {required} (got {actual})", fix)

    def _unused(self, config: Config, key: str) -> object:
        """Value of a key that does not require anything."""
        value, default = value_of(config, key), default_of(key)
        if self.use and isinstance(value, list):
            return [item for item in value if item not in self.use.words] or default
        return default


@dataclass(frozen=True)
class Limit(Row):
    """A key whose value, unless it is null, is at most that of another."""

    id: str
    key: str
    limit: str
    fix: str = ""  # overrides; empty = the largest legal value
    when: str = ""  # condition under which it applies
    strict: bool = False  # equal values are illegal, too; both are integers unless `fix` is given

    @property
    def knobs(self) -> list[str]:
        """Keys that the row depends on."""
        return [self.key, self.limit, *([Condition(self.when).key] if self.when else [])]

    def error(self, config: Config) -> Fault | None:
        """Fault of a configuration; None where it stays within the limit."""
        value, limit = value_of(config, self.key), value_of(config, self.limit)
        if value is None or value < limit or (value == limit and not self.strict):
            return None
        if self.when and not Condition(self.when).holds(config):
            return None
        comparison = "below" if self.strict else "at most"
        return fault(
            f"{self.key} must be {comparison} {self.limit}={spelled(limit)} (got {spelled(value)})",
            self.fix or f"{self.key}={spelled(limit - self.strict)}",
        )


REQUIREMENTS = (
    # parallel
    Requirement("sp-needs-tp", "parallel.sp", "parallel.tp > 1"),
    Requirement("overlap-needs-sp", "parallel.tp_overlap", "parallel.sp = true"),
    Requirement("vpp-needs-pp", "parallel.vpp", "parallel.pp > 1"),
    Requirement("zero3-gather-needs-sharded-weights", "parallel.zero3_gather", "parallel.zero = 3"),
    Requirement("reduce-needs-sharded-gradients", "parallel.grad_reduce", "parallel.zero = 2|3"),
    Requirement("cp-inner-needs-two-level", "parallel.cp_inner", "parallel.cp_method = two_level"),
    Requirement("compress-needs-mla", "parallel.cp_compress_kv", "model.attention = mla"),
    Requirement(
        "compress-needs-blocks",
        "parallel.cp_compress_kv",
        # allgather bounds its peak by groups of heads, which latents do not have
        "parallel.cp_method = ring|ulysses|two_level",
        "parallel.cp_method=ring",
    ),
    # model
    Requirement(
        "mla-dims-need-mla",
        "model.q_lora_rank model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim "
        "model.v_head_dim model.latent_norm_eps",
        "model.attention = mla",
        "model.attention=mla",
    ),
    Requirement(
        "mla-needs-rope", "model.attention", "model.position = rope", "model.position=rope"
    ),
    Requirement(
        "mla-has-no-such-option",
        "model.qk_norm model.qkv_bias model.attention_gate model.query_pre_attn_scalar",
        "model.attention = gqa",
    ),
    Requirement("options-of-what-is-absent", "model.qk_norm_all_heads", "model.qk_norm = true"),
    Requirement(
        "options-of-what-is-absent",
        "model.window_layers model.window_rope_theta",
        "model.attention_window != null",
    ),
    Requirement(
        "options-of-what-is-absent",
        "model.shared_expert_gate",
        "model.shared_ffn_hidden_size > 0",
    ),
    Requirement(
        "parallel-block-norms-first",
        "model.parallel_block",
        "model.block_norm = pre",
        "model.block_norm=pre",
    ),
    Requirement("scaling-needs-rope", "model.rope_scaling.type", "model.position = rope"),
    Requirement(
        "scaling-factor-needs-a-type",
        "model.rope_scaling.factor",
        "model.rope_scaling.type = llama3|yarn|linear",
    ),
    # experts
    Requirement(
        "routing-needs-experts",
        "parallel.ep parallel.etp parallel.ep_inner moe.balance moe.aux_coef moe.z_coef "
        "moe.bias_rate moe.jitter moe.capacity_factor moe.fp8_dispatch moe.exchange moe.replay "
        "moe.record model.shared_ffn_hidden_size model.router_bias model.router_linear_bias",
        "model.num_experts > 0",
    ),
    Requirement(
        "aux-coef-needs-aux",
        "moe.aux_coef",
        "moe.balance = aux|seq_aux|global_aux",
        needs=("routing-needs-experts",),
    ),
    Requirement(
        "bias-rate-needs-bias",
        "moe.bias_rate",
        "moe.balance = bias",
        needs=("routing-needs-experts",),
    ),
    Requirement(
        "experts-chosen-once",
        "moe.replay",
        "moe.force_balanced = false",
        "moe.force_balanced=false moe.record=null",
    ),
    Requirement("experts-chosen-once", "moe.replay", "moe.record = null", "moe.record=null"),
    # precision
    Requirement(
        "fp8-knobs-need-fp8",
        "precision.fp8_skip_first precision.fp8_skip_last precision.fp8_exclude "
        "precision.fp8_gather",
        "precision.fp8 = tensorwise|blockwise",
    ),
    # latents are projected block by block on arrival, in precision.dtype
    Requirement(
        "fp8-needs-projected-kv",
        "precision.fp8",
        "parallel.cp_compress_kv = false",
        "parallel.cp_compress_kv=false",
    ),
    Requirement("master-free-needs-bf16", "precision.master_weights", "precision.dtype = bf16"),
    # the others cannot round at random
    Requirement(
        "master-free-updates-itself",
        "precision.master_weights",
        "optim.implementation = auto",
        "optim.implementation=auto",
    ),
    Requirement("grad-dtype-follows-fp64", "precision.grad_dtype", "precision.dtype = fp32|bf16"),
    # recompute
    Requirement(
        "recompute-parts-need-selective",
        "recompute.parts",
        "recompute.mode = selective",
        "recompute.mode=selective",
    ),
    Requirement(
        "recompute-experts-exist", "recompute.parts = experts|permute", "model.num_experts > 0"
    ),
    Requirement(
        "offload-inputs-need-full",
        "recompute.offload = inputs",
        "recompute.mode = full",
        "recompute.mode=full",
    ),
    Requirement(
        "offload-phases-exist",
        "recompute.offload = dispatch|experts|combine",
        "model.num_experts > 0",
    ),
    Requirement(
        "recompute-layers-need-a-mode",
        "recompute.num_layers recompute.stage_layers",
        "recompute.mode = selective|full",
        "recompute.mode=full",
    ),
    Requirement(
        "recompute-layers-said-once", "recompute.num_layers", "recompute.stage_layers = null"
    ),
    Requirement(
        "recompute-groups-need-full",
        "recompute.group_layers",
        "recompute.mode = full",
        "recompute.mode=full",
    ),
    # optimizer
    Requirement("decay-steps-need-wsd", "optim.decay_steps", "optim.schedule = wsd"),
    Requirement(
        "muon-knobs-need-muon",
        "optim.momentum optim.ns_steps optim.muon_per_head optim.muon_exclude",
        "optim.name = muon",
        "optim.name=muon",
    ),
    Requirement("offload-moves-masters", "optim.offload", "precision.master_weights = true"),
    Requirement(
        "one-pass-where-the-state-is",
        "optim.implementation = kernel",
        "optim.offload = false",
    ),
    # a replayed phase uses the addresses at which it was captured
    Requirement(
        "graphs-hold-addresses",
        "train.cuda_graph",
        "parallel.tp_overlap = none|chunked",
        "parallel.tp_overlap=chunked",
    ),
    Requirement(
        "graphs-hold-addresses",
        "train.cuda_graph",
        "recompute.offload = []",
        "recompute.offload=[]",
    ),
    # with cp, the host plans the attention of each micro-batch
    Requirement(
        "graphs-hold-addresses",
        "train.cuda_graph",
        "data.document_mask = false or parallel.cp = 1",
        "data.document_mask=false",
    ),
    # what is written and read
    Requirement("checkpoint-every-needs-dir", "checkpoint.every", "checkpoint.dir != null"),
    Requirement("checkpoint-hf-export-needs-dir", "checkpoint.hf_export", "checkpoint.dir != null"),
    Requirement(
        "snapshot-goes-somewhere", "log.memory_snapshot_step", "log.memory_snapshot != null"
    ),
    Requirement("init-has-one-source", "init.from_checkpoint", "init.from_hf = null", local=True),
    Requirement(
        "model-has-one-source", "model.from_checkpoint", "model.from_hf = null", local=True
    ),
)
LIMITS = (
    Limit("top-k-experts-exist", "model.top_k", "model.num_experts", when="model.num_experts > 0"),
    Limit("top-groups-exist", "model.top_groups", "model.num_groups"),
    Limit(
        "llama3-scaling-bands",
        "model.rope_scaling.low_freq_factor",
        "model.rope_scaling.high_freq_factor",
        "model.rope_scaling.low_freq_factor=1 model.rope_scaling.high_freq_factor=4",
        when="model.rope_scaling.type = llama3",
        strict=True,
    ),
    Limit(
        "yarn-scaling-bands",
        "model.rope_scaling.beta_slow",
        "model.rope_scaling.beta_fast",
        when="model.rope_scaling.type = yarn",
    ),
    Limit(
        "learned-positions-reach",
        "train.seq_len",
        "model.max_positions",
        when="model.position = learned",
    ),
    Limit("sample-within-sequence", "data.sample_len", "train.seq_len"),
    Limit("prediction-within-sequence", "model.num_mtp_layers", "train.seq_len", strict=True),
    Limit("eod-in-vocabulary", "data.eod", "model.vocab_size", strict=True, local=True),
    Limit("recompute-layers-exist", "recompute.num_layers", "model.num_layers"),
    Limit("warmup-fits-steps", "optim.warmup_steps", "train.steps"),
    Limit("stop-before-end", "train.stop_after", "train.steps"),
    Limit("min-lr-below-lr", "optim.min_lr", "optim.lr", when="optim.schedule = cosine|linear|wsd"),
)


def _check(*rows: Requirement | Limit) -> Check:
    def find(c: Config, world: int) -> Faults:
        yield from filter(None, (row.error(c) for row in rows))

    knobs = dict.fromkeys(knob for row in rows for knob in row.knobs)
    return Check(rows[0].id, tuple(knobs), find, rows[0].needs, rows[0].local)


TABLE_CHECKS = tuple(
    _check(*(row for row in (*REQUIREMENTS, *LIMITS) if row.id == id))
    for id in dict.fromkeys(row.id for row in (*REQUIREMENTS, *LIMITS))
)
