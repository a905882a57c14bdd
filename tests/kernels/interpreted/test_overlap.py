"""GEMMs that wait for flags and raise them, with a second process at the other end of the shared
memory."""

import mmap
import os
import time
from threading import Timer

import pytest
import torch
from kernel_lab.accuracy import relative_error
from kernel_lab.bounds import allow_memory
from kernel_lab.faults import load_with_fault

from megatron5d.kernels import overlapped_gemm, symm_mem_flags
from megatron5d.kernels.symm_mem_flags import (
    Arrivals,
    WaitTimeout,
    addresses_of,
    raise_flags,
    wait_flag,
)

pytestmark = pytest.mark.interpreted

SIZE, RANK = 2, 1
# rows, n, k, transposed
SHAPES = [(37, 40, 72, False), (70, 72, 40, True), (1, 8, 16, False), (129, 130, 24, True)]


def shared(*shape, dtype=torch.bfloat16):
    """Memory that a forked process shares."""
    count = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def shared_flags(size=SIZE):
    return shared(size, dtype=torch.int32)


def arrivals(flags, epoch, limit_s=60.0):
    return Arrivals(flags, epoch, WaitTimeout(limit_s, flags.device))


def operands(rows, n, k, transposed):
    """x, the weight, and their exact product."""
    x, weight = torch.randn(SIZE, rows, k).bfloat16(), torch.randn(n, k).bfloat16()
    exact = x.double() @ weight.double().t()
    return x, weight.t().contiguous() if transposed else weight, exact


def error_of(x, exact) -> float:
    """Relative error; large where x has elements that nobody wrote."""
    return torch.nan_to_num(torch.tensor(relative_error(x, exact)), 9.0).item()


class beside:
    """Runs a function in a forked process during the block; it must succeed."""

    def __init__(self, work):
        self.work = work

    def __enter__(self):
        self.child = os.fork()
        if self.child == 0:
            try:
                self.work()
                os._exit(0)
            finally:
                os._exit(1)

    def __exit__(self, *_):
        assert os.waitpid(self.child, 0)[1] == 0


def send_late(buffers, flags, chunk, epoch, done, delay_s=0.1, flag_first=False):
    """The other rank: it sends once the GEMM has multiplied its own chunk and waits.

    Args:
        done: set when the GEMM has returned, as a faulty one may without waiting.
        delay_s: for which a correct GEMM waits.
    """
    if flag_first:
        raise_flags([flags[:1]], flags, epoch)
    deadline = time.monotonic() + delay_s
    while not done.any() and time.monotonic() < deadline:
        time.sleep(0.005)
    buffers[0].copy_(chunk)
    raise_flags([flags[:1]], flags, epoch)


def all_gather_error(module, rows, n, k, transposed, epochs=(1, 2), **options):
    """Largest relative error of `all_gather_gemm` over uses of the same buffers and flags."""
    buffers, flags, done, errors = shared(SIZE, rows, k), shared_flags(), shared_flags(), []
    flags.fill_(epochs[0] - 1)
    for epoch in epochs:
        x, weight, exact = operands(rows, n, k, transposed)
        buffers[0].fill_(float("nan"))
        buffers[RANK].copy_(x[RANK])
        flags[RANK] = epoch
        done.zero_()
        with beside(lambda x=x, e=epoch: send_late(buffers, flags, x[0], e, done, **options)):
            y = module.all_gather_gemm(buffers, weight, arrivals(flags, epoch), RANK, transposed)
            done.fill_(1)
        errors.append(error_of(y, exact))
    return max(errors)


@pytest.mark.parametrize("rows, n, k, transposed", SHAPES)
def test_all_gather(rows, n, k, transposed):
    assert all_gather_error(overlapped_gemm, rows, n, k, transposed) < 5e-3


def test_all_gather_with_gaps_between_buffers_and_without_a_kernel():
    """float64 takes the plain path, which waits for the same flags."""
    flags = shared_flags()
    x, weight, exact = operands(5, 8, 16, False)
    buffers = shared(SIZE, 7, 24).flatten(1)[:, :80].unflatten(1, (5, 16))
    buffers.copy_(x)
    flags.fill_(3)
    y = overlapped_gemm.all_gather_gemm(buffers, weight, arrivals(flags, 3), 0)
    assert relative_error(y, exact) < 5e-3
    wide = x.double(), weight.double(), arrivals(flags, 3), 0
    assert torch.allclose(overlapped_gemm.all_gather_gemm(*wide), exact)


def copy_when_raised(buffer, flag, received, epoch):
    """The other rank: it copies its buffer at the moment that the flag is raised."""
    wait_flag(arrivals(flag, epoch), 0)
    received.copy_(buffer)


def reduce_scatter_error(module, rows, n, k, transposed, uses=2):
    """Largest relative error of what the other rank receives, and of the sum."""
    buffers, flags = [shared(rows, n) for _ in range(SIZE)], shared_flags()
    received, errors = shared(rows, n), []
    finished, views = torch.zeros(SIZE, dtype=torch.int32), list(flags.split(1))
    out = module.PeerBuffers(buffers, views, addresses_of(buffers), addresses_of(views), finished)
    for epoch in range(1, uses + 1):
        x, weight, exact = operands(rows, n, k, transposed)
        for buffer in buffers:
            buffer.fill_(float("nan"))
        with (
            beside(lambda e=epoch: copy_when_raised(buffers[0], flags[:1], received, e)),
            allow_memory(*buffers, flags),
        ):
            module.gemm_reduce_scatter(x, weight, out, epoch, RANK, transposed)
        terms = torch.stack((buffers[RANK], received))
        total = module.sum_arrived(terms, arrivals(flags, epoch))
        errors += [error_of(received, exact[0]), error_of(total, exact.sum(0))]
        assert not finished.any() and flags.tolist() == [epoch, epoch]
    return max(errors)


