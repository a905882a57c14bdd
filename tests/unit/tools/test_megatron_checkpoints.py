"""Checkpoints that Megatron-Core itself writes are read, and those written here are loaded by it:
with equal logits."""

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import whole_tensors

from megatron5d.checkpoint.folder import read_run, saved_config
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.checkpoint.megatron.reader import load_inert
from megatron5d.checkpoint.reader import Reader
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.tools import convert, logits

ROOT = Path(__file__).parents[3]
BASE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "seq_length": 16,
    "max_position_embeddings": 24,
    "norm_epsilon": 1e-5,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 8,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "normalization": "RMSNorm",
    "qk_layernorm": False,
    "num_experts": None,
    "untie_embeddings_and_output_weights": True,
}
MOE = BASE | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_layer_freq": 1,
    "moe_token_dispatcher_type": "alltoall",
}
ARGS = {
    "llama": BASE,
    "tied": BASE
    | {
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "rotary_interleaved": True,
        "use_rope_scaling": True,
    },
    "gpt2": BASE
    | {
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": 8,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    },
    "fused": BASE
    | {"swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True, "num_query_groups": 1},
    "mixtral": MOE,
    "deepseek": MOE
    | {
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 0],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "presoftmax": MOE | {"moe_router_pre_softmax": True},
}
WRITTEN = {  # tp, pp, ep, and the format
    "llama": (2, 2, 1, "torch_dist"),
    "tied": (2, 1, 1, "torch_dist"),
    "gpt2": (1, 2, 1, "torch_dist"),
    "fused": (1, 1, 1, "torch_dist"),
    "mixtral": (1, 2, 2, "torch_dist"),
    "deepseek": (1, 1, 2, "torch_dist"),
    "presoftmax": (1, 1, 1, "torch_dist"),
}
STEPPED = ARGS["tied"] | {"consumed_train_samples": 56, "optimizer": "adam"}
TOKENS = [[(5 * i * i + 3 * i + row) % 61 for i in range(16)] for row in range(2)]


def megatron_core(folder: Path, jobs: list[dict]) -> None:
    """Has Megatron-Core do the jobs of megatron_core_models.py."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [
        sys.executable,
        "-Wignore",
        str(ROOT / "tests/megatron_core_models.py"),
        str(folder / "jobs.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]


def own_logits(checkpoint: Path, out: Path) -> np.ndarray:
    np.save(out.with_suffix(".ids.npy"), np.array(TOKENS))
    command = [
        "--checkpoint",
        checkpoint,
        "--tokens",
        out.with_suffix(".ids.npy"),
        "--dtype",
        "fp32",
        "--out",
        out,
    ]
    assert logits.main([str(word) for word in command]) == 0
    return np.load(out)


def converted(*words: object) -> None:
    assert convert.main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """For each architecture a checkpoint of Megatron-Core and its logits, also over ranks with
    files of their own."""
    home = tmp_path_factory.mktemp("megatron")
    jobs = []
    for name, (tp, pp, ep, kind) in WRITTEN.items():
        layout = {"args": ARGS[name], "tp": tp, "pp": pp, "ep": ep}
        write = {"do": "write", "format": kind, "classes": name == "fused", **layout}
        jobs.append({"folder": str(home / name), **write})
        jobs.append(
            {
                "do": "logits",
                "folder": str(home / name),
                "tokens": TOKENS,
                "out": str(home / f"{name}.npy"),
            }
        )
        if name in ("llama", "gpt2", "mixtral"):
            write |= {"format": "torch", "classes": name == "llama"}
            jobs.append({"folder": str(home / f"{name}-files"), **write})
    single = {"args": ARGS["deepseek"], "tp": 1, "pp": 1, "ep": 2, "singletons": True}
    jobs.append(
        {"do": "write", "folder": str(home / "singletons"), "format": "torch_dist", **single}
    )
    sparse = {
        "args": ARGS["deepseek"] | {"consumed_train_samples": 56, "optimizer": "adam"},
        "tp": 1,
        "pp": 2,
        "ep": 2,
    }
    for keys in ("parameters", "buckets"):
        folder = str(home / f"optimizer-{keys}")
        jobs.append(
            {"do": "write", "folder": folder, "format": "torch_dist", "optimizer": keys, **sparse}
        )
    made = {
        "format": "torch_dist",
        "optimizer": "parameters",
        "args": STEPPED,
        "tp": 1,
        "pp": 1,
        "ep": 1,
    }
    jobs.append({"do": "write", "folder": str(home / "before-step"), **made})
    megatron_core(home, jobs)
    return home


@pytest.fixture(scope="module")
def ours(theirs) -> Path:
    """The same read and written here, with the logits of Megatron-Core from what was written."""
    jobs = []
    for name in ARGS:
        converted("from-megatron", "--megatron", theirs / name, "--out", theirs / "ours" / name)
        converted(
            "to-megatron", "--checkpoint", theirs / "ours" / name, "--out", theirs / "back" / name
        )
        out = str(theirs / "back" / f"{name}.npy")
        jobs.append(
            {"do": "logits", "folder": str(theirs / "back" / name), "tokens": TOKENS, "out": out}
        )
    converted(
        "from-megatron",
        "--megatron",
        theirs / "before-step",
        "--out",
        theirs / "ours" / "before-step",
    )
    back = theirs / "back" / "before-step"
    converted(
        "to-megatron", "--checkpoint", theirs / "ours" / "before-step", "--out", back, "--optimizer"
    )
    step = {"folder": str(back), "out": str(theirs / "after-step"), "lr": 0.5, "weight_decay": 0.5}
    megatron_core(theirs, [*jobs, {"do": "step", "tp": 1, "ep": 1, "dp": 2, **step}])
    return theirs / "ours"


@pytest.mark.parametrize("name", ARGS)
def test_both_ways_give_equal_logits(theirs, ours, name):
    expected, back = (np.load(folder / f"{name}.npy") for folder in (theirs, theirs / "back"))
    found = own_logits(ours / name, ours / f"{name}.npy")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(back - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_files_of_ranks_hold_the_same_weights(theirs, tmp_path, name):
    # which Megatron-Core and others admit for their process
    also = [np._core.multiarray._reconstruct, np.ndarray]
    with torch.serialization.safe_globals(also):
        for source in (name, f"{name}-files"):
            converted("from-megatron", "--megatron", theirs / source, "--out", tmp_path / source)
        assert set(also) <= set(torch.serialization.get_safe_globals())
    first, second = (
        own_logits(tmp_path / source, tmp_path / f"{source}.npy")
        for source in (name, f"{name}-files")
    )
    assert np.array_equal(first, second)


def test_experts_and_gate_rows_under_keys_of_their_own_are_the_same_weights(theirs, tmp_path):
    for source in ("deepseek", "singletons"):
        converted("from-megatron", "--megatron", theirs / source, "--out", tmp_path / source)
    first, second = (
        own_logits(tmp_path / source, tmp_path / f"{source}.npy")
        for source in ("deepseek", "singletons")
    )
    assert np.array_equal(first, second)


def renamed(model: dict, spelling: str) -> dict:
    """The state of a rank of `mixtral` with the names that other modules of Megatron-Core give the
    same weights."""
    found = {}
    for name, value in model.items():
        expert = re.fullmatch(
            r"(.*mlp\.experts\.)local_experts\.(\d)\.(linear_fc[12]\.weight)", name
        )
        if expert is None:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            found[name] = value
        elif spelling == "transformer_engine":
            found[f"{expert[1]}{expert[3]}{expert[2]}"] = value
        else:  # all experts in one matrix, as [in, out]
            found.setdefault(f"{expert[1]}weight{expert[3][9]}", []).append(value.T)
    shapes = {"weight1": (32, -1), "weight2": (-1, 32)}
    return {
        name: torch.stack(value).reshape(shapes[name[-7:]]) if isinstance(value, list) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("spelling", ["transformer_engine", "grouped"])
def test_other_modules_names_in_files_of_ranks(theirs, tmp_path, spelling):
    shutil.copytree(theirs / "mixtral-files", tmp_path / "other")
    for path in (tmp_path / "other").rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        torch.save(state | {"model": renamed(state["model"], spelling)}, path)
    converted("from-megatron", "--megatron", tmp_path / "other", "--out", tmp_path / "ours")
    expected = np.load(theirs / "mixtral.npy")
    assert (
        np.abs(own_logits(tmp_path / "ours", tmp_path / "ours.npy") - expected).max()
        < 1e-5 * np.abs(expected).max()
    )


def test_several_stages_of_a_rank_are_in_the_order_of_the_model(theirs, tmp_path):
    """Rank p of 2 with 2 virtual stages holds layers p and 2 + p, where without them it holds 2·p
    and 2·p + 1."""
    shutil.copytree(theirs / "gpt2-files", tmp_path / "virtual")
    paths = sorted((tmp_path / "virtual").rglob("model_optim_rng.pt"))
    states = [torch.load(path, weights_only=False) for path in paths]
    models = [state.pop("model") for state in states]

    def chunk(rank: int, layer: int, rest: bool) -> dict:
        own = {
            name: value
            for name, value in models[rank].items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        own = {name.replace(f"layers.{layer}.", "layers.0."): value for name, value in own.items()}
        return own | {
            name: v
            for name, v in models[rank].items()
            if rest and not name.startswith("decoder.layers.")
        }

    virtual = [
        {"model0": chunk(0, 0, True), "model1": chunk(1, 0, False)},
        {"model0": chunk(0, 1, False), "model1": chunk(1, 1, True)},
    ]
    for path, state, chunks in zip(paths, states, virtual):
        torch.save(state | chunks, path)
    for source in (theirs / "gpt2-files", tmp_path / "virtual"):
        converted("from-megatron", "--megatron", source, "--out", tmp_path / source.name / "ours")
    first, second = (
        own_logits(tmp_path / name / "ours", tmp_path / f"{name}.npy")
        for name in ("gpt2-files", "virtual")
    )
    assert np.array_equal(first, second)


def test_the_optimiser_comes_along_where_it_is_saved_by_parameter(theirs, tmp_path, capsys):
    converted(
        "from-megatron", "--megatron", theirs / "optimizer-parameters", "--out", tmp_path / "ours"
    )
    folder = resolve_checkpoint(tmp_path / "ours", "")
    progress = read_run(folder)["progress"]
    assert folder.name == "step-00000007"
    assert (progress["step"], progress["consumed_samples"], progress["tokens"]) == (7, 56, 56 * 16)
    reader = Reader(folder)
    read = {key: torch.empty(saved.size) for key, saved in reader.tensors().items()}
    reader.fill(
        [{k: ShardedTensor(v.shape, [((0,) * v.dim(), v)], v.dtype) for k, v in read.items()}]
    )
    weights = {
        key.removeprefix("model."): value for key, value in read.items() if key.startswith("model.")
    }
    assert len(read) == 4 * len(weights) - 3 * 2  # the routers' biases have no moments
    for name, weight in weights.items():
        if not name.endswith("router.bias"):
            assert torch.equal(read[f"optim.master.{name}"], weight)
            assert torch.equal(read[f"optim.exp_avg.{name}"], weight / 2)
            assert torch.equal(read[f"optim.exp_avg_sq.{name}"], weight**2)
    capsys.readouterr()
    converted(
        "from-megatron", "--megatron", theirs / "optimizer-buckets", "--out", tmp_path / "weights"
    )
    assert "the optimizer's state (buckets) is not read" in capsys.readouterr().err
    assert resolve_checkpoint(tmp_path / "weights", "").name == "step-00000000"


def test_the_distributed_optimizer_of_megatron_core_continues_with_ours(theirs, ours, tmp_path):
    """It reads what to-megatron --optimizer writes; its next step, which from-megatron reads, is
    Adam's."""
    converted("from-megatron", "--megatron", theirs / "after-step", "--out", tmp_path / "after")
    folder, after = (
        resolve_checkpoint(path, "") for path in (ours / "before-step", tmp_path / "after")
    )
    assert after.name == "step-00000008"
    config = saved_config(folder)
    before, found = whole_tensors(folder), whole_tensors(after)
    assert before.keys() == found.keys()
    for key in (key for key in before if key.startswith("model.")):
        name = key.removeprefix("model.")
        weight = torch.nn.Parameter(before[f"optim.master.{name}"].clone())
        decay = config.optim.weight_decay * (weight.dim() > 1)
        rate = learning_rate(config.optim, 7, config.train.steps)
        adam = torch.optim.AdamW([weight], rate, config.optim.betas, config.optim.eps, decay)
        weight.grad = before[key] / 10
        kept = {kind: before[f"optim.{kind}.{name}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.tensor(7.0), **kept}
        adam.step()
        assert not torch.equal(weight, before[key])
        kept = {f"optim.{kind}": values for kind, values in kept.items()} | {
            "optim.master": weight.detach()
        }
        for kind, want in [("model", weight.detach()), *kept.items()]:
            torch.testing.assert_close(found[f"{kind}.{name}"], want, rtol=1e-6, atol=1e-7)


def test_states_that_the_distributed_optimizer_would_not_read_are_refused(theirs, tmp_path, capsys):
    for name, why in (
        ("optimizer-parameters", "groups experts' parameters apart"),
        ("optimizer-buckets", "has weights only"),
    ):
        converted("from-megatron", "--megatron", theirs / name, "--out", tmp_path / name)
        words = [
            "to-megatron",
            "--checkpoint",
            str(tmp_path / name),
            "--out",
            str(tmp_path / "back"),
            "--optimizer",
        ]
        assert convert.main(words) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def changed_args(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a checkpoint with other arguments."""
    shutil.copytree(source, folder)
    path = folder / "iter_0000007" / "common.pt"
    common = torch.load(path, weights_only=False)
    torch.save({**common, "args": Namespace(**vars(common["args"]) | changes)}, path)
    return folder


def refused(folder: Path, out: Path, capsys) -> str:
    assert convert.main(["from-megatron", "--megatron", str(folder), "--out", str(out)]) == 2
    assert not list(out.glob("step-*"))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rotary_percent": 0.5, "apply_layernorm_1p": True},
            ["rotary_percent = 0.5", "apply_layernorm_1p = True"],
        ),
        ({"multi_latent_attention": True}, ["multi_latent_attention = True"]),
        (
            {"qk_layernorm": True, "normalization": "LayerNorm"},
            ["qk_layernorm with normalization = 'LayerNorm'"],
        ),
        (
            {
                "num_experts": 8,
                "moe_router_topk": 6,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
            },
            ["moe_router_group_topk = 2"],
        ),
        ({"vocab_size": 900}, ["vocab_size = 900 is more than the 64 rows"]),
        ({"num_layers": 5}, ["6 missing", "decoder.layers.4.self_attention.linear_qkv.weight"]),
        ({"qk_layernorm": True}, ["decoder.layers.3.self_attention.q_layernorm.weight"]),
        ({"ffn_hidden_size": 24}, ["[96, 32] on disk, [48, 32] by the configuration"]),
    ],
)
def test_what_ours_does_not_compute_or_lacks_is_named(theirs, tmp_path, capsys, changes, named):
    told = refused(
        changed_args(theirs / "llama", tmp_path / "changed", **changes), tmp_path / "out", capsys
    )
    assert all(text in told for text in named), told


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_executed(theirs, tmp_path, capsys):
    bad = changed_args(
        theirs / "llama", tmp_path / "common", tokenizer_type=Hostile(tmp_path / "executed")
    )
    assert "is refused, since it may run any code" in refused(bad, tmp_path / "out", capsys)
    shutil.copytree(theirs / "llama", tmp_path / "metadata")
    (tmp_path / "metadata/iter_0000007/.metadata").write_bytes(
        pickle.dumps(Hostile(tmp_path / "executed"))
    )
    assert "no part of DCP's metadata" in refused(tmp_path / "metadata", tmp_path / "out", capsys)
    shutil.copytree(theirs / "gpt2-files", tmp_path / "files")
    path = next((tmp_path / "files").rglob("model_optim_rng.pt"))
    torch.save(
        torch.load(path, weights_only=False) | {"rng_state": Hostile(tmp_path / "executed")}, path
    )
    assert "is refused, since it may run any code" in refused(
        tmp_path / "files", tmp_path / "out", capsys
    )
    assert not (tmp_path / "executed").exists()


class ByName(pickle.Pickler):
    """Pickles a signal as Python 3.10 and older do."""

    def reducer_override(self, thing):
        return thing.name if isinstance(thing, signal.Signals) else NotImplemented


def test_signals_that_an_older_python_has_pickled_are_read(tmp_path):
    by_name = Namespace(__name__="pickle", Pickler=ByName, dumps=pickle.dumps)
    torch.save(
        {"args": Namespace(exit_signal=signal.SIGTERM, num_layers=2)},
        tmp_path / "common.pt",
        by_name,
    )
    assert load_inert(tmp_path / "common.pt")["args"].num_layers == 2


def test_damage_and_missing_files_are_named(theirs, tmp_path, capsys):
    assert "is no checkpoint of Megatron-LM" in refused(tmp_path, tmp_path / "out", capsys)
    shutil.copytree(theirs / "gpt2-files", tmp_path / "files")
    shutil.rmtree(tmp_path / "files/iter_0000007/mp_rank_00_001")
    assert "no file of tensor, pipeline and expert rank (0, 1, 0)" in refused(
        tmp_path / "files", tmp_path / "o", capsys
    )
    shutil.copytree(theirs / "llama", tmp_path / "damaged")
    for path in (tmp_path / "damaged").rglob("*.distcp"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :: 64] = bytes(len(content[len(content) // 2 :: 64]))
        path.write_bytes(content)
    assert "is damaged" in refused(tmp_path / "damaged", tmp_path / "o", capsys)


def test_settings_come_and_go(theirs, tmp_path, capsys):
    converted(
        "from-megatron",
        "--megatron",
        theirs / "tied",
        "--out",
        tmp_path / "ours",
        "--dtype",
        "bf16",
    )
    assert "3 rows that pad the vocabulary" in capsys.readouterr().err
    config = saved_config(resolve_checkpoint(tmp_path / "ours", ""))
    model = config.model
    assert (config.precision.dtype, config.train.seq_len, model.vocab_size, model.rope_theta) == (
        "bf16",
        16,
        61,
        5000,
    )
    assert (model.num_kv_heads, model.head_dim, model.qk_norm, model.rope_scaling.type) == (
        2,
        12,
        True,
        "llama3",
    )
    converted("to-megatron", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "back")
    args = vars(torch.load(tmp_path / "back/release/common.pt", weights_only=False)["args"])
    kept = set(ARGS["tied"]) - {"make_vocab_size_divisible_by"}
    assert {name: args[name] for name in kept} == {name: ARGS["tied"][name] for name in kept}
    assert args["bf16"] and not args["fp16"]
    assert (
        convert.main(
            ["to-megatron", "--checkpoint", str(tmp_path / "ours"), "--out", str(tmp_path / "back")]
        )
        == 2
    )
    assert "already holds a checkpoint of Megatron-LM" in capsys.readouterr().err
