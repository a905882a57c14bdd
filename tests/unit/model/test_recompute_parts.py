"""Recomputed parts run again once per micro-batch, in B or I but not in W; their results are not
saved. Offloaded activations leave the device."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from parity_configs import config_of
from whole_stage import WholeStage, new_model

from megatron5d.config.schema import MoeConfig, RecomputeConfig
from megatron5d.expert_parallel.dispatcher import DirectDispatch
from megatron5d.model.rope import RotaryTables
from megatron5d.phases.activations import ActivationPolicy, HostCopy, RecomputedParts
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.precision import fp8_recipes

S, B, LAYERS = 16, 2, 2
TOKENS = S * B
PARTS = ("norm", "qkv", "attention", "activation", "mlp", "experts")
GRAD = torch.tensor([1.0, 0.0], dtype=torch.float64)
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 24, "shared_ffn_hidden_size": 8}


def model_config(moe: bool, parts=(), **fields):
    config = config_of("llama_gqa", gbs=B, mbs=B)
    fields = {"num_layers": LAYERS, "vocab_size": 32, **(EXPERTS if moe else {}), **fields}
    recompute = RecomputeConfig("selective", list(parts)) if parts else RecomputeConfig()
    return replace(config, model=replace(config.model, **fields), recompute=recompute)


def fp8_config(moe: bool, recipe: str, parts=()):
    """Sizes that FP8 GEMMs accept, in fp64 around them."""
    sizes = {"moe_ffn_hidden_size": 32, "shared_ffn_hidden_size": 16} if moe else {}
    config = model_config(moe, parts, **sizes)
    return replace(config, precision=replace(config.precision, fp8=recipe))


def make_stage(config):
    model, batch = new_model(config)
    return WholeStage(model.phases), batch


def run_step(config, host_copies=()):
    """Saved bytes after the forward, without host copies, and gradients after the backward."""
    stage, batch = make_stage(config)
    with MemoryWatch() as watch:
        stage.forward(0, None, batch)
        saved = watch.live_bytes - sum(copy.num_bytes for copy in host_copies)
        stage.backward_input(0, GRAD)
        stage.backward_weight(0)
    return saved, [weight.grad.clone() for phase in stage.phases for weight in phase.parameters()]


def saved_bytes(config) -> int:
    return run_step(config)[0]


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("parts", [(), *((part,) for part in PARTS), PARTS])
def test_parts_run_again_in_i_and_not_in_w(parts, moe, monkeypatch):
    counts: Counter[str] = Counter()
    original = RecomputedParts.run

    def counted_run(self, name, fn, *inputs):
        def counted(*tensors):
            counts[name] += 1
            return fn(*tensors)

        return original(self, name, counted, *inputs)

    monkeypatch.setattr(RecomputedParts, "run", counted_run)
    stage, batch = make_stage(model_config(moe, parts))
    stage.forward(0, None, batch)
    forward = Counter(counts)
    assert forward["attention"] == forward["qkv"] == LAYERS
    assert forward["experts"] == LAYERS * moe and forward["activation"] == LAYERS * (1 + moe)
    # A saved norm of a branch returns its input too, and is not run as a part.
    assert forward["norm"] == 2 * LAYERS * ("norm" in parts) + 1
    stage.backward_input(0, GRAD)
    nested = {"activation"} if {"mlp", "experts"} & {*parts} else set()
    for part in PARTS:
        assert forward[part] <= counts[part] <= 2 * forward[part]
        if part not in nested:
            head = part == "norm"  # the head's norm is not recomputed
            again = (part in parts) * (forward[part] - head)
            assert counts[part] == forward[part] + again, part
    before_w = Counter(counts)
    stage.backward_weight(0)
    assert counts == before_w


def test_results_of_recomputed_parts_are_not_saved():
    """Of a layer: t tokens, h = 32, heads 4 (KV 2) of 8, inner 48; routed rows r = 2t of 24, shared
    8; 8 bytes each."""
    t, h, a, g, d = TOKENS, 32, 4, 2, 8
    without = {moe: saved_bytes(model_config(moe)) for moe in (False, True)}
    elements = {
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
    dense = [n for (moe, parts), n in elements.items() if not moe and parts != ("activation",)]
    elements[False, PARTS[:-1]] = sum(dense)
    for (moe, parts), count in elements.items():
        difference = without[moe] - saved_bytes(model_config(moe, parts))
        assert difference >= LAYERS * count * 8, (moe, parts, difference)
        if parts == ("attention",):
            assert difference == LAYERS * count * 8


@pytest.mark.parametrize("other_parts", [(), ("norm", "experts")])
@pytest.mark.parametrize(
    ("recipe", "fp8_dispatch"), [("none", False), ("blockwise", False), ("blockwise", True)]
)
def test_permuted_rows_are_sent_again_instead_of_saved(
    recipe, fp8_dispatch, other_parts, monkeypatch
):
    """A layer has r = 2t rows of h = 32: 8 bytes an element, in FP8 one, and a scale per row."""
    redispatches, original = [], DirectDispatch.redispatch

    def redispatch(self, x):
        redispatches.append(x)
        return original(self, x)

    monkeypatch.setattr(DirectDispatch, "redispatch", redispatch)
    moe = MoeConfig(fp8_dispatch=fp8_dispatch)
    kept = replace(fp8_config(True, recipe, other_parts), moe=moe)
    recomputed = replace(fp8_config(True, recipe, (*other_parts, "permute")), moe=moe)
    saved, grads = run_step(kept)
    assert not redispatches
    saved_less, same_grads = run_step(recomputed)
    # A recomputed `experts` is recomputed from the rows in their own dtype.
    row_bytes = 32 + 4 if recipe != "none" and not other_parts else 32 * 8
    assert saved - saved_less == LAYERS * 2 * TOKENS * row_bytes
    assert len(redispatches) == LAYERS and all(map(torch.equal, grads, same_grads))
    stage, batch = make_stage(recomputed)
    stage.forward(0, None, batch)
    stage.backward_input(0, GRAD)
    assert len(redispatches) == 2 * LAYERS
    stage.backward_weight(0)
    assert len(redispatches) == 2 * LAYERS, "W dispatches again"


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("moe", [False, True])
def test_fp8_operands_of_recomputed_parts_are_not_saved(moe, recipe, monkeypatch):
    """A byte an element and a scale per row, of each GEMM that reads the part; same gradients."""
    t = TOKENS
    operand_bytes = {
        ("attention",): t * (4 * 8 + 4),
        ("activation",): 2 * t * (32 + 4) + t * (16 + 4) if moe else t * (48 + 4),
        # of attention and the up-projection (of the shared expert: routed rows are saved)
        ("norm",): 2 * t * (32 + 4),
    }
    for parts, num_bytes in operand_bytes.items():
        config = fp8_config(moe, recipe, parts)
        saved, grads = run_step(config)
        with monkeypatch.context() as patch:
            patch.setattr(
                fp8_recipes, "recomputable", lambda x, fn: tuple(t.clone() for t in fn(x))
            )
            saved_more, same_grads = run_step(config)
        assert saved_more - saved == LAYERS * num_bytes, parts
        assert all(map(torch.equal, grads, same_grads)), parts


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("parts", [(), ("norm", "activation")])
def test_offloaded_activations_leave_the_device(parts, moe, monkeypatch):
    """With the same gradients; the head's activations stay."""
    copies = weakref.WeakSet()
    original = HostCopy.__init__

    def init(self, tensor):
        original(self, tensor)
        copies.add(self)

    monkeypatch.setattr(HostCopy, "__init__", init)
    config = model_config(moe, parts)
    saved, grads = run_step(config, copies)
    assert not copies
    phases = ["attention", *(("dispatch", "experts", "combine") if moe else ("mlp",))]
    recompute = replace(config.recompute, offload=phases, offload_min_bytes=0)
    saved_on_device, same_grads = run_step(replace(config, recompute=recompute), copies)
    gc.collect()
    assert not copies, "host buffers are not freed"
    # The rounding of a BLAS may depend on the addresses of its operands.
    for grad, other in zip(grads, same_grads, strict=True):
        tolerance = 1e-15 * float(other.abs().max())
        torch.testing.assert_close(grad, other, rtol=1e-14, atol=tolerance)
    assert saved_on_device < 0.35 * saved


