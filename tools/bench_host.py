"""Compare what the host does beside arithmetic: our layers, operations and steps with those of
torch and transformers.

    python tools/bench_host.py [row ...] [--rounds 20] [--json]

Rows: dense, moe (a layer, forward and backward); tp (a dense layer under tp 2 with sp, in a group
    that sends nothing);
layer_norm, attention, linear, rope; gpt2_fp32, gpt2_bf16 (a training step of 14 M parameters, the
only rows with arithmetic worth its name); gpu_dense, gpu_moe (a layer's launches on a GPU, in
bf16), gpu_dense_graphs, gpu_moe_graphs (the same under train.cuda_graph=phases). No names: all of
them, those of a GPU where there is one. The figure is CPU seconds, ours / theirs, above 1 where we
are slower. Sides are measured by turns in one process with one thread, and the least of all rounds
counts: it is what a busy machine changes least. Peers that are not installed are left out. Exit
code 2 for bad input.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
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
    # answers --help and refuses bad options before the seconds that the imports below take
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
from megatron5d.tools.bench import training
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import state_of
from megatron5d.train.build import sizes_of

Sides = dict[str, Callable[[], object]]
"""Who -> forward and backward once; ours comes first."""

LAYER = [
    "model=tiny",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=8",
    "train.seq_len=8",
    "train.mbs=1",
    "train.gbs=1",
    "precision.dtype=fp32",
]
EXPERTS = [
    "model=tiny_mixtral",
    "model.num_experts=4",
    "model.top_k=2",
    "model.moe_ffn_hidden_size=64",
]
GPU_LAYER = [
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.head_dim=64",
    "train.seq_len=128",
    "precision.dtype=bf16",
    "kernels.attention=triton",
    "moe.exchange=planned",
]
GPT2 = [
    "model=tiny_gpt2",
    "model.num_layers=6",
    "model.hidden_size=384",
    "model.ffn_hidden_size=1536",
    "model.num_heads=6",
    "model.num_kv_heads=6",
    "model.head_dim=64",
    "model.vocab_size=8192",
    "train.seq_len=128",
    "train.mbs=2",
    "train.gbs=2",
    "optim.clip=1.0",
]
CPU = torch.device("cpu")
TIMED_S = 0.02  # of a round, at least, but for steps


def our_layer(
    config: Config, world: int = 1, device: torch.device = CPU, graphs: bool = False
) -> Callable[[], object]:
    """Returns forward and backward of a block as a stage runs them, into main gradients as in
    training."""
    model = GPT(config, build_mesh(sizes_of(config, world)), device)
    model.initialize(0)
    for parameter in model.parameters():
        state_of(parameter).main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    replayed = PhaseGraphs(Ledger()) if graphs else None
    stage = Stage(phases_in(model.layers["0"]), graphs=replayed)
    batch = make_micro_batch(
        torch.zeros(config.train.mbs, config.train.seq_len + 1, dtype=torch.int64)
    ).to(device)
    attention: Any = model.layers["0"].attention
    # made once for all layers of a stage: every side is given its own
    tables = attention.rope(copy(batch))
    attention.rope = lambda batch: tables
    shape = (
        2,
        config.train.seq_len // config.parallel.tp,
        config.train.mbs,
        config.model.hidden_size,
    )
    x, dy = torch.randn(shape, device=device, dtype=DTYPES[config.precision.dtype])

    def run() -> None:
        if replayed is not None:
            replayed.start_step(1)
        for op, given in (("F", x), ("B", dy)):
            action = stage.begin(op, 0, given, batch)
            while action.advance():
                pass

    return run


def recorded(forward: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Returns forward and backward of plain autograd, whose gradients add up in the leaves."""
    leaves = [x.requires_grad_() for x in inputs]
    dy = torch.randn_like(forward(*leaves))
    return lambda: forward(*leaves).backward(dy)


