"""The training loop: steps, records, evaluations and checkpoints.

A run locks its checkpoints and its log before it reads anything, because no other run may write to
them.
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
from megatron5d.config.derived import resumed_progress
from megatron5d.config.schema import Config
from megatron5d.data.batch import Loader
from megatron5d.model.flops import parameter_count
from megatron5d.topology.all_ranks import on_every_rank, on_rank_0
from megatron5d.topology.lock_file import LockFile
from megatron5d.topology.process import Process
from megatron5d.train.build import Run, build_run
from megatron5d.train.data import (
    ValidationSet,
    refuse_valid_without_targets,
    train_loader,
    valid_loader,
    validation_sets,
    without_targets,
)
from megatron5d.train.guard import MemorySnapshots, memory_snapshots
from megatron5d.train.monitoring.report import Prediction, Reporter
from megatron5d.train.monitoring.writers import harmless
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.preflight.warnings import (
    as_released,
    epochs,
    repeated_validation,
    small_vocabulary,
    unmarked_documents,
)
from megatron5d.train.provenance import commit, write_provenance
from megatron5d.train.signals import REQUEUE, StopFlag
from megatron5d.train.state import run_record, run_tensors
from megatron5d.train.step import StepResult, advance, is_due, next_step

DATA_NOTES = (
    as_released,
    epochs,
    unmarked_documents,
    small_vocabulary,
    repeated_validation,
    without_targets,
)


@dataclass
class Outputs:
    """What rank 0 writes to during the run; empty on other ranks.

    Args:
        lock: of checkpoint.dir; None where the run saves nothing.
        saver: writes to checkpoint.dir; set once it exists.
        notes: repairs in checkpoint.dir, for the log.
    """

    lock: LockFile | None = None
    saver: Saver | None = None
    notes: list[str] = field(default_factory=list)


@contextmanager
def locked_outputs(config: Config) -> Iterator[Outputs]:
    """Locks `checkpoint.dir` and `log.jsonl` against other runs.

    Raises:
        OSError: on every rank, if a running job writes to one of them, or it is not writable.

    Comm: a broadcast over the world; rank 0 may reach it as late as `lock_file.STALE_S`.
    """
    outputs = Outputs()
    with ExitStack() as on_exit:
        on_rank_0(lambda: _lock(config, outputs, on_exit))
        yield outputs


def _lock(config: Config, outputs: Outputs, on_exit: ExitStack) -> None:
    """Locks the outputs, repairs checkpoint.dir, and writes the configuration to log.dir."""
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
        done = resumed_progress(config).get("step", 0)
        # a finished run keeps the configuration that its records and checkpoints come from
        if done < _last_step(config) or not (folder / "config.yaml").exists():
            with harmless(f"log.dir = {folder}, config.yaml and code/", outputs.notes.append):
                write_provenance(folder, config)


def _last_step(config: Config) -> int:
    return config.train.stop_after or config.train.steps


def _unlock_checkpoints(outputs: Outputs) -> None:
    """Releases checkpoint.dir, unless a background save runs: then the process's end does."""
    is_busy = outputs.saver is not None and outputs.saver.busy
    if outputs.lock is not None and not is_busy:
        outputs.lock.release()


SIGNAL_ELSEWHERE = "a signal on another rank"


