"""Products that follow and tell flags, with a second process at the other end of the shared
memory."""

import importlib.util
import mmap
import os
import time
from pathlib import Path
from threading import Timer

import pytest
import torch
from kernel_lab.bounds import allow_memory

from megatron5d.kernels import overlapped_gemm
from megatron5d.kernels import symm_mem_flags as signals
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
    """Memory that survives a fork as the same memory."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(
        mmap.mmap(-1, max(1, count * dtype.itemsize)), dtype=dtype, count=count
    ).view(shape)


def arrivals(flags, epoch, limit_s=60.0):
    return Arrivals(flags, epoch, WaitTimeout(limit_s, flags.device))


class beside:
    """Runs a function in a forked process while the block runs; it must end well."""

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


def with_fault(tmp_path, module, right, wrong):
    source = Path(module.__file__).read_text()
    assert right in source, f"{module.__name__} no longer contains {right!r}: plant the fault anew"
    path = tmp_path / "planted.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("planted", path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    return planted


def until(done, patience_s):
    """Waits for the GEMM to end without us, as a faulty one may, or for as long as it should wait
    for us."""
    deadline = time.monotonic() + patience_s
    while not done.any() and time.monotonic() < deadline:
        time.sleep(0.005)


def late(buffers, flags, chunk, epoch, done, patience_s=0.1, flag_first=False):
    """The other rank: it comes when the GEMM has done its own chunk and waits."""
    if flag_first:
        raise_flags([flags[:1]], flags, epoch)
    until(done, patience_s)
    buffers[0].copy_(chunk)
    raise_flags([flags[:1]], flags, epoch)


def gathered(module, rows, n, k, transposed, epochs=(1, 2), **how):
    """Largest relative error of `all_gather_gemm` over uses of the same buffers and flags."""
    buffers, flags, done, worst = (
        shared(SIZE, rows, k),
        *(shared(SIZE, dtype=torch.int32) for _ in range(2)),
        0.0,
    )
    flags.fill_(epochs[0] - 1)
    for epoch in epochs:
        x, weight = (
            torch.randn(SIZE, rows, k).bfloat16(),
            torch.randn((k, n) if transposed else (n, k)).bfloat16(),
        )
        buffers[0].fill_(float("nan"))
        buffers[RANK].copy_(x[RANK])
        flags[RANK] = epoch
        done.zero_()
        with beside(lambda x=x, epoch=epoch: late(buffers, flags, x[0], epoch, done, **how)):
            y = module.all_gather_gemm(buffers, weight, arrivals(flags, epoch), RANK, transposed)
            done.fill_(1)
        want = x.double() @ (weight if transposed else weight.t()).double()
        worst = max(worst, torch.nan_to_num((y.double() - want).norm() / want.norm(), 9.0).item())
    return worst


@pytest.mark.parametrize("rows, n, k, transposed", SHAPES)
def test_gathered(rows, n, k, transposed):
    assert gathered(overlapped_gemm, rows, n, k, transposed) < 5e-3


def test_gathered_through_buffers_with_gaps_and_without_a_kernel():
    """Boxes may lie apart; float64 takes the plain path, which waits for the same flags."""
    flags, wide = shared(SIZE, dtype=torch.int32), shared(SIZE, 7, 24)
    x, weight = torch.randn(SIZE, 5, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    buffers = wide.flatten(1)[:, :80].unflatten(1, (5, 16))
    buffers.copy_(x)
    flags.fill_(3)
    want = x.double() @ weight.double().t()
    assert (
        overlapped_gemm.all_gather_gemm(buffers, weight, arrivals(flags, 3), 0).double() - want
    ).norm() < 5e-3 * want.norm()
    assert torch.allclose(
        overlapped_gemm.all_gather_gemm(x.double(), weight.double(), arrivals(flags, 3), 0), want
    )


def owner(buffer, flag, seen, epoch):
    """The other rank: it copies its buffer at the moment that the flag comes."""
    wait_flag(arrivals(flag, epoch), 0)
    seen.copy_(buffer)


def scattered(module, rows, n, k, transposed, uses=2):
    """Largest relative error of what the owner finds, and of the own sum."""
    buffers = [shared(rows, n) for _ in range(SIZE)]
    flags, seen = shared(SIZE, dtype=torch.int32), shared(rows, n)
    finished, worst = torch.zeros(SIZE, dtype=torch.int32), 0.0
    views = list(flags.split(1))
    out = module.PeerBuffers(buffers, views, addresses_of(buffers), addresses_of(views), finished)
    for epoch in range(1, uses + 1):
        x, weight = (
            torch.randn(SIZE, rows, k).bfloat16(),
            torch.randn((k, n) if transposed else (n, k)).bfloat16(),
        )
        for buffer in buffers:
            buffer.fill_(float("nan"))
        with (
            beside(lambda epoch=epoch: owner(buffers[0], flags[:1], seen, epoch)),
            allow_memory(*buffers, flags),
        ):
            module.gemm_reduce_scatter(x, weight, out, epoch, RANK, transposed)
        want = x.double() @ (weight if transposed else weight.t()).double()
        mine = module.sum_arrived(
            torch.stack((buffers[RANK], seen)), arrivals(flags, epoch)
        ).double()
        for got, wanted in ((seen.double(), want[0]), (mine, want.sum(0))):
            worst = max(worst, torch.nan_to_num((got - wanted).norm() / wanted.norm(), 9.0).item())
        assert not finished.any() and flags.tolist() == [epoch, epoch]
    return worst


@pytest.mark.parametrize("rows, n, k, transposed", SHAPES)
def test_scattered(rows, n, k, transposed):
    # terms and their sum are rounded each
    assert scattered(overlapped_gemm, rows, n, k, transposed) < 1e-2


def test_the_sum_waits():
    terms, flags = shared(3, 300), shared(3, dtype=torch.int32)
    terms.fill_(float("nan"))
    x = torch.randn(3, 300).bfloat16()
    terms[1:].copy_(x[1:])
    flags[1:] = 5
    with beside(lambda: late(terms, flags, x[0], 5, shared(1))):
        got = overlapped_gemm.sum_arrived(terms, arrivals(flags, 5))
    assert (got.double() - x.double().sum(0)).norm() < 5e-3 * x.double().sum(0).norm()
    with pytest.raises(TimeoutError, match="flag 1 has not reached 6"):
        wait_flag(arrivals(flags, 6, 0.01), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])  # float64 takes the plain path
def test_a_rank_that_never_sends_is_given_up(dtype):
    """Tiles that wait for it all leave, what follows does not wait again, and the first that was
    missed is told."""
    flags = shared(3, dtype=torch.int32)
    flags[1] = 7
    x, weight = torch.zeros(3, 40, 16, dtype=dtype), torch.zeros(72, 16, dtype=dtype)
    quiet = WaitTimeout(1.5, flags.device)
    with beside(lambda: raise_flags([flags[2:]], flags, 7)):
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="flag 0 has not reached 7"):
            overlapped_gemm.all_gather_gemm(x, weight, Arrivals(flags, 7, quiet), RANK)
        assert 0.3 < time.monotonic() - started < 60
    if dtype == torch.bfloat16:
        assert quiet.polls.item() == 0
        with pytest.raises(TimeoutError, match="flag 0 has not reached 7"):
            overlapped_gemm.sum_arrived(x, Arrivals(flags, 8, quiet))


def test_a_kernel_waits_on_while_a_flag_is_of_an_earlier_use():
    flags = torch.ones(1, dtype=torch.int32)
    late = arrivals(flags, 3)
    Timer(0.3, flags.fill_, (3,)).start()
    signals._wait_kernel[(1,)](flags, 0, late.epoch, late.timeout.kernel_arguments)
    assert int(flags) == 3 and late.timeout.error() is None


def test_flags_are_raised_and_awaited_by_kernels_of_their_own():
    flags = torch.zeros(3, dtype=torch.int32)
    each, waiting = list(flags.split(1)), arrivals(flags, 4, 0.05)
    with allow_memory(flags):
        signals._raise_kernel[(2,)](addresses_of(each[1:]), 4)
    assert flags.tolist() == [0, 4, 4]
    for source in (2, 0):
        signals._wait_kernel[(1,)](flags, source, 4, waiting.timeout.kernel_arguments)
        assert waiting.timeout.error() == (None if source else "flag 0 has not reached 4")


FAULTS = {
    "no wait": (overlapped_gemm, gathered, "wait_for(flags_ptr, source, epoch, timeout)", "pass"),
    "a flag of an earlier use counts": (
        overlapped_gemm,
        gathered,
        "(flags_ptr, source, epoch,",
        "(flags_ptr, source, 1,",
    ),
    "another's flag": (
        overlapped_gemm,
        gathered,
        "wait_for(flags_ptr, source, ",
        "wait_for(flags_ptr, rank, ",
    ),
    "told before the last tile": (overlapped_gemm, scattered, "== chunk_tiles - 1", "== 0"),
    "told before the store": (
        overlapped_gemm,
        scattered,
        "    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
        "    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n"
        "    raise_flag(tl.load(flag_addresses_ptr + owner).to(tl.pointer_type(tl.int32)), epoch)\n",
    ),
    "another's buffer": (
        overlapped_gemm,
        scattered,
        "tl.load(buffer_addresses_ptr + owner)",
        "tl.load(buffer_addresses_ptr + rank)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault, tmp_path):
    module, run, right, wrong = FAULTS[fault]
    # done long before
    shape, how = ((7, 8, 16), {"patience_s": 10.0}) if run is gathered else ((70, 72, 40), {})
    if "earlier use" in fault:
        how["epochs"] = (2,)  # in the first use it waits as a right one does, and so long
    try:
        error = run(with_fault(tmp_path, module, right, wrong), *shape, False, **how)
    except AssertionError:
        return
    assert error > 3e-2


def test_a_sender_that_tells_too_early_is_noticed():
    assert gathered(overlapped_gemm, 7, 8, 16, False, patience_s=10.0, flag_first=True) > 3e-2


def test_the_kernels_really_run(monkeypatch):
    for module, name in (
        (overlapped_gemm, "_all_gather_gemm_kernel"),
        (overlapped_gemm, "_gemm_reduce_scatter_kernel"),
    ):
        monkeypatch.setattr(module, name, None)
    x, weight, flags = (
        torch.zeros(1, 8, 8).bfloat16(),
        torch.zeros(8, 8).bfloat16(),
        torch.ones(1, dtype=torch.int32),
    )
    with pytest.raises(TypeError, match="NoneType"):
        overlapped_gemm.all_gather_gemm(x, weight, arrivals(flags, 1), 0)
    with pytest.raises(TypeError, match="NoneType"):
        overlapped_gemm.gemm_reduce_scatter(
            x, weight, overlapped_gemm.PeerBuffers([x[0]], [flags], flags, flags, flags), 1, 0
        )
