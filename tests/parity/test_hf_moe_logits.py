"""Our logits against transformers' own for its sparse families, alone and over expert- and tensor-parallel ranks."""

import pytest
import torch
from ranks import run_ranks
from transformers_fp64 import model_in_fp64

from megatron5d.config.schema import Config, ParallelConfig, PrecisionConfig
from megatron5d.model.gpt import Gpt
from megatron5d.model.hf import load_hf_weights
from megatron5d.model.hf_config import read_model_config
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.pipeline_parallel.stage import Stage
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTRAL = TINY | {"num_local_experts": 4}
QWEN3 = TINY | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = TINY | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
WIDE = LATENT | {"q_lora_rank": 24, "kv_lora_rank": 28}
V3 = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
CASES = {
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL),
    "mixtral, window, top 1": lambda: transformers.MixtralConfig(**MIXTRAL, sliding_window=5, num_experts_per_tok=1),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN3),
    "qwen3_moe, norm, bias": lambda: transformers.Qwen3MoeConfig(**QWEN3, norm_topk_prob=True, attention_bias=True),
    "qwen3_moe, dense below": lambda: transformers.Qwen3MoeConfig(**QWEN3, mlp_only_layers=[0]),
    "qwen3_moe, every second": lambda: transformers.Qwen3MoeConfig(
        **QWEN3, decoder_sparse_step=2, tie_word_embeddings=True
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**LATENT, rope_parameters=YARN),
    "deepseek_v2, groups": lambda: transformers.DeepseekV2Config(
        **WIDE, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v2, no query latent": lambda: transformers.DeepseekV2Config(**LATENT | {"q_lora_rank": None}),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT, **V3, rope_parameters=YARN),
    "deepseek_v3, half-split, two shared": lambda: transformers.DeepseekV3Config(
        **WIDE, **V3, rope_interleave=False, n_shared_experts=2, norm_topk_prob=False
    ),
    "deepseek_v3, one group, no query latent": lambda: transformers.DeepseekV3Config(
        **LATENT | {"q_lora_rank": None}, n_group=1, topk_group=1, rope_parameters=YARN | {"mscale": 0.0}
    ),
}
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}


@pytest.fixture(scope="module", params=list(CASES))
def folder(request, tmp_path_factory):
    """A folder of the case with every parameter and router bias random, in three or more files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[request.param]())
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
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


def ours(folder, ids, dtype, rank=0, world=1, **parallel):
    config = Config(
        model=read_model_config(folder), parallel=ParallelConfig(**parallel), precision=PrecisionConfig(dtype)
    )
    sizes = resolve(world, **{axis: size for axis, size in parallel.items() if axis != "sp"})
    mesh = build_mesh(sizes, rank, num_kv_heads=config.model.num_kv_heads)
    model = Gpt(config, mesh)
    assert load_hf_weights(model.weights(), config.model, folder) == []
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    batch = MicroBatch(ids, ids, torch.ones(ids.shape), positions, None)
    with torch.no_grad():
        hidden = Stage(model.phases[:-1]).evaluate(None, batch)
        return model.head.logits(hidden).transpose(0, 1).contiguous()


def assert_close(got, wanted, dtype):
    assert wanted.abs().max() > 1
    assert (got - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_one_process(folder, ids, dtype):
    wanted = theirs(folder, ids, dtype)
    assert_close(ours(folder, ids, dtype), wanted, dtype)


LAYOUTS = {
    "ep": (2, {"ep": 2}),
    "tp = etp, sp": (2, {"tp": 2, "sp": True, "etp": 2}),
    "ep over tp": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "ep, tp = etp, sp": (4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_expert_parallel(folder, ids, layout):
    world, parallel = LAYOUTS[layout]
    wanted = theirs(folder, ids, "fp64")
    for got in run_ranks(lambda rank, world: ours(folder, ids, "fp64", rank, world, **parallel), world):
        assert_close(got, wanted, "fp64")
