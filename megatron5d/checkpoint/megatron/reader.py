"""The weights of a Megatron-LM checkpoint of either format, tensor by tensor.

    torch_dist   a folder of DCP, and `common.pt` with what is no tensor
    older        `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each model-parallel rank

Tensors are read when they are needed. Nothing that a file names is executed: of its classes only
known ones are admitted, and those become records without behaviour.
"""

from __future__ import annotations

import pickle
import re
import signal
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import METADATA
from megatron5d.checkpoint.hf.safetensors_folder import StoredTensor
from megatron5d.checkpoint.index import SavedTensor
from megatron5d.checkpoint.megatron.names import EMBEDDING, HEAD, from_megatron_rows, layer_name
from megatron5d.checkpoint.reader import Reader
from megatron5d.checkpoint.tensor_file import Save
from megatron5d.config.json_file import read_json
from megatron5d.config.schema import ModelConfig


class _Record:
    """Stands for an object of a class of another package: it keeps nothing and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Record:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_ADMITTED: list[Any] = [Namespace] + [
    (_Record, name)
    for name in (
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.AttnMaskType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "types.SimpleNamespace",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "signal.Signals",
        "_io.BytesIO",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "_codecs.encode",
        # as Python 3.10 and older wrote them
        *(f"signal.{name}" for name in signal.Signals.__members__),
    )
]


@contextmanager
def _only_admitted() -> Iterator[None]:
    """Lets torch.load read our stand-ins alone, whatever else this process admits: of one name it
    takes either."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(_ADMITTED)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def load_inert(path: Path) -> dict[str, Any]:
    """Returns the dict in a file of torch.save, its tensors mapped from the file. Raises
    ValueError: it is damaged, or names a class that no checkpoint of Megatron-LM consists of."""
    try:
        with _only_admitted():
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        told = next(
            (line.strip() for line in str(error).splitlines() if "GLOBAL" in line),
            str(error).splitlines()[0],
        )
        raise ValueError(
            f"{path} is refused, since it may run any code when it is opened: {told}"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or no file of torch.save: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, and no checkpoint")
    return found


@dataclass(frozen=True)
class Source:
    """A tensor to be read by rectangle."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (offset, shape) -> values

    def element(self, i: int) -> Source:
        """Returns tensor i of a stack."""
        return Source(
            self.shape[1:], self.dtype, lambda at, size: self.read((i, *at), (1, *size))[0]
        )

    def rows(self, start: int, stop: int) -> Source:
        """Reads some of the rows."""
        shape = (stop - start, *self.shape[1:])
        return Source(shape, self.dtype, lambda at, size: self.read((start + at[0], *at[1:]), size))


def held(values: Tensor) -> Source:
    """Returns a tensor that lies in memory, or is mapped there from a file."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return values[tuple(slice(start, start + size) for start, size in zip(offset, shape))]

    return Source(tuple(values.shape), values.dtype, read)


def concatenated(parts: Sequence[Source], dim: int) -> Source:
    """Tensors beside each other in one dim."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        whole = torch.cat([part.read((0,) * len(part.shape), part.shape) for part in parts], dim)
        return held(whole).read(offset, shape)

    first = parts[0].shape
    size = sum(part.shape[dim] for part in parts)
    return Source((*first[:dim], size, *first[dim + 1 :]), parts[0].dtype, read)


def saved_args(state: dict[str, Any], path: Path) -> Namespace:
    """Returns the arguments in a checkpoint's state; raises ValueError where it holds none."""
    args = state.get("args")
    if not isinstance(args, Namespace):
        raise ValueError(f"{path} holds no arguments (args): the architecture cannot be told")
    return args


COMMON, BACKEND = "common.pt", "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.([^.]+)\.)?(.+)$")
# kind of an optimiser's state that lies by buckets of data parallelism, not by parameter
BUCKETS = "buckets"
# the gate and up rows under names of their own
_HALF = re.compile(r"(linear_fc1\.(?:weight|bias))_([wv])$")


class _Reader(Reader):
    """Reads tensors of a folder in which files.json and index.json are not there."""

    def _index_content(self) -> bytes:
        return METADATA.encode() + b"\n" + (self._folder / METADATA).read_bytes()

    def advice(self) -> str:
        return "Copy the checkpoint again"

    def _check_save(self, found: Save | None) -> None:
        """Takes a file of any save: to-megatron's files name theirs, Megatron's none, and no index
        says which."""


