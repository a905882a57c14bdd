"""config.json of transformers' own configuration classes, in both spellings, to our fields and
back."""

import json
from dataclasses import asdict, replace

import pytest
from hf_folders import save_config

from megatron5d.checkpoint.hf.export_config import hf_config_from_model, hf_family
from megatron5d.checkpoint.hf.families import DEFAULTS
from megatron5d.checkpoint.hf.import_config import model_config_from_hf, read_model_config
from megatron5d.config.convert import from_dict
from megatron5d.config.schema import ModelConfig, RopeScaling

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def as_v4(folder):
    """The same file as transformers 4 wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))
    return folder


def test_llama_both_spellings(tmp_path):
    rope = LLAMA3 | {"rope_theta": 5e5}
    config = transformers.LlamaConfig(
        **TINY, rope_parameters=rope, attention_bias=True, mlp_bias=True, rms_norm_eps=3e-5
    )
    fields = model_config_from_hf(save_config(config, tmp_path / "tiny-llama"))
    assert fields == {
        "name": "tiny-llama",
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_positions": 128,
        "norm": "rmsnorm",
        "norm_eps": 3e-5,
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": 5e5,
        "rope_interleaved": False,
        "rope_scaling": asdict(RopeScaling("llama3", 8.0, 16, 1.0, 4.0)),
        "qk_norm": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": False,
        "attention_window": None,
        "init_std": 0.02,
        "rotary_percent": 1.0,
        "qk_norm_all_heads": False,
        "block_norm": "pre",
    }
    assert read_model_config(tmp_path / "tiny-llama").rope_scaling.factor == 8.0
    assert from_dict({"model": fields}).model == read_model_config(tmp_path / "tiny-llama")
    assert model_config_from_hf(as_v4(tmp_path / "tiny-llama")) == fields


def test_old_spellings_of_scaling(tmp_path):
    """`type` for `rope_type`, no original length (then it is max_position_embeddings), no theta
    (then 10000)."""
    save_config(
        transformers.LlamaConfig(**TINY),
        tmp_path,
        rope_parameters="absent",
        rope_scaling={"type": "linear", "factor": 2},
    )
    fields = model_config_from_hf(tmp_path)
    assert fields["rope_theta"] == 10000.0
    assert (fields["rope_scaling"]["type"], fields["rope_scaling"]["factor"]) == ("linear", 2.0)
    save_config(
        transformers.LlamaConfig(**TINY),
        tmp_path,
        rope_parameters="absent",
        rope_scaling={"type": "yarn", "factor": 2},
    )
    assert model_config_from_hf(tmp_path)["rope_scaling"]["original_max_positions"] == 128


def test_qwen3(tmp_path):
    config = transformers.Qwen3Config(
        **TINY, head_dim=16, rope_parameters=YARN | {"rope_theta": 1e6}, tie_word_embeddings=True
    )
    fields = model_config_from_hf(save_config(config, tmp_path))
    assert (fields["head_dim"], fields["qk_norm"], fields["tie_embeddings"]) == (16, True, True)
    assert fields["rope_scaling"] == asdict(RopeScaling("yarn", 4.0, 32))
    assert fields["attention_window"] is None and not fields["mlp_bias"]
    assert model_config_from_hf(as_v4(tmp_path)) == fields


def test_qwen2(tmp_path):
    """Biases on q, k and v and nowhere else, whatever the file says: transformers does not ask
    it."""
    save_config(
        transformers.Qwen2Config(**TINY, tie_word_embeddings=True), tmp_path, attention_bias=True
    )
    fields = model_config_from_hf(tmp_path)
    biases = {"qkv_bias": True, "attention_out_bias": False, "mlp_bias": False}
    assert {key: fields[key] for key in biases} == biases
    assert (fields["head_dim"], fields["qk_norm"], fields["tie_embeddings"]) == (8, False, True)
    assert fields["attention_window"] is None and model_config_from_hf(as_v4(tmp_path)) == fields


def test_mistral(tmp_path):
    fields = model_config_from_hf(
        save_config(transformers.MistralConfig(**TINY, head_dim=12), tmp_path)
    )
    assert (fields["head_dim"], fields["attention_window"], fields["qkv_bias"]) == (12, 4096, False)
    save_config(transformers.MistralConfig(**TINY), tmp_path, sliding_window=None)
    assert model_config_from_hf(tmp_path)["attention_window"] is None


@pytest.mark.parametrize("family", [transformers.Qwen2Config, transformers.Qwen3Config])
def test_qwens_window(family, tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 24}
    save_config(family(**TINY, **sliding, max_window_layers=0), tmp_path)
    assert model_config_from_hf(tmp_path)["attention_window"] == 24
    save_config(family(**TINY, **sliding, max_window_layers=3), tmp_path)
    assert model_config_from_hf(tmp_path)["attention_window"] is None
    save_config(
        family(**TINY, use_sliding_window=False, sliding_window=24, max_window_layers=0), tmp_path
    )
    assert model_config_from_hf(tmp_path)["attention_window"] is None
    for changes in ({}, {"layer_types": "absent"}):
        save_config(family(**TINY, **sliding, max_window_layers=1), tmp_path, **changes)
        fields = model_config_from_hf(tmp_path)
        assert (fields["attention_window"], fields["window_layers"]) == (
            24,
            list(range(1, TINY["num_hidden_layers"])),
        )
    for changes in (
        {"layer_types": ["chunked_attention"]},
        {"layer_types": ["sliding_attention"], "sliding_window": None},
    ):
        save_config(family(**TINY, **sliding, max_window_layers=1), tmp_path, **changes)
        with pytest.raises(ValueError, match="layer_types has"):
            model_config_from_hf(tmp_path)


def test_gpt2(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=20, vocab_size=61)
    fields = model_config_from_hf(save_config(config, tmp_path, tie_word_embeddings="absent"))
    expected = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "vocab_size": 61,
        "max_positions": 20,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "qk_norm": False,
    }
    assert {key: fields[key] for key in expected} == expected
    save_config(config, tmp_path, n_inner=40, activation_function="gelu", tie_word_embeddings=False)
    fields = model_config_from_hf(tmp_path)
    assert (fields["ffn_hidden_size"], fields["activation"], fields["tie_embeddings"]) == (
        40,
        "gelu",
        False,
    )


@pytest.mark.parametrize("family", list(DEFAULTS))
def test_defaults_are_the_familys_own(family, tmp_path):
    """What config.json leaves out is what transformers' own class fills in."""
    # its default is none, which computes nothing
    given = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **given}))
    short = model_config_from_hf(tmp_path)
    save_config(transformers.AutoConfig.for_model(family), tmp_path, **given)
    assert short == model_config_from_hf(tmp_path)


