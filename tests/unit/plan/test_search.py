"""The search for layouts: lawful, fitting, in the user's bounds, never worse than what was given, and sparing."""

import dataclasses
from types import SimpleNamespace

import pytest
from parity_configs import config_of

from megatron5d.config.laws import broken_laws
from megatron5d.config.laws_files import FILE_LAWS
from megatron5d.config.schema import PrecisionConfig
from megatron5d.plan.cluster import cluster_called
from megatron5d.plan.search import Candidate, Misfits, Proposals, Questions, best
from megatron5d.train.planning import layouts
from megatron5d.train.planning.estimate import Estimator
from megatron5d.train.planning.fitting import changed
from megatron5d.train.planning.forecast import Forecaster, Target
from megatron5d.train.planning.layouts import LayoutSearch
from megatron5d.train.planning.planned import planned_config
from megatron5d.train.schedule import pipeline_faults

CLUSTER = dataclasses.replace(cluster_called("h100"), node=4)


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setattr(layouts, "LIMIT", 6)


def config():
    """A mixture of 4 experts, two nodes of four, sequences long enough for cp."""
    made = config_of(gbs=16, zero=1)
    fields = {
        "vocab_size": 512, "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "head_dim": 64,
        "num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 256,
    }  # fmt: skip
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
        assert not broken_laws(laid, world, without=FILE_LAWS) and not pipeline_faults(laid, world)
        careful = Target("sm_90", given.moe.planned_imbalance)  # as the run itself forecasts it
        needed = max(memory.needed for memory in Forecaster(laid, world, careful).ranks().values())
        assert needed == each.needed <= have
        assert Estimator(CLUSTER).step(laid, world).step_s == pytest.approx(each.seconds)
    assert not search.best(candidates[:2], 10**8, 1)  # CUDA's own context takes more


def proposed(change, have=150_000_000, **kept):
    """Changes that are proposed besides the given layout; `kept` are axes that stay."""
    kept = {f"parallel.{name}": value for name, value in kept.items()}
    given = changed(config(), {"parallel.tp": 1, **kept, **change})
    fixed = {*kept, *(key for key in change if key in ("pipeline.schedule", "recompute.offload"))}
    return [each.change for each in LayoutSearch(given, 8, CLUSTER, fixed=fixed).candidates(have)[1:]]


def test_what_is_proposed_does_not_depend_on_what_is_not_fixed():
    one, many = (proposed({"train.mbs": mbs, "parallel.zero": 0}, tp=1, pp=1, ep=1) for mbs in (1, 16))
    assert one == many and {each["recompute.mode"] for each in one} >= {"full"}
    partly = {"recompute.mode": "full", "recompute.num_layers": 1}  # a law refuses that with `none`
    found = proposed(partly, have=2_000_000_000, tp=1, pp=2, ep=1)
    assert {each["recompute.mode"] for each in found} >= {"selective", "full"}
    parted = {"parallel.cp": 2, "parallel.cp_method": "two_level", "parallel.cp_inner": 2, "parallel.ep": 4}
    found = proposed({**parted, "parallel.ep_inner": 2}, tp=1, pp=2)
    assert {each["parallel.cp"] for each in found} == {1, 2} and {each["parallel.ep"] for each in found} == {1, 2, 4}


def test_a_rank_is_proposed_32_experts_at_most():
    shapes = Proposals(changed(config(), {"model.num_experts": 64}), 8, 4).shapes()
    assert {each["parallel.ep"] for each in shapes} == {2, 4, 8}


def test_only_what_is_surely_kept_rules_a_layout_out():
    plain = {"pipeline.schedule": "1f1b"}
    few = proposed(plain, tp=1, pp=4, ep=1)
    for kept_less in ({"pipeline.schedule": "v_half"}, {**plain, "recompute.offload": ["attention"]}):
        assert len(proposed(kept_less, tp=1, pp=4, ep=1)) > len(few)


