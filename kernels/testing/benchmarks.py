"""What is measured: each operation at the sizes of real training, beside every other implementation at hand."""

from kernels.testing.bench_attention import ATTENTION
from kernels.testing.bench_pointwise import POINTWISE
from kernels.testing.bench_products import PRODUCTS
from kernels.testing.bench_tokens import TOKENS

_FIRST = list(ATTENTION)[:2]
BENCHMARKS = {**{name: ATTENTION[name] for name in _FIRST}, **PRODUCTS, **POINTWISE, **TOKENS, **ATTENTION}
"""Rows by name; the less usual forms of attention, whose peers take longest to compile, at the end."""
