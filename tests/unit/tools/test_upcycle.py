"""A dense checkpoint and the mixture made from it compute the same, whichever experts a token
chooses."""

import numpy as np
import pytest
import torch
from runs import whole_tensors
from tool_runs import SIZES, computed_logits, random_weights, run, save

from megatron5d.checkpoint.folder import saved_config, step_folder
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.tools import convert

MODELS = {
    "swiglu": {"num_layers": 3},
    # groups mean nothing to a dense model, nor to its mixture
    "biases as GPT-2": {
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "norm": "layernorm",
        "position": "learned",
        "tie_embeddings": True,
    },
    "biases as GPT-NeoX": {
        "activation": "gelu",
        "mlp_bias": True,
        "norm": "layernorm",
        "parallel_block": "two_norms",
    },
    "gated, biases": {"mlp_bias": True},
    "gelu, mtp": {"activation": "gelu", "num_mtp_layers": 1, "num_groups": 4, "top_groups": 2},
}
IDS = np.arange(40, dtype=np.int32).reshape(2, 20) % 61


@pytest.fixture(scope="module", params=list(MODELS))
def dense(request, tmp_path_factory):
    """A checkpoint of a random dense model in fp64."""
    model = ModelConfig(**SIZES | MODELS[request.param], init_std=0.3)
    config = Config(model=model, precision=PrecisionConfig(dtype="fp64"))
    return save(tmp_path_factory.mktemp("dense"), config, random_weights(config, std=0.3))


def upcycle(source, out, options):
    return run(convert, f"upcycle --checkpoint {source} --out {out} {options}")


