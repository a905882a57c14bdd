"""Distributed tests take their ranks from here: the same that tools/parity.py forks."""

import collective_trace

import pretrain
from megatron5d.parity import local_ranks
from megatron5d.parity.local_ranks import RankFailure, run_ranks

pretrain.import_training()  # once: not in every rank that is forked
local_ranks.trace = collective_trace

__all__ = ["RankFailure", "run_ranks"]
