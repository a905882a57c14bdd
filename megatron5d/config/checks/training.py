"""Checks of the run: batches and the learning rate, what is saved and logged, packages that must be
installed."""

from importlib.util import find_spec

from megatron5d.config.checks.check import Faults, check, data_parallel, fault
from megatron5d.config.checks.layout import MODEL_AXES
from megatron5d.config.convert import spelled
from megatron5d.config.derived import batch_schedule, batch_sizes, resumed_progress, sample_len
from megatron5d.config.schema import Config, OptimConfig

# of a step; each one is several actions of the schedule, which is verified at the start
MOST_MICRO_BATCHES = 1 << 16


@check("precision.grad_dtype", "precision.dtype")
def grad_dtype_follows_fp64(c: Config, world: int) -> Faults:
    if c.precision.dtype == "fp64" and c.precision.grad_dtype != "fp32":
        yield fault(
            f"precision.grad_dtype = {c.precision.grad_dtype} would round away what precision.dtype = fp64 computes; "
            "its main gradients are fp64",
            "precision.grad_dtype=fp32 (the default, which fp64 raises to fp64)",
        )


def _linear_ramp(c: Config) -> tuple[int, int, int]:
    """Returns (start, increment, length) of a ramp that is given so; of any other, one that changes
    nothing."""
    ramp = c.train.gbs_ramp or []
    if len(ramp) != 3 or ":" in ramp[0]:
        return c.train.gbs, 1, 1
    start, increment, length = map(int, ramp)
    return start, increment, length


@check("train.gbs_ramp", "train.gbs")
def ramp_starts_below_gbs(c: Config, world: int) -> Faults:
    start, increment, length = _linear_ramp(c)
    if start > c.train.gbs:
        yield fault(
            f"train.gbs_ramp starts at {start} sequences, above train.gbs = {c.train.gbs}",
            f"train.gbs_ramp=[{c.train.gbs},{increment},{length}], or null",
        )


@check("train.gbs_ramp", "train.gbs")
def ramp_reaches_gbs(c: Config, world: int) -> Faults:
    gbs, (start, increment, length) = c.train.gbs, _linear_ramp(c)
    if start <= gbs and (gbs - start) % increment:
        below = start + (gbs - start) // increment * increment
        yield fault(
            f"train.gbs_ramp: from {start} in steps of {increment} it never meets train.gbs = {gbs}",
            f"train.gbs={below} or {below + increment}, or train.gbs_ramp=[{start},{gbs - start},{length}]",
        )


@check("train.gbs_ramp", "train.gbs", "train.seq_len", "data.sample_len")
def ramp_stages_follow(c: Config, world: int) -> Faults:
    try:
        last = batch_schedule(c)[-1][1]
    except ValueError as error:
        yield fault(f"train.gbs_ramp = {spelled(c.train.gbs_ramp)}: {error}", "train.gbs_ramp=null")
    else:
        if last != c.train.gbs:
            yield fault(
                f"train.gbs_ramp ends with {last} sequences, and train.gbs = {c.train.gbs}",
                f"train.gbs={last}",
            )


@check(
    "train.gbs_ramp",
    "train.gbs",
    "train.mbs",
    *MODEL_AXES,
    needs=["world-fits", "gbs-splits", "ramp-stages-follow"],
)
def ramp_splits(c: Config, world: int) -> Faults:
    dp, mbs, ramp = data_parallel(c, world), c.train.mbs, c.train.gbs_ramp
    if ramp is None or all(size % (mbs * dp) == 0 for size in batch_sizes(c)):
        return
    start, increment, length = _linear_ramp(c)
    sizes = f"starts at {start} and grows by {increment}"
    fix = f"train.gbs_ramp=[{mbs * dp},{mbs * dp},{length}]"
    if ":" in ramp[0]:
        stages = [word.split(":") for word in " ".join(ramp).split()]
        sizes = f"has batches of {', '.join(size for _, size in stages)}"
        legal = [
            f"{begin}:{max(mbs * dp, int(size) // (mbs * dp) * mbs * dp)}" for begin, size in stages
        ]
        fix = f"train.gbs_ramp='{' '.join(legal)}'"
    if behind := resumed_progress(c).get("consumed_samples"):  # another ramp would be another run
        fix = (
            f"fewer data-parallel ranks until {batch_schedule(c)[-1][0]} samples are taken ({behind} are), or "
            f"train.gbs_ramp=null, which continues with {c.train.gbs} sequences"
        )
    yield fault(
        f"train.gbs_ramp {sizes}; each batch must be a multiple of train.mbs·dp = {mbs}·{dp} = {mbs * dp}",
        fix,
    )


