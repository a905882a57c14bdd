"""Checkpoints of Megatron-Core are read, and it loads those written here, with equal logits."""

import pickle
import re
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_jobs import ARGS, TOKENS, run_megatron_core
from runs import whole_tensors
from tool_runs import computed_logits, run

from megatron5d.checkpoint.folder import read_run, saved_config
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.checkpoint.megatron.files import load_inert
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.tools import convert

LAYOUTS = {  # tp, pp, ep
    "llama": (2, 2, 1),
    "tied": (2, 1, 1),
    "gpt2": (1, 2, 1),
    "fused": (1, 1, 1),
    "mixtral": (1, 2, 2),
    "deepseek": (1, 1, 2),
    "presoftmax": (1, 1, 1),
}
STEPPED = {"consumed_train_samples": 56, "optimizer": "adam"}


def write_job(folder: Path, args: dict, layout: tuple[int, int, int], **options: object) -> dict:
    tp, pp, ep = layout
    job = {"do": "write", "folder": str(folder), "args": args, "tp": tp, "pp": pp, "ep": ep}
    return job | {"format": "torch_dist"} | options


def logits_job(folder: Path) -> dict:
    return {"do": "logits", "folder": str(folder), "tokens": TOKENS, "out": f"{folder}.npy"}


def convert_from(source: Path, out: Path, options: str = "") -> Path:
    assert run(convert, f"from-megatron --megatron {source} --out {out} {options}") == 0
    return resolve_checkpoint(out, "")


def convert_to(checkpoint: Path, out: Path, options: str = "") -> None:
    assert run(convert, f"to-megatron --checkpoint {checkpoint} --out {out} {options}") == 0


def logits_of(source: Path, folder: Path) -> np.ndarray:
    """Our logits of a checkpoint of Megatron-Core."""
    checkpoint = convert_from(source, folder / f"{source.name}-ours")
    return computed_logits(checkpoint, np.array(TOKENS), folder / source.name, "--dtype fp32")


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """Checkpoints of Megatron-Core by architecture, some also as rank files, with logits."""
    home = tmp_path_factory.mktemp("megatron")
    jobs = []
    for name, layout in LAYOUTS.items():
        jobs.append(write_job(home / name, ARGS[name], layout, classes=name == "fused"))
        jobs.append(logits_job(home / name))
        if name in ("llama", "gpt2", "mixtral"):
            options = {"format": "torch", "classes": name == "llama"}
            jobs.append(write_job(home / f"{name}-files", ARGS[name], layout, **options))
    singletons = write_job(home / "singletons", ARGS["deepseek"], (1, 1, 2), singletons=True)
    stepped = [
        write_job(home / f"optimizer-{keys}", ARGS["deepseek"] | STEPPED, (1, 2, 2), optimizer=keys)
        for keys in ("parameters", "buckets")
    ]
    before = write_job(
        home / "before-step", ARGS["tied"] | STEPPED, (1, 1, 1), optimizer="parameters"
    )
    run_megatron_core(home, [*jobs, singletons, *stepped, before])
    return home


@pytest.fixture(scope="module")
def ours(theirs) -> Path:
    """The same read and written here, with the logits of Megatron-Core from what was written."""
    for name in (*ARGS, "before-step"):
        convert_from(theirs / name, theirs / "ours" / name)
        options = "--optimizer" if name == "before-step" else ""
        convert_to(theirs / "ours" / name, theirs / "back" / name, options)
    jobs = [logits_job(theirs / "back" / name) for name in ARGS]
    step = {"do": "step", "folder": str(theirs / "back/before-step"), "tp": 1, "ep": 1, "dp": 2}
    step |= {"out": str(theirs / "after-step"), "lr": 0.5, "weight_decay": 0.5}
    run_megatron_core(theirs, [*jobs, step])
    return theirs / "ours"


