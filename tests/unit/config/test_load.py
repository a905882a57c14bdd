"""From words on a command line to a typed configuration: what is accepted, who has the last word,
what is printed."""

import pytest

from megatron5d.config.convert import from_dict, to_dict
from megatron5d.config.errors import ConfigError, closest_key, refuse
from megatron5d.config.load import from_yaml, keys_given, load_config, to_yaml
from megatron5d.config.schema import Config


def faults(argv, **given):
    with pytest.raises(ConfigError) as error:
        load_config(argv, **given)
    return {fault.id: fault for fault in error.value.faults}


def test_values_become_the_types_of_the_schema():
    config = load_config(
        [
            "train.gbs=16",
            "optim.lr=1e-4",
            "optim.clip=1",
            "parallel.sp=true",
            "model.attention_window=null",
        ]
    )
    assert config.train.gbs == 16 and config.optim.lr == 1e-4 and config.parallel.sp is True
    assert isinstance(config.optim.clip, float) and config.model.attention_window is None


def test_commas_and_lone_words_make_lists():
    config = load_config(
        ["optim.betas=0.8,0.99", "moe.balance=aux", "data.train=0.5 a/b", "pipeline.layout=[1,1]"]
    )
    assert config.optim.betas == [0.8, 0.99]
    assert (config.moe.balance, config.data.train, config.pipeline.layout) == (
        ["aux"],
        ["0.5 a/b"],
        [1, 1],
    )
    assert load_config(["data.train=[0.7 a/b, 0.3 c]"]).data.train == ["0.7 a/b", "0.3 c"]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Et|t|tmL", [1, 1, 2]),
        ("'Et*3|(tt|)*29,m|L'", [3, *[2] * 29, 1, 0]),
        ("'E|(t|)*2(m|)*2 L'", [0, 1, 1, 1, 1, 0]),
        ("'Et|((tt|)*2t|)*2L'", [1, 2, 2, 1, 2, 2, 1, 0]),
    ],
)
def test_the_layout_of_megatron(text, counts):
    assert load_config([f"pipeline.layout={text}"]).pipeline.layout == counts


@pytest.mark.parametrize("text", ["t|tL", "Et|mt|L", "Et|L|t", "Et|x|L", "'Et|(t|L'"])
def test_a_layout_that_is_none_of_megatrons(text):
    (fault,) = faults([f"pipeline.layout={text}"]).values()
    assert fault.id == "wrong-type" and "must be a list of integers" in fault.reason


def test_texts_that_look_like_something_else_stay_texts():
    config = load_config(
        [
            "data.split=969,30,1",
            "log.wandb.name=007",
            "checkpoint.dir=2024",
            "log.wandb.project=true",
        ]
    )
    assert (config.data.split, config.log.wandb.name) == ("969,30,1", "007")
    assert (config.checkpoint.dir, config.log.wandb.project) == ("2024", "true")


def test_async_is_a_key():
    assert load_config(["checkpoint.async=false"]).checkpoint.async_save is False
    assert to_dict(Config())["checkpoint"]["async"] is True


def test_keep_is_a_number_or_a_text():
    """A number, as in every run.json of earlier versions, is as many of the newest."""
    assert load_config(["checkpoint.keep=3"]).checkpoint.keep == "3"
    saved = ["checkpoint.every=5", "checkpoint.dir=c", "train.eval_every=5", "data.split='80,20,0'"]
    config = load_config(["checkpoint.keep=last:3+every:100+best:2", *saved])
    assert config.checkpoint.keep == "last:3+every:100+best:2"
    assert from_dict({"checkpoint": {"keep": 3}}).checkpoint.keep == "3"


@pytest.mark.parametrize(
    ("written", "mode"), [("offline", "offline"), ("off", "disabled"), ("false", "disabled")]
)
def test_wandb_in_one_word(written, mode):
    config = load_config([f"log.wandb={written}", "log.wandb.project=p"])
    assert (config.log.wandb.mode, config.log.wandb.project) == (mode, "p")


def test_group_then_experiment_then_command_line():
    assert load_config(["model=gpt2", "experiment=quickstart"]).model.hidden_size == 128
    config = load_config(["experiment=llama3_70b", "parallel.tp=4", "model=gpt2"])
    assert (config.parallel.tp, config.parallel.sp, config.model.name) == (4, True, "gpt2")
    assert load_config(["++train.gbs=3"]).train.gbs == 3