def train(
    config: Config,
    process: Process,
    layout: PipelineLayout,
    predicted: Prediction,
    stop: StopFlag,
    notes: Sequence[str] = (),
) -> int:
    """Trains from the first step, or that of a checkpoint, to the last step.

    Args:
        layout: of the pipeline, the same on every rank.
        predicted: printed and logged beside the measurements.
        stop: set by a signal.
        notes: from earlier checks, for the log.

    Returns:
        Exit code: 0 finished, 75 stopped on a signal with all steps saved.

    Raises:
        InterruptedError: stopped on a signal, and checkpoint.dir is not set.
        OSError: another run writes to the same files.
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
    config = run.config  # that of the checkpoint, where the run is resumed
    on_rank_0(lambda: refuse_valid_without_targets(config))
    run.notes += on_rank_0(lambda: [note for notes_of in DATA_NOTES for note in notes_of(config)])
    if snapshots.note:
        run.notes.append(snapshots.note)
    saver = outputs.saver = _saver(run, outputs.lock)
    reporter = on_every_rank(lambda: Reporter(run, predicted))
    code = 1
    try:
        _announce(run, reporter, predicted)
        if saver is not None:
            with _save_failure_reported(reporter):
                saver.finish_export(run.progress.step)
        stopped = _stopped_early(run, reporter, stop)
        stopped = stopped or _steps(run, reporter, saver, stop, snapshots)
        if saver is not None:
            saver.wait()
        code = 0 if not stopped else 1 if saver is None else REQUEUE
    finally:
        reporter.close(code)
    if stopped and saver is None:
        raise InterruptedError(
            f"stopped on a signal at step {run.progress.step}; checkpoint.dir would save on signals"
        )
    return code


def _saver(run: Run, lock: LockFile | None) -> Saver | None:
    c = run.config.checkpoint
    if not c.dir:
        return None
    return Saver(
        c.dir,
        Keep.of(c.keep),
        c.async_save,
        run.config.parallel.timeout_s,
        lock,
        pinned=Path(c.resume),
        start_step=run.progress.step,
        exporter=_exporter(run) if c.hf_export else None,
    )


def _announce(run: Run, reporter: Reporter, predicted: Prediction) -> None:
    s, progress, train = run.mesh.sizes, run.progress, run.config.train
    ranks = f"{s.world} rank{'' if s.world == 1 else 's'}"
    sizes = f"dp {s.dp}, tp {s.tp}, cp {s.cp}, pp {s.pp}, ep {s.ep}"
    resumed = f"; resumed at step {progress.step}" if progress.step else ""
    reporter.say(
        f"{run.config.model.name}: {parameter_count(run.config.model):,} parameters on {ranks} "
        f"({sizes}), {run.config.precision.dtype}, zero {run.config.parallel.zero}{resumed}"
    )
    for note in run.notes:
        reporter.say(note)
    key = "stop_after" if train.stop_after else "steps"
    last = _last_step(run.config)
    if progress.step >= last:
        reporter.say(f"nothing to train: step {progress.step} is saved, and train.{key} = {last}")
        return
    for line in predicted.report:
        reporter.say(line)


def _stopped_early(run: Run, reporter: Reporter, stop: StopFlag) -> bool:
    """Whether some rank received a signal before the first step, so that nothing needs saving.

    Comm: all_reduce over the world of one number.
    """
    signals = torch.full((1,), float(bool(stop)), device=run.process.device)
    if not all_reduce(signals, run.mesh["world"]).item():
        return False
    signal = stop.received or SIGNAL_ELSEWHERE
    reporter.say(f"stopped on {signal} before the first step: nothing new to save")
    return True


def _steps(
    run: Run, reporter: Reporter, saver: Saver | None, stop: StopFlag, snapshots: MemorySnapshots
) -> bool:
    """Runs the remaining steps; True if a signal ended them early."""
    config, progress, train = run.config, run.progress, run.config.train
    last = _last_step(config)
    validates = progress.step > 0 or bool(_evaluate(run, reporter, "initial_valid_loss"))
    remaining = last - progress.step
    loader = train_loader(
        config, run.mesh, progress.consumed_samples, reads=run.reads_tokens, num_steps=remaining
    )
    saved_at, step_context = progress.step, _step_context(run, reporter)
    stopped = False
    reporter.start_clock()
    try:
        while progress.step < last and not stopped:
            result, lr = _train_step(run, reporter, loader, stop, step_context)
            stopped, at_end = result.stop, progress.step == last
            snapshots.after_step(progress.step)

            # validate and log
            losses = None
            if validates and (at_end or is_due(progress.step, train.eval_every)):
                losses = _evaluate(run, reporter, "valid_loss")
            reporter.step(result, lr)

            # save
            exports = _exports(config, progress.step, at_end)
            saves = is_due(progress.step, config.checkpoint.every)
            if saver and (stopped or at_end or exports or saves):
                _save(run, saver, reporter, losses, last=stopped or at_end, exported=exports)
                saved_at = progress.step
            reporter.start_clock()
    finally:
        loader.close()
    if stopped:
        saved = f"; checkpoint at step {saved_at}" if saver else ""
        reporter.say(f"stopped on {stop.received or SIGNAL_ELSEWHERE}{saved}")
    return stopped and progress.step < train.steps


def _train_step(
    run: Run,
    reporter: Reporter,
    loader: Loader,
    stop: StopFlag,
    step_context: Callable[[], AbstractContextManager[None]],
) -> tuple[StepResult, float]:
    """Trains on the next global batch; returns the step's figures and its learning rate."""
    step = next_step(run.config, loader, run.progress)
    with step_context() if step.batches else nullcontext():
        result = step.run(run.trainer, bool(stop))
        reporter.stop_clock()  # before the profiler writes
    advance(run.progress, result, step.samples, run.trainer.guard.in_a_row)
    return result, step.lr


