"""What is measured: each operation at the sizes of real training, beside every other implementation at hand."""

from kernels.testing.bench_attention import ATTENTION
from kernels.testing.bench_pointwise import POINTWISE
from kernels.testing.bench_products import PRODUCTS
from kernels.testing.bench_tokens import TOKENS

BENCHMARKS = {**ATTENTION, **PRODUCTS, **POINTWISE, **TOKENS}
"""Rows by name."""
