"""The training loop: batches in, steps, records, evaluations and checkpoints out.

What a run writes and no other run may: its checkpoints and its log. They are locked before anything
is read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron5d.checkpoint.folder import Keep, recover
from megatron5d.checkpoint.save import Exporter, SaveFailed, Saver
from megatron5d.comm.collectives import all_reduce
from megatron5d.config.convert import to_dict
from megatron5d.config.derived import batch_schedule
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.topology.all_ranks import on_every_rank, on_rank_0
from megatron5d.topology.lock_file import LockFile
from megatron5d.topology.process import Process
from megatron5d.train.build import Run, build_run
from megatron5d.train.data import (
    Part,
    held_out,
    refuse_valid_without_targets,
    train_loader,
    valid_loader,
    without_targets,
)
from megatron5d.train.guard import MemorySnapshots, StepSamples, memory_snapshots
from megatron5d.train.monitoring.report import Prediction, Reporter
from megatron5d.train.monitoring.writers import harmless
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.preflight.warnings import (
    epochs,
    repeated_validation,
    small_vocabulary,
    unmarked_documents,
)
from megatron5d.train.provenance import commit, write_provenance
from megatron5d.train.signals import REQUEUE, StopFlag
from megatron5d.train.state import Progress, run_record, run_tensors
from megatron5d.train.step import StepResult

ABOUT_DATA = (epochs, unmarked_documents, small_vocabulary, repeated_validation, without_targets)


@dataclass
class Outputs:
    """What rank 0 holds during the run; all empty on other ranks."""

    lock: LockFile | None = None  # of checkpoint.dir; None where the run saves nothing
    saver: Saver | None = None  # writes to checkpoint.dir; set once it exists
    # what was repaired in checkpoint.dir, for the log
    notes: list[str] = field(default_factory=list)


@contextmanager
def locked_outputs(config: Config) -> Iterator[Outputs]:
    """Locks `checkpoint.dir` and `log.jsonl` against other runs.

    Raises OSError: on every rank, if a run that is still going writes to one of them, or it cannot
    be written.

    Comm: a broadcast over the world; rank 0 may come to it as late as `lock_file.STALE_S`.
    """
    outputs = Outputs()
    with ExitStack() as on_exit:
        on_rank_0(lambda: _lock(config, outputs, on_exit))
        yield outputs


def _lock(config: Config, outputs: Outputs, on_exit: ExitStack) -> None:
    """Locks what the run writes, repairs checkpoint.dir, and writes the configuration to
    log.dir."""
    if config.checkpoint.dir is not None:
        folder = Path(config.checkpoint.dir)
        outputs.lock = LockFile(folder / "run.lock", f"checkpoint.dir = {folder}")
        on_exit.callback(_unlock_checkpoints, outputs)
        outputs.notes += recover(folder)
    if config.log.jsonl is not None:
        log = Path(config.log.jsonl)
        on_exit.callback(LockFile(log.with_name(f"{log.name}.lock"), f"log.jsonl = {log}").release)
    if config.log.dir is not None:
        folder = Path(config.log.dir)
        on_exit.callback(LockFile(folder / "log.lock", f"log.dir = {folder}").release)
        with harmless(f"log.dir = {folder}, config.yaml and code/", outputs.notes.append):
            write_provenance(folder, config)


def _unlock_checkpoints(outputs: Outputs) -> None:
    """Releases checkpoint.dir; while a background save runs it stays locked until the process
    ends."""
    if outputs.lock is not None and not (outputs.saver is not None and outputs.saver.busy):
        outputs.lock.release()


OTHERS_SIGNAL = "a signal of another rank"


def train(
    config: Config,
    process: Process,
    layout: PipelineLayout,
    predicted: Prediction,
    stop: StopFlag,
    notes: Sequence[str] = (),
) -> int:
    """Trains from where the run stands to its last step.

    Args:
        layout: of the pipeline, the same on every rank.
        stop: set by a signal.
        notes: for the log, of what was found before.

    Returns:
        Exit code: 0 finished, 75 stopped on a signal with all steps saved.

    Raises:
        InterruptedError: stopped on a signal without a place for a checkpoint.
        OSError: another run writes to the same places.
    """
    with locked_outputs(config) as outputs, memory_snapshots(config, process) as snapshots:
        run = build_run(config, process, layout)
        run.notes += [*outputs.notes, *notes]
        code = _train(run, predicted, outputs, snapshots, stop)
        run.trainer.release_graphs()
        return code


def _train(
    run: Run, predicted: Prediction, outputs: Outputs, snapshots: MemorySnapshots, stop: StopFlag
) -> int:
    config = run.config  # as it is resumed
    on_rank_0(lambda: refuse_valid_without_targets(config))
    run.notes += on_rank_0(lambda: [note for notes in ABOUT_DATA for note in notes(config)])
    if snapshots.note:
        run.notes.append(snapshots.note)
    saver = None
    if config.checkpoint.dir:
        c = config.checkpoint
        saver = outputs.saver = Saver(
            c.dir,  # type: ignore[arg-type]  # checked: there is one
            Keep.of(c.keep),
            c.async_save,
            config.parallel.timeout_s,
            outputs.lock,
            pinned=Path(c.resume),
            began=run.progress.step,
            exporter=_exporter(run) if c.hf_export else None,
        )
    reporter = on_every_rank(lambda: Reporter(run, predicted))
    code = 1
    try:
        _announce(run, reporter, predicted)
        stopped = _stopped_early(run, reporter, stop) or _steps(
            run, reporter, saver, stop, snapshots
        )
        if saver is not None:
            saver.wait()
        code = 0 if not stopped else 1 if saver is None else REQUEUE
    finally:
        reporter.close(code)
    if not stopped:
        return 0
    if saver is None:
        raise InterruptedError(
            f"stopped on a signal at step {run.progress.step}; set checkpoint.dir to save on signals"
        )
    return REQUEUE


def _announce(run: Run, reporter: Reporter, predicted: Prediction) -> None:
    s, progress = run.mesh.sizes, run.progress
    reporter.say(
        f"{run.config.model.name}: {parameter_count(run.config.model):,} parameters on {s.world} rank"
        f"{'' if s.world == 1 else 's'} "
        f"(dp {s.dp}, tp {s.tp}, cp {s.cp}, pp {s.pp}, ep {s.ep}), {run.config.precision.dtype}, "
        f"zero {run.config.parallel.zero}"
        + (f"; resumed at step {progress.step}" if progress.step else "")
    )
    for note in run.notes:
        reporter.say(note)
    train_config = run.config.train
    knob, last = (
        ("stop_after", train_config.stop_after)
        if train_config.stop_after
        else ("steps", train_config.steps)
    )
    if progress.step >= last:
        reporter.say(
            f"nothing is left to train: step {progress.step} is saved, and train.{knob} = {last}"
        )
    for line in predicted.report:
        reporter.say(line)


def _stopped_early(run: Run, reporter: Reporter, stop: StopFlag) -> bool:
    """Says if some rank received a signal before the first step: there is nothing new to save.

    Comm: all_reduce over the world of one number.
    """
    told = torch.full((1,), float(bool(stop)), device=run.process.device)
    if not all_reduce(told, run.mesh["world"]).item():
        return False
    reporter.say(
        f"stopped on {stop.received or OTHERS_SIGNAL} before the first step: nothing new to save"
    )
    return True


def _steps(
    run: Run, reporter: Reporter, saver: Saver | None, stop: StopFlag, snapshots: MemorySnapshots
) -> bool:
    """Runs the remaining steps; True where a signal ended them early."""
    config, progress, train_config = run.config, run.progress, run.config.train
    last = train_config.stop_after or train_config.steps
    valid_exists = (
        bool(_evaluate(run, reporter, "initial_valid_loss")) if progress.step == 0 else True
    )
    left = last - progress.step
    loader = train_loader(
        config, run.mesh, progress.consumed_samples, reads=run.reads_tokens, steps_left=left
    )
    saved_at, around_step = progress.step, _profiled(run, reporter)
    stopped = False
    schedule = batch_schedule(config)
    reporter.start_clock()
    try:
        while progress.step < last and not stopped:
            consumed = loader.consumed_samples
            # of this dp and cp rank: gbs/(mbs·dp) micro-batches of [mbs, s/cp] tokens; none in
            # data.skip_steps
            batches = next(loader)
            where = StepSamples(progress.step + 1, range(consumed, loader.consumed_samples))
            lr = learning_rate(config.optim, where.step, train_config.steps, schedule)
            watched = progress.step == 0 or _due(where.step, config.moe.log_every)
            with around_step() if batches else nullcontext():
                result = run.trainer.step(batches, lr, bool(stop), watched, where)
                reporter.stop_clock()  # before the profiler writes
            _count(progress, result, loader.consumed_samples, run.trainer.guard.in_a_row)
            stopped = result.stop
            snapshots.after_step(progress.step)
            at_end = progress.step == last
            losses = None
            if valid_exists and (at_end or _due(progress.step, train_config.eval_every)):
                losses = _evaluate(run, reporter, "valid_loss")
            reporter.step(result, lr)
            exported = _exported(config, progress.step, at_end)
            if saver and (
                stopped or at_end or exported or _due(progress.step, config.checkpoint.every)
            ):
                _save(run, saver, reporter, losses, last=stopped or at_end, exported=exported)
                saved_at = progress.step
            reporter.start_clock()
    finally:
        loader.close()
    if stopped:
        saved = f"; checkpoint at step {saved_at}" if saver else ""
        reporter.say(f"stopped on {stop.received or OTHERS_SIGNAL}{saved}")
    return stopped and progress.step < train_config.steps


def _profiled(run: Run, reporter: Reporter) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context of every step, which `log.profile` makes the profiler's."""
    if run.config.log.profile is None:
        return nullcontext
    from megatron5d.train.monitoring.profiler import Profiler

    return Profiler(run, reporter.say).step


