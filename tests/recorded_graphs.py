"""Graphs on the CPU: a capture records torch's operations with the memory that they read and write,
a replay repeats them there. As on a GPU, nothing else of what Python did is repeated, and a capture
does nothing to what lies outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from megatron5d.comm.ledger import Ledger
from megatron5d.pipeline_parallel.phase_graphs import PhaseGraphs

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "repeat_interleave"}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


def storages(tree: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(tree)}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.addresses: list[list[int]] = []  # of what each of them reads and writes
        self.own: set[int] = set()  # storages that the capture has made
        # what it has written over, as it was
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        # attention on the CPU, which no GPU runs, asks whether all rows see something
        legal = name not in HOST_READS or "output_size" in kwargs or args[0].dtype == torch.bool
        assert legal, f"{name} waits for the device"
        arguments = [*args, *kwargs.values()]
        names = [each.name for each in operation._schema.arguments[: len(args)]] + list(kwargs)
        written = {
            each.name
            for each in operation._schema.arguments
            if each.alias_info and each.alias_info.is_write
        }
        for name, value in zip(names, arguments):
            for tensor in tensors_in(value) if name in written else ():
                if tensor.untyped_storage()._cdata not in self.own:
                    self.before.append((tensor.data, tensor.detach().clone()))
        read = storages(arguments)
        out = operation(*args, **kwargs)
        sends = operation.namespace == "c10d"  # writes into its arguments, whatever its schema says
        is_view = not (written or sends) and bool(storages(out) & read)
        self.own |= storages(out) - read
        if not is_view:
            self.operations.append((operation, args, kwargs, None if written or sends else out))
            self.addresses.append([tensor.data_ptr() for tensor in tensors_in(arguments)])
        return out


class RecordedPool:
    """A GraphPool."""

    def capture(self, work):
        with Recorder() as recorder:
            result = work()
        for tensor, values in reversed(recorder.before):
            tensor.copy_(values)
        for *_, out in recorder.operations:
            for tensor in tensors_in(out):
                if tensor.is_floating_point():
                    tensor.data.fill_(torch.nan)  # the work of a capture is not done
        return result, lambda: self.replay(recorder.operations, recorder.addresses)

    def release(self) -> None:
        """Garbage collection does it."""

    def replay(self, operations, addresses) -> None:
        plain = lambda tree: tree_map_only(torch.Tensor, lambda tensor: tensor.data, tree)  # noqa: E731
        with torch.no_grad():
            for (operation, args, kwargs, out), captured in zip(operations, addresses, strict=True):
                now = [tensor.data_ptr() for tensor in tensors_in([*args, *kwargs.values()])]
                assert now == captured, f"{operation} was captured with other memory"
                new = operation(*plain(args), **plain(kwargs))
                if operation.namespace == "c10d":
                    for work in tree_flatten(new)[0]:
                        if isinstance(work, torch.ScriptObject):
                            torch._C._distributed_c10d.Work.unbox(work).wait()
                for to, source in zip(tensors_in(out), tensors_in(new)):
                    to.data.copy_(source)


class RecordedGraphs(PhaseGraphs):
    """Captures watched steps, too, where every step is watched."""

    def __init__(self) -> None:
        super().__init__(Ledger(), RecordedPool)
        self.alike = 0  # steps with as many micro-batches

    def start_step(self, num_microbatches, eager=False):
        self.alike = self.alike + 1 if num_microbatches == self._num_microbatches else 1
        assert self.alike < 3 or any(self._free.values()), "no phase has been captured"
        super().start_step(num_microbatches)
