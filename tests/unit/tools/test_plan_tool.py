"""tools/plan.py plans runs without their data and machines."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.config.convert import keys
from megatron5d.planning import layout_search
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.plan import main
from megatron5d.tools.visualize import main as report

ROOT = Path(__file__).parents[3]
RUN = shlex.split("memory --world 8 model=tiny train.gbs=8 precision.dtype=bf16 parallel.pp=2")


def test_memory_of_every_pipeline_rank_as_json(capsys):
    assert main([*RUN, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert sorted(record["ranks"]) == ["0", "1"]
    for rank in record["ranks"].values():
        assert sum(rank["bytes"].values()) == rank["needed"] > rank["allocated"] > rank["resident"]


@pytest.mark.slow
def test_plans_without_triton_are_those_with_it(capsys):
    """A laptop plans like the cluster: the meta device runs the same code around every kernel."""
    plans = [
        "memory --device a100 model=tiny_gpt2 train.seq_len=512 data.document_mask=true",
        "memory --device h100 model=llama3_1b parallel.tp=4 parallel.sp=true "
        "parallel.tp_overlap=fused",
        "memory --device h100 model=deepseek_v2_lite precision.fp8=blockwise parallel.ep=4 "
        "parallel.zero=3",
        "memory --device b200 model=mixtral_8x7b precision.fp8=tensorwise parallel.ep=8 "
        "moe.fp8_dispatch=true",
        "step --device h200 model=llama3_1b parallel.cp=2",
    ]
    alike = ["--world", "8", "--json", "train.gbs=8", "precision.dtype=bf16"]
    arguments = [[*words.split(), *alike] for words in plans]
    assert [main(words) for words in arguments] == [0] * len(plans)
    output = capsys.readouterr().out
    code = (
        "import sys; sys.modules['triton'] = None; from tools.plan import main; "
        f"[main(words) for words in {arguments}]"
    )
    without = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert without.stdout == output, without.stderr


def test_methods_of_context_parallelism_in_their_order(capsys):
    run = shlex.split(
        "context --world 16 model=llama3_8b train.seq_len=131072 train.gbs=16 parallel.cp=16"
    )
    assert main([*run, "--node", "8", "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["choices"]
    assert [method["cp_inner"] for method in methods] == [8, 4, 2, 1]
    assert methods[-1]["method"] == "ring"
    assert main([*run, "--node", "16"]) == 0
    assert "ulysses" in capsys.readouterr().out.splitlines()[2]
    assert (
        main([*run, "parallel.cp=1"]) == 2
        and "requires parallel.cp > 1 (got 1)" in capsys.readouterr().err
    )


def test_a_device_that_is_too_small(capsys):
    assert main([*RUN, "--device-gb", "80"]) == 0 and "It fits 74.51 GiB" in capsys.readouterr().out
    for size in ("0", "1e300"):
        assert (
            main([*RUN, "--device-gb", size]) == 2
            and "must be above 0 and below 10⁹" in capsys.readouterr().err
        )
    assert (
        main([*RUN, "--device-gb", "0.001"]) == 1
        and "WARNING: pipeline rank" in capsys.readouterr().out
    )


def test_a_device_by_name_brings_its_memory(capsys):
    assert main([*RUN, "--device", "h100"]) == 0 and "It fits 79.00 GiB." in capsys.readouterr().out
    assert (
        main([*RUN, "--device", "a100_40gb"]) == 0
        and "It fits 39.00 GiB." in capsys.readouterr().out
    )
    assert main([*RUN, "--device", "sm_90"]) == 0 and "fits" not in capsys.readouterr().out


def test_overrides_and_options_in_any_order(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "defaults: [tiny, _self_]\nname: mine\nnum_layers: 4\n"
    )
    mixed = [
        "memory",
        "model=mine",
        "--world",
        "8",
        "train.gbs=8",
        "--config-dir",
        str(tmp_path),
        "parallel.pp=4",
    ]
    assert main([*mixed, "--json", "precision.dtype=bf16"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 4
    with pytest.raises(SystemExit) as refused:
        main([*mixed, "--jsn", "precision.dtype=bf16"])
    assert (
        refused.value.code == 2
        and "--jsn is not an option; did you mean --json?" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "override", ["parallel.tp=3", "train.stepz=3", "pipeline.schedule=dualpipe_x"]
)
def test_invalid_run_is_rejected(override, capsys):
    assert main([*RUN, override]) == 2
    assert "the configuration is refused" in capsys.readouterr().err


def test_a_fix_names_numbers_of_ranks(capsys):
    assert main(["memory", "--world", "3", "model=tiny", "parallel.tp=2"]) == 2
    assert "parallel.tp=1, or use 2 or 4 ranks " in capsys.readouterr().err


def test_invalid_machine_is_rejected(capsys):
    for words, message in (
        (["--device", "sm_1"], "--device sm_1: no kernel"),
        (["--world", "0"], "at least 1 rank"),
        (["--device-gb", "-4"], "--device-gb must be above 0 and below 10⁹ (got -4)"),
        (
            ["--imbalance", "0.5"],
            "--imbalance must be at least 1, an even share (got 0.5)",
        ),
    ):
        assert main([*RUN, *words]) == 2
        assert message in capsys.readouterr().err


def test_nearest_fit_is_named(capsys):
    """The nearest fit is proposed; full recompute would also fit, but costs more."""
    large = ["memory", "--world", "2", "model=tiny", "model.num_layers=4", "precision.dtype=bf16"]
    large += ["train.gbs=16", "train.mbs=8"]
    assert main([*large, "train.seq_len=4096", "--device-gb", "0.95"]) == 1
    assert "Nearest fit: train.mbs=" in capsys.readouterr().out
    assert main([*large, "--device-gb", "0.5"]) == 1
    assert "tensor parallelism are not enough" in capsys.readouterr().out


def test_memory_of_other_code_bases(capsys):
    peaks = {}
    for name in ("megatron5d", "megatron", "megatron,te_fused_loss", "nanotron"):
        assert main([*RUN, "--json", "--as", name]) == 0
        peaks[name] = json.loads(capsys.readouterr().out)["ranks"]["1"]["allocated"]
    assert (
        peaks["megatron5d"] == peaks["megatron,te_fused_loss"] < peaks["megatron"]
        and peaks["nanotron"] > 0
    )
    assert main([*RUN, "--as", "nanotron,dropout"]) == 2 and "not known" in capsys.readouterr().err


STEP = shlex.split(
    "step --world 16 model=tiny train.gbs=32 precision.dtype=bf16 parallel.pp=2 parallel.tp=2"
)


def test_time_of_a_step(capsys):
    assert main([*STEP, "--device", "h100", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (
        sum(record["seconds"].values()) == pytest.approx(record["step_time_s"])
        and len(record["sent_bytes"]) == 2
    )
    assert main([*STEP, "--device", "h100", "--node", "1", "--network-gbps", "1"]) == 0
    slow = capsys.readouterr().out
    assert main([*STEP, "--tflops", "100", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert (device["flops"], device["flops_8bit"]) == (1e14, pytest.approx(1e14 * 1979 / 989))
    assert "bubble of the pipeline" in slow and "on h100_sxm, 1 in a node" in slow
    assert float(slow.split()[3]) > 2 * record["step_time_s"]


def test_muon_and_host_have_separate_lines(capsys):
    assert main([*STEP, "optim.name=muon", "optim.offload=true"]) == 0
    out = capsys.readouterr().out
    for line in (
        "Muon's iterations on full matrices",
        "Muon's all-to-alls",
        "copies to the host and back",
    ):
        assert line in out


def test_invalid_cluster_is_rejected(capsys):
    for words, message in (
        (["--device", "h101"], "--device must be one of a100,"),
        (["--node", "0"], "--node must be above 0 (got 0)"),
        (["--network-gbps", "-1"], "--network-gbps must be above 0 (got -1)"),
        (["--imbalance", "0.5"], "--imbalance must be at least 1"),
        (["precision.dtype=fp32"], "precision.dtype=bf16, because"),
        (["precision.fp8=tensorwise", "parallel.tp=1", "--device", "a100"], "requires FP8 kernels"),
        (["parallel.tp=3"], "the configuration is refused"),
    ):
        assert main([*STEP, *words]) == 2
        assert message in capsys.readouterr().err


SEARCH = shlex.split("search --world 4 model=tiny train.gbs=8 precision.dtype=bf16 parallel.cp=1")


def test_search_for_layouts(capsys, monkeypatch):
    monkeypatch.setattr(layout_search, "LIMIT", 10)
    assert main([*SEARCH, "parallel.tp=2", "--count", "2", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    times = [layout["step_time_s"] for layout in layouts]
    assert times == sorted(times)
    assert len(layouts) == 2 and all("parallel.tp" not in layout["overrides"] for layout in layouts)
    line = layouts[0]["overrides"].split()
    assert main(["step", *SEARCH[1:], "parallel.tp=2", *line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(
        layouts[0]["step_time_s"]
    )
    # which fixes the same
    assert main([*SEARCH, "parallel={tp: 2, sp: true}", "--count", "2", "--json"]) == 0
    alike = json.loads(capsys.readouterr().out)["layouts"]
    assert alike and all("parallel.tp" not in layout["overrides"] for layout in alike)
    assert (
        main([*SEARCH, "parallel.tp=3"]) == 2
        and "the configuration is refused" in capsys.readouterr().err
    )
    assert (
        main([*SEARCH, "--count", "0"]) == 2
        and "--count must be above 0 (got 0)" in capsys.readouterr().err
    )


def test_the_smallest_layout_is_named_where_none_fits(capsys):
    assert main([*SEARCH, "--device-gb", "0.7"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("None of the layouts examined fits 0.65 GiB")
    needed, words = second.removeprefix("The smallest of them needs ").split(" GiB: ")
    needs = {}
    for overrides in (
        words.split(),
        ["parallel.tp=2", "parallel.sp=true"],
        ["parallel.zero=3"],
        ["parallel.pp=2"],
    ):
        assert main(["memory", *SEARCH[1:], "--device", "h100", *overrides, "--json"]) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"].values()
        needs[" ".join(overrides)] = max(rank["needed"] for rank in ranks)
    assert min(needs.values()) == needs[words] == pytest.approx(float(needed) * 2**30, rel=0.01)


def test_search_with_user_defined_groups(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\n")
    mine = ["model=mine", "--config-dir", str(tmp_path), "parallel.tp=1", "parallel.pp=1"]
    assert main([*SEARCH, *mine, "--count", "1"]) == 0
    output = capsys.readouterr().out
    assert "\nmine in bf16" in output and f"--config-dir={tmp_path}" in output


@pytest.mark.parametrize(
    "machines, start",
    [
        ("--world 64 --node 4", "sbatch --nodes=16 --gpus-per-node=4 --ntasks-per-node=4"),
        ("--world 64", "sbatch --nodes=8 --gpus-per-node=8 launch"),
        ("--world 12", "sbatch --nodes=2 --gpus-per-node=6 --ntasks-per-node=6"),
        ("--world 8 --device gb200", "sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4"),
        ("--world 4 --device gb200", "bash launch/local.sh 4"),
    ],
)
def test_the_command_starts_one_rank_a_gpu(machines, start, capsys):
    one = shlex.split(
        "model=tiny precision.dtype=bf16 train.gbs=192 parallel.tp=1 parallel.pp=1 train.mbs=1"
    )
    assert main(["search", *machines.split(), "--count", "1", *one, "recompute.mode=none"]) == 0
    assert f"Run the first one: {start}" in capsys.readouterr().out


def test_search_prints_progress_the_run_and_a_working_command(capsys, monkeypatch):
    monkeypatch.setattr("megatron5d.tools.planning.search.PROGRESS_EVERY_S", 0.0)
    run = shlex.split("search --world 2 --device h100 --count 1 model=tiny precision.dtype=bf16")
    fixed = [
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.cp=1",
        "recompute.mode=none",
        "data.split='99,1,0'",
    ]
    assert main([*run, *fixed]) == 0
    captured = capsys.readouterr()
    assert "tried 1 shapes of a layout" in captured.err and "times and memories, of" in captured.err
    assert "tiny in bf16, train.gbs 8, train.seq_len 128\n" in captured.out
    (command,) = [
        line.partition(": ")[2]
        for line in captured.out.splitlines()
        if line.startswith("Run the first one")
    ]
    start, script, world, *overrides = shlex.split(command)
    assert (start, script, world) == ("bash", "launch/local.sh", "2")
    assert {"data.train=[data/corpus]", *run[-2:], *fixed} <= set(overrides)
    assert planned_config(overrides, 2).precision.dtype == "bf16"


def test_large_model_in_fp32_is_noted_with_its_experiment(capsys):
    large = ["memory", "--world", "64", "model=mixtral_8x7b", "train.gbs=64", "parallel.ep=8"]
    assert main(large) == 0
    noted = capsys.readouterr().err
    assert (
        "planned for mixtral_8x7b in fp32, train.gbs 64, train.seq_len 128; "
        "experiment=mixtral_8x7b sets" in noted
    )
    assert main([*large, "precision.dtype=bf16"]) == 0 and not capsys.readouterr().err


def test_context_notes_fp32_unless_it_is_set(capsys):
    context = ["context", "--world", "16", "model=llama3_8b", "parallel.cp=4"]
    assert main(context) == 0
    assert "planned for llama3_8b in fp32" in capsys.readouterr().err
    assert main([*context, "precision.dtype=fp32"]) == 0 and not capsys.readouterr().err


def test_memory_prints_the_layout(capsys):
    assert main([*RUN]) == 0
    assert " ranks: dp " in capsys.readouterr().out.splitlines()[0]


PATHS = shlex.split("""
    moe.record moe.replay checkpoint.dir data.cache_dir data.tokenizer init.from_checkpoint
    init.from_hf log.dir log.jsonl log.memory_snapshot log.profile log.tensorboard log.wandb.dir
