"""Folders of transformers' DeepSeek families: settings, tensors there and back, prediction layers
and refusals."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from hf_folders import in_8_bits, random_model, save_config
from runs import whole_tensors
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.hf.families import RENAMED
from megatron5d.checkpoint.hf.import_config import read_model_config
from megatron5d.checkpoint.hf.safetensors_folder import save_folder
from megatron5d.checkpoint.hf.tensor_table import hf_entries, mtp_copies
from megatron5d.checkpoint.hf.weights import load_hf_weights
from megatron5d.checkpoint.load import find_checkpoint
from megatron5d.config.load import load_config
from megatron5d.tools import convert

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
YARN = {
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
FAMILIES = {
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **TINY, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**TINY, rope_parameters=YARN),
}


def test_a_routers_bias_stays_in_fp32_beside_bf16(tmp_path):
    """Stored so by DeepSeek; rounding it would send tokens to other experts. The model stays bf16
    all the same."""
    model = random_model(FAMILIES["deepseek_v3"]())
    biases = {
        name: t.clone()
        for name, t in model.state_dict().items()
        if name.endswith("e_score_correction_bias")
    }
    model.bfloat16().save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors") | biases
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert (
        convert.main(["from-hf", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")])
        == 0
    )
    assert (
        convert.main(
            ["to-hf", "--checkpoint", str(tmp_path / "ckpt"), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert len(biases) == 2 and written.keys() == tensors.keys()
    assert all(
        written[name].dtype == t.dtype and torch.equal(written[name], t)
        for name, t in tensors.items()
    )


def with_prediction_layer(folder, **sizes):
    """As in the release: a whole block behind the last, with norms, a join, and the embedding and
    head once more."""
    config = transformers.DeepseekV3Config(**TINY | sizes, rope_parameters=YARN)
    random_model(config).save_pretrained(folder)
    h = config.hidden_size
    tensors = load_file(folder / "model.safetensors")
    block = {
        n.replace(".layers.2.", ".layers.3."): t + 0.1
        for n, t in tensors.items()
        if ".layers.2." in n
    }
    block |= {
        f"model.layers.3.{name}.weight": torch.rand(h)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    block |= {
        "model.layers.3.eh_proj.weight": torch.rand(h, 2 * h),
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | block, folder / "model.safetensors")
    return tensors, block


def test_prediction_layers_go_in_and_out(tmp_path):
    hf, out = tmp_path / "hf", tmp_path / "out"
    tensors, block = with_prediction_layer(hf)
    assert convert.main(["from-hf", "--mtp", "--hf", str(hf), "--out", str(tmp_path / "ckpt")]) == 0
    assert convert.main(["diff", str(hf), str(tmp_path / "ckpt")]) == 0
    assert convert.main(["to-hf", "--checkpoint", str(tmp_path / "ckpt"), "--out", str(out)]) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == (tensors | block).keys()
    assert all(torch.equal(written[name], values) for name, values in (tensors | block).items())
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    block["model.layers.3.shared_head.head.weight"][3, 4] += 1
    save_file(tensors | block, hf / "model.safetensors")
    assert (
        convert.main(["from-hf", "--mtp", "--hf", str(hf), "--out", str(tmp_path / "other")]) == 2
    )


def test_prediction_layers_are_passed_over_and_told(tmp_path, capsys):
    tensors, block = with_prediction_layer(tmp_path)
    config = read_model_config(tmp_path)
    told = f"the {len(block)} tensors of multi-token prediction layer 3 are not read"
    (line,) = load_hf_weights([], config, tmp_path)
    assert told in line
    assert convert.main(["from-hf", "--hf", str(tmp_path), "--out", str(tmp_path / "ckpt")]) == 0
    assert told in capsys.readouterr().err
    del block["model.layers.3.eh_proj.weight"]
    save_file(tensors | block, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{len(block)} unexpected"):
        load_hf_weights([], config, tmp_path)


def test_a_release_in_8_bits_is_the_one_in_16_that_it_stands_for(tmp_path):
    """All matrices of the layers, experts and prediction layer among them, as DeepSeek publishes
    V3."""
    eight, sixteen = tmp_path / "eight", tmp_path / "sixteen"
    tensors, block = with_prediction_layer(
        sixteen, hidden_size=160, moe_intermediate_size=136, v_head_dim=48
    )
    for name, tensor in (tensors | block).items():
        tensors[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored[name], stored[f"{name}_scale_inv"], tensors[name] = in_8_bits(tensors[name].float())
        tensors[name] = tensors[name].bfloat16()
    assert sum(name.endswith("_scale_inv") for name in stored) > 3 * 8 * 3
    save_file(tensors, sixteen / "model.safetensors")
    released = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    save_config(
        transformers.AutoConfig.from_pretrained(sixteen), eight, quantization_config=released
    )
    save_folder(eight, stored.items(), max_shard_bytes=200_000)
    assert len(list(eight.glob("*.safetensors"))) > 3
    for folder in (eight, sixteen):
        assert (
            convert.main(["from-hf", "--mtp", "--hf", str(folder), "--out", str(folder / "ckpt")])
            == 0
        )
    ours, wanted = (
        whole_tensors(find_checkpoint(None, str(folder / "ckpt"))) for folder in (eight, sixteen)
    )
    assert ours.keys() == wanted.keys()
    assert all(
        ours[name].dtype == wanted[name].dtype and torch.equal(ours[name], wanted[name])
        for name in wanted
    )


# Settings of the releases' own config.json, as on huggingface.co under the names in the files of
# conf/model; the fp8 release of V3 also has a quantization_config. initializer_range is no record
# of how the releases were initialised.
YARN_40 = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2 = {key: value for key, value in V3.items() if key != "num_nextn_predict_layers"} | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "rope_scaling": YARN_40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
KIMI = {key: value for key, value in V3.items() if key != "num_nextn_predict_layers"} | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN_40
    | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [
        ("kimi_k2", KIMI, 1_026_408_232_448),
        ("deepseek_v3", V3, 671_026_419_200),
        ("deepseek_v2", V2, 235_741_434_880),
        ("deepseek_v2_lite", V2_LITE, 15_706_484_224),
    ],
)
def test_our_file_is_the_release(name, settings, parameters, tmp_path):
    """And the tensors that we read are as many as transformers makes."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model, ours = read_model_config(tmp_path), load_config([f"model={name}"]).model
    ahead = settings.get("num_nextn_predict_layers", 0)
    assert replace(model, name=name, init_std=ours.init_std, num_mtp_layers=ahead) == ours
    family = RENAMED.get(settings["model_type"], settings["model_type"])
    stored = {entry.stored_name: prod(entry.stored_shape) for entry in hf_entries(model, family)}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": family}))
    assert sum(stored.values()) == parameters
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    assert sum(tensor.numel() for tensor in theirs.state_dict().values()) == parameters
    # the release's files: F8_E4M3 and BF16 tensors, and the routers' biases, which count as F32
    if ahead:
        whole = [
            prod(entry.stored_shape)
            for entry in hf_entries(ours, settings["model_type"]) + mtp_copies(ours)
        ]
        assert sum(whole) == 680_571_043_840 + 3_918_786_560 + 59 * 256
