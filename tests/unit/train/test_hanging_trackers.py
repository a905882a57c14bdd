"""A tracker that hangs holds up neither the training nor its end."""

import os
import subprocess
import sys
import threading

from megatron5d.train.monitoring import writers as metrics
from megatron5d.train.monitoring.writers import InBackground, Writers


def test_wandb_whose_process_hangs_holds_up_neither_the_training_nor_its_end(tmp_path):
    program = f"""
import os, signal, subprocess
from megatron5d.config.schema import Config, LogConfig
from megatron5d.train.monitoring.trackers import Wandb
from megatron5d.train.monitoring.writers import InBackground, Writers
writers = Writers(lambda text: print(text, flush=True))
wandb = Wandb(Config(log=LogConfig(dir={str(tmp_path)!r})), "offline", None, {{}})
writers.add("log.wandb", InBackground(wandb, close_s=2.0))
writers.write({{"step": 1}})
mine = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True).stdout
(core,) = [int(line.split()[0]) for line in mine.splitlines() if "wandb" in line]
os.kill(core, signal.SIGSTOP)
for step in range(2, 200):
    writers.write({{"step": step, "text": "x" * 20000}})
print("trained")
writers.close(0)
"""
    own = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=own
    )
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    first, second = ended.stdout.splitlines()
    assert (
        first == "trained"
        and second == "WARNING: log.wandb is incomplete: TimeoutError: it did not end within 2 s"
    )


def test_a_tracker_that_hangs_is_named_once(capsys):
    class Hanging:
        released = threading.Event()

        def write(self, record):
            self.released.wait()

        def abandon(self):
            self.released.set()

    said = []
    writers = Writers(said.append)
    writers.add("log.x", InBackground(Hanging()))
    for step in range(metrics.MAX_QUEUED + 9):
        writers.write({"step": step})
    assert (
        len(said) == 1
        and f"it hangs, with {metrics.MAX_QUEUED} records" in said[0]
        and Hanging.released.is_set()
    )
