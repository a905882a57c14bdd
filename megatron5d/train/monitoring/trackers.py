"""Weights & Biases and TensorBoard, imported only by rank 0 of runs that use them."""

import os
import signal
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron5d.config.convert import to_dict
from megatron5d.config.errors import Fault, Refused
from megatron5d.config.load import to_yaml
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count
from megatron5d.topology.grid import Sizes
from megatron5d.train.monitoring.wandb_environment import wandb_mode, wandb_suggestions
from megatron5d.train.preflight.kernels import capability_here, names_of
from megatron5d.train.provenance import ROOT, commit, versions
from megatron5d.train.signals import REQUEUE

_FULL, _FIRST, _LAST = 1, 2, 4  # types of a fragment in W&B's files


def run_facts(config: Config, sizes: Sizes) -> dict[str, Any]:
    """What a tracker shows of a run besides its configuration: `run` in W&B's config."""
    facts: dict[str, Any] = {
        name: getattr(sizes, name) for name in ("world", "dp", "tp", "cp", "pp", "ep")
    }
    facts["parameters"] = parameter_count(config.model)
    facts |= {"commit": commit(), "versions": versions()}
    if capability := capability_here():
        facts["kernels"] = names_of(config, capability)
    return facts


def wandb_faults(config: Config, world: int) -> list[Fault]:
    """Why W&B cannot log in from this node, that of rank 0; the key is not validated."""
    if wandb_mode(config.log.wandb.mode) != "online":
        return []
    import wandb

    try:
        from wandb.sdk.lib import wbauth

        host = wandb.setup().settings.base_url
        if wbauth.authenticate_session(
            host=host, source="pretrain.py", prompt=False, update_session=False
        ):
            return []
        reason = f"no API key for {host}"
    except wandb.errors.AuthenticationError as error:
        reason = str(error)
    except Exception:  # another version of wandb, which reports the problem at the start
        return []
    reason = f"log.wandb.mode = online: {reason}"
    return [Fault("wandb-key", ("log.wandb.mode",), reason, wandb_suggestions(), local=True)]


class Wandb:
    """A Weights & Biases run that a resumed job continues under the same id.

    Args:
        config: of the run; `log.wandb` has project, name, group, tags, entity and folder.
        run_id: of the run to continue; None starts one.
        facts: from `run_facts`.

    Raises:
        Refused: W&B has no key, or rejects a setting, such as a tag that is too long.
        Exception: W&B's server does not answer, or its process does not start.
    """

    def __init__(
        self, config: Config, mode: str, run_id: str | None, facts: Mapping[str, Any]
    ) -> None:
        import wandb  # takes two seconds

        settings, folder = config.log.wandb, config.log.wandb.dir or config.log.dir
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name or (config.log.dir and Path(config.log.dir).absolute().name),
                group=settings.group or config.model.name,
                tags=settings.tags or _tags(config, facts),
                entity=settings.entity,
                mode=mode,  # type: ignore[arg-type]
                dir=folder,
                id=run_id,
                resume="allow",
                config={**to_dict(config), "run": dict(facts)},
                settings=wandb.Settings(
                    silent=mode == "offline", console="off", git_root=str(ROOT)
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise Refused(f"log.wandb.mode = {mode}: {error} ({wandb_suggestions()})") from error
        self._run.define_metric("tokens")
        self._run.define_metric("loss", step_metric="tokens")
        self._run.define_metric("valid_loss*", step_metric="tokens", summary="min,last")
        pattern = f"offline-run-*-{self._run.id}/run-*.wandb"
        files = Path(self._run.settings.wandb_dir).glob(pattern)
        steps_offline = [step for file in files for step in _steps_in(file)]
        self.last = max([0, self._run.step - 1, *steps_offline])

    @property
    def run_id(self) -> str:
        return self._run.id

    def write(self, record: dict[str, Any]) -> None:
        """Sends a record of a new step: W&B cannot replace the record of an earlier one."""
        if record["step"] > self.last:
            values = {key: value for key, value in record.items() if value is not None}
            self._run.log(values, step=record["step"])
            self.last = record["step"]

    def close(self, code: int) -> None:
        """Ends the run as finished (0), preempted (75) or failed."""
        if code == REQUEUE:
            self._run.mark_preempting()
        self._run.finish(exit_code=code)

    def abandon(self) -> None:
        """Kills W&B's process, which is broken or hangs, so that the exit does not wait for it."""
        import wandb

        with suppress(OSError):  # /proc does not exist, or the process has just ended
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().startswith("wandb"):
                    os.kill(int(child), signal.SIGKILL)
        with suppress(Exception, SystemExit):
            wandb.teardown()


def _tags(config: Config, facts: Mapping[str, Any]) -> list[str]:
    """Tags to filter runs by: precision, and each dimension in use."""
    names = [name for name in ("dp", "tp", "cp", "pp", "ep") if facts.get(name, 1) > 1]
    return [config.precision.dtype, *(f"{name}{facts[name]}" for name in names)]


def _steps_in(file: Path) -> Iterator[int]:
    """Steps that an offline run has really written: a killed process loses its last ones.

    The file has LevelDB's framing: blocks of 32 KiB with fragments of records, whose type says
    which fragment it is.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data, position, record = file.read_bytes(), 7, b""
    record_type: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    while position + 7 <= len(data):
        in_block = 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if in_block < 7 or kind == 0:
            position += in_block
            continue
        start = b"" if kind in (_FULL, _FIRST) else record
        record = start + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            with suppress(DecodeError):  # truncated by a kill
                for item in record_type.FromString(record).history.item:
                    if "_step" in (item.key, *item.nested_key):
                        yield int(item.value_json)


class TensorBoard:
    """Event files for TensorBoard: every number of a record, and the configuration as text.

    Args:
        config: of the run; `log.tensorboard` is the folder.
        done: steps already done; later ones in the files are no longer shown.
    """

    def __init__(self, config: Config, done: int) -> None:
        # A check has made sure that the package tensorboard is installed.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.log.tensorboard, purge_step=done + 1 if done else None)
        self._writer.add_text("config", f"```\n{to_yaml(config)}\n```", done)

    def write(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()

    def close(self, code: int) -> None:
        self._writer.close()

    def abandon(self) -> None:
        """Does nothing: the writer's thread has already ended."""
