"""The state of a run at one moment, how it is saved and how it is loaded."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from os.path import isdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import megatron5d
from megatron5d.checkpoint.folder import FORMAT, RUN_FILE, config_from_record, read_run
from megatron5d.checkpoint.layout import (
    ParameterShards,
    ShardedTensor,
    ShardedTensors,
    by_key,
    sharded_slice,
)
from megatron5d.checkpoint.load import (
    SavedWeights,
    agree_on_folder,
    load_tensors,
    no_checkpoint_reason,
    resolve_checkpoint,
)
from megatron5d.comm.collectives import all_gather
from megatron5d.config.convert import to_dict
from megatron5d.config.errors import Fault, Refused
from megatron5d.config.schema import Config
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.optim.optimizer import Optimizer
from megatron5d.topology.all_ranks import first_failure, on_every_rank, on_rank_0
from megatron5d.topology.launcher import slurm_job
from megatron5d.topology.shard_spec import ShardSpec, spec_of
from megatron5d.train.preflight.resume import (
    COMPARED_KEYS,
    changed_keys,
    mismatch_faults,
    model_differences,
    tokenizer_differences,
)

# groups of the configuration whose changes a resumed run logs
_LOGGED_GROUPS = (
    *("model", "moe", "precision", "optim", "data", "train", "parallel", "pipeline", "recompute"),
    "kernels",
)
# keys that determine which weights and moments there are
_ARCHITECTURE = ("model.", "moe.balance ", "optim.freeze ", "optim.muon_exclude ")


@dataclass
class Progress:
    """How far the run is. The random state is the seed and these counts: nothing else is drawn."""

    step: int = 0  # steps done
    skipped: int = 0  # of these, steps without an update
    skipped_in_a_row: int = 0  # of these, the last ones, as optim.max_skipped counts them
    consumed_samples: int = 0  # sequences of all steps so far
    tokens: int = 0  # target tokens of all steps so far
    wandb_id: str | None = None


def _share(bucket: Bucket, flat: Tensor) -> tuple[int, int]:
    """Range of a slice that this rank writes and reads, among the ranks that hold the same
    slice."""
    size = -(-flat.numel() // bucket.replicate.size)
    start = min(bucket.replicate.rank * size, flat.numel())
    return start, min(start + size, flat.numel())


def _sharded(
    bucket: Bucket, segments: Iterable[Segment], flat: Tensor, writing: bool, shared: bool
) -> Iterator[tuple[ShardSpec, ShardedTensor]]:
    share = _share(bucket, flat) if shared else None
    for segment in segments:
        yield segment.spec, sharded_slice(segment, flat, writing=writing, share=share)


def _optimizer_shards(
    optimizer: Optimizer, writing: bool, shared: bool
) -> dict[str, ParameterShards]:
    """Master weights and the moments that the optimizer keeps of each parameter, by kind."""
    shards: dict[str, ParameterShards] = {}
    for kind, flat, state in optimizer.tensors():
        shards.setdefault(kind, []).extend(
            _sharded(state.bucket, state.segments, flat, writing, shared)
        )
    return shards


def _gather_shares(sync: GradSync, optimizer: Optimizer) -> None:
    """Completes the slices of which each rank with the same slice has read a share.

    Comm:
        For each slice of weights and of the optimizer an all_gather over `replicate`, of the whole
        slice.
    """
    slices = [(bucket, bucket.weight_slice) for bucket in sync.buckets]
    slices += [(state.bucket, flat) for _, flat, state in optimizer.tensors()]
    for bucket, flat in slices:
        if bucket.replicate.size > 1:
            start, stop = _share(bucket, flat)
            size = -(-flat.numel() // bucket.replicate.size)
            sent = bucket.weight_slice.new_zeros(size, dtype=flat.dtype)
            sent[: stop - start] = flat[start:stop]
            flat.copy_(all_gather(sent, bucket.replicate)[: flat.numel()])


def _buffers(weights: Iterable[Tensor], writing: bool) -> Iterator[tuple[ShardSpec, ShardedTensor]]:
    """Yields the weights that no optimizer updates: the routers' biases."""
    for tensor in weights:
        spec = spec_of(tensor)
        if not isinstance(tensor, nn.Parameter) and not (writing and not spec.pieces[0].owner):
            yield spec, ShardedTensor(spec.shape, [(spec.pieces[0].offset, tensor)], tensor.dtype)


