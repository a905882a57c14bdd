"""Checks of the run: batches and the learning rate, outputs, and packages that it needs."""

from collections.abc import Sequence
from importlib.util import find_spec

from megatron5d.config.checks.check import Check, Faults, check, data_parallel, fault
from megatron5d.config.checks.layout import MODEL_AXES
from megatron5d.config.convert import spelled, value_of
from megatron5d.config.derived import batch_schedule, batch_sizes, resumed_progress
from megatron5d.config.schema import Config

# of a step; each one is several actions of the schedule, which is verified at the start
MAX_MICRO_BATCHES = 1 << 16


def _linear_ramp(c: Config) -> tuple[int, int, int]:
    """(start, increment, length) of a linear ramp; for any other, one that changes nothing."""
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
            f"train.gbs_ramp must start at most at train.gbs={c.train.gbs} (got {start})",
            f"train.gbs_ramp=[{c.train.gbs},{increment},{length}], or null",
        )


@check("train.gbs_ramp", "train.gbs")
def ramp_reaches_gbs(c: Config, world: int) -> Faults:
    gbs, (start, increment, length) = c.train.gbs, _linear_ramp(c)
    if start <= gbs and (gbs - start) % increment:
        below = start + (gbs - start) // increment * increment
        yield fault(
            f"train.gbs_ramp must reach train.gbs={gbs} (got {start} in steps of {increment})",
            f"train.gbs={below} or {below + increment}, "
            f"or train.gbs_ramp=[{start},{gbs - start},{length}]",
        )


@check("train.gbs_ramp", "train.gbs", "train.seq_len", "data.sample_len")
def ramp_stages_follow(c: Config, world: int) -> Faults:
    try:
        last = batch_schedule(c)[-1][1]
    except ValueError as error:
        yield fault(f"train.gbs_ramp={spelled(c.train.gbs_ramp)}: {error}", "train.gbs_ramp=null")
    else:
        if last != c.train.gbs:
            yield fault(
                f"train.gbs_ramp must end with train.gbs={c.train.gbs} (got {last})",
                f"train.gbs={last}",
            )


@check(
    "train.gbs_ramp",
    "train.gbs",
    "train.mbs",
    "train.seq_len",
    "data.sample_len",
    *MODEL_AXES,
    needs=["world-fits", "gbs-splits", "ramp-stages-follow"],
)
def ramp_splits(c: Config, world: int) -> Faults:
    dp, mbs, ramp = data_parallel(c, world), c.train.mbs, c.train.gbs_ramp
    multiple = mbs * dp
    if ramp is None or all(size % multiple == 0 for size in batch_sizes(c)):
        return
    start, increment, length = _linear_ramp(c)
    sizes = f"{start} growing by {increment}"
    fix = f"train.gbs_ramp=[{multiple},{multiple},{length}]"
    if ":" in ramp[0]:
        stages = [word.split(":") for word in " ".join(ramp).split()]
        sizes = ", ".join(size for _, size in stages)
        rounded = [
            f"{begin}:{max(multiple, int(size) // multiple * multiple)}" for begin, size in stages
        ]
        fix = f"train.gbs_ramp='{' '.join(rounded)}'"
    # a resumed run keeps its ramp: another one would change the batches
    if consumed := resumed_progress(c).get("consumed_samples"):
        fix = (
            f"fewer data-parallel ranks until {batch_schedule(c)[-1][0]} samples are consumed "
            f"({consumed} are), or train.gbs_ramp=null to continue with train.gbs={c.train.gbs}"
        )
    yield fault(
        "train.gbs_ramp requires batches that are multiples of train.mbs·dp = "
        f"{mbs}·{dp} = {multiple} (got {sizes})",
        fix,
    )


