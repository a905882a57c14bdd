"""Other operations that memory bounds: losses, the embedding, routing of tokens, AdamW."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d import kernels
from megatron5d.kernels import moe, routing
from megatron5d.kernels.embedding import accumulate_rows
from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm
from megatron5d.tools.bench.harness import (
    Benchmark,
    Calls,
    Forward,
    elementwise,
    forward_or_backward,
    liger,
    randn,
    returning,
)


def _labels(device: str, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (tokens,), device=device)


def cross_entropy(device: str, tokens: int, vocabulary: int) -> Calls:
    logits, labels = randn(device, tokens, vocabulary), _labels(device, tokens, vocabulary)
    compiled = torch.compile(kernels.cross_entropy_reference)
    return {
        "ours": lambda: kernels.cross_entropy(logits, labels),
        "torch.compile": lambda: compiled(logits, labels),
        "torch": lambda: F.cross_entropy(logits, labels, reduction="none"),
    }


def cross_entropy_backward(device: str, tokens: int, vocabulary: int) -> Calls:
    """Gradient of the logits; ours overwrites them, as in the model's head."""
    logits = randn(device, tokens, vocabulary, grad=True)
    labels = _labels(device, tokens, vocabulary)
    dloss, written = torch.ones(tokens, device=device), logits.detach().clone()
    row_max, row_sum, _ = kernels.vocab_statistics(written, labels, 0, vocabulary)
    row = labels, row_max, row_sum, dloss
    compiled = torch.compile(kernels.cross_entropy_reference)
    peers: dict[str, Forward] = {
        "torch.compile": (lambda: compiled(logits, labels), (logits,)),
        "torch": (lambda: F.cross_entropy(logits, labels, reduction="none"), (logits,)),
    }
    return {
        "ours": lambda: kernels.vocab_cross_entropy_backward(written, *row, 0, vocabulary),
        **forward_or_backward(peers, True),
    }


def cross_entropy_both_ways(device: str, tokens: int, vocabulary: int) -> Calls:
    """Loss and gradient; Liger computes both in one pass and overwrites the logits."""
    logits = randn(device, tokens, vocabulary, grad=True)
    labels = _labels(device, tokens, vocabulary)
    compiled = torch.compile(kernels.cross_entropy_reference)
    dloss = torch.ones(tokens, device=device)

    def ours() -> Tensor:
        overwritten = logits.detach()
        row_max, row_sum, _ = kernels.vocab_statistics(overwritten, labels, 0, vocabulary)
        return kernels.vocab_cross_entropy_backward(
            overwritten, labels, row_max, row_sum, dloss, 0, vocabulary
        )

    def grad_of(loss: Tensor) -> object:
        return torch.autograd.grad(loss, logits)

    liger_loss = liger("liger_cross_entropy")
    return {
        "ours, in place": ours,
        "ours": lambda: grad_of(kernels.cross_entropy(logits, labels).sum()),
        "torch.compile": lambda: grad_of(compiled(logits, labels).sum()),
        "torch": lambda: grad_of(F.cross_entropy(logits, labels, reduction="sum")),
        "Liger": lambda: grad_of(liger_loss(logits, labels, reduction="sum")),
    }


def embedding_gradient(device: str, tokens: int, vocabulary: int) -> Calls:
    """Rows of 4096 added into an fp32 gradient; torch adds in any order, or sorted as ours."""
    grad = randn(device, vocabulary, 4096, dtype=torch.float32)
    ids, rows = _labels(device, tokens, vocabulary), randn(device, tokens, 4096)
    return {
        "ours": returning(lambda: accumulate_rows(grad, ids, rows), grad),
        "torch, in any order": returning(lambda: grad.index_add_(0, ids, rows.float()), grad),
        "torch": returning(lambda: grad.index_put_((ids,), rows.float(), accumulate=True), grad),
    }


def _routed(device: str, tokens: int, experts: int, k: int) -> moe.Permutation:
    return moe.permutation(torch.rand(tokens, experts, device=device).topk(k).indices, experts)


def permute(device: str, tokens: int, width: int, experts: int, k: int) -> Calls:
    x, permutation = randn(device, tokens, width), _routed(device, tokens, experts, k)
    return {
        "ours": lambda: moe.permute(x, permutation),
        "torch": lambda: x[permutation.token_of_row],
    }