def weight_shards(
    sync: GradSync, weights: Iterable[Tensor], *, writing: bool = False, shared: bool = False
) -> ParameterShards:
    """What this rank owns of the model, in global coordinates; arguments as in `run_tensors`."""
    shards: ParameterShards = []
    for bucket in sync.buckets:
        shards += _sharded(bucket, bucket.segments(), bucket.weight_slice, writing, shared)
    return [*shards, *_buffers(weights, writing)]


def run_tensors(
    sync: GradSync,
    optimizer: Optimizer,
    weights: Iterable[Tensor],
    *,
    writing: bool,
    shared: bool = False,
) -> ShardedTensors:
    """All tensors of a run by key: `model.<name>`, `optim.<kind>.<name>` with master, exp_avg, ...
    for kind.

    Args:
        weights: of the model; its parameters are those of the buckets.
        writing: only what no other rank writes.
        shared: of a slice that several ranks hold, only this rank's share; implied by `writing`.
    """
    shared = shared or writing
    tensors = by_key("model", weight_shards(sync, weights, writing=writing, shared=shared))
    for kind, shards in _optimizer_shards(optimizer, writing, shared).items():
        tensors |= by_key(f"optim.{kind}", shards)
    return tensors


def twin_key(key: str) -> str | None:
    """Key of a weight's master copy, or of a master copy's weight; None for other tensors."""
    for prefix, twin in (("model.", "optim.master."), ("optim.master.", "model.")):
        if key.startswith(prefix):
            return twin + key.removeprefix(prefix)
    return None


def run_record(
    progress: Progress,
    config: dict[str, Any],
    commit: str | None = None,
    valid_loss: float | None = None,
) -> dict[str, Any]:
    """Content of run.json."""
    return {
        "format": FORMAT,
        "version": megatron5d.__version__,
        "commit": commit,
        "job": slurm_job()[0],
        "valid_loss": valid_loss,
        "progress": asdict(progress),
        "config": config,
    }


def read_record(folder: Path) -> dict[str, Any]:
    """Reads run.json of a checkpoint to start from; keys of its configuration may be gone or new
    since it was saved.

    Raises:
        Refused: a newer version wrote it, or it is damaged; names the file and the keys.
    """
    record, file = read_run(folder), folder / RUN_FILE
    if not isinstance(saved := record.get("format"), int):
        raise Refused(f"{file} is invalid: format = {saved!r} is not an integer")
    progress = record.get("progress")
    if not isinstance(progress, dict):
        raise Refused(f"{file} is invalid: progress = {progress!r} is not an object")
    known = {field.name: field.default for field in fields(Progress)}
    errors = [
        f"progress.{key} is none of {', '.join(known)}" for key in progress if key not in known
    ]
    for key, value in (known | progress).items():
        if key == "wandb_id" and not (value is None or isinstance(value, str)):
            errors.append(f"progress.{key} = {value!r} is neither a text nor null")
        elif key in known and key != "wandb_id" and not (type(value) is int and 0 <= value < 2**63):
            errors.append(f"progress.{key} = {value!r} is not an integer from 0 to 2^63 - 1")
    if errors:
        raise Refused(f"{file} is invalid: {'; '.join(errors)}")
    config_from_record(folder, record.get("config"), COMPARED_KEYS)
    return record


def nonfinite_weight(tensors: Mapping[str, ShardedTensor]) -> str | None:
    """The first weight or master weight that is not finite, in words; None where all are finite. No
    communication."""
    for key, tensor in tensors.items():
        if not key.startswith(("model.", "optim.master.")):
            continue
        for offset, view in tensor.shards.items():
            if not view.numel() or bool(view.isfinite().all()):
                continue
            position = (~view.isfinite()).nonzero()[0].tolist()
            index = [first + i for first, i in zip(offset, position)]
            row = ", ".join(map(str, index[:-1] or index))
            return f"{key} holds {view[tuple(position)].item()} in row {row}"
    return None


def refuse_nonfinite(source: Path, tensors: Mapping[str, ShardedTensor]) -> None:
    """Refuses loaded weights that are not finite, with which no step would be.

    Raises:
        ValueError: on every rank; names the tensor and the row.

    Comm:
        That of `first_failure`.
    """
    if failed := first_failure(nonfinite_weight(tensors)):
        raise ValueError(
            f"{source}: {failed.text}{failed.more}, and no step with it can be finite. The run "
            "that saved it had diverged, or the weight was imported: start from an earlier "
            "checkpoint, or from another copy"
        )


