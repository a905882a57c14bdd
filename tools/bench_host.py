"""Compare the host time of our layers, operations and steps with torch and transformers.

    python tools/bench_host.py [row ...] [--rounds 20] [--json]

Rows:
    dense, moe                  a layer, forward and backward
    tp                          a dense layer under tp 2 with sp, in a group that sends nothing
    layer_norm, attention, linear, rope
    gpt2_fp32, gpt2_bf16        a training step of 14 M parameters, where arithmetic counts, too
    gpu_dense, gpu_moe          a layer's launches on a GPU, in bf16
    gpu_dense_graphs, gpu_moe_graphs    the same under train.cuda_graph=phases

Without names, all rows that this machine can run. The figure is CPU seconds, ours / theirs: above 1
where we are slower. Both sides alternate in one process with one thread, and the least of all
rounds counts: a busy machine changes it least. Peers that are not installed are left out. Exit code
2 for bad input.
"""

import argparse
import sys
import time
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.tools.options import add_json, whole_number

OPERATIONS = ("layer_norm", "attention", "linear", "rope")
ON_CPU = ("dense", "moe", "tp", *OPERATIONS, "gpt2_fp32", "gpt2_bf16")
ON_GPU = ("gpu_dense", "gpu_dense_graphs", "gpu_moe", "gpu_moe_graphs")
ROWS = ON_CPU + ON_GPU


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument(
        "rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)} (default: all that can run)"
    )
    parser.add_argument(
        "--rounds", type=whole_number(), default=20, help="of each side (default 20)"
    )
    add_json(parser)
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: {', '.join(ROWS)}")
    return arguments


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron5d.comm.ledger import Ledger
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.data.batch import make_micro_batch
from megatron5d.kernels import apply_rope, attention, layer_norm
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.model.block_inputs import DTYPES
from megatron5d.model.gpt import GPT
from megatron5d.phases.phase import phases_in
from megatron5d.phases.stage import Stage
from megatron5d.pipeline_parallel.phase_graphs import PhaseGraphs
from megatron5d.tensor_parallel.linear import local_linear
from megatron5d.tools.bench.harness import Call, Calls, least_seconds
from megatron5d.tools.bench.results import print_rows
from megatron5d.tools.bench.training import (
    our_step,
    token_rows,
    transformers_model,
    transformers_step,
)
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import state_of
from megatron5d.train.build import sizes_of

LAYER = (
    "model=tiny model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=64 "
    "model.num_heads=4 model.num_kv_heads=4 model.head_dim=8 train.seq_len=8 train.mbs=1 "
    "train.gbs=1 precision.dtype=fp32"
)
EXPERTS = "model=tiny_mixtral model.num_experts=4 model.top_k=2 model.moe_ffn_hidden_size=64"
GPU_LAYER = (
    "model.hidden_size=256 model.ffn_hidden_size=512 model.head_dim=64 train.seq_len=128 "
    "precision.dtype=bf16 kernels.attention=triton moe.exchange=planned"
)
GPT2 = (
    "model=tiny_gpt2 model.num_layers=6 model.hidden_size=384 model.ffn_hidden_size=1536 "
    "model.num_heads=6 model.num_kv_heads=6 model.head_dim=64 model.vocab_size=8192 "
    "train.seq_len=128 train.mbs=2 train.gbs=2 optim.clip=1.0"
)
CPU = torch.device("cpu")
MIN_ROUND_S = 0.02  # of several calls, where one takes less


def configure(*overrides: str) -> Config:
    return load_config(" ".join(overrides).split())


