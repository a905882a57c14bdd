"""Predict the memory and step time of a run, and search for layouts: on one CPU, without allocating the model.

    python tools/plan.py memory --world 64 experiment=llama3_8b
    python tools/plan.py memory --world 4096 --device-gb 80 experiment=llama3_70b parallel.pp=8 train.gbs=2048
    python tools/plan.py memory --world 64 --json model=llama3_8b train.seq_len=1048576 parallel.cp=64 train.gbs=1
    python tools/plan.py step --world 64 --device h100 experiment=llama3_8b
    python tools/plan.py search --world 256 --device h100 experiment=llama3_70b
    python tools/plan.py context --world 64 --node 8 model=llama3_8b train.seq_len=131072 parallel.tp=2 parallel.cp=16
    python tools/plan.py memory --world 64 --as nanotron model=llama2_7b precision.dtype=bf16 parallel.tp=4 train.gbs=64

Words without dashes are overrides as pretrain.py takes them; files of the run (its data) need not exist.
Exit code 2: a refused configuration or bad input; 1: it would not fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.planning.clusters import CLUSTERS, GIB, SHORT_NAMES, Cluster, cluster_called


def _parser() -> OptionParser:
    parser = OptionParser(prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    memory = commands.add_parser("memory", help="bytes of every pipeline rank, by kind, and whether a device has them")
    memory.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    memory.add_argument(
        "--device", default="sm_90", metavar="NAME",
        help="h100, a100 and so on, with the memory that it has; or an architecture alone, such as sm_90 (default), "
        "sm_80, sm_100; or cpu",
    )  # fmt: skip
    memory.add_argument(
        "--device-gb", type=float, metavar="X", help="memory of one device in 10⁹ bytes, to hold against"
    )
    memory.add_argument(
        "--imbalance", type=float, metavar="X",
        help="rows that the busiest rank's experts are sent, of an even share (default: moe.planned_imbalance)",
    )  # fmt: skip
    memory.add_argument(
        "--as", dest="convention", default="megatron5d", metavar="CODE",
        help="as another code base keeps things: nanotron; or megatron, with any of te_fused_loss, dropout and "
        "unfused_attention after it, commas between",
    )  # fmt: skip
    memory.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    memory.add_overrides()
    context = commands.add_parser("context", help="bytes that each parallel.cp_method sends, the best first")
    context.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    context.add_argument("--node", type=int, default=8, metavar="N", help="ranks that share fast links (default 8)")
    context.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    context.add_overrides()
    _add_cluster(
        commands.add_parser("step", help="time of a step by kind, tokens/s and MFU, on a device and its network")
    )
    search = commands.add_parser(
        "search", help="the fastest layouts that fit; keys given as key=value stay as they are"
    )
    _add_cluster(search)
    search.add_argument("--device-gb", type=float, metavar="X", help="memory of one device in 10⁹ bytes")
    search.add_argument("--count", type=int, default=5, metavar="N", help="layouts to show (default 5)")
    return parser


def _add_cluster(command: OptionParser) -> None:
    """Adds the options that choose the machines."""
    command.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    command.add_argument("--device", default="h100", metavar="NAME", help=f"default h100; {', '.join(CLUSTERS)}")
    command.add_argument("--node", type=int, metavar="N", help="ranks that share fast links")
    command.add_argument("--network-gbps", type=float, metavar="X", help="10⁹ bits/s from a rank to other nodes")
    command.add_argument("--link-gbps", type=float, metavar="X", help="10⁹ bits/s from a rank to others of its node")
    command.add_argument("--tflops", type=float, metavar="X", help="peak of a device in 16 bits; in 8 in proportion")
    command.add_argument(
        "--imbalance", type=float, metavar="X",
        help="rows that the busiest rank's experts are sent, of an even share (default: 1 for the time, "
        "moe.planned_imbalance for the memory)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object, in seconds and bytes")
    command.add_overrides()


if __name__ == "__main__":
    print_anywhere()
    _parser().parse_args()  # answers --help and refuses bad options before the seconds that the imports below take
    gc.set_threshold(100_000, 20, 100)  # Programs are many small tuples, which nothing refers back to

from tqdm import tqdm

from megatron5d.config.checks.context import FLOPS_PER_BYTE, choices
from megatron5d.config.convert import override_text
from megatron5d.config.errors import ConfigError, exit_code
from megatron5d.config.load import CONF, keys_given
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count
from megatron5d.planning.fit import fit_text, nearest_fit, shortage
from megatron5d.planning.layout_search import Candidate, LayoutSearch
from megatron5d.planning.memory_forecast import Forecaster, Target
from megatron5d.planning.other_codebases import CONVENTIONS, MEGATRON_OPTIONS, megatron_terms, nanotron_rank, with_terms
from megatron5d.planning.predict import Estimator, planned_config, unplanned_config
from megatron5d.planning.rank_memory import RankMemory, gigabytes, table
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import micro_batch_counts
from megatron5d.train.preflight import choice_text, fp8_faults, names_of

TOLD_EVERY_S = 10.0
LARGE = 500_000_000  # parameters that nobody trains in fp32
EXPERIMENTS = {file.stem for file in (CONF / "experiment").glob("*.yaml")}


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    options = _parser().parse_args(arguments)
    commands = {"memory": _memory, "context": _context, "step": _step, "search": _search}
    return exit_code("plan.py: error", lambda: commands[options.command](options))


def _cluster(options: argparse.Namespace) -> Cluster:
    """Returns the device that is named, with what the options say of it."""
    said = {
        "node": options.node,
        "network_rate": options.network_gbps and options.network_gbps * 1e9 / 8,
        "link_rate": options.link_gbps and options.link_gbps * 1e9 / 8,
        "flops": options.tflops and options.tflops * 1e12,
    }
    for name in ("node", "network_gbps", "link_gbps", "tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value:g} is not above 0")
    if options.imbalance is not None:
        _check_imbalance(options.imbalance)
    named = cluster_called(options.device)
    if said["flops"]:
        said["flops_8bit"] = said["flops"] * named.flops_8bit / named.flops
    return replace(named, **{name: value for name, value in said.items() if value})


def _check_imbalance(imbalance: float) -> None:
    if not 1 <= imbalance < float("inf"):
        raise ValueError(f"--imbalance {imbalance:g}: the busiest rank is sent at least an even share, 1")


def _check_fp8(config: Config, architecture: str) -> None:
    """Raises ConfigError where the architecture has no FP8 kernels, and the configuration wants them."""
    if faults := fp8_faults(config, architecture):
        raise ConfigError(faults)


def _step(options: argparse.Namespace) -> int:
    cluster = _cluster(options)
    config = planned_config(options.overrides, options.world)
    _note_defaults(config)
    _check_fp8(config, cluster.architecture)
    cost = Estimator(cluster, options.imbalance or 1.0).step(config, options.world)
    capability = int(cluster.architecture.removeprefix("sm_")) if cluster.architecture.startswith("sm_") else 0
    kernels = names_of(config, capability, here=False) if capability else {}
    if options.json:
        record = {"world": options.world, "device": asdict(cluster), "kernels": kernels, **cost.record()}
        print(json.dumps(record, indent=2))
    else:
        print(cost.table(cluster))
        if kernels:
            print(choice_text(config, capability, here=False))
    return 0


def _search(options: argparse.Namespace) -> int:
    cluster = _cluster(options)
    if options.count < 1:
        raise ValueError(f"--count {options.count} is not above 0")
    have = _bytes_given(options, cluster.memory_bytes)
    config = unplanned_config(options.overrides, options.world)
    _note_defaults(config)
    _check_fp8(config, cluster.architecture)
    search = LayoutSearch(config, options.world, cluster, options.imbalance, keys_given(options.overrides))
    with _counting("shapes of a layout") as count:
        candidates = search.candidates(have, count)
    if not search.found_legal:
        planned_config(options.overrides, options.world)  # says what is wrong
    with _counting(f"times and memories, of {len(candidates):,} layouts at most") as count:
        found = search.best(candidates, have, options.count, count)
    layouts = [(each, override_text(search.overrides(each))) for each in found]
    if options.json:
        records = [_record(each, line, _command(options, cluster, line)) for each, line in layouts]
        print(json.dumps({"world": options.world, "device": asdict(cluster), "layouts": records}, indent=2))
    elif found:
        print(_layouts_table(layouts))
        print(f"Of {len(candidates):,} layouts on {options.world} x {cluster.name}, {gigabytes(have)} each, for")
        print(_what(config))
        print(f"Run the first one: {_command(options, cluster, layouts[0][1])}")
    else:
        print(f"No layout that was looked at fits {gigabytes(have)}: try more ranks, or recompute.offload.")
        too_large = [each for each in candidates if each.needed > have]  # the rest was not looked at to the end
        least = min(too_large, key=lambda each: each.needed, default=None)
        if least is not None:
            words = override_text(search.overrides(least)) or "as given"
            print(f"The smallest of them needs {gigabytes(least.needed)} or more: {words}")
    return 0 if found else 1


def _layouts_table(layouts: list[tuple[Candidate, str]]) -> str:
    """Returns a table of layouts, each given with its overrides as one line; "" = the configuration as given."""
    lines = [f"{'step':>11}{'tokens/s/GPU':>14}{'MFU':>8}{'bubble':>8}{'memory':>10}  overrides"]
    for each, overrides in layouts:
        cost = each.cost
        assert cost is not None
        figures = f"{cost.step_s:>9.3f} s{cost.tokens_per_s_per_gpu:>14,.0f}{cost.mfu:>8.1%}"
        bubble = f"{cost.seconds['bubble'] / cost.step_s:>8.1%}"
        lines.append(f"{figures}{bubble}{each.needed / GIB:>7.1f} GiB  {overrides or '(as given)'}")
    return "\n".join(lines)


def _record(found: Candidate, overrides: str, command: str) -> dict[str, Any]:
    """Returns a layout as a JSON object."""
    assert found.cost is not None
    return {"overrides": overrides, "needed_bytes": found.needed, **found.cost.record(), "command": command}


@contextmanager
def _counting(what: str) -> Iterator[Callable[[], None]]:
    """Shows how many candidates were tried: a bar on a terminal, and a line every 10 s elsewhere."""
    with tqdm(desc=what, unit="", leave=False, disable=None) as bar:
        number, told = 0, time.perf_counter()

        def count() -> None:
            nonlocal number, told
            number += 1
            bar.update()
            if bar.disable and (now := time.perf_counter()) - told >= TOLD_EVERY_S:
                told = now
                print(f"looked at {number:,} {what}", file=sys.stderr, flush=True)

        yield count


def _what(config: Config) -> str:
    """Returns what is counted, for a user who did not give it."""
    train, precision = config.train, config.precision
    fp8 = "" if precision.fp8 == "none" else f" with fp8 {precision.fp8}"
    return f"{config.model.name} in {precision.dtype}{fp8}, train.gbs {train.gbs}, train.seq_len {train.seq_len:,}"


def _note_defaults(config: Config) -> None:
    """Warns that a model alone leaves precision, batch and sequence at their defaults for a toy."""
    name = config.model.name
    if config.precision.dtype == "fp32" and parameter_count(config.model) > LARGE:
        experiment = f"; experiment={name} brings what it is trained with" if name in EXPERIMENTS else ""
        print(f"note: planned for {_what(config)}{experiment}", file=sys.stderr)


def _command(options: argparse.Namespace, cluster: Cluster, found: str) -> str:
    """Returns what starts the run of a layout on this cluster; the keys that were given, then those that were found."""
    nodes, per_node = -(-options.world // cluster.node), min(options.world, cluster.node)
    words = list(options.overrides)
    if not any(word.startswith(("data.train=", "experiment=quickstart")) for word in words):
        words.append("data.train=[data/corpus_train]")
    start = f"sbatch --nodes={nodes} --gpus-per-node={per_node} launch/slurm.sbatch"
    if nodes == 1:
        start = f"bash launch/local.sh {options.world}"
    return f"{start} {shlex.join(words)} {found}".rstrip()


def _memory(options: argparse.Namespace) -> int:
    config = planned_config(options.overrides, options.world)
    _note_defaults(config)
    imbalance = config.moe.planned_imbalance if options.imbalance is None else options.imbalance
    _check_imbalance(imbalance)
    target, have = _machine(options, imbalance)
    if target.architecture is not None:
        _check_fp8(config, target.architecture)
    since = time.perf_counter()
    ranks = _ranks(config, options.world, target, options.convention)
    lack = None if have is None else shortage(ranks, have)
    if options.json:
        record = {
            "world": options.world, "device": options.device, "as": options.convention, "imbalance": imbalance,
            "shortage": lack, "ranks": {rank: memory.record() for rank, memory in ranks.items()},
        }  # fmt: skip
        print(json.dumps(record, indent=2))
        return 1 if lack else 0
    sizes = sizes_of(config, options.world)
    axes = ", ".join(f"{name} {getattr(sizes, name)}" for name in ("dp", "tp", "cp", "pp", "ep"))
    more = f"train.mbs {config.train.mbs}, recompute {config.recompute.mode}"
    print(f"{_what(config)}, {more}; {options.world} ranks: {axes}, zero {config.parallel.zero}")
    print(table(ranks))
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    moment = ranks[worst].moment and f", {ranks[worst].moment}"
    print(
        f"* pipeline rank {worst} needs most: {gigabytes(ranks[worst].needed)}{moment}. "
        f"Counted in {time.perf_counter() - since:.1f} s for {options.device}."
    )
    if have is not None:
        print(f"WARNING: {lack}" if lack else f"It fits {gigabytes(have)}.")
    if lack and have is not None and options.convention == "megatron5d":
        print("looking for what would fit ...", file=sys.stderr)
        print(f"What would fit: {fit_text(nearest_fit(config, options.world, target, have))}.")
    return 1 if lack else 0


def _machine(options: argparse.Namespace, imbalance: float) -> tuple[Target, int | None]:
    """Returns the device that is planned for, and its bytes where they are known."""
    device, known = options.device, None
    if device in CLUSTERS or device in SHORT_NAMES:
        named = cluster_called(device)
        device, known = named.architecture, named.memory_bytes
    target, have = Target(None if device == "cpu" else device, imbalance), _bytes_given(options, known)
    try:
        with target.paths():
            return target, have
    except ValueError as error:
        raise ValueError(f"--device {device}: {error}, and cpu; by name there are {', '.join(CLUSTERS)}") from error


def _bytes_given(options: argparse.Namespace, known: Any) -> Any:
    """Returns what --device-gb says; without it what is known of the device."""
    if options.device_gb is None:
        return known
    if not 0 < options.device_gb < 1e9:
        raise ValueError(f"--device-gb {options.device_gb:g} is not above 0, or no device's")
    return round(options.device_gb * 1e9)


def _context(options: argparse.Namespace) -> int:
    if options.node < 1:
        raise ValueError(f"--node {options.node}: a node has at least 1 rank")
    config = planned_config(options.overrides, options.world)
    if config.parallel.cp == 1:
        raise ValueError("parallel.cp = 1 cuts no sequence: nothing is sent; set parallel.cp")
    found = choices(config, options.node)
    if options.json:
        print(json.dumps({"world": options.world, "node": options.node, "choices": [asdict(each) for each in found]}))
        return 0
    print(f"MB that a rank sends in one layer for one sequence of {config.train.seq_len:,} tokens, there and back:")
    print(f"{'parallel.cp_method':<20}{'cp_inner':>9}{'in a node':>12}{'between nodes':>15}{'hidden from tokens':>20}")
    for each in found:
        name = "ring, allgather" if each.method == "ring" else each.method
        length = f"{each.hidden_from:,}" if each.hidden_from else "-"
        sent = f"{each.inside / 1e6:>12,.1f}{each.between / 1e6:>15,.1f}"
        print(f"{name:<20}{each.cp_inner:>9}{sent}{length:>20}")
    print(f"Hidden: a hop is over before the attention that it runs under, at {FLOPS_PER_BYTE:,.0f} FLOP a byte.")
    print(
        f"Least between nodes of {options.node} first, then least inside them; heads are exchanged inside a node alone "
        "(docs/long_context.md)."
    )
    return 0


def _ranks(config: Config, world: int, target: Target, convention: str) -> dict[int, RankMemory]:
    """Returns memory of every pipeline rank, as one code base or another keeps it."""
    name, *said = convention.split(",")
    if name not in ("megatron5d", *CONVENTIONS) or (said and (name != "megatron" or set(said) - set(MEGATRON_OPTIONS))):
        raise ValueError(
            f"--as {convention} is not known: nanotron, or megatron[,te_fused_loss][,dropout][,unfused_attention]"
        )
    sizes = sizes_of(config, world)
    if name == "nanotron":
        if target.architecture is None:
            raise ValueError("--as nanotron --device cpu: nanotron trains on GPUs alone, such as sm_90")
        count = micro_batch_counts(config, world)[-1]
        return {rank: nanotron_rank(config, sizes, rank, count, target.architecture) for rank in range(sizes.pp)}
    forecaster = Forecaster(config, world, target)
    ranks = forecaster.ranks()
    if name == "megatron":
        stages = forecaster.layout.placement
        for rank, memory in ranks.items():
            last = any(stage == stages.num_stages - 1 for _, stage in stages.stages_of(rank))
            terms = megatron_terms(config, memory, stages.num_stages, last=last, options=said)
            ranks[rank] = with_terms(memory, terms)
    return ranks


if __name__ == "__main__":
    sys.exit(main())
