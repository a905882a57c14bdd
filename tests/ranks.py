"""Distributed tests take their ranks from here: the same that tools/parity.py forks, joined by
pipes.

The fixture `over_gloo` is for tests of what gloo does; with `MEGATRON5D_GLOO=1` all tests run on
it.
"""

import os

from pipe_group import Pipes

import pretrain
from megatron5d.parity import local_ranks
from megatron5d.parity.local_ranks import RankFailure, run_ranks

pretrain.import_training()  # once: not in every rank that is forked
if os.environ.get("MEGATRON5D_GLOO") != "1":
    local_ranks.transport = Pipes

__all__ = ["RankFailure", "run_ranks"]
