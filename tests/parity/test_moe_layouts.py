"""Mixtures of experts on N ranks equal one process: loss, every gradient, auxiliary losses, biases;
fp64 to 1e-10."""

import dataclasses

import pytest
import tiers
import torch
from layouts import assert_parity, make_rows, micro_batch
from ranks import run_ranks
from whole_stage import WholeStage

from megatron5d.comm import all_to_all
from megatron5d.config.schema import (
    Config,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.model.gpt import GPT
from megatron5d.model.mlp import FeedForward
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

FULL = tiers.NIGHTLY
MODELS = {
    "mixtral": {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 24},
    "deepseek": {
        "num_experts": 8,
        "top_k": 3,
        "moe_ffn_hidden_size": 12,
        "shared_ffn_hidden_size": 20,
        "first_k_dense": 1,
        "router_score": "sigmoid",
        "num_groups": 4,
        "top_groups": 2,
        "group_score": "top2_sum",
        "router_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "latent": {
        "num_experts": 8,
        "top_k": 2,
        "moe_ffn_hidden_size": 12,
        "shared_ffn_hidden_size": 12,
        "num_groups": 2,
        "norm_topk_prob": False,
        "attention": "mla",
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rope_interleaved": True,
    },
    "biased": {
        "num_experts": 8,
        "top_k": 2,
        "moe_ffn_hidden_size": 12,
        "shared_ffn_hidden_size": 8,
        "mlp_bias": True,
    },
    "plain": {
        "num_experts": 8,
        "top_k": 2,
        "moe_ffn_hidden_size": 16,
        "activation": "gelu",
        "norm_topk_prob": False,
    },
}
BALANCES = {
    "none": {},
    "aux": {"balance": ["aux"], "aux_coef": 0.3},
    "seq": {"balance": ["seq_aux"], "aux_coef": 0.2, "z_coef": 0.05},
    "all": {
        "balance": ["aux", "seq_aux", "global_aux", "bias"],
        "aux_coef": 0.1,
        "z_coef": 0.02,
        "bias_rate": 0.005,
    },
}


def config_of(
    model="mixtral", balance="all", *, gbs=8, mbs=1, moe=None, recompute=None, layers=2, **parallel
):
    return Config(
        model=ModelConfig(
            **{
                "num_layers": layers,
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "head_dim": 8,
                "vocab_size": 97,
                **MODELS[model],
            }
        ),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(steps=10, gbs=gbs, mbs=mbs, seq_len=8),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip=0.5),
        moe=MoeConfig(**{**BALANCES[balance], **(moe or {})}),
        precision=PrecisionConfig(dtype="fp64"),
        recompute=recompute or RecomputeConfig(),
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("balance", BALANCES)
def test_one_rank(model, balance):
    assert_parity(config_of(model, balance, mbs=4), world=1, steps=2)


LAYOUTS = {
    "ep2": (2, {"ep": 2}),
    "ep4, edp2, zero": (8, {"ep": 4, "zero": 1}),
    "ep8 beyond dp": (8, {"ep": 8, "tp": 2, "sp": True, "etp": 1}),
    "tp2 sp, ep2": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    "tp2, ep2": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "tp2 sp, etp2": (2, {"tp": 2, "sp": True}),
    "tp2, ep2, etp2, zero": (4, {"tp": 2, "ep": 2, "zero": 1}),
    "tp1, ep2, etp2": (4, {"ep": 2, "etp": 2}),
    "tp2 sp, edp4": (4, {"tp": 2, "sp": True, "etp": 1, "zero": 1}),
    "nodes of 2": (4, {"ep": 4, "ep_inner": 2}),
    "tp2 sp, nodes of 2, etp2, zero": (
        8,
        {"tp": 2, "sp": True, "ep": 4, "ep_inner": 2, "etp": 2, "zero": 1},
    ),
    "tp2 sp, ep2, etp2, hybrid": (8, {"tp": 2, "sp": True, "ep": 2, "dp_replicate": 2, "zero": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
def test_layout(layout, model):
    world, parallel = LAYOUTS[layout]
    gbs = 8 if layout == "ep4, edp2, zero" else 4
    assert_parity(config_of(model, gbs=gbs, **parallel), world=world, steps=2)


@pytest.mark.parametrize("layout", ["tp1, ep2, etp2", "tp2 sp, nodes of 2, etp2, zero"])
def test_biases_of_experts(layout):
    world, parallel = LAYOUTS[layout]
    assert_parity(config_of("biased", gbs=4, **parallel), world=world, steps=2, ignored=0.5)


def test_biases_of_experts_with_a_split_backward_and_muon():
    config = config_of(
        "biased", gbs=4, pp=2, ep=2, recompute=RecomputeConfig("selective", ["experts"])
    )
    config = with_schedule(
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, name="muon")), "zb_h1"
    )
    assert_parity(config, world=4, steps=2)


@pytest.mark.parametrize("drop_by", ["probability", "position"])
@pytest.mark.parametrize(
    ("world", "parallel"), [(1, {}), (4, {"tp": 2, "sp": True, "ep": 2}), (2, {"tp": 2, "etp": 1})]
)
def test_limited_capacity_drops_the_same_everywhere(world, parallel, drop_by):
    moe = {"capacity_factor": 1.0, "drop_by": drop_by}
    assert_parity(config_of("mixtral", mbs=2, moe=moe, **parallel), world=world, steps=2)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, {}), (2, {"tp": 2, "sp": True}), (2, {"cp": 2}), (2, {"ep": 2}), (2, {"pp": 2})],
)
def test_rounding_does_not_choose_among_equal_tokens(world, parallel):
    """The first tokens of documents have the same state in every layer, up to the last bits."""
    moe = {"capacity_factor": 0.7}
    config = config_of("mixtral", gbs=4, mbs=4 // (1 + ("ep" in parallel)), moe=moe, **parallel)
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, seq_len=64),
        data=dataclasses.replace(config.data, document_mask=True, eod=0),
    )
    rows = make_rows(config, 3)
    rows[:, ::4], rows[:, 1::4] = 0, 1  # documents of four tokens, of which the first is 1
    assert_parity(config, world=world, steps=3, rows=rows)


