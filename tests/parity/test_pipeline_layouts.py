"""Every schedule equals one process: loss, every gradient, norm and weights after two steps or
three, fp64 to 1e-10.

The default is a covering subset: each schedule meets 2 and 4 stages' ranks, awkward numbers of
micro-batches, tied and untied embeddings, uneven layers, tp, dp and both ZeRO stages.
MEGATRON5D_TESTS=nightly runs the whole product.
"""

from itertools import product

import pytest
import tiers
from layouts import assert_parity

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.pipeline_parallel.program import Action, make_program, zigzag_placement
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import write_program

FULL = tiers.NIGHTLY


def config_of(
    schedule: str,
    pp: int,
    m: int,
    *,
    dp=1,
    tied=False,
    uneven=False,
    vpp=1,
    recompute=None,
    layout=None,
    **parallel,
) -> Config:
    stages = (
        build_program(schedule, pp, m, vpp if vpp > 1 else None).num_stages
        if ":" not in schedule
        else 2 * pp
    )
    # the embedding alone on the first stage, the head alone on the last, two layers on the second
    if uneven:
        layout = [0, *[1] * (stages - 2), 0] if stages > 2 else [2, 1]
        layout[1] += stages > 2
    num_layers = sum(layout) if layout else stages + 1
    return Config(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=16,
            ffn_hidden_size=24,
            num_heads=2,
            num_kv_heads=2,
            head_dim=8,
            vocab_size=61,
            tie_embeddings=tied,
        ),
        parallel=ParallelConfig(pp=pp, vpp=vpp, **parallel),
        pipeline=PipelineConfig(schedule, layout=layout),
        train=TrainConfig(steps=10, gbs=m * dp, mbs=1, seq_len=8),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip=0.5),
        precision=PrecisionConfig(dtype="fp64"),
        recompute=recompute or RecomputeConfig(),
    )


def legal(schedule: str, pp: int, wanted: int) -> int:
    """The first number of micro-batches from `wanted` on that the schedule admits."""
    for m in range(wanted, wanted + 4 * pp):
        try:
            build_program(schedule, pp, m)
        except ValueError:
            continue
        return m
    raise AssertionError(f"{schedule} admits no number of micro-batches near {wanted}")


def check(
    schedule: str, pp: int, wanted: int, *, dp: int = 1, tp: int = 1, steps: int = 2, **options
) -> None:
    if tp > 1:
        options |= {"tp": tp, "sp": True}
    config = config_of(schedule, pp, legal(schedule, pp, wanted), dp=dp, **options)
    assert_parity(config, pp * dp * tp, steps=steps, ignored=0.3)


# (pp, micro-batches at least, what else): met by every schedule
CASES = {
    "tied-uneven": (2, 5, {"tied": True, "uneven": True, "steps": 3}),
    "zero1": (2, 4, {"tied": True, "dp": 2, "zero": 1}),
    "four": (4, 7, {"tied": True, "uneven": True}),
    "few": (4, 1, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule(schedule, case):
    pp, wanted, options = CASES[case]
    check(schedule, pp, wanted, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "dualpipe"])
def test_with_tensor_and_data_parallelism(schedule):
    check(schedule, 2, 4, tp=2, dp=2, zero=1, tied=True)


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe_v", "dualpipe"])
def test_tensor_parallel_without_zero(schedule):
    check(schedule, 2, 4, tp=2, tied=True)


@pytest.mark.parametrize("tied", [True, False])
def test_bidirectional_on_eight(tied):
    check("dualpipe", 8, 18, tied=tied, uneven=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb"])
def test_a_tied_embedding_around_a_middle_rank(schedule):
    """Three ranks: the middle one has no mirror image, and its groups must not confuse the
    others."""
    check(schedule, 3, 5, tied=True, dp=2, zero=1)


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
@pytest.mark.parametrize("zero", [0, 1])
def test_hybrid_sharding(schedule, zero):
    check(schedule, 2, 4, dp=4, dp_replicate=2, zero=zero, tied=True)


@pytest.mark.parametrize("order", [["tp", "dp", "cp", "pp"], ["dp", "pp", "tp", "cp"]])
def test_any_order_of_axes(order):
    check("dualpipe", 2, 4, tp=2, dp=2, zero=1, tied=True, order=order)


@pytest.mark.parametrize("vpp", [3, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "bfs", "interleaved_zb"])
def test_more_chunks(schedule, vpp):
    config = config_of(schedule, 2, 5, vpp=vpp, tied=True)
    assert_parity(config, 2)


RECOMPUTED = {
    "1f1b": RecomputeConfig("full", stage_layers=[2, 0]),
    "zb_v": RecomputeConfig("full", 1),
    "dualpipe": RecomputeConfig("full", group_layers=2),
}


@pytest.mark.parametrize("schedule", RECOMPUTED)
def test_full_recompute(schedule):
    """The input gradient computes a phase again, and its weight gradient must use that."""
    check(schedule, 2, 4, recompute=RECOMPUTED[schedule])


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
@pytest.mark.parametrize("zero", [0, 1])
def test_under_torchs_own_checks(schedule, zero, monkeypatch, over_gloo):
    """They make every collective blocking: mirrored ranks must not start one while the other waits
    for a message."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    check(schedule, 2, 4, dp=2, zero=zero, tied=True)


# stages without a layer: at the V's turn, twice in a row, in the middle of a loop, on mirrored
# ranks
EMPTY = {
    "zb_v": (2, {"layout": [2, 0, 1, 0], "tied": True, "dp": 2, "zero": 3}),
    "v_half": (
        3,
        {"layout": [1, 2, 0, 1, 0, 1], "recompute": RecomputeConfig("full", 1), "dp": 2, "zero": 1},
    ),
    "interleaved": (3, {"layout": [1, 1, 0, 1, 0, 1], "vpp": 2, "tied": True}),
    "interleaved_zb": (2, {"layout": [1, 0, 1, 1, 0, 0], "vpp": 3, "tp": 2}),
    "dualpipe": (4, {"layout": [1, 0, 2, 0], "tied": True, "dp": 2, "zero": 2}),
}


@pytest.mark.parametrize("schedule", EMPTY)
def test_stages_without_a_layer(schedule):
    pp, options = EMPTY[schedule]
    check(schedule, pp, 2 * pp, **options)


def test_a_program_from_a_file(tmp_path):
    """A zigzag of four chunks, which no generator makes: all forwards, then input gradients, then
    weight gradients."""
    placement, m = zigzag_placement(2, 4), 3
    lines = []
    for rank in range(2):
        stages = [stage for _, stage in placement.stages_of(rank)]
        lines.append(
            [(Action("F", stage, i),) for stage in stages for i in range(m)]
            + [
                (Action(op, stage, i),)
                for op in "IW"
                for stage in reversed(stages)
                for i in range(m)
            ]
        )
    path = tmp_path / "zigzag.csv"
    path.write_text(write_program(make_program("zigzag", placement, [0] * m, lines)))
    config = config_of(f"file:{path}", 2, m, tied=True, layout=[1] * 8)
    assert_parity(config, 2)


SIZES = product(
    schedule_names(), (2, 4), (1, 3, 8, 11), (False, True), (False, True), (1, 2), (0, 1)
)


@pytest.mark.parametrize(
    ("schedule", "pp", "extra", "tied", "uneven", "tp", "zero"),
    list(SIZES) if FULL else list(SIZES)[-1:],
)
def test_the_whole_product(schedule, pp, extra, tied, uneven, tp, zero):
    check(schedule, pp, extra, tied=tied, uneven=uneven, tp=tp, zero=zero, dp=2)
