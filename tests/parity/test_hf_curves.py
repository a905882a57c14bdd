"""A run that starts from a Hugging Face folder against transformers and torch.optim.AdamW, step by
step in fp64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import records, train_on_ranks
from transformers_fp64 import model_in_fp64

from megatron5d.checkpoint.hf.import_config import model_config_from_hf
from megatron5d.config.load import load_config
from megatron5d.data.indexed_dataset import IndexedWriter

transformers = pytest.importorskip("transformers")

STEPS, GBS, SEQ, VOCAB, WARMUP, LR, MIN_LR = 6, 8, 16, 61, 2, 1e-2, 1e-3
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY | {"hidden_size": 64}, head_dim=12, pad_token_id=None, sliding_window=5
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **TINY | {"hidden_size": 64},
        head_dim=12,
        pad_token_id=None,
        sliding_window=5,
        sliding_window_pattern=2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=VOCAB,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
}
LAYOUTS = {
    "one": (1, []),
    "tp, sp": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "dp, zero": (2, ["parallel.zero=3"]),
}


def write_tokens(prefix):
    """Documents of random tokens in Megatron's format, by its published layout; returns them end to
    end."""
    generator = np.random.default_rng(0)
    documents = [
        generator.integers(0, VOCAB, n).astype(np.uint16) for n in generator.integers(5, 90, 60)
    ]
    lengths = np.array([len(document) for document in documents], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1] * 2)]).astype(np.int64)
    header = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8])
    header += np.uint64(len(documents)).tobytes() + np.uint64(len(documents) + 1).tobytes()
    index = (
        header
        + lengths.tobytes()
        + offsets.tobytes()
        + np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(index)
    tokens = np.concatenate(documents)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return torch.from_numpy(tokens.astype(np.int64))


def rate(step):
    if step <= WARMUP:
        return LR * step / WARMUP
    return MIN_LR + (LR - MIN_LR) * 0.5 * (
        1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))
    )


def reference(model, tokens):
    """(loss, gradient norm before clipping) of each step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        rows = [tokens[i * SEQ : (i + 1) * SEQ + 1] for i in range(step * GBS, (step + 1) * GBS)]
        batch = torch.stack(rows)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request, tmp_path_factory):
    """(folder, data prefix, the reference's curve)"""
    folder = tmp_path_factory.mktemp("hf")
    tokens = write_tokens(folder / "data")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(folder)
    with model_in_fp64(folder) as model:
        curve = reference(model.train(), tokens)
    return folder, folder / "data", curve


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_loss_and_gradient_norm_of_every_step(case, layout, tmp_path):
    folder, prefix, wanted = case
    world, overrides = LAYOUTS[layout]
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
        f"optim.min_lr={MIN_LR}",
        f"optim.warmup_steps={WARMUP}",
        "optim.clip=0.5",
        "precision.dtype=fp64",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *overrides,
    ]
    config = load_config(words, world=world, model_readers={"from_hf": model_config_from_hf})
    assert train_on_ranks(config, world) == [0] * world
    got = [(record["loss"], record["grad_norm"]) for record in records(tmp_path / "log.jsonl")]
    assert len(got) == STEPS and wanted[-1][0] != wanted[0][0]
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_padding_as_transformers_leaves_it_out(layout, tmp_path):
    """One step over rows padded at either end, a row of padding alone, and the row behind it."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (GBS + 1, SEQ)).astype(np.int32)
    tokens[0, :3] = tokens[1, 5:] = tokens[2] = -100
    writer = IndexedWriter(tmp_path / "data", np.int32)
    writer.add_document(np.maximum(tokens, 0).flatten())
    writer.finalize()
    tokens.tofile(tmp_path / "data.bin")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    flat = torch.from_numpy(tokens.flatten().astype(np.int64))
    batch = torch.stack([flat[i * SEQ : (i + 1) * SEQ + 1] for i in range(GBS)])
    inputs, labels = batch[:, :-1], batch[:, 1:].masked_fill(batch[:, :-1] == -100, -100)
    with model_in_fp64(tmp_path) as model:
        kept = (inputs != -100).long()
        logits = model(
            inputs.clamp(min=0), attention_mask=kept, position_ids=torch.arange(SEQ)[None]
        ).logits
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    world, overrides = LAYOUTS[layout]
    words = [
        f"model.from_hf={tmp_path}",
        f"init.from_hf={tmp_path}",
        f"data.train=[{tmp_path / 'data'}]",
        "train.steps=1",
        "data.order=sequential",
        f"train.gbs={GBS}",
        f"train.seq_len={SEQ}",
        "precision.dtype=fp64",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *overrides,
    ]
    assert (
        train_on_ranks(
            load_config(words, world=world, model_readers={"from_hf": model_config_from_hf}), world
        )
        == [0] * world
    )
    (record,) = records(tmp_path / "log.jsonl")
    assert record["tokens"] == (labels != -100).sum()
    assert record["loss"] == pytest.approx(wanted, rel=1e-9)
