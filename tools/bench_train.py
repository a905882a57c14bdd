"""Measure training on one device: our steps beside the same model in transformers under
torch.compile, in one run.

    python tools/bench_train.py                           the three models below on this GPU, a table
    python tools/bench_train.py 1b --json train.json      one of them
    python tools/bench_train.py --model tiny --device cpu --seq-len 128 --steps 3      any model, without a GPU

    1b     Llama 3.2 1B                            8,192 tokens, 2 sequences a step
    8b     Llama 3 8B                              8,192 tokens, 1 sequence a step
    moe    Qwen3-MoE of 16 layers and 32 experts   4,096 tokens, 4 sequences a step

A model has as many of its layers as the device is predicted to hold, the same for both sides. They
train on the same random tokens in bfloat16 with fp32 master weights, fp32 moments and gradients
clipped to norm 1. Figures are of the median step after the warm-up; MFU counts the FLOPs of
megatron5d/model/flops.py for both. A side that fails says why and ends nothing, nor does one that
crashes or hangs. The file is written after every step: where the time is up, or somebody
interrupts, it holds the figures of the steps so far.
"""

import argparse
import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere

CASES = {
    "1b": ["model=llama3_1b", "train.seq_len=8192", "train.mbs=2"],
    "8b": ["model=llama3_8b", "train.seq_len=8192", "train.mbs=1"],
    "moe": [
        "model=qwen3_30b_a3b",
        "model.num_layers=16",
        "model.num_experts=32",
        "train.seq_len=4096",
        "train.mbs=4",
    ],
}


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; none = all")
    parser.add_argument("--model", help="another model of conf/model instead")
    parser.add_argument("--seq-len", type=int, default=4096, help="its tokens a sequence")
    parser.add_argument("--mbs", type=int, default=1, help="its sequences a step")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any override, for ours"
    )
    parser.add_argument("--only", choices=["ours", "peer"], help="measure one side")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop, whatever is left")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="to train on")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_intermixed_args()
    if unknown := [case for case in arguments.cases if case not in CASES]:
        parser.error(f"no case {unknown[0]!r}: {', '.join(CASES)}, or --model NAME")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import torch

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.config.checks import run_checks
from megatron5d.config.convert import write_whole
from megatron5d.config.errors import ConfigError, refuse
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.data.batch import make_micro_batch
from megatron5d.model.flops import flops_per_token, parameter_count
from megatron5d.planning.fit import device_bytes, target_here
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.time.predict import peak_tflops
from megatron5d.tools.bench.harness import device_is_lost, in_turn
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.monitoring.writers import memory_gb
from megatron5d.train.pipeline_layout import pipeline_layout

LEARNING_RATE = 1e-4
# of the device for what is predicted of ours: the peer's autocast keeps rounded copies of its
# weights
ROOM = 0.9
WARM_UP = 3  # steps
SILENCE_S = 300.0  # of one side: its weights and compilation, or one step


@dataclass(frozen=True)
class Figures:
    """The figures of one provider on one model."""

    steps: int  # timed so far
    step_s: float
    tokens_per_s: float
    mfu: float | None  # of the device's data-sheet peak; None where it is not known
    memory_gb: float
    first_loss: float
    last_loss: float


def configured(overrides: list[str]) -> Config:
    """Makes one rank's configuration. Raises ConfigError where a check fails; the source of tokens
    is not checked."""
    config = load_config([*overrides, "precision.dtype=bf16", "optim.clip=1.0"])
    config = replace(config, train=replace(config.train, gbs=config.train.mbs))
    faults = [
        fault
        for fault in run_checks(config, 1)
        if not all(knob.startswith("data.") for knob in fault.knobs)
    ]
    if faults:
        raise ConfigError(faults)
    return config


