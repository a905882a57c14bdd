"""What follows from a configuration without being a key of it, for its checks and for the code that
trains.

Which blocks are mixtures of experts or have a window, which matrices run in fp8 (by the global
names that their weights carry, without `.weight`), what the strings that name data say, how many
samples each step takes, and how cp is cut.
"""

import fnmatch
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from os.path import isfile
from pathlib import Path
from typing import Any

from megatron5d.config.schema import Config, ModelConfig


def moe_layers(model: ModelConfig) -> list[int]:
    """Returns the global indices of the MoE layers, ascending.

    `moe_layers` lists them; otherwise layer i is one if i >= first_k_dense and moe_interval divides
    i + 1 (as Hugging Face's `decoder_sparse_step`).
    """
    if not model.num_experts:
        return []
    if model.moe_layers is not None:
        return sorted(model.moe_layers)
    return [
        i for i in range(model.first_k_dense, model.num_layers) if (i + 1) % model.moe_interval == 0
    ]


def blocks(model: ModelConfig) -> range:
    """Returns the global indices of all blocks: the layers, then those of multi-token
    prediction."""
    return range(model.num_layers + model.num_mtp_layers)


def is_moe(model: ModelConfig, block: int) -> bool:
    """Returns whether a block is a mixture of experts; blocks of multi-token prediction are if the
    last layer is."""
    return min(block, model.num_layers - 1) in moe_layers(model)


def window_of(model: ModelConfig, block: int) -> int | None:
    """Returns the attention window of a block in tokens; blocks of multi-token prediction have the
    last layer's."""
    layers = model.window_layers
    return (
        model.attention_window
        if layers is None or min(block, model.num_layers - 1) in layers
        else None
    )


def matrices(model: ModelConfig) -> list[str]:
    """Returns the matrices that precision.fp8 may multiply in fp8, layer by layer; never embedding,
    head and routers.

    Nor the down-projections of latent attention where tp sums gradients before them: each rank has
    the gradient of its own heads there, and the sum of what is rounded would depend on tp.
    """
    queries = ["q_down", "q_up"] if model.q_lora_rank is not None else ["q"]
    attention = (
        [*queries, "kv_down", "kv_up", "out"] if model.attention == "mla" else ["qkv", "out"]
    )
    if not model.latents_travel:
        attention = [name for name in attention if not name.endswith("_down")]
    mixtures = set(moe_layers(model))
    names = []
    for i in range(model.num_layers):
        blocks = ["mlp"]
        if i in mixtures:
            blocks = ["experts", "shared_expert"] if model.shared_ffn_hidden_size else ["experts"]
        names += [f"layers.{i}.attention.{matrix}" for matrix in attention]
        names += [f"layers.{i}.{block}.{matrix}" for block in blocks for matrix in ("up", "down")]
    return names


def quantised_matrices(config: Config) -> list[str]:
    """Returns the matrices that this configuration multiplies in fp8."""
    precision, num_layers = config.precision, config.model.num_layers
    if precision.fp8 == "none":
        return []
    layers = range(precision.fp8_skip_first, num_layers - precision.fp8_skip_last)
    return [
        name
        for name in matrices(config.model)
        if int(name.split(".")[1]) in layers
        and not any(fnmatch.fnmatch(name, glob) for glob in precision.fp8_exclude)
    ]