class _SaveTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(x, x, *others)
        return x.sum()


def test_large_floats_other_than_weights_are_offloaded_once():
    phase, x = torch.nn.Linear(4, 8), torch.randn(8, 4, requires_grad=True)
    policy = ActivationPolicy(host_bytes=8 * 4 * 4)  # the size of x and of the weight
    with policy.saving(phase.parameters()) as copies:
        _SaveTwice.apply(x, phase.weight, torch.arange(100), torch.randn(31))
    (copy,) = copies
    assert copy.num_bytes == 8 * 4 * 4 and torch.equal(copy.value(), x)
    assert copy.value() is copy.value(), "fetched twice"


def test_inputs_of_recomputed_layers_are_offloaded():
    recompute = RecomputeConfig("full")
    config = replace(model_config(False), recompute=recompute)
    saved, grads = run_step(config)
    recompute = replace(recompute, offload=["inputs", "mlp"], offload_min_bytes=0)
    stage, batch = make_stage(replace(config, recompute=recompute))
    with MemoryWatch() as watch:
        stage.forward(0, None, batch)
        copies = list(stage._in_flight[0].group_inputs.values())
        saved_on_device = watch.live_bytes - sum(copy.num_bytes for copy in copies)
    assert len(copies) == 2 and saved - saved_on_device == 2 * TOKENS * 32 * 8
    stage.backward(0, GRAD)
    weights = [weight for phase in stage.phases for weight in phase.parameters()]
    assert all(torch.equal(grad, weight.grad) for grad, weight in zip(grads, weights, strict=True))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_rotary_tables_are_computed_once_a_micro_batch(mode, monkeypatch):
    """One pair for each base, which forward, recomputation and backward of all layers share; freed
    with the micro-batch."""
    tables, original = [], RotaryTables.of

    def of(self, positions):
        tables.append(original(self, positions))
        return tables[-1]

    monkeypatch.setattr(RotaryTables, "of", of)
    window = {"attention_window": 5, "window_layers": [0, 2], "window_rope_theta": 50.0}
    config = model_config(False, num_layers=4, **window)
    recompute = RecomputeConfig(mode, ["qkv"]) if mode == "selective" else RecomputeConfig(mode)
    stage, batch = make_stage(replace(config, recompute=recompute))
    for microbatch in range(2):
        stage.forward(microbatch, None, batch)
    assert len(tables) == 2 * 2
    assert not torch.equal(tables[0][0], tables[1][0])
    assert torch.equal(tables[0][0], tables[2][0])
    references = [weakref.ref(table) for pair in tables for table in pair]
    tables.clear()
    stage.backward(0, GRAD)
    assert not tables
    assert [reference() is None for reference in references] == 4 * [True] + 4 * [False]
    stage.backward_input(1, GRAD)
    stage.backward_weight(1)
    assert not tables and all(reference() is None for reference in references)
    stage.evaluate(None, batch)
    assert len(tables) == 2 and "_cache" not in vars(batch)
