"""One thread, one seed of examples, for the whole suite. Paths and the time limit of a test are in `.pytest.ini`."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a forked rank must not inherit a thread pool
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples on every machine
settings.load_profile("suite")
