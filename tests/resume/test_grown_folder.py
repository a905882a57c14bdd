"""init.from_hf into a model with more than the folder has: a larger vocabulary, a head of its own,
MTP layers."""

import pytest
import torch
from hf_folders import random_model
from runs import train_on_ranks, whole_tensors, write_corpus
from safetensors.torch import load_file

from megatron5d.checkpoint.hf.import_config import model_config_from_hf
from megatron5d.config.load import load_config

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
CASES = {
    "llama": (
        lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        "model.tie_embeddings=false",
    ),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(
            **TINY,
            kv_lora_rank=16,
            q_lora_rank=12,
            qk_nope_head_dim=8,
            qk_rope_head_dim=6,
            v_head_dim=10,
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        "model.num_mtp_layers=1",
    ),
}
RUN = [
    *(
        "train.gbs=4",
        "train.mbs=1",
        "train.seq_len=16",
        "train.steps=1",
        "optim.lr=1e-300",
        "optim.min_lr=0",
    ),
    *("optim.warmup_steps=0", "log.progress=false", "log.memory_check=off", "precision.dtype=fp64"),
]


@pytest.mark.parametrize("case", CASES)
def test_new_rows_are_the_mean_and_the_rest_is_the_folders(tmp_path, case):
    make, change = CASES[case]
    random_model(make()).save_pretrained(tmp_path / "hf")
    stored, corpus = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        write_corpus(tmp_path / "toy", vocab_size=97),
    )
    found = []
    for world, layout in (
        (1, []),
        (4, ["parallel.tp=2", "parallel.pp=2"]),
        (2, ["parallel.zero=3"]),
    ):
        place = tmp_path / str(world)
        words = [
            f"model.from_hf={tmp_path / 'hf'}",
            f"init.from_hf={tmp_path / 'hf'}",
            f"data.train=[{corpus}]",
        ]
        words += [f"checkpoint.dir={place}", "model.vocab_size=131", change, *RUN, *layout]
        config = load_config(words, world=world, model_readers={"from_hf": model_config_from_hf})
        assert train_on_ranks(config, world) == [0] * world
        found.append(whole_tensors(place / "step-00000001"))
    table = stored["model.embed_tokens.weight"].double()
    head = stored.get("lm_head.weight", table).double()
    for tensors in found:
        for name, old in {"embedding": table, "head": head}.items():
            assert torch.equal(tensors[f"model.{name}.weight"][:97], old)
            torch.testing.assert_close(
                tensors[f"model.{name}.weight"][97:], old.mean(0).expand(34, -1)
            )
        assert torch.equal(
            tensors["model.layers.1.attention.out.weight"].float(),
            stored["model.layers.1.self_attn.o_proj.weight"],
        )
        assert ("model.layers.2.mtp.join.weight" in tensors) == (case == "deepseek_v3")
        for key in (
            key for key in tensors if key.startswith("model.") and not key.endswith("router.bias")
        ):
            assert torch.equal(tensors[key], found[0][key]), key
