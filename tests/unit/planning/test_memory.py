"""Memory by kind: a Program's peaks against an independent count, the long context, a device that
is too small."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from parity_configs import config_of

from megatron5d.config.convert import changed
from megatron5d.config.load import load_config
from megatron5d.config.schema import LogConfig
from megatron5d.kernels import activate, dispatch
from megatron5d.kernels.fp8.quantize_tensor import amax_of, quantize_tensor_both_ways
from megatron5d.kernels.tuning import planned
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.executor import PipelineError
from megatron5d.pipeline_parallel.program import Action, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.simulate import peak_memory
from megatron5d.planning.fit import memory_faults, nearest_fit, shortage, suggestions
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.peak import Replay, find_peak
from megatron5d.planning.memory.rank_memory import GIB, Peak, RankMemory, table
from megatron5d.planning.memory.trace import BOUNDARY, MemoryWatch, StageTrace, Step, empty_trace
from megatron5d.topology.process import Process
from megatron5d.train.guard import MemorySnapshots, crash_message, memory_snapshots

H100 = Target("sm_90")


@pytest.mark.parametrize("name", schedule_names())
def test_activations_in_flight_are_those_of_the_simulation(name):
    """Stages that keep one byte each from F until W: the peak is the simulator's, which knows
    nothing of traces."""
    program = build_program(name, 4, 12)
    split = {
        "F": (Step("x", 1, 1),),
        "I": (Step("x", 0, 0),),
        "W": (Step("x", 0, -1),),
        "B": (Step("x", 0, -1),),
    }
    trace = StageTrace(split, output_kept=True)
    activations, _ = peak_memory(program, Costs().of(program.placement))
    for rank in range(4):
        peak = find_peak(
            program, rank, dict.fromkeys(range(program.num_stages), trace), message_bytes=[0] * 64
        )
        assert peak.total == round(activations[rank] * program.chunks)


def test_a_peak_is_made_of_what_is_there_and_of_what_runs():
    """Two micro-batches of 1F1B on one rank: 10 kept after F, 3 needed for a moment in it, 7 in
    B."""
    trace = StageTrace(
        {"F": (Step("attention", 13, 10),), "B": (Step("attention", 7, -10, True),)},
        output_kept=True,
    )
    peak = find_peak(build_program("gpipe", 1, 2), 0, {0: trace}, message_bytes=[4] * 4)
    assert peak == Peak({"attention": 20}, workspace=7, action=(peak.action), in_flight=2)
    assert str(peak.action)[:2] == "0B" and peak.total == 27
    moments: list[Peak] = []
    assert (
        find_peak(
            build_program("gpipe", 1, 2), 0, {0: trace}, message_bytes=[4] * 4, moments=moments
        )
        == peak
    )
    # in each slot, and after it
    assert [moment.total for moment in moments] == [13, 10, 23, 20, 27, 10, 17, 0]


class SumsOf7(Replay):
    """The first phase of a W starts a sum of 7 bytes; no weights are gathered."""

    def __init__(self):
        self.live_bytes = self.peak_bytes = 0

    def expect(self, actions):
        pass

    def before(self, action, step):
        pass

    def after(self, action, step):
        self.live_bytes = self.peak_bytes = 7 if action.op == "W" and step == 0 else self.live_bytes


def test_what_a_weight_gradient_has_let_go_of_is_not_stashed_any_more():
    """W lets go of 6 of 10 bytes and starts a sum of 7: 11 there, and nothing of any forward's."""
    weights = Step("mlp", 0, -6), Step("mlp", 0, -4)
    trace = StageTrace(
        {"F": (Step("mlp", 2, 2),), "I": (Step("mlp", 8, 8),), "W": weights}, output_kept=True
    )
    peak = find_peak(
        build_program("zb_h1", 1, 1), 0, {0: trace}, message_bytes=[0] * 64, replay=SumsOf7()
    )
    assert (peak.total, peak.stash, peak.units, peak.workspace, peak.activations) == (
        11,
        4,
        7,
        0,
        {},
    )