@pytest.mark.parametrize(
    ("experts", "top_k", "granularity", "first"),
    [(4, 2, 1, 0), (4, 1, 1, 1), (8, 4, 2, 0), (12, 6, 3, 1)],
)
def test_the_mixture_computes_what_the_dense_model_does(
    dense, tmp_path, experts, top_k, granularity, first
):
    options = f"--num-experts {experts} --top-k {top_k} --granularity {granularity}"
    assert upcycle(dense, tmp_path / "moe", f"{options} --first-k-dense {first}") == 0
    folder = step_folder(tmp_path / "moe", 0)
    logits, expected = (
        computed_logits(source, IDS, tmp_path / name)
        for name, source in (("a", folder), ("b", dense))
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-12)
    tensors, model = whole_tensors(folder), saved_config(folder).model
    if model.mlp_bias:
        assert tensors["model.layers.1.experts.down.bias"].shape == (experts, 16)
    down = tensors["model.layers.1.experts.down.weight"]
    assert down.shape == (experts, 16, 24 // granularity)
    assert ("model.layers.0.mlp.up.weight" in tensors) == (first == 1)
    numbers = (model.num_experts, model.top_k, model.routed_scaling_factor)
    assert numbers == (experts, top_k, granularity)
    if model.num_mtp_layers:
        added = {f"model.layers.2.{name}.weight" for name in ("experts.up", "mtp.join")}
        assert added <= tensors.keys()


@pytest.mark.parametrize(
    ("fields", "options", "family"),
    [
        ({}, "--num-experts 12 --top-k 6 --granularity 3", "mixtral"),
        ({"qk_norm": True}, "--num-experts 8 --top-k 4 --granularity 2", "qwen3_moe"),
        (
            {"qk_norm": True, "num_layers": 3},
            "--num-experts 12 --top-k 3 --granularity 3 --first-k-dense 1",
            "qwen3_moe",
        ),
    ],
)
def test_a_mixture_of_slices_is_exported(fields, options, family, tmp_path, capsys):
    """No family with such routers has routed_scaling_factor; transformers computes the same."""
    transformers = pytest.importorskip("transformers")
    config = Config(model=ModelConfig(**SIZES | fields), precision=PrecisionConfig(dtype="fp64"))
    source = save(tmp_path / "dense", config, random_weights(config, std=0.3))
    assert upcycle(source, tmp_path / "moe", f"{options} --noise 0.2") == 0
    folder = step_folder(tmp_path / "moe", 0)
    expected = computed_logits(folder, IDS, tmp_path / "logits")
    command = f"to-hf --checkpoint {folder} --out {tmp_path}/hf --no-tokenizer"
    assert run(convert, command) == 0
    assert f"{family} has no setting for model.routed_scaling_factor" in capsys.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.config.model_type == family
    with torch.no_grad():
        logits = model.float()(torch.from_numpy(IDS).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_routers_come_from_the_seed_and_noise_tells_experts_apart(dense, tmp_path):
    def experts_and_router(name, options=""):
        assert upcycle(dense, tmp_path / name, f"--num-experts 4 --top-k 2 {options}") == 0
        tensors = whole_tensors(step_folder(tmp_path / name, 0))
        return (tensors[f"model.layers.1.{part}.weight"] for part in ("experts.up", "router"))

    plain, router = experts_and_router("plain")
    noisy, same_router = experts_and_router("noisy", "--noise 0.1")
    _, other_router = experts_and_router("other", "--seed 5")
    assert torch.equal(router, same_router) and not torch.equal(router, other_router)
    assert router.std().item() == pytest.approx(0.3, rel=0.3)
    assert all(torch.equal(expert, plain[0]) for expert in plain)
    noise = (noisy - plain).flatten(1)
    assert noise.std().item() == pytest.approx(0.1 * plain[0].std().item(), rel=0.1)
    assert torch.corrcoef(noise).triu(1).abs().max() < 0.2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "--num-experts 5 --top-k 2 --granularity 2",
            "--num-experts requires a multiple of --granularity 2 (got 5); nearest: 4",
        ),
        ("--num-experts 4 --top-k 8", "--top-k 8 is above --num-experts 4"),
        (
            "--num-experts 10 --top-k 5 --granularity 5",
            "does not divide model.ffn_hidden_size = 24",
        ),
        ("--num-experts 4 --top-k 2 --first-k-dense 9", "--first-k-dense 9 leaves no layer"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(dense, tmp_path, capsys, options, reason):
    assert upcycle(dense, tmp_path / "moe", options) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--granularity 0", "--granularity: 0 is below 1"),
        ("--num-experts 0", "--num-experts: 0 is below 1"),
        *(
            (f"--noise {noise}", f"{noise} is not a number above 0")
            for noise in ("nan", "-1", "inf")
        ),
    ],
)
def test_numbers_out_of_range_are_rejected(dense, tmp_path, capsys, options, reason):
    with pytest.raises(SystemExit, match="2"):
        upcycle(dense, tmp_path / "moe", f"--num-experts 4 --top-k 2 {options}")
    assert reason in capsys.readouterr().err


def test_a_mixture_is_not_upcycled_again(dense, tmp_path, capsys):
    assert upcycle(dense, tmp_path / "moe", "--num-experts 4 --top-k 2") == 0
    assert upcycle(tmp_path / "moe", tmp_path / "more", "--num-experts 8 --top-k 2") == 2
    assert "4 experts already" in capsys.readouterr().err


def test_the_mixture_of_a_run_in_bf16_has_its_master_weights(dense, tmp_path):
    """Weights in bf16 are rounded; training continues with what they were rounded from."""
    tensors = {}
    for key, weight in whole_tensors(dense).items():
        tensors[key] = weight.bfloat16()
        tensors[key.replace("model.", "optim.master.", 1)] = weight.float()
    config = Config(model=saved_config(dense).model, precision=PrecisionConfig(dtype="bf16"))
    save(tmp_path / "bf16", config, tensors)
    assert upcycle(tmp_path / "bf16", tmp_path / "moe", "--num-experts 4 --top-k 2") == 0
    mixture = whole_tensors(step_folder(tmp_path / "moe", 0))
    master = tensors["optim.master.layers.1.mlp.up.weight"]
    assert torch.equal(mixture["model.layers.1.experts.up.weight"][3], master)
    assert mixture["model.embedding.weight"].dtype == torch.float32