@pytest.mark.parametrize(
    ("world", "parallel"), [(1, {}), (2, {"tp": 2, "ep": 2, "etp": 1}), (4, {"ep": 4, "zero": 1})]
)
@pytest.mark.parametrize("capacity", [None, 1.1])
def test_padding_neither_routes_nor_counts(world, parallel, capacity):
    config = config_of("deepseek", mbs=2, moe={"capacity_factor": capacity}, **parallel)
    assert_parity(config, world=world, steps=2, ignored=0.8)


def steps_of(rank, world, config):
    """Norms, weights and repetitions of some steps."""
    mesh = build_mesh(sizes_of(config, world), rank)
    model = GPT(config, mesh)
    model.initialize(1)
    _, _, trainer = build_trainer(config, mesh, model, pipeline_layout(config, world))
    found, rows = [], make_rows(config, 4)
    for step in range(4):
        batches = [
            micro_batch(config, rows, torch.tensor([4 * step + 2 * rank + i])) for i in range(2)
        ]
        result = trainer.step(batches, 1e-2)
        found.append((result.repeated, result.grad_norm, result.losses))
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("imbalance", [1.0, 2.0])
def test_planned_exchange(imbalance):
    """Where there is room for all, and where there is not and steps are repeated: bit for bit the
    counted exchange."""
    parallel = {
        "gbs": 4,
        "ep": 2,
        "recompute": RecomputeConfig("selective", ["permute", "activation"]),
    }
    planned = config_of(
        "deepseek", moe={"exchange": "planned", "planned_imbalance": imbalance}, **parallel
    )
    both = zip(
        run_ranks(steps_of, 2, planned), run_ranks(steps_of, 2, config_of("deepseek", **parallel))
    )
    for (steps, weights), (counted, true_weights) in both:
        assert [step[1:] for step in steps] == [step[1:] for step in counted]
        assert all(map(torch.equal, weights, true_weights))
        assert any(step[0] for step in steps) == (imbalance == 1.0) and not any(
            step[0] for step in counted
        )


def test_planned_exchange_over_all_dimensions():
    moe = {"exchange": "planned", "planned_imbalance": 1.5}
    config = config_of("biased", gbs=4, moe=moe, tp=2, sp=True, pp=2, ep=2, etp=2, zero=1)
    assert_parity(with_schedule(config, "zb_h1"), world=8, steps=2, ignored=0.5)


def test_latent_attention_and_experts():
    assert_parity(config_of("latent", gbs=4, tp=2, sp=True, ep=4, etp=1, zero=1), world=4, steps=2)


@pytest.mark.parametrize("mbs", [1, 2, 4])
def test_gradient_accumulation(mbs):
    assert_parity(config_of("mixtral", mbs=mbs, ep=2, zero=1), world=2, steps=2)