def test_renamed_keys_keep_their_old_names(tmp_path):
    asked = {"zero3_gather": "per_step", "grad_reduce": "per_step"}
    config = load_config(["parallel.regather=per_step", "+parallel.reduce=per_step"])
    assert {key: getattr(config.parallel, key) for key in asked} == asked
    assert from_dict({"parallel": {"regather": "per_step", "reduce": "per_step"}}) == config
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nparallel: {regather: per_step, reduce: per_step}\n"
    (tmp_path / "experiment" / "old.yaml").write_text(text)
    assert load_config(["--config-dir", str(tmp_path), "experiment=old"]) == config
    assert keys_given(["parallel.regather=per_step"]) == {"parallel.zero3_gather"}


def test_mappings_are_merged():
    config = load_config(
        ["model.rope_scaling={type: llama3, factor: 8}", "train={gbs: 4, steps: 7}"]
    )
    assert (config.model.rope_scaling.type, config.model.rope_scaling.factor) == ("llama3", 8.0)
    assert (config.train.gbs, config.train.steps, config.train.mbs) == (4, 7, 1)


def test_yaml_and_back():
    config = load_config(
        ["experiment=llama3_8b", "train.gbs_ramp=[16,16,1000]", "model.attention_window=4096"]
    )
    assert from_yaml(to_yaml(config)) == config
    assert from_dict(to_dict(config)) == config


def test_an_old_file_that_lacks_a_key_keeps_its_default():
    data = to_dict(Config())
    del data["train"]["z_loss"]
    del data["moe"]
    assert from_dict(data) == Config()


def test_a_file_with_a_stranger_is_refused():
    with pytest.raises(
        ConfigError, match=r"train\.gsb is not a configuration key.*\n.*did you mean train\.gbs\?"
    ):
        from_yaml("train: {gsb: 4}")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.gbss", "train.gbs"),
        ("gbs", "train.gbs"),
        ("optim.gbs", "train.gbs"),
        ("train.lr", "optim.lr"),
        ("micro_batch_size", "train.mbs"),
        ("model.num_attention_heads", "model.num_heads"),
        ("optim.warmup", "optim.warmup_steps"),
        ("parallel.tensor_model_parallel_size", "parallel.tp"),
        ("checkpoint.async_save", "checkpoint.async"),
        ("warmup_step", "optim.warmup_steps"),
        ("parallel.tensor", "parallel.tp"),
        ("parallel.expert_parallel", "parallel.ep"),
    ],
)
def test_unknown_keys_come_with_the_key_that_was_meant(written, meant):
    fault = faults([f"{written}=1"])["unknown-key"]
    assert written in fault.reason and fault.fix == f"did you mean {meant}?"


@pytest.mark.parametrize("written", ["dp", "parallel.dp", "parallel.data_parallel_size"])
def test_dp_is_explained_and_nothing_else_is_suggested(written):
    fault = faults([f"{written}=2"])["unknown-key"]
    assert "dp is the number of remaining ranks" in fault.reason and "did you mean" not in fault.fix


def test_no_key_is_suggested_for_nonsense():
    assert closest_key("qqqqqq", ["train.gbs", "optim.lr"]) is None
    assert "the groups are model, init" in faults(["qqqqqq=1"])["unknown-key"].fix


def test_faults_of_spelling_do_not_make_checks_lie():
    """train.gbs was meant to be 16; a check must not judge the default that stands in for it."""
    assert set(faults(["train.gbss=16", "train.steps=-1", "data.train=x"], world=16)) == {
        "unknown-key",
        "train-steps",
        "data-train-files",
    }
    assert "gbs-splits" in faults(["data.train=x"], world=16)


def test_an_unknown_experiment_leaves_only_what_was_said_to_the_checks():
    assert set(faults(["experiment=quikstart", "optim.lr=-1"], world=3)) == {
        "unknown-option",
        "optim-lr",
    }


@pytest.mark.parametrize("fix", ["precision.dtype=bf16", "optim.name=muon", "recompute.mode=full"])
def test_a_value_given_to_its_group_is_told_its_key(fix):
    group, value = fix.partition(".")[0], fix.partition("=")[2]
    assert faults([f"{group}={value}"])["unknown-option"].fix == fix


