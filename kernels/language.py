"""Triton where it is installed; otherwise its names, so that plain paths run and a GPU can be planned for."""

import torch

try:
    import triton.language as tl
    from triton import cdiv, jit, next_power_of_2
    from triton.runtime.jit import KernelInterface
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    from kernels.without_triton import KernelInterface, TensorDescriptor, cdiv, jit, next_power_of_2, tl

    HAS_TRITON = False

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

__all__ = ["HAS_TRITON", "TRITON_DTYPES", "KernelInterface", "TensorDescriptor", "cdiv", "jit", "next_power_of_2", "tl"]
