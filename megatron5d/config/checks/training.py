"""Laws of the model and of the run: values that are legal alone but not together."""

from __future__ import annotations

from importlib.util import find_spec

from megatron5d.config.checks.check import Law, data_parallel, divisors, nearest
from megatron5d.config.checks.layout import MODEL_AXES
from megatron5d.config.derived import batch_sizes, resumed_progress
from megatron5d.config.schema import Config

MOST_MICRO_BATCHES = 1 << 16  # of a step; each one is several actions of the schedule, which is verified at the start


def _kv_heads_fix(c: Config, world: int) -> str:
    return f"model.num_kv_heads={nearest(c.model.num_kv_heads, divisors(c.model.num_heads))}"


MODEL_LAWS = (
    Law(
        "kv-heads-divide-heads",
        ("model.num_kv_heads", "model.num_heads"),
        lambda c, w: c.model.num_heads % c.model.num_kv_heads != 0,
        lambda c, w: f"model.num_heads = {c.model.num_heads} is not divisible by "
        f"model.num_kv_heads = {c.model.num_kv_heads}",
        _kv_heads_fix,
    ),
    Law(
        "rope-pairs-dims",
        ("model.head_dim", "model.position"),
        lambda c, w: c.model.position == "rope" and c.model.head_dim % 2 == 1,
        lambda c, w: f"model.head_dim = {c.model.head_dim} is odd, and model.position = rope rotates pairs",
        lambda c, w: f"model.head_dim={c.model.head_dim + 1}",
    ),
    Law(
        "learned-positions-reach",
        ("train.seq_len", "model.max_positions", "model.position"),
        lambda c, w: c.model.position == "learned" and c.train.seq_len > c.model.max_positions,
        lambda c, w: f"train.seq_len = {c.train.seq_len} is longer than the table of learned positions, "
        f"model.max_positions = {c.model.max_positions}",
        lambda c, w: f"train.seq_len={c.model.max_positions}, or model.max_positions={c.train.seq_len}",
    ),
    Law(
        "scaling-needs-rope",
        ("model.rope_scaling.type", "model.position"),
        lambda c, w: c.model.position != "rope" and c.model.rope_scaling.type != "none",
        lambda c, w: f"model.rope_scaling.type = {c.model.rope_scaling.type} stretches rotary frequencies, "
        f"and model.position = {c.model.position}",
        lambda c, w: "model.rope_scaling.type=none",
    ),
    Law(
        "llama3-scaling-bands",
        ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor", "model.rope_scaling.type"),
        lambda c, w: c.model.rope_scaling.type == "llama3"
        and c.model.rope_scaling.low_freq_factor >= c.model.rope_scaling.high_freq_factor,
        lambda c, w: f"model.rope_scaling.low_freq_factor = {c.model.rope_scaling.low_freq_factor} is not below "
        f"high_freq_factor = {c.model.rope_scaling.high_freq_factor}",
        lambda c, w: f"model.rope_scaling.high_freq_factor={4 * c.model.rope_scaling.low_freq_factor:g}",
    ),
    Law(
        "yarn-scaling-bands",
        ("model.rope_scaling.beta_slow", "model.rope_scaling.beta_fast", "model.rope_scaling.type"),
        lambda c, w: c.model.rope_scaling.type == "yarn"
        and c.model.rope_scaling.beta_slow >= c.model.rope_scaling.beta_fast,
        lambda c, w: f"model.rope_scaling.beta_slow = {c.model.rope_scaling.beta_slow} is not below "
        f"beta_fast = {c.model.rope_scaling.beta_fast}",
        lambda c, w: f"model.rope_scaling.beta_fast={32 * c.model.rope_scaling.beta_slow:g}",
    ),
    Law(
        "grad-dtype-follows-fp64",
        ("precision.grad_dtype", "precision.dtype"),
        lambda c, w: c.precision.dtype == "fp64" and c.precision.grad_dtype != "fp32",
        lambda c, w: f"precision.grad_dtype = {c.precision.grad_dtype} would round away what precision.dtype = fp64 "
        "computes; its main gradients are fp64",
        lambda c, w: "precision.grad_dtype=fp32 (the default, which fp64 raises to fp64)",
    ),
)  # fmt: skip


def _ramp(c: Config) -> tuple[int, int, int]:
    """(start, increment, length) of the batch ramp; without one, a ramp that changes nothing."""
    start, increment, length = c.train.gbs_ramp or (c.train.gbs, 1, 1)
    return start, increment, length


def _below_gbs(c: Config) -> int:
    """The last batch size of the ramp that does not exceed train.gbs."""
    start, increment, _ = _ramp(c)
    return start + (c.train.gbs - start) // increment * increment


def _batch_unit(c: Config, world: int) -> int:
    return c.train.mbs * data_parallel(c, world)


