"""The state of a run at one moment, how it is saved and how it is loaded."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os.path import isdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import megatron5d
from megatron5d.checkpoint.folder import FORMAT, RUN_FILE, config_from_record, read_run
from megatron5d.checkpoint.layout import ShardedTensor, by_key, sharded_slice
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
from megatron5d.train.preflight.resume import COMPARED_KEYS, changed_keys, mismatch_faults

Held = Sequence[tuple[ShardSpec, ShardedTensor]]


@dataclass
class Progress:
    """How far the run is. The random state is the seed and these counts: nothing else is drawn."""

    step: int = 0  # steps done
    skipped: int = 0  # of these, steps whose update was left out
    skipped_in_a_row: int = 0  # of these, the last ones, as optim.max_skipped counts them
    consumed_samples: int = 0  # sequences of all steps so far
    tokens: int = 0  # target tokens of all steps so far
    wandb_id: str | None = None


def _share(bucket: Bucket, flat: Tensor) -> tuple[int, int]:
    """Returns the range of a slice that this rank writes and reads, of the ranks that hold the same
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


def _optimizer(
    optimizer: Optimizer, writing: bool, shared: bool
) -> dict[str, list[tuple[ShardSpec, ShardedTensor]]]:
    """Returns, by kind, master weights and whichever moments the optimiser keeps of a parameter."""
    found: dict[str, list[tuple[ShardSpec, ShardedTensor]]] = {}
    for kind, flat, state in optimizer.tensors():
        found.setdefault(kind, []).extend(
            _sharded(state.bucket, state.segments, flat, writing, shared)
        )
    return found


