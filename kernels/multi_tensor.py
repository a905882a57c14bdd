"""One launch over many tensors: the gradient norm, and AdamW.

AdamW (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), with g the gradient times a common
factor (unscaling and clipping):
    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g²
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
The master weights p, m and v are float32. The same pass stores a rounded copy of p for the forward,
so each number is read and written once. The squared norm is not finite if and only if a gradient is
not (or overflows), so it serves as the finite check as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import TRITON_DTYPES, jit, load_float32, tl

ADAMW_COLUMNS = ("master", "grad", "exp_avg", "exp_avg_sq")


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
    """Columns of contiguous tensors, with their addresses and chunks on the device.

    A table is built once and used in every step.

    Args:
        **columns: name -> list of tensors of one dtype. All lists are equally long, and the i-th
            tensors of all lists have the same number of elements.

    Raises:
        ValueError: lists that do not match, or a tensor that is not contiguous.
    """

    def __init__(self, **columns: Sequence[Tensor]):
        self.columns = {name: list(tensors) for name, tensors in columns.items()}
        first = next(iter(self.columns.values()))
        self.counts = [t.numel() for t in first]
        for name, tensors in self.columns.items():
            if [t.numel() for t in tensors] != self.counts:
                raise ValueError(f"column {name!r} must have the same sizes as the first column")
            if len({t.dtype for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
                raise ValueError(f"column {name!r} must be contiguous tensors of one dtype")
        self.device = first[0].device if first else torch.device("cpu")
        self._chunks: dict[int, Tensor] = {}
        addresses = [[t.data_ptr() for t in tensors] for tensors in self.columns.values()]
        self.aligned = all(address % 16 == 0 for column in addresses for address in column)
        self.addresses = self._on_device(addresses, torch.int64)
        self.sizes = self._on_device(self.counts, torch.int64)

    def _on_device(self, numbers: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device, non_blocking=True)

    def chunks(self, block: int) -> Tensor:
        """The tensor, and the block within it, that each program processes: `[chunks, 2]` int32."""
        if block not in self._chunks:
            pairs = [
                (i, c) for i, count in enumerate(self.counts) for c in range(-(-count // block))
            ]
            self._chunks[block] = self._on_device(pairs, torch.int32).reshape(-1, 2)
        return self._chunks[block]

    def dtype(self, name: str) -> torch.dtype:
        return self.columns[name][0].dtype


@jit
def _block(chunks_ptr, sizes_ptr, BLOCK: tl.constexpr):
    """Looks up this program's tensor, the elements of its block and their mask, and whether the
    block is full."""
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks_ptr + chunk * 2)
    first = tl.load(chunks_ptr + chunk * 2 + 1).to(tl.int64) * BLOCK
    size = tl.load(sizes_ptr + tensor)
    index = first + tl.arange(0, BLOCK)
    return tensor, index, index < size, first + BLOCK <= size


@jit
def _load_pointer(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads a tensor's address. ALIGNED allows the compiler to load 16 bytes at once."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# Full blocks are read and written without a mask: its edge may lie anywhere, which would break up
# the wide loads.
@jit
def _read(pointer, mask, FULL: tl.constexpr):
    if FULL:
        x = tl.load(pointer).to(tl.float32)
    else:
        x = load_float32(pointer, mask)
    return x


@jit
def _write(pointer, x, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer, x)
    else:
        tl.store(pointer, x, mask)


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
    """Sums the squares of one block."""
    tensor, index, mask, is_full = _block(chunks_ptr, sizes_ptr, BLOCK)
    pointer = _load_pointer(addresses_ptr + tensor, DTYPE, ALIGNED) + index
    if is_full:
        g = _read(pointer, mask, True)
    else:
        g = _read(pointer, mask, False)
    tl.store(out_ptr + tl.program_id(0), tl.sum(g * g, 0))


@jit
def _update(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, mask, rates, HAS_COPY: tl.constexpr, FULL: tl.constexpr
):
    """Updates one block by AdamW.

    Args:
        rates: gradient factor, 1 - lr wd, lr / (1 - b1^t), b1, b2, 1 - b1, 1 - b2,
            sqrt(1 - b2^t), eps.
    """
    factor, decay, step_size, beta1, beta2, one_minus_beta1, one_minus_beta2, root, eps = rates
    g = _read(g_ptr, mask, FULL) * factor
    m = beta1 * _read(m_ptr, mask, FULL) + one_minus_beta1 * g
    v = beta2 * _read(v_ptr, mask, FULL) + one_minus_beta2 * g * g
    p = _read(p_ptr, mask, FULL) * decay - step_size * m / (tl.sqrt(v) / root + eps)
    _write(m_ptr, m, mask, FULL)
    _write(v_ptr, v, mask, FULL)
    _write(p_ptr, p, mask, FULL)
    if HAS_COPY:
        _write(copy_ptr, p, mask, FULL)


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
    one_minus_beta1,
    one_minus_beta2,
    eps,
    correction1,
    root_correction2,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    HAS_COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one block; GRAD and COPY are the dtypes of gradients and copies."""
    tensor, index, mask, is_full = _block(chunks_ptr, sizes_ptr, BLOCK)
    # The table of addresses has a row per column: masters, gradients, both moments, copies.
    addresses_ptr += tensor
    p_ptr = _load_pointer(addresses_ptr, tl.float32, ALIGNED) + index
    g_ptr = _load_pointer(addresses_ptr + num_tensors, GRAD, ALIGNED) + index
    m_ptr = _load_pointer(addresses_ptr + 2 * num_tensors, tl.float32, ALIGNED) + index
    v_ptr = _load_pointer(addresses_ptr + 3 * num_tensors, tl.float32, ALIGNED) + index
    copy_column = 4 if HAS_COPY else 0
    copy_ptr = _load_pointer(addresses_ptr + copy_column * num_tensors, COPY, ALIGNED) + index
    decay = 1.0 - lr * tl.load(weight_decay_ptr + tensor)
    rates = (
        tl.load(factor_ptr),
        decay,
        lr / correction1,
        beta1,
        beta2,
        one_minus_beta1,
        one_minus_beta2,
        root_correction2,
        eps,
    )
    if is_full:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, mask, rates, HAS_COPY, True)
    else:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, mask, rates, HAS_COPY, False)