def fitted(config: Config, have: int, target: Target) -> Config:
    """Returns the configuration with as many of its layers as a device of `have` bytes holds; at
    least one."""
    low, high = 1, config.model.num_layers
    while low < high:
        middle = (low + high + 1) // 2
        needed = Forecaster(_with_layers(config, middle), 1, target).rank(0).needed
        low, high = (middle, high) if needed <= ROOM * have else (low, middle - 1)
    return _with_layers(config, low)


def _with_layers(config: Config, count: int) -> Config:
    return replace(config, model=replace(config.model, num_layers=count))


def tokens(config: Config) -> Iterator[torch.Tensor]:
    """Draws int64 `[b, s+1]`, the same for every provider."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(
            config.model.vocab_size,
            (config.train.mbs, config.train.seq_len + 1),
            generator=generator,
        )


def ours(config: Config, device: torch.device) -> Callable[[torch.Tensor], float]:
    """Returns a function that trains one step and returns its loss."""
    run = build_run(config, Process(0, 1, 0, device), pipeline_layout(config, 1))
    return lambda rows: run.trainer.step([make_micro_batch(rows)], LEARNING_RATE).losses["loss"]


def transformers_model(config: Config, device: torch.device) -> Any:
    """Builds the same model in transformers, with fp32 weights and scaled dot-product attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = hf_config_from_model(config.model, "fp32")
    hf = AutoConfig.for_model(
        **{key: value for key, value in settings.items() if key != "architectures"}
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")


def theirs(
    config: Config, device: torch.device, compiled: bool = True
) -> Callable[[torch.Tensor], float]:
    """Returns the same in transformers, a model in bf16 under autocast, with fused AdamW."""
    model = transformers_model(config, device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )

    def step(rows: torch.Tensor) -> float:
        rows = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision.dtype == "bf16"):
            logits = forward(rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


PROVIDERS = {"ours": ours, "transformers + compile": theirs}


def measure(
    step: Callable[[torch.Tensor], float], config: Config, device: torch.device, steps: int
) -> Iterator[Figures]:
    """Returns the figures after each timed step; as many before them as compilation and tuning need
    are not timed.

    Returning a loss waits for the device.
    """
    rows, times, losses = tokens(config), [], []
    count, peak = config.train.mbs * config.train.seq_len, peak_tflops(config.log, device)
    flops = flops_per_token(config.model, config.train.seq_len)
    for i in range(steps + WARM_UP):
        begin = time.perf_counter()
        losses.append(step(next(rows)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= WARM_UP:
            times.append(time.perf_counter() - begin)
            rate = count / median(times)
            mfu = None if peak is None else rate * flops / (peak * 1e12)
            yield Figures(
                len(times), median(times), rate, mfu, memory_gb(device), losses[0], losses[-1]
            )


def side(name: str, config: Config, device: torch.device, steps: int) -> Iterator[dict[str, Any]]:
    """Returns what `measure` finds out about a provider, or the reason why it goes no further.
    Raises Exception: the provider has broken the device, which a new process finds sound."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for figures in measure(PROVIDERS[name](config, device), config, device, steps):
            yield asdict(figures)
    except Exception as error:  # a side that is missing, too large or broken ends nothing
        if not isinstance(error, (ImportError, torch.OutOfMemoryError)):
            traceback.print_exc()
        yield {"ended": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"}
        if device.type == "cuda" and device_is_lost():
            raise
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def work(
    configs: dict[str, Config],
    kind: str,
    steps: int,
    pieces: Sequence[str],
    tell: Callable[[tuple], None],
) -> None:
    """Measures pieces, `<case>: <provider>`, telling of each step at once: the worker of
    `in_turn`."""
    device = (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    )
    what = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    tell((None, {"device": what, "torch": torch.__version__}))

    @functools.cache
    def fitting(case: str) -> Config:
        have = device_bytes(configs[case])
        return (
            configs[case]
            if have is None
            else fitted(configs[case], have, target_here(configs[case]))
        )

    for piece in pieces:
        case, _, provider = piece.partition(": ")
        config = fitting(case)
        model, train = config.model, config.train
        sizes = {
            "model": model.name,
            "layers": model.num_layers,
            "parameters": parameter_count(model),
            "mbs": train.mbs,
            "seq_len": train.seq_len,
        }
        for figures in side(provider, config, device, steps):
            tell((piece, sizes, figures))
        tell((piece,))


def report(told: Iterator[tuple], found: dict[str, Any], file: Path | None) -> None:
    """Prints cases as they end, and writes all that is known to the file with each step.

    Args:
        told: `(None, what the device is)`, `(piece, sizes, figures)`, and `(piece, why it ended
            early)`.
        found: to which `rows` are added: case -> its sizes, and the figures of each provider.
        file: of what is found, or None.
    """
    rows, printed = found.setdefault("rows", {}), ""
    try:
        for piece, *rest in told:
            if piece is None:
                if "device" not in found:
                    print(f"{rest[0]['device']}, torch {rest[0]['torch']}", flush=True)
                found.update(rest[0])
            else:
                case, _, provider = piece.partition(": ")
                if printed not in ("", case):
                    print(table(printed, rows[printed]), flush=True)
                printed = case
                sizes, news = rest if len(rest) == 2 else ({}, {"ended": rest[0]})
                row = rows.setdefault(case, {})
                row.update(sizes)
                row.setdefault(provider, {}).update(news)
            if file:
                write_whole(file, json.dumps(found, indent=1))
    finally:
        if printed:
            print(table(printed, rows[printed]), flush=True)


def table(name: str, row: dict[str, Any]) -> str:
    """Formats one model as lines of text."""
    lines = [name]
    if "model" in row:
        lines = [
            f"{name}: {row['model']}, {row['layers']} layers, {row['parameters']:,} parameters, "
            f"{row['mbs']} x {row['seq_len']} tokens a step"
        ]
    mine = row.get("ours", {}).get("tokens_per_s")
    for provider in (name for name in PROVIDERS if name in row):
        its = row[provider]
        if "steps" not in its:
            lines.append(f"  {provider:24} {its['ended']}")
            continue
        mfu = "    -" if its["mfu"] is None else f"{its['mfu']:5.1%}"
        ratio = f"ours is {mine / its['tokens_per_s']:.2f} x" if mine and provider != "ours" else ""
        ended = f"after {its['steps']} steps: {its['ended']}" if "ended" in its else ""
        lines.append(
            f"  {provider:24} {its['tokens_per_s']:10,.0f} tokens/s  MFU {mfu}  {its['memory_gb']:6.1f} GB  "
            f"loss {its['first_loss']:.3f} -> {its['last_loss']:.3f}  {ratio}  {ended}".rstrip()
        )
    return "\n".join(lines)


def main() -> int:
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "bench_train measures on a GPU, and torch sees none here; --device cpu tries it out",
            file=sys.stderr,
        )
        return 2
    cases = {name: CASES[name] for name in arguments.cases or CASES}
    if arguments.model:
        cases = {
            arguments.model: [
                f"model={arguments.model}",
                f"train.seq_len={arguments.seq_len}",
                f"train.mbs={arguments.mbs}",
            ]
        }
    wanted = {"ours": ["ours"], "peer": ["transformers + compile"]}.get(
        arguments.only, list(PROVIDERS)
    )
    try:
        configs = {
            name: configured([*overrides, *arguments.set]) for name, overrides in cases.items()
        }
    except ConfigError as error:
        refuse(error.faults)
    pieces = [f"{case}: {provider}" for case in configs for provider in wanted]
    worker = functools.partial(work, configs, arguments.device, arguments.steps)
    told = in_turn(worker, pieces, SILENCE_S, time.monotonic() + 60 * arguments.minutes)
    try:
        report(told, {"overrides": arguments.set}, arguments.json)
    except KeyboardInterrupt:
        print("interrupted: what is above is what was measured", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
