"""`pipeline.schedule=auto`: the fastest Program found for this model, on the placements that it admits.

What the stages of a model cost, from its FLOPs: for the search, and for schedules that order themselves by times.

Costs of pipeline stages from numbers (`pipeline.costs`): equal layers, and two ends that may weigh more or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.model.flops import core_flops, head_flops, layer_flops
from megatron5d.model.partition import (
    layers_per_stage,
    shared_by_mirror,
    split_layers,
    stage_specs,
    two_embeddings_knob,
)
from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import OPS, Placement, Program, loop_placement
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.search.named import best_named, candidates, placement_called
from megatron5d.pipeline_parallel.search.search import SearchResult
from megatron5d.pipeline_parallel.simulate import peak_memory, simulate


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the stages of any placement, in forwards through one rank's share of the layers.

    A matrix product costs as much in I and in W as in F; attention between queries, keys and values costs twice in I
    and nothing in W; full recompute adds the layers' F to their I, and `recompute.logit_tokens` the head's. What a
    device sends takes as long as `pipeline.flops_per_byte` FLOPs a byte: of a mixture whose experts lie on several
    ranks, a token's copies on their way to the experts and back, in F and again in I; between stages, hidden states.

    Args:
        config: the architecture, train.seq_len, recompute, parallel, precision, and how layers are dealt to stages.
    """

    config: Config

    def of(self, placement: Placement) -> StageCosts:
        """Returns the costs of every stage.

        Raises:
            ValueError: the model has too few layers for the placement.
        """
        config = self.config
        model, seq_len = config.model, config.train.seq_len
        specs = stage_specs(layers_per_stage(config, placement))
        core = core_flops(model, seq_len) / 3
        held = [[*spec.layers, *(blocks(model)[model.num_layers :] if spec.head else [])] for spec in specs]
        layers = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in held])
        unit = layers.sum() / placement.num_ranks
        cores = np.array([core * len(mine) for mine in held])
        head = np.array([head_flops(model) / 3 if spec.head else 0.0 for spec in specs])
        twice = [self._recomputed(stage, mine) for stage, mine in enumerate(held)]
        again = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in twice])
        again += head if config.recompute.logit_tokens else 0.0
        f = layers + head
        compute = {"F": f, "I": f + cores + again, "W": f - cores, "B": 2 * f + again}
        sent, sent_again = (np.array([sum(self._sent(i) for i in mine) for mine in lists]) for lists in (held, twice))
        a2a = {"F": sent, "I": sent + sent_again, "W": 0 * sent, "B": sent + sent_again}
        share = np.array([len(mine) for mine in held]) * (placement.num_ranks / model.num_layers)
        return StageCosts(
            compute=np.array([compute[op] for op in OPS]) / unit,
            a2a=np.array([a2a[op] for op in OPS]) / unit,
            comm=self._hidden_state() * (1 if config.parallel.sp else config.parallel.tp) / unit,
            activation=share,
            stash=share,
        )

    def _hidden_state(self) -> float:
        """FLOPs in whose time one token's hidden state is sent, if the ranks of tp share it as they share the FLOPs."""
        config = self.config
        return config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype] * config.pipeline.flops_per_byte

    def _sent(self, block: int) -> float:
        """The same of a token's copies to the experts of a block and back; those of this rank's own stay."""
        model, ep = self.config.model, self.config.parallel.ep
        return 2 * model.top_k * (1 - 1 / ep) * self._hidden_state() if is_moe(model, block) else 0.0

    def _recomputed(self, stage: int, held: Sequence[int]) -> Sequence[int]:
        """Blocks whose forward the backward of a stage, which holds these, runs again."""
        recompute = self.config.recompute
        count = recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
        return held[:count] if recompute.mode == "full" else ()


@dataclass(frozen=True)
class Found:
    """Verified Programs of `pipeline.schedule=auto`, all with one placement.

    Args:
        config: with the split of the layers that they are for.
        programs: number of micro-batches -> Program.
        results: what the search says of them; empty where the named schedules alone were asked.
    """

    config: Config
    programs: dict[int, Program]
    results: dict[int, SearchResult] = field(default_factory=dict)


