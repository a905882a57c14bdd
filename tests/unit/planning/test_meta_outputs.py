"""What is computed from sizes has the shape, dtype and strides of what torch computes."""

import random

import pytest
import torch

from megatron5d.planning.memory.meta_outputs import operation_of

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16, torch.float64]
TWO, ONE = (
    (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gt.Tensor),
    (aten.exp.default, aten.silu.default),
)


def output_of(func, args, kwargs):
    outputs = operation_of(func).outputs
    return outputs and outputs(args, kwargs)


def test_outputs_that_share_memory_are_known():
    x = torch.ones(2, 3)
    for func, views, fresh in [
        (aten.view.default, True, False),
        (aten.add_.Tensor, True, False),
        (aten.unbind.int, True, False),
        (aten._unsafe_view.default, False, False),
        (aten.mm.default, False, True),
        (aten.sort.default, False, True),
    ]:
        known = operation_of(func)
        assert (known.views, known.fresh) == (views, fresh), func
    assert (
        aten._unsafe_view.default(x, [3, 2]).untyped_storage().data_ptr()
        == x.untyped_storage().data_ptr()
    )


def strided(rng, shape, dtype):
    """Dims in any order in memory, with gaps, some of them expanded."""
    order = rng.sample(range(len(shape)), len(shape))
    whole = torch.ones([shape[dim] + rng.choice([0, 0, 3]) for dim in order], dtype=dtype)
    for place, dim in enumerate(order):
        whole = whole.narrow(place, 0, shape[dim])
    return whole.permute([order.index(dim) for dim in range(len(shape))])


def on_meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def form(tensor):
    """Strides of dims of one element say nothing."""
    return (
        tensor.shape,
        tensor.dtype,
        [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1],
    )


