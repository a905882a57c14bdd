"""What a step is predicted to send is what the ledger of real steps on real ranks counts; times add
up and behave."""

import dataclasses

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from rank_pool import run_on_pool

from megatron5d.comm.ledger import Ledger, Traffic
from megatron5d.config.derived import blocks
from megatron5d.config.schema import LogConfig, PipelineConfig, PrecisionConfig, RecomputeConfig
from megatron5d.data.batch import SequenceSharding
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.model.flops import core_flops, flops_per_token
from megatron5d.model.gpt import GPT
from megatron5d.planning.clusters import cluster_called, cluster_of
from megatron5d.planning.memory.forecast import Target
from megatron5d.planning.time.dp_traffic import Sharding, offload_bytes, rounds
from megatron5d.planning.time.predict import Estimator, prediction_of
from megatron5d.planning.time.step_time import Prices
from megatron5d.planning.time.work import Elements, Matrix, Unit, Work
from megatron5d.planning.time.workload import Workloads
from megatron5d.topology.mesh import build_mesh, planned_mesh
from megatron5d.topology.process import Process
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

# every token chooses every expert: the only routing whose counts are known beforehand
MOE = {
    "num_experts": 4,
    "top_k": 4,
    "moe_ffn_hidden_size": 24,
    "shared_ffn_hidden_size": 40,
    "first_k_dense": 1,
}
H100 = cluster_called("h100")


def layout(*, schedule=None, stages=None, fields=None, fp8="none", **options):
    """Tensors that dwarf the scalars beside them, and parameters that dwarf what fills their
    buckets up."""
    config = config_of(**{"gbs": 4, **options})
    size = {
        "vocab_size": 512,
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "head_dim": 16,
    }
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **{**size, **(fields or {})}),
        train=dataclasses.replace(config.train, seq_len=64),
        precision=PrecisionConfig(dtype="bf16", fp8=fp8),
        pipeline=PipelineConfig(schedule, stages) if schedule else PipelineConfig(),
    )


def sent_on_rank(rank: int, world: int, config) -> tuple[int, dict[str, int]]:
    """(pipeline rank, axis -> bytes) of a step that is not the first."""
    plan, ledger = pipeline_layout(config, world), Ledger()
    mesh = build_mesh(
        sizes_of(config, world),
        rank,
        num_kv_heads=config.model.num_kv_heads,
        shared=plan.shared,
        recorder=ledger,
    )
    model = GPT(config, mesh, "cpu", plan.stage_specs(mesh["pp"].rank), plan.shared)
    model.initialize(1)
    sync, _, trainer = build_trainer(config, mesh, model, plan)
    t, sharding = config.train, SequenceSharding(config, mesh)
    numbers = micro_batch_samples(0, t.gbs, t.mbs, mesh["dp"].rank, mesh["dp"].size)
    rows = make_rows(config, 1)
    for _ in range(2):
        sync.finish_gather()
        ledger.clear()
        trainer.step([sharding(micro_batch(config, rows[list(each)])) for each in numbers], 1e-3)
    sync.finish_gather()
    return mesh["pp"].rank, ledger.bytes_by_axis()


