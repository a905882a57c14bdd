"""ZeRO stages: what travels in a step, what stays resident, and that all of them train the same
bits."""

import dataclasses
import math
import time

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from ranks import run_ranks
from recorded_graphs import RecordedGraphs
from torch import nn

from megatron5d.comm.ledger import Ledger
from megatron5d.config.schema import PrecisionConfig, RecomputeConfig
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.data_parallel import temporary_buffer
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.gpt import GPT
from megatron5d.phases.wgrad import grad_buffer
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, state_of, unsharded
from megatron5d.train import build
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

PER_STEP = {"zero3_gather": "per_step", "grad_reduce": "per_step"}


class OnRank:
    """One rank of a training, and what it counts."""

    def __init__(self, config, rank: int, world: int) -> None:
        self.config, self.ledger = config, Ledger()
        mesh = build_mesh(sizes_of(config, world), rank, recorder=self.ledger)
        plan = pipeline_layout(config, world)
        self.model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
        self.model.initialize(1)
        self.sync, _, self.trainer = build_trainer(config, mesh, self.model, plan)
        rows, t = make_rows(config, 1), config.train
        numbers = micro_batch_samples(0, t.gbs, t.mbs, mesh["dp"].rank, mesh["dp"].size)
        self.batches = [micro_batch(config, rows[list(each)]) for each in numbers]

    def step(self):
        self.ledger.clear()
        return self.trainer.step(self.batches, 1e-2)

    def sent(self, axis: str = "dp_shard_cp") -> tuple[int, int]:
        """Elements of gathers and of reductions on an axis in the last step."""
        self.sync.finish_gather()
        return tuple(
            self.ledger.totals[axis, op].elements for op in ("all_gather", "reduce_scatter")
        )

    def resident(self) -> tuple[int, int]:
        """Bytes of all storages of weights, and of gradients."""
        buckets = self.sync.buckets
        tensors = (
            [t for b in buckets for t in (b.weights, b.weight_slice)],
            [t for b in buckets for t in (b.grads, b.grad_slice)],
        )
        storages = [
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in each}
            for each in tensors
        ]
        return tuple(sum(each.values()) for each in storages)


RECOMPUTE = {
    "none": RecomputeConfig(),
    "full": RecomputeConfig("full"),
    "pairs": RecomputeConfig("full", group_layers=2),
}


def of_kind(name: str):
    if name != "experts":
        return config_of(name).model
    return dataclasses.replace(config_of().model, num_experts=4, top_k=2, moe_ffn_hidden_size=48)


def config(
    zero: int,
    micro_batches: int,
    *,
    world: int = 2,
    recompute: str = "none",
    dtype: str = "fp32",
    fp8: str = "none",
    fp8_gather: bool = True,
    **parallel,
):
    made = config_of(
        zero=zero, gbs=micro_batches * world, recompute=RECOMPUTE[recompute], **parallel
    )
    return dataclasses.replace(made, precision=PrecisionConfig(dtype, fp8, fp8_gather=fp8_gather))


# (stage, micro-batches, options) -> (gathers, reductions) in units of Ψ·(n-1)/n; what turning saves
# comes off
TRAFFIC = [
    (1, 2, {}, (1, 1)),
    (2, 2, {}, (1, 2)),
    (2, 2, {"grad_reduce": "per_step"}, (1, 1)),
    (3, 1, {}, (2, 1)),  # the paper's 3Ψ
    (3, 1, {"recompute": "full"}, (2, 1)),
    # a layer that runs again before its backward is next is kept till then
    (3, 1, {"recompute": "pairs"}, (2, 1)),
    (3, 3, {}, (6, 3)),
    (3, 3, {"zero3_gather": "per_step"}, (1, 3)),
    (3, 3, PER_STEP, (1, 1)),  # 2Ψ however often micro-batches pass
]


