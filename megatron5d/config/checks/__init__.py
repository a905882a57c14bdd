"""All laws of a configuration, and the check that reports every broken one at once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron5d.config.checks.check import Law
from megatron5d.config.checks.context import CONTEXT_LAWS
from megatron5d.config.checks.files import FILE_LAWS
from megatron5d.config.checks.layout import LAYOUT_LAWS
from megatron5d.config.checks.model import ATTENTION_LAWS, MOE_LAWS
from megatron5d.config.checks.precision import PRECISION_LAWS, RECOMPUTE_LAWS
from megatron5d.config.checks.training import RUN_LAWS
from megatron5d.config.checks.values import VALUE_LAWS
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config

# Laws of single values come first: the others may rely on each value being legal by itself.
LAWS: tuple[Law, ...] = (
    *VALUE_LAWS,
    *LAYOUT_LAWS,
    *MOE_LAWS,
    *ATTENTION_LAWS,
    *CONTEXT_LAWS,
    *RUN_LAWS,
    *RECOMPUTE_LAWS,
    *PRECISION_LAWS,
    *FILE_LAWS,
)


def broken_laws(config: Config, world: int, without: Sequence[Law] = ()) -> list[Fault]:
    """What is wrong with a configuration, in the order of LAWS.

    Args:
        config: to be checked.
        world: number of ranks of the run.
        without: laws that are not checked, such as those about files of a run that is only planned.

    Returns:
        One fault per broken law. A law that depends on an illegal value or on a broken law is not checked.
    """
    faults: list[Fault] = []
    illegal: set[str] = set()  # knobs whose value is wrong whatever the others are
    broken: set[str] = set()
    for law in LAWS:
        if law in without or broken.intersection(law.needs) or (len(law.knobs) > 1 and illegal.intersection(law.knobs)):
            continue
        if law.broken(config, world):
            faults.append(law.fault(config, world))
            broken.add(law.id)
            if len(law.knobs) == 1:
                illegal.update(law.knobs)
    return faults
