"""Our logits against transformers' own, from folders that transformers wrote, alone and over tensor-parallel ranks."""

import pytest
import torch
from ranks import run_ranks
from transformers_fp64 import model_in_fp64

from megatron5d.config.schema import Config, ParallelConfig, PrecisionConfig
from megatron5d.model.gpt import Gpt
from megatron5d.model.hf import load_hf_weights
from megatron5d.model.hf_config import read_model_config
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 4096,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}
LLAMA3 = {
    "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
CASES = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "llama, biases": lambda: transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama, MQA, wide heads": lambda: transformers.LlamaConfig(**TINY | {"num_key_value_heads": 1}, head_dim=12),
    "llama, llama3": lambda: transformers.LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "llama, yarn": lambda: transformers.LlamaConfig(**TINY, rope_parameters=YARN),
    "llama, linear": lambda: transformers.LlamaConfig(**TINY, rope_parameters=LINEAR),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "qwen3, yarn, tied": lambda: transformers.Qwen3Config(
        **TINY, head_dim=16, rope_parameters=YARN, tie_word_embeddings=True
    ),
    "qwen3, biases, window": lambda: transformers.Qwen3Config(**TINY, head_dim=16, attention_bias=True, **SLIDING),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2, erf, untied": lambda: transformers.GPT2Config(
        **GPT2, activation_function="gelu", tie_word_embeddings=False, n_inner=40
    ),
}
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}


@pytest.fixture(scope="module", params=list(CASES))
def folder(request, tmp_path_factory):
    """A folder of the case with every parameter random, in three or more files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[request.param]())
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
    path = tmp_path_factory.mktemp("hf")
    model.save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))


def theirs(folder, ids, dtype):
    with torch.no_grad():
        if dtype == "fp64":
            with model_in_fp64(folder) as model:
                return model.eval()(ids).logits
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits


def ours(folder, ids, dtype, rank=0, world=1, sp=False):
    config = Config(
        model=read_model_config(folder), parallel=ParallelConfig(tp=world, sp=sp), precision=PrecisionConfig(dtype)
    )
    mesh = build_mesh(resolve(world, tp=world), rank, num_kv_heads=config.model.num_kv_heads)
    model = Gpt(config, mesh)
    assert load_hf_weights(model.parameters(), config.model, folder) == []
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    batch = MicroBatch(ids, ids, torch.ones(ids.shape), positions, None)
    x = None
    with torch.no_grad():
        for phase in model.phases[:-1]:
            x = phase(x, batch, None)
        return model.head.logits(x).transpose(0, 1).contiguous()


def assert_close(got, wanted, dtype):
    assert wanted.abs().max() > 1
    assert (got - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_one_process(folder, ids, dtype):
    wanted = theirs(folder, ids, dtype)
    assert_close(ours(folder, ids, dtype), wanted, dtype)


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (4, True)])
def test_tensor_parallel(folder, ids, tp, sp):
    wanted = theirs(folder, ids, "fp64")
    for got in run_ranks(lambda rank, world: ours(folder, ids, "fp64", rank, world, sp), tp):
        assert_close(got, wanted, "fp64")


def test_far_positions_in_fp32(folder):
    """Rounding of the angles grows with the position: only tables rounded as transformers rounds them agree here."""
    model = read_model_config(folder)
    ids = torch.randint(0, 61, (1, min(3000, model.max_positions)), generator=torch.Generator().manual_seed(2))
    assert_close(ours(folder, ids, "fp32"), theirs(folder, ids, "fp32"), "fp32")