def test_elements_per_step_are_what_the_formula_says():
    def on_rank(rank, world):
        found = []
        for zero, m, options, _ in TRAFFIC:
            here = OnRank(config(zero, m, world=world, **options), rank, world)
            exposed = here.step().zero_exposed_s
            found.append((here.sent(), [bucket.numel for bucket in here.sync.buckets], exposed))
        return found

    world = 4
    for rank in run_ranks(on_rank, world):
        for (zero, m, options, (gathers, reductions)), (sent, numels, exposed) in zip(
            TRAFFIC, rank, strict=True
        ):
            turns = m * numels[-1] + (m - 1) * numels[0] if gathers == 2 * m else 0
            elements = gathers * sum(numels) - turns, reductions * sum(numels)
            assert sent == tuple(count * (world - 1) // world for count in elements), (
                zero,
                m,
                options,
            )
            # the first step of ZeRO-1 and 2 has nothing to wait for
            assert (exposed > 0) == (zero == 3), (zero, exposed)


@pytest.mark.timing
@pytest.mark.parametrize("fp8", ["none", "blockwise"])
def test_a_wait_for_a_late_rank_is_exposed(fp8):
    """In FP8 the first wait of a step is not for weights, but for the largest magnitudes of their
    blocks."""

    def on_rank(rank, world):
        whole_blocks = {
            "hidden_size": 256,
            "ffn_hidden_size": 256,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
        }
        made = config(3, 1)
        model = dataclasses.replace(made.model, **whole_blocks)
        here = OnRank(
            dataclasses.replace(made, model=model, precision=PrecisionConfig("bf16", fp8)),
            rank,
            world,
        )
        start_step = here.sync.weights.start_step

        def late(passes):
            start_step(passes)
            time.sleep(0.5 * rank)

        here.step()
        here.sync.weights.start_step = late
        return here.step().zero_exposed_s

    waited, late = run_ranks(on_rank, 2)
    assert waited > 0.4 and late < 0.3


STAGES = [(0, {}), (1, {}), (2, {}), (3, {}), (3, PER_STEP)]


