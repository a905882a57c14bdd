"""Resharding: the checkpoint that a run on another layout would have written, made without ranks.

The target's model, data parallelism and optimiser are built on the meta device, rank by rank, which tells what each
rank writes. Its file is then filled with slices of the source, one part of a tensor in memory at a time.

    step-00000100.tmp/        as in a save (checkpoint/folder.py)
    step-00000100.reshard/    plan.json: what is made of what; rank-N: where rank N's parts are, once its file is whole
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import uuid
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (meta tensors import it, which takes a second: once here, not in each process)
from tqdm import tqdm

from megatron5d.checkpoint.folder import (
    RUN,
    Keep,
    commit,
    fault_of,
    point_latest_to,
    read_run,
    saved_config,
    saved_steps,
    step_folder,
)
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.inspection import SavedTensors, fault_of_file
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import LazyTensor, lazy_tensor, whole_checkpoint
from megatron5d.checkpoint.lock_file import LockFile
from megatron5d.checkpoint.storage import write
from megatron5d.checkpoint.tensor_file import Save, SavedItem
from megatron5d.config.convert import changed, leaves, to_dict, value_of
from megatron5d.config.errors import ConfigError, Fault
from megatron5d.config.json_file import read_json
from megatron5d.config.load import keys_given, load_config
from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.optim.optimizer import build_optimizer
from megatron5d.parity.variants import faults_of
from megatron5d.planning.auto_schedule import searched_layout
from megatron5d.tools.conversion.forked import in_processes
from megatron5d.topology.mesh import planned_mesh
from megatron5d.topology.shard_spec import without_memory
from megatron5d.train.build import build_sync, rounding_seed, sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.state import run_tensors

RESHARDED = "resharded"  # key of run.json: what the checkpoint was made of
GROUPS = ("parallel", "pipeline", "recompute", "train")  # of a layout, and of what has to fit it


@dataclass(frozen=True)
class Resharding:
    """What is made of what.

    Args:
        source: the checkpoint that is read.
        config: of its run, on the target layout.
        made: the source, the number of ranks and the configuration, for run.json.
        layout: of their pipeline.
        final: the folder of the new checkpoint.
        save: named in each of its files.
    """

    source: SavedTensors
    config: Config
    made: dict[str, Any]
    layout: PipelineLayout
    final: Path
    save: Save

    @property
    def temporary(self) -> Path:
        """The folder until it is whole."""
        return self.final.with_suffix(".tmp")

    @property
    def records(self) -> Path:
        """The folder that says which files are whole."""
        return self.final.with_suffix(".reshard")

    def parts_of(self, rank: int) -> dict[str, LazyTensor]:
        """Returns what a rank of the target writes, by key; each part is read when it is written.

        Raises:
            ValueError: the checkpoint lacks a tensor, or holds one of another shape.
        """
        saved, found = self.source.tensors, dict[str, LazyTensor]()
        weights_only = not any(key.startswith("optim.") for key in saved)
        for key, tensor in rank_tensors(self.config, self.made["world"], self.layout, rank).items():
            if weights_only and key.startswith("optim."):
                continue
            if key not in saved or saved[key].size != tensor.shape:
                held = f"{key} as {list(saved[key].size)}" if key in saved else f"no {key}"
                raise ValueError(f"{self.source.folder} holds {held}, its configuration describes {list(tensor.shape)}")
            found[key] = self._lazy(key, {offset: tuple(view.shape) for offset, view in tensor.parts.items()})
        return found

    def _lazy(self, key: str, parts: dict[tuple[int, ...], tuple[int, ...]]) -> LazyTensor:
        entry = self.source.tensors[key]
        return lazy_tensor(entry.size, parts, entry.dtype, lambda offset: self.source.read(key, offset, parts[offset]))

    def write_rank(self, rank: int) -> tuple[int, bytes]:
        """Writes the file of a rank, unless it is whole already; returns the rank, and where its parts are."""
        record = self.records / f"rank-{rank}"
        message = record.read_bytes() if record.exists() else b""
        if not (message and self._is_sound(message)):
            message = write(self.temporary, dict(self.parts_of(rank)), rank, self.save)
            record.with_suffix(".new").write_bytes(message)
            record.with_suffix(".new").rename(record)
        return rank, message

    def _is_sound(self, message: bytes) -> bool:
        """Returns whether the file that a record describes is there and whole."""
        items = _items(message)
        dtypes = {key: self.source.tensors[key].dtype for key, _ in items}
        path = self.temporary / (items[0][1].file if items else "")
        return not items or fault_of_file(path, self.save, items, dtypes) is None

    def finish(self, messages: list[bytes]) -> None:
        """Writes the index and gives the checkpoint its name.

        Raises:
            ValueError: the ranks do not hold all tensors of the source.
        """
        items = [each for message in messages for each in _items(message)]
        if lost := self.source.tensors.keys() - {key for key, _ in items}:
            raise ValueError(f"{self.source.folder} holds {min(lost)}, which its configuration does not describe")
        files = {item.file for _, item in items}
        for stray in (path for path in self.temporary.iterdir() if path.name not in files):
            stray.unlink()  # of a process that was killed
        record = read_run(self.source.folder) | {"config": self.made["config"], RESHARDED: self.made}
        (self.temporary / RUN).write_text(json.dumps(record, indent=1))
        IndexWriter().write(self.temporary, messages, self.save)
        commit(self.temporary, Keep())
        shutil.rmtree(self.records)


def reshard(args: argparse.Namespace) -> int:
    """Writes a checkpoint as the ranks of another layout would have, and prints its folder; returns 0.

    Raises:
        ValueError: no whole checkpoint, one that is damaged, a layout that is refused, or a directory that already
            holds checkpoints.
        OSError: a file cannot be read or written, or a run is writing to the directory.
    """
    torch.set_num_threads(1)  # of each process; one that has more cannot be forked
    source = SavedTensors(whole_checkpoint(args.source, "SRC"))
    if faults := source.faults_outside():
        raise ValueError(faults[0])
    config = target_config(saved_config(source.folder), args.overrides)
    world = args.world or smallest_world(config)
    if refused := faults_of(config, world):
        raise ConfigError(refused)
    with ExitStack() as stack:
        stack.callback(LockFile(args.out / "run.lock", f"DST = {args.out}").release)
        made = {"source": str(source.folder.resolve()), "save": str(source.save), "world": world}
        made["config"] = json.loads(json.dumps(to_dict(config)))
        final = step_folder(args.out, read_run(source.folder)["progress"]["step"])
        if fault_of(final) is None and read_run(final).get(RESHARDED) == made:  # killed after it had its name
            point_latest_to(final)
            shutil.rmtree(final.with_suffix(".reshard"), ignore_errors=True)
        else:
            _write(_begun(source, config, made, final), args.workers)
    print(f"wrote {final} for {world} rank{'' if world == 1 else 's'}")
    return 0


def target_config(saved: Config, overrides: list[str]) -> Config:
    """Returns the configuration of a run with some keys of its layout replaced.

    Raises:
        ValueError: an override that cannot be read, or that is not of a layout.
    """
    wanted = load_config(overrides)
    given = [key for key in keys_given(overrides) if key in leaves() or "." not in key and key not in GROUPS]
    if others := sorted(key for key in given if key.partition(".")[0] not in GROUPS):
        reason = f"{others[0]} is not of a layout, and what a checkpoint holds may depend on it"
        fix = f"leave it out; resharding takes keys of {', '.join(GROUPS)}"
        raise ConfigError([Fault("not-a-layout", tuple(others), reason, fix)])
    return changed(saved, {key: value_of(wanted, key) for key in given})


def smallest_world(config: Config) -> int:
    """Returns the fewest ranks on which both views of a layout are whole."""
    p = config.parallel
    step = p.pp * p.tp * p.cp * p.dp_replicate
    experts = p.pp * p.ep * (p.tp if p.etp is None else p.etp)
    return next(world for world in range(step, step * experts + 1, step) if world % experts == 0)


def rank_tensors(config: Config, world: int, layout: PipelineLayout, rank: int) -> dict[str, ShardedTensor]:
    """Returns what one rank of a run writes to a checkpoint, without memory. No communication."""
    kv_heads = config.model.num_kv_heads
    mesh = planned_mesh(sizes_of(config, world), rank, num_kv_heads=kv_heads, pairs=layout.shared != "none")
    with without_memory():
        model = GPT(config, mesh, "meta", layout.stage_specs(mesh["pp"].rank), layout.shared)
    sync = build_sync(config, mesh, model)
    optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
    return run_tensors(sync, optimizer, model.weights(), writing=True)


def _begun(source: SavedTensors, config: Config, made: dict[str, Any], final: Path) -> Resharding:
    """Returns the resharding that was interrupted, or a new one.

    Raises:
        ValueError: the directory holds a checkpoint.
    """
    if steps := saved_steps(final.parent):
        raise ValueError(
            f"{final.parent} already holds the checkpoint of step {steps[-1]}; give a directory without any"
        )
    file, temporary = final.with_suffix(".reshard") / "plan.json", final.with_suffix(".tmp")
    begun = read_json(file) if file.exists() else {}
    if begun.get(RESHARDED) != made:
        for old in (temporary, file.parent):
            shutil.rmtree(old, ignore_errors=True)
        begun = {RESHARDED: made, "id": uuid.uuid4().hex}
        file.parent.mkdir(parents=True)
        file.with_suffix(".new").write_text(json.dumps(begun))
        file.with_suffix(".new").rename(file)
    temporary.mkdir(exist_ok=True)
    save = Save(begun["id"], int(final.name.removeprefix("step-")))
    return Resharding(source, config, made, searched_layout(config, made["world"]), final, save)


def _items(message: bytes) -> list[tuple[str, SavedItem]]:
    """Returns the items of a rank's file with the keys of their tensors, from what `write` returns."""
    rows = json.loads(zlib.decompress(message))
    return [(whole[0], SavedItem(tuple(offset), tuple(extent), *place)) for whole, (offset, extent, *place) in rows]


def _write(job: Resharding, num_workers: int) -> None:
    """Writes the files of all ranks. All that is read of the source is compared with its checksums."""
    total = sum(item.length for items in job.source.files().values() for _, item in items)
    messages = [b""] * job.made["world"]
    with tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for rank, message in in_processes(job.write_rank, job.made["world"], num_workers):
            messages[rank] = message
            bar.update(sum(item.length for _, item in _items(message)))
    job.finish(messages)
