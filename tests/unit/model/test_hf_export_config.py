"""Our architectures as config.json of the family that computes them, and the families' limits."""

import json
from dataclasses import replace

import pytest

from megatron5d.checkpoint.hf.export_config import hf_config_from_model, hf_family
from megatron5d.checkpoint.hf.import_config import read_model_config
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import ModelConfig, RopeScaling

transformers = pytest.importorskip("transformers")

NO_SCALING = RopeScaling()
YARN = RopeScaling("yarn", 4.0, 128)
LATENT_YARN = RopeScaling("yarn", 4.0, 16, mscale_all_dim=0.8)
LLAMA = ModelConfig(
    name="m",
    num_kv_heads=2,
    ffn_hidden_size=48,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", 8.0, 64),
)
WINDOW = replace(LLAMA, attention_window=24)
QWEN2 = replace(LLAMA, qkv_bias=True)
QWEN3 = replace(LLAMA, qk_norm=True)
GEMMA3 = ModelConfig(
    name="m",
    num_layers=3,
    num_kv_heads=2,
    rope_theta=5e5,
    window_rope_theta=300.0,
    attention_window=24,
    window_layers=[0, 2],
    norm_zero_centered=True,
    activation="geglu_tanh",
    embedding_scale=8.0,
    block_norm="both",
    qk_norm=True,
    query_pre_attn_scalar=20,
    tie_embeddings=True,
)
GPT2 = ModelConfig(
    name="m",
    ffn_hidden_size=48,
    norm="layernorm",
    activation="gelu_tanh",
    position="learned",
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
NEOX = replace(
    GPT2,
    position="rope",
    rotary_percent=0.5,
    parallel_block="two_norms",
    rope_scaling=RopeScaling("linear", 2.0),
)
MIXTRAL = ModelConfig(name="m", num_kv_heads=2, ffn_hidden_size=48, num_experts=4, rope_theta=1e6)
QWEN3_MOE = replace(MIXTRAL, qk_norm=True, moe_ffn_hidden_size=24, norm_topk_prob=False)
V3 = ModelConfig(
    name="m",
    num_layers=3,
    norm_eps=1e-6,
    attention="mla",
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    rope_interleaved=True,
    num_experts=8,
    moe_ffn_hidden_size=16,
    shared_ffn_hidden_size=32,
    first_k_dense=1,
    router_score="sigmoid",
    routed_scaling_factor=2.5,
    num_groups=4,
    top_groups=2,
    group_score="top2_sum",
    router_bias=True,
)
V2 = replace(
    V3,
    router_score="softmax",
    router_bias=False,
    group_score="max",
    norm_topk_prob=False,
    q_lora_rank=None,
)
# family, and what the case is about -> the architecture
EXPORTED = {
    "llama": LLAMA,
    "llama, wide heads": replace(LLAMA, head_dim=32, tie_embeddings=True, rope_scaling=NO_SCALING),
    "llama, biases": replace(LLAMA, qkv_bias=True, attention_out_bias=True, mlp_bias=True),
    "llama, linear": replace(LLAMA, rope_scaling=RopeScaling("linear", 2.0)),
    "mistral, window": WINDOW,
    "mistral, wide heads": replace(WINDOW, head_dim=32, tie_embeddings=True),
    "qwen2": QWEN2,
    "qwen2, window, wide heads": replace(QWEN2, attention_window=24, head_dim=32),
    "qwen3": replace(QWEN3, head_dim=8, rope_scaling=replace(YARN, beta_fast=16.0)),
    "qwen3, window": replace(QWEN3, attention_window=24, rope_scaling=NO_SCALING),
    "gemma3_text": replace(GEMMA3, rope_scaling=RopeScaling("linear", 8.0)),
    "gemma3_text, windows everywhere, caps": replace(GEMMA3, window_layers=None, logit_softcap=5.0),
    "gpt2": GPT2,
    "gpt2, erf": replace(GPT2, activation="gelu", tie_embeddings=False),
    "gpt_neox": NEOX,
    "mixtral": MIXTRAL,
    "mixtral, window": replace(MIXTRAL, attention_window=9, tie_embeddings=True, head_dim=8),
    "qwen3_moe": replace(QWEN3_MOE, rope_scaling=YARN),
    "qwen3_moe, interval": replace(
        QWEN3_MOE, moe_interval=2, norm_topk_prob=True, attention_window=9
    ),
    "qwen3_moe, list": replace(QWEN3_MOE, moe_layers=[1], qkv_bias=True, attention_out_bias=True),
    "deepseek_v3": V3,
    "deepseek_v3, yarn": replace(V3, rope_scaling=replace(LATENT_YARN, mscale=0.9)),
    "deepseek_v3, factor": replace(V3, rope_scaling=replace(LATENT_YARN, attention_factor=1.3)),
    "deepseek_v3, half-split": replace(
        V3, rope_interleaved=False, norm_topk_prob=False, first_k_dense=0
    ),
    "deepseek_v2": V2,
    "deepseek_v2, greedy": replace(V2, num_groups=1, top_groups=1, q_lora_rank=12),
}
# settings that a reader does not look at
OMITTED = {
    "only 4": ("rope_parameters", "dtype"),
    "only 5": ("rope_theta", "rope_scaling", "torch_dtype"),
    "only num_experts": ("num_local_experts",),
}


@pytest.mark.parametrize("case", list(EXPORTED))
@pytest.mark.parametrize("reader", ["ours", *OMITTED, "transformers"])
def test_export_reads_back_as_the_same_model(case, reader, tmp_path):
    """Our file, each of its spellings alone, and the file that transformers makes of it."""
    model, family = EXPORTED[case], case.split(",")[0]
    config = hf_config_from_model(model, "bf16", {"eos_token_id": 3})
    assert hf_family(model) == config["model_type"] == family
    if reader != "only num_experts" or "num_experts" in config:
        for key in OMITTED.get(reader, ()):
            config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if reader == "transformers":
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert str(theirs.dtype).endswith("bfloat16") and theirs.eos_token_id == 3
        theirs.save_pretrained(tmp_path)
    read = replace(read_model_config(tmp_path), name="m")
    if model.num_groups == 1:  # then nothing chooses groups by their score
        read = replace(read, group_score=model.group_score)
    assert read == model


@pytest.mark.parametrize(
    ("model", "families", "change"),
    [
        *(
            (LLAMA, ("llama",), change)
            for change in (
                {"rope_interleaved": True},
                {"logit_softcap": 30.0},
                {"attention_softcap": 5.0},
                {"activation": "gelu"},
                {"attention_out_bias": True},
                {"attention_window": 9, "mlp_bias": True},
                {"attention_causal": False},
                {"norm": "layernorm"},
                {"position": "learned"},
                {"query_pre_attn_scalar": 20},
            )
        ),
        *(
            (QWEN3_MOE, ("mixtral", "qwen3_moe"), change)
            for change in (
                {"router_score": "sigmoid"},
                {"shared_ffn_hidden_size": 32},
                {"num_groups": 2},
                {"router_bias": True},
                {"logit_softcap": 3.0},
                {"attention_sinks": True},
                {"activation": "gelu"},
            )
        ),
        *(
            (V3, ("deepseek_v2", "deepseek_v3"), change)
            for change in (
                {"latent_norm_eps": 1e-5},
                {"shared_ffn_hidden_size": 24},
                {"shared_ffn_hidden_size": 0},
                {"moe_layers": [0, 2]},
                {"attention_out_bias": True},
                {"attention_window": 9},
                {"logit_softcap": 3.0},
            )
        ),
    ],
)
def test_export_is_refused_with_the_field(model, families, change):
    with pytest.raises(ValueError) as error:
        hf_config_from_model(replace(model, **change), "fp32")
    lines = str(error.value).splitlines()
    for family in families:
        line = next(line for line in lines if line.startswith(f"  {family} "))
        assert next(iter(change)) in line


def test_fields_without_effect_do_not_prevent_an_export():
    equal = {"query_pre_attn_scalar": LLAMA.head_dim, "window_layers": [0], "num_groups": 2}
    assert hf_family(replace(LLAMA, **equal)) == "llama"


def test_export_tells_the_two_deepseek_families_apart():
    with pytest.raises(ValueError) as error:
        hf_family(replace(V3, router_bias=False))
    v3, v2 = str(error.value).splitlines()[1:]
    assert "router_bias = False (only True)" in v3 and "router_bias" not in v2
    assert "router_score = 'sigmoid' (only 'softmax')" in v2
    assert "group_score = 'top2_sum' (only 'max')" in v2


def test_a_dense_model_is_not_exported_as_a_sparse_one_or_vice_versa():
    assert hf_family(replace(MIXTRAL, num_experts=0)) == "llama"
    message = r"(?s)mixtral cannot hold model\.moe_layers.*qwen3_moe cannot hold .*qk_norm"
    with pytest.raises(ValueError, match=message):
        hf_family(replace(MIXTRAL, moe_interval=2))


def test_a_dense_model_with_latents_is_exported(tmp_path):
    dense = replace(V3, num_experts=0, shared_ffn_hidden_size=0, router_bias=False)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_from_model(dense, "fp32")))
    read = read_model_config(tmp_path)
    assert moe_layers(read) == [] and read.attention == "mla"
    assert read.ffn_hidden_size == dense.ffn_hidden_size