def read_distributed(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and tensors of a `torch_dist` folder: weights ("") and what the
    optimiser keeps, by kind. Raises ValueError: a file is damaged, names what is not admitted, or
    is of another format."""
    backend = read_json(folder / BACKEND).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"{folder / BACKEND}: sharded_backend = {backend!r}: only 'torch_dist' is read"
        )
    common, reader = load_inert(folder / COMMON), _Reader(folder)
    kinds: defaultdict[str, dict[str, Source]] = defaultdict(dict)
    for key, saved in reader.tensors().items():
        state = _STATE.match(key)
        kind, name = (state[1] or BUCKETS, state[2]) if state else ("", key)
        _add_layers(kinds[kind], name, _stored(reader, key, saved))
    found = {kind: _with_joined_halves(sources) for kind, sources in kinds.items()}
    return saved_args(common, folder / COMMON), int(common.get("iteration", 0)), found


def _stored(reader: Reader, key: str, saved: SavedTensor) -> Source:
    return Source(tuple(saved.size), saved.dtype, partial(reader.read, key))


def _add_layers(sources: dict[str, Source], key: str, source: Source) -> None:
    """Adds a stored tensor under the name of each layer and each expert in it."""
    match = _LAYER.match(key)
    if not match:
        sources[key] = source
        return
    layers = [int(match[1])] if match[1] else range(source.shape[0])
    for i in layers:
        layer = source if match[1] else source.element(i)
        experts = _EXPERTS.match(match[2])
        if experts is None:
            sources[layer_name(i, match[2])] = layer
            continue
        for e in [int(experts[1])] if experts[1] else range(layer.shape[0]):
            name = layer_name(i, f"mlp.experts.{e}.{experts[2]}")
            sources[name] = layer if experts[1] else layer.element(e)


def _with_joined_halves(sources: dict[str, Source]) -> dict[str, Source]:
    """Puts gate and up rows under each other where they are stored apart."""
    for name in [name for name in sources if (half := _HALF.search(name)) and half[2] == "w"]:
        gate, up = sources.pop(name), sources.pop(name[:-1] + "v", None)
        if up is None:
            raise ValueError(f"the checkpoint holds {name} and no {name[:-1]}v")
        sources[name[:-2]] = concatenated([gate, up], 0)
    return sources


_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
# TransformerEngine's grouped linear layers
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")
# column-parallel
_ROWS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")  # row-parallel


def read_rank_files(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and whole weights (kind "") of a folder with a file for each
    model-parallel rank. Raises
    ValueError: a file is missing or damaged, or the layout is one that is not read."""
    paths = {
        match.groups(): path / "model_optim_rng.pt"
        for path in sorted(folder.iterdir())
        if (match := _RANK.match(path.name))
    }
    states = {key: load_inert(path) for key, path in paths.items()}
    first = next(iter(paths))
    args = saved_args(states[first], paths[first])
    sizes = [
        getattr(args, f"{dim}_model_parallel_size", 1) or 1
        for dim in ("tensor", "pipeline", "expert")
    ]
    tp = getattr(args, "expert_tensor_parallel_size", None) or sizes[0]
    if tp != sizes[0]:
        raise ValueError(
            f"{folder}: expert_tensor_parallel_size = {tp}: only tensor_model_parallel_size = {sizes[0]} "
            "is read; save it with --ckpt-format torch_dist"
        )
    if float(states[first].get("checkpoint_version", 0)) < 3:
        raise ValueError(
            f"{paths[first]}: checkpoint_version below 3, of before Megatron-Core, is not read"
        )
    ranks = {_place(key, sizes): state for key, state in states.items()}
    wanted = {(t, p, e) for t in range(sizes[0]) for p in range(sizes[1]) for e in range(sizes[2])}
    if missing := sorted(wanted - set(ranks)):
        raise ValueError(
            f"{folder} has no file of tensor, pipeline and expert rank {missing[0]} ({len(missing)} missing)"
        )
    whole: dict[str, Source] = {}
    for e in range(sizes[2]):
        shards = [
            _stage_tensors([ranks[t, p, e] for p in range(sizes[1])], e, args)
            for t in range(sizes[0])
        ]
        for name in shards[0]:
            whole.setdefault(name, _joined(name, [shard[name] for shard in shards], args))
    return args, int(states[first].get("iteration", 0)), {"": whole}


def _place(key: tuple[str | None, ...], sizes: list[int]) -> tuple[int, int, int]:
    """Returns tensor, pipeline and expert rank; names leave out the last two where there is only
    one."""
    rest = [int(part) for part in key[1:] if part is not None]
    pipeline = rest.pop(0) if sizes[1] > 1 and rest else 0
    return int(key[0] or 0), pipeline, rest.pop(0) if rest else 0


def _stage_tensors(
    stages: list[dict[str, Any]], expert_rank: int, args: Namespace
) -> dict[str, Source]:
    """Returns one tensor rank's shards; layers are counted through all stages, experts through all
    ranks."""
    found: dict[str, Source] = {}
    chunks = (
        ["model"]
        if "model" in stages[0]
        else [f"model{v}" for v in range(len(stages[0])) if f"model{v}" in stages[0]]
    )
    first = 0
    for model in (stage[chunk] for chunk in chunks for stage in stages):
        layers = {int(match[1]) for name in model if (match := _NUMBERED_LAYER.match(name))}
        for name, value in model.items():
            if isinstance(value, Tensor):
                for own, source in _named(name, value, first, expert_rank, args).items():
                    found.setdefault(own, source)
        first += len(layers)
    return found


def _named(
    name: str, value: Tensor, first: int, expert_rank: int, args: Namespace
) -> dict[str, Source]:
    """Returns a stored tensor under our spelling of its name; of Megatron's old grouped experts one
    for each."""
    match = _NUMBERED_LAYER.match(name)
    if not match:
        return {name: held(value)}
    layer, rest = first + int(match[1]), match[2]
    experts = (getattr(args, "num_experts", None) or 0) // (
        getattr(args, "expert_model_parallel_size", 1) or 1
    )
    at = expert_rank * experts
    if own := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.{at + int(own[1])}.{own[2]}"
    elif own := _GROUPED.match(rest):
        rest = f"mlp.experts.{at + int(own[2])}.{own[1]}"
    elif rest in ("mlp.experts.weight1", "mlp.experts.weight2"):
        shape = (
            (experts, args.hidden_size, -1)
            if rest.endswith("1")
            else (experts, -1, args.hidden_size)
        )
        prefix = f"decoder.layers.{layer}.mlp.experts"
        matrices = value.view(shape).transpose(1, 2)  # ours are [out, in]
        return {
            f"{prefix}.{at + e}.linear_fc{rest[-1]}.weight": held(matrix)
            for e, matrix in enumerate(matrices)
        }
    return {layer_name(layer, rest): held(value)}


