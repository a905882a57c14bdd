"""Compare checkpoints with torch.save, torch.distributed.checkpoint (DCP) and safetensors.

    python tools/bench_checkpoint.py [--gb 0.5] [--repeats 5] [--dir DIR] [--json]

One process with one thread saves and loads a model of --gb in fp32, imports and exports it, and
reads it again as 64 ranks that hold a slice of every tensor each. A checkpoint of 2 ranks is
resharded for 8, with one process per core. Figures are CPU seconds; resharding also has wall
seconds, because cp waits for the disk. Every file is in the page cache and reaches the disk before
a save ends. Measurements alternate, and the least of several counts: a busy machine changes it
least. Only our checkpoints write and check checksums. Exit code 2 for bad input.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.tools.options import add_measurement

RANKS = 64
ROWS, COLUMNS = 1024, 1024  # of each tensor


def _arguments(argv: Sequence[str] | None = None) -> Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="10^9 bytes of tensors (default 0.5)")
    add_measurement(parser)
    arguments = parser.parse_args(argv)
    if not 0 < arguments.gb <= 64:
        parser.error(f"--gb {arguments.gb} is not above 0 and at most 64")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.hf.weights import lazy_weights
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import (
    WEIGHT_PREFIX,
    SavedWeights,
    load_tensors,
    resolve_checkpoint,
)
from megatron5d.checkpoint.reader import Reader
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools.bench.harness import Calls, least_seconds
from megatron5d.tools.bench.results import print_rows, seconds_line
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.tools.conversion.reshard import rank_tensors, reshard


def _shards(
    tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1
) -> dict[str, ShardedTensor]:
    """The rows of each tensor that a rank saves or loads, in global coordinates."""
    shards = {}
    for name, x in tensors.items():
        count = len(x) // ranks
        offset = (rank * count, *(0,) * (x.dim() - 1))
        rows = x[rank * count : (rank + 1) * count]
        shards[WEIGHT_PREFIX + name] = ShardedTensor(x.shape, [(offset, rows)], x.dtype)
    return shards


class Bench:
    """The files of one comparison.

    Args:
        folder: empty.
        num_bytes: of the model's tensors.
    """

    def __init__(self, folder: Path, num_bytes: float) -> None:
        count = max(1, round(num_bytes / (ROWS * COLUMNS * 4)))
        self.folder = folder
        self.model = {f"layers.{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(count)}
        self.loaded = {name: torch.zeros_like(x) for name, x in self.model.items()}
        self.num_bytes = sum(x.nbytes for x in self.model.values())
        self.saver, self.steps = Saver(folder / "ours", keep=1), 0
        self.entries = [Entry(name, (0, ROWS), name, (ROWS, COLUMNS)) for name in self.model]

    def save_ours(self, tensors: dict[str, ShardedTensor] | None = None) -> None:
        self.steps += 1
        self.saver.save(self.steps, _shards(self.model) if tensors is None else tensors, {})

    def save_torch(self) -> None:
        with (self.folder / "torch.pt").open("wb") as file:
            torch.save(self.model, file)
            # our saves and DCP's end on disk, too
            file.flush()
            os.fsync(file.fileno())

    def newest(self) -> Path:
        return resolve_checkpoint(self.folder / "ours", "")

    def export_ours(self) -> None:
        shutil.rmtree(self.folder / "exported", ignore_errors=True)
        weights = SavedWeights(self.newest())
        save_folder(
            self.folder / "exported", stored_tensors(self.entries, weights.read, torch.float32)
        )

    def export_others(self) -> None:
        dcp.load(self.loaded, checkpoint_id=self.folder / "dcp")
        save_file(self.loaded, self.folder / "other.safetensors")

    def import_ours(self) -> None:
        with SafetensorsFolder(self.folder / "exported") as stored:
            self.save_ours(dict(lazy_weights(self.entries, stored, torch.float32)))

    def import_others(self) -> None:
        dcp.save(
            load_file(self.folder / "exported" / "model.safetensors"),
            checkpoint_id=self.folder / "dcp",
        )

    def prepare_resharding(self) -> None:
        """Writes a checkpoint of about `num_bytes`, as 2 ranks would have saved it."""
        model = ModelConfig(
            vocab_size=1024, hidden_size=1024, ffn_hidden_size=2816, num_heads=16, head_dim=64
        )
        model = replace(model, num_layers=max(1, round(self.num_bytes / 51e6)))
        config = Config(model=model, precision=PrecisionConfig(dtype="fp32"))
        tensors = {
            key.removeprefix(WEIGHT_PREFIX): torch.randn(tensor.shape)
            for key, tensor in rank_tensors(config, 1, searched_layout(config, 1), 0).items()
            if key.startswith(WEIGHT_PREFIX)
        }
        save_weights(self.folder / "one", _shards(tensors), config)
        self.reshard("one", "two", 2, "parallel.tp=2")

    def reshard(self, source: str, out: str, world: int, *overrides: str) -> None:
        shutil.rmtree(self.folder / out, ignore_errors=True)
        options = {"source": self.folder / source, "out": self.folder / out, "world": world}
        with redirect_stdout(None):
            reshard(Namespace(**options, workers=os.cpu_count(), overrides=list(overrides)))

    def copy(self) -> None:
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        subprocess.run(["cp", "-r", self.folder / "two", self.folder / "copy"], check=True)
        subprocess.run(["sync", *(self.folder / "copy").glob("*/*")], check=True)

    def restart(self) -> float:
        """Saves and reads as RANKS ranks do; returns the bytes read per byte of the model."""
        folder, save, messages = self.folder / "ranks", Save("bench", 1), []
        folder.mkdir()
        for rank in range(RANKS):
            messages.append(write_rank_file(folder, _shards(self.model, rank, RANKS), rank, save))
        IndexWriter().write(folder, messages, save)
        # the least that a reader takes for a complete checkpoint
        (folder / "files.json").write_text('{"run.json": 0}')
        reader, before = Reader(folder), _bytes_read()
        for rank in range(RANKS):
            reader.fill([_shards(self.loaded, rank, RANKS)])
        return (_bytes_read() - before) / self.num_bytes

    def measure(self, repeats: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields CPU seconds of each row; also wall seconds of resharding, bytes of a restart."""
        shards = _shards(self.loaded)
        torch_file, dcp_folder = self.folder / "torch.pt", self.folder / "dcp"
        rows: dict[str, Calls] = {
            "save": {
                "ours": self.save_ours,
                "torch.save": self.save_torch,
                "dcp.save": lambda: dcp.save(self.model, checkpoint_id=dcp_folder),
            },
            "load": {
                "ours": lambda: load_tensors(self.newest(), shards),
                "torch.load": lambda: torch.load(torch_file, weights_only=True),
                "dcp.load": lambda: dcp.load(self.loaded, checkpoint_id=dcp_folder),
            },
            "export": {"ours": self.export_ours, "dcp.load, save_file": self.export_others},
            "import": {"ours": self.import_ours, "load_file, dcp.save": self.import_others},
        }
        for row, calls in rows.items():
            yield row, least_seconds(calls, repeats)[0]
        # wall time, too: cp waits for the disk
        self.prepare_resharding()
        resharding: Calls = {
            "ours": lambda: self.reshard("two", "eight", 8, "parallel.tp=4", "parallel.zero=1"),
            "cp, sync": self.copy,
        }
        cpu, wall = least_seconds(resharding, repeats)
        yield "reshard", cpu
        yield "reshard, wall", wall
        assert all(torch.equal(x, self.loaded[name]) for name, x in self.model.items())
        yield f"restart of {RANKS} ranks", {"ours": self.restart()}


def _bytes_read() -> int:
    """Bytes that this process has read from files so far, from the page cache or the disk."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _line(row: str, figures: dict[str, float]) -> str:
    if row.startswith("restart"):
        return f"{row:28}{figures['ours']:8.3f} bytes read per byte of the model"
    return seconds_line(row, figures)


def run(arguments: Namespace) -> None:
    warnings.simplefilter("ignore")  # DCP announces that a single process saves without a group
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        bench = Bench(Path(folder), arguments.gb * 1e9)
        print_rows(bench.measure(arguments.repeats), _line, arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    return exit_code("bench_checkpoint", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
