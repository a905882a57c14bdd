"""Writing a new checkpoint, as every conversion does."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.folder import named_steps
from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.checkpoint.save import SaveFailed, Saver
from megatron5d.config.checks import run_checks
from megatron5d.config.convert import default_of, to_dict
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count
from megatron5d.topology.owned_output import owned
from megatron5d.train.state import Progress, run_record

# dtype of safetensors -> the narrowest of ours that holds its values without loss
_LOSSLESS = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}


def stored_dtype(
    tensors: Mapping[str, Any], entries: Iterable[Entry], ignored: Iterable[str]
) -> str:
    """The dtype of ours that holds all tensors without loss.

    Args:
        tensors: by name, with a `dtype` as safetensors spells it.
        entries: those that are wide in every model do not count.
        ignored: patterns of names that do not count.
    """
    wide = {entry.stored_name for entry in entries if entry.wide}
    pattern = re.compile("|".join(ignored))
    dtypes = {
        _LOSSLESS.get(tensor.dtype, "fp32")
        for name, tensor in tensors.items()
        if name not in wide and not pattern.search(name)
    }
    return max(dtypes, key=["bf16", "fp32", "fp64"].index)


def check_empty(out: Path) -> None:
    """Raises ValueError where a directory has checkpoints."""
    if steps := named_steps(out):
        raise ValueError(
            f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any"
        )


def writes_checkpoint(command: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    """Makes a command own the directory `out`, which must be without checkpoints, while it runs."""

    @wraps(command)
    def run(args: Namespace) -> None:
        with owned(args.out, checkpoints=True):
            check_empty(args.out)
            command(args)

    return run


def save_weights(
    out: Path, tensors: dict[str, Any], config: Config, progress: Progress | None = None
) -> Path:
    """Writes weights as the checkpoint of a step, by default 0, and returns its folder.

    Raises:
        ConfigError: no model can be built from this configuration.
        OSError: a source is damaged, or a file cannot be written.
    """
    # only the architecture matters: other keys are of the run that will read the weights
    faults = run_checks(config, 1, files=False)
    if model_faults := [
        fault for fault in faults if all(knob.startswith("model.") for knob in fault.knobs)
    ]:
        raise ConfigError(model_faults)
    progress = progress or Progress()
    try:
        Saver(out, keep=0).save(progress.step, tensors, run_record(progress, to_dict(config)))
    except SaveFailed as error:
        # its advice is for a run, which has earlier checkpoints
        raise OSError(f"{out} is not written: {error.__cause__}") from error
    return resolve_checkpoint(out, "--out")


def print_written(folder: Path, config: Config, source: str, progress: Progress | None) -> None:
    """Prints what was read, what was written, and the command that trains it.

    Args:
        folder: the written checkpoint.
        source: what was read, as a phrase.
        progress: of a checkpoint with the optimizer's state, which a run continues.
    """
    dtype, size = config.precision.dtype, parameter_count(config.model)
    print(f"read {source}: {config.model.name}, {size:,} parameters in {dtype}")
    state = "weights alone: a run begins at step 0 with new optimizer state"
    start = f"init.from_checkpoint={folder.parent}"
    if progress is not None:
        state = f"weights and optimizer state of step {progress.step}"
        start = f"model.from_checkpoint={folder} checkpoint.resume={folder}"
    print(f"wrote {folder}: {state}")
    length = config.train.seq_len
    if length != default_of("train.seq_len"):
        start += f" train.seq_len={length}"
    print(
        f"next: bash launch/local.sh 8 {start} precision.dtype={dtype} 'data.train=[PREFIX]' "
        "log.dir=runs/NAME"
    )