@check("train.gbs", "train.mbs", *MODEL_AXES, needs=["world-fits", "gbs-splits"])
def micro_batches_in_reach(c: Config, world: int) -> Faults:
    dp, mbs, gbs = data_parallel(c, world), c.train.mbs, c.train.gbs
    if gbs // (mbs * dp) > MOST_MICRO_BATCHES:
        yield fault(
            f"train.gbs = {gbs} is {gbs // (mbs * dp):,} micro-batches of train.mbs = {mbs} on each of {dp} "
            f"data-parallel ranks; a schedule has at most {MOST_MICRO_BATCHES:,}",
            f"train.gbs={MOST_MICRO_BATCHES * mbs * dp}, or a larger train.mbs",
        )


@check("optim.warmup_steps", "train.steps")
def warmup_fits_steps(c: Config, world: int) -> Faults:
    if c.optim.warmup_steps > c.train.steps:
        yield fault(
            f"optim.warmup_steps = {c.optim.warmup_steps} is more than train.steps = {c.train.steps}",
            f"optim.warmup_steps={c.train.steps}, or fewer",
        )


@check("optim.min_lr", "optim.lr", "optim.schedule")
def min_lr_below_lr(c: Config, world: int) -> Faults:
    if c.optim.schedule != "constant" and c.optim.min_lr > c.optim.lr:
        yield fault(
            f"optim.min_lr = {c.optim.min_lr:g} is above optim.lr = {c.optim.lr:g}",
            f"optim.min_lr={c.optim.lr / 10:g}, or anything up to {c.optim.lr:g}",
        )


@check("optim.decay_steps", "optim.schedule", "optim.warmup_steps", "train.steps")
def wsd_decays(c: Config, world: int) -> Faults:
    steps, warmup, decay = c.train.steps, c.optim.warmup_steps, c.optim.decay_steps
    room = max(1, steps - warmup)
    if c.optim.schedule == "wsd" and warmup <= steps and not 1 <= decay <= room:
        yield fault(
            f"optim.schedule = wsd needs optim.decay_steps from 1 to train.steps - optim.warmup_steps = {steps} - "
            f"{warmup}, and it is {decay}",
            f"optim.decay_steps={min(decay or max(1, steps // 10), room)}",
        )


@check("optim.decay_steps", "optim.schedule")
def decay_steps_need_wsd(c: Config, world: int) -> Faults:
    if c.optim.decay_steps > 0 and c.optim.schedule != "wsd":
        yield fault(
            f"optim.decay_steps = {c.optim.decay_steps} is the length of wsd's decay, and optim.schedule = "
            f"{c.optim.schedule} reaches optim.min_lr at the last of train.steps"
            if c.optim.schedule != "constant"
            else f"optim.decay_steps = {c.optim.decay_steps}, and optim.schedule = constant decays nothing",
            "optim.decay_steps=0, or optim.schedule=wsd",
        )


_MUON = ("momentum", "ns_steps", "muon_per_head", "muon_exclude")


@check("optim.name", *(f"optim.{name}" for name in _MUON))
def muon_knobs_need_muon(c: Config, world: int) -> Faults:
    unused = {name: getattr(OptimConfig(), name) for name in _MUON}
    unused = {
        f"optim.{name}": idle for name, idle in unused.items() if getattr(c.optim, name) != idle
    }
    if unused and c.optim.name != "muon":
        yield fault(
            f"optim.name = {c.optim.name} does not read {', '.join(unused)}",
            "optim.name=muon, or "
            + " ".join(f"{key}={spelled(idle)}" for key, idle in unused.items()),
        )


@check("train.seed", "data.order")
def megatrons_seed(c: Config, world: int) -> Faults:
    if c.data.order == "megatron" and c.train.seed >= 2**32:
        yield fault(
            f"train.seed = {c.train.seed} is above {2**32 - 1}, the largest that data.order = megatron can shuffle by "
            "(numpy's RandomState)",
            f"train.seed={c.train.seed % 2**32}, or data.order=shuffled",
        )


@check("data.sample_len", "train.seq_len")
def sample_within_sequence(c: Config, world: int) -> Faults:
    if sample_len(c) > c.train.seq_len:
        yield fault(
            f"data.sample_len = {c.data.sample_len} tokens do not fit into train.seq_len = {c.train.seq_len}",
            "data.sample_len=null",
        )


@check("model.num_mtp_layers", "train.seq_len")
def prediction_within_sequence(c: Config, world: int) -> Faults:
    layers, length = c.model.num_mtp_layers, c.train.seq_len
    if layers >= length:
        yield fault(
            f"model.num_mtp_layers = {layers} predicts beyond every sequence of train.seq_len = {length} tokens",
            f"model.num_mtp_layers={length - 1}",
        )


@check("train.stop_after", "train.steps")
def stop_before_end(c: Config, world: int) -> Faults:
    if c.train.stop_after > c.train.steps:
        yield fault(
            f"train.stop_after = {c.train.stop_after} comes after the end, train.steps = {c.train.steps}",
            "train.stop_after=0",
        )


@check("checkpoint.every", "checkpoint.dir")
def checkpoint_every_needs_dir(c: Config, world: int) -> Faults:
    if c.checkpoint.every > 0 and c.checkpoint.dir is None:
        yield fault(
            f"checkpoint.every = {c.checkpoint.every} and checkpoint.dir = null: nothing would be saved",
            "checkpoint.dir=runs/NAME/checkpoints, or checkpoint.every=0",
        )


