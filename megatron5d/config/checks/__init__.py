"""All checks of a configuration, and the call that reports everything that is wrong at once."""

from collections.abc import Iterator
from types import ModuleType

from megatron5d.config.checks import (
    context,
    files,
    layout,
    model,
    precision,
    requirements,
    training,
    values,
)
from megatron5d.config.checks.check import Check
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config


def _checks_in(module: ModuleType) -> Iterator[Check]:
    """Yields the checks of a module in its order, tuples of checks included."""
    for value in vars(module).values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Check):
                yield item


# Checks of single values come first, because the others may rely on legal values.
_MODULES = (values, requirements, layout, model, context, training, precision, files)
CHECKS = tuple(check for module in _MODULES for check in _checks_in(module))


def run_checks(config: Config, world: int, files: bool = True) -> list[Fault]:
    """Faults of a configuration, in the order of CHECKS.

    Args:
        world: number of ranks.
        files: False: skip checks of files, as for a run that is only planned.

    Returns:
        One fault per failed check. A check that depends on an illegal value or on a failed check is
        skipped.
    """
    faults: list[Fault] = []
    illegal: set[str] = set()  # keys whose value is wrong on its own
    failed: set[str] = set()
    for check in CHECKS:
        if (check.local and not files) or failed.intersection(check.needs):
            continue
        # its own check has already reported an illegal value
        if len(check.knobs) > 1 and illegal.intersection(check.knobs):
            continue
        if fault := check.run(config, world):
            faults.append(fault)
            failed.add(check.id)
            illegal.update(check.knobs if len(check.knobs) == 1 else ())
    return faults
