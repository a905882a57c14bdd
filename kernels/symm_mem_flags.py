"""Flags in memory that several ranks share: one raises a flag when its data is there, another waits
for it.

    sender      write data; release; flag = epoch
    receiver    wait until flag >= epoch; acquire; read data
The epoch grows with every use, so an earlier use never counts for the current one and nothing has
to be reset. Release and acquire order the data before the flag for every GPU of the system (PTX
memory model, scope .sys), and on the CPU for every process that maps the memory. On a GPU, waiting
and raising are work of the current stream; on the CPU they are done before the function returns.

No wait is endless. A kernel that has polled a flag as often as its timeout allows reports the
source and continues with whatever data is there, as all later kernels do at once; the host reads
the report and raises.
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
# About, of one program on a GPU: a poll goes to the second-level cache and back.
_POLLS_PER_S = 1_000_000
_INTERPRETED_POLLS_PER_S = 8_000


def _plain_message(source: int, epoch: int) -> str:
    return f"flag {source} has not reached {epoch}"


class WaitTimeout:
    """How long a rank waits for a flag, and where its kernels report that they have timed out.

    Args:
        limit_s: seconds; a kernel counts polls instead, so its limit is right within a small
            factor.
        message: text of the error for (source, epoch).

    Attributes:
        polls: `[1]` int64 on the device: polls that each wait may make, 0 after the first timeout.
        report: `[1]` int64 in the host's memory, accessible to kernels: 0, or
            epoch·2³² + source + 1 of the first flag that timed out.
    """

    def __init__(
        self,
        limit_s: float,
        device: torch.device,
        message: Callable[[int, int], str] = _plain_message,
    ) -> None:
        self.limit_s, self.message = limit_s, message
        rate = _INTERPRETED_POLLS_PER_S if device.type == "cpu" else _POLLS_PER_S
        polls = max(1, round(limit_s * rate))
        self.polls = torch.full((1,), polls, dtype=torch.int64, device=device)
        host = "meta" if device.type == "meta" else "cpu"
        pinned = device.type == "cuda"
        self.report = torch.zeros(1, dtype=torch.int64, device=host, pin_memory=pinned)

    @property
    def kernel_arguments(self) -> tuple[Tensor, Tensor]:
        """`timeout` of `wait_for`."""
        return self.polls, self.report

    def error(self) -> str | None:
        """Message of the first kernel that has timed out, if any has; does not wait."""
        report = 0 if self.report.is_meta else int(self.report)
        return self.message(report % 2**32 - 1, report >> 32) if report else None

    def check(self) -> None:
        """Raises TimeoutError if a kernel has timed out."""
        if (error := self.error()) is not None:
            raise TimeoutError(error)


@dataclass(frozen=True)
class Arrivals:
    """Flags that one rank waits for in one use.

    Args:
        flags: `[size]` int32, contiguous, written by the other ranks: the data of a source are
            there once its flag has reached the epoch.
        epoch: positive.
        timeout: of the waits.
    """

    flags: Tensor
    epoch: int
    timeout: WaitTimeout


@jit
def wait_for(flags_ptr, source, epoch, timeout):
    """Blocks this program until a source's flag has reached the epoch.

    Loads that follow see what was written before it. `timeout` is (polls, report).
    """
    flag = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
    if flag < epoch:
        polls = tl.load(timeout[0], volatile=True)
        remaining = polls
        while (flag < epoch) & (remaining > 0):
            flag = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
            remaining -= 1
        if (flag < epoch) & (polls > 0):
            tl.store(timeout[1], tl.cast(epoch, tl.int64) * 4294967296 + source + 1)
            tl.store(timeout[0], tl.cast(0, tl.int64))
    tl.debug_barrier()


@jit
def raise_flag(flag_ptr, epoch):
    """Sets the flag to the epoch after all writes of this program."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@jit(do_not_specialize=["epoch", "source"])
def _wait_kernel(flags_ptr, source, epoch, timeout):
    wait_for(flags_ptr, source, epoch, timeout)


@jit(do_not_specialize=["epoch"])
def _raise_kernel(addresses_ptr, epoch):
    flag_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    raise_flag(flag_ptr, epoch)


def fence() -> None:
    """Orders this process's earlier reads and writes before its later ones, for all processes.

    x86 keeps the order by itself; elsewhere the release of one lock and the acquisition of the next
    keep it.
    """
    for _ in range(2):
        with _LOCK:
            pass


def wait_flag(arrivals: Arrivals, source: int) -> None:
    """Waits until the flag of a source has reached the epoch.

    Raises:
        TimeoutError: on the CPU, if it has not within `timeout.limit_s`; on a GPU `timeout.check`
            raises it later.
    """
    flag, epoch, timeout = arrivals.flags[source], arrivals.epoch, arrivals.timeout
    if flag.device.type != "cpu":
        if dispatch.runs_triton(flag):
            arguments = (arrivals.flags, source, epoch, timeout.kernel_arguments)
            _wait_kernel[(1,)](*arguments, num_warps=1)
        return
    deadline, spins = time.monotonic() + timeout.limit_s, 0
    while int(flag) < epoch:
        spins += 1
        if spins > _SPINS:  # the sender may need this core
            time.sleep(min(1e-5 * (spins - _SPINS), 1e-3))
        if time.monotonic() > deadline:
            raise TimeoutError(timeout.message(source, epoch))
    fence()


def raise_flags(flags: Sequence[Tensor], addresses: Tensor, epoch: int) -> None:
    """Sets flags in memory of other ranks, after all earlier writes.

    Args:
        flags: one int32 each, as this process maps them.
        addresses: `[len(flags)]` int64 on the device, their addresses; used on a GPU.
    """
    if addresses.device.type != "cpu":
        if dispatch.runs_triton(addresses):
            _raise_kernel[(len(flags),)](addresses, epoch, num_warps=1)
        return
    fence()
    for flag in flags:
        flag.fill_(epoch)


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of tensors, int64 `[n]` on their device."""
    device = tensors[0].device
    if device.type == "meta":
        return torch.empty(len(tensors), dtype=torch.int64, device=device)
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(device)
