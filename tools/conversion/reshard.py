"""Resharding: the checkpoint that a run on another layout would have written, made without ranks.

The target's model, data parallelism and optimiser are built on the meta device, rank by rank, which
tells what each rank writes. Its file is then filled with slices of the source, one part of a tensor
in memory at a time.

    step-00000100.tmp/        as in a save (checkpoint/folder.py)
    step-00000100.reshard/    plan.json: what is made of what; rank-N: where rank N's parts are, once its file is whole
"""

from __future__ import annotations

import argparse
import json
import shutil
import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (meta tensors import it, which takes a second: once here, not in each process)
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
    saved_steps,
    step_folder,
)
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import (
    LazyTensor,
    SavedTensors,
    file_error,
    lazy_tensor,
    resolve_checkpoint,
)
from megatron5d.checkpoint.storage import RankWriter
from megatron5d.checkpoint.tensor_file import Save, SavedItem
from megatron5d.config.convert import changed, leaves, to_dict, value_of
from megatron5d.config.errors import ConfigError, Fault, with_options
from megatron5d.config.json_file import read_json, write_whole
from megatron5d.config.load import keys_given, load_config
from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.optim.optimizer import build_optimizer
from megatron5d.parity.variants import faults_of
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools.conversion.examine import in_processes
from megatron5d.topology.lock_file import LockFile
from megatron5d.topology.mesh import planned_mesh
from megatron5d.topology.shard_spec import without_memory
from megatron5d.train.build import build_sync, rounding_seed, sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.state import read_record, run_tensors

RESHARDED = "resharded"  # key of run.json: what the checkpoint was made of
NEIGHBOURS = 8  # ranks whose files are written together, at most
TOGETHER = 1 << 30  # bytes of a tensor that are read at once for several parts, at most
GROUPS = ("parallel", "pipeline", "recompute", "train")  # of a layout, and of what has to fit it


@dataclass(frozen=True)
class Resharding:
    """What is made of what."""

    source: SavedTensors  # the checkpoint that is read
    config: Config  # of its run, on the target layout
    made: dict[str, Any]  # the source, the number of ranks and the configuration, for run.json
    layout: PipelineLayout
    final: Path  # the folder of the new checkpoint
    save: Save  # named in each of its files

    @property
    def temporary(self) -> Path:
        """The folder until it is whole."""
        return self.final.with_suffix(".tmp")

    @property
    def records(self) -> Path:
        """The folder that says which files are whole."""
        return self.final.with_suffix(".reshard")

    def tensors_of(self, rank: int) -> dict[str, ShardedTensor]:
        """Returns what a rank of the target writes, by key and without memory. Raises ValueError:
        the checkpoint lacks a tensor, or holds one of another shape."""
        saved, found = self.source.tensors, dict[str, ShardedTensor]()
        weights_only = not any(key.startswith("optim.") for key in saved)
        for key, tensor in rank_tensors(self.config, self.made["world"], self.layout, rank).items():
            if weights_only and key.startswith("optim."):
                continue
            if key not in saved or saved[key].size != tensor.shape:
                held = f"{key} as {list(saved[key].size)}" if key in saved else f"no {key}"
                raise ValueError(
                    f"{self.source.folder} holds {held}, its configuration describes {list(tensor.shape)}"
                )
            if tensor.shards:
                found[key] = tensor
        return found

    def write_ranks(self, ranks: Sequence[int]) -> list[tuple[int, bytes]]:
        """Writes the files of neighbouring ranks, except for those that are whole already.

        They are written together, tensor by tensor: what the ranks of a tensor-parallel group hold
        of one lies mixed in the source, and is read once.

        Returns:
            Of each rank its number, and where its parts are.
        """
        messages = {rank: self._recorded(rank) for rank in ranks}
        with ExitStack() as stack:
            files = {
                rank: stack.enter_context(RankWriter(self.temporary, rank, self.save))
                for rank, message in messages.items()
                if not message
            }
            held = {rank: self.tensors_of(rank) for rank in files}
            for key in dict.fromkeys(key for tensors in held.values() for key in tensors):
                lazy = self._lazy(
                    key, {rank: tensors[key] for rank, tensors in held.items() if key in tensors}
                )
                for rank, tensor in lazy.items():
                    files[rank].add_tensor(key, tensor)
            for rank, file in files.items():
                messages[rank] = file.told()
                write_whole(self._record(rank), messages[rank])
        return list(messages.items())

    def _lazy(self, key: str, held: dict[int, ShardedTensor]) -> dict[int, LazyTensor]:
        """Returns what ranks hold of a tensor, to be read as it is written: all at once where the
        smallest rectangle around it is hardly more and fits, else part by part."""
        entry = self.source.tensors[key]
        parts = {
            rank: {at: tuple(view.shape) for at, view in each.shards.items()}
            for rank, each in held.items()
        }
        all_parts = {at: extent for each in parts.values() for at, extent in each.items()}
        begin = list(map(min, zip(*all_parts)))
        ends = ([i + n for i, n in zip(at, extent)] for at, extent in all_parts.items())
        around = [max(last) - first for first, last in zip(begin, zip(*ends))]
        num = sum(map(prod, all_parts.values()))
        together = (
            len(all_parts) > 1
            and prod(around) * entry.dtype.itemsize <= TOGETHER
            and prod(around) <= 1.25 * num
        )
        whole = self.source.read(key, begin, around) if together else None

        def values(at: tuple[int, ...]) -> Tensor:
            if whole is None:
                return self.source.read(key, at, all_parts[at])
            return whole[
                tuple(slice(i - o, i - o + n) for i, o, n in zip(at, begin, all_parts[at]))
            ]

        return {
            rank: lazy_tensor(entry.size, each, entry.dtype, values) for rank, each in parts.items()
        }

    def _record(self, rank: int) -> Path:
        """Returns the file that says where a rank's parts are, once they are on disk."""
        return self.records / f"rank-{rank}"

    def _recorded(self, rank: int) -> bytes:
        """Returns what the record of a rank says if its file is there and whole; else b""."""
        record = self._record(rank)
        message = record.read_bytes() if record.exists() else b""
        return message if message and self._is_sound(message) else b""

    def _is_sound(self, message: bytes) -> bool:
        """Returns whether the file that a record describes is there and whole."""
        items = _items(message)
        dtypes = {key: self.source.tensors[key].dtype for key, _ in items}
        path = self.temporary / (items[0][1].file if items else "")
        return not items or file_error(path, self.save, items, dtypes) is None

    def finish(self, messages: list[bytes]) -> None:
        """Writes the index and gives the checkpoint its name. Raises ValueError: the ranks do not
        hold all tensors of the source."""
        items = [each for message in messages for each in _items(message)]
        if lost := self.source.tensors.keys() - {key for key, _ in items}:
            raise ValueError(
                f"{self.source.folder} holds {min(lost)}, which its configuration does not describe"
            )
        files = {item.file for _, item in items}
        for stray in (path for path in self.temporary.iterdir() if path.name not in files):
            stray.unlink()  # of a process that was killed
        record = read_run(self.source.folder) | {
            "config": self.made["config"],
            RESHARDED: self.made,
        }
        (self.temporary / RUN_FILE).write_text(json.dumps(record, indent=1))
        IndexWriter().write(self.temporary, messages, self.save)
        commit(self.temporary, Keep())
        shutil.rmtree(self.records)