def _count(progress: Progress, result: StepResult, consumed_samples: int, in_a_row: int) -> None:
    progress.step += 1
    progress.skipped += result.skipped is not None
    progress.skipped_in_a_row = in_a_row
    progress.consumed_samples = consumed_samples
    progress.tokens += result.num_targets


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: Run, reporter: Reporter, name: str) -> dict[str, float]:
    """Records and returns the mean loss of all that is held out, each part under its name.

    Comm: of each part that of `_mean_loss`.
    """
    losses = {which: _mean_loss(run, part) for which, part in held_out(run.config).items()}
    for which, loss in losses.items():
        reporter.add(name + which, loss)
    if losses:
        text = ", ".join(
            f"{which.lstrip('/')} {loss:.4f}".strip() for which, loss in losses.items()
        )
        reporter.say(f"step {run.progress.step}: validation loss {text}")
    return losses


def _mean_loss(run: Run, part: Part) -> float:
    """Returns mean loss over the first eval_batches global batches of a part of the held-out data.

    Comm: the layers' and the pipeline's; all_reduce over the world of a few numbers.
    """
    loader = valid_loader(run.config, run.mesh, part, reads=run.reads_tokens)
    total = None
    for _ in range(run.config.train.eval_batches):
        share = run.trainer.evaluate(next(loader))
        total = share if total is None else total + share
    assert total is not None
    totals = all_reduce(total, run.mesh["world"]).tolist()
    return run.trainer.means(totals)["loss"]


