"""Buffers in each other's memory: ranks that are slow at different times, buffers used again, and
faults that show."""

import dataclasses
import errno
import os
import threading
import time

import pytest
import torch
from ranks import RankFailure, run_ranks

from megatron5d.comm import symmetric_memory as segments
from megatron5d.comm import symmetric_memory as symmetric
from megatron5d.comm.ledger import Ledger
from megatron5d.comm.symmetric_memory import BufferExchange, SymmetricBuffers
from megatron5d.kernels.symm_mem_flags import Patience
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

CPU = torch.device("cpu")


def content(source: int, epoch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(5 * width, dtype=torch.float64).view(5, width)
    return values + 1000 * epoch + 100 * source, (values.float() * 0 + epoch * 10 + source)[:, :1]


def converse(rank: int, world: int, num_exchanges: int, slow: int, pause_s: float) -> int:
    """Exchanges with a rank that pauses before it sends in odd exchanges and before it reads in
    even ones."""
    ledger = Ledger()
    ledger.timing = True
    buffer = SymmetricBuffers(
        build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"], CPU, 120.0
    )
    for epoch in range(1, num_exchanges + 1):
        # buffers that grow in the middle, and serve what is smaller, too
        width = 7 if 5 <= epoch < 8 else 3
        mine = content(rank, epoch, width)
        exchange = buffer.exchange([(part.shape, part.dtype) for part in mine])
        if rank == slow and epoch % 2:
            time.sleep(pause_s)
        exchange.send_to_all(mine)
        for step in range(world):
            source = (rank - step) % world
            if rank == slow and not epoch % 2:
                time.sleep(pause_s)
            for got, want in zip(exchange.wait(source), content(source, epoch, width), strict=True):
                assert torch.equal(got, want), (
                    f"exchange {epoch}: rank {rank} read {got[0, 0]} from rank {source}"
                )
    assert ledger.take_waits()["tp"] > 0, "waits for a buffer were not timed"
    return buffer.epoch


def test_no_file_is_left_behind(monkeypatch):
    def on_rank(rank, world, make=segments.tempfile.mkstemp):
        made = []
        monkeypatch.setattr(
            segments.tempfile, "mkstemp", lambda **where: made.append(make(**where)) or made[-1]
        )
        converse(rank, world, 1, 0, 0.0)
        return [os.path.exists(name) for _, name in made]

    assert run_ranks(on_rank, 2) == [[False, False]] * 2  # flags alone, then buffers


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_read_what_was_sent_in_this_exchange(slow):
    assert run_ranks(converse, 3, 9, slow, 0.02) == [5] * 3  # exchanges since the buffers grew


def told_before_sent(self, tensors, holder):
    flag = self.signals()[holder]
    symmetric.raise_flags([flag], flag, self.epoch)
    time.sleep(0.05)
    self._write(tensors, holder)


def waits_for_any_exchange(arrivals, source, true=symmetric.wait_flag):
    true(dataclasses.replace(arrivals, epoch=1), source)


def has_one_set_of_buffers(self, buffer, layout, true=BufferExchange.__init__):
    true(self, buffer, layout)
    self._slot, self.arrivals = (
        0,
        dataclasses.replace(self.arrivals, flags=buffer.flags(buffer.axis.rank, 0)),
    )


FAULTS = {
    "told before sent": (BufferExchange, "_send", told_before_sent),
    "a flag of an earlier exchange counts": (symmetric, "wait_flag", waits_for_any_exchange),
    "one set of buffers": (BufferExchange, "__init__", has_one_set_of_buffers),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(RankFailure, match=r"exchange \d: rank \d read"):
        run_ranks(converse, 2, 4, 1, 0.2)


NAMED = (
    r"rank 0 \(tp\[0/2\]\) has waited 0.1 s for chunk 1 of exchange 1 over tp, which rank 1 \(tp\[1/2\]\) has not sent"
    r".*tp_overlap=fused waits for half of parallel.timeout_s = 0.2"
)


def test_a_rank_that_never_sends_is_named():
    def quiet(rank, world):
        tp = build_mesh(resolve(world, tp=world), rank)["tp"]
        buffer = SymmetricBuffers(tp, CPU, 0.2)
        exchange = buffer.exchange([(torch.Size([2]), torch.float32)])
        assert exchange.arrivals.patience.limit_s == 0.1, (
            "of the whole, torch's collectives would give up first"
        )
        if rank == 0:
            exchange.send_to_all([torch.zeros(2)])
            with pytest.raises(TimeoutError, match=NAMED):
                exchange.wait(1)
            buffer.patience.note.fill_((1 << 32) + 2)  # as a kernel says the same
            with pytest.raises(TimeoutError, match=NAMED):
                buffer.exchange([(torch.Size([2]), torch.float32)])

    run_ranks(quiet, 2)


def test_a_host_that_is_stuck_behind_its_device_ends(monkeypatch, capfd):
    """The thread that listens ends the process where the main one does not come by."""
    monkeypatch.setattr(symmetric, "_LISTEN_S", 0.02)
    monkeypatch.setattr(symmetric, "_GRACE_S", 0.1)
    child = os.fork()
    if child == 0:
        patience = Patience(1.0, CPU)
        threading.Thread(target=symmetric.end_if_stuck, args=(patience,), daemon=True).start()
        time.sleep(0.1)
        patience.note.fill_((5 << 32) + 1)
        time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "TimeoutError: flag 0 has not reached 5" in capfd.readouterr().err


def test_ranks_on_several_hosts_are_refused_everywhere(monkeypatch):
    def elsewhere(rank, world):
        monkeypatch.setattr(segments.socket, "gethostname", lambda: f"node{rank}")
        tp = build_mesh(resolve(world, tp=world), rank)["tp"]
        with pytest.raises(
            ValueError, match=r"2 ranks of tp.*node0, node1.*parallel.tp_overlap=chunked"
        ):
            SymmetricBuffers(tp, CPU, 120.0)

    run_ranks(elsewhere, 2)


def test_shared_memory_that_is_full_on_one_rank_is_refused_everywhere(monkeypatch):
    """The others do not wait for the rank that has no room."""

    def full(handle, offset, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_rank(rank, world):
        if rank == 1:
            monkeypatch.setattr(segments.os, "posix_fallocate", full)
        tp = build_mesh(resolve(world, tp=world), rank)["tp"]
        with pytest.raises(
            ValueError, match=r"gives no 256 bytes a rank \(No space.*parallel.tp_overlap=chunked"
        ):
            SymmetricBuffers(tp, CPU, 120.0)

    run_ranks(on_rank, 2)


def test_memory_is_counted_without_memory():
    buffer = SymmetricBuffers(Axis("tp", (0, 1), 0), torch.device("meta"), 120.0)
    exchange = buffer.exchange([(torch.Size([100, 4]), torch.bfloat16)])
    exchange.send_to_all([torch.empty(100, 4, dtype=torch.bfloat16, device="meta")])
    assert exchange.wait(1)[0].shape == (100, 4)
    assert (
        buffer.buffer_bytes == 1024
        and exchange.receive_buffer(0).untyped_storage().nbytes() == 256 + 2 * 2 * 1024
    )
