"""Newton-Schulz iteration: the orthogonal matrix nearest to a matrix, nearly, by matrix products alone.

X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X moves every singular value x of X to a·x + b·x³ + c·x⁵ and leaves the singular vectors.
The coefficients rise small values as steeply as they can (a⁵ ≈ 485 in five steps) and let large ones wander within
[0.68, 1.14]. They are one polynomial of fixed degree, so rounding errors grow by no more than that.
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # beside a matrix's norm: a gradient of zeros stays zero


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """U·Vᵀ of each matrix U·S·Vᵀ, with singular values near 1 instead of 1.

    Args:
        matrices: `[n, rows, cols]`; all arithmetic is in their dtype.
        steps: of the iteration.

    Returns:
        `[n, rows, cols]`, a tensor of its own.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]  # the products are cheaper on the short side
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPS)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