@pytest.mark.parametrize("tp", [1, 8])
def test_nothing_that_fits_is_ruled_out_at_a_glance(tp):
    """On a device that has just what the forecast says; what tp gathers is not kept."""
    sizes = ["model.num_layers=8", "train.seq_len=8192", "train.gbs=64", "train.mbs=8", "precision.dtype=bf16"]
    kept = {f"parallel.{name}": value for name, value in {"tp": tp, "sp": tp > 1, "pp": 1, "cp": 1, "zero": 1}.items()}
    given = planned_config(["model=llama3_8b", *sizes, *(f"{key}={value}" for key, value in kept.items())], 8)
    search = LayoutSearch(
        changed(given, {"recompute.mode": "full"}), 8, CLUSTER, fixed={*kept, "train.mbs", "pipeline.schedule"}
    )
    for mode in ("none", "selective"):
        laid = changed(given, {"recompute.mode": mode})
        needed = max(memory.needed for memory in Forecaster(laid, 8, Target("sm_90")).ranks().values())
        assert mode in {each.change["recompute.mode"] for each in search.candidates(needed)[1:]}


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
    assert max(memory.needed for memory in Forecaster(shipped, world, Target("sm_90")).ranks().values()) <= have
    found = search.best(search.candidates(have), have, 1)
    assert found[0].seconds <= Estimator(cluster).step(shipped, world).step_s


def layout(mode="none", mbs=1, zero=1, schedule="1f1b", tp=1):
    return {
        "recompute.mode": mode, "train.mbs": mbs, "parallel.zero": zero, "pipeline.schedule": schedule,
        "parallel.vpp": 1, "parallel.tp": tp,
    }  # fmt: skip


def test_what_keeps_more_than_a_misfit_is_one():
    misfits = Misfits()
    misfits.add(layout("selective", 2, 1), excess=1.2)
    for more in (layout("selective", 2), layout("none", 2), layout("selective", 4), layout("none", 4, 0)):
        assert misfits.cover(more)
    for other in (layout("full", 2), layout("selective", 1), layout("selective", 2, 3), layout("none", 2, tp=2)):
        assert not misfits.cover(other)
    assert not misfits.cover(layout("none", 2, schedule="zb_v"))
    misfits.add(layout("selective", 2, 1), excess=2.0)
    assert misfits.cover(layout("none", 2, schedule="zb_v")) and not misfits.cover(layout("full", 2, schedule="zb_v"))


def test_few_are_asked_about_and_the_best_is_found():
    """Guesses are 10 % off at most: what is guessed to be slower than that is not looked at."""
    asked = []
    times = {1: 3.0, 2: 2.0, 4: 1.0, 8: 1.05, 16: 9.0}
    candidates = [Candidate(layout(mbs=mbs, tp=mbs), seconds * 0.95) for mbs, seconds in times.items()]

    def need(change):
        asked.append(change["parallel.tp"])
        return 100 if change["parallel.tp"] == 4 else 10

    def price(change):
        return SimpleNamespace(step_s=times[change["parallel.tp"]])

    questions = Questions(lambda change: change["parallel.tp"] != 8, price, need)
    found = best(candidates, questions, have=50, count=1, limit=10)
    assert [each.change["parallel.tp"] for each in found] == [2] and asked == [4, 2]
    assert (found[0].seconds, found[0].needed) == (2.0, 10)


def test_what_is_guessed_to_be_a_little_slower_is_looked_at():
    candidates = [Candidate(layout(tp=tp), guess) for tp, guess in ((1, 2.0), (2, 2.1), (4, 2.3))]
    times, asked = {1: 2.0, 2: 1.9, 4: 1.0}, []

    def need(change):
        asked.append(change["parallel.tp"])
        return 10

    def price(change):
        return SimpleNamespace(step_s=times[change["parallel.tp"]])

    questions = Questions(lambda change: True, price, need)
    (found,) = best(candidates, questions, have=50, count=1, limit=10)
    assert found.change["parallel.tp"] == 2 and asked == [1, 2]
