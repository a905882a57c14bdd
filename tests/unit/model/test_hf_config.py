"""config.json of transformers' own configuration classes, in both spellings, as our fields."""

import json
from copy import deepcopy
from dataclasses import asdict

import pytest
from hf_folders import save_config, tiny_config

from megatron5d.checkpoint.hf.families import ALIASES, DEFAULTS
from megatron5d.checkpoint.hf.import_config import (
    model_config_from_hf,
    model_fields,
    read_hf_config,
    read_model_config,
)
from megatron5d.config.convert import from_dict
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import RopeScaling

transformers = pytest.importorskip("transformers")

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


def assert_fields(fields, expected):
    assert {key: fields[key] for key in expected} == expected


def test_llama_in_both_spellings(tmp_path):
    config = tiny_config(
        "llama",
        rope_parameters=LLAMA3 | {"rope_theta": 5e5},
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=3e-5,
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
    assert from_dict({"model": fields}).model == read_model_config(tmp_path / "tiny-llama")
    assert model_config_from_hf(as_v4(tmp_path / "tiny-llama")) == fields


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_old_spellings_of_scaling(tmp_path, kind):
    """`type` for `rope_type`; without an original length it is max_position_embeddings, without a
    theta 10000."""
    rope = {"rope_parameters": "absent", "rope_scaling": {"type": kind, "factor": 2}}
    fields = model_config_from_hf(save_config(tiny_config("llama"), tmp_path, **rope))
    original = {} if kind == "linear" else {"original_max_positions": 128}
    expected = asdict(RopeScaling(kind, 2.0, **original))
    assert_fields(fields, {"rope_theta": 10000.0, "rope_scaling": expected})


def test_qwen3(tmp_path):
    rope = YARN | {"rope_theta": 1e6}
    config = tiny_config("qwen3", rope_parameters=rope, tie_word_embeddings=True)
    fields = model_config_from_hf(save_config(config, tmp_path))
    assert_fields(
        fields,
        {
            "head_dim": 16,
            "qk_norm": True,
            "tie_embeddings": True,
            "rope_scaling": asdict(RopeScaling("yarn", 4.0, 32)),
            "attention_window": None,
            "mlp_bias": False,
        },
    )
    assert model_config_from_hf(as_v4(tmp_path)) == fields


def test_qwen2(tmp_path):
    """Biases on q, k and v and nowhere else, whatever the file says: transformers does not read
    it."""
    save_config(tiny_config("qwen2", tie_word_embeddings=True), tmp_path, attention_bias=True)
    fields = model_config_from_hf(tmp_path)
    assert_fields(fields, {"qkv_bias": True, "attention_out_bias": False, "mlp_bias": False})
    assert_fields(fields, {"head_dim": 8, "qk_norm": False, "tie_embeddings": True})
    assert fields["attention_window"] is None and model_config_from_hf(as_v4(tmp_path)) == fields


def test_mistral(tmp_path):
    fields = model_config_from_hf(save_config(tiny_config("mistral", head_dim=12), tmp_path))
    assert_fields(fields, {"head_dim": 12, "attention_window": 4096, "qkv_bias": False})
    save_config(tiny_config("mistral"), tmp_path, sliding_window=None)
    assert model_config_from_hf(tmp_path)["attention_window"] is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_window(family, tmp_path):
    def saved(first, used=True, **changes):
        window = {"use_sliding_window": used, "sliding_window": 24, "max_window_layers": first}
        return save_config(tiny_config(family, **window), tmp_path, **changes)

    for first, used, window in ((0, True, 24), (3, True, None), (0, False, None)):
        assert model_config_from_hf(saved(first, used))["attention_window"] == window
    for changes in ({}, {"layer_types": "absent"}):
        fields = model_config_from_hf(saved(1, **changes))
        assert_fields(fields, {"attention_window": 24, "window_layers": [1, 2]})
    for kind, changes in (("chunked", {}), ("sliding", {"sliding_window": None})):
        saved(1, layer_types=[f"{kind}_attention"], **changes)
        with pytest.raises(ValueError, match="layer_types has"):
            model_config_from_hf(tmp_path)


def test_gpt2(tmp_path):
    config = tiny_config("gpt2")
    expected = {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "vocab_size": 61,
        "max_positions": 128,
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
    save_config(config, tmp_path, tie_word_embeddings="absent")
    assert_fields(model_config_from_hf(tmp_path), expected)
    save_config(config, tmp_path, n_inner=40, activation_function="gelu", tie_word_embeddings=False)
    changed = {"ffn_hidden_size": 40, "activation": "gelu", "tie_embeddings": False}
    assert_fields(model_config_from_hf(tmp_path), changed)


def test_mixtral(tmp_path):
    config = tiny_config("mixtral", num_experts_per_tok=3)
    fields = model_config_from_hf(save_config(config, tmp_path))
    expected = {
        "num_experts": 4,
        "top_k": 3,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": None,
        "attention_window": 7,
        "norm_topk_prob": True,
        "router_score": "softmax",
        "shared_ffn_hidden_size": 0,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "qk_norm": False,
        "moe_interval": 1,
        "moe_layers": None,
        "router_bias": False,
    }
    assert_fields(fields, expected)
    for spelling in (
        {"num_experts": 4, "num_local_experts": "absent"},
        {"rope_parameters": "absent", "rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": "absent"},
    ):
        assert model_config_from_hf(save_config(config, tmp_path, **spelling)) == fields


def test_qwen3_moe(tmp_path):
    config = tiny_config("qwen3_moe", norm_topk_prob=True)
    fields = model_config_from_hf(save_config(config, tmp_path))
    expected = {
        "num_experts": 4,
        "top_k": 3,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "attention_window": None,
        "norm_topk_prob": True,
        "rope_theta": 1e4,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "head_dim": 16,
    }
    assert_fields(fields, expected)
    for changes, changed in (
        ({"num_experts": 4, "num_local_experts": "absent"}, {}),
        ({"norm_topk_prob": "absent"}, {"norm_topk_prob": False}),
        ({"use_sliding_window": True, "sliding_window": 9}, {"attention_window": 9}),
        ({"sliding_window": 9}, {}),
    ):
        read = model_config_from_hf(save_config(config, tmp_path, **changes))
        assert read == fields | changed


def test_deepseek_v2_and_v3(tmp_path):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7}
    yarn["mscale"] = 1.0
    rope = yarn | {"rope_theta": 1e4, "rope_type": "yarn"}
    v2 = tiny_config("deepseek_v2", routed_scaling_factor=1.5)
    v3 = tiny_config("deepseek_v3", routed_scaling_factor=1.5, rope_parameters=rope)
    expected = {
        "attention": "mla",
        "num_heads": 4,
        "num_kv_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "num_experts": 8,
        "top_k": 3,
        "moe_ffn_hidden_size": 16,
        "shared_ffn_hidden_size": 32,
        "first_k_dense": 1,
        "routed_scaling_factor": 1.5,
        "num_groups": 4,
        "top_groups": 2,
        "rope_interleaved": True,
    }

    def read(config, **changes):
        return model_config_from_hf(save_config(config, tmp_path, **changes))

    softmax = {"router_score": "softmax", "norm_topk_prob": False, "group_score": "max"}
    assert_fields(read(v2), expected | softmax | {"router_bias": False})
    assert_fields(read(v2, topk_method="greedy"), {"num_groups": 1, "top_groups": 1})
    assert read(v2, q_lora_rank=None)["q_lora_rank"] is None

    scaling = asdict(RopeScaling("yarn", 4.0, 16, mscale=1.0, mscale_all_dim=0.7))
    sigmoid = {"router_score": "sigmoid", "norm_topk_prob": True, "group_score": "top2_sum"}
    fields = read(v3)
    assert_fields(fields, expected | sigmoid | {"router_bias": True, "rope_scaling": scaling})
    assert not read(v3, rope_interleave=False)["rope_interleaved"]
    released = {
        "rope_parameters": "absent",
        "rope_theta": 10000,
        "rope_scaling": yarn | {"type": "yarn"},
        "rope_interleave": "absent",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "ep_size": 1,
    }
    assert read(v3, **released) == fields
    dense = read_model_config(save_config(v3, tmp_path, first_k_dense_replace=3))
    assert moe_layers(dense) == [] and dense.num_experts == 0 and not dense.router_bias


@pytest.mark.parametrize("family", list(DEFAULTS))
def test_defaults_are_the_familys_own(family, tmp_path):
    """config.json without a setting means what transformers' own class fills in."""
    # its default is none, which computes nothing
    settings = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **settings}))
    short = model_config_from_hf(tmp_path)
    save_config(transformers.AutoConfig.for_model(family), tmp_path, **settings)
    assert short == model_config_from_hf(tmp_path)


