"""The calls of libraries that `kernels/providers` makes, computed on the CPU in plain torch, in any
dtype.

torch's own operators are registered under their names, so that every call passes the schema of the
installed torch; FlashAttention-4 is a module with the signatures of `flash_attn/cute/interface.py`.
Each refuses the layouts that the real one refuses or would misread, and counts its calls, also
those of forked ranks.
"""

import contextlib
import multiprocessing
import sys
import types
import warnings
from unittest import mock

import torch

from megatron5d.kernels import choice
from megatron5d.kernels.providers import cudnn, flash_attention_4, torch_gemm, torch_norm

CALLS = {
    name: multiprocessing.Value("i", 0)
    for name in (
        "cudnn forward",
        "cudnn backward",
        "fa4 forward",
        "fa4 backward",
        "scaled_mm",
        "grouped_mm",
        "rms_norm forward",
        "rms_norm backward",
    )
}


def count(name):
    with CALLS[name].get_lock():
        CALLS[name].value += 1


def counted():
    """Calls so far by name, of which there were any."""
    return {name: each.value for name, each in CALLS.items() if each.value}


def scores_of(q, k, scale, causal, left=None, right=None, softcap=0.0):
    """Masked scores `[b, a, s, t]` of `[b, a, s, d]` by `[b, g, t, d]`, and the scores over the
    cap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * scale
    capped = torch.tanh(scores / softcap) if softcap else None
    scores = scores if capped is None else softcap * capped
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    return scores.masked_fill(hidden, float("-inf")), capped


def attend(q, k, v, sinks=None, **mask):
    """out `[b, a, s, dv]` and the natural log-sum-exp `[b, a, s]`; tensors have their heads before
    the tokens."""
    scores, _ = scores_of(q, k, **mask)
    seen = (
        scores
        if sinks is None
        else torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    )
    lse = torch.logsumexp(seen, -1)
    return (scores - lse[..., None]).exp() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


def attend_backward(dout, q, k, v, out, lse, **mask):
    """dq, dk, dv of these keys, from an out and lse that other keys may have part in."""
    scores, capped = scores_of(q, k, **mask)
    group, p = q.shape[1] // k.shape[1], (scores - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    ds = p * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True))
    ds = (ds if capped is None else ds * (1 - capped**2)) * mask["scale"]
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ dout))
    return ds @ wide_k, dk, dv


def cudnn_forward(
    query, key, value, bias, with_lse, dropout_p=0.0, causal=False, debug=False, *, scale=None
):
    assert bias is None and with_lse and not dropout_p and not debug
    assert all(x.stride(-1) == 1 for x in (query, key, value)), "cuDNN reads neighbors in memory"
    count("cudnn forward")
    out, lse = attend(query, key, value, scale=scale, causal=causal)
    layout = torch.empty_like(query) if out.shape == query.shape else torch.empty_like(out)
    none = torch.empty(0, dtype=torch.int64)
    return (
        layout.copy_(out),
        lse[..., None].contiguous(),
        none,
        none,
        query.shape[2],
        key.shape[2],
        none,
        none,
        none,
    )


def cudnn_backward(*given, scale=None):
    """In the order of the operator's schema, which torch has checked."""
    (
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        seed,
        offset,
        bias,
        *packed,
        max_q,
        max_k,
        dropout_p,
        is_causal,
    ) = given
    assert bias is None and packed == [None, None] and not dropout_p
    assert grad_out.stride() == out.stride(), "pytorch #176915"
    assert logsumexp.is_contiguous() and logsumexp.shape == (*query.shape[:3], 1)
    assert (max_q, max_k) == (
        query.shape[2],
        key.shape[2],
    ) and seed.dtype == offset.dtype == torch.int64
    count("cudnn backward")
    return attend_backward(
        grad_out, query, key, value, out, logsumexp[..., 0], scale=scale, causal=is_causal
    )


FA4_FORWARD = """q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k
    page_table softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs
    intra_wg_overlap num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse
    aux_tensors aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split
    disable_scheduler_metadata"""
FA4_BACKWARD = """q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size
    n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP
    AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k
    deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse
    learnable_sink"""


def bound(names, args, keywords):
    """Arguments by name, as Python binds them; None for the rest."""
    given = dict(zip(names := names.split(), args))
    assert not given.keys() & keywords.keys() and keywords.keys() <= set(names), (
        given.keys(),
        keywords.keys(),
    )
    return types.SimpleNamespace(**{**dict.fromkeys(names), **given, **keywords})


def fa4_forward(*args, **keywords):
    c = bound(FA4_FORWARD, args, keywords)
    assert c.return_lse and (
        not (c.causal or c.window_size_left) or c.q.shape[1] == c.k.shape[1]
    ), "aligned at the end"
    count("fa4 forward")
    right = 0 if c.causal else c.window_size_right
    made, lse = attend(
        *(x.transpose(1, 2) for x in (c.q, c.k, c.v)),
        c.learnable_sink,
        scale=c.softmax_scale,
        causal=c.causal,
        left=c.window_size_left,
        right=right,
        softcap=c.softcap or 0.0,
    )
    return c.out.copy_(made.transpose(1, 2)), lse, None, None


