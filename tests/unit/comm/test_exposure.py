"""What is waited for, on the device's clock: a stream's events, which are read when it has come
by."""

import pytest
import torch

from megatron5d.comm.ledger import Exposure, Ledger
from megatron5d.topology.axis import Axis


class Stream:
    """A device whose clock stands at `now`, and which has done what lies before `reached`."""

    now, reached, made, recorded = 0.0, 0.0, 0, 0


@pytest.fixture
def stream(monkeypatch):
    device = Stream()

    class Event:
        def __init__(self, enable_timing):
            device.made += 1

        def record(self):
            self.at = device.now
            device.recorded += 1

        def query(self):
            return self.at <= device.reached

        def elapsed_time(self, end):
            assert self.query() and end.query()
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return device


def spend(stream, seconds):
    def act():
        stream.now += seconds
        return seconds

    return act


def test_what_the_stream_has_not_done_yet_counts_in_the_next_call(stream):
    exposure = Exposure("cuda")
    assert [exposure.time_call(spend(stream, seconds)) for seconds in (1.0, 2.0, 4.0)] == [
        1.0,
        2.0,
        4.0,
    ]
    stream.reached = 3.0
    assert exposure.take() == 3.0 and exposure.take() == 0.0
    stream.reached = 7.0
    assert exposure.take() == 4.0


def test_events_are_made_once_and_recorded_twice_a_wait(stream):
    exposure = Exposure("cuda")
    for _ in range(3):
        for _ in range(5):
            exposure.time_call(spend(stream, 1.0))
        stream.reached = stream.now
        exposure.take()
    exposure.time_call(spend(stream, 1.0))
    exposure.clear()
    assert (stream.made, stream.recorded) == (2 * 5, 2 * 16) and exposure.take() == 0.0
    for _ in range(5):
        exposure.time_call(spend(stream, 1.0))
    assert stream.made == 2 * 5, "events that were forgotten are used again, too"


def test_a_ledger_times_waits_axis_by_axis_and_only_when_it_is_asked(stream):
    ledger = Ledger("cuda")
    tp, dp = (Axis(name, (0, 1), 0, None, ledger) for name in ("tp", "dp"))
    tp.wait(spend(stream, 1.0))
    assert stream.recorded == 0
    ledger.timing = True
    for axis, seconds in ((tp, 2.0), (dp, 4.0), (tp, 8.0)):
        axis.wait(spend(stream, seconds))
    stream.reached = stream.now
    assert ledger.take_waits() == {"tp": 10.0, "dp": 4.0}
