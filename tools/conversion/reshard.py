"""Resharding: the checkpoint that a run on another layout would have written, made without ranks.

The target's model, data parallelism and optimizer are built rank by rank on the meta device, which
gives the shards that each rank writes. Its file is then filled with slices of the source, one shard
in memory at a time.

    step-00000100.tmp/                 as in a save (checkpoint/folder.py)
    step-00000100.reshard/plan.json    the source and the target's configuration
    step-00000100.reshard/rank-N       where rank N's shards are, once its file is complete
"""

import json
import shutil
import uuid
import zlib
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  meta tensors import it: once here, not in every process
from torch import Tensor
from tqdm import tqdm

from megatron5d.checkpoint.folder import (
    RUN_FILE,
    Keep,
    checkpoint_error,
    commit,
    point_latest_to,
    read_run,
    saved_config,
    step_folder,
)
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import LazyTensor, ShardedTensor, slices
from megatron5d.checkpoint.load import SavedTensors, file_error, resolve_checkpoint
from megatron5d.checkpoint.tensor_file import RankWriter, Save, SavedItem
from megatron5d.config.convert import changed, leaves, to_dict, value_of
from megatron5d.config.errors import ConfigError, Fault
from megatron5d.config.json_file import read_json, write_whole
from megatron5d.config.load import keys_given, load_config
from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.optim.optimizer import build_optimizer
from megatron5d.parity.variants import faults_of
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools.conversion.new_checkpoint import check_empty
from megatron5d.tools.conversion.processes import in_processes
from megatron5d.topology.mesh import planned_mesh
from megatron5d.topology.owned_output import owned
from megatron5d.topology.shard_spec import without_memory
from megatron5d.train.build import build_sync, rounding_seed, sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.state import read_record, run_tensors

