"""Many tensors in one launch: the gradient norm, and AdamW.

AdamW (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), with g the gradient times a common
factor (unscaling and clipping):
    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g²
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
The master p, m and v are float32; a rounded copy for the forward is written in the same pass, so
that each number is read and written once. The squared norm is not finite exactly when a gradient is
not (or overflows): it is the finite check too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import TRITON_DTYPES, jit, tl


@dataclass(frozen=True)
class AdamWSettings:
    """The numbers of one AdamW step; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int

    @property
    def corrections(self) -> tuple[float, float]:
        """1 - b1^t and 1 - b2^t."""
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step


class TensorTable:
    """Columns of contiguous tensors, with their addresses and chunks on the device; made once, used
    every step.

    Args:
        **columns: name -> list of tensors; every list as long, tensor i of each with as many
            elements; one dtype a column.

    Raises:
        ValueError: lists that do not match, or a tensor that is not contiguous.
    """

    def __init__(self, **columns: Sequence[Tensor]):
        self.columns = {name: list(tensors) for name, tensors in columns.items()}
        first = next(iter(self.columns.values()))
        self.counts = [t.numel() for t in first]
        for name, tensors in self.columns.items():
            if [t.numel() for t in tensors] != self.counts:
                raise ValueError(
                    f"column {name!r} does not hold the same numbers of elements as the first column"
                )
            if len({t.dtype for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
                raise ValueError(f"column {name!r} must be contiguous tensors of one dtype")
        self.device = first[0].device if first else torch.device("cpu")
        self._chunks: dict[int, Tensor] = {}
        addresses = [[t.data_ptr() for t in tensors] for tensors in self.columns.values()]
        self.aligned = all(address % 16 == 0 for column in addresses for address in column)
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(
            self.device, non_blocking=True
        )
        self.sizes = torch.tensor(self.counts, dtype=torch.int64).to(self.device, non_blocking=True)

    def chunks(self, block: int) -> Tensor:
        """Computes `[chunks, 2]` int32: which tensor, and which block of it, each program works
        on."""
        if block not in self._chunks:
            pairs = [
                (i, c) for i, count in enumerate(self.counts) for c in range(-(-count // block))
            ]
            chunks = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
            self._chunks[block] = chunks.to(self.device, non_blocking=True)
        return self._chunks[block]

    def dtype(self, name: str) -> torch.dtype:
        return self.columns[name][0].dtype


@jit
def _block(chunks_ptr, sizes_ptr, BLOCK: tl.constexpr):
    """Returns this program's tensor, the elements of its block, which of them exist, and whether
    all do."""
    chunk = tl.program_id(0).to(tl.int64)
    which = tl.load(chunks_ptr + chunk * 2)
    first = tl.load(chunks_ptr + chunk * 2 + 1).to(tl.int64) * BLOCK
    size = tl.load(sizes_ptr + which)
    index = first + tl.arange(0, BLOCK)
    return which, index, index < size, first + BLOCK <= size


@jit
def _tensor(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Reads a pointer from memory, and tells the compiler that 16 bytes may be loaded at once."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _read(pointer, live, FULL: tl.constexpr):
    """Reads a block as float32; a mask, whose edge may lie anywhere, would break up the wide loads
    of a full one."""
    if FULL:
        x = tl.load(pointer)
    else:
        x = tl.load(pointer, live, other=0.0)
    return x.to(tl.float32)


@jit
def _write(pointer, x, live, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer, x)
    else:
        tl.store(pointer, x, live)


@jit
def _squares_kernel(
    addresses_ptr,
    chunks_ptr,
    sizes_ptr,
    out_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, index, live, full = _block(chunks_ptr, sizes_ptr, BLOCK)
    pointer = _tensor(addresses_ptr + which, DTYPE, ALIGNED) + index
    if full:
        g = _read(pointer, live, True)
    else:
        g = _read(pointer, live, False)
    tl.store(out_ptr + tl.program_id(0), tl.sum(g * g, 0))


@jit
def _update(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, live, rates, HAS_COPY: tl.constexpr, FULL: tl.constexpr
):
    """Updates one block by AdamW; rates: gradient factor, decay, step, betas, 1 - betas, root of 1
    - b2^t, eps."""
    factor, kept, step, beta1, beta2, share1, share2, root_correction2, eps = rates
    g = _read(g_ptr, live, FULL) * factor
    m = beta1 * _read(m_ptr, live, FULL) + share1 * g
    v = beta2 * _read(v_ptr, live, FULL) + share2 * g * g
    p = _read(p_ptr, live, FULL) * kept - step * m / (tl.sqrt(v) / root_correction2 + eps)
    _write(m_ptr, m, live, FULL)
    _write(v_ptr, v, live, FULL)
    _write(p_ptr, p, live, FULL)
    if HAS_COPY:
        _write(copy_ptr, p, live, FULL)


@jit
def _adamw_kernel(
    addresses_ptr,
    chunks_ptr,
    sizes_ptr,
    factor_ptr,
    weight_decay_ptr,
    num_tensors,
    lr,
    beta1,
    beta2,
    share1,
    share2,
    eps,
    correction1,
    root_correction2,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    HAS_COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, index, live, full = _block(chunks_ptr, sizes_ptr, BLOCK)
    p_ptr = _tensor(addresses_ptr + which, tl.float32, ALIGNED) + index
    g_ptr = _tensor(addresses_ptr + num_tensors + which, GRAD, ALIGNED) + index
    m_ptr = _tensor(addresses_ptr + 2 * num_tensors + which, tl.float32, ALIGNED) + index
    v_ptr = _tensor(addresses_ptr + 3 * num_tensors + which, tl.float32, ALIGNED) + index
    copy_ptr = (
        _tensor(addresses_ptr + (4 if HAS_COPY else 0) * num_tensors + which, COPY, ALIGNED) + index
    )
    kept = 1.0 - lr * tl.load(weight_decay_ptr + which)
    rates = (
        tl.load(factor_ptr),
        kept,
        lr / correction1,
        beta1,
        beta2,
        share1,
        share2,
        root_correction2,
        eps,
    )
    if full:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, live, rates, HAS_COPY, True)
    else:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, live, rates, HAS_COPY, False)


def squared_norm(table: TensorTable, column: str = "grad") -> Tensor:
    """Returns the sum of squares of all elements of a column.

    Args:
        column: which of its columns.

    Returns:
        0-d float64 on the tensors' device; not finite exactly when an element is not, or the sum of
        a chunk overflows.
    """
    tensors = table.columns[column]
    if not tensors or not dispatch.runs_triton(tensors[0]):
        return sum(
            (t.double().square().sum() for t in tensors),
            torch.zeros((), dtype=torch.float64, device=table.device),
        )
    config = tuning.select("squared_norm", table.device)
    chunks = table.chunks(config["BLOCK"])
    parts = torch.empty(len(chunks), dtype=torch.float32, device=table.device)
    addresses = table.addresses[list(table.columns).index(column)]
    dtype = TRITON_DTYPES[table.dtype(column)]
    flags = {"DTYPE": dtype, "ALIGNED": table.aligned}
    _squares_kernel[(len(chunks),)](addresses, chunks, table.sizes, parts, **flags, **config)
    return parts.double().sum()


def adamw_reference(
    table: TensorTable, settings: AdamWSettings, factor: Tensor, weight_decay: Tensor
) -> None:
    columns = table.columns
    correction1, correction2 = settings.corrections
    for i, (p, grad) in enumerate(zip(columns["master"], columns["grad"])):
        m, v = columns["exp_avg"][i], columns["exp_avg_sq"][i]
        g = grad.to(p.dtype) * factor.to(p.dtype)
        m.mul_(settings.beta1).add_(g, alpha=1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
        p.mul_(1 - settings.lr * float(weight_decay[i]))
        p.addcdiv_(
            m, (v.sqrt() / correction2**0.5).add_(settings.eps), value=-settings.lr / correction1
        )
        if "copy" in columns:
            columns["copy"][i].copy_(p)


def adamw_step(
    table: TensorTable, settings: AdamWSettings, factor: Tensor, weight_decay: Tensor
) -> None:
    """Makes an AdamW step of every tensor of the table, in place, in one launch.

    Args:
        table: columns in this order: master, grad, exp_avg, exp_avg_sq, and perhaps copy; all
            float32 (or all float64) but grad and copy, which may be narrower.
        settings: rates and step number.
        factor: 0-d, in the dtype of the masters, on the device; multiplied into every gradient: no
            synchronisation to clip.
        weight_decay: `[tensors]`, in the dtype of the masters, on the device.

    Raises:
        ValueError: columns of another name or order.
    """
    names = list(table.columns)
    if names not in (
        ["master", "grad", "exp_avg", "exp_avg_sq"],
        ["master", "grad", "exp_avg", "exp_avg_sq", "copy"],
    ):
        raise ValueError(
            f"adamw_step wants the columns master, grad, exp_avg, exp_avg_sq[, copy]; got {', '.join(names)}"
        )
    if not table.counts:
        return
    if not dispatch.runs_triton(table.columns["master"][0]):
        adamw_reference(table, settings, factor, weight_decay)
        return
    correction1, correction2 = settings.corrections
    config = tuning.select("adamw", table.device)
    chunks = table.chunks(config["BLOCK"])
    has_copy = "copy" in table.columns
    copy = TRITON_DTYPES[table.dtype("copy")] if has_copy else tl.float32
    dtypes = {
        "GRAD": TRITON_DTYPES[table.dtype("grad")],
        "COPY": copy,
        "HAS_COPY": has_copy,
        "ALIGNED": table.aligned,
    }
    # 1 - .999f would be off by 1e-5
    betas = (settings.beta1, settings.beta2, 1 - settings.beta1, 1 - settings.beta2)
    rates = (settings.lr, *betas, settings.eps, correction1, correction2**0.5)
    inputs = (table.addresses, chunks, table.sizes, factor, weight_decay, len(table.counts))
    _adamw_kernel[(len(chunks),)](*inputs, *rates, **dtypes, **config)
