"""Tokens to their experts and back on several ranks: against a loop over tokens, with crowds,
deserts and bytes."""

import pytest
import torch
from rank_pool import run_on_pool

from megatron5d.comm.ledger import Ledger
from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.dispatcher import Dispatcher, SendCapacity
from megatron5d.expert_parallel.experts import Experts
from megatron5d.expert_parallel.hierarchical_dispatcher import HierarchicalDispatcher
from megatron5d.model.moe import dispatcher_of
from megatron5d.phases.wgrad import run_now
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of

E, K, H, F, N = 8, 2, 12, 6, 10  # N tokens a rank
CONFIG = ModelConfig(hidden_size=H, num_experts=E, top_k=K, moe_ffn_hidden_size=F, num_layers=1)

CROWDS = {
    "as it comes": lambda g, rank: torch.stack(
        [torch.randperm(E, generator=g)[:K] for _ in range(N)]
    ),
    "all to one expert": lambda g, rank: torch.tensor([5, E]).expand(N, K),
    "all to one rank": lambda g, rank: torch.tensor([6, 7]).expand(N, K),
    "one rank has nothing": lambda g, rank: torch.randint(0, E // 2, (N, K), generator=g),
    "some choices dropped": lambda g, rank: torch.randint(0, E + 1, (N, K), generator=g),
    "nothing at all": lambda g, rank: torch.full((N, K), E),
    "one rank sends nothing": lambda g, rank: torch.full((N, K), E if rank == 1 else rank % E),
}
LAYOUTS = {
    "one": (1, 1, 1),
    "ep2": (2, 2, 1),
    "ep4": (4, 4, 1),
    "etp2": (2, 1, 2),
    "ep2 etp2": (4, 2, 2),
    "nodes of 2": (4, 4, 1, 2),
    "nodes of 2, etp2": (8, 4, 2, 2),
    "nodes of 4": (8, 8, 1, 4),
}


def inputs(rank, crowd):
    generator = torch.Generator().manual_seed(100 + rank)
    experts = CROWDS[crowd](generator, rank).clone()
    x, dy = (torch.randn(N, H, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.rand(N, K, dtype=torch.float64, generator=generator)
    return x, weights, experts, dy


def experts_of(mesh_ep, mesh_etp):
    made = Experts(CONFIG, "layers.0.experts", mesh_ep, mesh_etp, dtype=torch.float64, device="cpu")
    for parameter in made.parameters():
        spec_of(parameter).__dict__["init"] = 0.5
        initialize(parameter, 3)
    return made


def layer(rank, world, ep, etp, crowd, ep_inner=1, capacity=None):
    ledger = Ledger()
    mesh = build_mesh(resolve(world, ep=ep, etp=etp, ep_inner=ep_inner), rank, recorder=ledger)
    experts = experts_of(mesh["ep"], mesh["etp"])
    dispatcher = dispatcher_of(E, mesh, capacity=capacity)
    assert isinstance(dispatcher, HierarchicalDispatcher if 1 < ep_inner < ep else Dispatcher)
    x, weights, chosen, dy = inputs(rank, crowd)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    handles = dispatcher.dispatch(x, chosen, weights)
    *handles, state = handles[2].enter_node(*handles[:2])
    rows, row_weights, state = state.receive(*handles)
    y = state.combine(state.start_combine(experts(rows, row_weights, state.offsets, run_now)))
    y.backward(dy)
    empty = [torch.zeros_like(p) for p in experts.parameters()]
    grads = [
        (spec_of(p), g if p.grad is None else p.grad) for p, g in zip(experts.parameters(), empty)
    ]
    return y.detach(), x.grad, weights.grad, grads, rows.shape[0], ledger.bytes_by_axis()


def truth(world, crowd):
    """One token and one choice at a time."""
    experts = experts_of(Axis("ep"), Axis("etp"))
    up, down = (p.detach().clone().requires_grad_() for p in experts.parameters())
    found = []
    for rank in range(world):
        x, weights, chosen, dy = inputs(rank, crowd)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        lines = []
        for t in range(N):
            y = torch.zeros(H, dtype=torch.float64) + 0 * x[t] * weights[t].sum()
            for j in range(K):
                if chosen[t, j] < E:
                    gate, value = (up[chosen[t, j]] @ x[t]).chunk(2)
                    y = y + weights[t, j] * (
                        down[chosen[t, j]] @ (torch.nn.functional.silu(gate) * value)
                    )
            lines.append(y)
        y = torch.stack(lines)
        y.backward(dy)
        found.append((y.detach(), x.grad, weights.grad))
    zero = [torch.zeros_like(w) if w.grad is None else w.grad for w in (up, down)]
    return found, zero


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_against_a_loop(layout, crowd):
    world, ep, etp, *inner = LAYOUTS[layout]
    expected, weight_grads = truth(world, crowd)
    sums = [torch.zeros_like(g) for g in weight_grads]
    for rank, (y, dx, dweights, grads, num_rows, _) in enumerate(
        run_on_pool(layer, world, ep, etp, crowd, *inner)
    ):
        for got, wanted in zip((y, dx, dweights), expected[rank]):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
        assert num_rows <= N * min(K, E // ep) * ep * etp
        for (spec, grad), total in zip(grads, sums):
            for piece in spec.pieces:
                index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
                total[index] += grad[piece.row : piece.row + piece.shape[0]]
    for got, wanted in zip(sums, weight_grads):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def both_ways(rank, world, ep, etp):
    """Every crowd with counted rows, with room for whatever comes, and with too little."""
    found = {}
    for crowd in CROWDS:
        outcomes = []
        for imbalance in (None, float(ep), 0.3):
            capacity, exceeded = None, 0
            if imbalance is not None:
                capacity = SendCapacity(imbalance, "cpu")
                capacity.start_step()
            *tensors, grads, num_rows, _ = layer(rank, world, ep, etp, crowd, capacity=capacity)
            if capacity is not None:
                exceeded = capacity.exceeded.item()
            outcomes.append(([*tensors, *(grad for _, grad in grads)], num_rows, exceeded))
        found[crowd] = outcomes
    return found


@pytest.mark.parametrize("layout", ["ep2", "ep4", "ep2 etp2"])
def test_planned_rows_give_the_same_bits_or_are_refused(layout):
    world, ep, etp = LAYOUTS[layout]
    for rank, found in enumerate(run_on_pool(both_ways, world, ep, etp)):
        for crowd, (counted, planned, short) in found.items():
            assert all(map(torch.equal, counted[0], planned[0])), (crowd, rank)
            assert planned[1:] == (N * K * ep * etp, 0) and counted[2] == 0
            room = -(-N * K * 3 // (10 * ep))
            sent = torch.stack(
                [
                    inputs(other, crowd)[2].flatten().bincount(minlength=E + 1)[:E]
                    for other in range(world)
                ]
            )
            pairs = sent.view(world, ep, -1).sum(-1)  # rows that each rank has for each other one
            assert short[2] == (pairs > room).sum() and short[1] == room * ep * etp


def test_steps_without_room_are_followed_by_counted_ones():
    capacity, planned = SendCapacity(1.5, "cpu"), []
    for step in range(40):
        capacity.start_step()
        planned.append(capacity.is_planned)
        exceeded = step in (2, 4, 7, 30)
        assert capacity.finish_step(float(exceeded and capacity.is_planned)) == exceeded
    counted = [step for step in range(40) if not planned[step]]
    assert counted == [3, 5, 6, 8, 9, 10, 11, 31]


@pytest.mark.parametrize(("world", "ep", "etp"), [(2, 2, 1), (4, 4, 1), (4, 2, 2), (4, 2, 1)])
def test_bytes_on_ep_are_the_closed_form(world, ep, etp):
    """k·n·(2·h + 1) forward and as much backward, less the rows whose experts are here."""
    for rank, (*_, num_bytes) in enumerate(run_on_pool(layer, world, ep, etp, "as it comes")):
        _, _, chosen, _ = inputs(rank, "as it comes")
        ep_rank, local = rank // etp % ep, E // ep
        away = int((chosen // local != ep_rank).sum())
        returned = 0  # rows of others that this rank sends back
        for other in range(world):
            same_line = (
                other // (ep * etp) == rank // (ep * etp)
                and other % etp == rank % etp
                and other != rank
            )
            returned += (
                int((inputs(other, "as it comes")[2] // local == ep_rank).sum()) if same_line else 0
            )
        assert num_bytes["ep"] == (away + returned) * (2 * H + 1) * 8


def test_bytes_between_nodes_count_a_token_once_per_node():
    """Two nodes of two ranks: rows with k weights and k ids there, rows back; backward the same
    without the ids."""
    world, inner = 4, 2
    for rank, (*_, num_bytes) in enumerate(run_on_pool(layer, world, 4, 1, "as it comes", inner)):
        peer, node = (rank + inner) % world, rank // inner

        def rows_for(source, target):
            """Tokens of a rank that need a node."""
            return int((inputs(source, "as it comes")[2] // (E // 2) == target).any(1).sum())

        away, returned = rows_for(rank, 1 - node), rows_for(peer, node)
        forward = away * (H * 8 + K * 8 + K * 8) + returned * H * 8
        backward = returned * (H * 8 + K * 8) + away * H * 8
        counts = 2 * 8  # two int64 to the one other node
        assert num_bytes["ep_outer"] == forward + backward + counts
        assert num_bytes["ep_inner"] > 0 and "ep" not in num_bytes