@check("train.gbs", "train.mbs", *MODEL_AXES, needs=["world-fits", "gbs-splits"])
def micro_batches_in_reach(c: Config, world: int) -> Faults:
    dp, mbs, gbs = data_parallel(c, world), c.train.mbs, c.train.gbs
    if gbs // (mbs * dp) > MAX_MICRO_BATCHES:
        yield fault(
            f"train.gbs / (train.mbs·dp) = {gbs} / ({mbs}·{dp}) must be at most "
            f"{MAX_MICRO_BATCHES:,} micro-batches (got {gbs // (mbs * dp):,})",
            f"train.gbs={MAX_MICRO_BATCHES * mbs * dp}, or a larger train.mbs",
        )


@check("optim.decay_steps", "optim.schedule", "optim.warmup_steps", "train.steps")
def wsd_decays(c: Config, world: int) -> Faults:
    steps, warmup, decay = c.train.steps, c.optim.warmup_steps, c.optim.decay_steps
    longest = max(1, steps - warmup)
    if c.optim.schedule == "wsd" and warmup <= steps and not 1 <= decay <= longest:
        yield fault(
            "optim.schedule=wsd requires optim.decay_steps from 1 to train.steps - "
            f"optim.warmup_steps = {steps} - {warmup} (got {decay})",
            f"optim.decay_steps={min(decay or max(1, steps // 10), longest)}",
        )


@check("train.seed", "data.order")
def megatrons_seed(c: Config, world: int) -> Faults:
    # numpy's RandomState, by which Megatron shuffles, takes 32 bits
    if c.data.order == "megatron" and c.train.seed >= 2**32:
        yield fault(
            f"data.order=megatron requires train.seed of at most {2**32 - 1} (got {c.train.seed})",
            f"train.seed={c.train.seed % 2**32}, or data.order=shuffled",
        )


@check("checkpoint.keep", "checkpoint.every", "train.eval_every")
def checkpoint_best_is_evaluated(c: Config, world: int) -> Faults:
    every, eval_every = c.checkpoint.every, c.train.eval_every
    if "best:" in c.checkpoint.keep and (not eval_every or every % eval_every):
        yield fault(
            f"checkpoint.keep={c.checkpoint.keep} requires an evaluation at each "
            f"checkpoint.every={every} steps (got train.eval_every={eval_every})",
            f"train.eval_every={every or c.train.steps}, or checkpoint.keep=2",
        )


@check("log.profile_ranks")
def profile_ranks_exist(c: Config, world: int) -> Faults:
    ranks = c.log.profile_ranks
    if not ranks or any(rank not in range(world) for rank in ranks):
        yield fault(
            f"log.profile_ranks must name ranks from 0 to {world - 1} (got {spelled(ranks)})",
            "log.profile_ranks=[0]",
        )


@check("log.profile_step", "log.profile", "train.steps", "train.stop_after")
def profile_before_end(c: Config, world: int) -> Faults:
    last = c.train.stop_after or c.train.steps
    # the step after it is traced
    if c.log.profile is not None and c.log.profile_step >= last:
        yield fault(
            f"log.profile_step must be below the last step, {last} (got {c.log.profile_step})",
            f"log.profile_step={max(1, last - 1)}, or fewer",
        )


def _installed(package: str, module: str, knob: str, used: Sequence[str], fix: str) -> Check:
    """Makes the check of a package that some values of a key need; no values = all but null."""

    @check(knob, id=f"{package}-installed")
    def find(c: Config, world: int) -> Faults:
        value = value_of(c, knob)
        is_used = value in used if used else value is not None
        if is_used and find_spec(module) is None:
            yield fault(f"{knob}={value} requires the package {package} (no module {module})", fix)

    return find


PACKAGE_CHECKS = (
    _installed(
        "apex",
        "amp_C",
        "optim.implementation",
        ("apex",),
        "optim.implementation=auto, or install NVIDIA's apex, which is not the one on PyPI",
    ),
    _installed(
        "wandb",
        "wandb",
        "log.wandb.mode",
        ("online", "offline"),
        "log.wandb.mode=disabled, or pip install wandb",
    ),
    _installed(
        "tensorboard",
        "tensorboard",
        "log.tensorboard",
        (),
        "log.tensorboard=null, or pip install tensorboard",
    ),
)
