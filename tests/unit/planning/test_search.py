"""The search for layouts: valid, fitting, in the user's bounds, never worse than what was given,
and sparing."""

import dataclasses
from types import SimpleNamespace

import pytest
from parity_configs import config_of

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import changed
from megatron5d.config.schema import PrecisionConfig
from megatron5d.pipeline_parallel.registry import schedule_names
from megatron5d.planning import layout_search as layouts
from megatron5d.planning.clusters import cluster_called
from megatron5d.planning.layout_search import Candidate, Evaluation, LayoutSearch, best
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import CONTEXT_BYTES, FRAGMENTATION
from megatron5d.planning.planned_config import planned_config
from megatron5d.planning.proposals import Proposals
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults, quick_layout
from megatron5d.planning.time import workload
from megatron5d.planning.time.dp_traffic import Sharding
from megatron5d.planning.time.predict import Estimator
from megatron5d.planning.time.workload import Workloads
from megatron5d.topology.mesh import planned_mesh
from megatron5d.train.build import sizes_of

CLUSTER = dataclasses.replace(cluster_called("h100"), node=4)


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setattr(layouts, "LIMIT", 6)


def config():
    """A mixture of 4 experts, two nodes of four, sequences long enough for cp."""
    made = config_of(gbs=16, zero=1)
    fields = {
        "vocab_size": 512,
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "head_dim": 64,
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 256,
    }
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, **fields),
        train=dataclasses.replace(made.train, seq_len=8192),
        precision=PrecisionConfig(dtype="bf16"),
    )


def test_layouts_are_lawful_fit_and_keep_what_is_fixed():
    given, world, have = config(), 8, 2_000_000_000
    given = changed(given, {"parallel.tp": 2, "parallel.sp": True})
    search = LayoutSearch(given, world, CLUSTER, fixed={"parallel.tp", "train.mbs"})
    candidates = search.candidates(have)
    found = search.best(candidates, have, 3)
    assert len(found) == 3 and len(candidates) > 50
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    for each in found:
        laid = changed(given, search.overrides(each))
        assert laid == changed(given, each.change) and (laid.parallel.tp, laid.train.mbs) == (2, 1)
        assert not run_checks(laid, world, files=False) and not pipeline_faults(laid, world)
        careful = Target("sm_90", given.moe.planned_imbalance)  # as the run itself forecasts it
        needed = max(memory.needed for memory in Forecaster(laid, world, careful).ranks().values())
        assert needed == each.needed <= have
        assert Estimator(CLUSTER).step(laid, world).step_s == pytest.approx(each.seconds)
    assert not search.best(candidates[:2], 10**8, 1)  # CUDA's own context takes more


def proposed(change, capacity=790_000_000, **kept):
    """Changes that are proposed besides the given layout; `kept` are axes that stay."""
    kept = {f"parallel.{name}": value for name, value in kept.items()}
    given = changed(config(), {"parallel.tp": 1, **kept, **change})
    fixed = {*kept, *(key for key in change if key in ("pipeline.schedule", "recompute.offload"))}
    return [
        each.change
        for each in LayoutSearch(given, 8, CLUSTER, fixed=fixed).candidates(capacity)[1:]
    ]


def test_what_is_proposed_does_not_depend_on_what_is_not_fixed():
    one, many = (
        proposed({"train.mbs": mbs, "parallel.zero": 0}, tp=1, pp=1, ep=1) for mbs in (1, 16)
    )
    assert one == many and {each["recompute.mode"] for each in one} >= {"full"}
    # a check refuses that with `none`
    partly = {"recompute.mode": "full", "recompute.num_layers": 1}
    found = proposed(partly, capacity=2_000_000_000, tp=1, pp=2, ep=1)
    assert {each["recompute.mode"] for each in found} >= {"selective", "full"}
    parted = {
        "parallel.cp": 2,
        "parallel.cp_method": "two_level",
        "parallel.cp_inner": 2,
        "parallel.ep": 4,
    }
    found = proposed({**parted, "parallel.ep_inner": 2}, tp=1, pp=2)
    assert {each["parallel.cp"] for each in found} == {1, 2} and {
        each["parallel.ep"] for each in found
    } == {1, 2, 4}


