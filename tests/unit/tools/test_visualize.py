"""tools/visualize.py reads the logs of runs, draws their losses and summarizes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.tools.report.runs import find_logs, match_fields, read_curve, smoothed
from megatron5d.tools.visualize import main

ROOT = Path(__file__).resolve().parents[3]


def run_folder(folder, name="metrics.jsonl"):
    folder.mkdir(exist_ok=True)
    records = [
        {"step": s, "tokens": 100 * s, "loss": 8.0 - s, "grad_norm": 1 / s} for s in (1, 2, 3)
    ]
    records[1]["moe/layer_0/load"] = 1.5
    records[0]["initial_valid_loss"] = 8.5
    records[2]["valid_loss"] = 4.25
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_points_of_both_curves(tmp_path):
    curve = read_curve(*find_logs(run_folder(tmp_path / "run")))
    assert curve.name == "run"
    assert curve.train == [(100, 7.0), (200, 6.0), (300, 5.0)]
    assert curve.valid == {"valid_loss": [(0, 8.5), (300, 4.25)]}


def test_picture_and_summary(tmp_path, capsys):
    runs = [str(run_folder(tmp_path / name)) for name in ("a", "b")]
    out = tmp_path / "pictures" / "loss.png"
    assert main(["loss", *runs, "--out", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [f["run"] for f in figures] == ["a", "b"]
    assert (figures[0]["first_valid_loss"], figures[0]["last_valid_loss"]) == (8.5, 4.25)
    assert figures[1]["tokens"] == 300
    assert out.read_bytes().startswith(b"\x89PNG")


def test_each_validation_set_has_a_curve(tmp_path, capsys):
    first = {
        "tokens": 10,
        "loss": 2.0,
        "initial_valid_loss": 3.0,
        "initial_valid_loss/web": 3.5,
        "valid_loss/web": 2.5,
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(first) + "\n")
    assert read_curve(tmp_path / "log.jsonl").valid == {
        "valid_loss": [(0, 3.0)],
        "valid_loss/web": [(0, 3.5), (10, 2.5)],
    }
    assert main(["loss", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 0
    text = capsys.readouterr().out
    assert "validation loss 3.000 -> 3.000" in text
    assert "validation loss of web 3.500 -> 2.500" in text


def test_a_run_without_validation(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text('{"tokens": 10, "loss": 2.0}\n')
    assert main(["loss", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 0
    text = capsys.readouterr().out
    assert "2.000 -> 2.000" in text
    assert "validation loss" not in text


def test_evaluations_that_are_not_finite_are_skipped(tmp_path, monkeypatch, capsys):
    """Also: a log in the current directory has the name of that directory."""
    monkeypatch.chdir(tmp_path)
    first = {"tokens": 10, "loss": 2.0, "initial_valid_loss": 3.0, "valid_loss": 2.5}
    last = {"tokens": 20, "loss": None, "valid_loss": None}
    Path("log.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(last) + "\n")
    assert main(["loss", "log.jsonl", "--out", "x.svg"]) == 0
    assert f"{tmp_path.name}: validation loss 3.000 -> 2.500" in capsys.readouterr().out


def test_incomplete_last_line_is_skipped(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"tokens": 10, "loss": 2.0}\n{"tokens": 20, "lo')
    assert read_curve(tmp_path / "log.jsonl").train == [(10, 2.0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "absent does not exist"),
        (lambda p: p, "should hold one .jsonl file"),
        (lambda p: run_folder(run_folder(p, "a.jsonl"), "b.jsonl"), "a.jsonl, b.jsonl"),
        (lambda p: (p / "a.jsonl").write_text('{"loss": 1}\n') and p, "a.jsonl:1: not a record"),
        (
            lambda p: (p / "a.jsonl").write_text('{"tokens": 1, "loss": 1}\n{"tok\n') and p,
            "a.jsonl:2: not a record",
        ),
        (
            lambda p: (p / "a.jsonl").write_text('{"tokens": null, "loss": 1}\n') and p,
            "a.jsonl:1: not a record",
        ),
        (
            lambda p: (p / "a.jsonl").write_text('{"tokens": 1, "loss": {"a": 1}}\n') and p,
            "a.jsonl:1: not a record",
        ),
        (lambda p: (p / "a.jsonl").write_bytes(b"\xff\n") and p, "a.jsonl:1: not a record"),
        (lambda p: (p / "a.jsonl").touch() or p, "holds no record"),
    ],
)
def test_bad_input_is_named(tmp_path, capsys, make, message):
    assert main(["loss", str(make(tmp_path))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "ranks, out, message",
    [
        (
            "4",
            "/nowhere/x.svg",
            "--out /nowhere/x.svg cannot be written: No such file or directory",
        ),
        ("5", "x.svg", "--schedule dualpipe mirrors ranks in pairs, but --pp 5 is odd; set --pp 6"),
    ],
)
def test_schedule_errors_name_options_of_this_tool(capsys, ranks, out, message):
    named = ["--schedule", "dualpipe", "--pp", ranks, "--microbatches", "8"]
    assert main(["schedule", *named, "-o", out]) == 2
    assert capsys.readouterr().err == f"visualize: {message}\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--count", "0"], "--count must be above 0 (got 0)"),
        (["parallel.tp=2"], "fix: parallel.tp=1, or use 2 or 4 ranks"),
    ],
)
def test_a_sweep_without_a_layout_says_why(capsys, words, message):
    assert main(["sweep", "--world", "3", "model=tiny", "precision.dtype=bf16", *words]) == 2
    assert message in capsys.readouterr().err


def test_help():
    done = subprocess.run(
        [sys.executable, "tools/visualize.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "loss.png" in done.stdout


def test_runs_and_options_in_any_order(tmp_path, capsys):
    one, other = (str(run_folder(tmp_path / name)) for name in ("a", "b"))
    assert main(["loss", one, "--out", str(tmp_path / "loss.svg"), other, "--json"]) == 0
    assert [f["run"] for f in json.loads(capsys.readouterr().out)] == ["a", "b"]
    with pytest.raises(SystemExit) as ended:
        main(["loss", one, "--ot", str(tmp_path / "loss.svg"), other])
    assert ended.value.code == 2 and "did you mean --out?" in capsys.readouterr().err


def test_folder_of_runs_is_searched_and_equal_curves_are_named(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        run_folder(tmp_path / "runs" / name)
    out = tmp_path / "loss.svg"
    panels = "grad_norm,moe/layer_*/load"
    assert (
        main(
            ["loss", str(tmp_path / "runs"), "--panels", panels, "--smooth", "2", "--out", str(out)]
        )
        == 0
    )
    assert "b: every training loss equals that of a" in capsys.readouterr().out
    text = out.read_text()
    assert all(
        f"<!-- {label} -->" in text
        for label in ("grad_norm", "moe/layer_0/load", "a, training", "b, training")
    )


def test_panels_and_means(tmp_path):
    curves = [read_curve(*find_logs(run_folder(tmp_path / "run")))]
    assert smoothed(curves[0].train, 2) == [(100, 7.0), (200, 6.5), (300, 5.5)]
    assert match_fields(curves, "moe/*,grad_norm") == ["moe/layer_0/load", "grad_norm"]
    with pytest.raises(
        ValueError, match=r"--panels mfu matches no .*: grad_norm, moe/layer_0/load, step, tokens\)"
    ):
        match_fields(curves, "grad_norm,mfu")


def test_name_without_a_font_is_replaced(tmp_path, capfd, monkeypatch):
    from matplotlib import font_manager

    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    out = tmp_path / "loss.svg"
    assert main(["loss", str(run_folder(tmp_path / "语言模型")), "--out", str(out)]) == 0
    captured = capfd.readouterr()
    assert (
        captured.err == "run 1 is '语言模型': no installed font has its letters\n"
        and "语言模型: 300 tokens" in captured.out
    )
    assert "run 1, training" in out.read_text()
