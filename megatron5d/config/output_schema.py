"""Configuration keys of the groups `checkpoint` and `log`: what a run writes."""

from dataclasses import dataclass

from megatron5d.config.key import group, key, positive


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, and what it starts from."""

    dir: str | None = key(
        "auto", "folder of the checkpoints; auto = log.dir/checkpoints; null = none are written"
    )
    every: int = key(0, "steps between checkpoints; 0 = only at the end and on a signal")
    keep: str = key(
        "2",
        "checkpoints to keep, joined by +: K or last:K newest | every:N, each N-th step | "
        "best:K by validation loss; 0 = all",
    )
    async_save: bool = key(
        True,
        "write in the background while training continues; false: training waits",
        name="async",
    )
    hf_export: str | None = key(
        None, "every:N steps | last, the last step: write a Hugging Face folder, dir/hf/step-…"
    )
    resume: str = key(
        "auto", "auto: from the newest complete one in dir, if any | none | a checkpoint folder"
    )


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases: one run for the whole job, written by rank 0."""

    mode: str = key(
        "disabled",
        "log.wandb=offline is short for this key",
        choices=("online", "offline", "disabled"),
    )
    project: str = key("megatron5d", "project of the run")
    name: str | None = key(None, "name of the run; null = the last part of log.dir")
    group: str | None = key(None, "group of related runs; null = model.name")
    tags: list[str] = key(
        [], "tags; empty = precision.dtype and the sharded dimensions: [bf16, dp8, tp2]"
    )
    entity: str | None = key(None, "team or user; null = the account's default")
    dir: str | None = key(None, "folder of the local files; null = log.dir")


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and where it is written."""

    dir: str | None = key(
        None,
        "the run directory: configuration, code, records, checkpoints, W&B files; "
        "null = nothing is written",
    )
    jsonl: str | None = key(
        "auto",
        "file with one JSON object per step; auto = metrics.jsonl in log.dir; null = none",
    )
    wandb: WandbConfig = group(WandbConfig)
    tensorboard: str | None = key(
        None, "folder for TensorBoard's event files (pip install tensorboard); null = none"
    )
    # records
    every: int = positive(1, "steps between two records")
    slow_rank: float | None = key(
        None,
        "name a rank that works longer than this multiple of its peers; "
        "null = 1.2 on GPUs, else 0; 0 = never",
    )
    progress: bool = key(
        True, "on rank 0, a progress bar on a terminal, otherwise a line every 10 s"
    )
    traceback: bool = key(False, "print the traceback even if one message explains the error")
    # the device
    peak_tflops: float | None = positive(
        None, "peak of one device, for MFU; null = known devices only", unit="TFLOP/s"
    )
    memory_check: str = key(
        "warn",
        "reaction at the start if the predicted memory of a rank does not fit",
        choices=("refuse", "warn", "off"),
    )
    device_memory_gb: float | None = positive(
        None, "memory of one device; null = that of this process's GPU", unit="10⁹ bytes"
    )
    memory_snapshot: str | None = key(
        None, "folder for snapshots of GPU memory when it runs out; null = none"
    )
    memory_snapshot_step: int = key(0, "also take a snapshot after this step; 0 = never")
    # profile
    profile: str | None = key(
        None,
        "folder for the times of all phases in one step and a trace of the next; null = none",
    )
    profile_step: int = positive(5, "step to profile, counted from this start of the run")
    profile_ranks: list[int] = key([0], "ranks that measure and write both")
