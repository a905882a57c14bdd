"""Fused operations for language models in plain torch and in Triton, one file per operation.

Every public function takes the plain path on the CPU (differentiable, float64 to bfloat16) and the
Triton path on a GPU. The package requires torch alone; Triton is used where it is installed.

In a checkout this is the folder `kernels/`, which a link in the package makes `megatron5d.kernels`.
The package `kernels` that Hugging Face publishes is a different one, and may be installed as well.
"""

from megatron5d.kernels.activation import (
    activate,
    activation_backward,
    activation_reference,
    register_activation,
)
from megatron5d.kernels.flash_attention.attention import (
    attention,
    attention_backward,
    documents_from_cu_seqlens,
)
from megatron5d.kernels.flash_attention.plain import attention_reference
from megatron5d.kernels.gemm import accumulate_weight_grad
from megatron5d.kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    norm_backward,
    rms_norm,
    rms_norm_reference,
)
from megatron5d.kernels.rope import (
    apply_rope,
    apply_rope_reference,
    apply_rope_to_ends,
    apply_rope_to_projection,
)
from megatron5d.kernels.vocab_cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    vocab_cross_entropy_backward,
    vocab_statistics,
)

OWNER = "megatron5d"

__all__ = [
    "OWNER",
    "accumulate_weight_grad",
    "activate",
    "activation_backward",
    "activation_reference",
    "register_activation",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rope",
    "apply_rope_reference",
    "apply_rope_to_ends",
    "apply_rope_to_projection",
    "attention",
    "attention_backward",
    "attention_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "documents_from_cu_seqlens",
    "layer_norm",
    "layer_norm_reference",
    "rms_norm",
    "norm_backward",
    "rms_norm_reference",
    "vocab_cross_entropy_backward",
    "vocab_statistics",
]
