"""Measure training on one device, and compare it with transformers under torch.compile.

    python tools/bench_train.py                           the three models below on this GPU
    python tools/bench_train.py 1b --json train.json      one of them
    python tools/bench_train.py --model tiny --device cpu --seq-len 128 --steps 3
                                                          any model, without a GPU

    1b     Llama 3.2 1B                            8,192 tokens, 2 sequences a step
    8b     Llama 3 8B                              8,192 tokens, 1 sequence a step
    moe    Qwen3-MoE of 16 layers and 32 experts   4,096 tokens, 4 sequences a step

A model has the largest number of its layers that the device is predicted to hold, on both sides.
Both train on the same random tokens in bfloat16, with fp32 master weights, fp32 moments and
gradients clipped to norm 1. Figures are of the median step after the warm-up; MFU counts the FLOPs
of megatron5d/model/flops.py on both sides. A side that fails, crashes or hangs is listed with its
error, and the other one is measured. --json is rewritten after every step: when the time is up, or
after Ctrl-C, it holds the figures of all steps so far.
"""

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere

CASES = {
    "1b": "model=llama3_1b train.seq_len=8192 train.mbs=2",
    "8b": "model=llama3_8b train.seq_len=8192 train.mbs=1",
    "moe": "model=qwen3_30b_a3b model.num_layers=16 model.num_experts=32 train.seq_len=4096 "
    "train.mbs=4",
}


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--model", help="another model of conf/model instead")
    parser.add_argument("--seq-len", type=int, default=4096, help="its tokens in a sequence")
    parser.add_argument("--mbs", type=int, default=1, help="its sequences in a step")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any override, for ours"
    )
    parser.add_argument("--only", choices=["ours", "peer"], help="measure one side")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="to train on")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_intermixed_args()
    if unknown := [case for case in arguments.cases if case not in CASES]:
        parser.error(f"no case {unknown[0]!r}: {', '.join(CASES)}, or --model NAME")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch

from megatron5d.config.errors import ConfigError, refuse
from megatron5d.config.schema import Config
from megatron5d.model.flops import flops_per_token, parameter_count
from megatron5d.planning.fit import device_bytes, target_here
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.time.predict import peak_tflops
from megatron5d.tools.bench.harness import clear_device, device_is_lost, no_gpu
from megatron5d.tools.bench.processes import Send, run_tasks
from megatron5d.tools.bench.results import Figures, collect, error_line
from megatron5d.tools.bench.training import (
    Step,
    configured,
    our_step,
    token_rows,
    transformers_step,
)
from megatron5d.train.monitoring.writers import memory_gb

# share of the device for the predicted memory of ours: the peer's autocast keeps rounded copies of
# its weights
MEMORY_SHARE = 0.9
WARM_UP = 3  # steps
SILENCE_S = 300.0  # of one side: its weights and compilation, or one step
PROVIDERS: dict[str, Callable[[Config, torch.device], Step]] = {
    "ours": our_step,
    "transformers + compile": transformers_step,
}


def fitted(config: Config, available_bytes: int, target: Target) -> Config:
    """The configuration with the most of its layers that the device holds, at least one."""
    low, high = 1, config.model.num_layers
    while low < high:
        middle = (low + high + 1) // 2
        needed = Forecaster(_with_layers(config, middle), 1, target).rank(0).needed
        fits = needed <= MEMORY_SHARE * available_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return _with_layers(config, low)


def _with_layers(config: Config, count: int) -> Config:
    return replace(config, model=replace(config.model, num_layers=count))


def measure(step: Step, config: Config, device: torch.device, steps: int) -> Iterator[Figures]:
    """Yields the figures after each timed step; compilation and tuning fall into the warm-up."""
    rows, times, losses = token_rows(config), [], []
    num_tokens = config.train.mbs * config.train.seq_len
    peak = peak_tflops(config.log, device)
    flops = flops_per_token(config.model, config.train.seq_len)
    for i in range(steps + WARM_UP):
        start = time.perf_counter()
        losses.append(step(next(rows)))
        # the loss is there before the optimizer's step ends
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= WARM_UP:
            times.append(time.perf_counter() - start)
            rate = num_tokens / median(times)
            yield {
                "steps": len(times),
                "step_s": median(times),
                "tokens_per_s": rate,
                # of the device's data-sheet peak, if that is known
                "mfu": None if peak is None else rate * flops / (peak * 1e12),
                "memory_gb": memory_gb(device),
                "first_loss": losses[0],
                "last_loss": losses[-1],
            }


