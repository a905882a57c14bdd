"""Each recomputed part runs once more a micro-batch, in B or I and never in W, and what it made is
not kept."""

import dataclasses
import gc
import weakref
from collections import Counter

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from whole_stage import WholeStage

from megatron5d.config.schema import MoeConfig, RecomputeConfig
from megatron5d.expert_parallel.dispatcher import DirectDispatch
from megatron5d.model.gpt import GPT
from megatron5d.model.rope import RotaryTables
from megatron5d.phases.offload import HostCopy
from megatron5d.phases.recompute import ActivationPolicy, RecomputedParts
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.precision import fp8_recipes
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of

S, B, LAYERS = 16, 2, 2
PARTS = ("norm", "qkv", "attention", "activation", "mlp", "experts")
GRAD = torch.tensor([1.0, 0.0], dtype=torch.float64)


def configured(moe: bool, parts=()):
    config = config_of("llama_gqa", gbs=B, mbs=B)
    experts = (
        {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 24, "shared_ffn_hidden_size": 8}
        if moe
        else {}
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=LAYERS, vocab_size=32, **experts),
        recompute=RecomputeConfig("selective", list(parts)) if parts else RecomputeConfig(),
    )


def stage_of(config):
    model = GPT(config, build_mesh(sizes_of(config, 1)))
    model.initialize(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if model.balancer is not None:
        model.balancer.start_step(
            1, torch.tensor(float(S * B), dtype=torch.float64), Axis("dp_cp"), False
        )
    return WholeStage(model.phases), micro_batch(config, make_rows(config, 1))


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("parts", [(), *((part,) for part in PARTS), PARTS])
def test_once_more_and_never_in_w(parts, moe, monkeypatch):
    counts: Counter[str] = Counter()
    call = RecomputedParts.run

    def counted(self, name, fn, *inputs):
        def run(*tensors):
            counts[name] += 1
            return fn(*tensors)

        return call(self, name, run, *inputs)

    monkeypatch.setattr(RecomputedParts, "run", counted)
    stage, batch = stage_of(configured(moe, parts))
    stage.forward(0, None, batch)
    once = Counter(counts)
    assert once["attention"] == once["qkv"] == LAYERS and once["experts"] == LAYERS * moe
    assert once["activation"] == LAYERS * (1 + moe)
    # kept, those of branches hand their input on: no part
    assert once["norm"] == 2 * LAYERS * ("norm" in parts) + 1
    stage.backward_input(0, GRAD)
    inside = {"activation"} if {"mlp", "experts"} & {*parts} else set()
    for part in PARTS:
        assert once[part] <= counts[part] <= 2 * once[part]
        if part not in inside:
            head = part == "norm"  # the head's own norm is kept
            assert counts[part] == once[part] + (part in parts) * (once[part] - head), part
    after = Counter(counts)
    stage.backward_weight(0)
    assert counts == after


def kept_bytes(config) -> int:
    stage, batch = stage_of(config)
    with MemoryWatch() as watch:
        stage.forward(0, None, batch)
        kept = watch.live_bytes
        stage.backward(0, GRAD)
    return kept


def test_what_a_part_made_is_not_kept():
    """Of a layer: t tokens, h = 32, heads 4 (KV 2) of 8, inner 48; routed rows r = 2t of 24, shared
    8; 8 bytes each."""
    t, h, a, g, d = S * B, 32, 4, 2, 8
    dense, moe = kept_bytes(configured(False)), kept_bytes(configured(True))
    saved = {
        (False, ("norm",)): 2 * t * h,
        (False, ("qkv",)): t * (a + 2 * g) * d,
        (False, ("attention",)): t * a * d + t * a,
        (False, ("activation",)): t * 48,
        (False, ("mlp",)): t * 3 * 48,
        (True, ("experts",)): 2 * t * 3 * 24,
        (True, ("mlp",)): t * 3 * 8,
        (True, ("activation",)): 2 * t * 24 + t * 8,
        (True, ("norm",)): 2 * t * h,
    }
    for (with_experts, parts), elements in saved.items():
        fell = (moe if with_experts else dense) - kept_bytes(configured(with_experts, parts))
        assert fell >= LAYERS * elements * 8, (with_experts, parts, fell)
    everything = dense - kept_bytes(configured(False, PARTS[:-1]))
    elements = 2 * t * h + t * (a + 2 * g) * d + t * a * d + t * a + t * 3 * 48
    assert everything >= LAYERS * elements * 8


@pytest.mark.parametrize("beside", [(), ("norm", "experts")])
@pytest.mark.parametrize(
    ("recipe", "dispatch"), [("none", False), ("blockwise", False), ("blockwise", True)]
)
def test_permuted_rows_are_not_kept_but_sent_once_more(recipe, dispatch, beside, monkeypatch):
    """Of a layer r = 2t rows of h = 32: 8 bytes each, in FP8 one and a scale a row; for the same
    gradients."""
    counts: Counter[str] = Counter()
    again = DirectDispatch.redispatch

    def counted(self, x):
        counts["again"] += 1
        return again(self, x)

    monkeypatch.setattr(DirectDispatch, "redispatch", counted)
    plain, config = (
        dataclasses.replace(fp8_model(True, recipe, parts), moe=MoeConfig(fp8_dispatch=dispatch))
        for parts in (beside, (*beside, "permute"))
    )
    kept, grads = held_on(plain, [])
    assert not counts
    left, same = held_on(config, [])
    # what the experts' part would run again from is the rows themselves
    assert kept - left == LAYERS * 2 * S * B * (
        32 + 4 if recipe != "none" and not beside else 32 * 8
    )
    assert counts["again"] == LAYERS and all(map(torch.equal, grads, same))
    stage, batch = stage_of(config)
    stage.forward(0, None, batch)
    stage.backward_input(0, GRAD)
    assert counts["again"] == 2 * LAYERS
    stage.backward_weight(0)
    assert counts["again"] == 2 * LAYERS, "never in W"


def fp8_model(moe: bool, recipe: str, parts=()):
    """Sizes that FP8 GEMMs admit, in fp64 around them."""
    config = configured(moe, parts)
    sizes = {"moe_ffn_hidden_size": 32, "shared_ffn_hidden_size": 16} if moe else {}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **sizes),
        precision=dataclasses.replace(config.precision, fp8=recipe),
    )


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("moe", [False, True])
def test_operands_in_8_bits_go_with_the_part_they_were_made_of(moe, recipe, monkeypatch):
    """A byte an element and a scale a row, for each GEMM behind a part; the gradients are those of
    keeping them."""
    t = S * B
    behind = {
        ("attention",): t * (4 * 8 + 4),
        ("activation",): 2 * t * (32 + 4) + t * (16 + 4) if moe else t * (48 + 4),
        # of attention, and of the up-projection (of the shared expert: routed rows stay)
        ("norm",): 2 * t * (32 + 4),
    }
    for parts, num_bytes in behind.items():
        config = fp8_model(moe, recipe, parts)
        held, grads = held_on(config, [])
        with monkeypatch.context() as patch:
            patch.setattr(
                fp8_recipes, "recomputable", lambda x, fn: tuple(part.clone() for part in fn(x))
            )
            more, theirs = held_on(config, [])
        assert more - held == LAYERS * num_bytes, parts
        assert all(map(torch.equal, grads, theirs)), parts


