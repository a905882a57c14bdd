"""What is measured: each operation at the sizes of real training, beside every other implementation
at hand."""

from megatron5d.tools.bench.gemm import ATTENTION, PRODUCTS
from megatron5d.tools.bench.pointwise import POINTWISE
from megatron5d.tools.bench.tokens import TOKENS

_USUAL = [
    name for name, row in ATTENTION.items() if not {"window", "document", "dv"} & set(row.sizes)
]
_ORDER = [*_USUAL[:2], *PRODUCTS, *_USUAL[2:], *POINTWISE, *TOKENS]
_ROWS = {**PRODUCTS, **POINTWISE, **TOKENS, **ATTENTION}
BENCHMARKS = {name: _ROWS[name] for name in dict.fromkeys((*_ORDER, *ATTENTION))}
"""Rows by name; the less usual forms of attention, whose peers take longest to compile, at the end."""
