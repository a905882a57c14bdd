"""Waits on the device's clock: a stream's events, read once the stream has passed them."""

import pytest
import torch

from megatron5d.comm.ledger import Exposure, Ledger
from megatron5d.topology.axis import Axis


class Stream:
    """A device whose clock stands at `now` and whose work up to `done_until` is done."""

    now, done_until, num_events, num_records = 0.0, 0.0, 0, 0


@pytest.fixture
def stream(monkeypatch):
    device = Stream()

    class Event:
        def __init__(self, enable_timing):
            device.num_events += 1

        def record(self):
            self.time = device.now
            device.num_records += 1

        def query(self):
            return self.time <= device.done_until

        def elapsed_time(self, end):
            assert self.query() and end.query()
            return (end.time - self.time) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return device


def spend(stream, seconds):
    def act():
        stream.now += seconds
        return seconds

    return act


def test_unfinished_work_counts_in_the_next_call(stream):
    exposure = Exposure("cuda")
    for seconds in (1.0, 2.0, 4.0):
        assert exposure.time_call(spend(stream, seconds)) == seconds
    stream.done_until = 3.0
    assert exposure.take() == 3.0
    assert exposure.take() == 0.0
    stream.done_until = 7.0
    assert exposure.take() == 4.0


def test_events_are_reused_and_recorded_twice_per_call(stream):
    exposure = Exposure("cuda")
    for _ in range(3):
        for _ in range(5):
            exposure.time_call(spend(stream, 1.0))
        stream.done_until = stream.now
        exposure.take()
    exposure.time_call(spend(stream, 1.0))
    exposure.clear()
    assert (stream.num_events, stream.num_records) == (2 * 5, 2 * 16)
    assert exposure.take() == 0.0
    for _ in range(5):
        exposure.time_call(spend(stream, 1.0))
    assert stream.num_events == 2 * 5, "events dropped by `clear` are reused, too"


def test_a_ledger_times_the_waits_of_each_axis_on_request(stream):
    ledger = Ledger("cuda")
    tp, dp = (Axis(name, (0, 1), 0, None, ledger) for name in ("tp", "dp"))
    tp.wait(spend(stream, 1.0))
    assert stream.num_records == 0
    ledger.timing = True
    for axis, seconds in ((tp, 2.0), (dp, 4.0), (tp, 8.0)):
        axis.wait(spend(stream, seconds))
    stream.done_until = stream.now
    assert ledger.take_waits() == {"tp": 10.0, "dp": 4.0}
