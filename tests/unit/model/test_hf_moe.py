"""Folders of transformers' sparse families: settings in every spelling, tensors there and back, and
what is refused."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from hf_folders import QWEN3, TINY, random_model, save_config
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.import_config import read_model_config
from megatron5d.checkpoint.hf.tensor_table import hf_entries
from megatron5d.checkpoint.hf.weights import load_hf_weights
from megatron5d.config.derived import moe_layers
from megatron5d.config.load import load_config
from megatron5d.topology.shard_spec import ShardSpec, state_of, unsharded

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4, sliding_window=7),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **QWEN3, mlp_only_layers=[1], attention_bias=True
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    random_model(FAMILIES[request.param]()).save_pretrained(path)
    return path


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dense", [[], [0], [1, 4], [0, 1, 2, 3, 4]])
def test_which_layers_are_sparse(tmp_path, step, dense):
    """As the modules that transformers builds, and the same again after our export."""
    config = transformers.Qwen3MoeConfig(
        **QWEN3 | {"num_hidden_layers": 5}, decoder_sparse_step=step, mlp_only_layers=dense
    )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config).model.layers
    sparse = [i for i, layer in enumerate(built) if hasattr(layer.mlp, "experts")]
    model = read_model_config(save_config(config, tmp_path))
    assert moe_layers(model) == sparse
    if sparse:
        (tmp_path / "config.json").write_text(json.dumps(hf_config_from_model(model, "fp32")))
        assert moe_layers(read_model_config(tmp_path)) == sparse


def test_missing_and_unexpected_experts_are_told(folder, tmp_path):
    """An expert less than the model and a layer more."""
    tensors = load_file(folder / "model.safetensors")
    gone = [name for name in tensors if ".experts.3." in name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {name: t for name, t in tensors.items() if name not in gone}
        | {"model.layers.7.x": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError) as error:
        load_hf_weights([], read_model_config(tmp_path), tmp_path)
    message = str(error.value)
    assert gone and all(f"\n    {name}\n" in message for name in gone)
    assert (
        message.index(f"{len(gone)} missing")
        < message.index("1 unexpected")
        < message.index("model.layers.7.x")
    )


# Settings of the releases' own config.json, as on huggingface.co under the names in the files of
# conf/model.
RELEASED = {
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_235b_a22b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 94,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "dots_llm1": {
        "model_type": "dots1",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    },
    "seed_oss_36b": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "default"},
        "torch_dtype": "bfloat16",
        "vocab_size": 155136,
    },
}
RELEASED["mixtral_8x22b"] = RELEASED["mixtral_8x7b"] | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}


@pytest.mark.parametrize("name", list(RELEASED))
def test_our_file_is_the_release(name, tmp_path):
    """And the tensors that we read are as many as transformers makes."""
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    model = load_config([f"model={name}"]).model
    assert replace(read_model_config(tmp_path), name=name) == model
    stored = {
        entry.stored_name: prod(entry.stored_shape)
        for entry in hf_entries(model, RELEASED[name]["model_type"])
    }
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    assert sum(stored.values()) == sum(tensor.numel() for tensor in theirs.state_dict().values())


def test_a_bias_that_balancing_alone_uses_starts_at_zero(folder):
    """A folder without biases feeds a run with moe.balance=[bias]."""
    config = read_model_config(folder)
    bias = torch.ones(4)
    state_of(bias).spec = ShardSpec("layers.0.router.bias", (4,), unsharded((4,)))
    assert load_hf_weights([bias], config, folder) == []
    assert torch.equal(bias, torch.zeros(4))