def _joined(name: str, shards: list[Source], args: Namespace) -> Source:
    """Returns a whole tensor from what the tensor ranks hold; each holds gate rows, then up rows,
    of its own."""
    if len(shards) > 1 and _ROWS.search(name):
        if "linear_fc1" in name and getattr(args, "swiglu", False):
            half = shards[0].shape[0] // 2
            return concatenated(
                [shard.rows(at, at + half) for at in (0, half) for shard in shards], 0
            )
        return concatenated(shards, 0)
    return concatenated(shards, 1) if len(shards) > 1 and _COLUMNS.search(name) else shards[0]


TRACKER = "latest_checkpointed_iteration.txt"
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def iteration_folder(folder: Path) -> Path:
    """Returns the folder of one iteration: itself, or the one that the tracker file in it names. Raises ValueError:
    there is none; says what a Megatron checkpoint looks like."""
    tracker = folder / TRACKER
    if tracker.is_file():
        latest = tracker.read_text().strip()
        folder = folder / (
            "release"
            if latest == "release"
            else f"iter_{int(latest) if latest.isdigit() else 0:07d}"
        )
    if (folder / COMMON).is_file() or any(folder.glob("mp_rank_*")):
        return folder
    raise ValueError(
        f"{folder} is no checkpoint of Megatron-LM: it has neither {COMMON} nor mp_rank_00; name an iter_ folder, or "
        f"the directory with {TRACKER}"
    )


class MegatronTensors:
    """Tensors of one kind, one layer and one expert at a time, under the names of names.py."""

    def __init__(self, folder: Path, sources: dict[str, Source]) -> None:
        self.folder, self._sources = folder, sources
        self.scales: dict[str, StoredTensor] = {}
        self._config: ModelConfig | None = None
        self.tensors = {
            name: StoredTensor("", source.shape, _KINDS.get(source.dtype, str(source.dtype)))
            for name, source in sources.items()
        }

    def fit(self, config: ModelConfig) -> None:
        """Leaves out the rows that pad the vocabulary, and an output layer that is the
        embedding."""
        self._config = config
        for name in (EMBEDDING, HEAD):
            if name in self.tensors and self.tensors[name].shape[0] > config.vocab_size:
                rest = self.tensors[name].shape[1:]
                self.tensors[name] = StoredTensor(
                    "", (config.vocab_size, *rest), self.tensors[name].dtype
                )
        if config.tie_embeddings:
            self.tensors.pop(HEAD, None)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset`, whose rows are ordered as ours: of a fused
        QKV all rows."""
        assert self._config is not None
        return from_megatron_rows(
            name, self._sources[name].read(tuple(offset), tuple(shape)), self._config
        )


class MegatronCheckpoint(NamedTuple):
    """One iteration of Megatron-LM."""

    args: Namespace
    iteration: int
    weights: MegatronTensors
    optimizer: dict[str, MegatronTensors]  # by kind: fp32_param, exp_avg, ..., or BUCKETS


def open_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Opens the checkpoint in a folder of one iteration, or with the tracker file. Raises
    ValueError: it holds no such checkpoint, a damaged one, or one of a format that is not read."""
    folder = iteration_folder(folder)
    distributed = (folder / COMMON).is_file()
    args, iteration, kinds = (read_distributed if distributed else read_rank_files)(folder)
    if EMBEDDING not in kinds.get("", {}):
        raise ValueError(
            f"{folder} holds no {EMBEDDING}: only GPT models of Megatron-Core are read"
        )
    tensors = {kind: MegatronTensors(folder, sources) for kind, sources in kinds.items()}
    return MegatronCheckpoint(args, iteration, tensors.pop(""), tensors)
