"""Checks of single keys: ranges and choices from the schema, forms of some lists and texts."""

import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from megatron5d.config.checks.check import Check, Faults, check, check_id, fault
from megatron5d.config.convert import (
    default_of,
    described,
    items_of,
    kind_of,
    leaves,
    spelled,
    value_of,
)
from megatron5d.config.derived import STAGE
from megatron5d.config.errors import alternatives, closest
from megatron5d.config.key import MAX_INTEGER
from megatron5d.config.schema import Config

# Names of values in other code bases -> ours.
SYNONYMS = {
    "fp16": "bf16",
    "half": "bf16",
    "float16": "bf16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "adam": "adamw",
    "gelu_new": "gelu_tanh",
    "silu": "swiglu",
    "off": "disabled",
}


Expected = tuple[str, Any] | None
"""What a value must be and a legal one; None if it is legal."""


def _range_error(name: str, value: float) -> Expected:
    key, is_integer = described(name), kind_of(name) is int
    maximum = key.maximum or (MAX_INTEGER if is_integer else inf)
    # an open bound is no legal value itself
    inside = 1 if is_integer or default_of(name) is None else default_of(name)
    if key.above is not None and value <= key.above:
        return f"above {key.above:g}", inside
    if value < key.minimum:
        return f"at least {key.minimum}", key.minimum
    if key.below is not None and value >= key.below:
        return f"below {key.below:g}", inside
    return (f"at most {maximum}", maximum) if value > maximum else None


def _choice_error(name: str, value: Any) -> Expected:
    choices = described(name).choices
    if value in choices:
        return None
    similar = _most_similar(value, choices)
    return alternatives(choices), default_of(name) if similar is None else similar


def _most_similar(value: Any, choices: Sequence[Any]) -> Any:
    if isinstance(value, int):
        return min(choices, key=lambda choice: abs(choice - value))
    # YAML and users have other words for off and on
    off = next((word for word in ("none", "disabled", "off") if word in choices), None)
    if off and value.lower() in ("false", "no", "off", "none", "null"):
        return off
    if off and value.lower() in ("true", "yes", "on"):
        return next(word for word in choices if word != off)
    return SYNONYMS[value] if SYNONYMS.get(value) in choices else closest(value, choices)


def _list_error(name: str, words: list[str]) -> Expected:
    choices = described(name).choices
    is_legal = set(words) <= set(choices) and (words or default_of(name) == [])
    if is_legal and ("none" not in words or words == ["none"]):
        return None
    items = [item for word in words for item in items_of(word)]
    similar = {closest(item, choices) for item in items if item != "none"}
    others = alternatives(word for word in choices if word != "none")
    expected = f"{'none alone or ' if 'none' in choices else ''}a list of {others}"
    return expected, [word for word in choices if word in similar] or [choices[0]]


def _form_error(name: str, value: Any) -> Expected:
    is_legal, expected = FORMS[name]
    return None if is_legal(value) else (expected, default_of(name))


def _is_schedule(text: str) -> bool:
    """Whether a text is a word or file:<path>; train/pipeline_layout.py looks for the schedule."""
    kind, colon, path = text.partition(":")
    return kind == "file" and path != "" if colon else re.fullmatch(r"\w+", kind) is not None


def _is_step_or_range(text: str) -> bool:
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    return match is not None and int(match[1]) <= int(match[2] or match[1])


def _all_match(pattern: str) -> Callable[[Sequence[str]], bool]:
    return lambda texts: all(re.fullmatch(pattern, text) for text in texts)


def _are_counts(counts: list[int]) -> bool:
    return min(counts, default=-1) >= 0


_SCALES = (
    _all_match(r"(\d+\.?\d*|\.\d+)(e-?\d+)?\s+\S+"),
    'a list of "factor glob", factors from 0',
)
_COUNTS = (_are_counts, "a list of layer counts, each at least 0")
_RAMP = rf"0*[1-9]\d*( 0*[1-9]\d*){{2}}|{STAGE.pattern}( +{STAGE.pattern})*"
# Key -> whether a value is legal, and what it must be.
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "parallel.order": (
        lambda order: sorted(order) == sorted(Config().parallel.order),
        f"each of {alternatives(Config().parallel.order)} once",
    ),
    "pipeline.schedule": (_is_schedule, "the name of a schedule or file:<path>"),
    "pipeline.layout": _COUNTS,
    "recompute.stage_layers": _COUNTS,
    "train.gbs_ramp": (
        lambda ramp: re.fullmatch(_RAMP, " ".join(ramp) or "0:1") is not None,
        "[start gbs, increment, ramp length in sequences], each at least 1, "
        'or stages such as "0:8 2B:16"',
    ),
    "checkpoint.keep": (
        lambda keep: _all_match(r"((last|best):)?\d+|every:[1-9]\d*")(keep.split("+")),
        "K or last:K, every:N, best:K, joined by +",
    ),
    "checkpoint.hf_export": (
        lambda when: _all_match(r"last|every:[1-9]\d*")([when]),
        "every:N, last or null",
    ),
    "data.skip_steps": (
        lambda steps: all(map(_is_step_or_range, steps)),
        "a list of steps from 1 and of ranges such as 120-169, the lower first",
    ),
    "optim.lr_scale": _SCALES,
    "optim.decay_scale": _SCALES,
    "optim.betas": (
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "two numbers, each at least 0 and below 1",
    ),
    "log.slow_rank": (lambda ratio: ratio == 0 or ratio > 1, "above 1, 0 or null"),
}


def _check_of(name: str) -> Check | None:
    kind, choices = kind_of(name), described(name).choices
    if name in FORMS:
        error_of: Callable[[str, Any], Expected] = _form_error
    elif choices:
        error_of = _list_error if kind is list else _choice_error
    elif kind in (int, float):
        error_of = _range_error
    else:
        return None

    @check(name, id=check_id(name))
    def find(c: Config, world: int) -> Faults:
        value = value_of(c, name)
        if value is not None and (error := error_of(name, value)):
            expected, legal = error
            yield fault(
                f"{name} must be {expected} (got {spelled(value)})", f"{name}={spelled(legal)}"
            )

    return find


VALUE_CHECKS = tuple(filter(None, map(_check_of, leaves())))
