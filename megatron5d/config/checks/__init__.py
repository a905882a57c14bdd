"""All checks of a configuration, and the call that reports everything they find at once."""

from collections.abc import Iterator
from types import ModuleType

from megatron5d.config.checks import context, files, layout, model, precision, training, values
from megatron5d.config.checks.check import Check
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config


def _checks_in(module: ModuleType) -> Iterator[Check]:
    """Yields the checks of a file in its order: functions with `@check`, and tuples of checks made
    from a table."""
    for value in vars(module).values():
        yield from (
            each
            for each in (value if isinstance(value, tuple) else (value,))
            if isinstance(each, Check)
        )


# Checks of single values come first: the others may rely on each value being legal by itself.
CHECKS = tuple(
    each
    for module in (values, layout, model, context, training, precision, files)
    for each in _checks_in(module)
)


def run_checks(config: Config, world: int, files: bool = True) -> list[Fault]:
    """Returns what is wrong with a configuration, in the order of CHECKS.

    Args:
        files: False: checks about files are left out, as for a run that is only planned.

    Returns:
        One fault per failed check. A check that depends on an illegal value or on a failed check is
        not run.
    """
    faults: list[Fault] = []
    illegal: set[str] = set()  # keys whose value is wrong whatever the others are
    failed: set[str] = set()
    for check in CHECKS:
        if (check.local and not files) or failed.intersection(check.needs):
            continue
        if len(check.knobs) > 1 and illegal.intersection(check.knobs):
            continue
        if fault := check.run(config, world):
            faults.append(fault)
            failed.add(check.id)
            illegal.update(check.knobs if len(check.knobs) == 1 else ())
    return faults