def resume(
    folder: Path, sync: GradSync, optimizer: Optimizer, weights: Iterable[Tensor], config: Config
) -> tuple[Progress, list[str], Config]:
    """Loads weights, optimizer state and progress from a complete checkpoint, saved on any layout.

    Returns:
        How far the run is; for the log, the keys that have changed since, including those of the
        layout; and the configuration, in which lists of data without weights mean what they meant
        when the run began.

    Raises:
        Refused: on every rank, if the checkpoint does not fit the model or the optimizer, or a
            newer version wrote it.

    Comm:
        A broadcast of run.json; that of `load_tensors` and `_gather_shares`; below ZeRO-3 an
        all_gather of weights.
    """
    record = on_rank_0(lambda: read_record(folder))
    # the preflight checks have not seen a checkpoint that got its name only now
    if faults := mismatch_faults(folder, record["config"], config):
        raise Refused(str(faults[0]))
    before = config_from_record(folder, record["config"], COMPARED_KEYS)
    # data of runs that are older than the key had equal weights
    data_weights = record["config"].get("data", {}).get("weights", "equal")
    restored = data_weights != config.data.weights and len(config.data.train) > 1
    config = replace(config, data=replace(config.data, weights=data_weights))
    changed = changed_keys(record["config"], config, _LOGGED_GROUPS)
    changed += [f"data.weights = {data_weights}, as it began"] * restored
    if tokenizer := on_rank_0(partial(tokenizer_differences, config, record["config"])):
        changed = [line for line in changed if not line.startswith("data.tokenizer ")] + tokenizer

    tensors = run_tensors(sync, optimizer, weights, writing=False, shared=True)
    load_tensors(folder, tensors, _architecture_lines(folder, changed, before), twin=twin_key)
    refuse_nonfinite(folder, tensors)
    _gather_shares(sync, optimizer)
    progress = Progress(**record["progress"])
    optimizer.restore_unsaved_masters()
    optimizer.set_step_count(progress.step - progress.skipped)
    sync.start_gather()
    sync.finish_gather()
    return progress, changed, config


def _architecture_lines(folder: Path, changed: list[str], before: Config) -> list[str]:
    """For the error about tensors that do not fit: changed keys that determine which weights and
    moments there are, and how to have those that were saved."""
    lines = [line for line in changed if line.startswith(_ARCHITECTURE)]
    if not lines:
        return []
    lists = [
        key
        for key in ("freeze", "muon_exclude")
        if any(line.startswith(f"optim.{key} ") for line in lines)
    ]
    fixes = [f"'optim.{key}={json.dumps(getattr(before.optim, key))}'" for key in lists]
    if len(lines) > len(lists):
        fixes.append("the architecture that was saved")
    fix = f"resume with {' and '.join(fixes)}"
    if all(line.startswith("optim.") for line in lines):
        fix += (
            f", or take only the weights: init.from_checkpoint={folder} with another checkpoint.dir"
        )
    return [*lines, fix]


def checkpoint_faults(config: Config, world: int) -> list[Fault]:
    """Faults of folders that are named as checkpoints and exist, but certainly hold none."""
    resume = config.checkpoint.resume
    folders = (
        [("checkpoint.resume", resume, "auto, or none")] if resume not in ("auto", "none") else []
    )
    if config.init.from_checkpoint is not None and not _may_resume(config):
        folders.append(("init.from_checkpoint", config.init.from_checkpoint, "null"))
    faults = []
    for knob, folder, default in folders:
        # another check reports a folder that does not exist
        if isdir(folder) and (reason := no_checkpoint_reason(folder, knob)):
            fix = f"{knob}=DIR, a complete checkpoint or a folder of checkpoints, or {default}"
            faults.append(Fault("no-checkpoint", (knob,), reason, fix, True))
    return faults


def _may_resume(config: Config) -> bool:
    """Whether the run may continue from its last checkpoint, so that `init` is not read."""
    folder, resume = config.checkpoint.dir, config.checkpoint.resume
    if resume != "auto":
        return resume != "none"
    if folder is None or not isdir(folder):
        return False
    return no_checkpoint_reason(folder, "checkpoint.dir") is None


