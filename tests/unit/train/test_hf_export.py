"""checkpoint.hf_export: Hugging Face folders that a run on any layout writes while it trains."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import write_corpus
from safetensors.torch import load_file

from megatron5d.checkpoint.folder import saved_steps
from megatron5d.tools import convert, logits
from megatron5d.topology.owned_output import owned
from pretrain import main

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")

EXPERIMENT = [
    *("model.vocab_size=97", "train.gbs=4", "train.mbs=1", "train.seq_len=16", "train.steps=4"),
    *("log.progress=false", "log.memory_check=off", "precision.dtype=fp32"),
]
LAYOUTS = {
    "tp, pp, zero": ["model=tiny", "parallel.tp=2", "parallel.sp=true", "parallel.pp=2"],
    "ep, zero 3": [
        "model=tiny_mixtral",
        "parallel.ep=2",
        "parallel.zero=3",
        "parallel.dp_replicate=2",
    ],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer of 97 words."""
    folder = tmp_path_factory.mktemp("words")
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("when", ["every:2", "last"])
def test_a_run_writes_folders_that_transformers_reads(tmp_path, corpus, words, layout, when):
    place = tmp_path / "checkpoints"
    arguments = [*EXPERIMENT, *LAYOUTS[layout], f"data.train=[{corpus}]", f"data.tokenizer={words}"]
    arguments += [
        f"checkpoint.dir={place}",
        f"checkpoint.hf_export={when}",
        "checkpoint.keep=0",
        "checkpoint.every=3",
    ]
    assert run_ranks(lambda rank, world: main(arguments), 4) == [0] * 4
    steps = {"last": [4], "every:2": [2, 4]}[when]
    folders = [place / "hf" / f"step-{step:08d}" for step in steps]
    assert sorted((place / "hf").iterdir()) == folders
    assert saved_steps(place) == sorted({*steps, 3, 4}), "a step that is exported is saved, too"
    for step, folder in zip(steps, folders):
        files = {path.name for path in folder.iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json"} < files
        shards = [name for name in files if name.endswith(".safetensors")]
        assert len(shards) == 4, "every rank writes a part"
        assert (
            convert.main(
                [
                    "to-hf",
                    "--checkpoint",
                    str(place / f"step-{step:08d}"),
                    "--out",
                    str(tmp_path / f"{step}"),
                ]
            )
            == 0
        )
        ours, theirs = weights_of(folder), weights_of(tmp_path / str(step))
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[key], theirs[key]) for key in ours
        )
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(ours)
    ids = torch.arange(24).view(2, 12) % 97
    np.save(tmp_path / "ids.npy", ids.numpy())
    given = [
        "--checkpoint",
        str(place),
        "--tokens",
        str(tmp_path / "ids.npy"),
        "--out",
        str(tmp_path / "logits.npy"),
    ]
    assert logits.main(given) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[-1])
    with torch.no_grad():
        found = model.eval()(ids).logits
    assert torch.allclose(
        found, torch.from_numpy(np.load(tmp_path / "logits.npy")).to(found.dtype), atol=1e-4
    )
    assert transformers.AutoTokenizer.from_pretrained(folders[-1])("w5 w96")["input_ids"] == [5, 96]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=tiny", "model.attention_softcap=5.0"], "attention_softcap"),
        (
            ["model=tiny_mixtral", "moe.balance=[bias]", "moe.bias_rate=0.01"],
            "moe.balance=bias changes biases of the routers",
        ),
        (["model=tiny", "data.tokenizer={folder}/none.json"], "none.json is no tokenizer"),
    ],
)
def test_what_can_not_be_exported_is_refused_at_the_start(
    tmp_path, corpus, capsys, overrides, told
):
    overrides = [each.format(folder=tmp_path) for each in overrides]
    place = tmp_path / "checkpoints"
    arguments = [
        *EXPERIMENT,
        f"data.train=[{corpus}]",
        f"checkpoint.dir={place}",
        "checkpoint.hf_export=last",
    ]
    with pytest.raises(SystemExit) as ended:
        sys_exit = main([*arguments, *overrides])
        raise SystemExit(sys_exit)
    assert ended.value.code == 2 and not place.exists()
    said = capsys.readouterr().err
    assert told in said


def test_exports_follow_the_branch_of_the_run(tmp_path, corpus, words):
    """They leave with their checkpoints; one that was killed is written again; others' are kept."""
    place = tmp_path / "checkpoints"
    arguments = [*EXPERIMENT, "model=tiny", f"data.train=[{corpus}]", f"data.tokenizer={words}"]
    arguments += [f"checkpoint.dir={place}", "checkpoint.every=2", "checkpoint.keep=0"]

    def train(*overrides):
        return main([*arguments, *overrides])

    assert train("checkpoint.hf_export=every:2", "train.steps=6") == 0
    old = weights_of(place / "hf/step-00000006")
    back = [f"checkpoint.resume={place}/step-00000004", "checkpoint.hf_export=last"]
    assert train(*back, "train.steps=5") == 0
    names = {path.name for path in (place / "hf").iterdir()}
    assert names == {f"step-0000000{step}" for step in ("2", "4", "5", "6.left")}
    left = weights_of(place / "hf/step-00000006.left")
    assert all(torch.equal(old[key], left[key]) for key in old)

    new = weights_of(place / "hf/step-00000005")
    interrupted = (place / "hf/step-00000005").rename(place / "hf/step-00000005.tmp")
    (interrupted / "config.json").unlink()
    assert train("checkpoint.hf_export=last", "train.steps=5", "checkpoint.resume=auto") == 0
    again = weights_of(place / "hf/step-00000005")
    assert not interrupted.exists() and all(torch.equal(new[key], again[key]) for key in new)

    (other := place / "hf/step-00000008").mkdir()
    (other / "file").write_text("of another tool")
    more = ["train.steps=8", "checkpoint.resume=auto", "checkpoint.hf_export=every:8"]
    with (
        owned(other),
        pytest.raises(SystemExit, match="exported: .*step-00000008 belongs to"),
    ):
        train(*more)
    assert (place / "hf/step-00000008.left/file").exists() and not other.exists()
