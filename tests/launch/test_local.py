"""launch/local.sh and its fork launcher: exit codes, who failed first, signals, nothing left
running."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from forks import Fork
from torch.distributed import TCPStore

import pretrain

ROOT = Path(__file__).resolve().parents[2]
TOY = """
import os, signal, sys, time
import torch, torch.distributed as dist
from megatron5d.topology.process import start_process, stop_process

def main(argv):
    me = start_process(60.0)
    x = torch.tensor(float(me.rank))
    dist.all_reduce(x)
    out, what = argv
    with open(f"{out}/rank{me.rank}", "w") as f:
        f.write(f"{os.getpid()} {x.item():g}")
    if what == "refuse":
        return 2
    if me.rank == 1 and what == "raise":
        raise ValueError("the cause")
    if me.rank == 1 and what == "tell":
        raise SystemExit("all that there is to say")
    if me.rank == 2 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("raise", "tell", "die"):
        dist.barrier()
    if what == "hang" and me.rank == 1:
        raise ValueError("the cause")
    if what == "hang":
        time.sleep(600)
    if what == "wait":
        got = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: got.append(number))
        open(f"{out}/ready{me.rank}", "w").close()
        while not got:
            time.sleep(0.05)
        time.sleep(0.3 * me.rank)
        print(f"rank {me.rank} saved on {signal.Signals(got[0]).name}", flush=True)
        return 75
    stop_process()
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def environment_of(folder):
    """Makes the launcher run the toy program with this interpreter."""
    (folder / "toy.py").write_text(TOY)
    return os.environ | {
        "PYTHON": sys.executable,
        "PROGRAM": str(folder / "toy.py"),
        "PYTHONPATH": str(ROOT),
    }