def test_a_rank_is_proposed_32_experts_at_most():
    shapes = Proposals(changed(config(), {"model.num_experts": 64}), 8, 4).shapes()
    assert {each["parallel.ep"] for each in shapes} == {2, 4, 8}


def test_only_what_is_surely_kept_rules_a_layout_out():
    plain = {"pipeline.schedule": "1f1b"}
    few = proposed(plain, tp=1, pp=4, ep=1)
    for kept_less in (
        {"pipeline.schedule": "v_half"},
        {**plain, "recompute.offload": ["attention"]},
    ):
        assert len(proposed(kept_less, tp=1, pp=4, ep=1)) > len(few)


@pytest.mark.parametrize("tp", [1, 8])
def test_nothing_that_fits_is_ruled_out_at_a_glance(tp):
    """On a device that has just what the forecast says; what tp gathers is not kept."""
    sizes = [
        "model.num_layers=8",
        "train.seq_len=8192",
        "train.gbs=64",
        "train.mbs=8",
        "precision.dtype=bf16",
    ]
    kept = {
        f"parallel.{name}": value
        for name, value in {"tp": tp, "sp": tp > 1, "pp": 1, "cp": 1, "zero": 1}.items()
    }
    given = planned_config(
        ["model=llama3_8b", *sizes, *(f"{key}={value}" for key, value in kept.items())], 8
    )
    search = LayoutSearch(
        changed(given, {"recompute.mode": "full"}),
        8,
        CLUSTER,
        fixed={*kept, "train.mbs", "pipeline.schedule"},
    )
    for mode in ("none", "selective"):
        laid = changed(given, {"recompute.mode": mode})
        needed = max(
            memory.needed for memory in Forecaster(laid, 8, Target("sm_90")).ranks().values()
        )
        assert mode in {each.change["recompute.mode"] for each in search.candidates(needed)[1:]}


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_state_seen_at_a_glance_is_the_forecasts(optim, zero):
    """Weights, gradients and moments of one rank, but for what buffers add to them."""
    words = [
        "model=llama3_8b",
        "model.num_layers=2",
        "train.gbs=8",
        "precision.dtype=bf16",
        f"parallel.zero={zero}",
    ]
    given = planned_config([*words, f"optim.name={optim}"], 8)
    plan = quick_layout(given, 8)
    (units,) = Workloads(Target()).stages(given, plan)
    seen = Sharding(given, planned_mesh(sizes_of(given, 8)), plan.shared).state_bytes(units)
    (memory,) = Forecaster(given, 8, Target("sm_90")).ranks().values()
    assert seen == pytest.approx(memory.weights + memory.gradients + memory.optimizer, rel=0.01)


@pytest.mark.parametrize("experiment", ["gpt2_124m", "llama3_8b"])
def test_the_best_is_no_worse_than_what_ships(experiment):
    """Most of the larger one's keys are kept, because a whole search takes half a minute."""
    world, narrow = (
        (8, [])
        if experiment == "gpt2_124m"
        else (
            64,
            ["parallel.cp=1", "parallel.pp=1", "train.mbs=1", "parallel.sp=true"],
        )
    )
    shipped = planned_config([f"experiment={experiment}", *narrow], world)
    have = CLUSTER.memory_bytes
    cluster = dataclasses.replace(CLUSTER, node=8)
    search = LayoutSearch(shipped, world, cluster, fixed={key.partition("=")[0] for key in narrow})
    assert (
        max(
            memory.needed for memory in Forecaster(shipped, world, Target("sm_90")).ranks().values()
        )
        <= have
    )
    found = search.best(search.candidates(have), have, 1)
    assert found[0].seconds <= Estimator(cluster).step(shipped, world).step_s