def cut_features(config: Config, name: str) -> dict[str, tuple[int, int]]:
    """Returns the local dims of a matrix other than the hidden size.

    Args:
        name: from `matrices`.

    Returns:
        Formula of the dim, as text -> (local size, ranks over which it is cut); parts of a fused
        matrix separately.
    """
    model, tp = config.model, config.parallel.tp
    etp = config.parallel.etp or tp
    block, matrix = name.split(".")[2:]
    if block != "attention":
        knob, over, size = {
            "mlp": ("model.ffn_hidden_size", "parallel.tp", model.ffn_hidden_size),
            "shared_expert": (
                "model.shared_ffn_hidden_size",
                "parallel.tp",
                model.shared_ffn_hidden_size,
            ),
            "experts": ("model.moe_ffn_hidden_size", "etp", model.expert_hidden_size),
        }[block]
        ranks = etp if over == "etp" else tp
        return {f"{knob} / {over}": (size // ranks, ranks)}
    nope, turned, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    queries, keys = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    out, out_knob = (
        (value, "v_head_dim") if model.attention == "mla" else (model.head_dim, "head_dim")
    )
    query_knobs = "model.num_heads·(qk_nope_head_dim + qk_rope_head_dim) / parallel.tp"
    return {
        "qkv": {
            "model.num_heads·head_dim / parallel.tp": (queries * model.head_dim, tp),
            "model.num_kv_heads·head_dim / parallel.tp": (keys * model.head_dim, tp),
        },
        "out": {f"model.num_heads·{out_knob} / parallel.tp": (queries * out, tp)},
        "q_down": {"model.q_lora_rank": (model.q_lora_rank or 0, 1)},
        "q_up": {query_knobs: (queries * (nope + turned), tp)},
        "q": {query_knobs: (queries * (nope + turned), tp)},
        "kv_down": {"model.kv_lora_rank + qk_rope_head_dim": (model.kv_lora_rank + turned, 1)},
        "kv_up": {
            "model.num_heads·(qk_nope_head_dim + v_head_dim) / parallel.tp": (
                queries * (nope + value),
                tp,
            ),
            "model.kv_lora_rank": (model.kv_lora_rank, 1),
        },
    }[matrix]


@dataclass(frozen=True)
class Source:
    """One `weight prefix` of .bin and .idx."""

    prefix: str
    weight: float
    weighted: bool  # the weight was written, not assumed

    @property
    def is_legal(self) -> bool:
        """Whether it names something, with a finite weight above 0."""
        return self.prefix != "" and 0 < self.weight < math.inf


def source_of(entry: str) -> Source:
    """Parses an entry of `data.train`, such as "0.3 /data/wiki"; of a prefix alone the weight is
    not written.

    A prefix may begin with a number and a space: "2024 crawl/x" is one where its .idx is there and
    crawl/x.idx is not.
    """
    whole = Source(entry.strip(), 1.0, False)
    first, rest = [*whole.prefix.split(None, 1), "", ""][:2]
    try:
        weighted = Source(rest, float(first), True)
    except ValueError:
        return whole
    return whole if isfile(f"{whole.prefix}.idx") and not isfile(f"{rest}.idx") else weighted


def named_entries(entries: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (name, `weight prefix`) of each entry of `data.valid_sets`, such as "code 0.7
    /data/c"."""
    pairs = [[*text.split(None, 1), "", ""][:2] for text in entries]
    return [(name, entry.strip()) for name, entry in pairs]


def resumed_folder(config: Config) -> Path | None:
    """Returns the checkpoint from which the run will resume, going by the names of folders; None
    where it begins anew.

    Where that checkpoint is not whole, or there is none, the run resumes from an earlier one, or
    begins anew.
    """
    c = config.checkpoint
    named = {"auto": c.dir, "none": None}.get(c.resume, c.resume)
    if named is None:
        return None
    numbers = {
        int(path.name[5:]): path for path in Path(named).glob("step-*") if path.name[5:].isdecimal()
    }
    return numbers[max(numbers)] if numbers else Path(named)


def resumed_progress(config: Config) -> dict[str, Any]:
    """Returns `progress` in the run.json of the checkpoint from which the run will resume; {} where
    it begins anew.

    It is read without checks, and what is no count is left out.
    """
    if (folder := resumed_folder(config)) is None:
        return {}
    try:
        progress = json.loads((folder / "run.json").read_bytes())["progress"]
        return {key: value for key, value in progress.items() if type(value) is int and value >= 0}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


BatchSchedule = Sequence[tuple[int, int]]
"""(samples taken before it begins, global batch in sequences) of each stage of a run, ascending."""
STAGE = re.compile(r"(\d+\.?\d*)(|K|M|B|T|steps):([1-9]\d*)")  # of train.gbs_ramp: 250B:1536
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def sample_len(config: Config) -> int:
    """Returns the tokens of a sample; the rest of a sequence is padding."""
    return config.data.sample_len or config.train.seq_len


def batch_schedule(config: Config) -> BatchSchedule:
    """Returns the stages of train.gbs_ramp; one of train.gbs where there is none.

    Source: Megatron-LM, megatron/core/num_microbatches_calculator.py: the ramp of three numbers,
        and step schedules
    such as "0:768 250B:1536". A stage begins with the first step before which this many samples
    have been taken.

    Raises ValueError: a stage does not begin after the one before it.
    """
    train = config.train
    words = " ".join(map(str, train.gbs_ramp or [])).split()
    if not words:
        return [(0, train.gbs)]
    if ":" not in words[0]:
        start, increment, length = map(int, words)
        count = (train.gbs - start) // increment
        return [
            *((-(-k * length // count), start + k * increment) for k in range(count)),
            (length if count else 0, train.gbs),
        ]
    stages: list[tuple[int, int]] = []
    step, taken, gbs = 0, 0, 1
    for word in words:
        number, unit, size = STAGE.fullmatch(word).groups()  # type: ignore[union-attr]  # of this form by a check
        if unit == "steps":
            steps = int(float(number)) - step
        else:
            steps = -(-(int(float(number) * _MULTIPLES[unit]) // sample_len(config) - taken) // gbs)
        if bool(stages) != (steps > 0):
            raise ValueError(
                f"{word} does not begin {'after the stage before it' if stages else 'with the run'}"
            )
        step, taken, gbs = step + steps, taken + steps * gbs, int(size)
        stages.append((taken, gbs))
    return stages


def global_batch_size(consumed_samples: int, schedule: BatchSchedule) -> int:
    """Returns the global batch of the step that begins after `consumed_samples`, in sequences."""
    return schedule[bisect_right(schedule, consumed_samples, key=itemgetter(0)) - 1][1]


def samples_of_steps(steps: int, schedule: BatchSchedule, consumed: int = 0) -> int:
    """Returns the sequences that are taken after `steps` more steps, those `consumed` before
    included."""
    for begin, _ in schedule[1:]:
        size = global_batch_size(consumed, schedule)
        before = min(steps, max(0, -(-(begin - consumed) // size)))
        steps, consumed = steps - before, consumed + before * size
    return consumed + steps * schedule[-1][1]


def batch_sizes(config: Config) -> list[int]:
    """Returns the global batch sizes that a run still has before it, ascending."""
    schedule = batch_schedule(config)
    behind = resumed_progress(config).get("consumed_samples", 0) if len(schedule) > 1 else 0
    now = bisect_right(schedule, behind, key=itemgetter(0)) - 1
    return sorted({size for _, size in schedule[now:]})


def left_out_steps(config: Config, done: int) -> Iterator[int]:
    """Yields the steps of data.skip_steps, such as ["300", "120-169"], that a run which has done
    some still has."""
    for text in config.data.skip_steps:
        first, _, last = text.partition("-")
        yield from range(max(int(first), done + 1), min(int(last or first), config.train.steps) + 1)


def split_shares(split: str | None) -> list[float]:
    """Returns the shares of train, valid and test in a split such as "969,30,1", not normalised;
    missing ones are 0. Raises ValueError: the string is not one to three numbers of positive
    sum."""
    if split is None:
        return [1.0, 0.0, 0.0]
    numbers = split.split(",")
    if len(numbers) > 3 or not all(
        re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", number) for number in numbers
    ):
        raise ValueError(
            f"data.split={split!r}: one to three numbers 'train,valid,test', such as '969,30,1'"
        )
    shares = [float(number) for number in numbers] + [0.0] * (3 - len(numbers))
    if sum(shares) == 0:
        raise ValueError(f"data.split={split!r} sums to 0; '1,0,0' gives everything to train")
    return shares


def split_of(c: Config) -> tuple[int, int]:
    """Returns (outer, inner): the cp axis as rings of keys and values over groups that exchange
    heads."""
    method, cp = c.parallel.cp_method, c.parallel.cp
    inner = {"ulysses": cp, "two_level": c.parallel.cp_inner}.get(method, 1)
    return cp // inner, inner
