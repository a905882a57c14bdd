"""Dispatch to experts and back on several ranks, compared with a loop over tokens; bytes sent."""

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

CHOICES = {
    "random": lambda g, rank: torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(N)]),
    "all to one expert": lambda g, rank: torch.tensor([5, E]).expand(N, K),
    "all to one rank": lambda g, rank: torch.tensor([6, 7]).expand(N, K),
    "one rank receives nothing": lambda g, rank: torch.randint(0, E // 2, (N, K), generator=g),
    "some choices dropped": lambda g, rank: torch.randint(0, E + 1, (N, K), generator=g),
    "nothing is sent": lambda g, rank: torch.full((N, K), E),
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


def inputs(rank, choices):
    generator = torch.Generator().manual_seed(100 + rank)
    experts = CHOICES[choices](generator, rank).clone()
    x, dy = (torch.randn(N, H, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.rand(N, K, dtype=torch.float64, generator=generator)
    return x, weights, experts, dy


def make_experts(ep, etp):
    experts = Experts(CONFIG, "layers.0.experts", ep, etp, dtype=torch.float64, device="cpu")
    for parameter in experts.parameters():
        spec_of(parameter).__dict__["init"] = 0.5
        initialize(parameter, 3)
    return experts


def run_layer(rank, world, ep, etp, choices, ep_inner=1, capacity=None):
    """Output, gradients of x, weights and parameters, received rows and bytes of a rank."""
    ledger = Ledger()
    mesh = build_mesh(resolve(world, ep=ep, etp=etp, ep_inner=ep_inner), rank, recorder=ledger)
    experts = make_experts(mesh["ep"], mesh["etp"])
    dispatcher = dispatcher_of(E, mesh, capacity=capacity)
    assert isinstance(dispatcher, HierarchicalDispatcher if 1 < ep_inner < ep else Dispatcher)
    x, weights, choice, dy = inputs(rank, choices)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    *handles, state = dispatcher.dispatch(x, choice, weights)
    *handles, state = state.enter_node(*handles)
    rows, row_weights, state = state.receive(*handles)
    y = state.combine(state.start_combine(experts(rows, row_weights, state.offsets, run_now)))
    y.backward(dy)
    grads = [
        (spec_of(p), torch.zeros_like(p) if p.grad is None else p.grad)
        for p in experts.parameters()
    ]
    return y.detach(), x.grad, weights.grad, grads, rows.shape[0], ledger.bytes_by_axis()


def run_loop(world, choices):
    """(output, gradients of x and weights) of each rank, and the parameters' gradients."""
    parameters = make_experts(Axis("ep"), Axis("etp")).parameters()
    up, down = (p.detach().clone().requires_grad_() for p in parameters)
    ranks = []
    for rank in range(world):
        x, weights, choice, dy = inputs(rank, choices)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        y = 0 * x * weights.sum(1, keepdim=True)
        for t, j in (choice < E).nonzero().tolist():
            e = choice[t, j]
            gate, value = (up[e] @ x[t]).chunk(2)
            output = weights[t, j] * (down[e] @ (torch.nn.functional.silu(gate) * value))
            y = y.index_add(0, torch.tensor([t]), output[None])
        y.backward(dy)
        ranks.append((y.detach(), x.grad, weights.grad))
    return ranks, [torch.zeros_like(w) if w.grad is None else w.grad for w in (up, down)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choices", CHOICES)
def test_a_dispatch_computes_what_a_loop_computes(layout, choices):
    world, ep, etp, *inner = LAYOUTS[layout]
    expected, weight_grads = run_loop(world, choices)
    sums = [torch.zeros_like(grad) for grad in weight_grads]
    ranks = run_on_pool(run_layer, world, ep, etp, choices, *inner)
    for (*tensors, grads, num_rows, _), expected_tensors in zip(ranks, expected, strict=True):
        torch.testing.assert_close(tuple(tensors), expected_tensors, rtol=1e-12, atol=1e-13)
        assert num_rows <= N * min(K, E // ep) * ep * etp
        for (spec, grad), total in zip(grads, sums):
            for piece in spec.pieces:
                index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
                total[index] += grad[piece.row : piece.row + piece.shape[0]]
    torch.testing.assert_close(sums, weight_grads, rtol=1e-12, atol=1e-13)


def run_capacities(rank, world, ep, etp):
    """Outcomes with counted rows, with sufficient capacity, and with too little."""
    outcomes_by_choices = {}
    for choices in CHOICES:
        outcomes = []
        for imbalance in (None, float(ep), 0.3):
            capacity, exceeded = None, 0
            if imbalance is not None:
                capacity = SendCapacity(imbalance, "cpu")
                capacity.start_step()
            *tensors, grads, num_rows, _ = run_layer(
                rank, world, ep, etp, choices, capacity=capacity
            )
            if capacity is not None:
                exceeded = capacity.exceeded.item()
            outcomes.append(([*tensors, *(grad for _, grad in grads)], num_rows, exceeded))
        outcomes_by_choices[choices] = outcomes
    return outcomes_by_choices


@pytest.mark.parametrize("layout", ["ep2", "ep4", "ep2 etp2"])
def test_planned_rows_give_the_same_bits_or_exceed_the_capacity(layout):
    world, ep, etp = LAYOUTS[layout]
    capacity = -(-N * K * 3 // (10 * ep))
    for rank, outcomes in enumerate(run_on_pool(run_capacities, world, ep, etp)):
        for choices, (counted, planned, short) in outcomes.items():
            assert all(map(torch.equal, counted[0], planned[0])), (choices, rank)
            assert planned[1:] == (N * K * ep * etp, 0) and counted[2] == 0
            sent = [inputs(r, choices)[2].flatten().bincount(minlength=E + 1) for r in range(world)]
            pairs = torch.stack(sent)[:, :E].view(world, ep, -1).sum(-1)
            assert short[1:] == (capacity * ep * etp, (pairs > capacity).sum())


def test_steps_over_capacity_are_followed_by_counted_ones():
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
    """k·n·(2·h + 1) forward and as much backward, without the rows for local experts."""

    def rows_for(source, ep_rank):
        return int((inputs(source, "random")[2] // (E // ep) == ep_rank).sum())

    for rank, (*_, num_bytes) in enumerate(run_on_pool(run_layer, world, ep, etp, "random")):
        ep_rank, first = rank // etp % ep, rank - rank // etp % ep * etp
        group = range(first, first + ep * etp, etp)  # the ranks of its ep axis
        sent = N * K - rows_for(rank, ep_rank)
        returned = sum(rows_for(source, ep_rank) for source in group if source != rank)
        assert num_bytes["ep"] == (sent + returned) * (2 * H + 1) * 8


def test_bytes_between_nodes_count_a_token_once_per_node():
    """Two nodes of two ranks: forward rows with k weights and k ids, and outputs back; backward the
    same without the ids."""
    world, inner = 4, 2

    def rows_for(source, node):
        """Number of a rank's tokens that need a node."""
        return int((inputs(source, "random")[2] // (E // 2) == node).any(1).sum())

    for rank, (*_, num_bytes) in enumerate(run_on_pool(run_layer, world, 4, 1, "random", inner)):
        peer, node = (rank + inner) % world, rank // inner
        sent, returned = rows_for(rank, 1 - node), rows_for(peer, node)
        forward = sent * (H * 8 + K * 8 + K * 8) + returned * H * 8
        backward = returned * (H * 8 + K * 8) + sent * H * 8
        counts = 2 * 8  # two int64 to the other node
        assert num_bytes["ep_outer"] == forward + backward + counts
        assert num_bytes["ep_inner"] > 0 and "ep" not in num_bytes
