"""Flags in memory that several ranks see: one raises a number when its data is there, another waits for it.

    sender      data; release; flag = epoch                 receiver    wait until flag >= epoch; acquire; data
An epoch grows with every use, so that a flag left from an earlier use is never taken for the present one and nothing
has to be reset. Release and acquire order the data before the flag for every GPU of the system (PTX memory model,
scope .sys), and for every process that maps the memory on the CPU.
On a GPU waiting and raising are work of the current stream; on the CPU they are done before the function returns.
"""

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.language import jit, tl

_LOCK = threading.Lock()
_SPINS = 50


@jit
def wait_for(flag_ptr, epoch):
    """Hold this program until the flag has reached the epoch; loads that follow see what was written before it."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < epoch:
        pass
    tl.debug_barrier()


@jit
def raise_flag(flag_ptr, epoch):
    """Set the flag to the epoch after everything that this program has written."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@jit(do_not_specialize=["epoch"])
def _wait_kernel(flags_ptr, epoch, count):
    for i in range(count):
        wait_for(flags_ptr + i, epoch)


@jit(do_not_specialize=["epoch"])
def _raise_kernel(addresses_ptr, epoch):
    flag_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    raise_flag(flag_ptr, epoch)


def fence() -> None:
    """Order this process's earlier reads and writes before its later ones, for other processes too.

    x86 keeps the order by itself; elsewhere the release of one locking and the acquisition of the next keep it.
    """
    for _ in range(2):
        with _LOCK:
            pass


def wait_flags(flags: Tensor, epoch: int, timeout_s: float = 600.0) -> None:
    """Wait until every flag has reached the epoch.

    Args:
        flags: `[n]` int32, contiguous, written by other ranks.
        epoch: positive, or nothing is waited for.
        timeout_s: on the CPU, until the wait is given up.

    Raises:
        TimeoutError: on the CPU, with the flags that are missing.
    """
    if flags.is_meta or epoch <= 0:
        return
    if flags.is_cuda:
        _wait_kernel[(1,)](flags, epoch, flags.numel(), num_warps=1)
        return
    deadline, spins = time.monotonic() + timeout_s, 0
    while int(flags.min()) < epoch:
        spins += 1
        if spins > _SPINS:  # the sender may need this core
            time.sleep(min(1e-5 * (spins - _SPINS), 1e-3))
        if time.monotonic() > deadline:
            missing = [i for i, value in enumerate(flags.tolist()) if value < epoch]
            raise TimeoutError(f"flags {missing} have not reached {epoch} in {timeout_s:g} s: {flags.tolist()}")
    fence()


def raise_flags(flags: Sequence[Tensor], addresses: Tensor, epoch: int) -> None:
    """Set flags, in memory of other ranks, after everything that was written before.

    Args:
        flags: one int32 each, as this process sees them.
        addresses: `[len(flags)]` int64 on the device, where they lie; used on a GPU.
        epoch: their new value.
    """
    if addresses.is_meta:
        return
    if addresses.is_cuda:
        _raise_kernel[(len(flags),)](addresses, epoch, num_warps=1)
        return
    fence()
    for flag in flags:
        flag.fill_(epoch)


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """`[n]` int64 on their device."""
    device = tensors[0].device
    if device.type == "meta":
        return torch.empty(len(tensors), dtype=torch.int64, device=device)
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(device)