MUON = {"name": "muon"}
PER_STEP = {"zero3_gather": "per_step", "grad_reduce": "per_step"}
FULL, PARTS = (
    RecomputeConfig("full"),
    RecomputeConfig("selective", ["norm", "mlp", "attention"], num_layers=2),
)
LAYOUTS = {
    "tp-cp-zero1": (8, {"tp": 2, "sp": True, "cp": 2, "zero": 1}),
    "tp-mbs": (2, {"tp": 2, "mbs": 2}),
    "ulysses-zero3": (4, {"cp": 2, "cp_method": "ulysses", "zero": 3, "recompute": PARTS}),
    "zero2-interleaved": (
        4,
        {"pp": 2, "vpp": 2, "zero": 2, "schedule": "interleaved", "recompute": FULL, "gbs": 8},
    ),
    "moe-zb": (4, {"pp": 2, "ep": 2, "zero": 1, "schedule": "zb_h1", "fields": MOE}),
    "moe-etp": (
        4,
        {"tp": 2, "sp": True, "ep": 4, "etp": 1, "fields": {**MOE, "num_mtp_layers": 1}},
    ),
    "dualpipe": (2, {"pp": 2, "schedule": "dualpipe_v", "fields": MOE}),
    "chunked-hsdp": (
        8,
        {"tp": 2, "sp": True, "tp_overlap": "chunked", "zero": 3, "dp_replicate": 2, "gbs": 8},
    ),
    "mla": (4, {"model": "mla", "tp": 2, "sp": True, "cp": 2}),
    "tied-ends-apart": (4, {"pp": 2, "zero": 1, "fields": {"tie_embeddings": True}}),
    "mtp-ends-apart": (4, {"pp": 2, "zero": 2, "fields": {"num_mtp_layers": 1}}),
    "mtp-before-head": (
        6,
        {
            "pp": 3,
            "zero": 1,
            "schedule": "1f1b",
            "stages": [2, 4, 0],
            "gbs": 12,
            "fields": {"num_mtp_layers": 2, "tie_embeddings": True},
        },
    ),
    "zero3-one-layer": (8, {"pp": 4, "zero": 3, "gbs": 16, "recompute": FULL}),
    "zero3-fp8": (4, {"pp": 2, "zero": 3, "gbs": 8, "fields": MOE, "fp8": "tensorwise"}),
    "zero3-step": (2, {"zero": 3, **PER_STEP, "gbs": 8, "fp8": "tensorwise"}),
    "zero3-tied-zb": (
        4,
        {"pp": 2, "zero": 3, "schedule": "zb_v", "fields": {"tie_embeddings": True}, "gbs": 8},
    ),
    "zero3-dualpipe": (
        4,
        {"pp": 2, "zero": 3, "schedule": "dualpipe_v", "fields": MOE, "recompute": FULL, "gbs": 8},
    ),
    "tied-zero3": (2, {"zero": 3, "fields": {"tie_embeddings": True, "num_mtp_layers": 2}}),
    "muon-tp-zero1": (8, {"tp": 2, "sp": True, "cp": 2, "zero": 1, "optim": MUON}),
    "freeze-zero2": (
        4,
        {"zero": 2, "gbs": 8, "fields": MOE, "optim": {"freeze": ["layers.[12].*", "*.router.*"]}},
    ),
    "freeze-zero3-pp": (
        4,
        {"pp": 2, "zero": 3, "gbs": 8, "optim": {"freeze": ["*mlp*", "head.*"]}},
    ),
    "freeze-tied": (
        4,
        {
            "pp": 2,
            "zero": 1,
            "fields": {"tie_embeddings": True},
            "optim": {"freeze": ["embedding*"]},
        },
    ),
    "freeze-sp-muon": (
        8,
        {"tp": 2, "sp": True, "zero": 1, "optim": {**MUON, "freeze": ["*attention*"]}},
    ),
    "muon-moe": (4, {"ep": 2, "zero": 1, "fields": MOE, "optim": MUON}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_of_the_ledger(name):
    """To 2 % on every axis that carries more than a thousandth of all of them; the rest are counts
    and norms.

    Under Muon to 10 %: of a matrix that a rank makes whole, it may own more than the others do, or
    nothing.
    """
    world, options = LAYOUTS[name]
    config = layout(**options)
    predicted, near = (
        Estimator(H100).step(config, world).sent,
        0.1 if config.optim.name == "muon" else 0.02,
    )
    for pp_rank, counted in run_on_pool(sent_on_rank, world, config):
        mine = predicted[pp_rank]
        large = {axis for axis, count in counted.items() if count > sum(counted.values()) / 1000}
        assert large <= set(mine), (mine, counted)
        for axis in {*large, *mine}:
            assert mine[axis] == pytest.approx(counted.get(axis, 0), rel=near, abs=4096), (
                axis,
                mine,
                counted,
            )


@pytest.mark.parametrize("name", ["tp-cp-zero1", "tp-mbs", "moe-etp", "mla"])
def test_gemms_are_those_of_the_models_formula(name):
    """Over the ranks that share them: forward once, backward twice, and attention's scores made
    again."""
    config = layout(**LAYOUTS[name][1])
    model, seq_len = config.model, config.train.seq_len
    units = Workloads(Target()).counted(config)
    counted = {op: sum(count * unit.passes[op].flops for unit, count, _ in units) for op in "FBIW"}
    forward, core = (
        flops_per_token(model, seq_len) / 3,
        len(blocks(model)) * core_flops(model, seq_len, model.attention_window) / 3,
    )
    on_rank = config.train.mbs * seq_len / config.parallel.tp / config.parallel.cp
    assert counted["F"] == pytest.approx(forward * on_rank, rel=0.02)
    assert counted["B"] == pytest.approx((2 * forward + core / 2) * on_rank, rel=0.02)
    assert counted["I"] + counted["W"] == pytest.approx(counted["B"])


def cost(world=64, cluster=H100, **options):
    config = layout(
        **{"gbs": 64, **options},
        fields={"hidden_size": 1024, "ffn_hidden_size": 4096, "head_dim": 256},
    )
    return Estimator(cluster).step(
        dataclasses.replace(config, train=dataclasses.replace(config.train, seq_len=4096)), world
    )


def test_a_step_is_the_sum_of_its_kinds_and_its_figures_agree():
    found = cost(pp=2, tp=2, sp=True, cp=2, zero=1)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / found.step_s / 64)
    assert (
        found.mfu == pytest.approx(found.tflops_per_gpu * 1e12 / H100.flops) and 0 < found.mfu < 0.7
    )
    assert {"tp", "bubble", "optimizer"} <= {
        kind for kind, seconds in found.seconds.items() if seconds > 0
    }


def test_faster_machines_and_better_ways_cost_less():
    plain = cost(tp=4, sp=True, zero=1)
    faster = dataclasses.replace(H100, flops=2 * H100.flops, link_rate=2 * H100.link_rate)
    assert cost(cluster=faster, tp=4, sp=True, zero=1).step_s < plain.step_s
    assert cost(tp=4, sp=True, zero=1, tp_overlap="chunked").seconds["tp"] < plain.seconds["tp"]
    assert cost(tp=4, sp=True, zero=1, recompute=FULL).step_s > plain.step_s
    slow = dataclasses.replace(H100, network_rate=1e9)  # tp of 16 leaves the node
    assert (
        cost(tp=4, sp=True, cluster=dataclasses.replace(slow, node=2)).seconds["tp"]
        > 5 * plain.seconds["tp"]
    )
    few, many = (cost(pp=4, gbs=gbs, schedule="1f1b") for gbs in (64, 256))
    bubble, more = (each.seconds["bubble"] for each in (few, many))
    # behind four times the work
    assert more == pytest.approx(bubble, rel=0.2) and many.mfu > few.mfu


def test_a_run_expects_a_time_where_its_device_is_known(monkeypatch):
    def predicted(config, name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return prediction_of(
            config, Process(0, 2, 0, torch.device("cuda")), pipeline_layout(config, 2)
        )

    config, (found, cost) = (
        layout(pp=2),
        (predicted(layout(pp=2)), Estimator(H100).step(layout(pp=2), 2)),
    )
    assert (found.step_s, found.mfu, *found.bubble) == pytest.approx(
        (cost.step_s, cost.mfu, *cost.bubble)
    )
    assert (
        predicted(config, "Tesla T4").step_s is None
        and predicted(config, "Tesla T4").sent == cost.sent
    )
    assert [
        getattr(cluster_of(f"NVIDIA {name}"), "name", None)
        for name in ("GH200 480GB", "H200", "GB200")
    ] == [
        "gh200",
        "h200",
        "gb200",
    ]
    wide = dataclasses.replace(config, precision=PrecisionConfig(dtype="fp32"))
    assert "precision.dtype=bf16, because" in predicted(wide).report[0]
    halved = dataclasses.replace(config, log=LogConfig(peak_tflops=H100.flops / 2e12))
    assert predicted(halved).step_s == found.step_s and predicted(halved).mfu == pytest.approx(
        2 * found.mfu
    )


def test_muon_works_on_whole_matrices_one_a_rank():
    """Gate and up are two matrices of one parameter; XXᵀ, its square and the product with X, five
    times."""
    config = layout(tp=2, sp=True, optim=MUON)
    blocks = [unit for unit, _, is_layer in Workloads(Target()).counted(config) if is_layer]
    assert len(blocks) == 1 and len(blocks[0].matrices) == 4
    gate_up = max(blocks[0].matrices, key=lambda each: each.elements)
    assert gate_up.elements == 2 * 128 * 64 / 2 and not gate_up.expert
    assert gate_up.work.flops == 2 * 5 * (2 * 2 * 64**2 * 128 + 2 * 64**3)
    plain, muon = cost(tp=2, sp=True, zero=1), cost(tp=2, sp=True, zero=1, optim=MUON)
    assert muon.seconds["muon"] > 0 and muon.seconds["muon_sent"] > 0 == plain.seconds["muon"]
    assert muon.seconds["optimizer"] > plain.seconds["optimizer"]
    alone = cost(tp=2, sp=True, zero=0, optim=MUON)
    assert alone.seconds["muon"] > 3 * muon.seconds["muon"]  # 32 ranks share what two did


def test_what_goes_to_the_host_is_counted_and_takes_time_where_nothing_hides_it():
    config = layout(
        recompute=RecomputeConfig("full", offload=["inputs"], offload_min_bytes=1), mbs=2
    )
    units = [unit for unit, _, is_layer in Workloads(Target()).counted(config) if is_layer]
    # b, s, h, bf16
    assert [unit.passes[op].host_bytes for unit in units for op in "FB"] == [2 * 64 * 64 * 2] * 2
    shared = dataclasses.replace(
        config, recompute=dataclasses.replace(config.recompute, group_layers=2)
    )
    halves = [
        unit.passes["F"].host_bytes
        for unit, _, is_layer in Workloads(Target()).counted(shared)
        if is_layer
    ]
    assert halves == [64 * 64 * 2]  # two layers keep one input
    slow = dataclasses.replace(H100, host_rate=1e6)
    offload = RecomputeConfig("full", offload=["inputs"])
    assert (
        cost(recompute=offload).seconds["host"]
        == 0
        < cost(cluster=slow, recompute=offload).seconds["host"]
    )
    plain, away = cost(zero=1), cost(zero=1, optim={"offload": True})
    assert away.seconds["host"] > 0 and away.seconds["optimizer"] > 10 * plain.seconds["optimizer"]


def test_what_an_update_moves_is_counted_by_hand():
    """Of 200 elements half are this rank's, and of 150 in matrices; four ranks share a round."""
    config = layout(tp=2, sp=True, zero=1, optim=MUON)
    sharding = Sharding(config, planned_mesh(sizes_of(config, 4)))
    unit = Unit(
        {},
        Elements(200),
        matrices=tuple(Matrix(elements, False, Work()) for elements in (10, 50, 40, 30, 20)),
    )
    assert [[each.elements for each in one.matrices] for one in rounds([unit], sharding)] == [
        [50, 40, 30, 20],
        [10],
    ]
    assert offload_bytes([unit], sharding) == 100 * (4 + 2) + 75 * (2 + 2)
    copies = Unit({}, copied={"tp": 100})  # each rank sums the slices that it owns
    assert {key: each for key, each in sharding.reduced([copies]).items() if each} == {
        ("tp", "all_reduce"): 50 * 4
    }


def test_what_ranks_with_the_same_sequence_add_up_is_not_attentions():
    """Counts of routers are summed over cp and tp together: no hop of a ring hides them."""
    config = layout(tp=2, sp=True)
    prices = Prices(H100, config, planned_mesh(sizes_of(config, 2)))
    counted = Unit({"F": Work(sent={("cp_tp", "all_reduce"): Traffic(1, 1, 10**6)})})
    spent, _ = prices.stage([counted], "F")
    assert spent["tp"] > 0 == spent["cp"]


def test_a_longer_backward_hides_more_of_the_reduction():
    slow = dataclasses.replace(H100, link_rate=1e9, network_rate=1e9)
    assert (
        cost(cluster=slow, zero=1, recompute=FULL).seconds["dp"]
        < cost(cluster=slow, zero=1).seconds["dp"]
    )
    # a backward is a third of it
    slow = dataclasses.replace(H100, link_rate=2e10, network_rate=2e10)
    whole, split = (
        cost(cluster=slow, zero=1, pp=2, schedule=name).seconds["dp"] for name in ("1f1b", "zb_h1")
    )
    assert split == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    ("op", "size", "near", "rate"),
    [
        ("all_gather", 8, 8, 450e9),
        ("all_gather", 16, 8, 400e9),
        ("all_gather", 8, 1, 50e9),
        ("shift", 2, 1, 50e9),
        ("shift", 8, 8, 450e9),
        ("shift", 16, 8, 50e9),
        ("all_to_all", 16, 8, 50e9 * 15 / 8),
    ],
)
def test_the_slowest_link_of_a_line_counts(op, size, near, rate):
    """A ring leaves a node over an adapter for each rank there, a shift over one; an all-to-all
    sends 8 of 15 out."""
    group = H100.group(
        [rank if rank < near else 8 * rank for rank in range(size)] if near < size else range(size)
    )
    assert (group.size, group.in_node) == (size, near)
    small, large = (H100.seconds(group, op, 1, num_bytes) for num_bytes in (0, 10**9))
    assert large - small == pytest.approx(1e9 / rate / H100.efficiency.links) and small > 0


def test_hops_inside_a_node_have_its_own_latency():
    """Of sixteen ranks, eight in a node: three hops inside, one between nodes, and a kernel."""
    taken = H100.seconds(H100.group(range(16)), "all_reduce", 1, 0)
    assert taken == pytest.approx(3 * H100.link_s + H100.network_s + H100.efficiency.kernel_s)


def test_links_inside_a_node_may_be_slower_than_all_of_its_adapters():
    pcie = cluster_called("h100_pcie")
    small, large = (
        pcie.seconds(pcie.group(range(16)), "all_gather", 1, num_bytes) for num_bytes in (0, 10**9)
    )
    assert large - small == pytest.approx(1e9 / 64e9 / pcie.efficiency.links)