def reshard(args: argparse.Namespace) -> int:
    """Writes a checkpoint as the ranks of another layout would have, and prints its folder; returns
    0.

    Raises ValueError: no whole checkpoint, one that is damaged, a layout that is refused, or a
    directory that already holds checkpoints. Raises OSError: a file cannot be read or written, or a
    run is writing to the directory.
    """
    torch.set_num_threads(1)  # of each process; one that has more cannot be forked
    source = SavedTensors(resolve_checkpoint(args.source, "SRC"))
    if faults := source.faults_outside():
        raise ValueError(faults[0])
    config = target_config(saved_config(source.folder), args.overrides)
    world = args.world or smallest_world(config)
    if refused := faults_of(config, world):
        raise ConfigError(with_options(refused, "--world"))
    with ExitStack() as stack:
        stack.callback(LockFile(args.out / "run.lock", f"DST = {args.out}").release)
        made = {"source": str(source.folder.resolve()), "save": str(source.save), "world": world}
        made["config"] = json.loads(json.dumps(to_dict(config)))
        final = step_folder(args.out, read_record(source.folder)["progress"]["step"])
        # killed after it had its name
        if checkpoint_error(final) is None and read_run(final).get(RESHARDED) == made:
            point_latest_to(final)
            shutil.rmtree(final.with_suffix(".reshard"), ignore_errors=True)
        else:
            _write(_begun(source, config, made, final), args.workers)
    print(f"wrote {final} for {world} rank{'' if world == 1 else 's'}")
    return 0


def target_config(saved: Config, overrides: list[str]) -> Config:
    """Returns the configuration of a run with some keys of its layout replaced. Raises ValueError:
    an override that cannot be read, or that is not of a layout."""
    wanted = load_config(overrides)
    given = [
        key
        for key in keys_given(overrides)
        if key in leaves() or "." not in key and key not in GROUPS
    ]
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


def rank_tensors(
    config: Config, world: int, layout: PipelineLayout, rank: int
) -> dict[str, ShardedTensor]:
    """Returns what one rank of a run writes to a checkpoint, without memory. No communication."""
    kv_heads = config.model.num_kv_heads
    mesh = planned_mesh(sizes_of(config, world), rank, num_kv_heads=kv_heads, shared=layout.shared)
    with without_memory():
        model = GPT(config, mesh, "meta", layout.stage_specs(mesh["pp"].rank), layout.shared)
    sync = build_sync(config, mesh, model)
    optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
    return run_tensors(sync, optimizer, model.weights(), writing=True)


def _begun(source: SavedTensors, config: Config, made: dict[str, Any], final: Path) -> Resharding:
    """Returns the resharding that was interrupted, or a new one."""
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
        write_whole(file, json.dumps(begun))
    temporary.mkdir(exist_ok=True)
    save = Save(begun["id"], int(final.name.removeprefix("step-")))
    return Resharding(source, config, made, searched_layout(config, made["world"]), final, save)


def _items(message: bytes) -> list[tuple[str, SavedItem]]:
    """Returns the items of a rank's file with the keys of their tensors, from what `write`
    returns."""
    rows = json.loads(zlib.decompress(message))
    return [
        (whole[0], SavedItem(tuple(offset), tuple(extent), *place))
        for whole, (offset, extent, *place) in rows
    ]


def _write(job: Resharding, num_workers: int) -> None:
    """Writes the files of all ranks. All that is read of the source is compared with its
    checksums."""
    total = sum(item.length for items in job.source.files().values() for _, item in items)
    world = job.made["world"]
    messages, size = [b""] * world, min(NEIGHBOURS, -(-world // num_workers))
    groups = [range(first, min(first + size, world)) for first in range(0, world, size)]
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for written in in_processes(lambda i: job.write_ranks(groups[i]), len(groups), num_workers):
            for rank, message in written:
                messages[rank] = message
                bar.update(sum(item.length for _, item in _items(message)))
    job.finish(messages)
