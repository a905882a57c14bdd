"""What follows from a configuration without being a key, for its checks and for training.

Which blocks are MoE or have a window, which matrices run in fp8 (by the global names of their
weights, without `.weight`), what the strings that name data mean, how many samples each step takes,
and how cp is split.
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
    """Global indices of the MoE layers, ascending.

    `moe_layers` lists them; otherwise layer i is MoE if i >= first_k_dense and moe_interval divides
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
    """Global indices of all blocks: the layers, then those of multi-token prediction."""
    return range(model.num_layers + model.num_mtp_layers)


def is_moe(model: ModelConfig, block: int) -> bool:
    """Whether a block is MoE; blocks of multi-token prediction are like the last layer."""
    return min(block, model.num_layers - 1) in moe_layers(model)


def window_of(model: ModelConfig, block: int) -> int | None:
    """Attention window of a block in tokens; multi-token prediction has that of the last layer."""
    layers = model.window_layers
    if layers is None or min(block, model.num_layers - 1) in layers:
        return model.attention_window
    return None


def matrices(model: ModelConfig) -> list[str]:
    """Matrices that precision.fp8 may multiply in fp8, layer by layer.

    Never the embedding, the head and the routers, nor the down-projections of latent attention
    where tp sums gradients before them: each rank has the gradient of its heads there, and the
    sum of rounded gradients would depend on tp. Nor those of a plugin's attention.
    """
    queries = ["q_down", "q_up"] if model.q_lora_rank is not None else ["q"]
    attention = {"mla": [*queries, "kv_down", "kv_up", "out"], "gqa": ["qkv", "out"]}.get(
        model.attention, []
    )
    if not model.reduces_latent_gradients:
        attention = [name for name in attention if not name.endswith("_down")]
    sparse_layers = set(moe_layers(model))
    names = []
    for i in range(model.num_layers):
        mlps = ["mlp"]
        if i in sparse_layers:
            mlps = ["experts", "shared_expert"] if model.shared_ffn_hidden_size else ["experts"]
        names += [f"layers.{i}.attention.{matrix}" for matrix in attention]
        names += [f"layers.{i}.{mlp}.{matrix}" for mlp in mlps for matrix in ("up", "down")]
    return names


def quantized_matrices(config: Config) -> list[str]:
    """Matrices that this configuration multiplies in fp8."""
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


