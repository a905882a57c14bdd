"""Weights & Biases and TensorBoard. Rank 0 alone writes; both are imported only where they are
on."""

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

_WHOLE, _FIRST, _LAST = 1, 2, 4  # parts of a record in W&B's files


def run_facts(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Returns what a tracker tells of a run beside its configuration, which goes into `run` of
    W&B's config."""
    layout = {name: getattr(sizes, name) for name in ("world", "dp", "tp", "cp", "pp", "ep")}
    about: dict[str, Any] = {
        "parameters": parameter_count(config.model),
        "commit": commit(),
        "versions": versions(),
    }
    if capability := capability_here():
        about["kernels"] = names_of(config, capability)
    return {**layout, **about}


def wandb_faults(config: Config, world: int) -> list[Fault]:
    """Returns what keeps W&B from logging in from this node, of rank 0; nobody is asked whether the
    key is right."""
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
    except Exception:  # noqa: BLE001 - another version of wandb, which says at the start what it lacks
        return []
    return [
        Fault(
            "wandb-key",
            ("log.wandb.mode",),
            f"log.wandb.mode = online: {reason}",
            wandb_suggestions(),
            local=True,
        )
    ]


class Wandb:
    """A Weights & Biases run that a resumed job continues under the same id.

    Args:
        config: of the run; `log.wandb` says project, name, group, tags, entity and folder.
        run_id: of the run to continue; None starts one.
        facts: of `run_facts`.

    Raises:
        Refused: it has no key, or is asked for what it does not do: a tag that is too long.
        Exception: of W&B itself, whose server does not answer, or whose process does not start.
    """

    def __init__(
        self, config: Config, mode: str, run_id: str | None, facts: Mapping[str, Any]
    ) -> None:
        import wandb  # two seconds to import: only the rank that logs pays

        chosen, folder = config.log.wandb, config.log.wandb.dir or config.log.dir
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=chosen.project,
                name=chosen.name or (config.log.dir and Path(config.log.dir).absolute().name),
                group=chosen.group or config.model.name,
                tags=chosen.tags or _tags(config, facts),
                entity=chosen.entity,
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
        earlier = Path(self._run.settings.wandb_dir).glob(
            f"offline-run-*-{self._run.id}/run-*.wandb"
        )
        self.last = max(
            [0, self._run.step - 1, *(step for file in earlier for step in _steps_in(file))]
        )

    @property
    def run_id(self) -> str:
        return self._run.id

    def write(self, record: dict[str, Any]) -> None:
        """Sends a record whose step this run does not have yet: W&B takes none back, and keeps no
        two of a step."""
        if record["step"] > self.last:
            self._run.log(
                {key: value for key, value in record.items() if value is not None},
                step=record["step"],
            )
            self.last = record["step"]

    def close(self, code: int) -> None:
        """Ends the run as finished (0), preempted (75) or failed."""
        if code == REQUEUE:
            self._run.mark_preempting()
        self._run.finish(exit_code=code)

    def abandon(self) -> None:
        """Ends W&B's process, which is dead, broken or hangs, so that nothing at the exit waits for
        it or complains."""
        import wandb

        with suppress(OSError):  # there is no /proc, or the process has just ended
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().startswith("wandb"):
                    os.kill(int(child), signal.SIGKILL)
        with suppress(Exception, SystemExit):
            wandb.teardown()


def _tags(config: Config, facts: Mapping[str, Any]) -> list[str]:
    """Returns tags to filter runs by: precision, and each dimension that is cut."""
    cut = [
        f"{name}{facts[name]}" for name in ("dp", "tp", "cp", "pp", "ep") if facts.get(name, 1) > 1
    ]
    return [config.precision.dtype, *cut]


def _steps_in(file: Path) -> Iterator[int]:
    """Yields the steps that an offline run has really written: a process that was killed takes some
    with it.

    The file has LevelDB's framing: blocks of 32 KiB, and records in parts whose type says which
    they are.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, part = struct.unpack_from("<IHB", data, at)
        if left < 7 or part == 0:
            at += left
            continue
        record = (b"" if part in (_WHOLE, _FIRST) else record) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (_WHOLE, _LAST):
            with suppress(DecodeError):  # cut off by a kill
                items = wandb_internal_pb2.Record.FromString(record).history.item  # type: ignore[attr-defined]
                yield from (
                    int(item.value_json)
                    for item in items
                    if "_step" in (item.key, *item.nested_key)
                )


class TensorBoard:
    """Event files for TensorBoard: every number of a record over the steps, and the configuration
    as a text.

    Args:
        config: of the run; `log.tensorboard` is the folder.
        done: steps already done; what an earlier life of the run wrote of later ones is no longer
            shown.
    """

    def __init__(self, config: Config, done: int) -> None:
        # a check: the package tensorboard is installed
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
        """Does nothing: its thread has ended already."""