def _step_context(run: Run, reporter: Reporter) -> Callable[[], AbstractContextManager[None]]:
    """Context in which every step runs: the profiler's with `log.profile`."""
    if run.config.log.profile is None:
        return nullcontext
    from megatron5d.train.monitoring.profiler import Profiler

    return Profiler(run, reporter.say).step


def _evaluate(run: Run, reporter: Reporter, name: str) -> dict[str, float]:
    """Records and returns the mean loss of every validation set, by name.

    Comm: that of `_mean_loss`, for each set.
    """
    losses = {label: _mean_loss(run, data) for label, data in validation_sets(run.config).items()}
    for label, loss in losses.items():
        reporter.add(name + label, loss)
    if losses:
        figures = [f"{label.lstrip('/')} {loss:.4f}".strip() for label, loss in losses.items()]
        text = ", ".join(figures)
        reporter.say(f"step {run.progress.step}: validation loss {text}")
    return losses


def _mean_loss(run: Run, data: ValidationSet) -> float:
    """Mean loss over the first eval_batches global batches of a validation set.

    Comm: the layers' and the pipeline's; all_reduce over the world of a few numbers.
    """
    loader = valid_loader(run.config, run.mesh, data, reads=run.reads_tokens)
    total = None
    for _ in range(run.config.train.eval_batches):
        share = run.trainer.evaluate(next(loader))
        total = share if total is None else total + share
    assert total is not None
    totals = all_reduce(total, run.mesh["world"]).tolist()
    return run.trainer.means(totals)["loss"]


def _exporter(run: Run) -> Exporter:
    """Writer of the Hugging Face exports of `checkpoint.hf_export`.

    Comm: a broadcast over the world.
    """
    # Imports tokenizers and model families, which only runs with an export need.
    from megatron5d.train.hf_export import RunExport, agree_on_export

    directory = Path(run.config.checkpoint.dir or "")
    return RunExport(agree_on_export(run.config, run.notes.append), directory)


def _exports(config: Config, step: int, at_end: bool) -> bool:
    """Whether checkpoint.hf_export includes this step."""
    when, _, every = (config.checkpoint.hf_export or "").partition(":")
    return at_end if when == "last" else when == "every" and is_due(step, int(every))


def _save(
    run: Run,
    saver: Saver,
    reporter: Reporter,
    losses: Mapping[str, float] | None,
    *,
    last: bool,
    exported: bool,
) -> None:
    """Saves a step. A failed save, as on a full disk, ends the run only at the last step."""
    run.sync.finish_gather()
    tensors = run_tensors(run.sync, run.optimizer, run.model.weights(), writing=True)
    valid_loss = sum(losses.values()) / len(losses) if losses else None
    record = run_record(
        run.progress,
        to_dict(run.config),
        commit() if run.process.rank == 0 else None,
        valid_loss=valid_loss,
    )
    with _save_failure_reported(reporter):
        saver.wait()
    with nullcontext() if last else _save_failure_reported(reporter):
        saver.save(run.progress.step, tensors, record, exported)


@contextmanager
def _save_failure_reported(reporter: Reporter) -> Iterator[None]:
    try:
        yield
    except SaveFailed as error:
        reporter.say(
            f"warning: {error}. Training continues; the next save follows by checkpoint.every"
        )