def searched(config: Config, counts: Sequence[int]) -> Found:
    """The fastest Program for each number of micro-batches, all with one placement and one split of the layers.

    It is kept beside the run's checkpoints (or its log), so that a run that goes on, goes on with the same one. The
    search ends after `pipeline.evaluations` schedules; only where `pipeline.search_s` ends it earlier does the result
    depend on the machine.

    Args:
        config: model, pipeline and parallel.
        counts: micro-batches of a step, ascending; placement and split are chosen for the last one.

    Raises:
        ValueError: no schedule fits the memory or the layers.
    """
    # numba takes a second to import and more to compile, and only this schedule needs it
    from megatron5d.pipeline_parallel.search.search import search_program

    pipeline, pp = config.pipeline, config.parallel.pp
    splits, names = _splits(config), _placements(config)
    folder = config.checkpoint.dir or config.log.dir
    results: dict[int, SearchResult] = {}
    for m in reversed(counts):
        results[m] = search_program(
            pp,
            m,
            [run_costs(split) for split in splits],
            memory=_cap(config, m),
            copies=pipeline.copies,
            seconds=pipeline.search_s,
            evaluations=pipeline.evaluations,
            placements=names,
            cache=Path(folder) / "schedules" if folder else None,
        )
        if m == counts[-1]:
            names = [name for name in names if placement_called(name, pp) == results[m].program.placement]
            splits = [splits[results[m].split]]
    return Found(splits[0], {m: result.program for m, result in results.items()}, results)


def known_programs(config: Config, counts: Sequence[int]) -> Found:
    """The best named schedule for each number of micro-batches: what the search is never worse than, at once.

    Raises:
        ValueError: none fits the memory and the layers.
    """
    splits, names, pp = _splits(config), _placements(config), config.parallel.pp
    found: dict[int, Program] = {}
    for m in reversed(counts):
        cap = _cap(config, m)
        best: list[tuple[float, int, Program]] = []
        for index, split in enumerate(splits):
            program = best_named(pp, m, run_costs(split), np.full(pp, cap), names)
            if program is not None:
                makespan = simulate(program, run_costs(split).of(program.placement)).makespan
                best.append((round(makespan, 9), index, program))
        if not best:
            raise ValueError(
                f"pipeline.schedule = auto: no schedule for parallel.pp = {pp} holds at most pipeline.memory = "
                f"{config.pipeline.memory:g} times the {cap / config.pipeline.memory:g} micro-batches that 1F1B holds; "
                f"set pipeline.memory=1.0"
            )
        _, index, found[m] = min(best, key=lambda item: item[:2])
        if m == counts[-1]:
            names = [name for name in names if placement_called(name, pp) == found[m].placement]
            splits = [splits[index]]
    return Found(splits[0], found)


def prediction(config: Config, program: Program, result: SearchResult | None) -> str:
    """A line for the log: what the schedule is expected to cost, and what the search made of it.

    Args:
        config: whose pipeline it is, with the split of the layers that the Program is for.
        program: of the last number of micro-batches.
        result: of the search that found it; None where none was needed.
    """
    found = simulate(program, run_costs(config).of(program.placement))
    text = (
        f"pipeline: {program.name}, {program.num_stages} stages, {program.num_microbatches} micro-batches: predicted "
        f"bubble {100 * found.bubble:.1f} %, activations of {found.peak_activations.max():.3g} micro-batches at most"
    )
    if result is None:
        return text
    text += f"; {result.placement}, {result.evaluations:,} schedules tried in {result.elapsed_s:.1f} s"
    if config.pipeline.layout is None:
        text += f", layers dealt with pipeline.split={config.pipeline.split} pipeline.balance={config.pipeline.balance}"
    if result.named is not None:
        name, makespan = result.named
        text += f", {100 * (makespan / found.makespan - 1):.1f} % faster than {name}, the best named one that fits"
    return text if result.compiled else f"{text}; without numba, which would try a hundred times as many"


def run_costs(config: Config) -> Costs | ModelCosts:
    """What the stages cost: as `pipeline.costs` says, else by FLOPs.

    Raises:
        ValueError: `pipeline.costs` cannot be read.
    """
    if not config.pipeline.costs:
        return ModelCosts(config)
    try:
        return parse_costs(config.pipeline.costs)
    except ValueError as error:
        raise ValueError(f"pipeline.{error}") from None


