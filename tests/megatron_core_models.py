"""Megatron-Core on CPU ranks, as an oracle: it writes checkpoints as Megatron-LM does, loads them,
and computes logits.

    python tests/megatron_core_models.py JOBS.json

JOBS.json is a list of jobs; each has `do` and a `folder`. `write` saves random weights of the
architecture in `args` (the names of Megatron-LM's arguments) over tp·pp·ep ranks in `format`
torch_dist or torch. `logits` loads a torch_dist folder into one rank, built from the arguments in
it, and saves its logits of `tokens` [b, s] to `out` (.npy). `step` loads a folder with its
optimizer, steps once, and saves both to `out`. `fields` saves to `out` (JSON) which fields of
TransformerConfig, of those whose names match the pattern `names`, change logits. It runs as a separate process, because Megatron-Core
expects a GPU, and its replacements here must not reach other tests.
"""

# ruff: noqa: E402 - its imports ask for torch.compile

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import MagicMock, patch

sys.path.remove(str(Path(__file__).parent))  # tests/kernels would hide the package
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F

# compiling takes seconds
torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.rerun_state_machine import RerunMode
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron5d.parity.local_ranks import run_ranks

torch.set_num_threads(1)
# Python 3.10 pickles args.exit_signal in this way
torch.serialization.add_safe_globals([(signal.SIGTERM, "signal.SIGTERM")])
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
torch.cuda.stream = lambda *_: contextlib.nullcontext()
torch.cuda.Stream = torch.cuda.current_stream = MagicMock()
torch.Tensor.record_stream = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
moe_utils.te_general_gemm = None


class _Generators:
    """Replaces the generators of the GPU."""

    def fork(self, *_):
        return contextlib.nullcontext()

    def add(self, *_):
        pass

    def is_initialized(self):
        return True


_generators = _Generators()
for _module in [module for name, module in sys.modules.items() if name.startswith("megatron.core")]:
    if hasattr(_module, "get_cuda_rng_tracker"):
        _module.get_cuda_rng_tracker = lambda *_, **__: _generators
parallel_random.initialize_rng_tracker = lambda *_, **__: None

_results: queue.Queue = queue.Queue()


def _write_here(transforms, use_msc, rank, buckets, results):
    """Writes files as Megatron-Core does, without forking processes."""
    finished, count, written = queue.Queue(), queue.Queue(), {}
    for i, bucket in enumerate(buckets):
        count.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, finished, count, False
        )
        number, written[i] = finished.get()
        assert number == i and not isinstance(written[i], Exception), written[i]
    results.put(written)


filesystem_async._get_write_results_queue = lambda: _results
filesystem_async._process_memory = lambda: 0
filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)

# arguments of Megatron-LM that are fields of Megatron-Core's configuration
_FIELDS = """
num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels add_bias_linear add_qkv_bias
normalization qk_layernorm rotary_interleaved moe_ffn_hidden_size moe_layer_freq moe_router_topk
moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
moe_shared_expert_intermediate_size moe_token_dispatcher_type
"""


def _model(args: Namespace, tp: int, pp: int, ep: int, **changed: object) -> GPTModel:
    """The GPT model that Megatron-LM builds from its arguments (core_transformer_config_from_args,
    gpt_builder), with some fields of TransformerConfig changed."""
    values = vars(args)
    fields = dict(
        **{name: values[name] for name in _FIELDS.split() if values.get(name) is not None},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        num_moe_experts=args.num_experts,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion and not args.swiglu,
        layernorm_epsilon=args.norm_epsilon,
        moe_router_load_balancing_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
    )
    config = TransformerConfig(**(fields | changed))
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    multiple = args.make_vocab_size_divisible_by * tp
    return GPTModel(
        config,
        spec,
        vocab_size=-(-args.vocab_size // multiple) * multiple,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def _start(tp: int, pp: int, ep: int) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
        )
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)


