"""Flags in memory that several ranks see: one raises a number when its data is there, another waits
for it.

    sender      data; release; flag = epoch                 receiver    wait until flag >= epoch; acquire; data
An epoch grows with every use, so that a flag left from an earlier use is never taken for the
present one and nothing has to be reset. Release and acquire order the data before the flag for
every GPU of the system (PTX memory model, scope .sys), and for every process that maps the memory
on the CPU. On a GPU waiting and raising are work of the current stream; on the CPU they are done
before the function returns.

No wait is endless. A kernel that has polled a flag as often as its patience allows notes whose it
was and continues with whatever is there, as do all kernels behind it at once; the host finds the
note and raises.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch
from megatron5d.kernels.dispatch import jit, tl

_LOCK = threading.Lock()
_SPINS = 50
# of one program on a GPU, about: a poll goes to the second-level cache and back
_POLLS_PER_S = 1_000_000
_INTERPRETED_POLLS_PER_S = 8_000


def _plain_complaint(source: int, epoch: int) -> str:
    return f"flag {source} has not reached {epoch}"


class Patience:
    """How long one rank waits for a flag, and where its kernels note that they have given up.

    Args:
        limit_s: seconds; a kernel counts polls instead, so that its limit is as long within a small
            factor.
        complaint: what is said when a source's flag has not reached an epoch.

    `polls` `[1]` int64 on the device: what every wait is granted, 0 once one has given up. `note`
    `[1]` int64 in the host's memory, where kernels reach it: 0, or epoch·2³² + source + 1 of the
    first flag that was given up.
    """

    def __init__(
        self,
        limit_s: float,
        device: torch.device,
        complaint: Callable[[int, int], str] = _plain_complaint,
    ) -> None:
        self.limit_s, self.complaint = limit_s, complaint
        rate = _INTERPRETED_POLLS_PER_S if device.type == "cpu" else _POLLS_PER_S
        self.polls = torch.full(
            (1,), max(1, round(limit_s * rate)), dtype=torch.int64, device=device
        )
        on_host = device if device.type == "meta" else torch.device("cpu")
        self.note = torch.zeros(
            1, dtype=torch.int64, device=on_host, pin_memory=device.type == "cuda"
        )

    @property
    def kernel_arguments(self) -> tuple[Tensor, Tensor]:
        """`patience` of `wait_for`."""
        return self.polls, self.note

    def given_up(self) -> str | None:
        """Returns the complaint of a kernel that has given up; None = none has so far. Waits for
        nothing."""
        noted = 0 if self.note.is_meta else int(self.note)
        return self.complaint(noted % 2**32 - 1, noted >> 32) if noted else None

    def check(self) -> None:
        """Raises TimeoutError: a kernel has given up."""
        complaint = self.given_up()
        if complaint is not None:
            raise TimeoutError(complaint)


@dataclass(frozen=True)
class Arrivals:
    """What one rank waits for in one use of its flags."""

    # `[size]` int32, contiguous, written by the other ranks: a source's data are there once its
    # flag has reached the epoch
    flags: Tensor
    epoch: int  # of this use; positive
    patience: Patience  # with which it waits


@jit
def wait_for(flags_ptr, source, epoch, patience):
    """Holds this program until a source's flag has reached the epoch; loads that follow see what
    was written before it.

    `patience`: its polls and its note.
    """
    seen = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
    if seen < epoch:
        granted = tl.load(patience[0], volatile=True)
        left = granted
        while (seen < epoch) & (left > 0):
            seen = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
            left -= 1
        if (seen < epoch) & (granted > 0):
            tl.store(patience[1], tl.cast(epoch, tl.int64) * 4294967296 + source + 1)
            tl.store(patience[0], tl.cast(0, tl.int64))
    tl.debug_barrier()


@jit
def raise_flag(flag_ptr, epoch):
    """Sets the flag to the epoch after everything that this program has written."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@jit(do_not_specialize=["epoch", "source"])
def _wait_kernel(flags_ptr, source, epoch, patience):
    wait_for(flags_ptr, source, epoch, patience)


@jit(do_not_specialize=["epoch"])
def _raise_kernel(addresses_ptr, epoch):
    flag_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    raise_flag(flag_ptr, epoch)


def fence() -> None:
    """Orders this process's earlier reads and writes before its later ones, for other processes
    too.

    x86 keeps the order by itself; elsewhere the release of one locking and the acquisition of the
    next keep it.
    """
    for _ in range(2):
        with _LOCK:
            pass


def wait_flag(arrivals: Arrivals, source: int) -> None:
    """Waits until the flag of a source has reached the epoch. Raises TimeoutError: on the CPU,
    where it has not in `patience.limit_s`; on a GPU `patience.check` raises it later."""
    flag, epoch, patience = arrivals.flags[source], arrivals.epoch, arrivals.patience
    if flag.device.type != "cpu":
        if dispatch.runs_triton(flag):
            _wait_kernel[(1,)](
                arrivals.flags, source, epoch, patience.kernel_arguments, num_warps=1
            )
        return
    deadline, spins = time.monotonic() + patience.limit_s, 0
    while int(flag) < epoch:
        spins += 1
        if spins > _SPINS:  # the sender may need this core
            time.sleep(min(1e-5 * (spins - _SPINS), 1e-3))
        if time.monotonic() > deadline:
            raise TimeoutError(patience.complaint(source, epoch))
    fence()


def raise_flags(flags: Sequence[Tensor], addresses: Tensor, epoch: int) -> None:
    """Sets flags, in memory of other ranks, after everything that was written before.

    Args:
        flags: one int32 each, as this process sees them.
        addresses: `[len(flags)]` int64 on the device, where they lie; used on a GPU.
    """
    if addresses.device.type != "cpu":
        if dispatch.runs_triton(addresses):
            _raise_kernel[(len(flags),)](addresses, epoch, num_warps=1)
        return
    fence()
    for flag in flags:
        flag.fill_(epoch)


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns `[n]` int64 on their device."""
    device = tensors[0].device
    if device.type == "meta":
        return torch.empty(len(tensors), dtype=torch.int64, device=device)
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(device)
