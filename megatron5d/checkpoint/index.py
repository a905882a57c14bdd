"""The index of a checkpoint as plain data: which file holds which rectangle of which tensor, and
which save wrote it.

`index.json` is ours. DCP's `.metadata`, for other tools and in checkpoints of earlier versions, is
a pickle, which may name any function of any module to be called. It is read without creating a
single object of the classes that it names: each becomes a record that keeps its state, and only
names of DCP's own metadata are accepted.
"""

import gc
import io
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron5d.checkpoint.layout import Dims
from megatron5d.checkpoint.tensor_file import Save, SavedItem
from megatron5d.config.json_file import parse_json

INDEX = "index.json"
FORMAT = 1  # raised when an older reader would misread the file
# key -> (dtype, global shape, rows of (offset in the tensor, extent, file, first byte, bytes))
Tensors = dict[str, tuple[str, list[int], list[list[Any]]]]


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    size: torch.Size  # global shape
    items: dict[Dims, SavedItem]  # by offset


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disables Python's garbage collector, which takes most of the time when a million objects are
    created that all stay alive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def write_index(folder: Path, save: Save, tensors: str) -> None:
    """Writes index.json; `tensors` is the JSON of Tensors, which rarely changes from save to
    save."""
    text = (
        f'{{"format": {FORMAT}, "save": "{save.id}", "step": {save.step}, "tensors": {tensors}}}\n'
    )
    (folder / INDEX).write_text(text)


def read_index(content: bytes) -> tuple[Save, dict[str, SavedTensor]]:
    """The save and its tensors by key, from the content of index.json.

    Raises:
        ValueError: it is damaged, or a newer version wrote it.
    """
    index = parse_json(content)
    if index.get("format") != FORMAT:
        raise ValueError(
            f"it has format {index.get('format')!r}, this version reads {FORMAT}; upgrade "
            "megatron5d"
        )
    try:
        return Save(str(index["save"]), int(index["step"])), _saved_tensors(index["tensors"])
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"an entry is missing or has a wrong type: {type(error).__name__} {error}"
        ) from error


def read_pickled_index(content: bytes) -> dict[str, SavedTensor]:
    """The tensors by key, from the content of a `.metadata`; executes nothing that it names.

    Raises:
        ValueError: it is damaged, or names something that does not belong to DCP's metadata.
    """
    try:
        return _saved_tensors(_tensors_of(_Unpickler(io.BytesIO(content)).load().state))
    except Exception as error:  # a damaged pickle may raise anything
        if type(error) is ValueError:  # raised below, with our message
            raise
        raise ValueError(f"it is no metadata of DCP: {type(error).__name__} {error}") from error


def _saved_tensors(tensors: Tensors) -> dict[str, SavedTensor]:
    """The tensors of an index; raises ValueError if an entry makes no sense."""
    saved = {}
    for key, (name, shape, rows) in tensors.items():
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has dtype {name!r}")
        items = {}
        for offset, extent, file, start, length in rows:
            if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
                raise ValueError(f"{key} lies in {file!r}, which is no file of the folder")
            same_dims = len(offset) == len(extent) == len(shape)
            if not same_dims or min(start, length, *offset, *extent, 0) < 0:
                raise ValueError(f"{key} has a shard of {extent} at {offset}, bytes {start} and on")
            items[tuple(offset)] = SavedItem(tuple(offset), tuple(extent), file, start, length)
        saved[key] = SavedTensor(dtype, torch.Size(shape), items)
    return saved


def _tensors_of(metadata: dict[str, Any]) -> Tensors:
    """Tensors from the records of an unpickled Metadata."""
    storage: dict[tuple[str, Dims], Any] = {}
    for index, info in metadata["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise ValueError(
                f"{index.state['fqn']} is transformed by {info.state['transform_descriptors']}"
            )
        if index.state.get("offset") is not None:  # else an object that is no tensor
            storage[index.state["fqn"], tuple(index.state["offset"])] = info.state
    tensors: Tensors = {}
    for key, entry in metadata["state_dict_metadata"].items():
        if "chunks" not in (entry.state or {}):
            continue
        properties, rows = entry.state["properties"].state, []
        dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
        for chunk in entry.state["chunks"]:
            offset, extent = list(chunk.state["offsets"]), list(chunk.state["sizes"])
            info = storage[key, tuple(offset)]
            rows.append([offset, extent, info["relative_path"], info["offset"], info["length"]])
        tensors[key] = str(dtype).removeprefix("torch."), list(entry.state["size"]), rows
    return tensors


_DCP = "torch.distributed.checkpoint"
_RECORDS: dict[str, Iterable[str]] = {  # by module: classes and functions that become records
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_DCP}.planner": {  # in Megatron's
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix", "SerializationFormat"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
_PLAIN = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("builtins", cls.__name__): cls for cls in (set, frozenset, list, dict, tuple, int)},
}


class _Unpickler(pickle.Unpickler):
    """Unpickles DCP's metadata into records, tuples, texts and numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name of a module; pickle calls this before it uses any name.

        Raises:
            ValueError: the name is not accepted.
        """
        if name in _RECORDS.get(module, ()):
            return self._classes.setdefault((module, name), _new_record_class(name))
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        constant = getattr(torch, name, None) if module == "torch" else None
        if isinstance(constant, (torch.dtype, torch.layout)):
            return constant
        raise ValueError(
            f"it names {module}.{name}, which is no part of DCP's metadata: opened in another way, "
            "such a file may run any code, so load nothing of this checkpoint unless you trust "
            "who wrote it"
        )


def _new_record_class(name: str) -> type:
    """A class that keeps the state from a pickle; a new one for each file, since a pickle can set
    class attributes."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def setstate(self: Any, state: Any) -> None:
        self.state = state

    return type(name, (), {"__new__": new, "__setstate__": setstate, "state": None})