def test_what_passes_between_recomputed_phases_is_no_activation():
    """Tokens on their way to experts and back are in no micro-batch in flight: wholly recomputed
    layers keep inputs."""
    layout = [
        "parallel.pp=2",
        "pipeline.schedule=dualpipe_v",
        "parallel.ep=4",
        "recompute.mode=full",
        "train.gbs=64",
    ]
    config = load_config(
        [
            "model=tiny_moe",
            "model.num_layers=8",
            "train.seq_len=512",
            "precision.dtype=bf16",
            *layout,
        ]
    )
    forecaster = Forecaster(config, 8, H100)
    for rank, memory in forecaster.ranks().items():
        assert min(memory.kinds().values()) > 0, rank
        # of one micro-batch through both of the rank's stages
        inputs = sum(forecaster.activations(rank).values())
        assert sum(memory.peak.activations.values()) <= memory.peak.in_flight * inputs


def alone(*lines: str):
    """A Program of one rank that holds all stages; its actions as text, in order."""
    slots = [(Action(text[1], int(text[0]), int(text[2])),) for text in " ".join(lines).split()]
    stages, microbatches = (1 + max(slot[0][place] for slot in slots) for place in (1, 2))
    return make_program("alone", loop_placement(1, stages), [0] * microbatches, [slots])


def test_what_two_stages_of_a_rank_share_is_there_until_both_have_let_go_of_it():
    """The output of stage 0 is the input of stage 1, and both save it: I of stage 1 does not free
    it, as B does not."""
    forward = Step(BOUNDARY, 4, 4), Step("mlp", 6, 6), Step(BOUNDARY, 0, 0)
    backward = Step(BOUNDARY, 4, 4), Step("mlp", 50, -10, True), Step(BOUNDARY, 0, -4)
    inner = StageTrace({"F": forward, "B": backward, "I": backward, "W": ()}, output_kept=True)
    outer = Step(BOUNDARY, 0, 0), Step("mlp", 6, 6), Step(BOUNDARY, 0, 0)
    begin = Step(BOUNDARY, 4, 4), Step("mlp", 50, -6, True), Step(BOUNDARY, 0, -4)
    traces = {
        0: StageTrace({"F": outer, "B": begin, "I": begin, "W": ()}, output_kept=True),
        1: inner,
    }
    whole = "0F0 1F0 1B0 0B0", "0F1 1F1 0F2 1F2 1B1 1B2 0B1 0B2"
    split = [re.sub(r"(\d)B(\d)", r"\1I\2 \1W\2", line) for line in whole]
    peaks = [
        find_peak(alone(*lines), 0, traces, message_bytes=[4] * 4).total for lines in (whole, split)
    ]
    # of two micro-batches what both stages keep, and 1B1's own
    assert peaks == [2 * (6 + 6) + 4 + 50] * 2


def test_what_an_empty_stage_passes_on_stays_with_the_stage_before_it():
    """Which saves it: after 0F0 6 are kept, message included, and 60 are needed in 0F1."""
    forward = Step(BOUNDARY, 0, 0), Step("mlp", 60, 6), Step(BOUNDARY, 0, 0)
    backward = Step(BOUNDARY, 4, 4), Step("mlp", 5, -6, True), Step(BOUNDARY, 0, -4)
    traces = {0: StageTrace({"F": forward, "B": backward}, output_kept=True), 1: empty_trace(4)}
    peak = find_peak(alone("0F0 1F0 0F1 1F1 1B1 1B0 0B1 0B0"), 0, traces, message_bytes=[4] * 4)
    assert (peak.total, str(peak.action)) == (66, "0F1")


def test_receives_are_posted_before_a_slot_knows_what_has_arrived():
    """Empty stages of bfs, before 2F1 has its input, which proves that 0F0's output has arrived:
    what 0F0, 0F1 and 2F0 have sent, and room for what 2F1, 2B0 and 2B1 will take."""
    peak = find_peak(
        build_program("bfs", 2, 2),
        0,
        dict.fromkeys(range(4), empty_trace(4)),
        message_bytes=[4] * 4,
    )
    assert (peak.total, peak.messages, str(peak.action)) == (6 * 4, 6 * 4, "2F1")


