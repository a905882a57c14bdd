"""Compare checkpoints with torch.save, torch.distributed.checkpoint (DCP) and safetensors: CPU
seconds side by side.

    python tools/bench_checkpoint.py [--gb 0.5] [--repeats 5] [--dir DIR] [--json]

One process with one thread saves and loads a model of --gb in fp32, imports and exports it, and
reads it again as 64 ranks that hold a slice of every tensor each. A checkpoint of 2 ranks is
resharded for 8, by as many processes as there are cores; wall time is told beside CPU time, since
cp waits for the disk. Every file is in the page cache and reaches the disk before a save ends. Ways
are measured by turns, and the least of several times counts: it is what a shared machine changes
least. Checksums are written and checked in ours alone. Exit code 2 for bad input.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.tools.options import add_measurement

RANKS = 64
ROWS, COLUMNS = 1024, 1024  # of each tensor


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="10^9 bytes of tensors (default 0.5)")
    add_measurement(parser)
    arguments = parser.parse_args(argv)
    if not 0 < arguments.gb <= 64:
        parser.error(f"--gb {arguments.gb} is not above 0 and at most 64")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.folder import newest_checkpoint
from megatron5d.checkpoint.hf.files import Entry
from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedWeights, lazy_tensor, load_tensors
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.storage import Reader, read_tensors, write_rank_file
from megatron5d.checkpoint.tensor_file import Save
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools.bench.harness import Calls, least_seconds
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.tools.conversion.reshard import rank_tensors, reshard


def _whole(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        WEIGHT_PREFIX + name: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype)
        for name, x in tensors.items()
    }


class Bench:
    """The files of one comparison."""

    def __init__(self, folder: Path, num_bytes: float) -> None:
        count = max(1, round(num_bytes / (ROWS * COLUMNS * 4)))
        self.folder = folder
        self.model = {f"layers.{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(count)}
        self.into = {name: torch.zeros_like(x) for name, x in self.model.items()}
        self.num_bytes = sum(x.nbytes for x in self.model.values())
        self.saver, self.steps = Saver(folder / "ours", keep=1), 0
        self.entries = [Entry(name, (0, ROWS), name, (ROWS, COLUMNS)) for name in self.model]

    def save_ours(self, tensors: dict[str, ShardedTensor] | None = None) -> None:
        self.steps += 1
        self.saver.save(self.steps, _whole(self.model) if tensors is None else tensors, {})

    def save_torch(self) -> None:
        with (self.folder / "torch.pt").open("wb") as file:
            torch.save(self.model, file)
            file.flush()
            os.fsync(file.fileno())

    def newest(self) -> Path:
        found = newest_checkpoint(self.folder / "ours")
        assert found is not None
        return found

    def export_ours(self) -> None:
        shutil.rmtree(self.folder / "exported", ignore_errors=True)
        weights = SavedWeights(self.newest())
        save_folder(
            self.folder / "exported", stored_tensors(self.entries, weights.read, torch.float32)
        )

    def export_others(self) -> None:
        dcp.load(self.into, checkpoint_id=self.folder / "dcp")
        save_file(self.into, self.folder / "other.safetensors")

    def import_ours(self) -> None:
        with SafetensorsFolder(self.folder / "exported") as stored:
            shape, parts = (ROWS, COLUMNS), {}
            for name in self.model:
                read_whole = partial(stored.read, name, shape=shape)
                parts[WEIGHT_PREFIX + name] = lazy_tensor(
                    shape, {(0, 0): shape}, torch.float32, read_whole
                )
            self.save_ours(dict(parts))

    def import_others(self) -> None:
        dcp.save(
            load_file(self.folder / "exported" / "model.safetensors"),
            checkpoint_id=self.folder / "dcp",
        )

    def begin_resharding(self) -> None:
        """Writes a checkpoint of about as many bytes, as 2 ranks would have saved it."""
        model = ModelConfig(
            vocab_size=1024, hidden_size=1024, ffn_hidden_size=2816, num_heads=16, head_dim=64
        )
        model = replace(model, num_layers=max(1, round(self.num_bytes / 51e6)))
        config, tensors = Config(model=model, precision=PrecisionConfig(dtype="fp32")), {}
        for key, tensor in rank_tensors(config, 1, searched_layout(config, 1), 0).items():
            if key.startswith(WEIGHT_PREFIX):
                tensors[key] = ShardedTensor(
                    tensor.shape,
                    [((0,) * len(tensor.shape), torch.randn(tensor.shape))],
                    tensor.dtype,
                )
        save_weights(self.folder / "one", tensors, config)
        self.reshard("one", "two", 2, "parallel.tp=2")

    def reshard(self, source: str, out: str, world: int, *words: str) -> None:
        shutil.rmtree(self.folder / out, ignore_errors=True)
        with redirect_stdout(None):
            reshard(
                argparse.Namespace(
                    source=self.folder / source,
                    out=self.folder / out,
                    world=world,
                    workers=os.cpu_count(),
                    overrides=list(words),
                )
            )

    def copy(self) -> None:
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        subprocess.run(["cp", "-r", self.folder / "two", self.folder / "copy"], check=True)
        subprocess.run(["sync", *(self.folder / "copy").glob("*/*")], check=True)

    def restart(self) -> float:
        """Saves and reads as many ranks do; returns the bytes read for each byte of the model."""
        folder, save, messages = self.folder / "ranks", Save("bench", 1), []
        folder.mkdir()
        rows = ROWS // RANKS
        for rank in range(RANKS):
            parts = {key: _slice(x, rank * rows, rows) for key, x in _whole(self.model).items()}
            messages.append(write_rank_file(folder, parts, rank, save))
        IndexWriter().write(folder, messages, save)
        (folder / "files.json").write_text('{"run.json": 0}')
        reader, before = Reader(folder), _bytes_read()
        for rank in range(RANKS):
            read_tensors(
                reader,
                [{key: _slice(x, rank * rows, rows) for key, x in _whole(self.into).items()}],
            )
        return (_bytes_read() - before) / self.num_bytes

    def run(self, repeats: int) -> dict[str, dict[str, float]]:
        """Returns CPU seconds by what is done and by what; wall seconds of resharding, too; of a
        restart the bytes read for each byte."""
        into, torch_file, dcp_folder = (
            _whole(self.into),
            self.folder / "torch.pt",
            self.folder / "dcp",
        )
        rows: dict[str, Calls] = {
            "save": {
                "ours": self.save_ours,
                "torch.save": self.save_torch,
                "dcp.save": lambda: dcp.save(self.model, checkpoint_id=dcp_folder),
            },
            "load": {
                "ours": lambda: load_tensors(self.newest(), into),
                "torch.load": lambda: torch.load(torch_file, weights_only=True),
                "dcp.load": lambda: dcp.load(self.into, checkpoint_id=dcp_folder),
            },
            "export": {"ours": self.export_ours, "dcp.load, save_file": self.export_others},
            "import": {"ours": self.import_ours, "load_file, dcp.save": self.import_others},
            "reshard": {
                "ours": lambda: self.reshard("two", "eight", 8, "parallel.tp=4", "parallel.zero=1"),
                "cp, sync": self.copy,
            },
        }
        self.begin_resharding()
        timed = {what: least_seconds(ways, repeats) for what, ways in rows.items()}
        found = {what: cpu for what, (cpu, _) in timed.items()} | {
            "reshard, wall": timed["reshard"][1]
        }
        assert all(torch.equal(x, self.into[name]) for name, x in self.model.items())
        return found | {f"restart of {RANKS} ranks": {"ours": self.restart()}}


def _slice(tensor: ShardedTensor, start: int, rows: int) -> ShardedTensor:
    (values,) = tensor.shards.values()
    return ShardedTensor(tensor.shape, [((start, 0), values[start : start + rows])], tensor.dtype)


def _bytes_read() -> int:
    """Returns what this process has read from files so far, in the page cache or not."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _table(found: dict[str, dict[str, float]], num_bytes: int) -> str:
    lines = [f"{num_bytes / 1e9:.2f} GB, CPU seconds (ours / other)"]
    for what, ways in found.items():
        ours = ways["ours"]
        if what.startswith("restart"):
            lines.append(f"{what:22}{ours:8.3f} bytes read for each byte of the model")
            continue
        told = (
            f"{name} {seconds:.3f} ({ours / seconds:.2f})"
            for name, seconds in ways.items()
            if name != "ours"
        )
        lines.append(f"{what:22}{ours:8.3f}   {'   '.join(told)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    warnings.simplefilter("ignore")  # DCP announces that a single process saves without a group
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            bench = Bench(Path(folder), arguments.gb * 1e9)
            found = bench.run(arguments.repeats)
    except OSError as error:
        print(f"bench_checkpoint: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if arguments.json else _table(found, bench.num_bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
