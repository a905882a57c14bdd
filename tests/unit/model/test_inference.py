"""Logits of a checkpoint on any layout, compared with the one-page model; sampled tokens."""

import collections

import pytest
import reference_gpt
import torch
from ranks import run_ranks

from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.save import Saver
from megatron5d.config.convert import to_dict
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.model.inference import Source, open_predictor, sample_token
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.process import Process
from megatron5d.topology.shard_spec import spec_of

SIZE = {"vocab_size": 61, "init_std": 0.2}
MODELS = {
    "llama": ModelConfig(num_kv_heads=2, **SIZE),
    "gpt2": ModelConfig(
        norm="layernorm",
        activation="gelu_tanh",
        position="learned",
        max_positions=11,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        **SIZE,
    ),
    "full": ModelConfig(attention_causal=False, **SIZE),
}


def save_checkpoint(config: Config, folder):
    """Saves a checkpoint from one process; returns its global tensors."""
    model = GPT(config, build_mesh(resolve(1)))
    model.initialize(seed=3)
    weights = {spec_of(p).name: p.data[: spec_of(p).shape[0]] for p in model.parameters()}
    tensors = {
        f"model.{name}": ShardedTensor(t.shape, [((0,) * t.ndim, t)], t.dtype)
        for name, t in weights.items()
    }
    Saver(folder, keep=1).save(5, tensors, {"config": to_dict(config)})
    return weights


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("world", "tp", "sp"), [(1, 1, False), (4, 2, True), (4, 4, True)])
def test_logits_of_a_checkpoint_on_any_layout(tmp_path, name, world, tp, sp):
    """tp does not divide the sequence: 11 tokens over 2 and 4 ranks."""
    model = MODELS[name]
    weights = save_checkpoint(Config(model=model, precision=PrecisionConfig("fp64")), tmp_path)
    ids = torch.randint(0, 61, (2, 11))
    source = Source(checkpoint=tmp_path)

    def on_rank(rank, world):
        config = source.config(world, tp=tp, sp=sp)
        predictor = open_predictor(source, config, Process(rank, world, rank, torch.device("cpu")))
        return predictor.logits(ids).contiguous()

    expected = reference_gpt.logits(weights, model, ids)
    for logits in run_ranks(on_rank, world):
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture
def predictor(tmp_path):
    save_checkpoint(Config(model=MODELS["gpt2"]), tmp_path)
    source = Source(checkpoint=tmp_path)
    return open_predictor(source, source.config(1), Process(0, 1, 0, torch.device("cpu")))


def test_greedy_tokens_are_the_argmax_of_every_prefix(predictor):
    tokens = [5]
    for token in predictor.sample([5], 9, temperature=0):
        assert token == int(predictor.logits(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 10


def test_sampling_depends_only_on_the_seed(predictor):
    a, b, c = (list(predictor.sample([1, 2], 12, seed=seed)) for seed in (1, 1, 2))
    assert a == b != c


def test_sequences_longer_than_the_position_table(predictor):
    """Logits are refused; sampling continues from the last tokens that fit."""
    with pytest.raises(ValueError, match="max_positions = 11"):
        predictor.logits(torch.zeros(1, 12, dtype=torch.long))
    assert len(list(predictor.sample([1], 20))) == 20
    next_of_30 = list(predictor.sample(list(range(30)), 1, temperature=0))
    assert next_of_30 == list(predictor.sample(list(range(19, 30)), 1, temperature=0))


def test_sampling_below_the_tokenizers_size(predictor):
    assert max(predictor.sample([1], 40, temperature=5.0, vocab_size=7)) < 7
    with pytest.raises(ValueError, match="prompt"):
        next(predictor.sample([], 1))


def test_invalid_layouts_and_folders_are_refused_before_the_model_is_built(tmp_path):
    save_checkpoint(Config(model=MODELS["llama"]), tmp_path)
    with pytest.raises(
        ConfigError, match=r"model\.num_heads=4 must be divisible by parallel\.tp \(got 3"
    ):
        Source(checkpoint=tmp_path).config(3, tp=3)
    with pytest.raises(ValueError, match="not a checkpoint|no whole|not a folder"):
        Source(checkpoint=tmp_path / "nothing").config(1)


def test_samples_follow_the_distribution_at_a_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -3.0], dtype=torch.float64)
    counts = collections.Counter(sample_token(logits, 0.5, 0, generator) for _ in range(20_000))
    for token, p in enumerate(torch.softmax(logits / 0.5, 0).tolist()):
        deviation = (p * (1 - p) / 20_000) ** 0.5
        assert counts[token] / 20_000 == pytest.approx(p, abs=4 * deviation + 1e-4)


def test_samples_are_among_the_likeliest():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, 5.0, 0.1, 4.9, 4.8], dtype=torch.float64)
    assert {sample_token(logits, 10.0, 2, generator) for _ in range(200)} == {1, 3}
    assert {sample_token(logits, 10.0, 99, generator) for _ in range(500)} == {0, 1, 2, 3, 4}
    assert sample_token(logits, 0, 0, generator) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, float("inf")])
def test_no_temperature_overflows_and_nan_is_an_error(temperature):
    """Divided by the smallest float logits become infinite, and their differences NaN, unless the
    largest is 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 800.0, -3.0], dtype=torch.float64)
    for top_k in (0, 2):
        tokens = {sample_token(logits, temperature, top_k, generator) for _ in range(100)}
        assert tokens == ({1} if temperature < 1 else {0, 1} if top_k else {0, 1, 2})
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="diverged"):
            sample_token(logits * value, temperature, 0, generator)
