"""A signal that comes while one way of answering signals takes the place of another is not lost."""

import os
import signal

from megatron5d.train.signals import REQUEUE, EndOnSignals, StopFlag

NOTED, LOST, NOT_SENT = 3, 4, 5  # exit codes


def exit_code(number):
    """Of a process that enters and leaves both contexts, with a SIGTERM before its system call of
    this number."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code, num_calls = 1, 0

    def after_signal(function):
        def call(*args, **options):
            nonlocal num_calls
            if num_calls == number:
                os.kill(os.getpid(), signal.SIGTERM)
            num_calls += 1
            return function(*args, **options)

        return call

    try:
        signal.signal, signal.set_wakeup_fd = (
            after_signal(signal.signal),
            after_signal(signal.set_wakeup_fd),
        )
        with EndOnSignals():
            with StopFlag() as stop:
                pass
        code = NOTED if stop else LOST if num_calls > number else NOT_SENT
    finally:
        os._exit(code)


def test_no_signal_is_lost_between_two_answers():
    codes = []
    while (code := exit_code(len(codes))) != NOT_SENT:
        codes.append(code)
    assert len(codes) >= 14 and set(codes) <= {REQUEUE, NOTED, -signal.SIGTERM}, codes
