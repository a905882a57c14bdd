"""ZeRO stages: what a step sends, what stays resident, and that all of them train the same bits."""

import dataclasses
import math
import time

import pytest
import torch
from parity_configs import config_of
from ranks import run_ranks
from recorded_graphs import RecordedGraphs
from torch import nn
from training_rank import TrainingRank

from megatron5d.config.schema import PrecisionConfig, RecomputeConfig
from megatron5d.data_parallel import temporary_buffer
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.phases.wgrad import grad_buffer
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, state_of, unsharded
from megatron5d.train import build

PER_STEP = {"zero3_gather": "per_step", "grad_reduce": "per_step"}
RECOMPUTE = {
    "none": RecomputeConfig(),
    "full": RecomputeConfig("full"),
    "pairs": RecomputeConfig("full", group_layers=2),
}
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 48}


def config(
    zero: int,
    num_microbatches: int,
    *,
    world: int = 2,
    recompute: str = "none",
    dtype: str = "fp32",
    fp8: str = "none",
    fp8_gather: bool = True,
    model: dict | None = None,
    **parallel,
):
    base = config_of(
        zero=zero, gbs=num_microbatches * world, recompute=RECOMPUTE[recompute], **parallel
    )
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **(model or {})),
        precision=PrecisionConfig(dtype, fp8, fp8_gather=fp8_gather),
    )


# (stage, micro-batches, options) -> (gathers, reductions) in units of Ψ·(n-1)/n; the test subtracts
# units that two actions share
TRAFFIC = [
    (1, 2, {}, (1, 1)),
    (2, 2, {}, (1, 2)),
    (2, 2, {"grad_reduce": "per_step"}, (1, 1)),
    (3, 1, {}, (2, 1)),  # the paper's 3Ψ
    (3, 1, {"recompute": "full"}, (2, 1)),
    # a layer that is recomputed right before its backward stays gathered until then
    (3, 1, {"recompute": "pairs"}, (2, 1)),
    (3, 3, {}, (6, 3)),
    (3, 3, {"zero3_gather": "per_step"}, (1, 3)),
    (3, 3, PER_STEP, (1, 1)),  # 2Ψ for any number of micro-batches
]


