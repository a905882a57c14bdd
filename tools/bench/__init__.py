"""The benchmarks: each operation at the sizes of real training, by every available provider."""

from megatron5d.tools.bench.attention import ATTENTION
from megatron5d.tools.bench.gemm import GEMMS
from megatron5d.tools.bench.pointwise import POINTWISE
from megatron5d.tools.bench.tokens import TOKENS

_ROWS = {**GEMMS, **POINTWISE, **TOKENS, **ATTENTION}
_PLAIN = [
    name for name, row in ATTENTION.items() if not {"window", "document", "dv"} & set(row.sizes)
]
# attention with masks comes last: its peers take longest to compile
_ORDER = [*_PLAIN[:2], *GEMMS, *_PLAIN[2:], *POINTWISE, *TOKENS, *ATTENTION]
BENCHMARKS = {name: _ROWS[name] for name in dict.fromkeys(_ORDER)}