def test_attention_falls_by_exactly_its_output_and_statistics():
    fell = kept_bytes(configured(False)) - kept_bytes(configured(False, ("attention",)))
    assert fell == LAYERS * (S * B * 4 * 8 + S * B * 4) * 8


def held_on(config, on_host):
    """Bytes alive after the forward without those on the host, and all gradients after the
    backward."""
    stage, batch = stage_of(config)
    with MemoryWatch() as watch:
        stage.forward(0, None, batch)
        kept = watch.live_bytes - sum(copy.num_bytes for copy in on_host)
        stage.backward_input(0, GRAD)
        stage.backward_weight(0)
    return kept, [weight.grad.clone() for phase in stage.phases for weight in phase.parameters()]


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("parts", [(), ("norm", "activation")])
def test_offloaded_phases_leave_the_device(parts, moe, monkeypatch):
    """The same gradients; on the device is what the head keeps, and what is smaller than a
    tensor."""
    copies = weakref.WeakSet()
    start = HostCopy.__init__

    def noted(self, tensor):
        start(self, tensor)
        copies.add(self)

    monkeypatch.setattr(HostCopy, "__init__", noted)
    kept, grads = held_on(configured(moe, parts), copies)
    assert not copies
    phases = ["attention", *(("dispatch", "experts", "combine") if moe else ("mlp",))]
    config = configured(moe, parts)
    config = dataclasses.replace(
        config, recompute=dataclasses.replace(config.recompute, offload=phases, offload_min_bytes=0)
    )
    left, again = held_on(config, copies)
    gc.collect()
    assert not copies, "host buffers are freed"
    # a BLAS may round by the address of what it reads
    for one, other in zip(grads, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15 * float(other.abs().max()))
    assert left < 0.35 * kept


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(x, x, *others)
        return x.sum()


