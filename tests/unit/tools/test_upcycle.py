"""A dense checkpoint and the mixture made of it compute the same, whichever experts a token
chooses."""

import numpy as np
import pytest
import torch

from megatron5d.checkpoint.folder import read_run
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedWeights
from megatron5d.checkpoint.save import Saver
from megatron5d.config.convert import from_dict, to_dict
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.tools import convert, logits
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.state import Progress, run_record

DENSE = {
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODELS = {
    "swiglu": ModelConfig(**DENSE, num_layers=3, init_std=0.3, init_scale_output=False),
    # groups mean nothing to a dense model, and to its mixture neither
    "gelu, mtp": ModelConfig(
        **DENSE, activation="gelu", num_mtp_layers=1, init_std=0.3, num_groups=4, top_groups=2
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def dense(request, tmp_path_factory):
    """A checkpoint of a random dense model in fp64."""
    config = Config(model=MODELS[request.param], precision=PrecisionConfig(dtype="fp64"))
    model = GPT(config, build_mesh(resolve(1)))
    model.initialize(7)
    tensors = {}
    for weight in model.weights():
        spec = spec_of(weight)
        parts = [((0,) * len(spec.shape), weight.detach())]
        tensors[WEIGHT_PREFIX + spec.name] = ShardedTensor(spec.shape, parts, weight.dtype)
    folder = tmp_path_factory.mktemp("dense")
    Saver(folder, keep=0).save(0, tensors, run_record(Progress(), to_dict(config)))
    return folder


def computed(checkpoint, folder):
    ids = np.arange(40, dtype=np.int32).reshape(2, 20) % 61
    np.save(folder / "ids.npy", ids)
    words = [
        "--checkpoint",
        checkpoint,
        "--tokens",
        folder / "ids.npy",
        "--out",
        folder / "out.npy",
    ]
    assert logits.main([str(word) for word in words]) == 0
    return np.load(folder / "out.npy")


def run(source, out, *words):
    return convert.main(
        ["upcycle", "--checkpoint", str(source), "--out", str(out), *map(str, words)]
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "granularity", "first"),
    [(4, 2, 1, 0), (4, 1, 1, 1), (8, 4, 2, 0), (12, 6, 3, 1)],
)
def test_the_mixture_computes_what_the_dense_model_does(
    dense, tmp_path, experts, top_k, granularity, first
):
    words = (
        "--num-experts",
        experts,
        "--top-k",
        top_k,
        "--granularity",
        granularity,
        "--first-k-dense",
        first,
    )
    assert run(dense, tmp_path / "moe", *words) == 0
    np.testing.assert_allclose(
        computed(tmp_path / "moe", tmp_path), computed(dense, tmp_path), rtol=1e-10, atol=1e-12
    )
    saved = SavedWeights(tmp_path / "moe" / "step-00000000")
    assert tuple(saved.tensors["layers.1.experts.down.weight"].size) == (
        experts,
        16,
        24 // granularity,
    )
    assert ("layers.0.mlp.up.weight" in saved.tensors) == (first == 1)
    model = from_dict(read_run(tmp_path / "moe" / "step-00000000")["config"]).model
    assert (model.num_experts, model.top_k, model.routed_scaling_factor) == (
        experts,
        top_k,
        granularity,
    )
    if model.num_mtp_layers:
        assert (
            "layers.2.experts.up.weight" in saved.tensors
            and "layers.2.mtp.join.weight" in saved.tensors
        )


def test_routers_come_from_the_seed_and_noise_tells_experts_apart(dense, tmp_path):
    def experts(name, *words):
        assert run(dense, tmp_path / name, "--num-experts", 4, "--top-k", 2, *words) == 0
        saved = SavedWeights(tmp_path / name / "step-00000000")

        def read(part):
            size = tuple(saved.tensors[part].size)
            return saved.read(part, (0,) * len(size), size)

        return read("layers.1.experts.up.weight"), read("layers.1.router.weight")

    plain, router = experts("plain")
    noisy, same = experts("noisy", "--noise", 0.1)
    _, other = experts("other", "--seed", 5)
    assert torch.equal(router, same) and not torch.equal(router, other)
    assert router.std().item() == pytest.approx(0.3, rel=0.3)
    assert all(torch.equal(expert, plain[0]) for expert in plain)
    difference = (noisy - plain).flatten(1)
    assert difference.std().item() == pytest.approx(0.1 * plain[0].std().item(), rel=0.1)
    assert torch.corrcoef(difference).triu(1).abs().max() < 0.2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--num-experts", 5, "--top-k", 2, "--granularity", 2),
            "--num-experts requires a multiple of --granularity 2 (got 5); nearest: 4",
        ),
        (("--num-experts", 4, "--top-k", 8), "--top-k 8 is above --num-experts 4"),
        (
            ("--num-experts", 10, "--top-k", 5, "--granularity", 5),
            "does not divide model.ffn_hidden_size = 24",
        ),
        (("--num-experts", 4, "--top-k", 2, "--first-k-dense", 9), "--first-k-dense requires 0 to"),
        (("--num-experts", 4, "--top-k", 2, "--granularity", 0), "--granularity 0 is below 1"),
        (("--num-experts", 0, "--top-k", 2), "--num-experts 0 is below 1"),
    ],
)
def test_what_does_not_fit_is_refused(dense, tmp_path, capsys, words, told):
    assert run(dense, tmp_path / "moe", *words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("noise", ["nan", "-1", "inf"])
def test_noise_is_an_amount(dense, tmp_path, capsys, noise):
    with pytest.raises(SystemExit) as refused:
        run(dense, tmp_path / "moe", "--num-experts", 4, "--top-k", 2, "--noise", noise)
    assert refused.value.code == 2 and f"{noise} is not a number above 0" in capsys.readouterr().err


def test_a_mixture_is_not_upcycled_again(dense, tmp_path, capsys):
    assert run(dense, tmp_path / "moe", "--num-experts", 4, "--top-k", 2) == 0
    assert run(tmp_path / "moe", tmp_path / "more", "--num-experts", 8, "--top-k", 2) == 2
    assert "4 experts already" in capsys.readouterr().err


def test_of_a_run_in_bf16_the_masters_become_the_mixture(dense, tmp_path):
    """Weights in bf16 are rounded; whoever trains the mixture with masters would begin with what
    was lost."""
    exact, tensors = SavedWeights(dense / "step-00000000"), {}
    for name, entry in exact.tensors.items():
        zero, values = (
            (0,) * len(entry.size),
            exact.read(name, (0,) * len(entry.size), tuple(entry.size)).float(),
        )
        for key, copy in (
            (WEIGHT_PREFIX + name, values.bfloat16()),
            (f"optim.master.{name}", values),
        ):
            tensors[key] = ShardedTensor(entry.size, [(zero, copy)], copy.dtype)
    record = read_run(dense / "step-00000000")
    record["config"]["precision"]["dtype"] = "bf16"
    Saver(tmp_path / "bf16", keep=0).save(0, tensors, record)
    assert run(tmp_path / "bf16", tmp_path / "moe", "--num-experts", 4, "--top-k", 2) == 0
    saved = SavedWeights(tmp_path / "moe" / "step-00000000")
    master = tensors["optim.master.layers.1.mlp.up.weight"].shards[0, 0]
    assert torch.equal(
        saved.read("layers.1.experts.up.weight", (3, 0, 0), (1, *master.shape))[0], master
    )
    assert saved.tensors["embedding.weight"].dtype == torch.float32