def _ramp_fix(c: Config, world: int) -> str:
    unit = _batch_unit(c, world)
    if behind := resumed_progress(c).get("consumed_samples"):  # another ramp would be another run
        return (
            f"fewer data-parallel ranks until {_ramp(c)[2]} samples are taken ({behind} are), or train.gbs_ramp=null, "
            f"which goes on with {c.train.gbs} sequences"
        )
    return f"train.gbs_ramp=[{unit},{unit},{_ramp(c)[2]}]"


def _decay_room(c: Config) -> int:
    return max(1, c.train.steps - c.optim.warmup_steps)


TRAIN_LAWS = (
    Law(
        "ramp-starts-below-gbs",
        ("train.gbs_ramp", "train.gbs"),
        lambda c, w: _ramp(c)[0] > c.train.gbs,
        lambda c, w: f"train.gbs_ramp starts at {_ramp(c)[0]} sequences, above train.gbs = {c.train.gbs}",
        lambda c, w: f"train.gbs_ramp=[{c.train.gbs},{_ramp(c)[1]},{_ramp(c)[2]}], or null",
    ),
    Law(
        "ramp-reaches-gbs",
        ("train.gbs_ramp", "train.gbs"),
        lambda c, w: _ramp(c)[0] <= c.train.gbs and (c.train.gbs - _ramp(c)[0]) % _ramp(c)[1] != 0,
        lambda c, w: (
            f"train.gbs_ramp: from {_ramp(c)[0]} in steps of {_ramp(c)[1]} it never meets train.gbs = {c.train.gbs}"
        ),
        lambda c, w: (
            f"train.gbs={_below_gbs(c)} or {_below_gbs(c) + _ramp(c)[1]}, or "
            f"train.gbs_ramp=[{_ramp(c)[0]},{c.train.gbs - _ramp(c)[0]},{_ramp(c)[2]}]"
        ),
    ),
    Law(
        "ramp-splits",
        ("train.gbs_ramp", "train.gbs", "train.mbs", *MODEL_AXES),
        lambda c, w: c.train.gbs_ramp is not None and any(size % _batch_unit(c, w) for size in batch_sizes(c)),
        lambda c, w: (
            f"train.gbs_ramp starts at {_ramp(c)[0]} and grows by {_ramp(c)[1]}; each batch must be a multiple of "
            f"train.mbs·dp = {c.train.mbs}·{data_parallel(c, w)} = {_batch_unit(c, w)}"
        ),
        _ramp_fix,
        needs=("world-fits", "gbs-splits"),
    ),
    Law(
        "micro-batches-in-reach",
        ("train.gbs", "train.mbs", *MODEL_AXES),
        lambda c, w: c.train.gbs // _batch_unit(c, w) > MOST_MICRO_BATCHES,
        lambda c, w: (
            f"train.gbs = {c.train.gbs} is {c.train.gbs // _batch_unit(c, w):,} micro-batches of train.mbs = "
            f"{c.train.mbs} on each of {data_parallel(c, w)} data-parallel ranks; a schedule has at most "
            f"{MOST_MICRO_BATCHES:,}"
        ),
        lambda c, w: f"train.gbs={MOST_MICRO_BATCHES * _batch_unit(c, w)}, or a larger train.mbs",
        needs=("world-fits", "gbs-splits"),
    ),
    Law(
        "warmup-fits-steps",
        ("optim.warmup_steps", "train.steps"),
        lambda c, w: c.optim.warmup_steps > c.train.steps,
        lambda c, w: f"optim.warmup_steps = {c.optim.warmup_steps} is more than train.steps = {c.train.steps}",
        lambda c, w: f"optim.warmup_steps={c.train.steps}, or fewer",
    ),
    Law(
        "min-lr-below-lr",
        ("optim.min_lr", "optim.lr", "optim.schedule"),
        lambda c, w: c.optim.schedule != "constant" and c.optim.min_lr > c.optim.lr,
        lambda c, w: f"optim.min_lr = {c.optim.min_lr:g} is above optim.lr = {c.optim.lr:g}",
        lambda c, w: f"optim.min_lr={c.optim.lr / 10:g}, or anything up to {c.optim.lr:g}",
    ),
    Law(
        "wsd-decays",
        ("optim.decay_steps", "optim.schedule", "optim.warmup_steps", "train.steps"),
        lambda c, w: (
            c.optim.schedule == "wsd"
            and c.optim.warmup_steps <= c.train.steps
            and not 1 <= c.optim.decay_steps <= _decay_room(c)
        ),
        lambda c, w: (
            f"optim.schedule = wsd needs optim.decay_steps from 1 to train.steps - optim.warmup_steps = "
            f"{c.train.steps} - {c.optim.warmup_steps}, and it is {c.optim.decay_steps}"
        ),
        lambda c, w: f"optim.decay_steps={min(c.optim.decay_steps or max(1, c.train.steps // 10), _decay_room(c))}",
    ),
    Law(
        "megatrons-seed",
        ("train.seed", "data.order"),
        lambda c, w: c.data.order == "megatron" and c.train.seed >= 2**32,
        lambda c, w: (
            f"train.seed = {c.train.seed} is above {2**32 - 1}, the largest that data.order = megatron can shuffle by "
            "(numpy's RandomState)"
        ),
        lambda c, w: f"train.seed={c.train.seed % 2**32}, or data.order=shuffled",
    ),
    Law(
        "prediction-within-sequence",
        ("model.num_mtp_layers", "train.seq_len"),
        lambda c, w: c.model.num_mtp_layers >= c.train.seq_len,
        lambda c, w: (
            f"model.num_mtp_layers = {c.model.num_mtp_layers} predicts beyond every sequence of train.seq_len = "
            f"{c.train.seq_len} tokens"
        ),
        lambda c, w: f"model.num_mtp_layers={c.train.seq_len - 1}",
    ),
    Law(
        "stop-before-end",
        ("train.stop_after", "train.steps"),
        lambda c, w: c.train.stop_after > c.train.steps,
        lambda c, w: f"train.stop_after = {c.train.stop_after} comes after the end, train.steps = {c.train.steps}",
        lambda c, w: "train.stop_after=0",
    ),
    Law(
        "checkpoint-every-needs-dir",
        ("checkpoint.every", "checkpoint.dir"),
        lambda c, w: c.checkpoint.every > 0 and c.checkpoint.dir is None,
        lambda c, w: f"checkpoint.every = {c.checkpoint.every} and checkpoint.dir = null: nothing would be saved",
        lambda c, w: "checkpoint.dir=runs/NAME/checkpoints, or checkpoint.every=0",
    ),
    Law(
        "checkpoint-async-needs-dir",
        ("checkpoint.async", "checkpoint.dir"),
        lambda c, w: c.checkpoint.async_save and c.checkpoint.dir is None,
        lambda c, w: "checkpoint.async = true and checkpoint.dir = null: nothing would be saved",
        lambda c, w: "checkpoint.dir=runs/NAME/checkpoints, or checkpoint.async=false",
    ),
    Law(
        "profile-ranks-exist",
        ("log.profile_ranks",),
        lambda c, w: not c.log.profile_ranks or not 0 <= min(c.log.profile_ranks) <= max(c.log.profile_ranks) < w,
        lambda c, w: f"log.profile_ranks = {c.log.profile_ranks} is no list of ranks from 0 to {w - 1}",
        lambda c, w: "log.profile_ranks=[0]",
    ),
    Law(
        "profile-before-end",
        ("log.profile_step", "log.profile", "train.steps", "train.stop_after"),
        lambda c, w: c.log.profile is not None and c.log.profile_step >= (c.train.stop_after or c.train.steps),
        lambda c, w: (
            f"log.profile_step = {c.log.profile_step}: a trace is taken of the step after it, and step "
            f"{c.train.stop_after or c.train.steps} is the last"
        ),
        lambda c, w: f"log.profile_step={max(1, (c.train.stop_after or c.train.steps) - 1)}, or fewer",
    ),
    Law(
        "snapshot-goes-somewhere",
        ("log.memory_snapshot_step", "log.memory_snapshot"),
        lambda c, w: c.log.memory_snapshot_step > 0 and c.log.memory_snapshot is None,
        lambda c, w: (
            f"log.memory_snapshot_step = {c.log.memory_snapshot_step} and log.memory_snapshot = null: nothing "
            "would be written"
        ),
        lambda c, w: "log.memory_snapshot=runs/NAME/snapshots, or log.memory_snapshot_step=0",
    ),
    Law(
        "apex-installed",
        ("optim.implementation",),
        lambda c, w: c.optim.implementation == "apex" and find_spec("amp_C") is None,
        lambda c, w: (
            "optim.implementation = apex: NVIDIA's apex is not here (no module amp_C; PyPI's apex is another package)"
        ),
        lambda c, w: "optim.implementation=auto",
        needs=("optim-implementation",),
    ),
    Law(
        "one-pass-where-the-state-is",
        ("optim.implementation", "optim.offload"),
        lambda c, w: c.optim.implementation == "kernel" and c.optim.offload,
        lambda c, w: (
            "optim.implementation = kernel updates where the weights are, and optim.offload = true on the host"
        ),
        lambda c, w: "optim.implementation=auto, or optim.offload=false",
    ),
    Law(
        "wandb-installed",
        ("log.wandb.mode",),
        lambda c, w: c.log.wandb.mode != "disabled" and find_spec("wandb") is None,
        lambda c, w: f"log.wandb.mode = {c.log.wandb.mode}: the package wandb is not installed here",
        lambda c, w: "log.wandb.mode=disabled, or pip install wandb",
        needs=("log-wandb-mode",),
    ),
    Law(
        "tensorboard-installed",
        ("log.tensorboard",),
        lambda c, w: c.log.tensorboard is not None and find_spec("tensorboard") is None,
        lambda c, w: f"log.tensorboard = {c.log.tensorboard}: the package tensorboard is not installed here",
        lambda c, w: "log.tensorboard=null, or pip install tensorboard",
    ),
)

RUN_LAWS = (*MODEL_LAWS, *TRAIN_LAWS)
