"""Forked ranks for distributed tests, as tools/parity.py forks them, joined by pipes.

The fixture `over_gloo` joins a test's ranks by gloo; `MEGATRON5D_GLOO=1` does so for all tests.
"""

import os

from pipe_group import Pipes

import pretrain
from megatron5d.parity import local_ranks
from megatron5d.parity.local_ranks import RankFailure, run_ranks

pretrain.import_training()  # once, instead of in every forked rank
if os.environ.get("MEGATRON5D_GLOO") != "1":
    local_ranks.transport = Pipes

__all__ = ["RankFailure", "run_ranks"]
