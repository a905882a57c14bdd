"""Inference with a trained model on any dp × tp layout: logits of given tokens, sampled tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.import_config import token_source
from megatron5d.checkpoint.hf.weights import folder_model, load_hf_weights
from megatron5d.checkpoint.load import load_weights, resolve_checkpoint
from megatron5d.config.checks import run_checks
from megatron5d.config.errors import ConfigError, in_options
from megatron5d.config.schema import Config, ParallelConfig, PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.phases.phase import MicroBatch
from megatron5d.phases.stage import Stage
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import Mesh, build_mesh
from megatron5d.topology.process import Process


@dataclass(frozen=True)
class Source:
    """Location of a model; exactly one of the two is set."""

    hf: Path | None = None  # a Hugging Face folder
    # a checkpoint of ours, or a directory of them, of which the newest complete one is used
    checkpoint: Path | None = None

    def config(
        self, world: int, *, tp: int = 1, sp: bool = False, dtype: str | None = None
    ) -> Config:
        """The configuration to run the model with.

        Args:
            world: number of ranks.
            tp, sp: the layout; dp takes all remaining ranks.
            dtype: of weights and arithmetic; None = that of the checkpoint, fp32 for a Hugging Face
                folder.

        Raises:
            ConfigError: the model does not fit the layout.
            ValueError: the folder does not exist or is incomplete.
        """
        if self.hf is not None:
            config = Config(model=folder_model(self.hf))
        else:
            config = saved_config(self.folder)
        tokenizer = token_source(config)
        config = Config(
            model=replace(
                config.model, from_hf=None, from_checkpoint=None, num_mtp_layers=0
            ),  # MTP is for training
            moe=replace(config.moe, capacity_factor=None),
            data=replace(config.data, tokenizer=None if tokenizer is None else str(tokenizer)),
            parallel=ParallelConfig(tp=tp, sp=sp and tp > 1),
            precision=PrecisionConfig(dtype=dtype or config.precision.dtype),
        )
        groups = {"model", "parallel", "precision"}
        faults = [
            fault
            for fault in run_checks(config, world)
            if {key.split(".")[0] for key in fault.knobs} <= groups
        ]
        if faults:
            option = {"parallel.tp": "--tp"}
            raise ConfigError(replace(f, fix=in_options(f.fix, option)) for f in faults)
        return config

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        assert self.checkpoint is not None
        return resolve_checkpoint(self.checkpoint, "--checkpoint")

    def load(self, model: GPT, config: Config) -> list[str]:
        """Loads the model's local parameters; returns notes for the user."""
        if self.hf is not None:
            return load_hf_weights(model.weights(), config.model, self.hf)
        load_weights(model.weights(), self.folder)
        return []


def open_predictor(source: Source, config: Config, process: Process) -> Predictor:
    """Builds a source's model on this rank and loads its weights.

    Comm: group creation; that of `load_tensors` for a checkpoint of ours.
    """
    sizes = resolve(process.world, tp=config.parallel.tp)
    mesh = build_mesh(
        sizes,
        process.rank,
        num_kv_heads=config.model.num_kv_heads,
        timeout_s=config.parallel.timeout_s,
    )
    model = GPT(config, mesh, process.device)
    for note in source.load(model, config):
        if process.rank == 0:
            print(note, file=sys.stderr)
    return Predictor(model, config, mesh, process.device)


class Predictor:
    """Forward passes without training; the ranks of one tp group work on the same tokens.

    Args:
        model: with loaded weights.
        config: of the model.
        mesh: of the model.
        device: of the model.
    """

    def __init__(self, model: GPT, config: Config, mesh: Mesh, device: torch.device) -> None:
        self.model, self.config, self.mesh, self.device = model, config, mesh, device
        self._trunk = Stage(model.phases[:-1])

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits at every position.

        Args:
            tokens: int64 `[b, s]`, the same on all ranks of a tp group.

        Returns:
            `[b, s, vocab_size]` in the model's dtype, the same on all ranks of a tp group.

        Comm: the layers' own on tp; all_gather tp of the logits.

        Raises:
            ValueError: more tokens than a learned position table has rows.
        """
        b, s = tokens.shape
        if self.config.model.position == "learned" and s > self.config.model.max_positions:
            raise ValueError(
                f"{s} tokens exceed model.max_positions = {self.config.model.max_positions}"
            )
        multiple = self.mesh["tp"].size if self.config.parallel.sp else 1
        tokens = F.pad(tokens.to(self.device), (0, -s % multiple))
        position = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        # Padding is a separate document, so that no token sees it, even if masks are not causal.
        documents = (position >= s).long() if s % multiple else None
        mask = torch.zeros(tokens.shape, device=self.device)
        batch = MicroBatch(tokens, tokens, mask, position.clamp(max=s - 1), documents)
        hidden = self._trunk.evaluate(None, batch)  # [s/tp, b, h]
        assert self.model.head is not None
        return self.model.head.logits(hidden).transpose(0, 1)[:, :s]

    def sample(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> Iterator[int]:
        """Continues a prompt token by token, each with a forward pass over all earlier ones.

        Args:
            prompt: at least one token.
            num_tokens: number of tokens to add.
            temperature: the logits are divided by it; 0 = the likeliest token.
            top_k: number of likeliest tokens to sample from; 0 = all.
            seed: the same on every rank.
            vocab_size: only ids below are sampled, if the model's vocabulary is larger than its
                tokenizer's.

        Yields:
            The new tokens, the same on every rank of a tp group.
        """
        if not prompt:
            raise ValueError("the prompt must have at least one token")
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(num_tokens):
            if self.config.model.position == "learned":
                tokens = tokens[-self.config.model.max_positions :]
            last = self.logits(torch.tensor([tokens]))[0, -1, :vocab_size]
            token = sample_token(last.double().cpu(), temperature, top_k, generator)
            tokens.append(token)
            yield token


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Samples a token from the distribution of logits `[vocab]`; arguments as in Predictor.sample.

    Raises:
        ValueError: a logit is NaN or infinite.
    """
    if not logits.isfinite().all():
        raise ValueError(
            "the model's logits are NaN or infinite, because its training diverged; use an earlier "
            "checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature  # at most 0, so that no temperature overflows
    if 0 < top_k < logits.numel():
        scaled = scaled.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(scaled, 0), 1, generator=generator))