def unpermute(
    device: str, *, backward: bool, tokens: int, width: int, experts: int, k: int
) -> Calls:
    """Experts' rows summed at their tokens."""
    permutation = _routed(device, tokens, experts, k)
    rows = randn(device, tokens * k, width, grad=backward)

    def plain(rows: Tensor) -> Tensor:
        return rows[permutation.row_of_choice].float().sum(1).to(rows.dtype)

    compiled = torch.compile(plain)
    return forward_or_backward(
        {
            "ours": (lambda: moe.unpermute(rows, permutation), (rows,)),
            "torch.compile": (lambda: compiled(rows), (rows,)),
            "torch": (lambda: plain(rows), (rows,)),
        },
        backward,
    )


def top_k(device: str, tokens: int, experts: int, k: int) -> Calls:
    """Experts of each token, and the place of each choice among the rows."""
    scores = randn(device, tokens, experts, dtype=torch.float32)
    choices = scores.topk(k).indices
    return {
        "ours": lambda: routing.top_experts(scores, k),
        "ours, permutation": lambda: moe.permutation(choices, experts).row_of_choice,
        "torch": lambda: scores.topk(k).indices,
    }


def _tensors(device: str, tensors: int, count: int) -> list[Tensor]:
    return [torch.rand(count, device=device) for _ in range(tensors)]


def adamw(device: str, tensors: int, count: int) -> Calls:
    """Step with clipping; torch's step has none."""
    columns = {
        name: _tensors(device, tensors, count)
        for name in ("master", "grad", "exp_avg", "exp_avg_sq")
    }
    table, settings = TensorTable(**columns), AdamWSettings(1e-4, 0.9, 0.95, 1e-8, 10)
    factor, decay = torch.ones((), device=device), torch.zeros(tensors, device=device)
    parameters = _tensors(device, tensors, count)
    for p, grad in zip(parameters, columns["grad"]):
        p.grad = grad
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    ours = returning(lambda: adamw_step(table, settings, factor, decay), *columns["master"])
    return {"ours": ours, "torch fused": optimizer.step}


def gradient_norm(device: str, tensors: int, count: int) -> Calls:
    grads = _tensors(device, tensors, count)
    table = TensorTable(grad=grads)
    return {
        "ours": lambda: squared_norm(table),
        "torch": lambda: torch.nn.utils.get_total_norm(grads),
    }


LOGITS, FEW_LOGITS = {"tokens": 8192, "vocabulary": 128256}, {"tokens": 6, "vocabulary": 300}
ROUTED = {"tokens": 16384, "width": 2048, "experts": 64, "k": 8}
FEW_ROUTED = {"tokens": 6, "width": 40, "experts": 5, "k": 2}
MANY, FEW = {"tensors": 32, "count": 2**24}, {"tensors": 3, "count": 300}


def _routing(make, passes) -> Benchmark:
    """Row whose work is `passes(k)` rows of bfloat16, read or written, for every token."""

    def work(tokens, width, experts, k) -> float:
        return tokens * width * 2 * passes(k)

    return Benchmark(make, work, "GB/s", ROUTED, FEW_ROUTED)


TOKENS = {
    "cross-entropy forward 8192x128256": elementwise(cross_entropy, 2, LOGITS, FEW_LOGITS),
    "cross-entropy backward 8192x128256": elementwise(
        cross_entropy_backward, 4, LOGITS, FEW_LOGITS
    ),
    "cross-entropy, both ways, 8192x128256": elementwise(
        cross_entropy_both_ways, 6, LOGITS, FEW_LOGITS
    ),
    "embedding gradient, 8 k tokens of 128256": Benchmark(
        embedding_gradient,
        lambda tokens, vocabulary: tokens * 4096 * 10,
        "GB/s",
        LOGITS,
        FEW_LOGITS,
    ),
    "MoE permute, 16 k tokens, 8 of 64": _routing(permute, lambda k: 1 + k),
    "MoE un-permute forward, 16 k tokens, 8 of 64": _routing(
        partial(unpermute, backward=False), lambda k: k + 1
    ),
    "MoE un-permute backward, 16 k tokens, 8 of 64": _routing(
        partial(unpermute, backward=True), lambda k: 2 * k + 1
    ),
    "MoE top-k, 64 k tokens, 8 of 64": Benchmark(
        top_k,
        lambda tokens, experts, k: tokens * (4 * experts + 12 * k),
        "GB/s",
        {"tokens": 65536, "experts": 64, "k": 8},
        {"tokens": 6, "experts": 5, "k": 2},
    ),
    "AdamW, 32 x 16 M": elementwise(adamw, 28, MANY, FEW),
    "gradient norm, 32 x 16 M": elementwise(gradient_norm, 4, MANY, FEW),
}