def _splits(config: Config) -> list[Config]:
    """The configuration with every way to deal the layers to stages that the search may choose, as it says first.

    Who says how, or what the ends count for, leaves to choose only what is evened. Times that `pipeline.costs` gives
    are those of any split.
    """
    pipeline = config.pipeline
    if pipeline.balance != "auto" or pipeline.layout is not None or pipeline.costs:
        return [config]
    ways = [(pipeline.split, "stages"), (pipeline.split, "ranks")]
    if pipeline.split == "even" and not pipeline.embedding_layers and not pipeline.head_layers:
        ways = [("even", "stages"), ("cost", "stages"), ("cost", "ranks")]
    if pipeline.copies == 2:
        ways += [(ways[-1][0], "late"), (ways[-1][0], "ends")]
    return [replace(config, pipeline=replace(pipeline, split=split, balance=balance)) for split, balance in ways]


def _placements(config: Config) -> list[str]:
    """Names of the placements that the model admits.

    Raises:
        ValueError: it admits none.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    usual = candidates(pp, config.pipeline.copies)
    names = usual if vpp == 1 else [f"loop:{vpp}", f"zigzag:{vpp}"]
    faults = {name: [_why_not(split, placement_called(name, pp)) for split in _splits(config)] for name in names}
    admitted = [name for name, why_not in faults.items() if None in why_not]
    if not admitted:
        raise ValueError(
            f"pipeline.schedule = auto finds no placement of stages for parallel.pp = {pp}, parallel.vpp = {vpp}: "
            f"{next(iter(faults.values()))[0]}"
        )
    return admitted


def _why_not(config: Config, placement: Placement) -> str | None:
    """Why the model cannot be laid out so; None where it can."""
    try:
        layers_per_stage(config, placement)
        shared_by_mirror(placement, two_embeddings_knob(config.model))
    except ValueError as error:
        return str(error)
    return None


def _cap(config: Config, num_microbatches: int) -> float:
    """The most activations of a rank, in micro-batches of one rank's layers."""
    costs = run_costs(config)
    program = build_program("1f1b", config.parallel.pp, num_microbatches)
    held = peak_memory(program, costs.of(loop_placement(config.parallel.pp)))[0]
    return config.pipeline.memory * float(held.max())


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the stages of any placement, where every stage has whole layers.

    Sizes below are in shares of a rank: num_layers/pp layers with their compute are 1.

    Args:
        costs: of such a share, all-to-alls included.
        num_layers: of the model.
        embedding: compute on the first stage beside its layers.
        head: compute on the last stage beside its layers.
        dense: layers at the bottom that have no all-to-all.
        balance: what the split evens, one of BALANCES.
    """

    costs: Costs
    num_layers: int
    embedding: float = 0.0
    head: float = 0.0
    dense: float = 0.0
    balance: str = "stages"

    def layout(self, placement: Placement) -> list[int]:
        """Returns the layers of each stage.

        Raises:
            ValueError: fewer layers than ranks, or with `stages` than stages.
        """
        unit = self.num_layers / placement.num_ranks
        return split_layers(self.balance, [1.0] * self.num_layers, placement, self.embedding * unit, self.head * unit)

    def of(self, placement: Placement) -> StageCosts:
        """Returns the costs of every stage; raises as `layout`."""
        return self.dealt(self.layout(placement), placement)

    def dealt(self, layout: Sequence[int], placement: Placement) -> StageCosts:
        """Returns the costs of every stage for `[num_stages]` layers in each."""
        unit = self.num_layers / placement.num_ranks
        above = np.cumsum(layout)  # layers up to the end of each stage
        layers = np.array(layout) / unit
        experts = layers - np.diff(np.minimum(above, round(self.dense * unit)), prepend=0) / unit
        time = layers.copy()
        time[0] += self.embedding
        time[-1] += self.head
        c = self.costs
        compute = {"F": c.F, "I": c.I, "W": c.W, "B": c.I + c.W}
        a2a = {"F": c.a2aF, "I": c.a2aB, "W": 0.0, "B": c.a2aB}
        return StageCosts(
            compute=np.array([compute[op] * time for op in OPS]),
            a2a=np.array([a2a[op] * experts for op in OPS]),
            comm=c.comm,
            activation=layers,
            stash=layers,
        )