@pytest.mark.parametrize("rows, n, k, transposed", SHAPES)
def test_reduce_scatter(rows, n, k, transposed):
    # the terms are rounded, and so is their sum
    assert reduce_scatter_error(overlapped_gemm, rows, n, k, transposed) < 1e-2


def test_the_sum_waits():
    terms, flags, x = shared(3, 300), shared_flags(3), torch.randn(3, 300).bfloat16()
    terms[0].fill_(float("nan"))
    terms[1:].copy_(x[1:])
    flags[1:] = 5
    with beside(lambda: send_late(terms, flags, x[0], 5, shared(1))):
        total = overlapped_gemm.sum_arrived(terms, arrivals(flags, 5))
    assert relative_error(total, x.double().sum(0)) < 5e-3
    with pytest.raises(TimeoutError, match="flag 1 has not reached 6"):
        wait_flag(arrivals(flags, 6, 0.01), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])  # float64 takes the plain path
def test_waiting_for_a_rank_that_never_sends_times_out(dtype):
    """Tiles that wait for it return, later kernels do not wait again, and the error names the first
    source."""
    flags = shared_flags(3)
    flags[1] = 7
    x, weight = torch.zeros(3, 40, 16, dtype=dtype), torch.zeros(72, 16, dtype=dtype)
    timeout = WaitTimeout(1.5, flags.device)
    with beside(lambda: raise_flags([flags[2:]], flags, 7)):
        with pytest.raises(TimeoutError, match="flag 0 has not reached 7"):
            overlapped_gemm.all_gather_gemm(x, weight, Arrivals(flags, 7, timeout), RANK)
    if dtype == torch.bfloat16:
        assert timeout.polls.item() == 0
        with pytest.raises(TimeoutError, match="flag 0 has not reached 7"):
            overlapped_gemm.sum_arrived(x, Arrivals(flags, 8, timeout))


def test_a_kernel_keeps_waiting_while_a_flag_is_of_an_earlier_use():
    flags = torch.ones(1, dtype=torch.int32)
    timeout = WaitTimeout(60.0, flags.device)
    Timer(0.3, flags.fill_, (3,)).start()
    symm_mem_flags._wait_kernel[(1,)](flags, 0, 3, timeout.kernel_arguments)
    assert int(flags) == 3 and timeout.error() is None


def test_kernels_that_only_raise_or_wait():
    flags = torch.zeros(3, dtype=torch.int32)
    timeout = WaitTimeout(0.05, flags.device)
    with allow_memory(flags):
        symm_mem_flags._raise_kernel[(2,)](addresses_of(flags.split(1)[1:]), 4)
    assert flags.tolist() == [0, 4, 4]
    for source in (2, 0):
        symm_mem_flags._wait_kernel[(1,)](flags, source, 4, timeout.kernel_arguments)
        assert timeout.error() == (None if source else "flag 0 has not reached 4")


ZEROS = "    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n"
RAISE = "raise_flag(tl.load(flag_addresses_ptr + owner).to(tl.pointer_type(tl.int32)), epoch)"
FAULTS = {
    "no wait": (all_gather_error, "wait_for(flags_ptr, source, epoch, timeout)", "pass"),
    "a flag of an earlier use counts": (
        all_gather_error,
        "(flags_ptr, source, epoch,",
        "(flags_ptr, source, 1,",
    ),
    "another rank's flag": (
        all_gather_error,
        "wait_for(flags_ptr, source, ",
        "wait_for(flags_ptr, rank, ",
    ),
    "raised before the last tile": (reduce_scatter_error, "== chunk_tiles - 1", "== 0"),
    "raised before the store": (reduce_scatter_error, ZEROS, f"{ZEROS}    {RAISE}\n"),
    "another rank's buffer": (
        reduce_scatter_error,
        "tl.load(buffer_addresses_ptr + owner)",
        "tl.load(buffer_addresses_ptr + rank)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(fault, tmp_path):
    run, right, wrong = FAULTS[fault]
    shape, options = (
        ((7, 8, 16), {"delay_s": 10.0}) if run is all_gather_error else ((70, 72, 40), {})
    )
    if "earlier use" in fault:
        options["epochs"] = (2,)  # in the first use it waits as a correct one does, for delay_s
    module = load_with_fault(tmp_path, "overlapped_gemm", right, wrong)
    try:
        error = run(module, *shape, False, **options)
    except AssertionError:
        return
    assert error > 3e-2


def test_a_flag_raised_before_the_data_is_detected():
    options = {"delay_s": 10.0, "flag_first": True}
    assert all_gather_error(overlapped_gemm, 7, 8, 16, False, **options) > 3e-2


def test_the_kernels_run(monkeypatch):
    for name in ("_all_gather_gemm_kernel", "_gemm_reduce_scatter_kernel"):
        monkeypatch.setattr(overlapped_gemm, name, None)
    x, weight = torch.zeros(1, 8, 8).bfloat16(), torch.zeros(8, 8).bfloat16()
    flags = torch.ones(1, dtype=torch.int32)
    out = overlapped_gemm.PeerBuffers([x[0]], [flags], flags, flags, flags)
    with pytest.raises(TypeError, match="NoneType"):
        overlapped_gemm.all_gather_gemm(x, weight, arrivals(flags, 1), 0)
    with pytest.raises(TypeError, match="NoneType"):
        overlapped_gemm.gemm_reduce_scatter(x, weight, out, 1, 0)
