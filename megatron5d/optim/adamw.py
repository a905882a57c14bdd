"""AdamW on the owned slices of the buckets: flat fp32 master weights and moments, one call for all.

On a GPU, and with optim.implementation=kernel, clipping, update and the rounding of masters to
weights are one pass over memory (kernels/multi_tensor.py); torch takes two, other implementations
three. Without master weights (precision.master_weights=false), bf16 weights are converted to fp32,
updated, and rounded back stochastically (sharded_state.py), one bucket at a time.

The arithmetic is that of torch's fused AdamW, or of NVIDIA apex's FusedAdam if that is installed
(not the package of this name on PyPI).
Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).
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
    """NVIDIA apex's FusedAdam; None without a GPU, without apex or without its compiled kernels."""
    if not torch.cuda.is_available():
        return None
    try:
        import amp_C
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam if hasattr(amp_C, "multi_tensor_adam") else None


class FusedAdamW:
    """The update of `torch.optim.AdamW(fused=True)`.

    torch's own class imports torch's compiler when it is constructed, which takes a second.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.param_groups = [{"lr": lr, **group} for group in param_groups]
        # per parameter: exp_avg, exp_avg_sq and step
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.betas, self.eps = betas, eps

    def step(self, scale: float | None = None) -> None:
        """Updates the parameters by their `.grad` times `scale`, which torch takes in float32."""
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"]]
            exp_avg, exp_avg_sq, steps = (
                [state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq", "step")
            )
            torch._foreach_add_(steps, 1)
            divisor = None if scale is None else torch.full_like(steps[0], 1 / scale)
            torch._fused_adamw_(
                group["params"],
                [parameter.grad for parameter in group["params"]],
                exp_avg,
                exp_avg_sq,
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


Owned = tuple[SliceState, Segment]
"""A segment and the state of its bucket."""
Columns = dict[str, list[Tensor]]
"""Tensors by name, one per segment."""


class AdamW(SliceOptimizer):
    """AdamW; the arguments are those of SliceOptimizer.

    It reads lr, betas, eps, weight_decay, decay_exclude, scales, implementation and offload of the
    config.

    Raises:
        ValueError: optim.implementation is apex, which is not installed or cannot be used.
    """

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, buckets: Sequence[Bucket], config: OptimConfig, rounding_seed: int | None = None
    ) -> None:
        super().__init__(buckets, config, rounding_seed)
        # (view of a master, view of its gradient)
        self._grads: list[tuple[Tensor, Tensor]] = []
        self._optimizer = self._build_optimizer()
        # torch's update scales gradients only in float32.
        is_fp32 = all(
            state.master.dtype == torch.float32 and not state.is_rounded for state in self.slices
        )
        self._clips_in_update = is_fp32 and isinstance(self._optimizer, FusedAdamW)
        # for the kernel: factor of the rate -> tensors and their decay
        self._tables: dict[float, tuple[TensorTable, Tensor]] | None = None
        if config.implementation == "kernel" or (
            config.implementation == "auto" and self._runs_kernel()
        ):
            self._tables = {
                lr_scale: self._table(owned, self._columns(owned))
                for lr_scale, owned in self._by_lr_scale(self.slices).items()
            }

    def _runs_kernel(self) -> bool:
        """Whether Triton's kernel can update everything; rounded weights are updated bucket by
        bucket instead."""
        states = [state for state in self.slices if state.segments]
        return bool(states) and all(
            not state.is_rounded
            and state.master.device.type != "cpu"
            and dispatch.runs_triton(state.master)
            for state in states
        )

    def _by_lr_scale(self, slices: Sequence[SliceState]) -> dict[float, list[Owned]]:
        """Segments by the factor of their learning rate."""
        groups: dict[float, list[Owned]] = {}
        for state in slices:
            for segment in state.segments:
                lr_scale = scale_of(segment.spec, self.config.lr_scale)
                groups.setdefault(lr_scale, []).append((state, segment))
        return dict(sorted(groups.items()))

    def _columns(self, owned: Sequence[Owned], wide: Tensor | None = None) -> Columns:
        """Views of masters, gradients and moments of some segments.

        Args:
            wide: takes the place of masters.
        """
        columns: Columns = {name: [] for name in ("master", "grad", *self.kinds)}
        for state, segment in owned:
            tensors = {"grad": state.grads, **state.moments}
            tensors["master"] = state.master if wide is None else wide
            for name, column in columns.items():
                column.append(tensors[name][slice(*segment.owned)])
        if wide is None and all(state.has_wider_master for state in self.slices):
            columns["copy"] = [
                state.bucket.weight_slice[slice(*segment.owned)] for state, segment in owned
            ]
        return columns

    def _table(self, owned: Sequence[Owned], columns: Columns) -> tuple[TensorTable, Tensor]:
        """The kernel's tensors, and their decay."""
        decay = [decay_of(segment.spec, self.config) for _, segment in owned]
        table, dtype = TensorTable(**columns), columns["master"][0].dtype
        return table, torch.tensor(decay, dtype=dtype).to(table.device, non_blocking=True)

    def _build_optimizer(self) -> Any:
        """Builds torch's update or apex's optimizer, with views of masters as its parameters and of
        moments as its state."""
        config = self.config
        owned = [
            (state, segment)
            for state in self.slices
            if not state.is_rounded
            for segment in state.segments
        ]
        columns = self._columns(owned)
        masters = columns["master"]
        self._grads = list(zip(masters, columns["grad"]))
        # (factor of the rate, decay) -> views of masters
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for view, (_, segment) in zip(masters, owned):
            factors = scale_of(segment.spec, config.lr_scale), decay_of(segment.spec, config)
            groups.setdefault(factors, []).append(view)
        param_groups: list[dict[str, Any]] = [
            {"params": views, "weight_decay": decay, "lr_scale": lr_scale}
            for (lr_scale, decay), views in groups.items()
        ]
        settings: dict[str, Any] = {"lr": config.lr, "eps": config.eps}
        settings["betas"] = tuple(config.betas)
        if apex := self._apex(masters):
            # apex counts the steps of a group, from its first step on
            counted = [{**group, "step": 0} for group in param_groups]
            optimizer: Any = apex(counted, adam_w_mode=True, **settings)
        else:
            optimizer = FusedAdamW(param_groups, **settings)
            columns["step"] = [
                torch.zeros((), dtype=torch.float32, device=view.device) for view in masters
            ]
        kinds = [kind for kind in (*self.kinds, "step") if kind in columns]
        for i, view in enumerate(masters):
            optimizer.state[view] = {kind: columns[kind][i] for kind in kinds}
        return optimizer

    def _apex(self, views: Sequence[Tensor]) -> type | None:
        """apex's optimizer, if it can and shall update these views of masters."""
        if self.config.implementation not in ("auto", "apex"):
            return None
        if self.config.offload:
            requirement = "optim.offload=false (got true)"
        elif any(view.dtype != torch.float32 for view in views):
            requirement = "precision.dtype=fp32 or bf16 (got fp64)"
        elif (apex := apex_adam()) is None:
            requirement = "a CUDA device and NVIDIA apex with amp_C.multi_tensor_adam"
        else:
            return apex if views else None  # apex takes no empty group
        if self.config.implementation == "apex":
            raise ValueError(
                f"optim.implementation=apex requires {requirement}; "
                "otherwise use optim.implementation=torch"
            )
        return None

    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates as SliceOptimizer does; the kernel scales gradients while it reads them."""
        if self._tables is not None:
            self.step_count += 1
            for lr_scale, (table, decay) in self._tables.items():
                factor = torch.full_like(decay[0], 1.0 if scale is None else scale)
                adamw_step(table, self._settings(lr * lr_scale), factor, decay)
            return
        self._prepare_grads(None if self._clips_in_update else scale)
        self._attach_grads()
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self._clips_in_update:
            self._optimizer.step(scale)
        else:
            self._optimizer.step()
        self.step_count += 1
        self._detach_grads()
        # Buckets without masters, one at a time because of the wide copy.
        for state in self.slices:
            if state.is_rounded:
                for lr_scale, owned in self._by_lr_scale([state]).items():
                    self._update_rounded(state, owned, lr * lr_scale)
        self.masters_to_weights()

    def _settings(self, lr: float) -> AdamWSettings:
        beta1, beta2 = self.config.betas
        return AdamWSettings(lr, beta1, beta2, self.config.eps, self.step_count)

    def _attach_grads(self) -> None:
        """Sets `.grad` of the masters, to a copy if the gradients have a narrower dtype."""
        for view, grad in self._grads:
            view.grad = grad if grad.dtype == view.dtype else grad.to(view.dtype)

    def _detach_grads(self) -> None:
        for view, _ in self._grads:
            view.grad = None

    def allocate_temporaries(self) -> None:
        if self._tables is None:
            self._attach_grads()
            self._detach_grads()
        for state in self.slices:
            if state.is_rounded:
                state.bucket.weight_slice.float()

    def _update_rounded(self, state: SliceState, owned: Sequence[Owned], lr: float) -> None:
        """Updates bf16 weights without masters, through a temporary fp32 copy of the bucket's
        slice."""
        assert self.rounding_seed is not None
        weights = state.bucket.weight_slice
        columns = self._columns(owned, weights.float())
        table, decay = self._table(owned, columns)
        factor = torch.ones((), device=weights.device)  # the gradients are clipped already
        adamw_step(table, self._settings(lr), factor, decay)
        for (_, segment), wide in zip(owned, columns["master"]):
            narrow = weights[slice(*segment.owned)]
            store_rounded(wide, narrow, segment, self.rounding_seed, self.step_count)

    def set_step_count(self, count: int) -> None:
        """Sets the number of updates in the moments, for the bias correction, after a resume."""
        super().set_step_count(count)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in self._optimizer.param_groups:
            if "step" in group:
                group["step"] = count
