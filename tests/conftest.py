"""One thread for the whole suite and the same numbers on every machine; tests marked `timing` run
alone.

Paths, markers and the time limit of a test are in `.pytest.ini`.
"""

import copy
import dataclasses
import fcntl
import gc
import os
import pickle
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
# before torch, because a forked rank must not inherit a thread pool
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".cache" / "hypothesis"))

# imports and collection make no garbage, and looking for it would take time
gc.disable()
import pytest  # noqa: E402
import tiers  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
# the same examples on every machine
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
# another seed gives every test other random tensors
SEED = int(os.environ.get("MEGATRON5D_SEED", "0"))
torch.manual_seed(SEED)  # for tensors made on import

SHORT_FIRST = 300  # tests that a worker runs before its first slow one
# fixtures that change this process, which ranks of the pool would not see
OF_THIS_PROCESS = {"monkeypatch", "capfd", "capsys", "caplog"}
# files that every worker has to lock
RUNNING, NEXT = Path(__file__), ROOT / ".pytest.ini"


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    with open(path) as file:
        fcntl.flock(file, mode)
        try:
            yield
        finally:
            # closing is not enough: processes that the test has forked have the file open, too
            fcntl.flock(file, fcntl.LOCK_UN)


# outside of pytest-timeout's timer, because waiting does not count
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Lets no other worker of pytest-xdist run a test during one that is marked `timing`."""
    with ExitStack() as stack:
        # other processes have no peers, or belong to a test that holds the lock
        if hasattr(item.config, "workerinput"):
            mode = fcntl.LOCK_EX if item.get_closest_marker("timing") else fcntl.LOCK_SH
            with _locked(NEXT, fcntl.LOCK_EX):  # no test overtakes one that waits to be alone
                stack.enter_context(_locked(RUNNING, mode))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seeds a test's random tensors by its name, so that they do not depend on earlier tests."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    # without a GPU torch.manual_seed would queue the seed for one, with the stack
    seed(SEED + zlib.crc32(item.nodeid.encode()))
    if pool := sys.modules.get("rank_pool"):
        patches = not OF_THIS_PROCESS.isdisjoint(item.fixturenames)
        pool.test_patches = patches or item.get_closest_marker("patches") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Puts tests that run alone first, so that others wait for them once, and spreads slow ones.

    Each worker of pytest-xdist begins with as many neighbors in the list. The slow tests are spread
    over the places where workers begin, behind more short tests than any worker runs before the
    last test that runs alone: each of those would wait for a slow one.
    """
    items[:], deselected = tiers.split(items)
    config.hook.pytest_deselected(items=deselected)
    items.sort(key=lambda item: item.get_closest_marker("timing") is None)
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        count = len(items)
        for n, item in enumerate(slow):
            start = n % workers * (count + n) // workers
            items.insert(start + SHORT_FIRST + n // workers, item)


def _parse_files_once(conf) -> None:
    """Parses a YAML file once for all tests that compose configurations.

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
    """Composes the files that a command line chooses once for all tests.

    Hydra still parses every override and sets the values. Tests that search a folder of their own
    are left out.

    Args:
        loader: the module hydra._internal.config_loader_impl.
    """
    from hydra.core.override_parser.types import OverrideType

    create = loader.create_defaults_list
    compose = loader.ConfigLoaderImpl._compose_config_from_defaults_list
    lists = {}  # by the choices
    composed = {}  # pickled, by the id of the list

    def create_once(repo, config_name, overrides_list, **options):
        choices, values = [], []
        for override in overrides_list:
            if not override.is_sweep_override():
                is_choice = repo.group_exists(override.key_or_group)
                (choices if is_choice else values).append(override)
        sources = repo.get_sources()
        is_plain = all(
            choice.type is OverrideType.CHANGE and isinstance(choice.value(), str)
            for choice in choices
        )
        # those of a folder that a test makes
        is_own = any("file" in source.scheme() and source.provider != "main" for source in sources)
        if is_own or not is_plain:
            return create(repo, config_name, overrides_list, **options)
        paths = tuple(source.path for source in sources)
        names = tuple((choice.get_key_element(), choice.value()) for choice in choices)
        key = paths, config_name, names, tuple(options.items())
        if key not in lists:
            lists[key] = create(repo, config_name, choices, **options)
        return dataclasses.replace(lists[key], config_overrides=values)

    def compose_once(self, defaults, repo):
        if not any(created.defaults is defaults for created in lists.values()):
            return compose(self, defaults, repo)
        if id(defaults) not in composed:
            composed[id(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(composed[id(defaults)])  # seven times faster than a copy

    loader.create_defaults_list = create_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = compose_once


def pytest_collection_finish():
    """Freezes all objects made so far: collecting garbage among them would copy their pages after
    each fork."""
    # all tests join their ranks in the same way, whichever of them imports `ranks`
    if "megatron5d.parity.local_ranks" in sys.modules:
        import_module("ranks")
    if "omegaconf" in sys.modules:
        _parse_files_once(sys.modules["omegaconf"].OmegaConf)
    if loader := sys.modules.get("hydra._internal.config_loader_impl"):
        _compose_groups_once(loader)
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def over_gloo(monkeypatch):
    """Joins ranks as in a run, for tests of what the suite's own group would hide."""
    from megatron5d.parity import local_ranks

    monkeypatch.setattr(local_ranks, "transport", local_ranks.Gloo)


def pytest_sessionfinish():
    if pool := sys.modules.get("rank_pool"):
        pool.end_pool()
