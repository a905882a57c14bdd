"""AdamW on the owned slices of the buckets: flat fp32 master weights and moments, one call for all of them.

With optim.implementation=kernel clipping, update and the rounding of masters to weights are one pass over memory
(kernels/multi_tensor.py), each number read and written once; the others take three.
Without master weights (precision.master_weights) bf16 weights are updated themselves: widened, moved, and rounded back
at random (rounding.py), a bucket at a time.

Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); the arithmetic is torch's fused AdamW, or NVIDIA apex's FusedAdam
where it is really there (the package of that name on PyPI is something else).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step
from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.buckets import Bucket, Segment
from megatron5d.optim.rounding import store_rounded
from megatron5d.topology.shard import ShardSpec


@dataclass
class SliceState:
    """Optimiser state of one bucket's owned slice, flat."""

    bucket: Bucket
    segments: list[Segment]
    master: Tensor  # the weights themselves where they are wide enough and not on the host
    grads: Tensor  # what the update reads: the reduced gradients, or their copy on the host
    reduced: Tensor  # this slice of the bucket's main gradients
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: bool = False  # the weights are narrow and updated in place

    @property
    def on_host(self) -> bool:
        """The update runs on copies in the host's memory."""
        return self.grads is not self.reduced

    @property
    def has_master(self) -> bool:
        """Master weights are a copy of their own, wider than the weights."""
        return self.master.dtype != self.bucket.weights.dtype


def decays(spec: ShardSpec, exclude: Sequence[str]) -> bool:
    """Weight decay applies to parameters of two and more dims that no glob excludes."""
    return spec.decay and len(spec.shape) >= 2 and not any(fnmatch.fnmatch(spec.name, glob) for glob in exclude)


def apex_adam() -> type | None:
    """NVIDIA's FusedAdam, told from its namesake by the compiled kernel."""
    if not torch.cuda.is_available():
        return None
    try:
        import amp_C
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam if hasattr(amp_C, "multi_tensor_adam") else None


def _host_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a tensor in the host's memory, pinned where a GPU copies to it; nowhere for one on the meta device."""
    device = "meta" if tensor.is_meta else "cpu"
    return torch.empty(tensor.shape, dtype=dtype, device=device, pin_memory=tensor.is_cuda)