def test_resident_bytes_are_what_the_stage_promises():
    """Between steps, in bf16 with fp32 gradients; at no moment of a step more than two units are
    whole."""

    def on_rank(rank, world):
        found = []
        for zero, options in STAGES:
            here = OnRank(config(zero, 2, dtype="bf16", **options), rank, world)
            whole = []
            heard = here.sync.after

            def after(phase, kind, heard=heard, here=here, whole=whole):
                heard(phase, kind)
                if kind == "wgrad":
                    held = (
                        [getattr(b, f"holds_{what}") for b in here.sync.buckets]
                        for what in ("weights", "grads")
                    )
                    whole.append(list(map(sum, held)))

            here.sync.after = after
            here.step()
            here.sync.finish_gather()
            numel = sum(bucket.numel for bucket in here.sync.buckets)
            peak = [max(column) for column in zip(*whole)]
            found.append(
                (
                    numel,
                    here.resident(),
                    peak,
                    len(here.sync.buckets),
                    [weights for weights, _ in whole],
                )
            )
        return found

    for rank in run_ranks(on_rank, 2):
        for (zero, options), (numel, resident, peak, count, weights_whole) in zip(
            STAGES, rank, strict=True
        ):
            weights, grads = (
                (numel // 2 if zero >= 3 else numel),
                (numel // 2 if zero >= 2 else numel),
            )
            assert resident == (2 * weights, 4 * grads), (zero, options)
            assert peak[0] == (2 if zero == 3 and not options else count), (zero, options, peak)
            assert peak[1] <= (2 if zero >= 2 and not options else count), (zero, options, peak)
            # head, two layers of two phases, embedding: the next unit is there in time
            if zero == 3 and not options:
                assert weights_whole == [1, 2, 1, 2, 1, 1, 1, 2, 1, 2, 1, 0]


def test_stages_train_the_same_bits_where_they_reduce_alike():
    """One micro-batch: all (two ranks have but one order to add up in), as long as ZeRO-0 and
    ZeRO-3 that gathers in 8 bits, whose norms add up other pieces, do not clip by them. More
    micro-batches: those that reduce equally often."""
    free = {"optim": {"clip": 0.0}}
    wide = {"fp8": "blockwise", "fp8_gather": False}
    alike = [
        [(1, 1, free), (0, 1, free), (3, 1, free)],
        [
            (1, 1, {}),
            (2, 1, {}),
            (3, 1, {}),
            (3, 1, {"recompute": "full"}),
            (3, 1, {"recompute": "pairs"}),
        ],
        [
            (1, 3, {}),
            (2, 3, {"grad_reduce": "per_step"}),
            (3, 3, {"grad_reduce": "per_step"}),
            (3, 3, PER_STEP),
        ],
        [(2, 3, {}), (3, 3, {}), (3, 3, {"zero3_gather": "per_step"})],
        [(1, 1, wide), (2, 1, wide), (3, 1, wide)],
        [(1, 1, {"fp8": "blockwise", **free}), (3, 1, {"fp8": "blockwise", **free})],
    ]

    def on_rank(rank, world):
        found = []
        for zero, m, options in (case for cases in alike for case in cases):
            here = OnRank(config(zero, m, dtype="bf16", **options), rank, world)
            losses = [
                (result.losses["loss"], result.grad_norm) for result in (here.step(), here.step())
            ]
            with here.sync.weights.whole():
                found.append(
                    (losses, [p.detach().float().numpy().copy() for p in here.model.parameters()])
                )
        return found

    for rank in run_ranks(on_rank, 2):
        runs = iter(rank)
        for cases in alike:
            (losses, weights), *others = [next(runs) for _ in cases]
            for case, (their_losses, theirs) in zip(cases[1:], others):
                zero, _, options = case
                norms = (
                    1
                    if zero == 0 or (zero == 3 and "fp8" in options and "fp8_gather" not in options)
                    else 2
                )
                assert [each[:norms] for each in their_losses] == [
                    each[:norms] for each in losses
                ], case
                assert all((a == b).all() for a, b in zip(theirs, weights)), case


HELD = [
    (0, 1, {}),
    (1, 2, {}),
    (2, 2, {}),
    (3, 2, PER_STEP),
    (3, 1, {"fp8": "blockwise", "dtype": "bf16"}),
]


@pytest.mark.parametrize("model", ["odd_vocab_tied", "mla", "gpt2_style", "experts"])
def test_what_the_gradients_buffers_held_counts_for_nothing(model, monkeypatch):
    """The first gradient of a step is written over it, and parameters that get none are settled:
    not a number goes in wherever memory is new or was the last step's."""

    def on_rank(rank, world):
        allocate, found = temporary_buffer.allocate_storage, []

        def undefined(flat):
            allocate(flat)
            flat.fill_(math.nan if flat.is_floating_point() else 255)

        for zero, m, options in HELD:
            for poisoned in (False, True):
                monkeypatch.setattr(
                    temporary_buffer, "allocate_storage", undefined if poisoned else allocate
                )
                made = config(zero, m, world=world, **({"dtype": "fp32"} | options))
                here = OnRank(dataclasses.replace(made, model=of_kind(model)), rank, world)
                results = []
                for _ in range(2):
                    for bucket in here.sync.buckets if poisoned and zero < 2 else ():
                        for parameter in bucket.parameters:
                            state_of(parameter).main_grad.fill_(math.nan)
                    results.append(here.step())
                found.append(
                    [(each.losses["loss"], each.grad_norm, each.skipped) for each in results]
                )
        return found

    for found in run_ranks(on_rank, 2):
        assert found[::2] == found[1::2] and all(norm > 0 for _, norm, _ in sum(found, []))


def test_whole_weights_and_gradients_are_never_there_together():
    shard = Axis("dp_shard_cp", (0, 1), 0)
    parameter = new_parameter(
        (50, 32), ShardSpec("weight", (50, 32), unsharded((50, 32))), torch.float32, "cpu"
    )
    with MemoryWatch() as watch:
        bucket = Bucket([parameter], shard, Axis("dp_replicate"), torch.float32, zero=3)
    assert bucket.numel == 1600
    assert watch.peak_bytes == 4 * (1600 + 2 * 800), (
        "main gradients while they are allocated, and both slices"
    )


def test_one_unit_alone_reduces_each_micro_batch_before_the_next():
    """A stage of one layer: nothing comes between the sum of one micro-batch and the gradient of
    the next."""

    def on_rank(rank, world):
        unit = nn.Linear(7, 5, bias=False)
        state_of(unit.weight).spec = ShardSpec("weight", (5, 7), unsharded((5, 7)))
        sync = GradSync([[unit]], build_mesh(resolve(world), rank), 2, torch.float32)
        sync.register([unit])
        sync.start_step({unit: 3})
        for number in range(3):
            grad_buffer(unit.weight).add_(10**number * (rank + 1))
            sync.after(unit, "wgrad")
        sync.finish_reduce()
        (bucket,) = sync.buckets
        return [
            bucket.grad_slice[slice(*segment.owned)].unique().tolist()
            for segment in bucket.segments()
        ]

    assert run_ranks(on_rank, 2) == [[[333.0]]] * 2


@pytest.mark.parametrize("options", [{}, PER_STEP])
def test_an_evaluation_gathers_and_leaves_nothing_behind(options):
    def on_rank(rank, world):
        sums = []
        for zero in (1, 3):
            here = OnRank(config(zero, 2, **(options if zero == 3 else {})), rank, world)
            sums.append(here.trainer.evaluate(here.batches).tolist())
            here.step()
            sums.append(here.trainer.evaluate(here.batches).tolist())
        return sums, [bucket.holds_weights for bucket in here.sync.buckets]

    for (before, after, theirs_before, theirs_after), held in run_ranks(on_rank, 2):
        assert theirs_before == pytest.approx(before, rel=1e-6) and theirs_after == pytest.approx(
            after, rel=1e-5
        )
        assert before != after and not any(held)


@pytest.mark.parametrize("zero, places", [(2, 2), (3, 5)])
def test_graphs_find_temporary_buffers_where_they_were(zero, places):
    """Whatever comes between: evaluations, weights read from outside, steps of other numbers of
    micro-batches."""

    def on_rank(rank, world):
        runs = []
        for graphs in (None, RecordedGraphs()):
            build._graphs = lambda config, mesh, graphs=graphs: graphs
            made = config(zero, 4, world=world)
            model = dataclasses.replace(made.model, num_layers=6)
            here = OnRank(dataclasses.replace(made, model=model), rank, world)
            batches, found = here.batches, []
            for count in (4, 4, 4, 2, 2, 2, 4, 4, 4):
                here.batches = batches[:count]
                found.append(here.step().losses["loss"])
                with here.sync.weights.whole():
                    found.append(sum(float(weight.sum()) for weight in here.model.parameters()))
                found.append(float(here.trainer.evaluate(batches)[0]))
            runs.append(found)
        held = [
            each.flat.untyped_storage()
            for bucket in here.sync.buckets
            for each in bucket.temporary_buffers
        ]
        return (
            runs,
            [storage.nbytes() for storage in held],
            len({storage.data_ptr() for storage in held}),
        )

    for (plain, replayed), sizes, found in run_ranks(on_rank, 2):
        assert replayed == pytest.approx(plain, rel=1e-6) and len(set(plain)) == len(plain)
        assert min(sizes) > 0 and found == places, (
            f"{len(sizes)} buffers take turns in {found} places"
        )


def test_what_autograd_has_saved_sees_the_weights_again():
    """The storage is emptied and filled in place: a view taken before is a view of the new
    values."""

    def on_rank(rank, world):
        here = OnRank(config(3, 1), rank, world)
        parameter, view = next(here.model.parameters()), None
        with here.sync.weights.whole():
            view, before = parameter.detach().view(-1)[:4], parameter.detach().clone()
            version = parameter._version
        empty = parameter.untyped_storage().nbytes()
        with here.sync.weights.whole():
            same = torch.equal(view, before.view(-1)[:4])
        return empty, same, parameter._version == version

    assert run_ranks(on_rank, 2) == [(0, True, True)] * 2
