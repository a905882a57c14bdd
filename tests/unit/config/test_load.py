"""From words on a command line to a typed configuration: values, precedence, output."""

import pytest

from megatron5d.config.convert import from_dict, to_dict, value_of
from megatron5d.config.errors import ConfigError, closest_key, refuse
from megatron5d.config.load import from_yaml, keys_given, load_config, to_yaml
from megatron5d.config.schema import Config


def faults(*argv, **options):
    with pytest.raises(ConfigError) as error:
        load_config(argv, **options)
    return {fault.id: fault for fault in error.value.faults}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.gbs=16", 16),
        ("++train.gbs=3", 3),
        ("optim.lr=1e-4", 1e-4),
        ("optim.clip=1", 1.0),
        ("parallel.sp=true", True),
        ("model.attention_window=null", None),
        # commas and single words make lists
        ("optim.betas=0.8,0.99", [0.8, 0.99]),
        ("moe.balance=aux", ["aux"]),
        ("data.train=0.5 a/b", ["0.5 a/b"]),
        ("data.train=[0.7 a/b, 0.3 c]", ["0.7 a/b", "0.3 c"]),
        ("pipeline.layout=[1,1]", [1, 1]),
        # texts that look like other types
        ("data.split=969,30,1", "969,30,1"),
        ("log.wandb.name=007", "007"),
        ("checkpoint.dir=2024", "2024"),
        ("log.wandb.project=true", "true"),
        ("checkpoint.async=false", False),
        # an integer, as in the run.json of earlier versions, keeps as many of the newest
        ("checkpoint.keep=3", "3"),
        ("checkpoint.keep=last:3+every:100+best:2", "last:3+every:100+best:2"),
        # Megatron's layouts
        ("pipeline.layout=Et|t|tmL", [1, 1, 2]),
        ("pipeline.layout='Et*3|(tt|)*29,m|L'", [3, *[2] * 29, 1, 0]),
        ("pipeline.layout='E|(t|)*2(m|)*2 L'", [0, 1, 1, 1, 1, 0]),
        ("pipeline.layout='Et|((tt|)*2t|)*2L'", [1, 2, 2, 1, 2, 2, 1, 0]),
    ],
)
def test_values_become_the_types_of_the_schema(words, expected):
    value = value_of(load_config([words]), words.lstrip("+").partition("=")[0])
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("text", ["t|tL", "Et|mt|L", "Et|L|t", "Et|x|L", "'Et|(t|L'"])
def test_a_layout_that_is_not_megatrons(text):
    (fault,) = faults(f"pipeline.layout={text}").values()
    assert fault.id == "wrong-type" and "must be a list of integers" in fault.reason


def test_keys_in_mappings_are_those_of_yaml():
    assert to_dict(Config())["checkpoint"]["async"] is True
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


def test_renamed_keys_keep_their_old_names(tmp_path):
    config = load_config(["parallel.regather=per_step", "+parallel.reduce=per_step"])
    assert config.parallel.zero3_gather == config.parallel.grad_reduce == "per_step"
    assert from_dict({"parallel": {"regather": "per_step", "reduce": "per_step"}}) == config
    text = "# @package _global_\nparallel: {regather: per_step, reduce: per_step}\n"
    argv = with_file(tmp_path, "experiment/old.yaml", text)
    assert load_config([*argv, "experiment=old"]) == config
    assert keys_given(["parallel.regather=per_step"]) == {"parallel.zero3_gather"}


