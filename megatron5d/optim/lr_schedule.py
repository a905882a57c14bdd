"""The learning rate of each step.

Step s counts from 1; with optim.schedule_by = samples, every number of steps below is that of the
samples they take. While warming up the rate is lr·s/warmup_steps; then the schedule runs and
reaches min_lr exactly at the last step (`constant` stays at lr). wsd = warm-up, stable, decay:
linear over the last decay_steps (Hu et al. 2024, arXiv:2404.06395).
"""

import math

from megatron5d.config.derived import BatchSchedule, samples_of_steps
from megatron5d.config.schema import OptimConfig


def learning_rate(
    config: OptimConfig, step: int, total_steps: int, batches: BatchSchedule = ((0, 1),)
) -> float:
    """Returns the rate of one step.

    Args:
        config: lr, min_lr, schedule, warmup_steps, decay_steps, schedule_by.
        step: 1 ... total_steps.
        batches: the run's batch sizes, by which schedule_by = samples measures steps.
    """

    def position(step: int) -> int:
        return samples_of_steps(step, batches) if config.schedule_by == "samples" else step

    if step <= config.warmup_steps:
        return config.lr * position(step) / position(config.warmup_steps)
    if config.schedule == "constant":
        return config.lr
    begin = total_steps - config.decay_steps if config.schedule == "wsd" else config.warmup_steps
    if step <= begin:
        return config.lr
    progress = (position(step) - position(begin)) / (position(total_steps) - position(begin))
    if config.schedule == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )
    return config.lr + (config.min_lr - config.lr) * progress