RESHARDED = "resharded"  # key of run.json: what the checkpoint was made of
MAX_GROUP_RANKS = 8  # neighboring ranks whose files are written together
MAX_READ_BYTES = 1 << 30  # of a tensor, read at once for several shards
GROUPS = ("parallel", "pipeline", "recompute", "train")  # of a layout, and of what has to fit it

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Resharding:
    """A source and the checkpoint that is made of it."""

    source: SavedTensors
    config: Config  # of the source's run, on the target layout
    # what run.json records: the source, the number of ranks and the configuration
    record: dict[str, Any]
    layout: PipelineLayout
    final: Path  # the folder of the new checkpoint
    save: Save  # named in each of its files

    @property
    def temporary(self) -> Path:
        """The folder until it is complete."""
        return self.final.with_suffix(".tmp")

    @property
    def records(self) -> Path:
        """The folder that records which files are complete."""
        return self.final.with_suffix(".reshard")

    def shards_of(self, rank: int) -> dict[str, ShardedTensor]:
        """Shards that a rank of the target writes, by key and without memory.

        Raises:
            ValueError: the checkpoint lacks a tensor, or has one of another shape.
        """
        saved, tensors = self.source.tensors, dict[str, ShardedTensor]()
        # a conversion may have written the checkpoint, without the optimizer's state
        weights_only = not any(key.startswith("optim.") for key in saved)
        world = self.record["world"]
        for key, tensor in rank_tensors(self.config, world, self.layout, rank).items():
            if weights_only and key.startswith("optim."):
                continue
            if key not in saved or saved[key].size != tensor.shape:
                contents = f"{key} as {list(saved[key].size)}" if key in saved else f"no {key}"
                raise ValueError(
                    f"{self.source.folder} has {contents}, but its configuration describes "
                    f"{list(tensor.shape)}"
                )
            if tensor.shards:
                tensors[key] = tensor
        return tensors

    def write_ranks(self, ranks: Sequence[int]) -> list[tuple[int, bytes]]:
        """Writes the files of neighboring ranks, except for those that are complete already.

        They are written together, tensor by tensor: shards of a tensor-parallel group alternate in
        the source, which is read once.

        Returns:
            Each rank, and where its shards are.
        """
        # what an interrupted resharding has completed is kept
        messages = {rank: self._complete_record(rank) for rank in ranks}
        with ExitStack() as stack:
            files = {
                rank: stack.enter_context(RankWriter(self.temporary, rank, self.save))
                for rank, message in messages.items()
                if not message
            }
            shards = {rank: self.shards_of(rank) for rank in files}
            for key in dict.fromkeys(key for tensors in shards.values() for key in tensors):
                by_rank = {rank: tensors[key] for rank, tensors in shards.items() if key in tensors}
                for rank, tensor in self._lazy(key, by_rank).items():
                    files[rank].add(key, tensor)
            # a record exists only once its file is on disk
            for rank, file in files.items():
                messages[rank] = file.finish()
                write_whole(self._record_file(rank), messages[rank])
        return list(messages.items())

    def _lazy(self, key: str, by_rank: dict[int, ShardedTensor]) -> dict[int, LazyTensor]:
        """Shards of a tensor by rank, to be read as they are written.

        They are read together where the rectangle around them fits and has few other elements.
        """
        entry = self.source.tensors[key]
        shapes = {
            rank: {offset: tuple(view.shape) for offset, view in tensor.shards.items()}
            for rank, tensor in by_rank.items()
        }
        shards = {offset: shape for rank in shapes.values() for offset, shape in rank.items()}
        begin, extent = _bounding_rectangle(shards)
        rectangle = None
        if (
            len(shards) > 1
            and prod(extent) * entry.dtype.itemsize <= MAX_READ_BYTES
            and prod(extent) <= 1.25 * sum(map(prod, shards.values()))
        ):
            rectangle = self.source.read(key, begin, extent)

        def values(offset: Shape) -> Tensor:
            shape = shards[offset]
            if rectangle is None:
                return self.source.read(key, offset, shape)
            starts = [i - o for i, o in zip(offset, begin)]
            return rectangle[slices(starts, shape)]

        return {
            rank: LazyTensor(entry.size, rank_shapes, entry.dtype, values)
            for rank, rank_shapes in shapes.items()
        }

    def _record_file(self, rank: int) -> Path:
        """The file that records where a rank's shards are, once they are on disk."""
        return self.records / f"rank-{rank}"

    def _complete_record(self, rank: int) -> bytes:
        """The record of a rank whose file is complete; else b""."""
        record = self._record_file(rank)
        if not record.exists():
            return b""
        message = record.read_bytes()
        items = _items(message)
        dtypes = {key: self.source.tensors[key].dtype for key, _ in items}
        if items and file_error(self.temporary / items[0][1].file, self.save, items, dtypes):
            return b""
        return message

    def finish(self, messages: list[bytes]) -> None:
        """Writes the index, and gives the checkpoint its name.

        Raises:
            ValueError: the ranks do not write all tensors of the source.
        """
        items = [item for message in messages for item in _items(message)]
        if unwritten := self.source.tensors.keys() - {key for key, _ in items}:
            raise ValueError(
                f"{self.source.folder} has {min(unwritten)}, but its configuration does not"
            )
        files = {item.file for _, item in items}
        # a process that was killed may have left others
        for stray in (path for path in self.temporary.iterdir() if path.name not in files):
            stray.unlink()
        run = read_run(self.source.folder) | {
            "config": self.record["config"],
            RESHARDED: self.record,
        }
        (self.temporary / RUN_FILE).write_text(json.dumps(run, indent=1))
        IndexWriter().write(self.temporary, messages, self.save)
        commit(self.temporary, Keep())
        shutil.rmtree(self.records)


def _bounding_rectangle(shards: dict[Shape, Shape]) -> tuple[list[int], list[int]]:
    """Offset and shape of the smallest rectangle around shards, which are offset -> shape."""
    begin = list(map(min, zip(*shards)))
    ends = ([i + n for i, n in zip(offset, shape)] for offset, shape in shards.items())
    return begin, [max(end) - first for first, end in zip(begin, zip(*ends))]


def reshard(args: Namespace) -> None:
    """Writes a checkpoint as the ranks of another layout would have, and prints its folder.

    Raises:
        ValueError: there is no complete checkpoint, it is damaged, the layout is invalid, or `out`
            has checkpoints.
        OSError: a file cannot be read or written, or a run is writing to `out`.
    """
    torch.set_num_threads(1)  # so that this process can be forked
    source = SavedTensors(resolve_checkpoint(args.source, "SRC"))
    if errors := source.errors_outside_tensors():
        raise ValueError(errors[0])
    config = target_config(saved_config(source.folder), args.overrides)
    world = args.world or smallest_world(config)
    if faults := faults_of(config, world):
        raise ConfigError(faults)
    # no run may write to the directory meanwhile
    with owned(args.out, option="DST", checkpoints=True):
        record = {"source": str(source.folder.resolve()), "save": str(source.save), "world": world}
        # as it is read from run.json, to be compared with it
        record["config"] = json.loads(json.dumps(to_dict(config)))
        final = step_folder(args.out, read_record(source.folder)["progress"]["step"])
        # killed after the checkpoint had its name
        if checkpoint_error(final) is None and read_run(final).get(RESHARDED) == record:
            point_latest_to(final)
            shutil.rmtree(final.with_suffix(".reshard"), ignore_errors=True)
        else:
            _write(_start(source, config, record, final), args.workers)
    print(f"wrote {final} for {world} rank{'' if world == 1 else 's'}")
    print(f"next: the run's command on {world} ranks with checkpoint.dir={final.parent}")