class PlainBlock(nn.Module):
    """A block as one writes it by hand in torch, for one architecture: `[s, b, h]` -> the same.

    Args:
        ranks: that share the sequence between the matrices, and the matrices; of the default group.
    """

    def __init__(self, config: Config, ranks: int = 1) -> None:
        super().__init__()
        model, self.ranks = config.model, ranks
        h, self.heads, self.d = model.hidden_size, model.num_heads // ranks, model.head_dim
        self.experts, self.top_k, f = model.num_experts, model.top_k, model.ffn_hidden_size // ranks
        many = (self.experts,) if self.experts else ()
        shapes = [
            (h,),
            (h,),
            (3 * self.heads * self.d, h),
            (h, self.heads * self.d),
            (*many, 2 * f, h),
            (*many, h, f),
        ]
        self.weights = nn.ParameterList(
            torch.randn(shape) / 6 for shape in (*shapes, (self.experts or 1, h))
        )
        angle = torch.randn(config.train.seq_len, 1, 1, self.d)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        norm, mlp_norm, qkv, out, up, down, router = self.weights
        h = self.gathered(F.rms_norm(x, norm.shape, norm, 1e-5))
        q, k, v = F.linear(h, qkv).unflatten(-1, (3, self.heads, self.d)).unbind(2)
        q, k, v = (
            each.permute(1, 2, 0, 3)
            for each in (turned(q, self.cos, self.sin), turned(k, self.cos, self.sin), v)
        )
        core = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        )
        x = x + self.scattered(F.linear(core, out))
        h = self.gathered(F.rms_norm(x, mlp_norm.shape, mlp_norm, 1e-5))
        if self.experts:
            return x + self.routed(h.flatten(0, 1), up, down, router).view(h.shape)
        gate, inner = F.linear(h, up).chunk(2, -1)
        return x + self.scattered(F.linear(F.silu(gate) * inner, down))

    def routed(self, h: Tensor, up: Tensor, down: Tensor, router: Tensor) -> Tensor:
        weights, experts = F.softmax(F.linear(h, router), -1).topk(self.top_k)
        weights, order = (
            weights / weights.sum(-1, keepdim=True),
            experts.flatten().argsort(stable=True),
        )
        ends = torch.bincount(experts.flatten(), minlength=self.experts).cumsum(0).to(torch.int32)
        gate, inner = F.grouped_mm(h[order // self.top_k], up.transpose(1, 2), offs=ends).chunk(
            2, -1
        )
        y = F.grouped_mm(F.silu(gate) * inner, down.transpose(1, 2), offs=ends)
        return torch.zeros_like(h).index_add(
            0, order // self.top_k, y * weights.flatten()[order, None]
        )

    def gathered(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Collective.apply(x, False)

    def scattered(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Collective.apply(x, True)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions as transformers does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _exchanged(x: Tensor, scatters: bool) -> Tensor:
    x, ranks = x.contiguous(), dist.get_world_size()
    out = x.new_empty(x.shape[0] // ranks if scatters else x.shape[0] * ranks, *x.shape[1:])
    (dist.reduce_scatter_tensor if scatters else dist.all_gather_into_tensor)(out, x)
    return out


class _Collective(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, scatters: bool):
        ctx.scatters = scatters
        return _exchanged(x, scatters)

    @staticmethod
    def backward(ctx, dy):
        return _exchanged(dy, not ctx.scatters), None


def layer(*options: str) -> Sides:
    """Makes a block, dense or with experts: ours, transformers', and a plain one of torch."""
    config = load_config([*LAYER, *options])
    s, h = config.train.seq_len, config.model.hidden_size
    sides = {"ours": our_layer(config)}
    if find_spec("transformers"):
        whole = training.transformers_model(config, CPU).model
        tables = whole.rotary_emb(torch.zeros(1, s, h), torch.arange(s)[None])
        sides["transformers"] = recorded(
            partial(whole.layers[0], position_embeddings=tables), torch.randn(1, s, h)
        )
    return sides | {"plain torch": recorded(PlainBlock(config), torch.randn(s, 1, h))}


def sharded_layer() -> Sides:
    """Makes a dense block under tp 2 with sp, in a group that sends nothing and that `ratios`
    ends."""
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    config = load_config([*LAYER, "parallel.tp=2", "parallel.sp=true"])
    x = torch.randn(config.train.seq_len // 2, 1, config.model.hidden_size)
    return {"ours": our_layer(config, 2), "by hand": recorded(PlainBlock(config, 2), x)}


def gpu_layer(kind: str, graphs: bool) -> Sides:
    """Makes a block on the GPU, ours and a plain one; on a stream of its own, as graphs need."""
    torch.cuda.set_stream(torch.cuda.Stream())
    device, config = (
        torch.device("cuda"),
        load_config([*LAYER, *(EXPERTS if kind == "moe" else ()), *GPU_LAYER]),
    )
    plain = PlainBlock(config).to(device, torch.bfloat16)
    plain.cos, plain.sin = (table.to(device, torch.bfloat16) for table in (plain.cos, plain.sin))
    x = torch.randn(
        config.train.seq_len, 1, config.model.hidden_size, device=device, dtype=torch.bfloat16
    )
    return {
        "ours": our_layer(config, device=device, graphs=graphs),
        "plain torch": recorded(plain, x),
    }


def operation(name: str) -> Sides:
    """Makes one of our operations and torch's own; of 8 tokens, 4 heads of 8."""
    rows, heads = partial(torch.randn, 8, 1, 32), partial(torch.randn, 8, 1, 4, 8)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    angle = torch.randn(8, 1, 4)
    tables = angle.cos(), angle.sin()
    cos, sin = (torch.cat((x, x), -1).unsqueeze(2) for x in tables)
    pairs: dict[
        str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[], list[Tensor]]]
    ] = {
        "layer_norm": (
            partial(layer_norm, eps=1e-5),
            lambda x, w, b: F.layer_norm(x, (32,), w, b),
            lambda: [rows(), torch.ones(32), torch.zeros(32)],
        ),
        "attention": (
            lambda q, k, v: attention(q, k, v, scale=8**-0.5)[0],
            lambda q, k, v: sdpa(*(x.permute(1, 2, 0, 3) for x in (q, k, v))).permute(2, 0, 1, 3),
            lambda: [heads(), heads(), heads()],
        ),
        "linear": (local_linear, F.linear, lambda: [rows(), torch.randn(32, 32)]),
        "rope": (
            lambda q, k: torch.cat(apply_rope(q, k, *tables)),
            lambda q, k: torch.cat((turned(q, cos, sin), turned(k, cos, sin))),
            lambda: [heads(), heads()],
        ),
    }
    mine, theirs, inputs = pairs[name]
    return {"ours": recorded(mine, *inputs()), "torch": recorded(theirs, *inputs())}


def training_step(dtype: str) -> Sides:
    """Makes a step of a small GPT-2, transformers' under autocast for bf16, with torch's fused
    AdamW."""
    config, device = load_config([*GPT2, f"precision.dtype={dtype}"]), CPU
    rows = next(training.token_rows(config))
    sides: Sides = {"ours": partial(training.our_step(config, device), rows)}
    if find_spec("transformers"):
        sides["transformers"] = partial(
            training.transformers_step(config, device, compiled=False), rows
        )
    return sides


def sides_of(row: str) -> Sides:
    """Makes the sides of a row of the table."""
    if row in OPERATIONS:
        return operation(row)
    if row.startswith("gpt2_"):
        return training_step(row.removeprefix("gpt2_"))
    if row in ON_GPU:
        _, kind, *graphs = row.split("_")
        return gpu_layer(kind, bool(graphs))
    return sharded_layer() if row == "tp" else layer(*(EXPERTS if row == "moe" else ()))


def cpu_seconds(sides: Sides, rounds: int) -> dict[str, float]:
    """Returns the least CPU time of a call of each side, which are measured by turns."""
    calls, least = {}, dict.fromkeys(sides, float("inf"))
    for name, run in sides.items():
        run()
        begin = time.process_time()
        run()
        calls[name] = max(1, round(TIMED_S / max(time.process_time() - begin, 1e-5)))
    for _ in range(rounds):
        for name, run in sides.items():
            begin = time.process_time()
            for _ in range(calls[name]):
                run()
            least[name] = min(least[name], (time.process_time() - begin) / calls[name])
    return least


def ratios(row: str, rounds: int) -> dict[str, float]:
    """Returns our CPU time over that of each peer of a row."""
    try:
        seconds = cpu_seconds(sides_of(row), rounds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    mine = seconds.pop("ours")
    return {name: mine / other for name, other in seconds.items()}


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    if not torch.cuda.is_available() and (rows := [row for row in arguments.rows if row in ON_GPU]):
        print(
            f"bench_host.py: {', '.join(rows)}: torch finds no GPU; other rows need none",
            file=sys.stderr,
        )
        return 2
    found = {}
    for row in arguments.rows or (ROWS if torch.cuda.is_available() else ON_CPU):
        found[row] = ratios(row, arguments.rounds)
        if not arguments.json:
            print(
                f"{row:16}",
                *(f"{value:6.2f} of {name}" for name, value in found[row].items()),
                flush=True,
            )
    if arguments.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
