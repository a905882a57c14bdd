"""The parity check finds planted faults, and says which half of which step they are in, and of
which phase."""

import json

import pytest
import torch

from megatron5d.comm.collectives import Pending
from megatron5d.context_parallel import block_attention, zigzag
from megatron5d.data import batch
from megatron5d.data_parallel import bucket, grad_sync, weight_gather
from megatron5d.expert_parallel import load_balancing, router
from megatron5d.model import attention
from megatron5d.optim import sharded_state
from megatron5d.parity import variants
from megatron5d.tensor_parallel import embedding, linear
from megatron5d.tools.parity import main
from megatron5d.topology import init_weights
from megatron5d.train import step


def unreduced(x, axis, *_):
    return x


def pending(x, axis, *_):
    return Pending(x)


def local_expert_counts(patch):
    original = load_balancing.all_reduce
    patch.setattr(
        load_balancing,
        "all_reduce",
        lambda x, axis: x if axis.name == "stage" else original(x, axis),
    )


def row_of_the_vocabulary(patch):
    """The first row of every rank but the first is read as zeros."""
    original = embedding._Lookup.forward

    def forward(ctx, weight, ids, start, defer):
        return original(ctx, weight, ids, start, defer).masked_fill(
            (ids == start).unsqueeze(-1) & (start > 0), 0
        )

    patch.setattr(embedding._Lookup, "forward", forward)


def shifted_positions(patch):
    original = batch.SequenceSharding.__call__

    def shifted(self, micro_batch):
        cut = original(self, micro_batch)
        cut.positions.add_(self.cp.rank)
        return cut

    patch.setattr(batch.SequenceSharding, "__call__", shifted)


def hidden_pair(patch):
    """Two chunks of which a window leaves a single pair visible count as invisible."""
    original = zigzag._sees_any

    def sees_any(layout, mask):
        narrow = mask if mask.window is None else zigzag.replace(mask, window=mask.window - 1)
        return original(layout, narrow)

    patch.setattr(zigzag, "_sees_any", sees_any)


def all_tp_ranks_count(patch):
    patch.setattr(step.Trainer, "_counted_once", lambda self, sums: sums)


def mirrored_samples(patch):
    original = batch.micro_batch_samples
    patch.setattr(batch, "micro_batch_samples", lambda *a: original(*a[:3], a[4] - 1 - a[3], a[4]))


def unsent_weights(patch):
    patch.setattr(weight_gather.GatheredWeights, "start_gather", lambda self: None)


def kept_gradients(patch):
    """From the second step on, gradients of the step before are still in the buffer."""
    patch.setattr(bucket.Bucket, "clear_grads", lambda self, zeros: self.grad_slice.zero_())


def unscaled_from_step_2(patch):
    original = sharded_state.SliceOptimizer._prepare_grads

    def take(self, scale):
        original(self, None if self.step_count and self.slices[0].bucket.shard.size > 1 else scale)

    patch.setattr(sharded_state.SliceOptimizer, "_prepare_grads", take)


def norm_of_all_ranks(patch):
    original = step.global_square_sum
    patch.setattr(
        step,
        "global_square_sum",
        lambda buckets: original(buckets) * (1 + buckets[0].replicate.rank),
    )
    patch.setattr(
        bucket.Bucket, "counted_spans", property(lambda self: [(0, self.grad_slice.numel())])
    )


def first_weights_of_a_share(patch):
    original = init_weights._fill_normal
    patch.setattr(
        init_weights, "_fill_normal", lambda x, at, *rest: original(x, tuple(0 for _ in at), *rest)
    )


def divided_output(patch):
    original = linear.all_reduce
    patch.setattr(linear, "all_reduce", lambda x, axis, *rest: original(x, axis, *rest) / axis.size)


def capacity_of_a_share(patch):
    patch.setattr(router, "all_gather", lambda x, axis: torch.cat([x] * axis.size))


def norm_of_a_rank(patch):
    """Each rank clips to a norm of its own."""
    original = step.Trainer.__init__

    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        self.clip *= 1 + self.mesh["world"].rank

    patch.setattr(step.Trainer, "__init__", init)


def windows_everywhere(patch):
    patch.setattr(block_attention.ContextPlan, "of_window", lambda self, window: self)


def uncapped_over_cp(patch):
    original = attention.AttentionCore.__init__

    def init(self, *arguments):
        original(self, *arguments)
        self.score["softcap"] *= self.context is None

    patch.setattr(attention.AttentionCore, "__init__", init)


