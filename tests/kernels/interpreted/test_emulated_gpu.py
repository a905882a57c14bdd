"""The emulated GPU detects what a GPU would do silently: access to memory that is not the kernel's,
and missing waits."""

import re
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from kernel_lab.accuracy import relative_error
from kernel_lab.attention import attention_results, make_qkv
from kernel_lab.emulated_gpu import EmulationFault
from triton.runtime import driver

from megatron5d.kernels import gemm, norm, rms_norm_reference, tuning
from megatron5d.kernels.flash_attention import forward as flash_attention_forward
from megatron5d.kernels.fp8 import gemm as fp8_gemm
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows

ARCHITECTURE = tuning.architecture(torch.device("cpu"))
LAUNCHES = 8  # what completes late is random: this many launches meet it


@triton.jit
def _shifted_kernel(x_ptr, y_ptr, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane + SHIFT, lane < count, other=0.0), lane < count)


def test_other_memory_is_refused_with_the_kernels_line(monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    x, y = torch.randn(100), torch.zeros(100)
    _shifted_kernel[(1,)](x, y, 100, 0, 128)
    assert torch.equal(x, y)
    message = r"out of bounds: byte 40\d of a tensor of 400.*test_emulated_gpu.py:\d+"
    with pytest.raises(EmulationFault, match=message):
        _shifted_kernel[(1,)](x, y, 100, 1, 128)
    misaligned = torch.frombuffer(bytearray(402), dtype=torch.float32, offset=2)
    with pytest.raises(EmulationFault, match="misaligned"):
        _shifted_kernel[(1,)](misaligned, y, 100, 0, 128)


def norm_error() -> float:
    x, weight = torch.randn(64, 512), torch.ones(512)
    return relative_error(norm.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def experts_error() -> float:
    x, weight = torch.randn(200, 256).bfloat16(), torch.randn(2, 128, 256).bfloat16()
    offsets = torch.tensor([0, 90, 200])
    exact = gemm.grouped_matmul_reference(x.float(), weight.float(), offsets)
    return relative_error(gemm.grouped_matmul(x, weight, offsets), exact)


def attention_error(d=64, **rule) -> float:
    """Largest relative error of out and gradients, over several of the architecture's tiles."""
    (out, _, *grads) = attention_results(*make_qkv(s=390, b=1, d=d), **rule)
    return max(relative_error(*pair) for pair in (out, *grads))


def fp8_error() -> float:
    a, b = quantize_rows(torch.randn(129, 512)), quantize_blocks(torch.randn(127, 512))[0]
    exact = fp8_gemm.fp8_matmul_reference(a, b)
    return relative_error(fp8_gemm.fp8_matmul(a, b, out_dtype=torch.float32), exact)


MBARRIER = r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;"
PHASE = r"(mbarrier\.try_wait\.parity[^,]*, \[[^]]*\], )[^;]*;"
WARP_GROUP = r"wgmma\.wait_group\.sync\.aligned[ \t]+\d+;"
FAULTS = {  # run, architecture ("" = all), pattern in the PTX, replacement
    "no barrier of the block": (norm_error, "", r"bar\.sync[ \t]+0;", ""),
    "no wait for copies": (attention_error, "sm_80", r"cp\.async\.wait_group[ \t]+\d+;", ""),
    "no wait for bulk copies": (experts_error, "sm_90", MBARRIER, ""),
    "a wait for another phase of bulk copies": (experts_error, "sm_90", PHASE, r"\g<1>1;"),
    "no wait for a warp group's GEMMs": (experts_error, "sm_90", WARP_GROUP, ""),
    "no wait for GEMMs": (experts_error, "sm_100", MBARRIER, ""),
    "a wait for another phase of GEMMs": (experts_error, "sm_100", PHASE, r"\g<1>1;"),
}


def fails(run) -> bool:
    """Whether one of a few launches is refused or inaccurate."""
    try:
        return not all(run() < 0.02 for _ in range(LAUNCHES))
    except EmulationFault:
        return True


def forget():
    for kernel in (
        norm._forward_kernel,
        gemm._rows_kernel,
        fp8_gemm._fp8_matmul_kernel,
        flash_attention_forward._forward_kernel,
    ):
        kernel.device_caches.clear()


@pytest.fixture
def loaded_anew():
    """Makes the JIT forget what it has loaded, before and after."""
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    "fault", [name for name, (_, where, *_) in FAULTS.items() if where in ("", ARCHITECTURE)]
)
def test_a_missing_or_wrong_wait_is_detected(fault, loaded_anew):
    run, _, pattern, replacement = FAULTS[fault]
    assert not fails(run)
    utils, replaced = type(driver.active.utils), []
    load = utils.load_binary

    def load_edited(self, name, text, *rest):
        edited, count = re.subn(pattern, replacement, text.decode())
        replaced.append(count)
        return load(self, name, edited.encode(), *rest)

    forget()
    with mock.patch.object(utils, "load_binary", load_edited):
        assert fails(run) and sum(replaced) > 0


if ARCHITECTURE == "sm_100":

    def test_why_each_mma_is_read_behind_a_barrier(loaded_anew, monkeypatch):
        """Since 3.8 Triton waits by itself."""
        assert not fails(fp8_error)
        monkeypatch.setattr(fp8_gemm, "needs_mma_barrier", lambda device: False)
        assert fails(fp8_error) != tuning.is_since("3.8")


DOCUMENTS = torch.tensor([0] * 70 + [1] * 200 + [2] * 5 + [3] * 115)[None]
RULES = {  # heads of 32 have the tiles of 64, and the binaries of test_flash_attention.py
    "causal": {"d": 128},
    "full": {"causal": False, "d": 32},
    "window": {"window": 130, "d": 32},
    "softcap": {"softcap": 5.0, "d": 32},
    "documents": {"documents": DOCUMENTS, "d": 128},
    "documents and window": {"documents": DOCUMENTS, "window": 90, "d": 32},
    "heads of 256": {"d": 256},
}
ON_EVERY_GPU = ("causal", "documents and window")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.hopper] * (rule not in ON_EVERY_GPU)) for rule in RULES],
)
def test_attention_over_several_tiles(rule):
    assert attention_error(**RULES[rule]) < 5e-3


@pytest.mark.parametrize("run", [experts_error, pytest.param(fp8_error, marks=pytest.mark.fp8)])
def test_gemms_over_several_tiles(run):
    assert run() < 5e-3


def test_an_unknown_instruction_is_refused():
    ptx = b".visible .entry k(\n.param .u64 p\n)\n{\nbrx.idx %r1, table;\nret;\n}\n"
    with pytest.raises(RuntimeError, match="does not know: brx.idx"):
        driver.active.utils.load_binary("k", ptx, 0, 0)
