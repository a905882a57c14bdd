"""launch/local.sh and its fork launcher: exit codes, the rank that failed first, signals, and no
process that outlives the launch."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed.checkpoint  # noqa: F401 - imported by every launcher that is forked here
from forks import Fork
from torch.distributed import TCPStore

import pretrain

ROOT = Path(__file__).resolve().parents[2]
TOY = """
import os, signal, sys, time
import torch, torch.distributed as dist
from megatron5d.topology.process import start_process, stop_process

def main(argv):
    rank = start_process(60.0).rank
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    out, action = argv
    with open(f"{out}/rank{rank}", "w") as f:
        f.write(f"{os.getpid()} {x.item():g}")
    if action == "refuse":
        return 2
    if rank == 1 and action in ("raise", "hang"):
        raise ValueError("the cause")
    if rank == 1 and action == "exit":
        raise SystemExit("the whole message")
    if rank == 2 and action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("raise", "exit", "die"):
        dist.barrier()
    if action == "hang":
        time.sleep(600)
    if action == "wait":
        received = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: received.append(number))
        open(f"{out}/ready{rank}", "w").close()
        while not received:
            time.sleep(0.05)
        time.sleep(0.3 * rank)
        print(f"rank {rank} saved on {signal.Signals(received[0]).name}", flush=True)
        return 75
    stop_process()
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def environment_of(folder):
    """Variables that make the launcher run the toy program with this interpreter."""
    (folder / "toy.py").write_text(TOY)
    program = {"PYTHON": sys.executable, "PROGRAM": str(folder / "toy.py")}
    return os.environ | program | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*command, timeout=200, **variables):
    env = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