def with_file(folder, name, text):
    """Writes a file of a config folder; the flag that reads it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return ["--config-dir", str(folder)]


def test_mappings_are_merged():
    config = load_config(
        ["model.rope_scaling={type: llama3, factor: 8}", "train={gbs: 4, steps: 7}"]
    )
    assert (config.model.rope_scaling.type, config.model.rope_scaling.factor) == ("llama3", 8.0)
    assert (config.train.gbs, config.train.steps, config.train.mbs) == (4, 7, 1)


def test_yaml_and_back():
    words = ["experiment=llama3_8b", "train.gbs_ramp=[16,16,1000]", "model.attention_window=4096"]
    config = load_config(words)
    assert from_yaml(to_yaml(config)) == config
    assert from_dict(to_dict(config)) == config


def test_missing_keys_of_an_old_file_keep_their_defaults():
    data = to_dict(Config())
    del data["train"]["z_loss"]
    del data["moe"]
    assert from_dict(data) == Config()


def test_unknown_keys_of_a_file_are_rejected():
    reason = r"train\.gsb is not a configuration key.*\n.*did you mean train\.gbs\?"
    with pytest.raises(ConfigError, match=reason):
        from_yaml("train: {gsb: 4}")


@pytest.mark.parametrize(
    ("written", "key"),
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
def test_fault_of_an_unknown_key_names_the_nearest(written, key):
    fault = faults(f"{written}=1")["unknown-key"]
    assert written in fault.reason and fault.fix == f"did you mean {key}?"


@pytest.mark.parametrize("written", ["dp", "parallel.dp", "parallel.data_parallel_size"])
def test_fault_of_dp_explains_it(written):
    fault = faults(f"{written}=2")["unknown-key"]
    assert "dp is the number of remaining ranks" in fault.reason
    assert "did you mean" not in fault.fix


def test_no_key_is_suggested_for_nonsense():
    assert closest_key("qqqqqq", ["train.gbs", "optim.lr"]) is None
    assert "the groups are model, init" in faults("qqqqqq=1")["unknown-key"].fix


@pytest.mark.parametrize(
    ("words", "world", "ids"),
    [
        # train.gbs was meant to be 16, so no check judges its default
        (
            "train.gbss=16 train.steps=-1 data.train=x",
            16,
            "unknown-key train-steps data-train-files",
        ),
        ("data.train=x", 16, "data-train-files gbs-splits"),
        ("experiment=quikstart optim.lr=-1", 3, "unknown-option optim-lr"),
        # the model is unknown, but nothing else
        ("model=gpt3 parallel.tp=5 train.gbs=7", 3, "unknown-option world-fits data-train-given"),
    ],
)
def test_misspelled_words_silence_the_checks_of_their_keys(words, world, ids):
    assert set(faults(*words.split(), world=world)) == set(ids.split())


@pytest.mark.parametrize("fix", ["precision.dtype=bf16", "optim.name=muon", "recompute.mode=full"])
def test_a_value_given_to_its_group_gets_its_key(fix):
    group, value = fix.partition(".")[0], fix.partition("=")[2]
    assert faults(f"{group}={value}")["unknown-option"].fix == fix


def from_folder(folder):
    if folder == "broken":
        raise ValueError("no config.json")
    scaling = {"type": "llama3", "factor": 8.0}
    return {"name": "imported", "num_layers": 3, "hidden_size": 96, "rope_scaling": scaling}


def test_model_from_hf_replaces_the_group_but_not_the_command_line():
    words = ["model=llama3_1b", "model.from_hf=some/dir", "model.num_layers=5"]
    model = load_config(
        [*words, "model.rope_scaling.factor=4"], model_readers={"from_hf": from_folder}
    ).model
    assert (model.name, model.from_hf, model.num_layers) == ("imported", "some/dir", 5)
    assert (model.rope_scaling.type, model.rope_scaling.factor) == ("llama3", 4.0)
    assert model.hidden_size == 96
    assert model.vocab_size == 128256, "which the folder does not give"


def test_initial_weights_bring_their_model_unless_one_is_chosen():
    readers = {"from_hf": from_folder, "from_checkpoint": from_folder}

    def model_of(*words: str):
        return load_config(words, model_readers=readers).model

    for name in readers:
        model = model_of(f"init.{name}=dir", "model.num_layers=5")
        assert (model.name, getattr(model, name), model.num_layers) == ("imported", "dir", 5)
        assert model_of(f"init.{name}=dir", "model=llama3_1b").name == "llama3_1b"
        assert model_of(f"init.{name}=dir", "experiment=gpt2_124m").num_layers == 12
        assert model_of(f"model.{name}=dir").hidden_size == 96


def test_a_folder_that_cannot_be_read_is_one_fault():
    words = ["model.from_hf=broken", "parallel.tp=3", "data.train=x", "train.gbs=7", "train.mbs=2"]
    found = faults(*words, world=3, model_readers={"from_hf": from_folder})
    assert set(found) == {"model-from-hf", "data-train-files", "gbs-splits"}
    assert "broken: no config.json" in found["model-from-hf"].reason


def test_config_dir(tmp_path):
    folder = tmp_path / "my conf"
    with_file(folder, "model/mine.yaml", "defaults: [tiny, _self_]\nname: mine\nnum_layers: 9\n")
    text = "# @package _global_\ndefaults:\n  - override /model: mine\n"
    argv = with_file(folder, "experiment/try.yaml", text)
    for flag in (argv, ["=".join(argv)]):
        assert load_config([*flag, "experiment=try"]).model.num_layers == 9
    assert "mine" in faults(*argv, "model=min")["unknown-option"].fix
    assert "no such folder" in faults("--config-dir", str(tmp_path / "no"))["config-dir"].reason


def test_unknown_keys_and_missing_values_of_a_config_dir_are_rejected(tmp_path):
    argv = with_file(tmp_path, "train/long.yaml", "steps: 10\nwarmup: 3\n")
    reason = faults(*argv, "train=long")["unknown-key"].reason
    assert "train.warmup is not a configuration key" in reason
    argv = with_file(tmp_path, "data/ours.yaml", "train: ???\n")
    assert "data.train" in faults(*argv, "data=ours")["composition"].reason


def test_log_dir_alone_records_everything_in_it():
    config = load_config(["log.dir=r", "log.profile=${checkpoint.dir}/profile"])
    assert (config.log.jsonl, config.checkpoint.dir) == ("r/metrics.jsonl", "r/checkpoints")
    assert config.log.profile == "r/checkpoints/profile"
    config = load_config(["log.dir=r", "log.jsonl=null", "checkpoint.dir=null"])
    assert (config.log.jsonl, config.checkpoint.dir) == (None, None)
    assert (Config().log.jsonl, Config().checkpoint.dir) == (None, None)


def test_interpolations():
    assert load_config(["log.dir=r", "log.jsonl=${log.dir}/x.jsonl"]).log.jsonl == "r/x.jsonl"
    assert "nope" in faults("log.dir=${nope}")["composition"].reason


def test_help_lists_groups_keys_defaults_and_units(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help", "model=nonsense"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for words in ("llama3_405b", "quickstart", "--config-dir", "gbs: 8", "Exit codes"):
        assert words in text
    assert "[sequences] global batch" in text


@pytest.mark.parametrize("flags", [["--cfg"], ["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_what_would_run(flags, capsys):
    words = ["experiment=quickstart", "train.gbs=32"]
    with pytest.raises(SystemExit) as stop:
        load_config([*flags, *words], world=3)
    assert stop.value.code == 0
    assert from_yaml(capsys.readouterr().out) == load_config(words)


@pytest.mark.parametrize("flag", ["--help", "--cfg"])
def test_other_ranks_print_nothing(flag, capsys):
    with pytest.raises(SystemExit):
        load_config([flag], rank=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_refuse_prints_on_one_rank_and_ends_all(rank, capsys):
    with pytest.raises(SystemExit) as stop:
        refuse(list(faults("train.gbss=4", "optim.lr=x").values()), rank)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and (printed.err == "") == (rank == 1)
    for words in ("2 faults", "did you mean train.gbs?", "(got 'x')") if rank == 0 else ():
        assert words in printed.err