def _exporter(run: Run) -> Exporter:
    """Returns what `checkpoint.hf_export` writes. Comm: a broadcast over the world."""
    # tokenizers and families: few runs need them
    from megatron5d.train.hf_export import RunExport, agree_on_export

    directory = Path(run.config.checkpoint.dir or "")
    return RunExport(agree_on_export(run.config, run.notes.append), directory)


def _exported(config: Config, step: int, at_end: bool) -> bool:
    """Returns whether checkpoint.hf_export names a step."""
    when, _, every = (config.checkpoint.hf_export or "").partition(":")
    return at_end if when == "last" else when == "every" and _due(step, int(every))


def _save(
    run: Run,
    saver: Saver,
    reporter: Reporter,
    losses: Mapping[str, float] | None,
    *,
    last: bool,
    exported: bool,
) -> None:
    """Saves a step. A save that fails, as on a full disk, ends the run only where it is the last
    one."""
    run.sync.finish_gather()
    tensors = run_tensors(run.sync, run.optimizer, run.model.weights(), writing=True)
    valid_loss = sum(losses.values()) / len(losses) if losses else None
    record = run_record(
        run.progress,
        to_dict(run.config),
        commit() if run.process.rank == 0 else None,
        valid_loss=valid_loss,
    )
    with _failure_told(reporter):
        saver.wait()
    with nullcontext() if last else _failure_told(reporter):
        saver.save(run.progress.step, tensors, record, exported)


@contextmanager
def _failure_told(reporter: Reporter) -> Iterator[None]:
    try:
        yield
    except SaveFailed as error:
        reporter.say(
            f"warning: {error}. Training continues, and saves again at the next step of checkpoint.every"
        )