def _optimizer(model: GPTModel, keys: str, rank: int, world: int) -> dict:
    """An optimizer's state as Megatron-Core saves it, by parameter: weights, their halves and
    squares."""
    parameters, sharded = list(model.parameters()), model.sharded_state_dict()
    if keys == "buckets":
        key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
        return {"state": ShardedTensor.from_rank_offsets(key, torch.ones(64), (0, rank, world))}
    weights = [parameter.detach() for parameter in parameters]
    state = {
        "state": {
            i: {"fp32_param": w.clone(), "exp_avg": w / 2, "exp_avg_sq": w**2}
            for i, w in enumerate(weights)
        },
        "param_groups": [{"params": list(range(len(parameters))), "lr": 1e-3}],
    }
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(sharded, parameters))
    return state


def write(rank: int, world: int, job: dict) -> None:
    tp, pp, ep = job["tp"], job["pp"], job["ep"]
    _start(tp, pp, ep)
    torch.manual_seed(rank)
    args = Namespace(
        **job["args"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )
    model = _model(args, tp, pp, ep)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        torch.manual_seed(sum(name.encode()))  # the same on all ranks that share it
        if tensor.dim() == 1 and tensor.is_floating_point():  # norms, biases
            tensor.data.add_(0.3 * torch.randn_like(tensor))
        elif tensor.dim() > 1 and "router" not in name:
            tensor.data.mul_(4)  # so that logits differ
    folder = Path(job["folder"]) / f"iter_{7:07d}"
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    if job.get("classes"):  # objects that every checkpoint of Megatron-LM pickles
        args.attention_backend, args.model_type = AttnBackend.auto, ModelType.encoder_or_decoder
        args.params_dtype = torch.bfloat16
        args.exit_signal, args.save = signal.SIGTERM, Path("/checkpoints")
        common["rng_state"] = [
            {"np_rng_state": np.random.RandomState(1).get_state(), "rng": torch.get_rng_state()}
        ]
        common["rerun_state_machine"] = {
            "mode": RerunMode.DISABLED,
            "optimizer": OptimizerConfig(lr=0.1),
        }
    if job.get("optimizer"):
        common["optimizer"] = _optimizer(model, job["optimizer"], rank, world)
    if job["format"] == "torch_dist":
        folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        metadata = {"singleton_local_shards": True} if job.get("singletons") else None
        dist_checkpointing.save(
            {"model": model.sharded_state_dict(metadata=metadata), **common}, str(folder)
        )
    else:
        names = [f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"]
        names += [f"{parallel_state.get_pipeline_model_parallel_rank():03d}"] if pp > 1 else []
        names += [f"{parallel_state.get_expert_model_parallel_rank():03d}"] if ep > 1 else []
        rank_folder = folder / "_".join(names)
        rank_folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), **common}, rank_folder / "model_optim_rng.pt")
    (Path(job["folder"]) / "latest_checkpointed_iteration.txt").write_text("7")


def logits(rank: int, world: int, job: dict) -> None:
    _start(1, 1, 1)
    folder = Path(job["folder"])
    latest = (folder / "latest_checkpointed_iteration.txt").read_text()
    folder /= latest if latest == "release" else f"iter_{int(latest):07d}"
    args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    model = _model(args, 1, 1, 1).eval()
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"])
    result = _logits(model, job["tokens"])
    np.save(job["out"], result[..., : args.vocab_size].float().numpy())


def _logits(model: GPTModel, rows: list[list[int]]) -> torch.Tensor:
    tokens = torch.tensor(rows)
    s = tokens.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(s).expand_as(tokens), mask)