def test_kinds_add_up_to_what_is_needed():
    peak = Peak({"SelfAttention": 50, "MLP": 70}, stash=3, messages=4, workspace=5)
    memory = RankMemory(10, 20, 60, 1, 2, peak, end_of_step=9, setup=95, library=8, outside=100)
    assert memory.allocated == 10 + 20 + 60 + 1 + 2 + 132 + 8
    both = dataclasses.replace(memory, host_optimizer=5, peak=dataclasses.replace(peak, host=7))
    assert both.host == 12 and both.needed == memory.needed
    assert sum(memory.kinds().values()) == memory.needed == memory.allocated + 12 + 100
    late = dataclasses.replace(memory, end_of_step=1000)
    assert sum(late.kinds().values()) == late.needed and late.kinds()["end of step"] == 1000
    early = dataclasses.replace(memory, setup=5000)
    walked = dataclasses.replace(memory, peak=dataclasses.replace(peak, action=Action("F", 2, 5)))
    moments = ["", "in action 2F5", "at the end of a step", "while the run is built"]
    assert [each.moment for each in (memory, walked, late, early)] == moments
    assert sum(early.kinds().values()) == early.needed and early.allocated == 5000
    assert [line.split()[0] for line in table({0: memory, 1: late}).splitlines()][:3] == [
        "MiB",
        "weights",
        "gradients",
    ]
    many = table({rank: late if rank == 5 else memory for rank in range(12)}, limit=8).splitlines()[
        0
    ]
    assert re.findall(r"pp (\d+)( \*)?", many) == [
        (f"{rank}", " *" * (rank == 5)) for rank in (0, 1, 2, 3, 5, 9, 10, 11)
    ]


def llama(*overrides: str):
    return load_config(["model=llama3_8b", "precision.dtype=bf16", "train.gbs=1", *overrides])


def test_activations_fall_as_one_over_cp():
    """Two layers at 128k tokens in full, and the whole 8B model at a million tokens on 64 ranks, in
    seconds."""
    kept = {}
    for cp in (1, 4, 16):
        forecaster = Forecaster(
            llama("model.num_layers=2", "train.seq_len=131072", f"parallel.cp={cp}"), cp, H100
        )
        peak = forecaster.rank(0).peak
        kept[cp] = sum(peak.activations.values()), forecaster.activations(0)
    for cp in (4, 16):
        assert kept[cp][0] * cp == pytest.approx(kept[1][0], rel=0.01)
        for kind, count in kept[cp][1].items():
            assert count * cp == pytest.approx(kept[1][1][kind], rel=0.01), kind
    million = llama(
        "train.seq_len=1048576", "parallel.cp=64", "parallel.zero=1", "model.num_layers=8"
    )
    rank = Forecaster(million, 64, H100).rank(0)
    assert rank.peak.activations["SelfAttention"] > 0 and rank.needed < 80e9


def test_the_busiest_rank_of_unevenly_chosen_experts():
    config = load_config(["model=tiny_moe", "train.gbs=8", "parallel.ep=4", "precision.dtype=bf16"])
    kept = {}
    for load in (1.0, 2.0, 100.0):
        forecaster = Forecaster(config, 4, Target("sm_90", load))
        forecaster.rank(0)
        kept[load] = forecaster.activations(0)["MoEExperts"]
    assert kept[1.0] < kept[2.0] < kept[100.0] < 5 * kept[1.0], (
        "at most every choice of all four ranks"
    )


def refusing(have_gb: float, check: str = "refuse"):
    config = config_of(gbs=2)
    return dataclasses.replace(config, log=LogConfig(memory_check=check, device_memory_gb=have_gb))


def test_what_cannot_fit_is_refused_where_that_is_asked_for():
    assert memory_faults(refusing(80.0), 1) == []
    assert memory_faults(refusing(0.1, "warn"), 1) == []
    (fault,) = memory_faults(refusing(0.1), 1)
    assert fault.id == "memory" and "pipeline rank 0 needs" in fault.reason
    assert "tensor parallelism are not enough" in fault.fix, "CUDA alone needs more"


def test_a_refusal_names_what_is_enough():
    config = load_config(
        [
            "model=tiny",
            "train.gbs=2",
            "train.mbs=2",
            "train.seq_len=4096",
            "log.memory_check=refuse",
        ]
    )
    enough = changed(config, {"train.mbs": 1})
    have = max(memory.needed for memory in Forecaster(enough, 1, H100).ranks().values()) / 1e9
    (fault,) = memory_faults(changed(config, {"log.device_memory_gb": have}), 1)
    assert fault.fix.startswith(f"train.mbs=1, which needs {have * 1e9 / GIB:.2f} GiB; ")