def test_elements_per_step_are_what_the_formula_says():
    def on_rank(rank, world):
        measured = []
        for zero, m, options, _ in TRAFFIC:
            run = TrainingRank(config(zero, m, world=world, **options), rank, world)
            exposed = run.step().zero_exposed_s
            run.sync.finish_gather()
            sent = tuple(
                run.ledger.totals["dp_shard_cp", op].elements
                for op in ("all_gather", "reduce_scatter")
            )
            measured.append((sent, [bucket.numel for bucket in run.sync.buckets], exposed))
        return measured

    world = 4
    for measured in run_ranks(on_rank, world):
        for (zero, m, options, (gathers, reductions)), (sent, numels, exposed) in zip(
            TRAFFIC, measured, strict=True
        ):
            shared = m * numels[-1] + (m - 1) * numels[0] if gathers == 2 * m else 0
            elements = gathers * sum(numels) - shared, reductions * sum(numels)
            expected = tuple(count * (world - 1) // world for count in elements)
            assert sent == expected, (zero, m, options)
            # the first step of ZeRO-1 and 2 has no gather to wait for
            assert (exposed > 0) == (zero == 3), (zero, exposed)


@pytest.mark.timing
@pytest.mark.parametrize("fp8", ["none", "blockwise"])
def test_a_wait_for_a_late_rank_is_exposed(fp8):
    """In FP8 a step first waits not for weights, but for the maxima of their blocks."""

    def on_rank(rank, world):
        sizes = {"hidden_size": 256, "ffn_hidden_size": 256, "num_kv_heads": 2, "head_dim": 64}
        run = TrainingRank(config(3, 1, dtype="bf16", fp8=fp8, model=sizes), rank, world)
        start_step = run.sync.weights.start_step

        def start_late(passes):
            start_step(passes)
            time.sleep(0.5 * rank)

        run.step()
        run.sync.weights.start_step = start_late
        return run.step().zero_exposed_s

    waited, late = run_ranks(on_rank, 2)
    assert waited > 0.4 and late < 0.3


STAGES = [(0, {}), (1, {}), (2, {}), (3, {}), (3, PER_STEP)]


def storage_bytes(tensors) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_resident_bytes_are_what_the_stage_promises():
    """Between steps, in bf16 with fp32 gradients; during a step at most two units are gathered."""

    def on_rank(rank, world):
        measured = []
        for zero, options in STAGES:
            run = TrainingRank(config(zero, 2, dtype="bf16", **options), rank, world)
            buckets, after, counts = run.sync.buckets, run.sync.after, []

            def count_after(phase, kind, buckets=buckets, after=after, counts=counts):
                after(phase, kind)
                if kind == "wgrad":
                    counts.append(
                        [sum(b.holds_weights for b in buckets), sum(b.holds_grads for b in buckets)]
                    )

            run.sync.after = count_after
            run.step()
            run.sync.finish_gather()
            resident = (
                storage_bytes(t for b in buckets for t in (b.weights, b.weight_slice)),
                storage_bytes(t for b in buckets for t in (b.grads, b.grad_slice)),
            )
            measured.append((sum(b.numel for b in buckets), resident, counts, len(buckets)))
        return measured

    for measured in run_ranks(on_rank, 2):
        for (zero, options), (numel, resident, counts, num_buckets) in zip(
            STAGES, measured, strict=True
        ):
            weights, grads = numel // (1 + (zero >= 3)), numel // (1 + (zero >= 2))
            assert resident == (2 * weights, 4 * grads), (zero, options)
            gathered, with_grads = zip(*counts)
            is_temporary = zero == 3 and not options
            assert max(gathered) == (2 if is_temporary else num_buckets), (zero, options)
            assert max(with_grads) <= (2 if zero >= 2 and not options else num_buckets)
            # head, two layers of two phases, embedding: the next unit is gathered in time
            if is_temporary:
                assert gathered == (1, 2, 1, 2, 1, 1, 1, 2, 1, 2, 1, 0)


def test_stages_train_the_same_bits_where_they_reduce_alike():
    """With one micro-batch all stages: two ranks have only one order to sum in.

    The norms of ZeRO-0, and of ZeRO-3 that gathers in FP8, sum other pieces, so these are compared
    without clipping. With more micro-batches those agree that reduce equally often.
    """
    no_clip = {"optim": {"clip": 0.0}}
    wide = {"fp8": "blockwise", "fp8_gather": False}
    fp8 = {"fp8": "blockwise", **no_clip}
    reduce_once = {"grad_reduce": "per_step"}
    recomputed = [(3, 1, {"recompute": mode}) for mode in ("full", "pairs")]
    groups = [
        [(1, 1, no_clip), (0, 1, no_clip), (3, 1, no_clip)],
        [(1, 1, {}), (2, 1, {}), (3, 1, {}), *recomputed],
        [(1, 3, {}), (2, 3, reduce_once), (3, 3, reduce_once), (3, 3, PER_STEP)],
        [(2, 3, {}), (3, 3, {}), (3, 3, {"zero3_gather": "per_step"})],
        [(1, 1, wide), (2, 1, wide), (3, 1, wide)],
        [(1, 1, fp8), (3, 1, fp8)],
    ]

    def on_rank(rank, world):
        outcomes = []
        for zero, m, options in (case for cases in groups for case in cases):
            run = TrainingRank(config(zero, m, dtype="bf16", **options), rank, world)
            results = run.step(), run.step()
            losses = [result.losses["loss"] for result in results]
            outcomes.append((losses, [result.grad_norm for result in results], run.weights()))
        return outcomes

    for rank_outcomes in run_ranks(on_rank, 2):
        outcomes = iter(rank_outcomes)
        for cases in groups:
            (losses, norms, weights), *others = [next(outcomes) for _ in cases]
            for case, (other_losses, other_norms, other_weights) in zip(cases[1:], others):
                zero, _, options = case
                assert other_losses == losses, case
                assert zero == 0 or (zero == 3 and options is fp8) or other_norms == norms, case
                assert all((a == b).all() for a, b in zip(other_weights, weights)), case


CASES = [
    (0, 1, {}),
    (1, 2, {}),
    (2, 2, {}),
    (3, 2, PER_STEP),
    (3, 1, {"fp8": "blockwise", "dtype": "bf16"}),
]


@pytest.mark.parametrize("name", ["odd_vocab_tied", "mla", "gpt2_style", "experts"])
def test_undefined_gradient_buffers_do_not_matter(name, monkeypatch):
    """A step's first gradient overwrites them, and missing gradients are zeroed: the results are
    the same if new memory, or the last step's, holds NaN."""

    def on_rank(rank, world):
        allocate, outcomes = temporary_buffer.allocate_storage, []

        def allocate_nan(flat):
            allocate(flat)
            flat.fill_(math.nan if flat.is_floating_point() else 255)

        for zero, m, options in CASES:
            for poisoned in (False, True):
                monkeypatch.setattr(
                    temporary_buffer, "allocate_storage", allocate_nan if poisoned else allocate
                )
                base = config(zero, m, world=world, **options)
                model = (
                    dataclasses.replace(base.model, **EXPERTS)
                    if name == "experts"
                    else config_of(name).model
                )
                run = TrainingRank(dataclasses.replace(base, model=model), rank, world)
                results = []
                for _ in range(2):
                    for bucket in run.sync.buckets if poisoned and zero < 2 else ():
                        for parameter in bucket.parameters:
                            state_of(parameter).main_grad.fill_(math.nan)
                    results.append(run.step())
                outcomes.append([(r.losses["loss"], r.grad_norm, r.skipped) for r in results])
        return outcomes

    for outcomes in run_ranks(on_rank, 2):
        assert outcomes[::2] == outcomes[1::2]
        assert all(norm > 0 for _, norm, _ in sum(outcomes, []))


def test_full_weights_and_gradients_are_never_allocated_together():
    spec = ShardSpec("weight", (50, 32), unsharded((50, 32)))
    parameter = new_parameter((50, 32), spec, torch.float32, "cpu")
    with MemoryWatch() as watch:
        shard = Axis("dp_shard_cp", (0, 1), 0)
        bucket = Bucket([parameter], shard, Axis("dp_replicate"), torch.float32, zero=3)
    assert bucket.numel == 1600
    # the full main gradients, and both slices
    assert watch.peak_bytes == 4 * (1600 + 2 * 800)


def test_a_single_unit_reduces_each_micro_batch_before_the_next():
    """In a stage of one layer no other gradient is computed between two micro-batches' ones."""

    def on_rank(rank, world):
        unit = nn.Linear(7, 5, bias=False)
        state_of(unit.weight).spec = ShardSpec("weight", (5, 7), unsharded((5, 7)))
        sync = GradSync([[unit]], build_mesh(resolve(world), rank), 2, torch.float32)
        sync.register([unit])
        sync.start_step({unit: 3})
        for i in range(3):
            grad_buffer(unit.weight).add_(10**i * (rank + 1))
            sync.after(unit, "wgrad")
        sync.finish_reduce()
        (bucket,) = sync.buckets
        (segment,) = bucket.segments()
        return bucket.grad_slice[slice(*segment.owned)].unique().tolist()

    assert run_ranks(on_rank, 2) == [[333.0]] * 2


@pytest.mark.parametrize("options", [{}, PER_STEP])
def test_an_evaluation_frees_what_it_gathers(options):
    def on_rank(rank, world):
        sums = []
        for zero in (1, 3):
            run = TrainingRank(config(zero, 2, **(options if zero == 3 else {})), rank, world)
            sums.append(run.evaluate().tolist())
            run.step()
            sums.append(run.evaluate().tolist())
        return sums, [bucket.holds_weights for bucket in run.sync.buckets]

    for (before, after, before_3, after_3), gathered in run_ranks(on_rank, 2):
        assert before_3 == pytest.approx(before, rel=1e-6)
        assert after_3 == pytest.approx(after, rel=1e-5)
        assert before != after and not any(gathered)


@pytest.mark.parametrize("zero, num_blocks", [(2, 2), (3, 5)])
def test_graphs_find_temporary_buffers_at_fixed_addresses(zero, num_blocks):
    """Despite evaluations, reads of the weights and steps with other numbers of micro-batches."""

    def on_rank(rank, world):
        runs = []
        for graphs in (None, RecordedGraphs()):
            build._graphs = lambda config, mesh, graphs=graphs: graphs
            run = TrainingRank(config(zero, 4, world=world, model={"num_layers": 6}), rank, world)
            batches, figures = run.batches, []
            for count in (4, 4, 4, 2, 2, 2, 4, 4, 4):
                run.batches = batches[:count]
                figures.append(run.step().losses["loss"])
                with run.sync.weights.gathered():
                    figures.append(sum(float(weight.sum()) for weight in run.model.parameters()))
                figures.append(float(run.trainer.evaluate(batches)[0]))
            runs.append(figures)
        storages = [
            buffer.flat.untyped_storage()
            for bucket in run.sync.buckets
            for buffer in bucket.temporary_buffers
        ]
        addresses = {storage.data_ptr() for storage in storages}
        return runs, min(storage.nbytes() for storage in storages), len(addresses)

    for (plain, replayed), smallest, num_addresses in run_ranks(on_rank, 2):
        assert replayed == pytest.approx(plain, rel=1e-6) and len(set(plain)) == len(plain)
        assert smallest > 0 and num_addresses == num_blocks


def test_views_that_autograd_saved_see_the_gathered_weights():
    """The storage is freed and allocated in place."""

    def on_rank(rank, world):
        run = TrainingRank(config(3, 1), rank, world)
        parameter = next(run.model.parameters())
        with run.sync.weights.gathered():
            view, before = parameter.detach().view(-1)[:4], parameter.detach().clone()
            version = parameter._version
        freed_bytes = parameter.untyped_storage().nbytes()
        with run.sync.weights.gathered():
            is_same = torch.equal(view, before.view(-1)[:4])
        return freed_bytes, is_same, parameter._version == version

    assert run_ranks(on_rank, 2) == [(0, True, True)] * 2