def our_layer(
    config: Config, world: int = 1, device: torch.device = CPU, graphs: bool = False
) -> Call:
    """Forward and backward of a block as a stage runs them, into main gradients as in training."""
    model = GPT(config, build_mesh(sizes_of(config, world)), device)
    model.initialize(0)
    for parameter in model.parameters():
        state_of(parameter).main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    phase_graphs = PhaseGraphs(Ledger()) if graphs else None
    stage = Stage(phases_in(model.layers["0"]), graphs=phase_graphs)
    batch = make_micro_batch(
        torch.zeros(config.train.mbs, config.train.seq_len + 1, dtype=torch.int64)
    ).to(device)
    # all layers of a stage share rotary tables; the other sides get theirs made, too
    attention: Any = model.layers["0"].attention
    tables = attention.rope(copy(batch))
    attention.rope = lambda batch: tables
    shape = (config.train.seq_len // config.parallel.tp, config.train.mbs, config.model.hidden_size)
    x, dy = torch.randn((2, *shape), device=device, dtype=DTYPES[config.precision.dtype])

    def run() -> None:
        if phase_graphs is not None:
            phase_graphs.start_step(1)
        for op, received in (("F", x), ("B", dy)):
            action = stage.begin(op, 0, received, batch)
            while action.advance():
                pass

    return run


def with_backward(forward: Call, *inputs: Tensor) -> Call:
    """Forward and backward of plain autograd, whose gradients add up in the leaves."""
    leaves = [x.requires_grad_() for x in inputs]
    dy = torch.randn_like(forward(*leaves))
    return lambda: forward(*leaves).backward(dy)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions as transformers does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of torch, of `[s, b, heads, d]`."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class PlainBlock(nn.Module):
    """A transformer block as written by hand in torch: `[s, b, h]` -> the same.

    Args:
        ranks: of the default group, which shard the matrices, and between them the sequence.
    """

    def __init__(self, config: Config, ranks: int = 1) -> None:
        super().__init__()
        model, self.ranks = config.model, ranks
        h, self.heads, self.d = model.hidden_size, model.num_heads // ranks, model.head_dim
        self.experts, self.top_k, f = model.num_experts, model.top_k, model.ffn_hidden_size // ranks
        experts = (self.experts,) if self.experts else ()
        shapes = [
            (h,),
            (h,),
            (3 * self.heads * self.d, h),
            (h, self.heads * self.d),
            (*experts, 2 * f, h),
            (*experts, h, f),
            (self.experts or 1, h),
        ]
        self.weights = nn.ParameterList(torch.randn(shape) / 6 for shape in shapes)
        angle = torch.randn(config.train.seq_len, 1, 1, self.d)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        norm, mlp_norm, qkv, out, up, down, router = self.weights
        h = self.gather(F.rms_norm(x, norm.shape, norm, 1e-5))
        q, k, v = F.linear(h, qkv).unflatten(-1, (3, self.heads, self.d)).unbind(2)
        q, k = (rotate(heads, self.cos, self.sin) for heads in (q, k))
        core = causal_attention(q, k, v).flatten(2)
        x = x + self.scatter(F.linear(core, out))
        h = self.gather(F.rms_norm(x, mlp_norm.shape, mlp_norm, 1e-5))
        if self.experts:
            return x + self.mix_experts(h.flatten(0, 1), up, down, router).view(h.shape)
        gate, inner = F.linear(h, up).chunk(2, -1)
        return x + self.scatter(F.linear(F.silu(gate) * inner, down))

    def mix_experts(self, h: Tensor, up: Tensor, down: Tensor, router: Tensor) -> Tensor:
        weights, experts = F.softmax(F.linear(h, router), -1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=self.experts).cumsum(0).to(torch.int32)
        gate, inner = F.grouped_mm(h[order // self.top_k], up.transpose(1, 2), offs=ends).chunk(
            2, -1
        )
        y = F.grouped_mm(F.silu(gate) * inner, down.transpose(1, 2), offs=ends)
        return torch.zeros_like(h).index_add(
            0, order // self.top_k, y * weights.flatten()[order, None]
        )

    def gather(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Collective.apply(x, False)

    def scatter(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Collective.apply(x, True)


def _exchange(x: Tensor, scatters: bool) -> Tensor:
    x, ranks = x.contiguous(), dist.get_world_size()
    out = x.new_empty(x.shape[0] // ranks if scatters else x.shape[0] * ranks, *x.shape[1:])
    (dist.reduce_scatter_tensor if scatters else dist.all_gather_into_tensor)(out, x)
    return out


class _Collective(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, scatters: bool):
        ctx.scatters = scatters
        return _exchange(x, scatters)

    @staticmethod
    def backward(ctx, dy):
        return _exchange(dy, not ctx.scatters), None


def layer(overrides: str) -> Calls:
    """A block, dense or with experts: ours, transformers', and one in plain torch."""
    config = configure(LAYER, overrides)
    s, h = config.train.seq_len, config.model.hidden_size
    calls: Calls = {"ours": our_layer(config)}
    if find_spec("transformers"):
        model = transformers_model(config, CPU).model
        tables = model.rotary_emb(torch.zeros(1, s, h), torch.arange(s)[None])
        block = partial(model.layers[0], position_embeddings=tables)
        calls["transformers"] = with_backward(block, torch.randn(1, s, h))
    return calls | {"plain torch": with_backward(PlainBlock(config), torch.randn(s, 1, h))}


def sharded_layer() -> Calls:
    """A dense block under tp 2 with sp, in a group that sends nothing; `ratios` destroys it."""
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    config = configure(LAYER, "parallel.tp=2 parallel.sp=true")
    x = torch.randn(config.train.seq_len // 2, 1, config.model.hidden_size)
    return {"ours": our_layer(config, 2), "by hand": with_backward(PlainBlock(config, 2), x)}


def gpu_layer(kind: str, graphs: bool) -> Calls:
    """A block on the GPU, ours and in plain torch; on another stream, as graphs require."""
    torch.cuda.set_stream(torch.cuda.Stream())
    device = torch.device("cuda")
    config = configure(LAYER, EXPERTS if kind == "moe" else "", GPU_LAYER)
    plain = PlainBlock(config).to(device, torch.bfloat16)
    plain.cos, plain.sin = (table.to(device, torch.bfloat16) for table in (plain.cos, plain.sin))
    shape = config.train.seq_len, 1, config.model.hidden_size
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return {
        "ours": our_layer(config, device=device, graphs=graphs),
        "plain torch": with_backward(plain, x),
    }


def operation(name: str) -> Calls:
    """One of our operations and torch's own, of 8 tokens, 4 heads of 8."""
    angle = torch.randn(8, 1, 4)
    tables = angle.cos(), angle.sin()
    cos, sin = (torch.cat((x, x), -1).unsqueeze(2) for x in tables)
    rows, heads = (8, 1, 32), (8, 1, 4, 8)
    operations: dict[str, tuple[Call, Call, tuple[tuple[int, ...], ...]]] = {
        "layer_norm": (
            partial(layer_norm, eps=1e-5),
            lambda x, w, b: F.layer_norm(x, (32,), w, b),
            (rows, (32,), (32,)),
        ),
        "attention": (
            lambda q, k, v: attention(q, k, v, scale=8**-0.5)[0],
            causal_attention,
            (heads, heads, heads),
        ),
        "linear": (local_linear, F.linear, (rows, (32, 32))),
        "rope": (
            lambda q, k: torch.cat(apply_rope(q, k, *tables)),
            lambda q, k: torch.cat((rotate(q, cos, sin), rotate(k, cos, sin))),
            (heads, heads),
        ),
    }
    ours, theirs, shapes = operations[name]
    return {
        side: with_backward(forward, *map(torch.randn, shapes))
        for side, forward in (("ours", ours), ("torch", theirs))
    }


def training_step(dtype: str) -> Calls:
    """A step of a small GPT-2, ours and transformers'."""
    config = configure(GPT2, f"precision.dtype={dtype}")
    rows = next(token_rows(config))
    calls: Calls = {"ours": partial(our_step(config, CPU), rows)}
    if find_spec("transformers"):
        calls["transformers"] = partial(transformers_step(config, CPU, compiled=False), rows)
    return calls


def calls_of(row: str) -> Calls:
    """The sides of a row: forward and backward once, ours first."""
    if row in OPERATIONS:
        return operation(row)
    if row.startswith("gpt2_"):
        return training_step(row.removeprefix("gpt2_"))
    if row in ON_GPU:
        _, kind, *graphs = row.split("_")
        return gpu_layer(kind, bool(graphs))
    return sharded_layer() if row == "tp" else layer(EXPERTS if row == "moe" else "")


def cpu_seconds(calls: Calls, rounds: int) -> dict[str, float]:
    """Least CPU time of each call; the calls alternate."""
    # a call may take microseconds: several are measured together
    counts: dict[str, int] = {}
    batches: Calls = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        counts[name] = max(1, round(MIN_ROUND_S / max(time.process_time() - start, 1e-5)))
        batches[name] = partial(_repeat, call, counts[name])
    seconds, _ = least_seconds(batches, rounds)
    return {name: seconds[name] / counts[name] for name in calls}


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def ratios(row: str, rounds: int) -> dict[str, float]:
    """Our CPU time over that of each peer of a row."""
    try:
        seconds = cpu_seconds(calls_of(row), rounds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    ours = seconds.pop("ours")
    return {name: ours / other for name, other in seconds.items()}


def _line(row: str, row_ratios: dict[str, float]) -> str:
    columns = (f"{value:6.2f} of {name}" for name, value in row_ratios.items())
    return " ".join([f"{row:16}", *columns])


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    rows = arguments.rows or (ROWS if has_gpu else ON_CPU)
    if not has_gpu and (on_gpu := [row for row in rows if row in ON_GPU]):
        print(
            f"bench_host: {', '.join(on_gpu)}: torch finds no GPU; other rows need none",
            file=sys.stderr,
        )
        return 2
    measured = ((row, ratios(row, arguments.rounds)) for row in rows)
    print_rows(measured, _line, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
