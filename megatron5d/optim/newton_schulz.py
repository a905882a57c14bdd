"""Newton-Schulz iteration: approximates the nearest orthogonal matrix, with matrix products only.

X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X maps every singular value x of X to a·x + b·x³ + c·x⁵ and keeps the singular vectors.
The coefficients enlarge small values quickly (by a⁵ ≈ 485 in five steps) and keep large ones within [0.68, 1.14].
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """For each matrix U·S·Vᵀ an approximation of U·Vᵀ, with singular values near 1.

    Args:
        matrices: `[n, rows, cols]`; all arithmetic is in their dtype.
        steps: of the iteration.

    Returns:
        `[n, rows, cols]`, a new tensor.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]  # the Gram matrix of the short side is smaller
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPS)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
