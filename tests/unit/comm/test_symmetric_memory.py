"""Buffers in each other's memory: ranks that are slow at different times, buffers that are reused,
and faults that the test sees."""

import dataclasses
import errno
import os
import threading
import time

import pytest
import torch
from ranks import RankFailure, run_ranks

from megatron5d.comm import symmetric_memory
from megatron5d.comm.ledger import Ledger
from megatron5d.comm.symmetric_memory import BufferExchange, SymmetricBuffers
from megatron5d.kernels.symm_mem_flags import WaitTimeout
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

CPU = torch.device("cpu")


def buffers_of(rank, world, timeout_s=120.0, recorder=None):
    mesh = build_mesh(resolve(world, tp=world), rank, recorder=recorder)
    return SymmetricBuffers(mesh["tp"], CPU, timeout_s)


def content(source: int, epoch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(5 * width, dtype=torch.float64).view(5, width)
    return values + 1000 * epoch + 100 * source, torch.full((5, 1), float(epoch * 10 + source))


def converse(rank: int, world: int, num_exchanges: int, slow_rank: int, pause_s: float) -> int:
    """Makes exchanges with a rank that pauses before it sends in odd exchanges and before it reads
    in even ones; returns the number of exchanges since the buffers grew."""
    ledger = Ledger()
    ledger.timing = True
    buffers = buffers_of(rank, world, recorder=ledger)
    for epoch in range(1, num_exchanges + 1):
        # buffers that grow in the middle also serve what is smaller
        width = 7 if 5 <= epoch < 8 else 3
        tensors = content(rank, epoch, width)
        exchange = buffers.exchange([(tensor.shape, tensor.dtype) for tensor in tensors])
        if rank == slow_rank and epoch % 2:
            time.sleep(pause_s)
        exchange.send_to_all(tensors)
        for step in range(world):
            source = (rank - step) % world
            if rank == slow_rank and not epoch % 2:
                time.sleep(pause_s)
            for received, sent in zip(exchange.wait(source), content(source, epoch, width)):
                assert torch.equal(received, sent), (
                    f"exchange {epoch}: rank {rank} read {received[0, 0]} from rank {source}"
                )
    assert ledger.take_waits()["tp"] > 0, "waits for a buffer were not timed"
    return buffers.epoch


def test_no_file_remains(monkeypatch):
    def on_rank(rank, world, mkstemp=symmetric_memory.tempfile.mkstemp):
        files = []
        monkeypatch.setattr(
            symmetric_memory.tempfile,
            "mkstemp",
            lambda **options: files.append(mkstemp(**options)) or files[-1],
        )
        converse(rank, world, 1, 0, 0.0)
        return [os.path.exists(name) for _, name in files]

    assert run_ranks(on_rank, 2) == [[False, False]] * 2  # flags alone, then buffers


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_ranks_read_what_was_sent_in_this_exchange(slow_rank):
    assert run_ranks(converse, 3, 9, slow_rank, 0.02) == [5] * 3


def signals_before_it_writes(self, tensors, destination):
    flag = self.signals()[destination]
    symmetric_memory.raise_flags([flag], flag, self.epoch)
    time.sleep(0.05)
    self._write(tensors, destination)


def waits_for_any_exchange(arrivals, source, wait_flag=symmetric_memory.wait_flag):
    wait_flag(dataclasses.replace(arrivals, epoch=1), source)


def has_one_set_of_buffers(self, buffers, layout, init=BufferExchange.__init__):
    init(self, buffers, layout)
    flags = buffers.flags(buffers.axis.rank, 0)
    self._parity, self.arrivals = 0, dataclasses.replace(self.arrivals, flags=flags)


@pytest.mark.parametrize(
    "fault",
    [
        (BufferExchange, "_send", signals_before_it_writes),
        (symmetric_memory, "wait_flag", waits_for_any_exchange),
        (BufferExchange, "__init__", has_one_set_of_buffers),
    ],
    ids=lambda fault: fault[-1].__name__,
)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(*fault)
    with pytest.raises(RankFailure, match=r"exchange \d: rank \d read"):
        run_ranks(converse, 2, 4, 1, 0.2)


TIMEOUT = (
    r"rank 0 \(tp\[0/2\]\) has waited 0.1 s for chunk 1 of exchange 1 over tp, which rank 1 "
    r"\(tp\[1/2\]\) has not sent.*tp_overlap=fused waits for half of parallel.timeout_s = 0.2"
)


def test_a_rank_that_never_sends_is_named():
    layout = [(torch.Size([2]), torch.float32)]

    def on_rank(rank, world):
        buffers = buffers_of(rank, world, timeout_s=0.2)
        exchange = buffers.exchange(layout)
        assert buffers.timeout.limit_s == 0.1, "torch's collectives would time out first"
        if rank == 0:
            exchange.send_to_all([torch.zeros(2)])
            with pytest.raises(TimeoutError, match=TIMEOUT):
                exchange.wait(1)
            buffers.timeout.report.fill_((1 << 32) + 2)  # as a kernel reports the same
            with pytest.raises(TimeoutError, match=TIMEOUT):
                buffers.exchange(layout)

    run_ranks(on_rank, 2)


def test_a_host_that_is_stuck_behind_its_device_ends(monkeypatch, capfd):
    """A thread ends the process if the main thread does not raise the error."""
    monkeypatch.setattr(symmetric_memory, "_POLL_S", 0.02)
    monkeypatch.setattr(symmetric_memory, "_GRACE_S", 0.1)
    child = os.fork()
    if child == 0:
        timeout = WaitTimeout(1.0, CPU)
        threading.Thread(target=symmetric_memory.end_if_stuck, args=(timeout,), daemon=True).start()
        time.sleep(0.1)
        timeout.report.fill_((5 << 32) + 1)
        time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "TimeoutError: flag 0 has not reached 5" in capfd.readouterr().err


def on_several_hosts(rank, monkeypatch):
    monkeypatch.setattr(symmetric_memory.socket, "gethostname", lambda: f"node{rank}")
    monkeypatch.setattr(symmetric_memory.Path, "exists", lambda path: False)


def with_full_memory_on_rank_1(rank, monkeypatch):
    def full(handle, offset, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        monkeypatch.setattr(symmetric_memory.os, "posix_fallocate", full)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (on_several_hosts, "2 ranks of tp.* of node0 is not visible on node1"),
        (with_full_memory_on_rank_1, r"lacks 256 bytes per rank \(No space"),
    ],
)
def test_unreachable_memory_is_refused_by_every_rank(patch, reason, monkeypatch):
    def on_rank(rank, world):
        patch(rank, monkeypatch)
        with pytest.raises(ValueError, match=f"{reason}.*parallel.tp_overlap=chunked"):
            buffers_of(rank, world)

    run_ranks(on_rank, 2)


def test_meta_buffers_are_counted_without_memory():
    buffers = SymmetricBuffers(Axis("tp", (0, 1), 0), torch.device("meta"), 120.0)
    exchange = buffers.exchange([(torch.Size([100, 4]), torch.bfloat16)])
    exchange.send_to_all([torch.empty(100, 4, dtype=torch.bfloat16, device="meta")])
    assert exchange.wait(1)[0].shape == (100, 4)
    assert buffers.buffer_bytes == 1024
    assert exchange.receive_buffer(0).untyped_storage().nbytes() == 256 + 2 * 2 * 1024
