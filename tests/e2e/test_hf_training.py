"""A Hugging Face model trained by us follows the curve of transformers + torch.optim.AdamW, under
any layout."""

import dataclasses

import numpy as np
import pytest
import torch
from runs import records, train_on_ranks

from megatron5d.checkpoint.hf.import_config import model_config_from_hf
from megatron5d.config.load import load_config
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.model.flops import flops_per_token

transformers = pytest.importorskip("transformers")

STEPS, GBS, SEQ, WARMUP, LR, MIN_LR, DECAY, CLIP = 12, 8, 32, 3, 3e-3, 1e-4, 0.1, 0.7
EVAL_BATCHES = 2
VOCAB = 131


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A Llama folder, a token file, the reference's curve, and its loss on the first samples before
    and after."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.05,
        )
    )
    model.save_pretrained(folder / "llama")
    writer = IndexedWriter(folder / "tokens", np.uint16)
    stream = np.random.default_rng(0).zipf(1.3, STEPS * GBS * SEQ + 1) % VOCAB
    for document in np.array_split(stream, 37):
        writer.add_document(document)
    writer.finalize()
    tokens = torch.from_numpy(stream.astype(np.int64))
    before = held_out_loss(model, tokens)
    curve = reference_curve(model, tokens)
    return folder, curve, (before, held_out_loss(model, tokens))


def loss_of(model, stream, first, count):
    rows = torch.stack([stream[i * SEQ : (i + 1) * SEQ + 1] for i in range(first, first + count)])
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))


def held_out_loss(model, stream):
    with torch.no_grad():
        return loss_of(model, stream, 0, EVAL_BATCHES * GBS).item()


def reference_curve(model, stream):
    """The plain loop of a reader of DESIGN's conventions: sample i is tokens [i·s, (i+1)·s], rates
    count from 1."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(1, STEPS + 1):
        loss = loss_of(model, stream, (step - 1) * GBS, GBS)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        cosine = 0.5 * (1 + np.cos(np.pi * (step - WARMUP) / (STEPS - WARMUP)))
        lr = LR * step / WARMUP if step <= WARMUP else MIN_LR + (LR - MIN_LR) * cosine
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        curve.append((step, loss.item(), norm.item(), lr))
    assert curve[-1][3] == pytest.approx(MIN_LR)
    return curve


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["train.mbs=8"]),
        (4, ["parallel.tp=4", "parallel.sp=true", "train.mbs=2"]),
        (8, ["parallel.tp=2", "parallel.sp=true", "parallel.zero=1", "train.mbs=1"]),
    ],
)
def test_the_curve_is_the_reference(material, tmp_path, world, overrides):
    folder, expected, (before, after) = material
    argv = [
        f"model.from_hf={folder / 'llama'}",
        f"init.from_hf={folder / 'llama'}",
        f"data.train=[{folder / 'tokens'}]",
        "data.order=sequential",
        f"train.steps={STEPS}",
        f"train.gbs={GBS}",
        f"train.seq_len={SEQ}",
        f"optim.lr={LR}",
        f"optim.min_lr={MIN_LR}",
        f"optim.warmup_steps={WARMUP}",
        f"optim.weight_decay={DECAY}",
        f"optim.clip={CLIP}",
        f"data.valid=[{folder / 'tokens'}]",
        f"train.eval_batches={EVAL_BATCHES}",
        "log.peak_tflops=0.5",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *overrides,
    ]
    config = load_config(argv, world=world, model_readers={"from_hf": model_config_from_hf})
    assert dataclasses.asdict(config.model)["num_kv_heads"] == 2
    assert train_on_ranks(config, world) == [0] * world
    told = records(tmp_path / "log.jsonl")
    assert [(r["consumed_samples"], r["tokens"]) for r in told] == [
        (step * GBS, step * GBS * SEQ) for step in range(1, STEPS + 1)
    ]
    for record in told:
        rate = record["tokens_per_s_per_gpu"]
        assert rate * record["step_time_s"] * world == pytest.approx(GBS * SEQ)
        assert record["mfu"] == pytest.approx(rate * flops_per_token(config.model, SEQ) / 0.5e12)
    assert (told[0]["initial_valid_loss"], told[-1]["valid_loss"]) == pytest.approx(
        (before, after), rel=3e-5
    )
    found = [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in told]
    assert len(found) == STEPS
    for ours, reference in zip(found, expected, strict=True):
        assert ours == pytest.approx(reference, rel=3e-5)
