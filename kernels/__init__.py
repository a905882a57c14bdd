"""Fused operations for language models: plain torch beside Triton, one file an operation.

Every public function takes the plain path on the CPU (differentiable, float64 to bfloat16), the Triton path on a GPU.
The package depends on torch alone; Triton is used where it is installed.

Hugging Face publishes a different package under the same import name. Whoever imports this one can tell them apart:

    import kernels
    if getattr(kernels, "OWNER", None) != "megatron5d":
        raise ImportError(f"kernels is {kernels.__file__}, not ours: uninstall it, or put ours first")
"""

from kernels.activation import activate, activation_backward, gelu, gelu_reference, swiglu, swiglu_reference
from kernels.flash_attention.attention import attention, attention_backward, documents_from_cu_seqlens
from kernels.flash_attention.plain import attention_reference
from kernels.gemm import accumulate_weight_grad
from kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    norm_backward,
    rms_norm,
    rms_norm_reference,
)
from kernels.rope import apply_rope, apply_rope_reference, apply_rope_to_ends, apply_rope_to_projection
from kernels.vocab_cross_entropy import (
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
    "gelu",
    "gelu_reference",
    "layer_norm",
    "layer_norm_reference",
    "rms_norm",
    "norm_backward",
    "rms_norm_reference",
    "swiglu",
    "swiglu_reference",
    "vocab_cross_entropy_backward",
    "vocab_statistics",
]