@pytest.mark.parametrize(
    ("model", "parallel"), [("mixtral", {}), ("deepseek", {"etp": 1, "ep": 4, "ep_inner": 2})]
)
def test_full_recompute(model, parallel):
    parallel = {"ep": 2, "tp": 2, "sp": True} | parallel
    assert_parity(
        config_of(model, gbs=4, recompute=RecomputeConfig("full"), **parallel), world=4, steps=2
    )


@pytest.mark.parametrize(
    ("schedule", "parallel"),
    [("1f1b", {"cp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 1}), ("zb_h1", {"pp": 2, "ep": 2})],
)
def test_jitter_is_drawn_by_token_and_not_by_rank(schedule, parallel):
    """The forward that counts choices and one that is recomputed draw what the first did."""
    config = config_of(
        "deepseek", gbs=4, mbs=2, moe={"jitter": 0.3}, recompute=RecomputeConfig("full"), **parallel
    )
    assert_parity(with_schedule(config, schedule), world=4, steps=2, ignored=0.8)


def test_an_evaluation_draws_nothing():
    sums = {}
    for jitter in (0.0, 0.3):
        config = config_of("deepseek", mbs=2, moe={"jitter": jitter})
        mesh = build_mesh(sizes_of(config, 1))
        model = GPT(config, mesh)
        model.initialize(1)
        _, _, trainer = build_trainer(config, mesh, model, pipeline_layout(config, 1))
        batches = [micro_batch(config, make_rows(config, 1), torch.arange(2))]
        sums[jitter] = trainer.evaluate(batches)[0].item(), trainer.accumulate(batches)[0].item()
    assert sums[0.3][0] == sums[0.0][0] == sums[0.0][1] != sums[0.3][1]


def test_an_odd_number_of_tokens_over_tp_without_sp():
    config = config_of("deepseek", gbs=4, tp=2, ep=2, etp=1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seq_len=7))
    assert_parity(config, world=2, steps=2)


@pytest.mark.parametrize(
    "pattern", [{"moe_layers": [0, 2]}, {"moe_interval": 2}, {"first_k_dense": 2}]
)
def test_dense_layers_between(pattern):
    config = config_of("mixtral", layers=3, ep=2, mbs=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **pattern))
    assert_parity(config, world=2, steps=2)


def with_schedule(config, schedule, layout=None):
    return dataclasses.replace(config, pipeline=PipelineConfig(schedule=schedule, layout=layout))


PIPELINES = {
    "1f1b, ep2": (4, "1f1b", {"pp": 2, "ep": 2}, 2),
    "zb_h1, tp2 sp, ep2": (4, "zb_h1", {"pp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 1}, 2),
    "interleaved, ep2, zero": (4, "interleaved", {"pp": 2, "vpp": 2, "ep": 2, "zero": 1}, 4),
    "dualpipe_v, ep2": (4, "dualpipe_v", {"pp": 2, "ep": 2}, 4),
    "dualpipe, ep2, zero": (4, "dualpipe", {"pp": 2, "ep": 2, "zero": 1}, 2),
    "dualpipe, edp2": (4, "dualpipe", {"pp": 2}, 2),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines(case):
    """Auxiliary gradients and counts of every micro-batch, in both directions and with weight
    gradients apart."""
    world, schedule, parallel, layers = PIPELINES[case]
    config = config_of("mixtral", layers=layers, gbs=8, mbs=1, **parallel)
    assert_parity(with_schedule(config, schedule), world=world, steps=2)


@pytest.mark.parametrize("zero", [1, 3])
def test_two_of_one_kind_overlap(tmp_path, zero):
    """Two forwards, or two input gradients, of the same stage or of two: the search makes such
    pairs."""
    lines = [
        "(0F0;0F1) 0F2 (3F0;0F3) 3F1 (3F2;3F3) (3I0;3I1) (3I2;3I3) (0I0;0I1) (0I2;0I3)",
        "(1F0;1F1) (2F0;2F1) (1F2;1F3) (2F2;2F3) (2I0;2I1) 2I2 (2I3;1I0) (1I1;1I2) 1I3",
    ]
    weights = [
        " ".join(f"{stage}W{i}" for stage in held for i in range(4)) for held in ((3, 0), (2, 1))
    ]
    rows = [
        f"{line} {rest}".replace(")", ")OVERLAP_F_B").replace(" ", ",")
        for line, rest in zip(lines, weights)
    ]
    path = tmp_path / "pairs.csv"
    path.write_text("\n".join(rows) + "\n")
    config = config_of("mixtral", layers=4, gbs=8, mbs=1, pp=2, ep=2, zero=zero)
    assert_parity(with_schedule(config, f"file:{path}", layout=[1] * 4), world=4, steps=2)


CONTEXT = {
    "cp2, ep2": (2, {"cp": 2, "ep": 2}),
    "cp2, tp2 sp, ep2, etp2": (4, {"cp": 2, "tp": 2, "sp": True, "ep": 2}),
    "cp2, dp2, ep4": (4, {"cp": 2, "ep": 4, "ep_inner": 2, "zero": 1}),
    "cp2, tp2, capacity": (4, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}),
}


@pytest.mark.parametrize("case", CONTEXT)
def test_sequences_cut_over_cp(case):
    world, parallel = CONTEXT[case]
    moe = {"capacity_factor": 1.0, "drop_by": "position"} if "capacity" in case else {}
    config = config_of("deepseek", mbs=2, moe=moe, **parallel)
    assert_parity(config, world=world, steps=2, ignored=0.8)


def order_of_the_way(rank, world, config):
    """What one MoE layer starts, computes and waits for, in order: forward, then backward."""
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads)
    model = GPT(config, mesh)
    model.initialize(1)
    batch = micro_batch(config, make_rows(config, 1)[:1])
    events, start_all_to_all = [], all_to_all.start_all_to_all
    with pytest.MonkeyPatch.context() as patch:
        exchange = [(all_to_all.Exchange, name) for name in ("_start", "_wait")]
        for owner, name in [*exchange, (FeedForward, "project_up"), (FeedForward, "project_down")]:
            function = getattr(owner, name)

            def recorded(self, *args, function=function, name=name):
                is_exchange = isinstance(self, all_to_all.Exchange)
                events.append(f"{name} {self.axis.name}" if is_exchange else name)
                return function(self, *args)

            patch.setattr(owner, name, recorded)
        stage = WholeStage(model.phases[:-1])
        y = stage.forward(0, None, batch)
        forward = list(events)

        def start_back(x, axis, *splits):
            events.append(f"_start_back {axis.name}")
            pending = start_all_to_all(x, axis, *splits)
            wait = pending.wait
            pending.wait = lambda: events.append(f"_wait_back {axis.name}") or wait()
            return pending

        patch.setattr(all_to_all, "start_all_to_all", start_back)
        stage.backward(0, torch.ones_like(y))
    return forward, events[len(forward) :]


def test_the_shared_expert_runs_under_both_halves_of_a_way_over_nodes():
    """Rows and weights leave for the node; each half of the way is under way while a half of the
    shared expert runs."""
    there = [
        "_start ep_outer",
        "_start ep_outer",
        "project_up",
        "_wait ep_outer",
        "_wait ep_outer",
        "_start ep_inner",
        "_start ep_inner",
        "project_down",
        "_wait ep_inner",
        "_wait ep_inner",
    ]
    config = config_of("deepseek", "none", ep=4, ep_inner=2)
    for forward, backward in run_ranks(order_of_the_way, 4, config):
        first = forward.index(there[0])  # behind the dense layers
        assert forward[first : first + len(there)] == there
        halves = [
            f"_{do}_back {axis}" for axis in ("ep_inner", "ep_outer") for do in ("start", "wait")
        ]
        # behind the way home's
        assert backward[4:12] == [event for event in halves for _ in ("rows", "weights")]


@pytest.mark.nightly
@pytest.mark.parametrize("padded", [0.0, 0.8])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_the_whole_product(ep, tp, cp, etp, capacity, balance, padded):
    world = max(ep * etp, tp * cp)
    model = "deepseek" if balance == "all" else "mixtral"
    parallel = {
        "ep": ep,
        "tp": tp,
        "sp": tp > 1 and cp == 1,
        "cp": cp,
        "etp": etp,
        "zero": int(world > tp * cp),
    }
    config = config_of(model, balance, gbs=16, moe={"capacity_factor": capacity}, **parallel)
    assert_parity(config, world=world, steps=1, ignored=padded)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"] if FULL else ["dualpipe"])
def test_all_five_dimensions(schedule):
    """16 ranks; MEGATRON5D_TESTS=nightly runs other schedules too."""
    parallel = {"tp": 2, "sp": True, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "zero": 1}
    config = config_of("deepseek", layers=4, gbs=8, mbs=1, **parallel)
    assert_parity(with_schedule(config, schedule), world=16, steps=2, ignored=0.8)
