"""Environment variables of Weights & Biases: WANDB_MODE decides before `log.wandb.mode`."""

from megatron5d.config.convert import WANDB_MODES
from megatron5d.topology.launcher import ensure_home, variable


def wandb_mode(configured: str) -> str:
    """Mode of Weights & Biases: WANDB_MODE where it is set and W&B is not disabled.

    Args:
        configured: `log.wandb.mode`.
    """
    ensure_home()  # without HOME, W&B's service would print its log to the terminal
    mode = _variable()
    if mode in ("online", "offline", "disabled") and configured != "disabled":
        return mode
    return configured


def _variable() -> str:
    mode = variable("WANDB_MODE")
    return WANDB_MODES.get(mode, mode)


def wandb_suggestions() -> str:
    """Ways to continue where W&B rejects the login or a setting, for an error message."""
    is_set = _variable() in ("online", "offline")
    key = "WANDB_MODE=offline in the environment" if is_set else "log.wandb.mode=offline"
    return f"`wandb login`, or {key}"