class Launch:
    """A launcher that runs three ranks of the toy program, in a fork of this process: its imports
    would take seconds."""

    def __init__(self, folder, action):
        self.folder, environment = folder, environment_of(folder)
        arguments = ["--program", environment["PROGRAM"], "3", str(folder), action]

        def launch():
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["fork.py", *arguments]
            sys.stderr = sys.stdout
            os.dup2(1, 2)
            runpy.run_path("launch/fork.py", run_name="__main__")

        self.process = Fork(launch, ROOT, environment)

    def send(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        """(exit code, output); the launcher and its ranks have ended afterwards."""
        try:
            code, output = self._wait()
        except BaseException:  # the test's time is over
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        for file in self.folder.glob("rank*"):
            assert not is_running(int(file.read_text().split()[0]))
        return code, output

    def _wait(self):
        done = self.process.wait()
        return done.returncode, done.stdout

    def sums(self):
        return [(self.folder / f"rank{rank}").read_text().split()[1] for rank in range(3)]

    def wait_until_ready(self):
        deadline = time.monotonic() + 150
        while len(list(self.folder.glob("ready*"))) < 3:
            assert time.monotonic() < deadline
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            assert os.waitid(os.P_PID, self.process.pid, flags) is None
            time.sleep(0.05)


class ScriptLaunch(Launch):
    """launch/local.sh itself."""

    def __init__(self, folder, action, *options):
        self.folder = folder
        self.process = subprocess.Popen(
            ["bash", "launch/local.sh", "3", *options, str(folder), action],
            cwd=ROOT,
            env=environment_of(folder) | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _wait(self):
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output


def is_running(pid):
    """Whether a process still runs after five seconds: a killed one takes a moment to end."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_all_ranks_run_and_meet(tmp_path):
    launch = ScriptLaunch(tmp_path, "finish")
    code, output = launch.end()
    assert code == 0, output
    assert launch.sums() == ["3", "3", "3"]


def test_a_refused_configuration_is_exit_code_2(tmp_path):
    code, output = Launch(tmp_path, "refuse").end()
    assert code == 2
    assert "failed first" not in output


def test_the_raising_rank_alone_shows_its_traceback(tmp_path):
    code, output = Launch(tmp_path, "raise").end()
    assert code == 1
    assert "ValueError: the cause" in output
    assert "Connection closed" not in output
    assert "rank 1 failed first (exit code 1)" in output.splitlines()[-1]


def test_the_message_of_an_exit_is_printed_without_a_traceback(tmp_path):
    code, output = Launch(tmp_path, "exit").end()
    assert code == 1
    assert "the whole message\nlaunch: rank 1 failed first (exit code 1)" in output
    assert "Traceback" not in output


def test_a_killed_rank_ends_the_others(tmp_path):
    code, output = Launch(tmp_path, "die").end()
    assert code == 128 + signal.SIGKILL
    cause = "killed by SIGKILL: by a user, or by the kernel"
    assert f"rank 2 failed first ({cause}" in output.splitlines()[-1]


def test_ranks_that_do_not_notice_a_failure_are_ended(tmp_path):
    code, output = Launch(tmp_path, "hang").end()
    assert code == 1
    assert "rank 1 failed first" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_gives_code_75(tmp_path, number):
    launch = Launch(tmp_path, "wait")
    launch.wait_until_ready()
    launch.send(number)
    code, output = launch.end()
    assert code == 75
    assert sorted(output.splitlines()) == [
        f"rank {rank} saved on {number.name}" for rank in range(3)
    ]


def test_ctrl_c_before_there_are_ranks_gives_one_line(tmp_path):
    program, started = tmp_path / "slow.py", tmp_path / "started"
    program.write_text(f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)")
    launcher = subprocess.Popen(
        [sys.executable, "launch/fork.py", "--program", str(program), "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # shells ignore it for what they start with &
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not started.exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    _, error = launcher.communicate(timeout=60)
    assert error == "launch: ended by SIGINT before it has started any rank\n"
    assert launcher.returncode == 130


@pytest.mark.parametrize(
    ("code", "received", "reason"),
    [
        (
            -signal.SIGUSR1,
            [signal.SIGUSR1],
            "ended by SIGUSR1; all steps since the last checkpoint are lost",
        ),
        (
            130,
            [signal.SIGINT, signal.SIGINT],
            "ended by SIGINT; all steps since the last checkpoint are lost",
        ),
        (
            -signal.SIGBUS,
            [],
            "rank 1 failed first (killed by SIGBUS: a file that it read has shrunk, its disk has "
            "failed, or /dev/shm is full)",
        ),
        (-signal.SIGTERM, [], "rank 1 failed first (killed by SIGTERM)"),
        (1, [signal.SIGTERM], "rank 1 failed first (exit code 1)"),
    ],
)
def test_ranks_that_end_on_a_signal_have_not_failed(tmp_path, capsys, code, received, reason):
    """Such as SIGINT before the loop reads signals."""
    supervisor = runpy.run_path(str(ROOT / "launch" / "fork.py"))["Supervisor"]({}, tmp_path)
    supervisor.signals = received
    supervisor.note(1, code)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert supervisor.verdict() == (code if code > 0 else 128 - code)
    assert capsys.readouterr().err == f"launch: {reason}; all ranks are stopped\n"


HELP = """
import faulthandler, runpy, sys
sys.argv = ["pretrain.py", "--help"]
try:
    runpy.run_path("pretrain.py", run_name="__main__")
except SystemExit:
    sys.exit(faulthandler.is_enabled())
"""
SIGNAL_AT_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Finder())
sys.argv = ["pretrain.py"]
runpy.run_path("pretrain.py", run_name="__main__")
"""


def test_a_run_that_dies_of_a_signal_prints_its_stack():
    """Also under SLURM and torchrun, which report the signal alone."""
    assert run(sys.executable, "-c", HELP).returncode == 1


def test_a_signal_during_the_imports_requests_another_start():
    done = run(sys.executable, "-c", SIGNAL_AT_IMPORT)
    assert (done.returncode, done.stderr) == (75, "ended by SIGUSR1: no step was in progress\n")


def test_a_signal_to_a_rank_that_waits_for_the_others_requests_another_start(monkeypatch):
    """It waits inside of torch, where Python calls no handler, for a rank 0 that has ended."""

    def wait(*_, **__):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        TCPStore("127.0.0.1", 9, None, False, timedelta(seconds=20), wait_for_workers=False)

    monkeypatch.setattr(pretrain, "_load", wait)
    if (rank := os.fork()) == 0:
        try:
            pretrain.main([])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 75


def test_a_killed_launcher_ends_its_ranks(tmp_path):
    launch = Launch(tmp_path, "wait")
    launch.wait_until_ready()
    launch.send(signal.SIGKILL)
    assert launch.end()[0] == -signal.SIGKILL


def test_new_interpreters_as_gpus_need_them(tmp_path):
    environment = environment_of(tmp_path)
    options = ("--spawn", "--program", environment["PROGRAM"], "2", str(tmp_path), "finish")
    done = run(sys.executable, "launch/fork.py", *options, **environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank1").read_text().split()[1] == "1"


def test_torchrun_forwards_usr1(tmp_path):
    launch = ScriptLaunch(tmp_path, "wait", "--torchrun")
    launch.wait_until_ready()
    launch.send(signal.SIGUSR1)
    _, output = launch.end()
    assert launch.sums() == ["3", "3", "3"]
    assert all(f"rank {rank} saved on SIGUSR1" in output for rank in range(3)), output


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["a=1"], {}, "launch/local.sh 16 experiment=quickstart"),
        (["1"], {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python is no executable interp"),
    ],
)
def test_wrong_arguments_of_the_script_are_exit_code_2(arguments, variables, message):
    done = run("bash", "launch/local.sh", *arguments, **variables)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("devices", "message"), [("0", "2 ranks but 1 GPU(s): running on CPUs"), ("-1", "")]
)
def test_ranks_without_a_visible_gpu_each_run_on_cpus(tmp_path, devices, message):
    environment = environment_of(tmp_path) | {"CUDA_VISIBLE_DEVICES": devices}
    done = run("bash", "launch/local.sh", "2", str(tmp_path), "finish", **environment)
    assert done.returncode == 0, done.stderr
    assert message in done.stderr
    assert ("GPU" in done.stderr) == bool(message)


ORPHAN = """
import os, time

def main(argv):
    if os.environ["RANK"] == "0":
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                os._exit(3)  # not a failure of a rank
            time.sleep(0.2)
            os._exit(0)
        os.waitpid(middle, 0)
    time.sleep(1)
    return 0
"""
FIRST_PROCESS = """
import ctypes, runpy, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans below become its children
runpy.run_path("launch/fork.py", run_name="__main__")
"""


def test_as_the_first_process_of_a_container_it_ignores_the_orphans_of_ranks(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)

    def first_process():
        sys.argv = ["fork.py", "--program", str(tmp_path / "orphan.py"), "2"]
        exec(FIRST_PROCESS, {})

    done = Fork(first_process, ROOT).wait()
    assert (done.returncode, done.stderr) == (0, "")


def test_a_quickstart_that_cannot_make_a_folder_ends(tmp_path):
    for name in ("launch", "runs", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").touch()
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / "runs" / "quickstart").symlink_to("/proc/self")  # where no folder can be made
    done = run("bash", str(tmp_path / "launch" / "quickstart.sh"), timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("quickstart: mkdir: cannot create directory")
