"""From a folder of transformers' sparse families to a checkpoint of ours and back: tensors, keys
and logits."""

import numpy as np
import pytest
import torch
from hf_folders import QWEN3, TINY, random_model
from runs import whole_tensors
from safetensors.torch import load_file

from megatron5d.checkpoint.hf.import_config import read_model_config
from megatron5d.checkpoint.hf.weights import load_hf_weights
from megatron5d.checkpoint.load import find_checkpoint
from megatron5d.expert_parallel.experts import Experts
from megatron5d.tools import convert, logits
from megatron5d.topology.axis import Axis

transformers = pytest.importorskip("transformers")

LATENT = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
FP32 = {"dtype": torch.float32, "device": "cpu"}
FAMILIES = {
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4, sliding_window=7),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **QWEN3, mlp_only_layers=[1], attention_bias=True
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **TINY,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **TINY,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY, head_dim=12, num_local_experts=4, num_experts_per_tok=3, sliding_window=7
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT, rms_norm_eps=0.03),
}
# read, and written as another family that computes the same; gpt-oss without the window that its
# code asks for
RENAMED = {
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=3, layer_types=["full_attention"] * 3
    ),
    "hy_v3": lambda: transformers.HYV3Config(
        **QWEN3 | {"num_shared_experts": 2}, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**LATENT),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def imported(request, tmp_path_factory):
    """(their model, its folder, our checkpoint of it); every parameter and router bias random."""
    model = random_model(FAMILIES[request.param]())
    hf, checkpoints = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("ours") / "ckpt"
    model.save_pretrained(hf)
    assert convert.main(["from-hf", "--hf", str(hf), "--out", str(checkpoints)]) == 0
    return model, hf, checkpoints


def test_logits_of_folder_and_checkpoint(imported, tmp_path):
    model, hf, checkpoints = imported
    ids = torch.randint(0, 61, (3, 13))
    np.save(tmp_path / "ids.npy", ids.numpy())
    with torch.no_grad():
        wanted = model(ids).logits.numpy()
    for source in (["--hf", hf], ["--checkpoint", checkpoints]):
        words = [*source, "--tokens", tmp_path / "ids.npy", "--out", tmp_path / "out.npy"]
        assert logits.main([str(word) for word in words]) == 0
        np.testing.assert_allclose(
            np.load(tmp_path / "out.npy"), wanted, atol=1e-4 * np.abs(wanted).max()
        )


def test_fused_experts_are_read_as_well(imported, tmp_path):
    """As transformers 5 has them in memory: the same rectangles on every rank of ep and etp, the
    same whole model."""
    model, hf, checkpoints = imported
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert any(name.endswith(".experts.gate_up_proj") for name in names) and not any(
        ".experts.0." in n for n in names
    )
    assert (
        convert.main(["from-hf", "--hf", str(tmp_path / "fused"), "--out", str(tmp_path / "ckpt")])
        == 0
    )
    again, wanted = (
        whole_tensors(find_checkpoint(None, str(each))) for each in (tmp_path / "ckpt", checkpoints)
    )
    assert again.keys() == wanted.keys() and all(
        torch.equal(again[name], wanted[name]) for name in wanted
    )
    config = read_model_config(hf)
    for ep in range(2):
        for etp in range(2):
            parts = [
                Experts(
                    config,
                    "layers.2.experts",
                    Axis("ep", (0, 1), ep),
                    Axis("etp", (0, 1), etp),
                    **FP32,
                )
                for _ in range(2)
            ]
            for experts, folder in zip(parts, (hf, tmp_path / "fused")):
                load_hf_weights(experts.parameters(), config, folder)
            assert all(
                torch.equal(a, b) for a, b in zip(*(experts.parameters() for experts in parts))
            )


@pytest.mark.parametrize("family", RENAMED)
@pytest.mark.parametrize("fused", [False, True])
def test_written_as_another_family(family, fused, tmp_path):
    model = random_model(RENAMED[family]())
    model.save_pretrained(tmp_path / "hf", save_original_format=not fused)
    assert (
        convert.main(["from-hf", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")])
        == 0
    )
    assert (
        convert.main(
            ["to-hf", "--checkpoint", str(tmp_path / "ckpt"), "--out", str(tmp_path / "again")]
        )
        == 0
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert again.config.model_type == {"hy_v3": "glm4_moe", "glm4_moe_lite": "deepseek_v3"}.get(
        family, family
    )
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        wanted = model(ids).logits
        assert (again(ids).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_there_and_back_again(imported, tmp_path):
    """Export in small files: the same tensors under the same names, no key amiss, the same logits
    to the bit."""
    model, hf, checkpoints = imported
    words = ["to-hf", "--checkpoint", str(checkpoints), "--out", str(tmp_path), "--max-shard-gb"]
    for nothing in ("0", "-1", "nan"):
        with pytest.raises(SystemExit, match="2"):
            convert.main([*words, nothing])
    assert convert.main([*words, "2e-5"]) == 0
    written = {
        name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()
    }
    original = load_file(hf / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
