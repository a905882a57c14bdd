"""AdamW on the owned slices of the buckets: flat fp32 master weights and moments, one call for all
of them.

On a GPU, and with optim.implementation=kernel, clipping, update and the rounding of masters to
weights are one pass over memory (kernels/multi_tensor.py); torch takes two, other implementations
three. Without master weights (precision.master_weights=false) bf16 weights are converted to fp32,
updated, and rounded back stochastically (sharded_state.py), one bucket at a time.

Source: Loshchilov & Hutter 2019 (arXiv:1711.05101). The arithmetic is torch's fused AdamW, or
    NVIDIA apex's FusedAdam
where it is installed (PyPI's package of that name is another one).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.kernels import dispatch
from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step
from megatron5d.optim.sharded_state import (
    SliceOptimizer,
    SliceState,
    decay_of,
    scale_of,
    store_rounded,
)


def apex_adam() -> type | None:
    """Returns NVIDIA apex's FusedAdam; None without a GPU or where apex or its compiled kernels are
    missing."""
    if not torch.cuda.is_available():
        return None
    try:
        import amp_C
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam if hasattr(amp_C, "multi_tensor_adam") else None


class FusedAdamW:
    """The update of `torch.optim.AdamW(fused=True)`, whose constructor alone imports torch's
    compiler: a second."""

    def __init__(
        self, param_groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.param_groups = [{"lr": lr, **group} for group in param_groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}  # of each: exp_avg, exp_avg_sq and step
        self.betas, self.eps = betas, eps

    def step(self, scale: float | None = None) -> None:
        """Updates the tensors by their `.grad` times `scale`, which torch takes in float32."""
        for group in self.param_groups:
            states = [self.state[view] for view in group["params"]]
            if states:
                first, second, steps = (
                    [each[kind] for each in states] for kind in ("exp_avg", "exp_avg_sq", "step")
                )
                torch._foreach_add_(steps, 1)
                divisor = None if scale is None else torch.full_like(steps[0], 1 / scale)
                torch._fused_adamw_(
                    group["params"],
                    [view.grad for view in group["params"]],
                    first,
                    second,
                    [],
                    steps,
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=self.betas[0],
                    beta2=self.betas[1],
                    weight_decay=group["weight_decay"],
                    eps=self.eps,
                    maximize=False,
                    grad_scale=divisor,
                )


class AdamW(SliceOptimizer):
    """AdamW; the arguments are those of SliceOptimizer.

    It reads lr, betas, eps, weight_decay, decay_exclude, scales, implementation and offload of the
    config.

    Raises ValueError: optim.implementation is apex, and that is not installed or cannot be used.
    """

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, buckets: Sequence[Bucket], config: OptimConfig, rounding_seed: int | None = None
    ) -> None:
        super().__init__(buckets, config, rounding_seed)
        # (factor of the rate, decay) -> views of the masters
        groups: dict[tuple[float, float], list[Tensor]] = {}
        # (view of the master, view of the main gradient)
        self._grads: list[tuple[Tensor, Tensor]] = []
        states: dict[Tensor, dict[str, Tensor]] = {}
        for state in self.slices:
            if state.rounded:
                continue
            for segment in state.segments:
                span = slice(*segment.owned)
                view = state.master[span]
                group = scale_of(segment.spec, config.lr_scale), decay_of(segment.spec, config)
                groups.setdefault(group, []).append(view)
                self._grads.append((view, state.grads[span]))
                states[view] = {kind: moment[span] for kind, moment in state.moments.items()}
        self._optimizer = self._build(groups, states, config)
        fp32 = all(
            state.master.dtype == torch.float32 and not state.rounded for state in self.slices
        )
        self._update_scales = fp32 and isinstance(self._optimizer, FusedAdamW)
        self._kernel: dict[float, tuple[TensorTable, Tensor]] | None = None
        if config.implementation == "kernel" or (
            config.implementation == "auto" and self._serves_kernel()
        ):
            scales = {
                scale_of(segment.spec, config.lr_scale)
                for state in self.slices
                for segment in state.segments
            }
            self._kernel = {scale: self._kernel_arguments(scale) for scale in sorted(scales)}

    def _serves_kernel(self) -> bool:
        """Says whether Triton's kernel can update all of it; rounded weights are updated bucket by
        bucket instead."""
        mine = [state for state in self.slices if state.segments]
        on_gpu = all(
            state.master.device.type != "cpu" and dispatch.runs_triton(state.master)
            for state in mine
        )
        return bool(mine) and on_gpu and not any(state.rounded for state in mine)

    def _kernel_arguments(self, scale: float) -> tuple[TensorTable, Tensor]:
        """Returns the kernel's arguments: the segments whose rate has this factor, as tensors, and
        their decay."""
        spans = [
            (state, segment, slice(*segment.owned))
            for state, segment in self._of_scale(scale, self.slices)
        ]
        order = {
            "master": [state.master[span] for state, _, span in spans],
            "grad": [state.grads[span] for state, _, span in spans],
            **{
                kind: [state.moments[kind][span] for state, _, span in spans] for kind in self.kinds
            },
        }
        if all(state.has_wider_master for state in self.slices):
            order["copy"] = [state.bucket.weight_slice[span] for state, _, span in spans]
        decay = [decay_of(each.spec, self.config) for _, each, _ in spans]
        first = self.slices[0]
        return TensorTable(**order), torch.tensor(
            decay, dtype=first.master.dtype, device=first.reduced.device
        )

    def _of_scale(
        self, scale: float, slices: Sequence[SliceState]
    ) -> list[tuple[SliceState, Segment]]:
        """Returns the segments whose learning rate has this factor."""
        pairs = [(state, segment) for state in slices for segment in state.segments]
        return [pair for pair in pairs if scale_of(pair[1].spec, self.config.lr_scale) == scale]

    def _build(self, groups, states, config: OptimConfig):
        """Returns torch's update or apex's optimiser, with our tensors as its parameters and state.

        Args:
            groups: (factor of the rate, decay) -> views of the masters.
            states: view of a master -> its moments by name.
        """
        param_groups = [
            {"params": views, "weight_decay": decay, "lr_scale": scale}
            for (scale, decay), views in groups.items()
        ] or [{"params": list[Tensor](), "lr_scale": 1.0}]
        settings: dict[str, Any] = {
            "lr": config.lr,
            "betas": tuple(config.betas),
            "eps": config.eps,
        }
        served = not config.offload and all(view.dtype == torch.float32 for view in states)
        apex = apex_adam() if config.implementation in ("auto", "apex") and served else None
        if config.implementation == "apex" and apex is None:
            raise ValueError(
                "optim.implementation = apex, but NVIDIA apex with amp_C.multi_tensor_adam and a CUDA device are not "
                "both here, or optim.offload = true leaves the update to the CPU, or precision.dtype = fp64 is none of "
                "its types; use optim.implementation=torch"
            )
        if apex is not None:
            # it counts by group, from its first step on
            counted = [{**group, "step": 0} for group in param_groups]
            optimizer = apex(counted, adam_w_mode=True, **settings)
        else:
            optimizer = FusedAdamW(param_groups, **settings)
            for state in states.values():
                state["step"] = torch.zeros((), dtype=torch.float32, device=state["exp_avg"].device)
        for view, state in states.items():
            optimizer.state[view] = state
        return optimizer

    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates as SliceOptimizer does; the kernel scales gradients while it reads them."""
        if self._kernel is not None:
            self.step_count += 1
            for lr_scale, (table, decay) in self._kernel.items():
                factor = torch.full(
                    (), 1.0 if scale is None else scale, dtype=decay.dtype, device=decay.device
                )
                adamw_step(table, self._settings(lr * lr_scale), factor, decay)
            return
        self._take_grads(None if self._update_scales else scale)
        self._attach_grads()
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self._update_scales:
            self._optimizer.step(scale)
        elif self._grads:  # apex takes no empty group
            self._optimizer.step()
        self.step_count += 1
        self._detach_grads()
        for state in self.slices:
            if state.rounded and state.segments:
                for lr_scale in sorted(
                    {scale_of(segment.spec, self.config.lr_scale) for segment in state.segments}
                ):
                    segments = [segment for _, segment in self._of_scale(lr_scale, [state])]
                    self._update_rounded(state, lr * lr_scale, segments)
        self.masters_to_weights()

    def _settings(self, lr: float) -> AdamWSettings:
        beta1, beta2 = self.config.betas
        return AdamWSettings(lr, beta1, beta2, self.config.eps, self.step_count)

    def _attach_grads(self) -> None:
        """Sets `.grad` of the masters, with a copy where the gradients have a narrower dtype."""
        for view, grad in self._grads:
            view.grad = grad if grad.dtype == view.dtype else grad.to(view.dtype)

    def _detach_grads(self) -> None:
        for view, _ in self._grads:
            view.grad = None

    def allocate_temporaries(self) -> None:
        if self._kernel is None:
            self._attach_grads()
            self._detach_grads()
        for state in self.slices:
            if state.rounded:
                state.bucket.weight_slice.float()

    def _update_rounded(self, state: SliceState, lr: float, segments: Sequence[Segment]) -> None:
        """Updates bf16 weights without masters, through a temporary fp32 copy of the bucket's
        slice."""
        assert self.rounding_seed is not None
        spans = [slice(*segment.owned) for segment in segments]
        weights, grads = state.bucket.weight_slice, state.bucket.grad_slice
        flat = {"master": weights.float(), "grad": grads, **state.moments}
        table = TensorTable(
            **{name: [tensor[span] for span in spans] for name, tensor in flat.items()}
        )
        decay = [decay_of(segment.spec, self.config) for segment in segments]
        unscaled = torch.ones((), device=weights.device)  # the gradients are clipped already
        adamw_step(
            table,
            self._settings(lr),
            unscaled,
            torch.tensor(decay).to(weights.device, non_blocking=True),
        )
        for segment, span in zip(segments, spans):
            store_rounded(
                flat["master"][span], weights[span], segment, self.rounding_seed, self.step_count
            )

    def set_step_count(self, count: int) -> None:
        """Sets the number of updates that the moments have seen, for the bias correction; called
        after a resume."""
        super().set_step_count(count)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in self._optimizer.param_groups:
            if "step" in group:
                group["step"] = count
