"""Runs of sparse families from a Hugging Face folder against transformers with torch's AdamW:
losses, gradients, fp64.

transformers' router loss counts all layers as one; ours adds the layers up and divides by the
number of experts that a token is sent to: of one MoE layer theirs is top_k times ours.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import records, train_on_ranks, write_corpus
from transformers_fp64 import model_in_fp64

from megatron5d.checkpoint.hf.import_config import model_config_from_hf
from megatron5d.config.load import load_config

transformers = pytest.importorskip("transformers")

STEPS, GBS, SEQ, VOCAB, LR, COEF = 4, 4, 16, 61, 1e-2, 0.3
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
LATENT = TINY | {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **TINY | {"num_hidden_layers": 1}, num_local_experts=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY | {"num_hidden_layers": 1}, head_dim=12, num_local_experts=4, sliding_window=5
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **TINY,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT),
}
LAYOUTS = {
    "one": (1, []),
    "ep": (2, ["parallel.ep=2"]),
    "tp, sp, ep": (2, ["parallel.tp=2", "parallel.sp=true", "parallel.ep=2", "parallel.etp=1"]),
}


def reference(model, tokens, balanced):
    """(loss, gradient norm, router loss) of each step."""
    named = [(p, p.ndim >= 2 and not name.endswith("bias")) for name, p in model.named_parameters()]
    decayed, others = ([p for p, decays in named if decays == wanted] for wanted in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        batch = torch.stack(
            [tokens[i * SEQ : (i + 1) * SEQ + 1] for i in range(step * GBS, (step + 1) * GBS)]
        )
        out = model(batch[:, :-1], **({"output_router_logits": True} if balanced else {}))
        loss = F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten())
        router = out.aux_loss / model.config.num_experts_per_tok if balanced else torch.zeros(())
        optimizer.zero_grad()
        (loss + COEF * router).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        curve.append((loss.item(), norm.item(), router.item()))
    return curve


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request, tmp_path_factory):
    """(folder, data prefix, whether transformers defines a router loss, the reference's curve)"""
    folder = tmp_path_factory.mktemp("hf")
    prefix = write_corpus(folder / "data", vocab_size=VOCAB)
    tokens = torch.from_numpy(np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate.weight", "correction_bias")):
            torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder)
    balanced = not request.param.startswith("deepseek")
    with model_in_fp64(folder) as model:
        curve = reference(model.train(), tokens, balanced)
    return folder, prefix, balanced, curve


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_losses_and_gradient_norm_of_every_step(case, layout, tmp_path):
    folder, prefix, balanced, wanted = case
    world, overrides = LAYOUTS[layout]
    router = ["moe.balance=[global_aux]", f"moe.aux_coef={COEF}"] if balanced else []
    words = [
        f"model.from_hf={folder}",
        f"init.from_hf={folder}",
        f"data.train=[{prefix}]",
        "data.order=sequential",
        f"train.steps={STEPS}",
        f"train.gbs={GBS}",
        "train.mbs=2",
        f"train.seq_len={SEQ}",
        f"optim.lr={LR}",
        "optim.schedule=constant",
        "optim.clip=0.5",
        "precision.dtype=fp64",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *router,
        *overrides,
    ]
    config = load_config(words, world=world, model_readers={"from_hf": model_config_from_hf})
    assert train_on_ranks(config, world) == [0] * world
    found = records(tmp_path / "log.jsonl")
    got = [
        (record["loss"], record["grad_norm"], record.get("global_aux_loss", 0.0))
        for record in found
    ]
    assert len(got) == STEPS and wanted[-1][0] != wanted[0][0]
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