def target_config(saved: Config, overrides: list[str]) -> Config:
    """Configuration of a run with some keys of its layout replaced.

    Raises:
        ConfigError: an override cannot be read, or is not of a layout.
    """
    loaded = load_config(overrides)
    keys = [
        key
        for key in keys_given(overrides)
        if key in leaves() or "." not in key and key not in GROUPS
    ]
    if outside := sorted(key for key in keys if key.partition(".")[0] not in GROUPS):
        reason = f"{outside[0]} is not a key of the layout: checkpoints may depend on it"
        fix = f"leave it out; resharding takes keys of {', '.join(GROUPS)}"
        raise ConfigError([Fault("not-a-layout", tuple(outside), reason, fix)])
    return changed(saved, {key: value_of(loaded, key) for key in keys})


def smallest_world(config: Config) -> int:
    """The fewest ranks that both views of a layout divide."""
    p = config.parallel
    dense = p.pp * p.tp * p.cp * p.dp_replicate
    experts = p.pp * p.ep * (p.tp if p.etp is None else p.etp)
    return next(world for world in range(dense, dense * experts + 1, dense) if world % experts == 0)


def rank_tensors(
    config: Config, world: int, layout: PipelineLayout, rank: int
) -> dict[str, ShardedTensor]:
    """What one rank of a run writes to a checkpoint, without memory. No communication."""
    kv_heads = config.model.num_kv_heads
    mesh = planned_mesh(sizes_of(config, world), rank, num_kv_heads=kv_heads, shared=layout.shared)
    with without_memory():
        model = GPT(config, mesh, "meta", layout.stage_specs(mesh["pp"].rank), layout.shared)
    sync = build_sync(config, mesh, model)
    optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
    return run_tensors(sync, optimizer, model.weights(), writing=True)


def _start(source: SavedTensors, config: Config, record: dict[str, Any], final: Path) -> Resharding:
    """The resharding that was interrupted, or a new one."""
    check_empty(final.parent)
    file, temporary = final.with_suffix(".reshard") / "plan.json", final.with_suffix(".tmp")
    # an interrupted resharding of the same source to the same layout continues
    plan = read_json(file) if file.exists() else {}
    if plan.get(RESHARDED) != record:
        for old in (temporary, file.parent):
            shutil.rmtree(old, ignore_errors=True)
        plan = {RESHARDED: record, "id": uuid.uuid4().hex}
        file.parent.mkdir(parents=True)
        write_whole(file, json.dumps(plan))
    temporary.mkdir(exist_ok=True)
    save = Save(plan["id"], int(final.name.removeprefix("step-")))
    return Resharding(source, config, record, searched_layout(config, record["world"]), final, save)


def _items(message: bytes) -> list[tuple[str, SavedItem]]:
    """Items of a rank's file, each with the key of its tensor."""
    rows = json.loads(zlib.decompress(message))
    return [
        (tensor[0], SavedItem(tuple(offset), tuple(extent), *position))
        for tensor, (offset, extent, *position) in rows
    ]


def _write(job: Resharding, num_workers: int) -> None:
    """Writes the files of all ranks, and checks the checksum of everything that is read."""
    total = sum(item.length for items in job.source.files().values() for _, item in items)
    world = job.record["world"]
    messages, size = [b""] * world, min(MAX_GROUP_RANKS, -(-world // num_workers))
    groups = [range(first, min(first + size, world)) for first in range(0, world, size)]
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for written in in_processes(lambda i: job.write_ranks(groups[i]), len(groups), num_workers):
            for rank, message in written:
                messages[rank] = message
                bar.update(sum(item.length for _, item in _items(message)))
    job.finish(messages)