@pytest.mark.parametrize("name", ARGS)
def test_both_directions_give_equal_logits(theirs, ours, tmp_path, name):
    expected, back = (np.load(folder / f"{name}.npy") for folder in (theirs, theirs / "back"))
    assert_close(computed_logits(ours / name, np.array(TOKENS), tmp_path, "--dtype fp32"), expected)
    assert_close(back, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_rank_files_hold_the_same_weights(theirs, tmp_path, name):
    # which Megatron-Core and others admit for their process
    admitted = [np._core.multiarray._reconstruct, np.ndarray]
    with torch.serialization.safe_globals(admitted):
        one, other = (logits_of(theirs / source, tmp_path) for source in (name, f"{name}-files"))
        assert set(admitted) <= set(torch.serialization.get_safe_globals())
    assert np.array_equal(one, other)


def test_experts_and_gate_rows_under_their_own_keys_are_the_same_weights(theirs, tmp_path):
    one, other = (logits_of(theirs / source, tmp_path) for source in ("deepseek", "singletons"))
    assert np.array_equal(one, other)


def renamed(model: dict, spelling: str) -> dict:
    """A rank's state of `mixtral`, as other modules of Megatron-Core name the same weights."""
    state = {}
    for name, value in model.items():
        expert = re.fullmatch(
            r"(.*mlp\.experts\.)local_experts\.(\d)\.(linear_fc[12]\.weight)", name
        )
        if expert is None:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            state[name] = value
        elif spelling == "transformer_engine":
            state[f"{expert[1]}{expert[3]}{expert[2]}"] = value
        else:  # all experts in one matrix, as [in, out]
            state.setdefault(f"{expert[1]}weight{expert[3][9]}", []).append(value.T)
    shapes = {"weight1": (32, -1), "weight2": (-1, 32)}
    return {
        name: torch.stack(value).reshape(shapes[name[-7:]]) if isinstance(value, list) else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("spelling", ["transformer_engine", "grouped"])
def test_other_modules_names_in_rank_files(theirs, tmp_path, spelling):
    shutil.copytree(theirs / "mixtral-files", tmp_path / "other")
    for path in (tmp_path / "other").rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        torch.save(state | {"model": renamed(state["model"], spelling)}, path)
    assert_close(logits_of(tmp_path / "other", tmp_path), np.load(theirs / "mixtral.npy"))


def test_virtual_stages_of_a_rank_are_in_the_order_of_the_model(theirs, tmp_path):
    """Rank p of 2 with 2 virtual stages holds layers p and 2 + p, where without them it holds 2·p
    and 2·p + 1."""
    shutil.copytree(theirs / "gpt2-files", tmp_path / "virtual")
    paths = sorted((tmp_path / "virtual").rglob("model_optim_rng.pt"))
    states = [torch.load(path, weights_only=False) for path in paths]
    models = [state.pop("model") for state in states]

    def chunk(rank: int, layer: int, with_ends: bool) -> dict:
        tensors = {}
        for name, value in models[rank].items():
            if name.startswith(f"decoder.layers.{layer}."):
                tensors[name.replace(f"layers.{layer}.", "layers.0.")] = value
            elif with_ends and not name.startswith("decoder.layers."):
                tensors[name] = value
        return tensors

    for path, state, rank in zip(paths, states, (0, 1)):
        chunks = {
            f"model{i}": chunk(stage, rank, with_ends=stage == rank)
            for i, stage in enumerate((0, 1))
        }
        torch.save(state | chunks, path)
    one, other = (
        logits_of(source, tmp_path) for source in (theirs / "gpt2-files", tmp_path / "virtual")
    )
    assert np.array_equal(one, other)


def test_the_optimizer_is_read_where_it_is_saved_by_parameter(theirs, tmp_path, capsys):
    folder = convert_from(theirs / "optimizer-parameters", tmp_path / "ours")
    progress = read_run(folder)["progress"]
    assert folder.name == "step-00000007"
    assert (progress["step"], progress["consumed_samples"], progress["tokens"]) == (7, 56, 56 * 16)
    tensors = whole_tensors(folder)
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.")]
    assert len(tensors) == 4 * len(names) - 3 * 2  # the routers' biases have no moments
    for name in names:
        if not name.endswith("router.bias"):
            weight = tensors[f"model.{name}"]
            assert torch.equal(tensors[f"optim.master.{name}"], weight)
            assert torch.equal(tensors[f"optim.exp_avg.{name}"], weight / 2)
            assert torch.equal(tensors[f"optim.exp_avg_sq.{name}"], weight**2)
    capsys.readouterr()
    weights_only = convert_from(theirs / "optimizer-buckets", tmp_path / "weights")
    assert "the optimizer's state (buckets) is not read" in capsys.readouterr().err
    assert weights_only.name == "step-00000000"


def test_the_distributed_optimizer_of_megatron_core_continues_with_ours(theirs, ours, tmp_path):
    """It reads what to-megatron --optimizer writes; its next step, which from-megatron reads, is
    Adam's."""
    after = convert_from(theirs / "after-step", tmp_path / "after")
    folder = resolve_checkpoint(ours / "before-step", "")
    assert after.name == "step-00000008"
    config = saved_config(folder)
    before, stepped = whole_tensors(folder), whole_tensors(after)
    assert before.keys() == stepped.keys()
    for key in (key for key in before if key.startswith("model.")):
        name = key.removeprefix("model.")
        weight = torch.nn.Parameter(before[f"optim.master.{name}"].clone())
        decay = config.optim.weight_decay * (weight.dim() > 1)
        rate = learning_rate(config.optim, 7, config.train.steps)
        adam = torch.optim.AdamW([weight], rate, config.optim.betas, config.optim.eps, decay)
        weight.grad = before[key] / 10
        state = {kind: before[f"optim.{kind}.{name}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.tensor(7.0), **state}
        adam.step()
        assert not torch.equal(weight, before[key])
        expected = {f"optim.{kind}": values for kind, values in state.items()}
        expected |= dict.fromkeys(("model", "optim.master"), weight.detach())
        for kind, values in expected.items():
            torch.testing.assert_close(stepped[f"{kind}.{name}"], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer-parameters", "groups experts' parameters apart"),
        ("optimizer-buckets", "has weights only"),
    ],
)
def test_states_that_the_distributed_optimizer_cannot_read_are_rejected(
    theirs, tmp_path, capsys, name, reason
):
    checkpoint = convert_from(theirs / name, tmp_path / name)
    command = f"to-megatron --checkpoint {checkpoint} --out {tmp_path}/back --optimizer"
    assert run(convert, command) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def changed_args(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a checkpoint with other arguments."""
    shutil.copytree(source, folder)
    path = folder / "iter_0000007" / "common.pt"
    common = torch.load(path, weights_only=False)
    torch.save({**common, "args": Namespace(**vars(common["args"]) | changes)}, path)
    return folder


def rejection(folder: Path, capsys) -> str:
    """The message of from-megatron, which writes nothing."""
    out = folder.with_name("rejected")
    assert run(convert, f"from-megatron --megatron {folder} --out {out}") == 2
    assert not list(out.glob("step-*"))
    return capsys.readouterr().err


GROUPS = {
    "num_experts": 8,
    "moe_router_topk": 6,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}


@pytest.mark.parametrize(
    ("changes", "names"),
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
        (GROUPS, ["moe_router_group_topk = 2"]),
        ({"vocab_size": 900}, ["vocab_size = 900 exceeds the 64 rows"]),
        ({"num_layers": 5}, ["6 missing", "decoder.layers.4.self_attention.linear_qkv.weight"]),
        ({"qk_layernorm": True}, ["decoder.layers.3.self_attention.q_layernorm.weight"]),
        ({"ffn_hidden_size": 24}, ["[96, 32] on disk, [48, 32] by the configuration"]),
    ],
)
def test_what_ours_does_not_compute_or_misses_is_named(theirs, tmp_path, capsys, changes, names):
    message = rejection(changed_args(theirs / "llama", tmp_path / "changed", **changes), capsys)
    assert all(name in message for name in names), message


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_executed(theirs, tmp_path, capsys):
    hostile, warning = Hostile(tmp_path / "executed"), "is refused, because it may run any code"
    common = changed_args(theirs / "llama", tmp_path / "common", tokenizer_type=hostile)
    assert warning in rejection(common, capsys)
    metadata = shutil.copytree(theirs / "llama", tmp_path / "metadata")
    (metadata / "iter_0000007/.metadata").write_bytes(pickle.dumps(hostile))
    assert "no part of DCP's metadata" in rejection(metadata, capsys)
    files = shutil.copytree(theirs / "gpt2-files", tmp_path / "files")
    path = next(files.rglob("model_optim_rng.pt"))
    torch.save(torch.load(path, weights_only=False) | {"rng_state": hostile}, path)
    assert warning in rejection(files, capsys)
    assert not hostile.path.exists()


class ByName(pickle.Pickler):
    """Pickles a signal as Python 3.10 and older do."""

    def reducer_override(self, value):
        return value.name if isinstance(value, signal.Signals) else NotImplemented


def test_signals_that_an_older_python_has_pickled_are_read(tmp_path):
    module = Namespace(__name__="pickle", Pickler=ByName, dumps=pickle.dumps)
    args = Namespace(exit_signal=signal.SIGTERM, num_layers=2)
    torch.save({"args": args}, tmp_path / "common.pt", module)
    assert load_inert(tmp_path / "common.pt")["args"].num_layers == 2


def test_damage_and_missing_files_are_named(theirs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint of Megatron-LM" in rejection(tmp_path / "empty", capsys)
    files = shutil.copytree(theirs / "gpt2-files", tmp_path / "files")
    shutil.rmtree(files / "iter_0000007/mp_rank_00_001")
    missing = "no file of tensor, pipeline and expert rank (0, 1, 0)"
    assert missing in rejection(files, capsys)
    damaged = shutil.copytree(theirs / "llama", tmp_path / "damaged")
    for path in damaged.rglob("*.distcp"):
        content = bytearray(path.read_bytes())
        zeroed = slice(len(content) // 2, None, 64)
        content[zeroed] = bytes(len(content[zeroed]))
        path.write_bytes(content)
    assert "is damaged" in rejection(damaged, capsys)


def test_settings_are_converted_in_both_directions(theirs, tmp_path, capsys):
    checkpoint = convert_from(theirs / "tied", tmp_path / "ours", "--dtype bf16")
    assert "3 rows that pad the vocabulary" in capsys.readouterr().err
    config = saved_config(checkpoint)
    model = config.model
    assert (config.precision.dtype, config.train.seq_len) == ("bf16", 16)
    assert (model.vocab_size, model.rope_theta, model.rope_scaling.type) == (61, 5000, "llama3")
    assert (model.num_kv_heads, model.head_dim, model.qk_norm) == (2, 12, True)
    convert_to(checkpoint, tmp_path / "back")
    args = vars(torch.load(tmp_path / "back/release/common.pt", weights_only=False)["args"])
    names = set(ARGS["tied"]) - {"make_vocab_size_divisible_by"}
    assert {name: args[name] for name in names} == {name: ARGS["tied"][name] for name in names}
    assert args["bf16"] and not args["fp16"]
    assert run(convert, f"to-megatron --checkpoint {checkpoint} --out {tmp_path}/back") == 2
    assert "already holds a checkpoint of Megatron-LM" in capsys.readouterr().err