def test_the_fastest_that_fit_are_found_and_few_are_asked_about():
    """Each is (estimate, seconds, least bytes, bytes); a device has 50."""
    known = {
        "slower than estimated": (1.0, 3.0, 10, 20),
        "surely too large": (1.1, 1.1, 60, 60),
        "refused": (1.2, 1.2, 10, 10),
        "too large": (1.3, 1.4, 40, 51),
        "best": (1.5, 1.6, 40, 50),
        "second": (1.7, 2.0, 10, 20),
        "not looked at": (2.1, 2.1, 10, 20),
    }
    asked = {"runs": [], "least": [], "price": [], "need": []}

    def answer(question, value):
        def answered(change):
            asked[question].append(change["name"])
            return value(change["name"])

        return answered

    evaluation = Evaluation(
        answer("runs", lambda name: name != "refused"),
        answer("least", lambda name: known[name][2]),
        answer("price", lambda name: SimpleNamespace(step_s=known[name][1])),
        answer("need", lambda name: known[name][3]),
    )

    def found(**bounds):
        candidates = [Candidate({"name": name}, known[name][0]) for name in reversed(known)]
        return best(candidates, evaluation, capacity=50, **bounds)

    first, second = found(count=2, limit=9)
    assert (first.change["name"], first.seconds, first.needed) == ("best", 1.6, 50)
    assert second.change["name"] == "second"
    looked_at = [name for name in known if name != "not looked at"]
    assert asked["runs"] == looked_at and asked["need"] == ["too large", "best", "second"]
    assert asked["least"] == [name for name in looked_at if name != "refused"]
    assert asked["price"] == [name for name in asked["least"] if name != "surely too large"]
    assert [each.change["name"] for each in found(count=2, limit=2)] == ["best"]
    assert [each.change["name"] for each in found(count=9, limit=9)] == [
        "best",
        "second",
        "not looked at",
        "slower than estimated",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe_v"])
def test_a_rank_needs_a_little_more_than_what_it_is_said_to_need_at_least(schedule):
    laid = changed(
        config(),
        {
            "parallel.tp": 1,
            "parallel.pp": 2,
            "parallel.ep": 4,
            "train.gbs": 32,
            "pipeline.schedule": schedule,
            "recompute.mode": "selective",
        },
    )
    estimator, plan, target = Estimator(CLUSTER, 1.5), quick_layout(laid, 8), Target("sm_90", 1.5)
    least = estimator.min_bytes(laid, 8, plan)
    for rank, memory in Forecaster(laid, 8, target, plan).ranks().items():
        fixed = memory.outside - CONTEXT_BYTES + (1 + FRAGMENTATION) * memory.library
        assert 0.9 * (memory.needed - fixed) < least[rank] <= memory.needed - fixed


@pytest.mark.parametrize("schedule", schedule_names())
def test_ranks_that_are_not_asked_need_no_more_than_those_that_are(schedule, monkeypatch):
    """Two dense layers and thirty mixtures on eight pipeline ranks, with experts as uneven as a run
    plans them."""
    fields = {
        "model.num_layers": 32,
        "model.moe_layers": list(range(2, 32)),
        "parallel.ep": 2,
        "train.gbs": 48,
    }
    given = changed(
        config(), {**fields, "parallel.tp": 1, "parallel.pp": 8, "pipeline.schedule": schedule}
    )
    search, asked, rank = LayoutSearch(given, 16, CLUSTER), [], Forecaster.rank
    monkeypatch.setattr(
        Forecaster, "rank", lambda self, place: asked.append(place) or rank(self, place)
    )
    needed = search._needed_bytes(search._configured(), 10**15)
    assert len(asked) < 8
    memories = Forecaster(given, 16, search._target).ranks().values()
    assert needed == pytest.approx(max(memory.needed for memory in memories), rel=1e-5)


def test_passes_that_nobody_asks_about_are_not_run(monkeypatch):
    """Nor any of them twice: a layout's own size, its schedule and its micro-batches change no unit
    of one sequence."""
    ran, run_single = [], workload._run_single

    def noted(alone, target, depths, backs):
        ran.append((str(alone), target.imbalance, backs))
        return run_single(alone, target, depths, backs)

    monkeypatch.setattr(workload, "_run_single", noted)
    for schedule, backs in (("1f1b", {"B", ""}), ("zb_v", {"B", "I"})):
        given = changed(
            config(), {"parallel.tp": 1, "parallel.pp": 2, "pipeline.schedule": schedule}
        )
        search = LayoutSearch(
            given, 8, CLUSTER, fixed={"parallel.tp", "parallel.pp", "pipeline.schedule"}
        )
        ran.clear()
        assert search.best(search.candidates(10**12), 10**12, 2)
        assert len(ran) == len(set(ran)) and {each[2] for each in ran} == backs
        assert sum(each[2] == "B" for each in ran) <= 3 * 2 * 3  # ep, cp, recompute
