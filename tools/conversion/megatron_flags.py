"""Keys whose values follow from several flags of Megatron-LM."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron5d.checkpoint.megatron.arguments import model_fields
from megatron5d.config.convert import spelled

Values = dict[str, Any]  # of flags, by normalized name: int, float, str, True or a list
Ours = dict[str, str]
_PATHS = {"data_path", "valid_data_path", "data_cache_path", "save", "load", "tensorboard_dir"}


def add_computed(
    flag_values: Mapping[str, Sequence[str]], ours: Ours, explicit: set[str]
) -> Iterator[str]:
    """Adds what several flags decide together; gives remarks about what differs.

    Args:
        flag_values: values by normalized flag.
        ours: values of our keys, where `explicit` ones are those that a flag sets.
    """
    values: Values = {
        name: _typed(words) for name, words in flag_values.items() if "$" not in " ".join(words)
    }
    if unassigned := [name for name in flag_values if name not in values and name not in _PATHS]:
        yield f"not assigned in the script, and not in what is computed: {' '.join(unassigned)}"
    for name in [name for name in values if name.startswith("no_") and values[name] is True]:
        values[name[3:]] = False
    if all(values.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads")):
        yield from _add_model(values, ours, explicit)
    yield from _add_vocabulary(values, ours)
    ours["optim.betas"] = spelled([values.get("adam_beta1", 0.9), values.get("adam_beta2", 0.999)])
    yield from _add_steps(values, ours)
    _add_layout(values, ours)
    for name, key in (("data_path", "data.train"), ("valid_data_path", "data.valid")):
        if name in flag_values:
            ours[key] = _blend(flag_values[name])
    if flag_values.get("load") == flag_values.get("save"):
        ours["checkpoint.resume"] = "auto"
    if values.get("moe_router_enable_expert_bias"):
        kinds = ours.get("moe.balance", "none").strip("[]")
        ours["moe.balance"] = "bias" if kinds == "none" else f"[{kinds},bias]"
    if values.get("recompute_method") == "uniform":
        ours["recompute.group_layers"] = ours.pop("recompute.num_layers", "1")
    elif "recompute_method" in values:
        ours.setdefault("recompute.num_layers", "1")


def _add_vocabulary(values: Values, ours: Ours) -> Iterator[str]:
    if "vocab_size" not in values:
        yield "set model.vocab_size: Megatron-LM takes it from the tokenizer"
    elif values.get("tokenizer_type") == "NullTokenizer":
        # it adds an end-of-document token to the given size
        ours["model.vocab_size"] = str(values["vocab_size"] + 1)


def _typed(words: Sequence[str]) -> Any:
    """Value of a flag: True without a word, a number, a text, or a list."""
    if len(words) != 1:
        return [_typed([word]) for word in words] or True
    for convert in (int, float):
        try:
            return convert(words[0])
        except ValueError:
            continue
    return words[0]


def _add_model(values: Values, ours: Ours, explicit: set[str]) -> Iterator[str]:
    if values.get("swiglu"):
        values.setdefault("ffn_hidden_size", int(8 * values["hidden_size"] / 3 / 64) * 64)
    if isinstance(pattern := values.get("moe_layer_freq"), str):
        values["moe_layer_freq"] = _pattern(pattern)
    if values.get("multi_latent_attention"):
        if not values.pop("qk_layernorm", False):
            yield "--qk-layernorm is missing: latents always have norms here"
        ours.pop("model.qk_norm", None)
    unsupported: list[str] = []
    fields = model_fields(values, unsupported)
    yield from unsupported
    fields.pop("rope_scaling")
    for name, value in fields.items():
        key = f"model.{name}"
        # num-query-groups alone has no effect
        if value is not None and (ours.get(key) is None or key not in explicit or "kv" in key):
            ours[key] = spelled(value)
    if window := values.get("window_size"):
        ours["model.attention_window"] = str(int(str(window).strip("([").split(",")[0]) + 1)
        if skipped := values.get("window_attn_skip_freq"):
            layers = range(values["num_layers"])
            ours["model.window_layers"] = spelled([i for i in layers if (i + 1) % skipped])


def _pattern(text: str) -> list[int]:
    """Layers of `([0]*3+[1]*58)`: 1 has experts.

    Raises:
        ValueError: it is not such a sum.
    """
    layers: list[int] = []
    for term in text.strip("()").split("+"):
        match = re.fullmatch(r"\(?\[([\d, ]+)\]\)?(?:\*(\d+))?", term.strip())
        if match is None:
            raise ValueError(f"--moe-layer-freq requires a sum such as [0]*3+[1]*58 (got {text})")
        layers += [int(item) for item in match[1].split(",")] * int(match[2] or 1)
    return layers


def _add_steps(values: Values, ours: Ours) -> Iterator[str]:
    if schedule := ours.get("train.gbs_ramp"):
        ours["train.gbs"] = schedule.rpartition(":")[2]
    if ramp := values.get("rampup_batch_size"):
        ours["train.gbs_ramp"] = spelled(ramp)
    if "train.gbs_ramp" in ours:
        ours["optim.schedule_by"] = "samples"
    if "train.gbs" not in ours:
        yield "set train.gbs: Megatron-LM takes micro-batch-size × dp"
    batch = int(ours.get("train.gbs", 0))

    def steps(name: str) -> int | None:
        samples = values.get(f"{name}_samples")
        return samples // batch if samples and batch else values.get(f"{name}_iters")

    train = steps("train")
    decay = steps("lr_decay") or train
    if train and decay:
        ours["train.steps"] = str(max(train, decay))
        if decay > train:
            ours["train.stop_after"] = str(train)
        elif decay < train:
            yield f"the rate reaches its minimum after {train} steps, there after {decay}"
    fraction = values.get("lr_warmup_fraction")
    warmup = round(fraction * decay) if fraction and decay else steps("lr_warmup")
    for key, count in (
        ("optim.warmup_steps", warmup),
        ("optim.decay_steps", steps("lr_wsd_decay")),
    ):
        if count:
            ours[key] = str(count)
    if ours.get("train.eval_batches") == "0":
        del ours["train.eval_batches"]
        ours["train.eval_every"] = "0"


def _add_layout(values: Values, ours: Ours) -> None:
    pp, layers = values.get("pipeline_model_parallel_size", 1), values.get("num_layers", 0)
    if ours.get("parallel.tp", "1") == "1":
        ours.pop("parallel.sp", None)
    if minutes := values.get("distributed_timeout_minutes"):
        ours["parallel.timeout_s"] = str(60 * minutes)
    if chunk := values.get("num_layers_per_virtual_pipeline_stage"):
        ours["parallel.vpp"] = str(layers // (pp * chunk))
    if ours.get("parallel.vpp", "1") != "1":
        ours.setdefault("pipeline.schedule", "interleaved")
    first, last = (
        [count] if (count := values.get(f"decoder_{end}_pipeline_num_layers")) else []
        for end in ("first", "last")
    )
    if first or last:
        middle = pp - len(first + last)
        sizes = [(layers - sum(first + last)) // max(middle, 1)] * middle
        ours["pipeline.layout"] = spelled([*first, *sizes, *last])


def _blend(words: Sequence[str]) -> str:
    """`["0.7 a","0.3 b"]` of weights and prefixes, or of prefixes alone."""
    if len(words) > 1 and not isinstance(_typed(words[:1]), str):
        words = [f'"{weight} {prefix}"' for weight, prefix in zip(words[::2], words[1::2])]
    return f"[{','.join(words)}]"