def _gather_shares(sync: GradSync, optimizer: Optimizer) -> None:
    """Completes the slices of which the ranks that hold the same ones have read a share each.

    Comm: of each slice of weights and of the optimiser an all_gather over `replicate`, of the whole
        slice.
    """
    slices = [(bucket, bucket.weight_slice) for bucket in sync.buckets]
    slices += [(state.bucket, flat) for _, flat, state in optimizer.tensors()]
    for bucket, flat in slices:
        if bucket.replicate.size > 1:
            start, stop = _share(bucket, flat)
            sent = bucket.weight_slice.new_zeros(
                -(-flat.numel() // bucket.replicate.size), dtype=flat.dtype
            )
            sent[: stop - start] = flat[start:stop]
            flat.copy_(all_gather(sent, bucket.replicate)[: flat.numel()])


def _buffers(weights: Iterable[Tensor], writing: bool) -> Iterator[tuple[ShardSpec, ShardedTensor]]:
    """Yields those of a model's weights that no optimiser moves (the routers' biases)."""
    for tensor in weights:
        spec = spec_of(tensor)
        if not isinstance(tensor, nn.Parameter) and not (writing and not spec.pieces[0].owner):
            yield spec, ShardedTensor(spec.shape, [(spec.pieces[0].offset, tensor)], tensor.dtype)


def weight_shards(
    sync: GradSync, weights: Iterable[Tensor], *, writing: bool = False, shared: bool = False
) -> list[tuple[ShardSpec, ShardedTensor]]:
    """Returns what this rank owns of the model, in global coordinates; arguments as in
    `run_tensors`."""
    held = [
        part
        for bucket in sync.buckets
        for part in _sharded(bucket, bucket.segments(), bucket.weight_slice, writing, shared)
    ]
    return [*held, *_buffers(weights, writing)]


def run_tensors(
    sync: GradSync,
    optimizer: Optimizer,
    weights: Iterable[Tensor],
    *,
    writing: bool,
    shared: bool = False,
) -> dict[str, ShardedTensor]:
    """Returns all tensors of a run by key: `model.<name>`, `optim.<kind>.<name>` with master,
    exp_avg, ... for kind.

    Args:
        weights: of the model; its parameters are those of the buckets.
        writing: only what this rank is the one to write.
        shared: of a slice that several ranks hold, only this one's share; implied by `writing`.
    """
    shared = shared or writing
    tensors = by_key("model", weight_shards(sync, weights, writing=writing, shared=shared))
    for kind, held in _optimizer(optimizer, writing, shared).items():
        tensors |= by_key(f"optim.{kind}", held)
    return tensors


def twin_key(key: str) -> str | None:
    """Returns the key of a weight's master copy, or of a master copy's weight; None of all else."""
    for one, other in (("model.", "optim.master."), ("optim.master.", "model.")):
        if key.startswith(one):
            return other + key.removeprefix(one)
    return None


def run_record(
    progress: Progress,
    config: dict[str, Any],
    commit: str | None = None,
    valid_loss: float | None = None,
) -> dict[str, Any]:
    """Returns what run.json holds."""
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
    """Reads run.json of a checkpoint to begin from; keys of its configuration may be gone or new
    since it was saved. Raises Refused: a newer version wrote it, or it is damaged; names the file
    and the keys."""
    record, file = read_run(folder), folder / RUN_FILE
    if not isinstance(saved := record.get("format"), int):
        raise Refused(f"{file} is refused: format = {saved!r} is no whole number")
    progress = record.get("progress")
    if not isinstance(progress, dict):
        raise Refused(f"{file} is refused: progress = {progress!r} is no object")
    known = {field.name: field.default for field in fields(Progress)}
    faults = [
        f"progress.{key} is none of {', '.join(known)}" for key in progress if key not in known
    ]
    for key, value in (known | progress).items():
        if key == "wandb_id" and not (value is None or isinstance(value, str)):
            faults.append(f"progress.{key} = {value!r} is neither a text nor null")
        elif key in known and key != "wandb_id" and not (type(value) is int and 0 <= value < 2**63):
            faults.append(
                f"progress.{key} = {value!r} is no whole number of at least 0 and below 2^63"
            )
    if faults:
        raise Refused(f"{file} is refused: {'; '.join(faults)}")
    config_from_record(folder, record.get("config"), COMPARED_KEYS)
    return record


def nonfinite_weight(tensors: Mapping[str, ShardedTensor]) -> str | None:
    """Returns the first weight or master weight that is not finite, in words; None where all are.
    No communication."""
    for key, tensor in tensors.items():
        if not key.startswith(("model.", "optim.master.")):
            continue
        for offset, view in tensor.shards.items():
            if not view.numel() or bool(view.isfinite().all()):
                continue
            place = (~view.isfinite()).nonzero()[0].tolist()
            index = [first + at for first, at in zip(offset, place)]
            row = ", ".join(map(str, index[:-1] or index))
            return f"{key} holds {view[tuple(place)].item()} in row {row}"
    return None


def refuse_nonfinite(source: Path, tensors: Mapping[str, ShardedTensor]) -> None:
    """Refuses loaded weights that are not finite: every step with them would be.

    Raises ValueError: on every rank; names the tensor and the row.

    Comm: as `first_failure`.
    """
    if failed := first_failure(nonfinite_weight(tensors)):
        raise ValueError(
            f"{source}: {failed.text}{failed.more}, and no step with it can be finite. The run that saved it had "
            "diverged, or its import had such a weight: begin from an earlier checkpoint, or from another copy"
        )


def resume(
    folder: Path, sync: GradSync, optimizer: Optimizer, weights: Iterable[Tensor], config: Config
) -> tuple[Progress, list[str], Config]:
    """Loads weights, optimiser state and progress from a whole checkpoint, saved on any layout.

    Returns how far the run is; the keys that have changed since, its layout's too, for the log; and
    the configuration, whose lists of data without weights mean what they meant when the run began.
    Raises Refused: the checkpoint does not fit the model or the optimiser, or a newer version wrote
    it; on every rank.

    Comm: a broadcast of run.json; those of `load_tensors` and `_gather_shares`; below ZeRO-3 an
        all_gather of weights.
    """
    record = on_rank_0(lambda: read_record(folder))
    # of a checkpoint that got its name only now
    if faults := mismatch_faults(folder, record["config"], config):
        raise Refused(str(faults[0]))
    before = config_from_record(folder, record["config"], COMPARED_KEYS)
    # as it was before there was the key
    began = record["config"].get("data", {}).get("weights", "equal")
    kept = began != config.data.weights and len(config.data.train) > 1
    config = replace(config, data=replace(config.data, weights=began))
    told = (
        "model",
        "moe",
        "precision",
        "optim",
        "data",
        "train",
        "parallel",
        "pipeline",
        "recompute",
        "kernels",
    )
    changed = changed_keys(record["config"], config, told)
    changed += [f"data.weights = {began}, as it began"] * kept
    # which weights and moments there are
    decides = ("model.", "moe.balance ", "optim.freeze ", "optim.muon_exclude ")
    architecture = [line for line in changed if line.startswith(decides)]
    if architecture:
        alone = f", or take the weights alone: init.from_checkpoint={folder} with another checkpoint.dir"
        moments = all(line.startswith("optim.") for line in architecture)
        architecture.append(
            f"resume with {_as_saved(architecture, before)}{alone if moments else ''}"
        )
    tensors = run_tensors(sync, optimizer, weights, writing=False, shared=True)
    load_tensors(folder, tensors, architecture, twin=twin_key)
    refuse_nonfinite(folder, tensors)
    _gather_shares(sync, optimizer)
    progress = Progress(**record["progress"])
    optimizer.take_unsaved_masters()
    optimizer.set_step_count(progress.step - progress.skipped)
    sync.start_gather()
    sync.finish_gather()
    return progress, changed, config


def _as_saved(architecture: Sequence[str], before: Config) -> str:
    """Returns how to have the weights and moments that were saved, by the lines about keys that decide which there are:
    lists of globs to paste, and the rest in words."""
    lists = [
        key
        for key in ("freeze", "muon_exclude")
        if any(line.startswith(f"optim.{key} ") for line in architecture)
    ]
    pasted = [f"'optim.{key}={json.dumps(getattr(before.optim, key))}'" for key in lists]
    return " and ".join(
        pasted + ["the architecture that was saved"] * (len(architecture) > len(lists))
    )


def checkpoint_faults(config: Config, world: int) -> list[Fault]:
    """Folders that are named as checkpoints and exist, but certainly hold none."""
    resume = config.checkpoint.resume
    named_folders = (
        [("checkpoint.resume", resume, "auto, or none")] if resume not in ("auto", "none") else []
    )
    if config.init.from_checkpoint is not None and not _may_resume(config):
        named_folders.append(("init.from_checkpoint", config.init.from_checkpoint, "null"))
    found = []
    for knob, folder, otherwise in named_folders:
        # a check reports a folder that does not exist
        if isdir(folder) and (fault := no_checkpoint_reason(folder, knob)):
            fix = f"{knob}=DIR, a checkpoint that was saved to its end or a folder of them, or {otherwise}"
            found.append(Fault("no-checkpoint", (knob,), fault, fix, True))
    return found


def _may_resume(config: Config) -> bool:
    """Returns whether the run may continue from a checkpoint of its own; then `init` is not
    read."""
    folder, resume = config.checkpoint.dir, config.checkpoint.resume
    if resume == "auto":
        return (
            folder is not None
            and isdir(folder)
            and no_checkpoint_reason(folder, "checkpoint.dir") is None
        )
    return resume != "none"


def load_weights_of_run(folder: str, held: Held, optimizer: Optimizer, config: Config) -> list[str]:
    """Fills weights and masters from a checkpoint of another run, without its moments, step and
    data order.

    Masters are read where it has any. Biases of routers that only this run's balancing uses become
    zero.

    Args:
        folder: one checkpoint, or a directory of them, whose newest whole one is meant.
        held: what this rank owns of the model (`weight_shards`).

    Returns:
        For the log: in which form the weights were saved, and fields in which this model computes
        another function than the one that was saved. That is intended when a context is stretched,
        and a mistake otherwise.

    Raises:
        ValueError: no whole checkpoint there, or one that does not fit the model; on every rank.

    Comm: that of `agreed` and `load_tensors`; a broadcast of run.json.
    """
    found = agree_on_folder(lambda: resolve_checkpoint(folder, "init.from_checkpoint"))
    assert found is not None
    saved = on_rank_0(lambda: read_record(found))["config"]
    changed = changed_keys(saved, config, ["model"])
    if _balances_by_bias(saved) != _balances_by_bias(to_dict(config)):
        changed += [
            line for line in changed_keys(saved, config, ["moe"]) if line.startswith("moe.balance ")
        ]
    if not (
        saved.get("model", {}).get("router_bias")
        or _balances_by_bias(saved)
        or config.model.router_bias
    ):
        unused = [tensor for spec, tensor in held if spec.name.endswith(".router.bias")]
        held = [(spec, tensor) for spec, tensor in held if not spec.name.endswith(".router.bias")]
        for view in (view for tensor in unused for view in tensor.shards.values()):
            view.zero_()
    masters: Held = _optimizer(optimizer, writing=False, shared=False).get("master", [])
    held, masters, new = on_every_rank(lambda: _with_new_parts(found, saved, config, held, masters))
    tensors = by_key("model", held) | by_key("optim.master", masters)
    read = load_tensors(found, tensors, changed, twin=twin_key)
    refuse_nonfinite(found, tensors)
    optimizer.take_unsaved_masters()
    passive = tuple(
        f"model.{key} "
        for key in ("name", "from_hf", "init_std", "init_scale_output", "max_positions")
    )
    notes = [f"{line} in {found}" for line in changed if not line.startswith(passive)]
    return [f"begins with the weights of {found}: {_forms(read)}", *new, *notes]


def _with_new_parts(
    folder: Path, saved: Mapping[str, Any], config: Config, held: Held, masters: Held
) -> tuple[Held, Held, list[str]]:
    """Fills what a saved model lacks of this one; returns the weights and masters that it has, and
    log lines."""
    model = config.model
    if all(
        saved["model"].get(key) == getattr(model, key)
        for key in ("vocab_size", "tie_embeddings", "num_mtp_layers")
    ):
        return held, masters, []
    from megatron5d.checkpoint.new_weights import EMBEDDING, fill_new_weights, new_weight_notes

    weights = SavedWeights(folder, torch.float32, twin_key)
    shapes = {name: tuple(entry.size) for name, entry in weights.tensors.items()}
    held, masters = (
        fill_new_weights(each, model, shapes, weights.read, config.train.seed) if each else each
        for each in (held, masters)
    )
    return (
        held,
        masters,
        new_weight_notes(model, shapes, shapes.get(EMBEDDING, (model.vocab_size,))[0]),
    )


def _balances_by_bias(config: Mapping[str, Any]) -> bool:
    """Returns whether balancing moves biases of the routers; of a configuration as run.json has
    it."""
    return "bias" in config.get("moe", {}).get("balance", ())


def _forms(read: Mapping[str, tuple[str, torch.dtype]]) -> str:
    """Returns how weights were saved, from what `load_tensors` returns: masters, or weights without
    any."""
    exact = {key: source for key, source in read.items() if key.startswith("optim.master.")} or read
    kinds = {(source.startswith("optim.master."), dtype) for source, dtype in exact.values()}
    told = [
        f"{'masters' if master else 'weights'} in {str(dtype).removeprefix('torch.')}"
        for master, dtype in sorted(kinds, key=lambda kind: (not kind[0], str(kind[1])))
    ]
    return f"its {' and '.join(told)}"