# rotary settings in the spellings of transformers 4 and 5, and of GPT-NeoX and Gemma 3
ROTARY = [
    {"rope_theta": 5e5},
    {"rotary_emb_base": 5e5},
    {"rope_local_base_freq": 5e5},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.75}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
]
# transformers 5 no longer reads these, or the class of the family never did
UNREAD = {
    "gpt_neox": ("rope_theta", "partial_rotary_factor"),
    "hy_v3": ("n_routed_experts", "n_shared_experts", "routed_scaling_factor"),
    "qwen2_moe": ("num_local_experts",),
}


@pytest.mark.parametrize("family", list(DEFAULTS))
def test_no_default_competes_with_a_setting_of_the_file(family, tmp_path):
    """A setting alone in config.json means what it does in the file that transformers saves of it,
    which has every setting in the newest spelling."""
    always = {"model_type": family}
    if family == "deepseek_v2":
        always["num_experts_per_tok"] = 2
    config_class = type(transformers.AutoConfig.for_model(family))
    settings = DEFAULTS[family] | config_class().to_dict()
    settings |= {
        name: settings.get(key)
        for name, key in (ALIASES.get(family, {}) | config_class.attribute_map).items()
    }
    changes = [
        {key: 2 * value}
        for key, value in settings.items()
        if type(value) in (int, float) and not key.endswith(("token_id", "default_theta"))
    ]
    changes += ROTARY if family != "gpt2" else []

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        fields, unsupported = model_fields(read_hf_config(tmp_path))
        return "refused" if unsupported else fields

    num_compared = 0
    for change in changes:
        if set(change) & set(UNREAD.get(family, ())):
            continue
        if family == "gemma3_text" and isinstance(change.get("rope_parameters"), dict):
            continue  # nested by kind of layer
        try:
            saved = config_class.from_dict(always | deepcopy(change)).to_dict()
        except Exception:  # transformers refuses the value, as a class of its own
            continue
        assert read(always | change) == read(saved | always), change
        num_compared += 1
    assert num_compared > 5


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
    for case in cases:
        config = tiny_config("llama", rope_parameters=YARN | case | {"rope_theta": 1e4})
        model = read_model_config(save_config(config, tmp_path))
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
        assert attention_factor(model.rope_scaling) == pytest.approx(factor, rel=1e-12), case
        inverse = inverse_frequencies(model.head_dim, model.rope_theta, model.rope_scaling)
        assert inverse.tolist() == pytest.approx(frequencies.tolist(), rel=1e-6), case


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, **settings}}