def test_where_put_off_weight_gradients_are_too_large_another_schedule_is_proposed():
    layout = [
        "parallel.pp=2",
        "pipeline.schedule=dualpipe_v",
        "recompute.mode=full",
        "recompute.logit_tokens=1024",
    ]
    config = load_config(
        [
            "model=tiny",
            "model.num_layers=4",
            "train.seq_len=2048",
            "train.gbs=8",
            "parallel.zero=3",
            *layout,
        ]
    )
    plain = changed(config, {"pipeline.schedule": "1f1b"})
    larger, have = (
        max(m.needed for m in Forecaster(c, 2, H100).ranks().values()) for c in (config, plain)
    )
    assert larger > have and nearest_fit(config, 2, H100, have) == (
        {"pipeline.schedule": "1f1b"},
        have,
    )


def test_a_shortage_names_the_worst_rank_and_its_largest_kinds():
    ranks = {0: RankMemory(10, 20, 60), 1: RankMemory(3 * 2**30, 20, 60)}
    assert shortage(ranks, 4 * 2**30) is None
    assert "pipeline rank 1 needs 3.15 GiB" in shortage(
        ranks, 3 * 2**30
    ) and "weights 3.00 GiB" in shortage(ranks, 1)


def test_the_meta_device_goes_the_way_of_a_gpu_only_while_one_is_planned_for():
    def kept_bytes() -> int:
        x = torch.empty(4, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with MemoryWatch() as watch:
            y = activate(x, "swiglu")
        assert y.shape == (4, 3)
        return watch.live_bytes

    plain = kept_bytes()
    with planned("sm_90"):
        assert kept_bytes() == 4 * 3 * 2, "the kernel keeps its input alone and makes its output"
    assert plain == kept_bytes() > 4 * 3 * 2 and dispatch.PLANNED.get() is None


def test_one_scale_for_a_tensor_writes_nothing_wide_on_a_gpu():
    def peak_bytes() -> int:
        x = torch.empty(128, 256, dtype=torch.bfloat16, device="meta")
        with MemoryWatch() as watch:
            quantize_tensor_both_ways(x, amax=amax_of(x))
        return watch.peak_bytes

    elements = 128 * 256
    assert peak_bytes() >= 5 * elements, "the plain path holds it in float32 and in FP8"
    with planned("sm_90"):
        assert peak_bytes() < 2.01 * elements, (
            "values and their transpose, and a maximum of each tile"
        )


def test_the_watch_rounds_as_an_allocator_does():
    with MemoryWatch(512) as watch:
        one, two = torch.empty(1), torch.empty(513, dtype=torch.uint8)
        assert (watch.live_bytes, Counter(map(type, (one, two)))[torch.Tensor]) == (512 + 1024, 2)


def test_snapshots_say_that_a_cpu_has_none(tmp_path):
    config = dataclasses.replace(config_of(), log=LogConfig(memory_snapshot=str(tmp_path / "s")))
    taken = MemorySnapshots(config, Process(0, 1, 0, torch.device("cpu")))
    assert (
        "requires a GPU" in taken.note
        and taken.dump("oom") is None
        and not (tmp_path / "s").exists()
    )


def test_memory_that_runs_out_in_a_step_is_written_and_ways_out_are_told(tmp_path, monkeypatch):
    """The pipeline wraps what an action raises: the snapshot is taken all the same."""
    path = tmp_path / "rank0_oom.pickle"
    monkeypatch.setattr(MemorySnapshots, "dump", lambda self, name: path if name == "oom" else None)
    for inside in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("another")):
        with (
            pytest.raises(PipelineError) as raised,
            memory_snapshots(config_of(), Process(0, 1, 0, torch.device("cpu"))),
        ):
            raise PipelineError(f"action 0F0: {inside}") from inside
        said = crash_message(raised.value, 0, 1)
        if isinstance(inside, torch.OutOfMemoryError):
            assert f"action 0F0: CUDA out of memory\n  allocations: {path}" in said
            overrides = suggestions(config_of(), 1)
            assert overrides.startswith("to need less, the cheapest first: ")
            assert "recompute.mode=full" in overrides
        else:
            assert said is None


def test_an_optimiser_on_the_host_costs_the_device_nothing():
    config = config_of()
    away = dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload=True))
    here, left = Forecaster(config, 1, H100).rank(0), Forecaster(away, 1, H100).rank(0)
    assert here.optimizer > 0 and left.optimizer == 0
    assert (
        left.weights == here.weights
        and left.gradients == here.gradients
        and left.buffers == here.buffers
    )