def measure_side(
    provider: str, config: Config, device: torch.device, steps: int
) -> Iterator[Figures]:
    """Yields the figures of a provider, then the reason why it ended early, if it did.

    Raises:
        Exception: the provider has broken the device; another process continues.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield from measure(PROVIDERS[provider](config, device), config, device, steps)
    except Exception as error:  # a side that is missing, too large or broken must not end the run
        if not isinstance(error, (ImportError, torch.OutOfMemoryError)):
            traceback.print_exc()
        yield {"ended": error_line(error)}
        if device.type == "cuda" and device_is_lost():
            raise
    clear_device()


def work(
    configs: dict[str, Config],
    device_type: str,
    steps: int,
    tasks: Sequence[str],
    send: Send,
) -> None:
    """Measures tasks, `<case>: <provider>`: the worker of `run_tasks`."""
    cuda = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    send((None, {"device": name, "torch": torch.__version__}))

    # both sides of a case train the same number of layers
    @functools.cache
    def fitting(case: str) -> Config:
        config = configs[case]
        available_bytes = device_bytes(config)
        if available_bytes is None:
            return config
        return fitted(config, available_bytes, target_here(config))

    for task in tasks:
        case, _, provider = task.partition(": ")
        config = fitting(case)
        model, train = config.model, config.train
        sizes = {
            "model": model.name,
            "layers": model.num_layers,
            "parameters": parameter_count(model),
            "mbs": train.mbs,
            "seq_len": train.seq_len,
        }
        for figures in measure_side(provider, config, device, steps):
            send((task, {**sizes, provider: figures}))
        send((task,))


def report(results: Iterator[tuple], overrides: list[str], file: Path | None) -> None:
    """Prints and collects the results of `work`, as `collect` does: a row is a case."""

    def by_case() -> Iterator[tuple[str | None, Figures]]:
        for task, figures in results:
            if task is None:
                yield None, figures
                continue
            case, _, provider = task.partition(": ")
            yield case, {provider: {"ended": figures}} if isinstance(figures, str) else figures

    collect(by_case(), header, table, file, overrides=overrides)


def header(facts: Figures) -> str:
    return f"{facts['device']}, torch {facts['torch']}"


def table(name: str, row: Figures, facts: Figures) -> str:
    """Lines about one model."""
    lines = [name]
    if "model" in row:
        lines = [
            f"{name}: {row['model']}, {row['layers']} layers, {row['parameters']:,} parameters, "
            f"{row['mbs']} x {row['seq_len']} tokens a step"
        ]
    ours = row.get("ours", {}).get("tokens_per_s")
    for provider in (provider for provider in PROVIDERS if provider in row):
        figures = row[provider]
        if "steps" not in figures:
            lines.append(f"  {provider:24} {figures['ended']}")
            continue
        rate, mfu = figures["tokens_per_s"], figures["mfu"]
        share = "    -" if mfu is None else f"{mfu:5.1%}"
        ratio = f"ours is {ours / rate:.2f} x" if ours and provider != "ours" else ""
        ended = f"after {figures['steps']} steps: {figures['ended']}" if "ended" in figures else ""
        line = (
            f"  {provider:24} {rate:10,.0f} tokens/s  MFU {share}  {figures['memory_gb']:6.1f} GB  "
            f"loss {figures['first_loss']:.3f} -> {figures['last_loss']:.3f}  {ratio}  {ended}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> int:
    arguments = _arguments()
    if arguments.device == "cuda" and no_gpu("bench_train", "--device cpu works without"):
        return 2
    cases = {name: CASES[name] for name in arguments.cases or CASES}
    if arguments.model:
        sizes = f"train.seq_len={arguments.seq_len} train.mbs={arguments.mbs}"
        cases = {arguments.model: f"model={arguments.model} {sizes}"}
    ours, peer = PROVIDERS
    providers = {"ours": [ours], "peer": [peer]}.get(arguments.only, [ours, peer])
    try:
        configs = {
            name: configured([*overrides.split(), *arguments.set])
            for name, overrides in cases.items()
        }
    except ConfigError as error:
        refuse(error.faults)
    tasks = [f"{case}: {provider}" for case in configs for provider in providers]
    worker = functools.partial(work, configs, arguments.device, arguments.steps)
    deadline = time.monotonic() + 60 * arguments.minutes
    report(run_tasks(worker, tasks, SILENCE_S, deadline), arguments.set, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
