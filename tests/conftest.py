"""One thread for the whole suite, and the same numbers on every machine; tests marked `alone` have
it to themselves.

Paths, markers and the time limit of a test are in `.pytest.ini`.
"""

import copy
import ctypes
import dataclasses
import fcntl
import gc
import os
import pickle
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path

# before torch: a forked rank must not inherit a thread pool
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis")
)

# while modules are imported and tests collected nothing becomes garbage, and all of it would be
# looked at
gc.disable()
import pytest  # noqa: E402
import tiers  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
# the same examples on every machine
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
# another one gives every test other random tensors
SEED = int(os.environ.get("MEGATRON5D_SEED", "0"))
torch.manual_seed(SEED)  # of tensors made on import

SHORT_FIRST = 300  # tests that a worker runs before its first long one
LARGE_PAGE, MADV_COLLAPSE = 2 << 20, 25  # of Linux since 6.1
# ranks that stand know nothing of what these do
OF_THIS_PROCESS = {"monkeypatch", "capfd", "capsys", "caplog"}
# files that every worker has to lock
RUNNING, NEXT = Path(__file__), Path(__file__).parents[1] / ".pytest.ini"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with open(path) as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            # closing is not enough: what the test has forked has the file open too
            fcntl.flock(file, fcntl.LOCK_UN)


# around pytest-timeout's timer: waiting is no fault of the test's
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """No other worker of pytest-xdist runs a test beside one that is marked `timing`."""
    with ExitStack() as stack:
        # else there is one process; or it is a test's own, inside the lock
        if hasattr(item.config, "workerinput"):
            alone = item.get_closest_marker("timing") is not None
            with _locked(NEXT, fcntl.LOCK_EX):  # whoever waits to be alone is not overtaken
                stack.enter_context(_locked(RUNNING, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test's random tensors are its own, whatever ran before it, and a failure can be had
    again."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    # without a GPU torch would queue it for one, with the stack
    seed(SEED + zlib.crc32(item.nodeid.encode()))
    if pool := sys.modules.get("rank_pool"):
        patches = not OF_THIS_PROCESS.isdisjoint(item.fixturenames)
        pool.test_patches = patches or item.get_closest_marker("patches") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Those that must be alone come first: others wait for them once, and workers share what is
    left evenly.

    Each worker of pytest-xdist begins with as many neighbours in the list. Those that run for
    minutes are spread over the places where they begin, behind more short tests than the lonely
    ones leave others time for: each of these would wait for a long one.
    """
    items[:], left_out = tiers.split(items)
    config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("timing") is None)
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        long = [item for item in items if item.get_closest_marker("slow")]
        others = [item for item in items if not item.get_closest_marker("slow")]
        for n, item in enumerate(long):
            others.insert(n % workers * len(others) // workers + SHORT_FIRST + n // workers, item)
        items[:] = others


def _into_large_pages() -> None:
    """Moves this process's memory into pages of 2 MiB, where Linux can: a fork copies a table entry
    for each page.

    A forked rank that does nothing then takes 19 ms of a core instead of 31 (eight ranks, measured
    by rusage).
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError), open("/proc/self/maps") as regions:
        for line in regions.readlines():
            found = re.match(r"(\w+)-(\w+) rw-p 0+ 00:00 0 +(\[heap\])?$", line)
            first, last = (
                (-(-int(found[1], 16) // LARGE_PAGE), int(found[2], 16) // LARGE_PAGE)
                if found
                else (0, 0)
            )
            if first < last:
                # refused: nothing is lost
                madvise(first * LARGE_PAGE, (last - first) * LARGE_PAGE, MADV_COLLAPSE)


def _parse_files_once(conf) -> None:
    """Spares tests that compose configurations the YAML of the same files.

    Args:
        conf: the class OmegaConf.
    """
    load, parsed = conf.load, {}

    def load_once(file):
        state = os.stat(file.fileno() if hasattr(file, "fileno") else file)
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if key not in parsed:
            parsed[key] = load(file)
        return copy.deepcopy(parsed[key])

    conf.load = load_once


def _compose_groups_once(loader) -> None:
    """Spares tests that compose configurations of the same files most of the time.

    Hydra still reads every override, and gives the keys their values. What a name on the command
    line chooses is found once, unless a folder of the test's own is searched.

    Args:
        loader: the module hydra._internal.config_loader_impl.
    """
    create, compose = (
        loader.create_defaults_list,
        loader.ConfigLoaderImpl._compose_config_from_defaults_list,
    )
    lists, composed = {}, {}  # by what is chosen; by the list's id

    def create_once(repo, config_name, overrides_list, **how):
        def is_choice(override):
            return not override.is_sweep_override() and repo.group_exists(override.key_or_group)

        choices = [override for override in overrides_list if is_choice(override)]
        if any(
            "file" in source.scheme() and source.provider != "main" for source in repo.get_sources()
        ) or not all(
            override.type is OverrideType.CHANGE and isinstance(override.value(), str)
            for override in choices
        ):
            return create(repo, config_name, overrides_list, **how)
        sources = tuple(source.path for source in repo.get_sources())
        names = tuple((override.get_key_element(), override.value()) for override in choices)
        key = sources, config_name, names, tuple(how.items())
        if key not in lists:
            lists[key] = create(repo, config_name, choices, **how)
        given = [override for override in overrides_list if not is_choice(override)]
        kept = [override for override in given if not override.is_sweep_override()]
        return dataclasses.replace(lists[key], config_overrides=kept)

    def compose_once(self, defaults, repo):
        if not any(each.defaults is defaults for each in lists.values()):
            return compose(self, defaults, repo)
        if id(defaults) not in composed:
            composed[id(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(composed[id(defaults)])  # a seventh of the time of a copy

    from hydra.core.override_parser.types import OverrideType

    loader.create_defaults_list = create_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = compose_once


def pytest_collection_finish():
    """What is there by now stays: collecting garbage among it would copy, after each fork, the
    pages it is on."""
    # by whatever test: all join their ranks in the same way
    if "megatron5d.parity.local_ranks" in sys.modules:
        import_module("ranks")
    if "omegaconf" in sys.modules:
        _parse_files_once(sys.modules["omegaconf"].OmegaConf)
    if loader := sys.modules.get("hydra._internal.config_loader_impl"):
        _compose_groups_once(loader)
    gc.enable()
    gc.collect()
    gc.freeze()
    _into_large_pages()


@pytest.fixture
def over_gloo(monkeypatch):
    """Ranks are joined as in a run, where the suite's own group would hide what a test is about."""
    from megatron5d.parity import local_ranks

    monkeypatch.setattr(local_ranks, "transport", local_ranks.Gloo)


def pytest_sessionfinish():
    if pool := sys.modules.get("rank_pool"):
        pool.end_pool()