def squared_norm(table: TensorTable, column: str = "grad") -> Tensor:
    """Sum of squares of all elements of a column.

    Returns:
        0-d float64 on the tensors' device; not finite if and only if an element is not, or the sum
        of a chunk overflows.
    """
    tensors = table.columns[column]
    if not tensors or not dispatch.runs_triton(tensors[0]):
        zero = torch.zeros((), dtype=torch.float64, device=table.device)
        return sum((t.double().square().sum() for t in tensors), zero)
    config = tuning.select("squared_norm", table.device)
    chunks = table.chunks(config["BLOCK"])
    sums = torch.empty(len(chunks), dtype=torch.float32, device=table.device)
    addresses = table.addresses[list(table.columns).index(column)]
    config |= {"DTYPE": TRITON_DTYPES[table.dtype(column)], "ALIGNED": table.aligned}
    _squares_kernel[(len(chunks),)](addresses, chunks, table.sizes, sums, **config)
    return sums.double().sum()


def adamw_reference(
    table: TensorTable, settings: AdamWSettings, factor: Tensor, weight_decay: Tensor
) -> None:
    """Computes `adamw_step` in plain torch."""
    columns = table.columns
    correction1, correction2 = settings.corrections
    for i, (p, grad) in enumerate(zip(columns["master"], columns["grad"])):
        m, v = columns["exp_avg"][i], columns["exp_avg_sq"][i]
        g = grad.to(p.dtype) * factor.to(p.dtype)
        m.mul_(settings.beta1).add_(g, alpha=1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
        p.mul_(1 - settings.lr * float(weight_decay[i]))
        denominator = (v.sqrt() / correction2**0.5).add_(settings.eps)
        p.addcdiv_(m, denominator, value=-settings.lr / correction1)
        if "copy" in columns:
            columns["copy"][i].copy_(p)


def adamw_step(
    table: TensorTable, settings: AdamWSettings, factor: Tensor, weight_decay: Tensor
) -> None:
    """Updates every tensor of the table by AdamW, in place, in one launch.

    Args:
        table: columns in this order: master, grad, exp_avg, exp_avg_sq, and optionally copy; all
            float32 (or all float64) except grad and copy, which may be narrower.
        settings: rates and step number.
        factor: 0-d, in the dtype of the masters, on the device, so that clipping needs no host
            synchronization; multiplies every gradient.
        weight_decay: `[tensors]`, in the dtype of the masters, on the device.

    Raises:
        ValueError: columns of other names or in another order.
    """
    has_copy = "copy" in table.columns
    if tuple(table.columns) != ADAMW_COLUMNS + (("copy",) if has_copy else ()):
        raise ValueError(
            f"adamw_step requires the columns {', '.join(ADAMW_COLUMNS)}[, copy] "
            f"(got {', '.join(table.columns)})"
        )
    if not table.counts:
        return
    if not dispatch.runs_triton(table.columns["master"][0]):
        adamw_reference(table, settings, factor, weight_decay)
        return
    correction1, correction2 = settings.corrections
    config = tuning.select("adamw", table.device)
    chunks = table.chunks(config["BLOCK"])
    config |= {
        "GRAD": TRITON_DTYPES[table.dtype("grad")],
        "COPY": TRITON_DTYPES[table.dtype("copy")] if has_copy else tl.float32,
        "HAS_COPY": has_copy,
        "ALIGNED": table.aligned,
    }
    # In float32 on the device, 1 - beta would be off by 1e-5.
    betas = (settings.beta1, settings.beta2, 1 - settings.beta1, 1 - settings.beta2)
    rates = (settings.lr, *betas, settings.eps, correction1, correction2**0.5)
    inputs = (table.addresses, chunks, table.sizes, factor, weight_decay, len(table.counts))
    _adamw_kernel[(len(chunks),)](*inputs, *rates, **config)
