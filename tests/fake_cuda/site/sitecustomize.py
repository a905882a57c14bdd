"""Plausible numbers where the program reads what kernels would have computed.

Python imports this file when it starts (`../run.py`). The rest of the program is unchanged.
"""

import ctypes
import importlib.abc
import importlib.util
import json
import os
import sys
from collections import Counter


def lively_steps(step):
    """Gives each step targets and a finite norm, and lets no rank stop."""
    agree = step.Trainer._agree
    step.round = lambda x: 1000
    step.math = type("Roots", (), {"sqrt": staticmethod(lambda x: 1.0), "nan": 1.0})

    def agreed(self, *args):
        return step.replace(agree(self, *args), stop=False, skipped=None)

    step.Trainer._agree = agreed
    accumulate, steps = step.Trainer.accumulate, Counter()

    def accumulated(self, *args):
        """Reports waits of the host, and kernels compiled after the first step."""
        from triton import knobs

        steps[self] += 1
        if steps[self] == 2:
            knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: report_late(fn.name)
        waits = ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"]).fake_cuda_host_waits
        before = waits()
        sums = accumulate(self, *args)
        print(
            f"step {steps[self]}: the host waited {waits() - before} times in forward and backward",
            file=sys.stderr,
        )
        return sums

    step.Trainer.accumulate = accumulated


def report_late(kernel):
    print(f"FAKE CUDA FAULT: {kernel} is compiled after the first step", file=sys.stderr)


def even_routing(dispatch):
    """Gives every expert the same number of tokens from every rank."""
    import torch

    state = dispatch.Dispatcher._counted_state

    def even_state(self, sent_order, counts):
        if counts.is_cuda:
            tokens, experts = sent_order.token_of_row.numel(), counts.shape[1]
            row = [tokens // experts + (expert < tokens % experts) for expert in range(experts)]
            counts = torch.tensor([row] * counts.shape[0]).to(counts.device)
        return state(self, sent_order, counts)

    def enough(self, exceeded):
        self.is_planned = False
        return False

    dispatch.Dispatcher._counted_state, dispatch.SendCapacity.finish_step = even_state, enough


def no_layer_figures(balance):
    balance.Balancer.layer_figures = lambda self, *args: {}


def objects_through_the_store(all_ranks):
    """Sends objects through the store: tensors on fake GPUs would contain no lengths."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    calls = Counter()

    def key_of(kind, group):
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        calls[kind, ranks] += 1
        return f"fake_cuda/{kind}/{ranks}/{calls[kind, ranks]}", ranks

    def broadcast_bytes(message, source):
        key, _ = key_of("broadcast", None)
        if dist.get_rank() == source:
            _get_default_store().set(key, message)
        return _get_default_store().get(key)

    def gather_json(value, group):
        key, ranks = key_of("gather", group)
        _get_default_store().set(f"{key}/{dist.get_rank()}", json.dumps(value))
        return [json.loads(_get_default_store().get(f"{key}/{rank}")) for rank in ranks]

    all_ranks.broadcast_bytes, all_ranks.gather_json = broadcast_bytes, gather_json


def no_cudnn(cudnn):
    """Disables cuDNN, which inspects the driver and does not start."""
    cudnn.missing = lambda: "cuDNN does not start on a GPU that computes nothing"


AFTER_IMPORT = {
    "megatron5d.kernels.providers.cudnn": no_cudnn,
    "megatron5d.train.step": lively_steps,
    "megatron5d.expert_parallel.dispatcher": even_routing,
    "megatron5d.expert_parallel.load_balancing": no_layer_figures,
    "megatron5d.topology.all_ranks": objects_through_the_store,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in AFTER_IMPORT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
