"""Distributed tests take their ranks from here: the same that tools/parity.py forks."""

from megatron5d.parity.local_ranks import RankFailure, run_ranks

__all__ = ["RankFailure", "run_ranks"]