@check("checkpoint.hf_export", "checkpoint.dir")
def checkpoint_hf_export_needs_dir(c: Config, world: int) -> Faults:
    if c.checkpoint.hf_export is not None and c.checkpoint.dir is None:
        yield fault(
            f"checkpoint.hf_export = {c.checkpoint.hf_export} and checkpoint.dir = null: nothing would be written",
            "checkpoint.dir=runs/NAME/checkpoints, or checkpoint.hf_export=null",
        )


@check("checkpoint.keep", "checkpoint.every", "train.eval_every")
def checkpoint_best_is_evaluated(c: Config, world: int) -> Faults:
    every, evaluated = c.checkpoint.every, c.train.eval_every
    if "best:" in c.checkpoint.keep and (not evaluated or every % evaluated):
        yield fault(
            f"checkpoint.keep = {c.checkpoint.keep} goes by the validation loss, and train.eval_every = {evaluated} "
            f"gives none at the steps of checkpoint.every = {every}",
            f"train.eval_every={every or c.train.steps}, or checkpoint.keep=2",
        )


@check("log.profile_ranks")
def profile_ranks_exist(c: Config, world: int) -> Faults:
    ranks = c.log.profile_ranks
    if not ranks or any(rank not in range(world) for rank in ranks):
        yield fault(
            f"log.profile_ranks = {ranks} is no list of ranks from 0 to {world - 1}",
            "log.profile_ranks=[0]",
        )


@check("log.profile_step", "log.profile", "train.steps", "train.stop_after")
def profile_before_end(c: Config, world: int) -> Faults:
    last = c.train.stop_after or c.train.steps
    if c.log.profile is not None and c.log.profile_step >= last:
        yield fault(
            f"log.profile_step = {c.log.profile_step}: a trace is taken of the step after it, and step {last} is the "
            "last",
            f"log.profile_step={max(1, last - 1)}, or fewer",
        )


@check("log.memory_snapshot_step", "log.memory_snapshot")
def snapshot_goes_somewhere(c: Config, world: int) -> Faults:
    if c.log.memory_snapshot_step > 0 and c.log.memory_snapshot is None:
        yield fault(
            f"log.memory_snapshot_step = {c.log.memory_snapshot_step} and log.memory_snapshot = null: nothing would be "
            "written",
            "log.memory_snapshot=runs/NAME/snapshots, or log.memory_snapshot_step=0",
        )


@check("optim.implementation", needs=["optim-implementation"])
def apex_installed(c: Config, world: int) -> Faults:
    if c.optim.implementation == "apex" and find_spec("amp_C") is None:
        yield fault(
            "optim.implementation = apex: NVIDIA's apex is not here (no module amp_C; PyPI's apex is another package)",
            "optim.implementation=auto",
        )


@check("optim.implementation", "optim.offload")
def one_pass_where_the_state_is(c: Config, world: int) -> Faults:
    if c.optim.implementation == "kernel" and c.optim.offload:
        yield fault(
            "optim.implementation = kernel updates where the weights are, and optim.offload = true on the host",
            "optim.implementation=auto, or optim.offload=false",
        )


@check("log.wandb.mode", needs=["log-wandb-mode"])
def wandb_installed(c: Config, world: int) -> Faults:
    if c.log.wandb.mode != "disabled" and find_spec("wandb") is None:
        yield fault(
            f"log.wandb.mode = {c.log.wandb.mode}: the package wandb is not installed here",
            "log.wandb.mode=disabled, or pip install wandb",
        )


@check("log.tensorboard")
def tensorboard_installed(c: Config, world: int) -> Faults:
    if c.log.tensorboard is not None and find_spec("tensorboard") is None:
        yield fault(
            f"log.tensorboard = {c.log.tensorboard}: the package tensorboard is not installed here",
            "log.tensorboard=null, or pip install tensorboard",
        )


@check(
    "train.cuda_graph",
    "parallel.tp_overlap",
    "recompute.offload",
    "data.document_mask",
    "parallel.cp",
)
def graphs_hold_addresses(c: Config, world: int) -> Faults:
    if c.train.cuda_graph == "none":
        return
    why = (
        "train.cuda_graph = phases replays phases at the addresses at which they were captured, and"
    )
    if c.parallel.tp_overlap == "fused":
        yield fault(
            f"{why} parallel.tp_overlap = fused counts exchanges on the host",
            "parallel.tp_overlap=chunked",
        )
    if c.recompute.offload:
        yield fault(
            f"{why} recompute.offload = {spelled(c.recompute.offload)} moves them",
            "recompute.offload=[]",
        )
    if c.data.document_mask and c.parallel.cp > 1:
        what = f"data.document_mask = true with parallel.cp = {c.parallel.cp} plans each micro-batch on the host"
        yield fault(f"{why} {what}", "data.document_mask=false")