def test_yarn_attention_factor_as_transformers(tmp_path):
    """mscale counts only together with mscale_all_dim; an explicit attention_factor wins."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron5d.model.rope import attention_factor, inverse_frequencies

    cases = [
        {},
        {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"attention_factor": 1.7},
        {"factor": None, "original_max_position_embeddings": 16},
        {"beta_fast": 8.0, "beta_slow": 0.5},
        {"truncate": False},
    ]
    for extra in cases:
        config = transformers.LlamaConfig(
            **TINY, rope_parameters=YARN | extra | {"rope_theta": 1e4}
        )
        ours = read_model_config(save_config(config, tmp_path))
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
        assert attention_factor(ours.rope_scaling) == pytest.approx(factor, rel=1e-12), extra
        inverse = inverse_frequencies(ours.head_dim, ours.rope_theta, ours.rope_scaling)
        assert inverse.tolist() == pytest.approx(frequencies.tolist(), rel=1e-6), extra


REFUSED = {
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "'mistral3'": ("llama", {"model_type": "mistral3"}),
    "quantization_config": ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    "partial_rotary_factor": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "attention_bias": ("mistral", {"attention_bias": True}),
    "mlp_bias": ("qwen2", {"mlp_bias": True}),
    "makes longrope of it": ("phi3", {"rope_parameters": YARN}),
    "'dynamic'": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "swiglu_limit": ("gpt_oss", {"swiglu_limit": 5.0}),
    "swiglu_alpha": ("gpt_oss", {"swiglu_alpha": 1.0}),
    "hidden_activation": ("gemma2", {"hidden_activation": "gelu"}),
    "attn_logit_softcapping": ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    "of sliding_attention": ("gemma3_text", {"rope_parameters": {"sliding_attention": YARN}}),
    "only full_attention's and": ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}),
    "first_k_dense_replace": ("glm4_moe_lite", {"first_k_dense_replace": 2}),
    "layer_types has 1 layers, num_hidden_layers = 32": (
        "qwen3",
        {"layer_types": ["full_attention"]},
    ),
    "mlp_layer_types = 5": ("hy_v3", {"mlp_layer_types": 5}),
    "use_bidirectional_attention": ("gemma", {"use_bidirectional_attention": True}),
    "'mxfp4'": ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}),
    "low_freq_factor": ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}),
    "disagree": ("llama", {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}),
    "rope_theta is given as": ("llama", {"rope_theta": 7.0}),
    "differ between": (
        "qwen3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": LLAMA3}},
    ),
    "activation_function": ("gpt2", {"activation_function": "relu"}),
    "scale_attn_weights": ("gpt2", {"scale_attn_weights": False}),
    "scale_attn_by_inverse_layer_idx": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "add_cross_attention": ("gpt2", {"add_cross_attention": True}),
    "n_head = 5": ("gpt2", {"n_head": 5}),
    "num_attention_heads = 0": ("llama", {"num_attention_heads": 0}),
    "vocab_size = 'x'": ("llama", {"vocab_size": "x"}),
    "rms_norm_eps = '1e-5'": ("llama", {"rms_norm_eps": "1e-5"}),
    "rope factor = 'two'": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}),
    "rope settings 'linear'": ("llama", {"rope_scaling": "linear"}),
}


@pytest.mark.parametrize("named", list(REFUSED))
def test_what_changes_the_function_is_refused_by_name(named, tmp_path):
    family, changes = REFUSED[named]
    save_config(transformers.AutoConfig.for_model(family), tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        model_config_from_hf(tmp_path)
    assert named in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type"', "Expecting"),
        ("[]", "it holds list"),
        ("[" * 200_000, "its brackets are nested"),
    ],
)
def test_a_damaged_file_is_named(text, said, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/config.json is not a file of settings: {said}"
    ):
        model_config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", None),
        ("num_key_value_heads", "x"),
        ("rope_theta", []),
        ("model_type", []),
    ],
)
def test_a_value_of_another_kind_is_named(key, value, tmp_path):
    config = transformers.AutoConfig.for_model("llama").to_dict()
    rope = {"rope_parameters": None} if key == "rope_theta" else {}
    (tmp_path / "config.json").write_text(json.dumps(config | rope | {key: value}))
    theirs = {
        "intermediate_size": "model.ffn_hidden_size",
        "num_key_value_heads": "model.num_kv_heads",
    }
    with pytest.raises(ValueError, match=theirs.get(key, key)):
        read_model_config(tmp_path)


def test_all_refusals_together(tmp_path):
    save_config(
        transformers.GPT2Config(), tmp_path, activation_function="relu", scale_attn_weights=False
    )
    with pytest.raises(ValueError, match=r"(?s)activation_function.*scale_attn_weights"):
        model_config_from_hf(tmp_path)


LLAMA_LIKE = ModelConfig(
    name="m",
    num_kv_heads=2,
    ffn_hidden_size=48,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", 8.0, 64),
)
GEMMA3_LIKE = ModelConfig(
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
GPT2_LIKE = replace(
    LLAMA_LIKE,
    norm="layernorm",
    activation="gelu_tanh",
    position="learned",
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    num_kv_heads=4,
    tie_embeddings=True,
    rope_theta=1e4,
    rope_scaling=RopeScaling(),
)
EXPORTED = {
    "llama": LLAMA_LIKE,
    "llama, wide heads": replace(
        LLAMA_LIKE, head_dim=32, tie_embeddings=True, rope_scaling=RopeScaling()
    ),
    "llama, biases": replace(LLAMA_LIKE, qkv_bias=True, attention_out_bias=True, mlp_bias=True),
    "llama, linear": replace(LLAMA_LIKE, rope_scaling=RopeScaling("linear", 2.0)),
    "mistral, window": replace(LLAMA_LIKE, attention_window=24),
    "mistral, wide heads": replace(
        LLAMA_LIKE, attention_window=24, head_dim=32, tie_embeddings=True
    ),
    "qwen2": replace(LLAMA_LIKE, qkv_bias=True),
    "qwen2, window, wide heads": replace(
        LLAMA_LIKE, qkv_bias=True, attention_window=24, head_dim=32
    ),
    "qwen3": replace(
        LLAMA_LIKE,
        qk_norm=True,
        head_dim=8,
        rope_scaling=RopeScaling("yarn", 4.0, 128, beta_fast=16.0),
    ),
    "qwen3, window": replace(
        LLAMA_LIKE, qk_norm=True, attention_window=24, rope_scaling=RopeScaling()
    ),
    "gemma3_text": replace(GEMMA3_LIKE, rope_scaling=RopeScaling("linear", 8.0)),
    "gemma3_text, windows everywhere, caps": replace(
        GEMMA3_LIKE, window_layers=None, logit_softcap=5.0
    ),
    "gpt2": GPT2_LIKE,
    "gpt2, erf": replace(GPT2_LIKE, activation="gelu", tie_embeddings=False),
}


@pytest.mark.parametrize("case", list(EXPORTED))
@pytest.mark.parametrize("reader", ["ours", "only 4", "only 5", "transformers"])
def test_export_reads_back_as_the_same_model(case, reader, tmp_path):
    """Our file, each of its two spellings alone, and the file that transformers makes of it."""
    model, family = EXPORTED[case], case.split(",")[0]
    config = hf_config_from_model(model, "bf16", {"eos_token_id": 3})
    assert hf_family(model) == config["model_type"] == family
    other = {
        "only 4": ("rope_parameters", "dtype"),
        "only 5": ("rope_theta", "rope_scaling", "torch_dtype"),
    }
    config = {key: value for key, value in config.items() if key not in other.get(reader, ())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if reader == "transformers":
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert str(theirs.dtype).endswith("bfloat16") and theirs.eos_token_id == 3
        theirs.save_pretrained(tmp_path)
    assert replace(read_model_config(tmp_path), name="m") == model


@pytest.mark.parametrize(
    "change",
    [
        {"rope_interleaved": True},
        {"logit_softcap": 30.0},
        {"attention_softcap": 5.0},
        {"activation": "gelu"},
        {"attention_out_bias": True},
        {"attention_window": 9, "mlp_bias": True},
        {"attention_causal": False},
        {"norm": "layernorm"},
        {"position": "learned"},
    ],
)
def test_export_is_refused_with_the_field(change):
    with pytest.raises(ValueError) as error:
        hf_config_from_model(replace(LLAMA_LIKE, **change), "fp32")
    field = next(iter(change))
    llama_line = next(line for line in str(error.value).splitlines() if line.startswith("  llama"))
    assert field in llama_line