def fields(rank: int, world: int, job: dict) -> None:
    """Changes fields of TransformerConfig, one at a time, in a model of the same weights. Saves the
    names of those that change logits, and of those with which no model is built here."""
    _start(1, 1, 1)

    def result(**changed: object) -> torch.Tensor:
        torch.manual_seed(0)
        model = _model(Namespace(**job["args"]), 1, 1, 1, **changed).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            torch.manual_seed(sum(name.encode()))
            if tensor.is_floating_point():
                tensor.data.copy_(torch.randn_like(tensor) / 3 + (tensor.dim() == 1))
        return _logits(model, job["tokens"])

    expected = result()
    effective, unbuilt = [], []
    for field in dataclasses.fields(TransformerConfig):
        if not re.fullmatch(job["names"], field.name):
            continue
        kinds = {bool: [not field.default], int: [2], float: [0.5], str: [None]}
        values = kinds.get(type(field.default), [0.5, 2, True])
        if "Literal" in str(field.type):
            values += re.findall(r"'(\w+)'", str(field.type))
        differ = []
        for value in values:
            with contextlib.suppress(Exception):
                difference = (result(**{field.name: value}) - expected).abs().max()
                differ.append(bool(difference > 1e-4 * expected.abs().max()))
        effective += [field.name] if any(differ) else []
        unbuilt += [] if differ else [field.name]
    Path(job["out"]).write_text(json.dumps([effective, unbuilt]))


def _distributed_optimizer(model: GPTModel, job: dict):
    """The model over data-parallel ranks, and its optimizer, which shards its state over them."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    # tensors are made on the GPU, and must be of its types
    make_tensor, tensor_type = torch.tensor, torch.Tensor.type
    torch.tensor = lambda *values, device=None, **options: make_tensor(*values, **options)
    torch.Tensor.type = lambda self, *to: (
        tensor_type(self, *to) if to else tensor_type(self).replace("torch.", "torch.cuda.")
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=job["lr"],
        weight_decay=job["weight_decay"],
        clip_grad=0.0,
        use_distributed_optimizer=True,
        bf16=False,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    for chained in optimizer.chained_optimizers:
        # torch's Adam has no state before its first step
        chained._init_optimizer_states_with_dummy_values()
    return wrapped, optimizer


def step(rank: int, world: int, job: dict) -> None:
    """Loads a model and its distributed optimizer, steps with a tenth of each weight as its
    gradient, and saves both."""
    _start(job["tp"], 1, job["ep"])
    source = Path(job["folder"])
    source /= f"iter_{int((source / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    common = dist_checkpointing.load_common_state_dict(str(source))
    args, metadata = common["args"], common["content_metadata"]
    model = _model(args, job["tp"], 1, job["ep"])
    wrapped, optimizer = _distributed_optimizer(model, job)

    def state(loading: bool) -> dict:
        shards = model.sharded_state_dict(metadata=metadata)
        return {
            "model": shards,
            "optimizer": optimizer.sharded_state_dict(shards, loading, metadata=metadata),
        }

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    num_steps = torch.tensor(float(common["optimizer"]["optimizer"]["param_groups"][0]["step"]))
    with patch.object(
        DistributedOptimizer,
        "_set_main_param_and_optimizer_states",
        lambda self, to, values: set_states(self, to, {"step": num_steps, **values}),
    ):
        # torch's Adam counts steps by parameter, Apex's and TransformerEngine's, which Megatron-LM
        # expects, by group
        loaded = dist_checkpointing.load(state(True), str(source))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    for chained in optimizer.chained_optimizers:
        # with torch's Adam, Megatron-Core 0.16.1 loads one counter for all parameters
        for parameter_state in chained.optimizer.state.values():
            parameter_state["step"] = parameter_state["step"].clone()
    for parameter in model.parameters():
        parameter.main_grad.copy_(parameter.detach() / 10)
    # not optimizer.step, whose gradient norm needs a GPU
    assert not optimizer.prepare_grads() and optimizer.step_with_ready_grads()
    folder = Path(job["out"]) / f"iter_{common['iteration'] + 1:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    saved = {
        "args": args,
        "iteration": common["iteration"] + 1,
        "content_metadata": metadata,
        "checkpoint_version": 3.0,
    }
    dist_checkpointing.save(saved | state(False), str(folder))
    (Path(job["out"]) / "latest_checkpointed_iteration.txt").write_text(str(saved["iteration"]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if job["do"] == "write":
            run_ranks(write, job["tp"] * job["pp"] * job["ep"], job, timeout=100)
        elif job["do"] == "step":
            run_ranks(step, job["dp"] * job["tp"], job, timeout=100)
        else:
            function = {"logits": logits, "fields": fields}[job["do"]]
            run_ranks(function, 1, job, timeout=200)