def test_large_floats_that_are_no_weights_go_to_the_host_once():
    phase, x = torch.nn.Linear(4, 8), torch.randn(8, 4, requires_grad=True)
    policy = ActivationPolicy(host_bytes=8 * 4 * 4)  # as large as x and the weight
    with policy.saving(phase.parameters()) as copies:
        _Saves.apply(x, phase.weight, torch.arange(100), torch.randn(31))
    assert [copy.num_bytes for copy in copies] == [8 * 4 * 4]
    assert torch.equal(copies[0].value(), x) and copies[0].value() is copies[0].value(), (
        "fetched twice"
    )


def test_offloaded_inputs_of_recomputed_layers():
    full = RecomputeConfig("full")
    base = dataclasses.replace(configured(False), recompute=full)
    away = dataclasses.replace(
        base, recompute=dataclasses.replace(full, offload=["inputs", "mlp"], offload_min_bytes=0)
    )
    kept, grads = held_on(base, [])
    stage, batch = stage_of(away)
    with MemoryWatch() as watch:
        stage.forward(0, None, batch)
        copies = list(stage._in_flight[0].group_inputs.values())
        left = watch.live_bytes - sum(copy.num_bytes for copy in copies)
    assert kept - left == len(copies) * S * B * 32 * 8 and len(copies) == 2
    stage.backward(0, GRAD)
    assert all(
        map(torch.equal, grads, [w.grad for phase in stage.phases for w in phase.parameters()])
    )


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_rotary_tables_are_made_once_a_microbatch(mode, monkeypatch):
    """By forward, recompute and backward of all layers together, one pair for each base; and they
    go with them."""
    made = []
    of = RotaryTables.of

    def noted(self, positions):
        made.append(of(self, positions))
        return made[-1]

    monkeypatch.setattr(RotaryTables, "of", noted)
    config = configured(False)
    model = dataclasses.replace(
        config.model, num_layers=4, attention_window=5, window_layers=[0, 2], window_rope_theta=50.0
    )
    recompute = RecomputeConfig(mode, ["qkv"]) if mode == "selective" else RecomputeConfig(mode)
    stage, batch = stage_of(dataclasses.replace(config, model=model, recompute=recompute))
    for microbatch in range(2):
        stage.forward(microbatch, None, batch)
    assert len(made) == 2 * 2
    assert not torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][0], made[2][0])
    left = [weakref.ref(table) for tables in made for table in tables]
    made.clear()
    stage.backward(0, GRAD)
    assert not made and [each() is None for each in left] == 4 * [True] + 4 * [False]
    stage.backward_input(1, GRAD)
    stage.backward_weight(1)
    assert not made and all(each() is None for each in left)
    stage.evaluate(None, batch)
    assert len(made) == 2 and "_cache" not in vars(batch)