def test_an_unknown_model_silences_only_the_checks_of_the_model():
    assert set(faults(["model=gpt3", "parallel.tp=5", "train.gbs=7"], world=3)) == {
        "unknown-option",
        "world-fits",
        "data-train-given",
    }


def from_folder(folder):
    if folder == "broken":
        raise ValueError("no config.json")
    return {
        "name": "imported",
        "num_layers": 3,
        "hidden_size": 96,
        "rope_scaling": {"type": "llama3", "factor": 8.0},
    }


def test_model_from_hf_replaces_the_group_and_bows_to_the_command_line():
    argv = [
        "model=llama3_1b",
        "model.from_hf=some/dir",
        "model.num_layers=5",
        "model.rope_scaling.factor=4",
    ]
    model = load_config(argv, model_from_hf=from_folder).model
    assert (model.name, model.from_hf, model.num_layers, model.hidden_size) == (
        "imported",
        "some/dir",
        5,
        96,
    )
    assert (model.rope_scaling.type, model.rope_scaling.factor) == ("llama3", 4.0)
    assert model.vocab_size == 128256, "what the folder does not say stays"


def test_a_folder_that_cannot_be_read_is_one_fault():
    found = faults(
        ["model.from_hf=broken", "parallel.tp=3", "data.train=x", "train.gbs=7", "train.mbs=2"],
        world=3,
        model_from_hf=from_folder,
    )
    assert set(found) == {"model-from-hf", "data-train-files", "gbs-splits"}
    assert "broken: no config.json" in found["model-from-hf"].reason


def test_own_folder_of_groups(tmp_path):
    folder = tmp_path / "my conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text(
        "defaults: [tiny, _self_]\nname: mine\nnum_layers: 9\n"
    )
    (folder / "experiment").mkdir()
    (folder / "experiment" / "try.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\n"
    )
    for argv in (["--config-dir", str(folder)], [f"--config-dir={folder}"]):
        assert load_config([*argv, "experiment=try"]).model.num_layers == 9
    assert "mine" in faults(["--config-dir", str(folder), "model=min"])["unknown-option"].fix
    assert (
        "no such folder" in faults(["--config-dir", str(tmp_path / "absent")])["config-dir"].reason
    )


def test_own_file_with_a_stranger_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "long.yaml").write_text("steps: 10\nwarmup: 3\n")
    found = faults(["--config-dir", str(tmp_path), "train=long"])
    assert "train.warmup is not a configuration key" in found["unknown-key"].reason


def test_interpolations_and_values_that_must_be_given(tmp_path):
    assert load_config(["log.dir=r", "log.jsonl=${log.dir}/x.jsonl"]).log.jsonl == "r/x.jsonl"
    assert "nope" in faults(["log.dir=${nope}"])["composition"].reason
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ours.yaml").write_text("train: ???\n")
    assert (
        "data.train" in faults(["--config-dir", str(tmp_path), "data=ours"])["composition"].reason
    )


def test_help_lists_groups_fields_defaults_and_units(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help", "model=nonsense"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for words in (
        "llama3_405b",
        "quickstart",
        "--config-dir",
        "gbs: 8",
        "[sequences] global batch",
        "Exit codes",
    ):
        assert words in text


@pytest.mark.parametrize("flags", [["--cfg"], ["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_what_would_run(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config([*flags, "experiment=quickstart", "train.gbs=32"], world=3)
    assert stop.value.code == 0
    assert from_yaml(capsys.readouterr().out) == load_config(
        ["experiment=quickstart", "train.gbs=32"]
    )


def test_other_ranks_print_nothing(capsys):
    for argv in (["--help"], ["--cfg"]):
        with pytest.raises(SystemExit):
            load_config(argv, rank=1)
    assert capsys.readouterr().out == ""


def test_refuse_speaks_on_one_rank_and_ends_all(capsys):
    found = list(faults(["train.gbss=4", "optim.lr=x"]).values())
    for rank in (1, 0):
        with pytest.raises(SystemExit) as stop:
            refuse(found, rank)
        assert stop.value.code == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert (told.err == "") == (rank == 1)
    assert (
        "2 faults" in told.err and "did you mean train.gbs?" in told.err and "(got 'x')" in told.err
    )
