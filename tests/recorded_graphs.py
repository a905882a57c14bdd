"""Graphs on the CPU: a capture records torch's operations with the memory that they read and write,
and a replay repeats them there.

As on a GPU, a replay repeats nothing else of what Python did, and a capture changes nothing outside
of it.
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
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def addresses(tree: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_in(tree)]


def storages(tree: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(tree)}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []  # operation, arguments, output, captured addresses
        self.own: set[int] = set()  # storages that the capture has made
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []  # and its old values

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        # attention on the CPU, which no GPU runs, asks whether a mask has empty rows
        legal = name not in HOST_READS or "output_size" in kwargs or args[0].dtype == torch.bool
        assert legal, f"{name} waits for the device"
        schema = operation._schema.arguments
        written = {a.name for a in schema if a.alias_info and a.alias_info.is_write}
        names = [argument.name for argument in schema[: len(args)]] + list(kwargs)
        arguments = [*args, *kwargs.values()]
        for name, value in zip(names, arguments):
            for tensor in tensors_in(value) if name in written else ():
                if tensor.untyped_storage()._cdata not in self.own:
                    self.overwritten.append((tensor.data, tensor.detach().clone()))
        read = storages(arguments)
        out = operation(*args, **kwargs)
        sends = operation.namespace == "c10d"  # writes its arguments, whatever its schema says
        is_view = not (written or sends) and bool(storages(out) & read)
        self.own |= storages(out) - read
        if not is_view:
            result = None if written or sends else out
            self.operations.append((operation, args, kwargs, result, addresses(arguments)))
        return out


class RecordedPool:
    """A GraphPool."""

    def capture(self, work):
        with Recorder() as recorder:
            result = work()
        for tensor, values in reversed(recorder.overwritten):
            tensor.copy_(values)
        for _, _, _, out, _ in recorder.operations:
            for tensor in tensors_in(out):
                if tensor.is_floating_point():
                    tensor.data.fill_(torch.nan)  # a capture computes nothing
        return result, lambda: self.replay(recorder.operations)

    def release(self) -> None:
        """Garbage collection does it."""

    def replay(self, operations) -> None:
        plain = lambda tree: tree_map_only(torch.Tensor, lambda tensor: tensor.data, tree)  # noqa: E731
        with torch.no_grad():
            for operation, args, kwargs, out, captured in operations:
                now = addresses([*args, *kwargs.values()])
                assert now == captured, f"{operation} was captured with other memory"
                new = operation(*plain(args), **plain(kwargs))
                if operation.namespace == "c10d":
                    for work in tree_flatten(new)[0]:
                        if isinstance(work, torch.ScriptObject):
                            torch._C._distributed_c10d.Work.unbox(work).wait()
                for target, source in zip(tensors_in(out), tensors_in(new)):
                    target.data.copy_(source)


class RecordedGraphs(PhaseGraphs):
    """Captures watched steps, too: here every step is watched."""

    def __init__(self) -> None:
        super().__init__(Ledger(), RecordedPool)
        self.num_equal_steps = 0  # with the same number of micro-batches

    def start_step(self, num_microbatches, eager=False):
        is_equal = num_microbatches == self._num_microbatches
        self.num_equal_steps = self.num_equal_steps + 1 if is_equal else 1
        assert self.num_equal_steps < 3 or any(self._free.values()), "no phase has been captured"
        super().start_step(num_microbatches)