@pytest.mark.parametrize("seed", range(4))
def test_any_strides_and_broadcasts(seed):
    rng, seen = random.Random(seed), 0
    for _ in range(300):
        shape, dtype = (
            [rng.choice([1, 2, 3, 5]) for _ in range(rng.randint(0, 5))],
            rng.choice(FLOATS),
        )
        func = rng.choice(TWO + ONE)
        given = []
        for _ in range(1 if func in ONE else 2):
            tensor = strided(rng, [1 if rng.random() < 0.2 else size for size in shape], dtype)
            given.append(tensor.expand(shape) if rng.random() < 0.2 else tensor)
        out = output_of(func, [on_meta(tensor) for tensor in given], {})
        assert out is not None and out.is_meta and form(out) == form(func(*given)), [
            each.stride() for each in given
        ]
        seen += any(not tensor.is_contiguous() for tensor in given)
    assert seen > 100


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten.mean.dim(x, [-1], True),
        lambda x: torch.ops.aten.logsumexp.default(x, [0]),
        lambda x: torch.ops.aten.gelu.default(x, approximate="tanh"),
        lambda x: torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format),
        lambda x: torch.ops.aten.clone.default(x),
        lambda x: torch.ops.aten.pow.Scalar(10000.0, x),
        lambda x: torch.ops.aten.masked_fill.Scalar(x, x > 0, float("-inf")),
        lambda x: torch.ops.aten.add.Tensor(x, torch.ones((), dtype=torch.float64)),
        lambda x: torch.ops.aten.mul.Tensor(x, torch.ones(3, dtype=torch.float64, device=x.device)),
        lambda x: torch.ops.aten.floor_divide.default(x, 2),
        lambda x: torch.ops.aten.cat.default([x, x[:1]]),
        lambda x: torch.ops.aten.stack.default([x, x], -1),
        lambda x: torch.ops.aten._softmax_backward_data.default(x, x, -1, x.dtype),
        lambda x: torch.ops.aten.exp_.default(x),
        lambda x: torch.ops.aten.roll.default(x, [1], [-1]),
        lambda x: torch.ops.aten.tril.default(x, -1),
        lambda x: torch.ops.aten.mm.default(x[0], x[1].t()),
        lambda x: torch.ops.aten.any.dim(x > 0, -2),
        lambda x: torch.ops.aten.any.dim(x > 0, 1, True),
        lambda x: torch.ops.aten._to_copy.default(x.permute(2, 0, 1), dtype=torch.float64),
        lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.int64, device=x.device),
        lambda x: torch.ops.aten.arange.default(5, device=x.device),
        lambda x: torch.ops.aten.arange.start(2, 5, dtype=x.dtype, device=x.device),
        lambda x: torch.ops.aten.arange.start_step(7, 1, -2, device=x.device),
        lambda x: torch.ops.aten.zeros_like.default(x),
        lambda x: torch.ops.aten.zeros_like.default(x[:1, :1, :1].expand(4, 2, 3)),
        lambda x: torch.ops.aten.zeros_like.default(x.permute(2, 0, 1)),
        lambda x: torch.ops.aten._softmax.default(x.permute(2, 0, 1), -1, False),
        lambda x: torch.ops.aten.gather.default(x[0], 1, rows(x)[:2]),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [0, -1]),
        lambda x: torch.ops.aten.sum.dim_IntList(x, None, True),
        lambda x: torch.ops.aten.amax.default(x, [1], True),
        lambda x: torch.ops.aten.amax.default(x),
        lambda x: torch.ops.aten.bmm.default(x, x.transpose(1, 2)),
        lambda x: torch.ops.aten.empty_like.default(x.permute(2, 0, 1), dtype=torch.float64),
        lambda x: torch.ops.aten.flip.default(x, [0]),
        lambda x: torch.ops.aten.index_put.default(x, [rows(x)[:, 0]], x[:3], True),
        lambda x: torch.ops.aten.sort.stable(x, stable=True, dim=-1, descending=True)[0],
        lambda x: torch.ops.aten.sort.stable(x, stable=True, dim=0)[1],
        lambda x: torch.ops.aten.ones_like.default(x),
        lambda x: torch.ops.aten.topk.default(x, 2, 0)[0],
        lambda x: torch.ops.aten.topk.default(x, 1)[1],
        lambda x: torch.ops.aten.searchsorted.Tensor(x.new_empty(4), x.new_empty(3, 2)),
        lambda x: torch.ops.aten.take.default(x, rows(x)),
        lambda x: torch.ops.aten.slice_backward.default(x, [9, 2, 3], 0, 1, 5, 1),
        lambda x: torch.ops.aten.index.Tensor(x, [rows(x)]),
        lambda x: torch.ops.aten.index.Tensor(x, [rows(x).t()]),
        lambda x: torch.ops.aten.index.Tensor(x.permute(2, 0, 1), [rows(x).t()]),
        lambda x: torch.ops.aten.index.Tensor(x, [None, rows(x).t()]),
        lambda x: torch.ops.aten.index.Tensor(x[:1, :1, :1].expand(4, 2, 3), [rows(x).t()]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_operations(call, dtype):
    x = torch.ones(3, 4, 2, dtype=dtype).permute(1, 2, 0)
    with Answered() as answered:
        out = call(on_meta(x))
    assert answered.count == 1 and form(out) == form(call(x))


def rows(x):
    return torch.zeros(3, 2, dtype=torch.int64, device=x.device)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_layer_norm_and_its_gradients(dims, dtype):
    x = torch.ones(3, 4, 2, dtype=dtype)
    shape, weight = x.shape[3 - dims :], torch.ones(x.shape[3 - dims :], dtype=dtype)
    expected = aten.native_layer_norm.default(x, shape, weight, weight, 1e-5)
    given = [on_meta(each) for each in (x, weight)]
    out = output_of(aten.native_layer_norm.default, (given[0], shape, given[1], given[1], 1e-5), {})
    assert [form(each) for each in out] == [form(each) for each in expected]
    for wanted in [(True, True, True), (True, True, False)]:
        real = aten.native_layer_norm_backward.default(
            x, x, shape, *expected[1:], weight, weight, wanted
        )
        sized = output_of(
            aten.native_layer_norm_backward.default,
            (given[0], given[0], shape, *out[1:], *given[1:] * 2, wanted),
            {},
        )
        assert [each is None for each in sized] == [not each for each in wanted]
        assert [form(each) for each in sized if each is not None] == [
            form(each) for each in real if each is not None
        ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_on_the_cpu(dtype):
    """As torch says of its own kernel, for `[s, b, a, d]` with heads first, whole and padded."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    x = torch.empty(5, 2, 4, 8, dtype=dtype, device="meta").permute(1, 2, 0, 3)
    for q in (x, torch.nn.functional.pad(x, (0, 8))):
        sized = output_of(attention, (q, q, q, 0.0, True), {"scale": 0.5})
        assert [form(each) for each in sized] == [
            form(each) for each in attention(q, q, q, 0.0, True, scale=0.5)
        ]


class Answered(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = output_of(func, args, kwargs or {})
        if out is None:
            return func(*args, **(kwargs or {}))
        self.count += "gt" not in str(func)
        return out


def test_it_leaves_what_it_does_not_know_to_torch():
    x, real = torch.empty(2, 3, device="meta"), torch.ones(2, 3)
    for func, args in [
        (aten.add.Tensor, (real, real)),
        (aten.mm.default, (x, x.t().double())),
        (aten.cat.default, ([real, real],)),
        (aten.exp_.default, (real,)),
        (aten.transpose_.default, (x, 0, 1)),
        (aten.cat.default, ([x, x.double()],)),
        (aten.add.out, (x, x)),
    ]:
        assert output_of(func, args, {}) is None, func