def fa4_backward(*args, **keywords):
    c = bound(FA4_BACKWARD, args, keywords)
    assert not (c.causal or c.window_size_left) or c.q.shape[1] == c.k.shape[1], (
        "aligned at the end"
    )
    assert (
        c.out.shape == c.dout.shape
        and c.lse.shape == (c.q.shape[0], c.q.shape[2], c.q.shape[1])
        and c.deterministic
    )
    count("fa4 backward")
    heads = (x.transpose(1, 2) for x in (c.dout, c.q, c.k, c.v, c.out))
    right = 0 if c.causal else c.window_size_right
    made = attend_backward(
        *heads,
        c.lse,
        scale=c.softmax_scale,
        causal=c.causal,
        left=c.window_size_left,
        right=right,
        softcap=c.softcap,
    )
    return tuple(x.transpose(1, 2) for x in made)


def scale_rows(x, scale):
    """The scales of every element of `[rows, k]`, by the layout of what torch's CUDA kernel
    recognises; or an error."""
    rows, groups = x.shape[0], -(-x.shape[1] // 128)
    if scale.numel() == 1:
        return scale
    if scale.shape == (rows, groups) and (groups == 1 or scale.stride() == (1, rows)):
        assert rows % 4 == 0, "cuBLAS: rows of scales lie 16 bytes apart"
        return scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    assert scale.shape == (-(-rows // 128), groups) and scale.is_contiguous() and groups % 4 == 0, (
        x.shape,
        scale.shape,
    )
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, : x.shape[1]]


def scaled_mm(
    self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
):
    assert (
        not use_fast_accum and bias is None and self.shape[1] % 16 == 0 and mat2.shape[1] % 16 == 0
    )
    assert self.stride(1) == 1 and mat2.stride(0) == 1, "row-major by column-major"
    count("scaled_mm")
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    a, b = (
        self.to(wide) * scale_rows(self, scale_a),
        mat2.t().to(wide) * scale_rows(mat2.t(), scale_b.t()),
    )
    return (a @ b.t()).to(out_dtype)


def scaled_mm_out(self, mat2, scale_a, scale_b, *rest, out, **others):
    y = scaled_mm(self, mat2, scale_a, scale_b, *rest, **others)
    assert out.dtype == y.dtype and out.shape == y.shape and out.is_contiguous()
    return out.copy_(y)


def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    assert offs.dtype == torch.int32 and self.stride(-1) == 1 and 1 in mat2.stride()[1:]
    count("grouped_mm")
    y, first = torch.full((self.shape[0], mat2.shape[2]), float("nan"), dtype=self.dtype), 0
    for last, weight in zip(offs.tolist(), mat2):
        y[first:last] = self[first:last] @ weight
        first = last
    return y  # the rest holds what was there


def rms_norm(input, normalized_shape, weight, eps):
    count("rms_norm forward")
    scale = (input.square().mean(-1, keepdim=True) + eps).rsqrt()
    return input * scale * weight, scale


def rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    count("rms_norm backward")
    normal, g = input * rstd, grad_out * weight
    return rstd * (g - normal * (g * normal).mean(-1, keepdim=True)), (grad_out * normal).sum(0)


OPERATORS = {
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_mm": scaled_mm,
    "_scaled_mm.out": scaled_mm_out,
    "_grouped_mm": grouped_mm,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
}
ALL = (torch.float64, torch.float32, torch.bfloat16)


@contextlib.contextmanager
def on_cpu(capability=90, dtypes=ALL, **settings):
    """Makes CPU tensors those of a GPU of this capability on which every library is installed, and
    takes any dtype. Yields Settings to call operations with."""
    library = torch.library.Library("aten", "IMPL")
    cute = types.ModuleType("flash_attn.cute.interface")
    cute._flash_attn_fwd, cute._flash_attn_bwd = fa4_forward, fa4_backward
    modules = {
        "flash_attn": types.ModuleType("flash_attn"),
        "flash_attn.cute": types.ModuleType("flash_attn.cute"),
    }
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in OPERATORS.items():
            library.impl(name, function, "CPU", allow_override=True)
        stack.callback(library._destroy)
        stack.callback(choice.provider.cache_clear)
        choice.provider.cache_clear()
        for module, name in (
            (cudnn, "HALF_DTYPES"),
            (flash_attention_4, "HALF_DTYPES"),
            (torch_norm, "DTYPES"),
            (torch_gemm, "GROUPED_DTYPES"),
            (torch_gemm, "FP8_OUT_DTYPES"),
        ):
            stack.enter_context(mock.patch.object(module, name, dtypes))
        for name, module in (modules | {"flash_attn.cute.interface": cute}).items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        stack.enter_context(mock.patch.object(cudnn, "version", lambda: 92300))
        for module in (flash_attention_4, torch_gemm):
            stack.enter_context(mock.patch.object(module, "missing", lambda: None))
        stack.enter_context(
            mock.patch.object(choice, "capability_of", lambda x: 0 if x.is_meta else capability)
        )
        for each in CALLS.values():
            each.value = 0
        yield choice.Settings(**settings)