class AdamW:
    """
    Args:
        buckets: whose owned slices are updated; their gradients must be reduced.
        config: betas, eps, weight_decay, decay_exclude, implementation, offload (master weights and moments stay on the
            host; every step the gradients travel there, and new weights back).
        rounding_seed: bf16 weights have no masters, and their updates are rounded at random from this seed; None = they
            have.
    """

    def __init__(self, buckets: Sequence[Bucket], config: OptimConfig, rounding_seed: int | None = None) -> None:
        self.config, self.rounding_seed = config, rounding_seed
        self.slices = [self._slice(bucket) for bucket in buckets]
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        self._grads: list[tuple[Tensor, Tensor]] = []  # (view of the master, view of the main gradient)
        states: dict[Tensor, dict[str, Tensor]] = {}
        for state in self.slices:
            if state.rounded:
                continue
            for segment in state.segments:
                span = slice(*segment.owned)
                view = state.master[span]
                groups[decays(segment.spec, config.decay_exclude)].append(view)
                self._grads.append((view, state.grads[span]))
                states[view] = {"exp_avg": state.exp_avg[span], "exp_avg_sq": state.exp_avg_sq[span]}
        self._optimizer = self._build(groups, states, config)
        self._pass = self._one_pass() if config.implementation == "kernel" else None

    def _one_pass(self) -> tuple[TensorTable, Tensor]:
        """Everything that an update reads and writes, segment by segment, and the decay of each."""
        spans = [(state, segment, slice(*segment.owned)) for state in self.slices for segment in state.segments]
        columns = {
            name: [getattr(state, name)[span] for state, _, span in spans]
            for name in ("master", "grads", "exp_avg", "exp_avg_sq")
        }
        columns["grad"] = columns.pop("grads")
        order = {name: columns[name] for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
        if all(state.has_master for state in self.slices):
            order["copy"] = [state.bucket.weight_slice[span] for state, _, span in spans]
        decay = [self.config.weight_decay * decays(each.spec, self.config.decay_exclude) for _, each, _ in spans]
        return TensorTable(**order), torch.tensor(decay, device=self.slices[0].reduced.device)

    def _slice(self, bucket: Bucket) -> SliceState:
        owned, reduced = bucket.weight_slice, bucket.grad_slice
        wide = torch.float64 if owned.dtype == torch.float64 else torch.float32
        rounded = self.rounding_seed is not None and owned.dtype == torch.bfloat16
        grads, master = reduced, owned if owned.dtype == wide or rounded else owned.to(wide)
        if self.config.offload:
            grads, master = _host_like(reduced, wide), _host_like(owned, wide).copy_(owned)
        first, second = (torch.zeros_like(master, dtype=wide) for _ in range(2))
        return SliceState(bucket, bucket.segments(), master, grads, reduced, first, second, rounded)

    def _build(self, groups, states, config: OptimConfig) -> torch.optim.Optimizer:
        param_groups = [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ]
        settings: dict[str, Any] = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
        apex = apex_adam() if config.implementation in ("auto", "apex") and not config.offload else None
        if config.implementation == "apex" and apex is None:
            raise ValueError(
                "optim.implementation = apex, but NVIDIA apex with amp_C.multi_tensor_adam and a CUDA device are not "
                "both here, or optim.offload = true leaves the update to the CPU; use optim.implementation=torch"
            )
        param_groups = [group for group in param_groups if group["params"]] or param_groups[:1]
        self.step_count = 0
        if apex is not None:
            optimizer = apex(param_groups, adam_w_mode=True, **settings)
        else:
            planned = all(view.is_meta for view in states)  # torch fuses nothing on the meta device, nor does it step
            optimizer = torch.optim.AdamW(param_groups, fused=not planned, **settings)
            for state in states.values():
                state["step"] = torch.zeros((), dtype=torch.float32, device=state["exp_avg"].device)
        for view, state in states.items():
            optimizer.state[view] = state
        return optimizer

    def step(self, lr: float, scale: float | None = None) -> None:
        """One update of the owned slices; the weights of other slices are stale until gathered.

        Args:
            lr: rate of this step.
            scale: factor of the gradients (clipping), applied in place; optim.implementation=kernel leaves them.
        """
        if self._pass is not None:
            table, decay = self._pass
            self.step_count += 1
            beta1, beta2 = self.config.betas
            settings = AdamWSettings(lr, beta1, beta2, self.config.eps, self.step_count)
            factor = torch.full((), 1.0 if scale is None else scale, dtype=self.slices[0].master.dtype)
            adamw_step(table, settings, factor.to(decay.device), decay)
            return
        if scale is not None:
            for state in self.slices:
                state.bucket.grad_slice.mul_(scale)
        for state in self.slices:
            if state.on_host:
                state.grads.copy_(state.reduced)
        for view, grad in self._grads:
            view.grad = grad if grad.dtype == view.dtype else grad.to(view.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.step_count += 1
        for view, _ in self._grads:
            view.grad = None
        for state in self.slices:
            if state.rounded and state.segments:
                self._update_rounded(state, lr)
        self.masters_to_weights()

    def _update_rounded(self, state: SliceState, lr: float) -> None:
        """The update of weights without masters; a bucket's worth of fp32 lives meanwhile."""
        assert self.rounding_seed is not None
        spans = [slice(*segment.owned) for segment in state.segments]
        weights, grads = state.bucket.weight_slice, state.bucket.grad_slice
        flat = {"master": weights.float(), "grad": grads, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        table = TensorTable(**{name: [tensor[span] for span in spans] for name, tensor in flat.items()})
        decay = [self.config.weight_decay * decays(s.spec, self.config.decay_exclude) for s in state.segments]
        beta1, beta2 = self.config.betas
        settings = AdamWSettings(lr, beta1, beta2, self.config.eps, self.step_count)
        factor = torch.ones((), device=weights.device)  # clipping has been applied
        adamw_step(table, settings, factor, torch.tensor(decay, device=weights.device))
        for segment, span in zip(state.segments, spans):
            store_rounded(flat["master"][span], weights[span], segment, self.rounding_seed, self.step_count)

    def masters_to_weights(self) -> None:
        """Rounds the master weights into the model's owned slices."""
        for state in self.slices:
            if state.has_master or state.on_host:
                state.bucket.weight_slice.copy_(state.master)

    def weights_to_masters(self) -> None:
        """Takes the model's weights as the truth (after an import)."""
        for state in self.slices:
            if state.has_master or state.on_host:
                state.master.copy_(state.bucket.weight_slice)

    def take_unsaved_masters(self) -> None:
        """After a resume: masters that are no wider than the weights are saved once, as the weights."""
        for state in self.slices:
            if state.on_host and not state.has_master:
                state.master.copy_(state.bucket.weight_slice)

    def set_step_count(self, count: int) -> None:
        """How many updates the moments have seen (bias correction), after a resume."""
        self.step_count = count
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in self._optimizer.param_groups:
            if "step" in group:
                group["step"] = count

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """(kind, flat tensor over the owned slice, its slice) of everything a checkpoint keeps."""
        for state in self.slices:
            if state.has_master:
                yield "master", state.master, state
            yield "exp_avg", state.exp_avg, state
            yield "exp_avg_sq", state.exp_avg_sq, state