def load_weights_of_run(
    folder: str, shards: ParameterShards, optimizer: Optimizer, config: Config
) -> list[str]:
    """Fills weights and masters from a checkpoint of another run, without its moments, step and
    data order.

    Masters are read where the checkpoint has any. Biases of routers that only this run's balancing
    uses become zero.

    Args:
        folder: one checkpoint, or a directory of them, whose newest complete one is used.
        shards: what this rank owns of the model (`weight_shards`).

    Returns:
        For the log: in which form the weights were saved, and fields in which this model computes
        another function than the one that was saved. That is intended when a context is stretched,
        and a mistake otherwise.

    Raises:
        ValueError: on every rank, if there is no complete checkpoint, or one that does not fit the
            model.

    Comm:
        That of `agree_on_folder` and `load_tensors`; a broadcast of run.json.
    """
    source = agree_on_folder(lambda: resolve_checkpoint(folder, "init.from_checkpoint"))
    assert source is not None
    saved = on_rank_0(partial(read_record, source))["config"]
    balance = []
    if _balances_by_bias(saved) != _balances_by_bias(to_dict(config)):
        moe = changed_keys(saved, config, ["moe"])
        balance = [line for line in moe if line.startswith("moe.balance ")]
    changed = changed_keys(saved, config, ["model"]) + balance

    had_biases = saved.get("model", {}).get("router_bias") or _balances_by_bias(saved)
    if not (had_biases or config.model.router_bias):
        shards = _without_router_biases(shards)
    masters: ParameterShards = _optimizer_shards(optimizer, False, False).get("master", [])
    shards, masters, new_notes = on_every_rank(
        partial(_fill_new_weights, source, saved, config, shards, masters)
    )
    tensors = by_key("model", shards) | by_key("optim.master", masters)
    sources = load_tensors(source, tensors, changed, twin=twin_key)
    refuse_nonfinite(source, tensors)
    optimizer.restore_unsaved_masters()

    before = config_from_record(source, saved, COMPARED_KEYS).model
    differences = model_differences(config.model, before) + balance
    differences += on_rank_0(partial(tokenizer_differences, config, saved))
    notes = [f"{line} in {source}" for line in differences]
    return [f"begins with the weights of {source}: {_forms(sources)}", *new_notes, *notes]


def _without_router_biases(shards: ParameterShards) -> ParameterShards:
    """Sets the routers' biases to zero and leaves them out."""
    for spec, tensor in shards:
        for view in tensor.shards.values() if spec.name.endswith(".router.bias") else ():
            view.zero_()
    return [(spec, tensor) for spec, tensor in shards if not spec.name.endswith(".router.bias")]


def _fill_new_weights(
    folder: Path,
    saved: Mapping[str, Any],
    config: Config,
    shards: ParameterShards,
    masters: ParameterShards,
) -> tuple[ParameterShards, ParameterShards, list[str]]:
    """Fills weights that a saved model lacks; returns the weights and masters that it has, and log
    lines."""
    model, growing = config.model, ("vocab_size", "tie_embeddings", "num_mtp_layers")
    if all(saved["model"].get(key) == getattr(model, key) for key in growing):
        return shards, masters, []
    from megatron5d.checkpoint.new_weights import EMBEDDING, fill_new_weights, new_weight_notes

    weights = SavedWeights(folder, torch.float32, twin_key)
    shapes = {name: tuple(entry.size) for name, entry in weights.tensors.items()}
    shards, masters = (
        fill_new_weights(group, model, shapes, weights.read, config.train.seed)
        for group in (shards, masters)
    )
    rows = shapes.get(EMBEDDING, (model.vocab_size,))[0]
    return shards, masters, new_weight_notes(model, shapes, rows)


def _balances_by_bias(config: Mapping[str, Any]) -> bool:
    """Whether balancing changes biases of the routers, in a configuration as run.json has it."""
    return "bias" in config.get("moe", {}).get("balance", ())


def _forms(sources: Mapping[str, tuple[str, torch.dtype]]) -> str:
    """How weights were saved, from the result of `load_tensors`: masters, or weights without
    any."""
    masters = {key: source for key, source in sources.items() if key.startswith("optim.master.")}
    kinds = {
        (key.startswith("optim.master."), dtype) for key, dtype in (masters or sources).values()
    }
    forms = [
        f"{'masters' if master else 'weights'} in {str(dtype).removeprefix('torch.')}"
        for master, dtype in sorted(kinds, key=lambda kind: (not kind[0], str(kind[1])))
    ]
    return f"its {' and '.join(forms)}"
