"""The learning rate of each step.

Step s counts from 1; with optim.schedule_by=samples, all numbers of steps below are numbers of
samples. During warm-up the rate is lr·s/warmup_steps; then the schedule runs and reaches min_lr
exactly at the last step (`constant` stays at lr). wsd = warm-up, stable, decay: linear over the
last decay_steps (Hu et al. 2024, arXiv:2404.06395).
"""

import math

from megatron5d.config.derived import BatchSchedule, samples_of_steps
from megatron5d.config.schema import OptimConfig


def learning_rate(
    config: OptimConfig, step: int, total_steps: int, batches: BatchSchedule = ((0, 1),)
) -> float:
    """Learning rate of one step.

    Args:
        config: lr, min_lr, schedule, warmup_steps, decay_steps, schedule_by.
        step: 1 ... total_steps.
        total_steps: of the run.
        batches: the run's batch sizes, by which schedule_by=samples measures steps.
    """

    def position(step: int) -> int:
        return samples_of_steps(step, batches) if config.schedule_by == "samples" else step

    if step <= config.warmup_steps:
        return config.lr * position(step) / position(config.warmup_steps)
    begin = total_steps - config.decay_steps if config.schedule == "wsd" else config.warmup_steps
    if config.schedule == "constant" or step <= begin:
        return config.lr
    progress = (position(step) - position(begin)) / (position(total_steps) - position(begin))
    if config.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * progress))
        return config.min_lr + (config.lr - config.min_lr) * factor
    return config.lr + (config.min_lr - config.lr) * progress
