"""All checks of a run that read its files or need torch, made before the ranks meet."""

from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.train.preflight.data import data_faults, routing_faults
from megatron5d.train.preflight.kernels import device_faults
from megatron5d.train.preflight.parameters import glob_faults
from megatron5d.train.state import checkpoint_faults


def run_faults(config: Config, world: int, rank: int) -> list[Fault]:
    """Faults of a configuration whose model and layout are legal, as seen from this node."""
    checks = [device_faults, data_faults, routing_faults, glob_faults, checkpoint_faults]
    if config.checkpoint.hf_export is not None:
        # imports tokenizers and model families, which only this key needs
        from megatron5d.train.hf_export import export_faults

        checks.append(export_faults)
    if rank == 0 and config.log.wandb.mode != "disabled":
        # W&B takes a second to import, and only rank 0 logs
        from megatron5d.train.monitoring.trackers import wandb_faults

        checks.append(wandb_faults)
    return [fault for check in checks for fault in check(config, world)]