def local_dims(config: Config, name: str) -> dict[str, tuple[int, int]]:
    """Local dims of a matrix other than the hidden size.

    Args:
        name: from `matrices`.

    Returns:
        Formula of the dim, as text -> (local size, ranks over which it is sharded); each part of a
        fused matrix separately.
    """
    model, tp = config.model, config.parallel.tp
    etp = config.parallel.etp or tp
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    latent, heads, kv_heads = model.kv_lora_rank, model.num_heads // tp, model.num_kv_heads // tp
    out_name, out_dim = "head_dim", model.head_dim
    if model.attention == "mla":
        out_name, out_dim = "v_head_dim", value
    rows = [
        ("mlp", "ffn_hidden_size / parallel.tp", model.ffn_hidden_size // tp, tp),
        (
            "shared_expert",
            "shared_ffn_hidden_size / parallel.tp",
            model.shared_ffn_hidden_size // tp,
            tp,
        ),
        ("experts", "moe_ffn_hidden_size / etp", model.expert_hidden_size // etp, etp),
        ("qkv", "num_heads·head_dim / parallel.tp", heads * model.head_dim, tp),
        ("qkv", "num_kv_heads·head_dim / parallel.tp", max(1, kv_heads) * model.head_dim, tp),
        ("out", f"num_heads·{out_name} / parallel.tp", heads * out_dim, tp),
        ("q_down", "q_lora_rank", model.q_lora_rank or 0, 1),
        (
            "q q_up",
            "num_heads·(qk_nope_head_dim + qk_rope_head_dim) / parallel.tp",
            heads * (nope + rope),
            tp,
        ),
        ("kv_down", "kv_lora_rank + qk_rope_head_dim", latent + rope, 1),
        (
            "kv_up",
            "num_heads·(qk_nope_head_dim + v_head_dim) / parallel.tp",
            heads * (nope + value),
            tp,
        ),
        ("kv_up", "kv_lora_rank", latent, 1),
    ]
    block, matrix = name.split(".")[2:]
    matrix = matrix if block == "attention" else block
    return {
        f"model.{formula}": (size, ranks)
        for names, formula, size, ranks in rows
        if matrix in names.split()
    }


@dataclass(frozen=True)
class Source:
    """One `weight prefix` of .bin and .idx."""

    prefix: str
    weight: float
    weighted: bool  # whether the weight was written, rather than assumed

    @property
    def is_legal(self) -> bool:
        """Whether it has a prefix, and a finite weight above 0."""
        return self.prefix != "" and 0 < self.weight < math.inf


def source_of(entry: str) -> Source:
    """Parses an entry of `data.train`, such as "0.3 /data/wiki" or a prefix alone.

    A prefix may begin with a number and a space: "2024 crawl/x" is one if its .idx exists and
    crawl/x.idx does not.
    """
    unweighted = Source(entry.strip(), 1.0, False)
    number, prefix = [*unweighted.prefix.split(None, 1), "", ""][:2]
    try:
        weighted = Source(prefix, float(number), True)
    except ValueError:
        return unweighted
    is_prefix = isfile(f"{unweighted.prefix}.idx") and not isfile(f"{prefix}.idx")
    return unweighted if is_prefix else weighted


def named_entries(entries: Sequence[str]) -> list[tuple[str, str]]:
    """(name, `weight prefix`) of each entry of `data.valid_sets`, such as "code 0.7 /data/c"."""
    pairs = [[*text.split(None, 1), "", ""][:2] for text in entries]
    return [(name, entry.strip()) for name, entry in pairs]


def resumed_folder(config: Config) -> Path | None:
    """Checkpoint from which the run will resume, by the names of folders; None for a new run.

    If that checkpoint turns out incomplete, the run resumes from an earlier one, or begins with its
    initial weights.
    """
    c = config.checkpoint
    named = {"auto": c.dir, "none": None}.get(c.resume, c.resume)
    if named is None:
        return None
    steps = {
        int(path.name[5:]): path for path in Path(named).glob("step-*") if path.name[5:].isdecimal()
    }
    return steps[max(steps)] if steps else Path(named)


def resumed_progress(config: Config) -> dict[str, Any]:
    """`progress` in the run.json of the checkpoint to resume from; {} for a new run.

    It is not checked, but anything that is no count is left out.
    """
    if (folder := resumed_folder(config)) is None:
        return {}
    try:
        progress = json.loads((folder / "run.json").read_bytes())["progress"]
        return {key: value for key, value in progress.items() if type(value) is int and value >= 0}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


BatchSchedule = Sequence[tuple[int, int]]
"""(samples consumed before it begins, global batch in sequences) of each stage, ascending."""
STAGE = re.compile(r"(\d+\.?\d*)(|K|M|B|T|steps):([1-9]\d*)")  # of train.gbs_ramp: 250B:1536
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def sample_len(config: Config) -> int:
    """Tokens of a sample; the rest of a sequence is padding."""
    return config.data.sample_len or config.train.seq_len


def batch_schedule(config: Config) -> BatchSchedule:
    """Stages of train.gbs_ramp; without a ramp one stage of train.gbs.

    A stage begins with the first step before which this many samples have been consumed.

    Raises:
        ValueError: a stage does not begin after the one before it.

    Source: Megatron-LM, megatron/core/num_microbatches_calculator.py, for linear ramps of three
        numbers and for step schedules such as "0:768 250B:1536".
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
    step, consumed, gbs = 0, 0, 1
    for word in words:
        number, unit, size = re.split("(K|M|B|T|steps|):", word)
        if unit == "steps":
            steps = int(float(number)) - step
        else:
            samples = int(float(number) * _MULTIPLES[unit]) // sample_len(config)
            steps = -(-(samples - consumed) // gbs)
        if bool(stages) != (steps > 0):
            previous = "after the stage before it" if stages else "with the run"
            raise ValueError(f"{word} does not begin {previous}")
        step, consumed, gbs = step + steps, consumed + steps * gbs, int(size)
        stages.append((consumed, gbs))
    return stages


def global_batch_size(consumed_samples: int, schedule: BatchSchedule) -> int:
    """Global batch of the step that begins after `consumed_samples`, in sequences."""
    return schedule[bisect_right(schedule, consumed_samples, key=itemgetter(0)) - 1][1]


def samples_of_steps(steps: int, schedule: BatchSchedule, consumed: int = 0) -> int:
    """Sequences consumed after `steps` more steps, including those `consumed` before."""
    for begin, _ in schedule[1:]:
        size = global_batch_size(consumed, schedule)
        steps_before = min(steps, max(0, -(-(begin - consumed) // size)))
        steps, consumed = steps - steps_before, consumed + steps_before * size
    return consumed + steps * schedule[-1][1]


def batch_sizes(config: Config) -> list[int]:
    """Global batch sizes of the remaining steps, ascending."""
    schedule = batch_schedule(config)
    consumed = resumed_progress(config).get("consumed_samples", 0) if len(schedule) > 1 else 0
    stage = bisect_right(schedule, consumed, key=itemgetter(0)) - 1
    return sorted({size for _, size in schedule[stage:]})


def left_out_steps(config: Config, done: int) -> Iterator[int]:
    """Yields the steps of data.skip_steps, such as ["300", "120-169"], after `done` steps."""
    for text in config.data.skip_steps:
        first, _, last = text.partition("-")
        yield from range(max(int(first), done + 1), min(int(last or first), config.train.steps) + 1)


def split_shares(split: str | None) -> list[float]:
    """Shares of train, valid and test in a split such as "969,30,1", not normalized.

    Missing shares are 0.

    Raises:
        ValueError: the string is not one to three numbers of positive sum.
    """
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
    """(outer, inner): the cp axis as rings of keys and values over groups that exchange heads."""
    method, cp = c.parallel.cp_method, c.parallel.cp
    inner = {"ulysses": cp, "two_level": c.parallel.cp_inner}.get(method, 1)
    return cp // inner, inner
