"""Command line of tools/schedule.py: figures, pictures, files, and one-line error messages."""

import json
import subprocess
import sys

import pytest

from megatron5d.model.partition import BALANCES
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import write_program
from megatron5d.tools.schedule import main

REAL = "F=1,I=1.2,W=0.8,comm=0.1"
SIZES = ("--pp", "4", "--microbatches", "8")
NAMED = ("--schedule", "1f1b", *SIZES)


def output(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def error_of(capsys, *arguments):
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_simulate_prints_one_object(capsys):
    sizes = ("--pp", "16", "--microbatches", "64")
    figures = json.loads(
        output(capsys, "simulate", "--schedule", "dualpipe", *sizes, "--costs", REAL, "--json")
    )
    assert figures["overhead"] == pytest.approx(26.0) and figures["makespan"] == pytest.approx(
        64 * 3 + 26
    )
    assert figures["bubble"] == pytest.approx(26 / 218)
    assert figures["peak_activations"] == [17.0] * 16 and figures["copies"] == 2
    moe = json.loads(
        output(
            capsys,
            "simulate",
            "--schedule",
            "dualpipe",
            *sizes,
            "--costs",
            "a2aF=0.5,a2aB=0.5",
            "--json",
        )
    )
    assert moe["overhead"] == pytest.approx(34.5)


def test_simulate_in_bytes_and_as_text(capsys):
    sizes = ("--schedule", "1f1b", "--pp", "2", "--microbatches", "4")
    figures = json.loads(output(capsys, "simulate", *sizes, "--activation-bytes", "1000", "--json"))
    assert figures["peak_bytes"] == [2000, 1000]
    assert "overhead  3.0" in output(capsys, "simulate", *sizes)


def test_uneven_stages(capsys):
    sizes = ("--schedule", "gpipe", "--pp", "2", "--microbatches", "1", "--json")
    figures = json.loads(output(capsys, "simulate", *sizes, "--stage-scale", "0.5,2"))
    assert figures["makespan"] == 7.5
    assert "--stage-scale has 3 entries" in error_of(
        capsys, "simulate", *sizes, "--stage-scale", "1,2,3"
    )
    assert "must be numbers such as" in error_of(capsys, "simulate", *sizes, "--stage-scale", "1,x")


def test_layers_with_costly_head(capsys):
    """Ten layers on four ranks, 2.5 per rank; the head costs 3.75, so the last rank has none."""
    sizes = ("--pp", "4", "--microbatches", "8")
    ends = ("--layers", "10", "--head", "1.5", "--dense", "1", "--costs", "a2aF=0.5,a2aB=0.5")
    simulated = json.loads(
        output(capsys, "simulate", "--schedule", "1f1b", *sizes, *ends, "--json")
    )
    assert simulated["peak_activations"] == [4 * 4 / 2.5, 3 * 3 / 2.5, 2 * 3 / 2.5, 0]
    # the first rank's four layers
    assert simulated["makespan"] - simulated["overhead"] == pytest.approx(3 * 8 * 4 / 2.5)
    result = json.loads(
        output(
            capsys,
            "search",
            *sizes,
            *ends,
            "--memory",
            "2",
            "--evaluations",
            "200",
            "--seed",
            "1",
            "--json",
        )
    )
    assert sum(result["layout"]) == 10 and result["balance"] in BALANCES
    assert result["makespan"] < result["best_named_makespan"]
    assert "--layers" in error_of(capsys, "simulate", "--schedule", "1f1b", *sizes, "--head", "1.5")
    both = error_of(
        capsys,
        "simulate",
        "--schedule",
        "1f1b",
        *sizes,
        "--layers",
        "10",
        "--stage-scale",
        "1,1,1,1",
    )
    assert "leave one out" in both
    empty = ("--layers", "7", "--balance", "ranks")  # on eight stages: one takes no time
    assert " W7" in output(capsys, "show", "--schedule", "zb_v", *sizes, *empty)


def test_compare_lists_every_schedule_best_first(capsys):
    sizes = ("--pp", "4", "--microbatches", "8")
    rows = json.loads(output(capsys, "compare", *sizes, "--json"))
    assert {row["schedule"].split()[0] for row in rows} == set(schedule_names())
    assert [row["makespan"] for row in rows] == sorted(row["makespan"] for row in rows)
    fitting = json.loads(output(capsys, "compare", *sizes, "--memory", "1", "--json"))
    assert 0 < len(fitting) < len(rows) and all(
        max(row["peak_activations"]) <= 4 for row in fitting
    )
    table = output(capsys, "compare", "--pp", "3", "--microbatches", "8")
    assert "zb_v" in table and "not possible: dualpipe: " in table


def test_show_draws_and_writes(capsys, tmp_path):
    sizes = ("--schedule", "zb_v", "--pp", "2", "--microbatches", "4")
    assert len(output(capsys, "show", *sizes).splitlines()) == 3
    svg, png, text = (tmp_path / name for name in ("a.svg", "a.png", "a.csv"))
    output(capsys, "show", *sizes, "--svg", str(svg), "--png", str(png), "--csv", str(text))
    assert svg.read_text().startswith("<svg") and png.read_bytes().startswith(b"\x89PNG")
    assert text.read_text() == write_program(build_program("zb_v", 2, 4))
    reread = ("simulate", "--schedule", f"file:{text}", "--pp", "2", "--microbatches", "4")
    assert "overhead  0.5" in output(capsys, *reread)


def test_verify_a_file(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(write_program(build_program("1f1b", 4, 8)))
    check = ("verify", str(file), "--pp", "4", "--microbatches", "8")
    assert "correct" in output(capsys, *check)
    assert json.loads(output(capsys, *check, "--json"))["peak_activations"] == [4, 3, 2, 1]
    assert "0F3 raises the activations to 4" in error_of(capsys, *check, "--memory", "0.75")
    file.write_text(file.read_text().replace("2F5,", ""))
    assert "mine.csv: rank 2, position 8: 2F5 is missing" in error_of(capsys, *check)
    assert "pp=5; set --pp 4" in error_of(
        capsys, "verify", str(file), "--pp", "5", "--microbatches", "8"
    )
    named = ("simulate", "--schedule", f"file:{file}", *SIZES)
    assert "needs --vpp 1 (got 2); set --vpp 1" in error_of(capsys, *named, "--vpp", "2")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ("simulate", "--schedule", "dualpip", "--pp", "4", "--microbatches", "8"),
            "did you mean dualpipe",
        ),
        (
            ("simulate", "--schedule", "dualpipe", "--pp", "5", "--microbatches", "8"),
            "--pp 5 is odd; set --pp 6",
        ),
        (
            ("simulate", *NAMED, "--layers", "3"),
            "the 4 stages of the pipeline (--pp times the",
        ),
        (
            ("compare", *SIZES, "--memory", "0.1"),
            "no schedule holds at most 0.4 micro-batches of one rank's layers; ",
        ),
        (
            (
                "simulate",
                "--schedule",
                "1f1b",
                "--pp",
                "4",
                "--microbatches",
                "8",
                "--costs",
                "Q=1",
            ),
            "unknown key 'Q'",
        ),
        (
            ("show", "--schedule", "file:/nowhere/x.csv", "--pp", "4", "--microbatches", "8"),
            "x.csv cannot be read: No such file",
        ),
        (
            ("verify", "/nowhere/x.csv", "--pp", "4", "--microbatches", "8"),
            "verify /nowhere/x.csv cannot be read: No ",
        ),
        *(
            (
                ("show", *NAMED, f"--{kind}", "/nowhere/x"),
                f"--{kind} /nowhere/x cannot be written: No such file or ",
            )
            for kind in ("svg", "png", "trace", "csv")
        ),
        (("verify", "/dev/null", "--pp", "4", "--microbatches", "8"), "null has no actions"),
        (
            ("search", "--pp", "4", "--microbatches", "8", "--memory", "1", "--seconds", "-1"),
            "--seconds must be above 0 (got -1)",
        ),
        (
            ("compare", "--pp", "4", "--microbatches", "8", "--memory", "-1"),
            "--memory must be above 0 (got -1)",
        ),
        (("compare", "--pp", "0", "--microbatches", "8"), "--pp must be above 0 (got 0)"),
        (
            ("simulate", "--schedule", "dualpipe_v", "--pp", "2", "--microbatches", "3"),
            "at least 2·pp = 4 micro-batches, ",
        ),
        (
            ("search", *SIZES, "--memory", "1", "--evaluations", "-1"),
            "--evaluations must be at least 0 (got -1)",
        ),
        (("search", *SIZES, "--evaluations", "1", "--seed", "-1"), "--seed must be at least 0"),
        (("show", *NAMED, "--costs", "F=0,I=0,W=0"), "no action takes time"),
        (("simulate", *NAMED, "--costs", "F=1,F=2"), "F is given twice"),
        (("simulate", *NAMED, "--stage-scale", "1,1,1,-1"), "--stage-scale -1 must be"),
        (("simulate", *NAMED, "--stage-scale", "1,1,1,nan"), "--stage-scale nan must be"),
        (("simulate", *NAMED, "--layers", "8", "--head", "-1"), "--head must be at least 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, words):
    message = error_of(capsys, *arguments)
    assert (
        words in message and message.startswith("schedule.py: error: ") and message.count("\n") == 1
    )


@pytest.mark.parametrize("arguments", [(), ("simulate",), ("frobnicate",), ("verify", "x.csv")])
def test_argparse_refuses_with_exit_code_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2


def test_help_from_the_repository_root():
    run = subprocess.run(
        [sys.executable, "tools/schedule.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and all(
        word in run.stdout for word in ("show", "simulate", "compare", "verify")
    )