def padding_unseen(patch):
    """A chunk of the sequence is not told that padding divides it."""
    original = block_attention.Planner.__call__
    patch.setattr(block_attention.Planner, "__call__", lambda self, documents: original(self, None))


def trained_although_frozen(patch):
    original = grad_sync.make_buckets

    def make(units, mesh, *rest):
        *rest, frozen = rest
        return original(
            units, mesh, *rest, frozen if mesh["world"].size == 1 else lambda spec: False
        )

    patch.setattr(grad_sync, "make_buckets", make)


def last_of_an_uneven_number(patch):
    """Where pp ranks do not divide the micro-batches, the last one reads the first one's tokens."""
    original = step.Trainer.accumulate

    def accumulate(self, batches, watched=False):
        if len(batches) % self.mesh["pp"].size:
            batches = [*batches[:-1], step.replace(batches[-1], tokens=batches[0].tokens)]
        return original(self, batches, watched)

    patch.setattr(step.Trainer, "accumulate", accumulate)


MOE = ["model=tiny_moe"]
UNEVEN = [
    "model.num_layers=4",
    "parallel.pp=2",
    "parallel.vpp=2",
    "pipeline.schedule=interleaved",
    "train.gbs=9",
]
MIXED = [
    "parallel.cp=2",
    "model.num_layers=6",
    "model.window_layers=[0,1,2,3,4]",
    "model.attention_window=34",
]
FROZEN = ["model.num_layers=8", "optim.freeze=[layers.6.*]"]
BIAS = ["moe.balance=[bias]", "moe.bias_rate=1e-3"]
DENSE = ["model=tiny"]
WINDOW = ["parallel.cp=2", "model.attention_window=34"]
FAULTS = {
    "bias update": (
        local_expert_counts,
        [*MOE, *BIAS, "parallel.ep=2"],
        "Step 1",
        "biases of routers",
    ),
    "bias, groups": (
        local_expert_counts,
        ["model=tiny_deepseek", *BIAS, "parallel.ep=2"],
        "Step 1",
        "biases of",
    ),
    "vocabulary": (
        row_of_the_vocabulary,
        [*DENSE, "parallel.tp=2"],
        "Step 1",
        "in the output of embedding",
    ),
    "positions": (
        shifted_positions,
        [*DENSE, "parallel.cp=2"],
        "Step 1",
        "in the output of layers.0.attention",
    ),
    "window": (hidden_pair, [*DENSE, *WINDOW], "Step 1", "in the output of layers.0.attention"),
    "1/tp": (
        divided_output,
        [*DENSE, "parallel.tp=2"],
        "Step 1",
        "in the output of layers.0.attention",
    ),
    "capacity": (
        capacity_of_a_share,
        [*MOE, "parallel.cp=2", "moe.capacity_factor=1.0"],
        "Step 1",
        "layers.1.combine",
    ),
    "targets": (all_tp_ranks_count, [*DENSE, "parallel.tp=2"], "Step 1", "number of targets"),
    "samples": (mirrored_samples, DENSE, "Step 1", "look at how dp divides the batch"),
    "unsent": (
        unsent_weights,
        [*DENSE, "parallel.zero=1"],
        "Step 2",
        "how they reach the other ranks",
    ),
    "kept": (kept_gradients, [*DENSE, "parallel.zero=1"], "Step 2", "gradients differ"),
    "clip": (
        unscaled_from_step_2,
        [*DENSE, "parallel.zero=1", "optim.clip=0.1"],
        "Step 2",
        "look at the update",
    ),
    "norm": (norm_of_all_ranks, [*DENSE, "parallel.tp=2"], "Step 1", "their norm differs"),
    "clip alone": (
        norm_of_a_rank,
        [*DENSE, "parallel.zero=1", "optim.clip=5"],
        "Step 1",
        "look at the update",
    ),
    "roomy": (
        capacity_of_a_share,
        [*MOE, "parallel.cp=2", "moe.capacity_factor=2"],
        "Step 1",
        "layers.1.combine",
    ),
    "whole": (
        windows_everywhere,
        [*DENSE, *MIXED],
        "Step 1",
        "in the output of layers.1.attention",
    ),
    "caps": (
        uncapped_over_cp,
        ["model=gemma2_2b", "parallel.cp=2"],
        "Step 1",
        "in the output of layers.0.attention",
    ),
    "gaps": (
        padding_unseen,
        [*DENSE, "parallel.cp=2"],
        "Step 3",
        "in the output of layers.0.attention",
    ),
    "frozen": (trained_although_frozen, [*DENSE, *FROZEN], "Step 1", "gradients differ"),
    "uneven": (last_of_an_uneven_number, [*DENSE, *UNEVEN], "Step 1", "in the output of embedding"),
    "first": (
        first_weights_of_a_share,
        [*DENSE, "parallel.tp=2"],
        "before the first step",
        "their initialization",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted(monkeypatch, capsys, fault):
    plant, overrides, when, what = FAULTS[fault]
    plant(monkeypatch)
    code = main(["--world", "2", *overrides, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert (code, record["verdict"]) == (1, "different") and not record["untried"]
    assert when in record["advice"] and what in record["advice"], record["advice"]


def sum_of_copies(patch):
    patch.setattr(grad_sync, "start_all_reduce", pending)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_small_vector_without_its_sum_is_seen(monkeypatch, capsys, precision):
    """Also in bf16, where such a vector may be further off than others by chance."""
    sum_of_copies(monkeypatch)
    layout = ["--world", "2", "model=tiny", "parallel.tp=2", "parallel.sp=true"]
    assert main([*layout, "--precision", precision, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (
        record["tensors"][0]["quantity"] == "gradient"
        and ".norm.weight" in record["tensors"][0]["name"]
    )


SOUND = {
    "sinks": (2, ["model=tiny", "model.attention_sinks=true", "train.seed=5", "parallel.tp=2"]),
    "another expert": (
        4,
        ["--no-shrink", "model=tiny_moe", "train.seed=2", "parallel.tp=2", "parallel.sp=true"],
    ),
    "plain choices": (
        2,
        [
            "model=tiny_moe",
            "model.router_bias=true",
            "moe.balance=[aux,bias]",
            "moe.aux_coef=0.5",
            "moe.bias_rate=1e-3",
            "moe.capacity_factor=1.0",
            "parallel.cp=2",
        ],
    ),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_in_16_bits(capsys, case):
    world, overrides = SOUND[case]
    assert main(["--world", str(world), "--precision", "bf16", *overrides]) == 0, (
        capsys.readouterr().out
    )


def test_what_keeps_steps_from_happening_is_lifted(capsys):
    still = ["optim.skip_norm=0.1", "optim.min_lr=0", "optim.clip=1e-30"]
    assert (
        main(
            [
                "--world",
                "2",
                "model=tiny_moe",
                *still,
                "moe.balance=[bias]",
                "moe.bias_rate=0",
                "parallel.ep=2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for change in (
        "optim.skip_norm 0.1 -> 0.0",
        "min_lr 0.0 -> 1e-06",
        "clip 1e-30 -> 0.001",
        "bias_rate 0.0 -> 1e-06",
    ):
        assert change in out
    assert "not tried" not in out


def test_what_was_not_tried_is_told(monkeypatch, capsys):
    fixed = lambda scores, config, bias: torch.arange(config.top_k).expand(len(scores), -1)  # noqa: E731
    monkeypatch.setattr(router, "choose_experts", fixed)
    assert main(["--world", "2", *MOE, "parallel.ep=2"]) == 0
    assert "not tried: routing was not tried in layer_1: every token" in capsys.readouterr().out
    roomy = [*MOE, "parallel.ep=2", "moe.exchange=planned", "moe.planned_imbalance=2"]
    assert main(["--world", "2", *roomy]) == 0
    assert "not tried: no step was repeated" in capsys.readouterr().out
    monkeypatch.setattr(variants, "MAX_CLIP", 100)
    assert main(["--world", "2", *DENSE, "parallel.tp=2", "optim.clip=50"]) == 0
    assert "not tried: no gradient was clipped" in capsys.readouterr().out
    monkeypatch.setattr(step.Guard, "refuses", lambda *_: "never")
    assert main(["--world", "2", *DENSE, "parallel.tp=2"]) == 0
    assert "not tried: no update was made in step 1, 2, 3" in capsys.readouterr().out


def test_an_update_from_rounding_alone_is_left_out(capsys):
    """Under a window of one token queries and keys have no gradient, and Muon's update has the size
    of any other."""
    model = ["model=tiny_mla", "model.attention_window=1", "model.init_std=0.1"]
    assert main(["--world", "2", *model, "optim.name=muon", "optim.lr=0.01", "parallel.tp=2"]) == 0
    out = capsys.readouterr().out
    assert (
        "only rounding were not compared: layers.0.attention.q_down.weight" in out
        and "EQUAL" in out
    )
