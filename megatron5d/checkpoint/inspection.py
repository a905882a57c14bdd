"""The tensors of a whole checkpoint for tools: read a rectangle at a time, or checked file by file."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import MANIFEST, TENSORS, changed, read_manifest
from megatron5d.checkpoint.index import SavedTensor
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.storage import Reader
from megatron5d.checkpoint.tensor_file import Damaged, Save, SavedItem, TensorFile


class SavedTensors:
    """All tensors of a whole checkpoint, the optimiser's too.

    Raises ValueError: its index is damaged; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, Reader(folder)
        self.tensors: dict[str, SavedTensor] = self._reader.tensors()
        self.save = self._reader.save

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it is saved.

        Raises ValueError: a file is damaged; names it and the tensor. Raises OSError: a file cannot be read.
        """
        saved = self.tensors[key]
        values = torch.empty(tuple(shape), dtype=saved.dtype)
        self._reader.fill([{key: ShardedTensor(saved.size, [(tuple(offset), values)], saved.dtype)}])
        return values

    def files(self) -> dict[str, list[tuple[str, SavedItem]]]:
        """Returns the items of each file of tensors in the order of its bytes, each with the key of its tensor."""
        found: defaultdict[str, list[tuple[str, SavedItem]]] = defaultdict(list)
        for key, saved in self.tensors.items():
            for item in saved.items.values():
                found[item.file].append((key, item))
        return {name: sorted(found[name], key=lambda each: each[1].start) for name in sorted(found)}

    def faults_outside(self) -> list[str]:
        """Returns what is wrong outside the files of tensors: changed, foreign or missing files."""
        manifest, held = read_manifest(self.folder), self.files()
        there = {path.name for path in self.folder.iterdir()}
        faults = [f"{self.folder / name} is not a file of this checkpoint" for name in there - {*manifest, MANIFEST}]
        faults += [fault for name in manifest if not name.endswith(TENSORS) and (fault := changed(self.folder, name))]
        unheld = [name for name in manifest if name.endswith(TENSORS) and name not in held]
        faults += [f"{self.folder / name} is not in the index" for name in unheld]
        for key, saved in self.tensors.items():
            if sum(prod(item.extent) for item in saved.items.values()) != prod(saved.size):
                faults.append(f"{self.folder}: the parts of {key} are not {list(saved.size)} elements together")
        return sorted(faults)


def fault_of_file(
    path: Path,
    save: Save | None,
    items: Sequence[tuple[str, SavedItem]],
    dtypes: Mapping[str, torch.dtype],
    finite: bool = False,
) -> str | None:
    """Returns a message if a file of tensors is not what was saved; None if it is sound.

    Args:
        save: that wrote it; None = one of an earlier version.
        items: all that it holds, by key.
        dtypes: of the tensors, by key.
        finite: also look for values that are not finite.
    """
    try:
        with TensorFile(path) as file:
            if file.about.save != save:
                return f"{path} is of another checkpoint, or its first bytes are damaged"
            for key, item in items:
                values = torch.empty(item.extent, dtype=dtypes[key])
                file.fill(key, dtypes[key], item, (0,) * values.dim(), values)
                file.check_around(key, dtypes[key], item)
                if finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    return f"{path} holds a value of {key} that is not finite, in the part at {list(item.offset)}"
    except Damaged as error:
        return f"{path} {error}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    return None
