"""The emulated GPU notices what a GPU would not tell: memory that is not the kernel's, and waits
that are missing."""

import re
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from kernel_lab.emulated_gpu import EmulationFault
from triton.runtime import driver

from megatron5d import kernels
from megatron5d.kernels import gemm as grouped_matmul
from megatron5d.kernels import norm as normalization
from megatron5d.kernels import rms_norm_reference, tuning
from megatron5d.kernels.flash_attention import forward as flash_attention_forward
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.fp8 import gemm as fp8_matmul
from megatron5d.kernels.fp8.gemm import fp8_matmul as product_of_8_bits
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows

ARCHITECTURE = tuning.architecture(torch.device("cpu"))
LAUNCHES = 8  # what is late is a matter of chance: so many of them meet it


@triton.jit
def _shifted_kernel(x_ptr, y_ptr, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane + SHIFT, lane < count, other=0.0), lane < count)


def test_other_memory_is_refused_with_its_line(monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    x, y = torch.randn(100), torch.zeros(100)
    _shifted_kernel[(1,)](x, y, 100, 0, 128)
    assert torch.equal(x, y)
    with pytest.raises(
        EmulationFault,
        match=r"out of bounds: byte 40\d of a tensor of 400.*test_emulated_gpu.py:\d+",
    ):
        _shifted_kernel[(1,)](x, y, 100, 1, 128)
    with pytest.raises(EmulationFault, match="misaligned"):
        _shifted_kernel[(1,)](
            torch.frombuffer(bytearray(402), dtype=torch.float32, offset=2), y, 100, 0, 128
        )


def relative(pair):
    got, want = pair
    return float((got.double() - want.double()).norm() / want.double().norm())


def norm():
    x, weight = torch.randn(64, 512), torch.ones(512)
    return normalization.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)


def experts():
    x, weight, offsets = (
        torch.randn(200, 256).bfloat16(),
        torch.randn(2, 128, 256).bfloat16(),
        torch.tensor([0, 90, 200]),
    )
    got = grouped_matmul.grouped_matmul(x, weight, offsets)
    return got, grouped_matmul.grouped_matmul_reference(x.float(), weight.float(), offsets)


def attention(heads=2, dim=64, sinks=None, **rule):
    """Output and gradients over several of the architecture's tiles, and what they should be."""
    q, k, v = (torch.randn(390, 1, h, dim).bfloat16().requires_grad_() for h in (heads, 1, 1))
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    plain = AttentionRule(dim**-0.5, **rule)
    want, _ = kernels.attention_reference(*wide[:3], plain, wide[3] if sinks is not None else None)
    got, _ = kernels.attention(q, k, v, scale=plain.scale, sinks=sinks, **rule)
    dout = torch.randn(want.shape).bfloat16()
    gradients = (
        torch.autograd.grad(got, leaves, dout),
        torch.autograd.grad(want, wide, dout.double()),
    )
    pairs = [(got.detach(), want.detach()), *zip(*gradients)]
    return max(pairs, key=relative)


def fp8_gemm():
    a, b = quantize_rows(torch.randn(129, 512)), quantize_blocks(torch.randn(127, 512))[0]
    return product_of_8_bits(a, b, out_dtype=torch.float32), fp8_matmul.fp8_matmul_reference(a, b)


MBARRIER = r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;"
PHASE = r"(mbarrier\.try_wait\.parity[^,]*, \[[^]]*\], )[^;]*;"
FAULTS = {  # what runs, on which architecture, what is replaced in its PTX, and by what
    "no barrier of the block": (norm, "", r"bar\.sync[ \t]+0;", ""),
    "copies not waited for": (attention, "sm_80", r"cp\.async\.wait_group[ \t]+\d+;", ""),
    "bulk copies not waited for": (experts, "sm_90", MBARRIER, ""),
    "bulk copies of another phase waited for": (experts, "sm_90", PHASE, r"\g<1>1;"),
    "GEMMs of a warp group not waited for": (
        experts,
        "sm_90",
        r"wgmma\.wait_group\.sync\.aligned[ \t]+\d+;",
        "",
    ),
    "GEMMs not waited for": (experts, "sm_100", MBARRIER, ""),
    "GEMMs of another phase waited for": (experts, "sm_100", PHASE, r"\g<1>1;"),
}


def goes_wrong(run) -> bool:
    """Whether one of a few launches is refused, or gives other numbers."""
    for _ in range(LAUNCHES):
        try:
            if not relative(run()) < 0.02:
                return True
        except EmulationFault:
            return True
    return False


def forget():
    modules = {
        normalization: "_forward_kernel",
        grouped_matmul: "_rows_kernel",
        fp8_matmul: "_fp8_matmul_kernel",
    }
    for module, kernel in (modules | {flash_attention_forward: "_forward_kernel"}).items():
        getattr(module, kernel).device_caches.clear()


@pytest.fixture
def loaded_anew():
    """What the JIT has loaded is forgotten before and after."""
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    "fault", [name for name, (_, where, *_) in FAULTS.items() if where in ("", ARCHITECTURE)]
)
def test_a_wait_that_is_missing_or_wrong_shows(fault, loaded_anew):
    run, _, wait, instead = FAULTS[fault]
    assert not goes_wrong(run)
    utils, removed = type(driver.active.utils), []
    load = utils.load_binary

    def without(self, name, text, *rest):
        edited, count = re.subn(wait, instead, text.decode())
        removed.append(count)
        return load(self, name, edited.encode(), *rest)

    forget()
    with mock.patch.object(utils, "load_binary", without):
        assert goes_wrong(run) and sum(removed) > 0


if ARCHITECTURE == "sm_100":

    def test_why_gemms_are_taken_out_before_the_next(loaded_anew, monkeypatch):
        assert not goes_wrong(fp8_gemm)
        monkeypatch.setattr(fp8_matmul, "needs_mma_barrier", lambda device: False)
        # if it does not, Triton waits by itself, and SETTLE has done its duty
        assert goes_wrong(fp8_gemm)


DOCUMENTS = torch.tensor([0] * 70 + [1] * 200 + [2] * 5 + [3] * 115)[None]
RULES = {  # heads of 32 have the tiles of 64, and the binaries of test_flash_attention.py
    "causal": {"dim": 128},
    "full": {"causal": False, "dim": 32},
    "window": {"window": 130, "dim": 32},
    "softcap": {"softcap": 5.0, "dim": 32},
    "documents": {"documents": DOCUMENTS, "dim": 128},
    "documents and window": {"documents": DOCUMENTS, "window": 90, "dim": 32},
    "heads of 256": {"dim": 256},
}


ON_EVERY_GPU = ("causal", "documents and window")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.hopper] * (rule not in ON_EVERY_GPU)) for rule in RULES],
)
def test_attention_over_several_tiles(rule):
    assert relative(attention(**RULES[rule])) < 5e-3


@pytest.mark.parametrize("run", [experts, pytest.param(fp8_gemm, marks=pytest.mark.fp8)])
def test_gemms_over_several_tiles(run):
    assert relative(run()) < 5e-3


def test_what_it_does_not_know_is_refused():
    with pytest.raises(RuntimeError, match="does not know: brx.idx"):
        driver.active.utils.load_binary(
            "k", b".visible .entry k(\n.param .u64 p\n)\n{\nbrx.idx %r1, table;\nret;\n}\n", 0, 0
        )