# what the message names -> a family, and changes of its settings
REFUSED = {
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "'mistral3'": ("llama", {"model_type": "mistral3"}),
    "quantization_config": ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    "partial_rotary_factor": ("llama", rope("default", partial_rotary_factor=0.5)),
    "attention_bias": ("mistral", {"attention_bias": True}),
    "mlp_bias": ("qwen2", {"mlp_bias": True}),
    "makes longrope of it": ("phi3", {"rope_parameters": YARN}),
    "'dynamic'": ("llama", rope("dynamic", factor=2.0)),
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
    "low_freq_factor": ("llama", rope("llama3", factor=2.0)),
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
    "rope factor = 'two'": ("llama", rope("linear", factor="two")),
    "rope settings 'linear'": ("llama", {"rope_scaling": "linear"}),
    "num_experts and num_local_experts": ("qwen3_moe", {"num_experts": 3}),
    "decoder_sparse_step = 0": ("qwen3_moe", {"decoder_sparse_step": 0}),
    "attention_bias = True": ("mixtral", {"attention_bias": True}),
    "num_key_value_heads = 2": ("deepseek_v3", {"num_key_value_heads": 2}),
    "attention_bias = True: only False": ("deepseek_v3", {"attention_bias": True}),
    "scoring_func = 'softmax'": ("deepseek_v3", {"scoring_func": "softmax"}),
    "moe_layer_freq = 2": ("deepseek_v3", {"moe_layer_freq": 2}),
    "mscale_all_dim = 0.7 with rope_type = 'linear'": (
        "deepseek_v3",
        rope("linear", rope_theta=1e4, factor=4.0, mscale_all_dim=0.7),
    ),
    "quantization_config.weight_block_size = None": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8"}},
    ),
    "norm_topk_prob = True": ("deepseek_v2", {"norm_topk_prob": True}),
    "topk_method = 'noaux_tc'": ("deepseek_v2", {"topk_method": "noaux_tc"}),
    "num_experts_per_tok = None": ("deepseek_v2", {"num_experts_per_tok": None}),
}


@pytest.mark.parametrize("named", list(REFUSED))
def test_settings_that_change_the_function_are_refused_by_name(named, tmp_path):
    family, changes = REFUSED[named]
    save_config(transformers.AutoConfig.for_model(family), tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        model_config_from_hf(tmp_path)
    assert named in str(error.value) and str(tmp_path) in str(error.value)


def test_all_refusals_together(tmp_path):
    changes = {"activation_function": "relu", "scale_attn_weights": False}
    save_config(transformers.GPT2Config(), tmp_path, **changes)
    with pytest.raises(ValueError, match=r"(?s)activation_function.*scale_attn_weights"):
        model_config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type"', "Expecting"),
        ("[]", "it holds list"),
        ("[" * 200_000, "its brackets are nested"),
    ],
)
def test_a_damaged_file_is_named(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    message = rf"{tmp_path}/config.json is not a file of settings: {message}"
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("intermediate_size", None, "model.ffn_hidden_size"),
        ("num_key_value_heads", "x", "model.num_kv_heads"),
        ("rope_theta", [], "rope_theta"),
        ("model_type", [], "model_type"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(key, value, named, tmp_path):
    no_rope = {"rope_parameters": None} if key == "rope_theta" else {}
    save_config(transformers.LlamaConfig(), tmp_path, **no_rope, **{key: value})
    with pytest.raises(ValueError, match=named):
        read_model_config(tmp_path)