""")
NO_PATHS = shlex.split("""
    pipeline.costs data.split checkpoint.hf_export log.wandb.name log.wandb.group
    log.wandb.entity
""")
READ_BY_PLANS = ["model.from_hf", "model.from_checkpoint"]


@pytest.mark.parametrize(
    "command", ["memory --device h100", "memory --device-gb 0.001", "step", "search", "report"]
)
def test_plan_touches_no_file_of_its_run(command, tmp_path, monkeypatch):
    """Planning builds models, while the files of the run are missing or belong to another run."""
    named = [key for key, kind in keys().items() if kind == (str | None)]
    assert sorted(named) == sorted([*PATHS, *NO_PATHS, *READ_BY_PLANS])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "left").write_text("of another run")
    run = shlex.split(
        "--world 2 model=tiny_moe precision.dtype=bf16 train.gbs=4 optim.freeze=[*router*]"
    )
    run += ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "recompute.mode=none"]
    tool, run = (
        (report, [command, *run]) if command == "report" else (main, [*command.split(), *run])
    )
    for path in ("absent", "left"):
        for excluded in ({"moe.record", "init.from_hf"}, {"moe.replay", "init.from_checkpoint"}):
            overrides = [
                f"{key}={path}{'/log' * (key == 'log.jsonl')}"
                for key in PATHS
                if key not in excluded
            ]
            assert tool([*run, *overrides, *["-o", "report.html"] * (command == "report")]) in (
                0,
                1,
            )
    assert {file.name for file in tmp_path.iterdir()} <= {"left", "report.html"}
    assert (tmp_path / "left").read_text() == "of another run"