class Launch:
    """A running launcher with the toy program, in its own session."""

    ranks = 3

    def __init__(self, folder, what, options=()):
        self.folder = folder
        environment = environment_of(folder) | {"CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            ["bash", "launch/local.sh", str(self.ranks), *options, str(folder), what],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def send(self, number):
        os.kill(self.process.pid, number)

    def end(self, timeout=200):
        """(exit code, output); the launcher and its ranks are gone afterwards."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.pids():
            assert not is_running(pid)
        return self.process.returncode, output

    def pids(self):
        return [int(p.read_text().split()[0]) for p in self.folder.glob("rank*")]

    def wait_until_ready(self):
        deadline = time.monotonic() + 150
        while len(list(self.folder.glob("ready*"))) < self.ranks:
            assert time.monotonic() < deadline
            assert (
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            )
            time.sleep(0.05)


class Forked(Launch):
    """The same launcher in a fork of this process: without the seconds of a core that its imports
    take."""

    def __init__(self, folder, what):
        import torch.distributed.checkpoint  # noqa: F401 - which every launcher would import

        self.folder = folder
        environment = environment_of(folder) | {"OMP_NUM_THREADS": "1"}
        arguments = ["--program", environment["PROGRAM"], str(self.ranks), str(folder), what]

        def run():
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv, tempfile.tempdir = ["fork.py", *arguments], None
            sys.stderr = sys.stdout
            os.dup2(1, 2)
            runpy.run_path("launch/fork.py", run_name="__main__")

        self.process = Fork(run, ROOT, environment)

    def end(self):
        try:
            done = self.process.wait()
        except BaseException:  # the test's time is over
            os.kill(self.process.pid, signal.SIGKILL)
            raise
        for pid in self.pids():
            assert not is_running(pid)
        return done.returncode, done.stdout


def is_running(pid):
    """A killed process takes a moment to go."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_all_ranks_run_and_meet(tmp_path):
    code, output = Launch(tmp_path, "finish").end()
    assert code == 0, output
    assert [(tmp_path / f"rank{r}").read_text().split()[1] for r in range(3)] == ["3", "3", "3"]


def test_refused_configuration_is_exit_code_2(tmp_path):
    code, output = Forked(tmp_path, "refuse").end()
    assert code == 2
    assert "failed first" not in output


def test_the_raising_rank_is_told_with_its_traceback_and_nobody_elses(tmp_path):
    code, output = Forked(tmp_path, "raise").end()
    assert code == 1
    assert "ValueError: the cause" in output
    assert "Connection closed" not in output
    assert "rank 1 failed first (exit code 1)" in output.splitlines()[-1]


def test_a_rank_that_says_why_it_ends_is_quoted_without_calls(tmp_path):
    code, output = Forked(tmp_path, "tell").end()
    assert code == 1
    assert "all that there is to say\nlaunch: rank 1 failed first (exit code 1)" in output
    assert "Traceback" not in output


def test_a_killed_rank_takes_the_others_with_it(tmp_path):
    code, output = Forked(tmp_path, "die").end()
    assert code == 128 + signal.SIGKILL
    assert (
        "rank 2 failed first (killed by SIGKILL: by somebody, or by the kernel"
        in output.splitlines()[-1]
    )


def test_ranks_that_notice_nothing_are_ended_too(tmp_path):
    start = time.monotonic()
    code, output = Forked(tmp_path, "hang").end()
    assert code == 1
    assert "rank 1 failed first" in output
    assert time.monotonic() - start < 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_75_comes_back(tmp_path, number):
    launch = Forked(tmp_path, "wait")
    launch.wait_until_ready()
    launch.send(number)
    code, output = launch.end()
    assert code == 75
    assert sorted(output.splitlines()) == [f"rank {r} saved on {number.name}" for r in range(3)]


def test_ctrl_c_before_there_are_ranks_is_told_without_a_call_stack(tmp_path):
    program = tmp_path / "slow.py"
    program.write_text(
        f"import time\nopen({str(tmp_path / 'here')!r}, 'w').close()\ntime.sleep(600)"
    )
    launched = subprocess.Popen(
        [sys.executable, "launch/fork.py", "--program", str(program), "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # shells ignore it for what they start with &
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "here").exists():
        assert launched.poll() is None
        time.sleep(0.05)
    launched.send_signal(signal.SIGINT)
    _, error = launched.communicate(timeout=60)
    assert (launched.returncode, error) == (
        130,
        "launch: ended by SIGINT before it has started any rank\n",
    )


@pytest.mark.parametrize(
    ("code", "received", "said"),
    [
        (
            -signal.SIGUSR1,
            [signal.SIGUSR1],
            "ended by SIGUSR1; what was done since the last checkpoint is lost",
        ),
        (
            130,
            [signal.SIGINT, signal.SIGINT],
            "ended by SIGINT; what was done since the last checkpoint is lost",
        ),
        (
            -signal.SIGBUS,
            [],
            "rank 1 failed first (killed by SIGBUS: a file that it read has shrunk, its disk has failed, "
            "or /dev/shm is full)",
        ),
        (-signal.SIGTERM, [], "rank 1 failed first (killed by SIGTERM)"),
        (1, [signal.SIGTERM], "rank 1 failed first (exit code 1)"),
    ],
)
def test_ranks_that_obeyed_a_signal_have_not_failed(tmp_path, capsys, code, received, said):
    """Such as SIGINT before the loop looks at signals."""
    supervisor = runpy.run_path(str(ROOT / "launch" / "fork.py"))["Supervisor"]({}, tmp_path)
    supervisor.signals = received
    supervisor.note(1, code)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert supervisor.verdict() == (code if code > 0 else 128 - code)
    assert capsys.readouterr().err == f"launch: {said}; all ranks are stopped\n"


def test_a_run_that_dies_of_a_signal_says_where():
    """Also under SLURM and torchrun, which tell the signal alone."""
    asked = "import faulthandler, runpy, sys; sys.argv = ['pretrain.py', '--help']\ntry: runpy.run_path('pretrain.py', "
    asked += "run_name='__main__')\nexcept SystemExit: sys.exit(faulthandler.is_enabled())"
    assert (
        subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True).returncode == 1
    )


def test_a_signal_among_the_imports_asks_for_another_start():
    asked = "import os, runpy, signal, sys\nclass Struck:\n  def find_spec(self, name, *_):\n    if name == 'torch': "
    asked += "os.kill(os.getpid(), signal.SIGUSR1)\nsys.meta_path.insert(0, Struck())\nsys.argv = ['pretrain.py']\n"
    asked += "runpy.run_path('pretrain.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "ended by SIGUSR1: no step was under way\n")


def test_a_signal_to_a_rank_that_waits_for_the_others_asks_for_another_start(monkeypatch):
    """It waits inside of torch, where no Python handler is called, for a rank 0 that has obeyed
    already."""

    def waits(*_, **__):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        TCPStore("127.0.0.1", 9, None, False, timedelta(seconds=20), wait_for_workers=False)

    monkeypatch.setattr(pretrain, "_load", waits)
    if (rank := os.fork()) == 0:
        try:
            pretrain.main([])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 75


def test_the_folder_of_a_killed_launcher_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    left = lambda: list(tmp_path.glob("megatron5d_launch_*"))  # noqa: E731
    first = Forked(tmp_path, "wait")
    first.wait_until_ready()
    first.send(signal.SIGKILL)
    first.end()
    (killed,) = left()
    os.utime(killed / "lock", (0, 0))
    for name in tmp_path.glob("ready*"):
        name.unlink()
    second = Forked(tmp_path, "wait")
    second.wait_until_ready()
    # that of the second is in use
    assert Forked(tmp_path, "finish").end()[0] == 0 and len(left()) == 1
    second.send(signal.SIGKILL)
    second.end()


def test_ranks_die_with_a_killed_launcher(tmp_path):
    launch = Forked(tmp_path, "wait")
    launch.wait_until_ready()
    launch.send(signal.SIGKILL)
    assert launch.end()[0] == -signal.SIGKILL


def test_fresh_interpreters_as_gpus_need_them(tmp_path):
    environment = environment_of(tmp_path)
    command = [
        sys.executable,
        "launch/fork.py",
        "--spawn",
        "--program",
        environment["PROGRAM"],
        "2",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "finish"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank1").read_text().split()[1] == "1"


def test_torchrun_passes_usr1_on(tmp_path):
    launch = Launch(tmp_path, "wait", options=["--torchrun"])
    launch.wait_until_ready()
    launch.send(signal.SIGUSR1)
    _, output = launch.end()
    assert (tmp_path / "rank2").read_text().split()[1] == "3"
    assert all(f"rank {r} saved on SIGUSR1" in output for r in range(3)), output


def test_without_a_number_of_ranks_it_explains_itself():
    done = subprocess.run(
        ["bash", "launch/local.sh", "a=1"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "launch/local.sh 16 experiment=quickstart" in done.stderr


def test_more_ranks_than_gpus_run_on_cpus(tmp_path):
    environment = environment_of(tmp_path) | {"CUDA_VISIBLE_DEVICES": "0"}
    command = ["bash", "launch/local.sh", "2", str(tmp_path), "finish"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks but 1 GPU(s): running on CPUs" in done.stderr


def test_hidden_gpus_are_none(tmp_path):
    environment = environment_of(tmp_path) | {"CUDA_VISIBLE_DEVICES": "-1"}
    command = ["bash", "launch/local.sh", "2", str(tmp_path), "finish"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "GPU" not in done.stderr, done.stderr


def test_an_interpreter_that_is_not_there_is_not_replaced_by_another():
    environment = os.environ | {"PYTHON": "/nowhere/python"}
    command = ["bash", "launch/local.sh", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "PYTHON=/nowhere/python is no interpreter" in done.stderr


ORPHAN = """
import os, time

def main(argv):
    if os.environ["RANK"] == "0":
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                os._exit(3)  # a failure of nobody's
            time.sleep(0.2)
            os._exit(0)
        os.waitpid(middle, 0)
    time.sleep(1)
    return 0
"""
FIRST_PROCESS = """
import ctypes, runpy, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans below become its children
sys.argv = ["fork.py", "--program", sys.argv[1], "2"]
runpy.run_path("launch/fork.py", run_name="__main__")
"""


def test_as_the_first_process_of_a_container_it_passes_over_the_orphans_of_ranks(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)

    def first_process():
        sys.argv = ["-c", str(tmp_path / "orphan.py")]
        exec(FIRST_PROCESS, {})

    done = Fork(first_process, ROOT).wait()
    assert (done.returncode, done.stderr) == (0, "")


def test_a_quickstart_that_can_make_no_folder_ends(tmp_path):
    for name in ("launch", "runs", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").touch()
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / "runs" / "quickstart").symlink_to("/proc/self")  # where nobody can make one
    command = ["bash", str(tmp_path / "launch" / "quickstart.sh")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.startswith(
        "quickstart: mkdir: cannot create directory"
    )
