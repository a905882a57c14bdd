"""The report in a real browser: switches and panes work, and the page sends no request."""

import json
import re
from collections import Counter

import pytest
from browser import Browser

from megatron5d.planning.clusters import cluster_called
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.planned_config import planned_config
from megatron5d.planning.time.predict import Estimator
from megatron5d.tools.report import collect
from megatron5d.tools.report.collect import SWITCHES, grid_record
from megatron5d.tools.report.report import ReportOptions, page_of, report_of
from megatron5d.tools.report.runs import run_record
from megatron5d.topology.grid import dense_grid, expert_grid, resolve

OVERRIDES = [
    *(
        "model=tiny_moe",
        "precision.dtype=bf16",
        "model.num_layers=4",
        "model.num_heads=4",
        "model.num_kv_heads=4",
    ),
    *(
        "parallel.tp=2",
        "parallel.sp=true",
        "parallel.cp=2",
        "parallel.pp=2",
        "parallel.ep=2",
        "parallel.zero=2",
    ),
    *("train.gbs=16", "train.seq_len=64", "pipeline.schedule=zb_h1"),
]
WORLD = 16
KINDS = [kind for _, kind in collect.DIMENSIONS]


@pytest.fixture(scope="module")
def report():
    options = ReportOptions(
        overrides=OVERRIDES, world=WORLD, device="h100", against="parallel.tp=1 parallel.sp=false"
    )
    log = [
        json.dumps(
            {
                "step": step,
                "loss": 7.0 - step / 50,
                "tokens": 64 * step,
                "step_time_s": 0.5,
                "bubble": 0.25,
                "tokens_per_s_per_gpu": 8.0,
                "zero_exposed_s": 0.01,
                "moe/layer_1/load": 1.5,
                "comm_tp_bytes": 123_000_000,
                "comm_tp_exposed_s": 0.04,
            }
        )
        for step in range(1, 31)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # The tests need no combinations of switches, which take seconds.
        patch.setattr(collect, "MAX_VARIANTS_S", 0.0)
        numbers = report_of(options)
    return numbers | {"runs": [run_record("a run", log, saved=[20])]}


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page = folder / "report.html"
    page.write_text(page_of(report))
    assert page.stat().st_size < 2e6
    with Browser(folder / "profile") as browser:
        browser.open(page)
        yield browser


@pytest.mark.parametrize(
    "overrides, error",
    [
        ([], "MFU ± 6% of it"),
        (["model=tiny_moe"], "MFU (no such run was measured)"),
        (["parallel.cp=2"], "MFU (no such run was measured)"),
        (["optim.name=muon"], "MFU (no such run was measured)"),
    ],
)
def test_error_of_predicted_times_is_shown_only_for_runs_like_the_measured_ones(overrides, error):
    numbers = {
        "needed_bytes": 2**30,
        "mfu": 0.25,
        "step_time_s": 1.0,
        "seconds": dict.fromkeys(KINDS, 0.0),
    }
    sentence = collect._sentence(planned_config(overrides, 2), numbers, [], None)
    assert f"25% {error}" in sentence


def test_numbers_are_those_of_the_planner(report):
    config = planned_config(OVERRIDES, WORLD)
    cluster = cluster_called("h100")
    layout = report["layouts"][0]
    numbers = layout["variants"][""]
    cost = Estimator(cluster).step(config, WORLD)
    assert numbers["step_time_s"] == cost.step_s and numbers["mfu"] == cost.mfu
    assert numbers["seconds"] == dict(cost.seconds) and numbers["sent_bytes"] == [
        dict(sent) for sent in cost.sent
    ]
    ranks = Forecaster(config, WORLD, Target("sm_90", config.moe.planned_imbalance)).ranks()
    assert numbers["memory"] == [ranks[rank].kinds() for rank in sorted(ranks)]
    timeline = layout["pipeline"][0]
    assert (
        timeline["makespan"] == cost.simulation.makespan
        and timeline["bubble"] == cost.simulation.bubble
    )
    slots = [len(line) for line in cost.program.ranks]
    assert [len(line) for line in timeline["slots"]] == slots


def test_world_and_events_are_read_from_the_log(report):
    (run,) = report["runs"]
    assert run["world"] == 16 and run["events"] == [{"step": 20, "what": "checkpoint saved"}]
    components = {"comm tp exposed": 0.04, "zero exposed": 0.01, "pipeline bubble": 0.125}
    assert dict(run["breakdown"]) == {"everything else": 0.325, **components}


def test_memory_over_a_step_peaks_at_the_forecast_and_follows_the_rank(browser, report):
    layout = report["layouts"][0]
    ranks = layout["memory_over_time"]["ranks"]
    for rank, forecast in zip(ranks, layout["variants"][""]["memory"]):
        moments = [sum(values) for values in zip(*rank["passing"].values())]
        assert len(set(moments)) > 4 and len(moments) == len(rank["start"]) == len(rank["end"])
        most = sum(rank["staying"].values()) + max(*moments, rank["end_of_step"])
        assert most == sum(forecast.values()) - forecast.get("setup", 0)
        assert {"weights", "gradients", "optimizer"} <= set(rank["staying"])
    drawn = []
    for pp_rank in (0, 1):
        browser.run("change({rank: withPipelineRank(arguments[0])})", pp_rank)
        assert f"Pipeline rank {pp_rank} over a step" in browser.run(
            "return document.querySelector('#memory').textContent"
        )
        paths = (
            "return [...document.querySelectorAll('#memory path')]"
            ".map((path) => path.getAttribute('d'))"
        )
        drawn.append(browser.run(paths))
    browser.run("change({rank: 0})")
    assert drawn[0] != drawn[1] and not any("NaN" in path for paths in drawn for path in paths)


def test_measured_bytes_and_waits_are_shown_next_to_the_forecast(browser, report):
    numbers = report["layouts"][0]["variants"][""]
    lines = "[...document.querySelectorAll('#step tr')]"
    rows = browser.run(
        f"return {lines}.map((row) => [...row.children].map((each) => each.textContent))"
    )
    (sent,) = [row for row in rows if row[0] == "tp" and row[-1] == "123 MB"]
    (waited,) = [row for row in rows if row[0] == "tp" and row[-1] == "40.0 ms"]
    predicted = numbers["sent_bytes"][0]["tp"], numbers["seconds"]["tp"]
    assert [sent[1], waited[1]] == [
        browser.run("return bytes(arguments[0])", predicted[0]),
        browser.run("return seconds(arguments[0])", predicted[1]),
    ]
    assert ["pp", "125 ms"] in [[row[0], row[-1]] for row in rows] and ["dp", "10.0 ms"] in [
        [row[0], row[-1]] for row in rows
    ]


def test_every_switch_changes_the_layer(browser, report):
    layout = report["layouts"][0]
    assert layout["switches"] == list(SWITCHES)
    press = "document.querySelector(`[data-switch=${arguments[0]}]`).click()"
    shown = "return document.querySelector('#layer p:not(.lead)').textContent"
    before = browser.run(shown)
    for name in layout["switches"]:
        browser.run(press, name)
        assert browser.run("return state.off") == [name]
        text, variant = browser.run(shown), layout["variants"][name]
        if "refused" in variant:
            assert variant["refused"] in text
        else:
            ratio = variant["needed_bytes"] / layout["variants"][""]["needed_bytes"]
            assert f"memory × {ratio:.2f}" in text
            assert re.search(r"Without \w+", text)
        browser.run(press, name)
    assert browser.run(shown) == before


def test_messages_of_the_picture_add_up_to_the_bytes_of_the_planner(browser, report):
    """Over all micro-batches of a step, by pipeline rank and dimension, for every variant."""
    sums = """
      const [layout, off, times, place] = arguments, sums = {};
      const micro = DATA.layouts[layout].variants[off].microbatch;
      const add = (dim, size) => { sums[dim] = (sums[dim] ?? 0) + size; };
      for (const step of journeyOf(micro).steps) {
        if (step.sizeOn) add(dimensionOf(step.axis), step.sizeOn(place));
        else if (step.dir !== "u")
          for (const [stage, own] of Object.entries(step.byStage ?? { [step.stage]: step.sums }))
            if (micro.routes[0][stage] === place)
              for (const [dim, size] of Object.entries(own)) add(dim, size * times);
      }
      return sums;"""
    compared = 0
    for number, layout in enumerate(report["layouts"]):
        for off, record in layout["variants"].items():
            gbs = int(
                record.get("changed", "").removeprefix("train.gbs=") or layout["model"]["gbs"]
            )
            for place, sent in enumerate(record.get("sent_bytes", [])):
                expected = Counter()
                for axis, num_bytes in sent.items():
                    expected[browser.run("return dimensionOf(arguments[0])", axis)] += num_bytes
                times = gbs // record["microbatch"]["sizes"]["dp"]
                shown = browser.run(sums, number, off, times, place)
                shown = {dim: num_bytes for dim, num_bytes in shown.items() if num_bytes}
                assert shown == pytest.approx(expected, rel=1e-6)
                compared += len(expected)
    assert compared > 40


def test_the_picture_is_stepped_through_by_keyboard(browser, report):
    press = (
        "document.querySelector(arguments[0]).dispatchEvent("
        "new KeyboardEvent('keydown', {key: arguments[1], shiftKey: arguments[2], bubbles: true}));"
        "show(1)"
    )
    text = "return document.querySelector(arguments[0]).textContent"
    root, steps = "#five-root", browser.run("return drawn().steps.length")
    browser.run(press, root, "End", False)
    browser.run("five.time = five.goal ?? five.time; five.goal = null; show(1)")
    assert browser.run(text, "#five-count") == f"{steps} / {steps}"
    seen = set()
    for at in range(steps):
        browser.run("go(arguments[0], true); show(1)", at)
        step = browser.run("const {axis, size, dir} = drawn().step; return {axis, size, dir}")
        sentence = browser.run(text, "#five-sentence")
        assert "undefined" not in sentence and "NaN" not in sentence
        if step["size"]:
            assert browser.run("return bytes(arguments[0])", step["size"]) in sentence
            seen.add(browser.run("return dimensionOf(arguments[0])", step["axis"]))
    assert seen == {"tp", "cp", "ep", "pp", "dp"}
    browser.run(press, root, "Home", False)
    browser.run(press, root, "ArrowRight", True)
    assert browser.run("return drawn().steps[target()].column") == 1
    browser.run(press, root, " ", False)
    assert browser.run(text, "#five-play") == "Pause"
    browser.run(press, root, " ", False)
    browser.run(press, root, "t", False)
    assert "tp" in browser.run("return state.off")
    browser.run(press, root, "t", False)
    assert browser.run("return state.off") == []
    browser.run(press, "#five-ranks", "ArrowRight", False)
    assert browser.run("return state.rank") == 1
    browser.run("change({rank: 0}); go(0, true)")


def test_the_picture_is_complete_where_nothing_moves(report, tmp_path):
    page = tmp_path / "still.html"
    page.write_text(page_of(report))
    reduced = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    with Browser(tmp_path / "profile") as quiet:
        command = {"cmd": "Emulation.setEmulatedMedia", "params": reduced}
        quiet.call("/goog/cdp/execute", command)
        quiet.open(page)
        counts = quiet.run(
            "return ['model', 'data', 'ranks', 'costs'].map("
            "(name) => document.querySelectorAll(`#five-${name} *`).length)"
        )
        assert min(counts) > 20
        assert "from each" in quiet.run(
            "return document.querySelector('#five-sentence').textContent"
        )
        sizes = quiet.run(
            "return [...document.querySelectorAll('#five *')].filter((node) => node.textContent)"
            ".map((node) => parseFloat(getComputedStyle(node).fontSize))"
        )
        assert min(sizes) >= 11


def test_a_rank_is_selected_in_every_pane(browser):
    browser.run(
        "document.querySelector('#grid rect[data-rank=\"9\"]')"
        ".dispatchEvent(new Event('click', {bubbles: true}))"
    )
    assert browser.run("return state.rank") == 9
    assert browser.run("return document.querySelector('#memory g.own').dataset.pp") == "1"
    assert "pipeline rank 1 is idle" in browser.run(
        "return document.querySelector('#pipeline').textContent"
    )
    assert "pp 1" in browser.run("return document.querySelector('#step table').textContent")
    browser.run(
        "document.querySelector('#memory g[data-pp=\"0\"]').dispatchEvent(new Event('click'))"
    )
    assert browser.run("return state.rank") == 1
    key = "new KeyboardEvent('keydown', {key: 'ArrowRight'})"
    browser.run(f"document.querySelector('#grid [role=application]').dispatchEvent({key})")
    assert browser.run("return state.rank") == 2
    browser.run("change({rank: 0})")


@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "tp", "cp")])
def test_groups_on_the_grid_are_those_of_the_mesh(browser, order):
    sizes = resolve(WORLD, tp=2, cp=2, pp=2, ep=2, order=order)
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    browser.run(
        "layout().grid = arguments[0]", {"dense": grid_record(dense), "expert": grid_record(expert)}
    )
    for rank in range(WORLD):
        groups = browser.run("change({rank: arguments[0]}); return groups()", rank)
        along = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("dp_replicate", "dp_shard")}
        expected = {name: list(dense.group(rank, *axes)) for name, axes in along.items()}
        assert groups == expected | {"ep": list(expert.group(rank, "ep"))}


def test_the_load_of_experts_is_a_map_of_layers_over_steps(browser, report):
    loads = {0: [1.0, 1.5, None], 12: [None, 2.5, 2.0]}
    log = [
        json.dumps(
            {"step": step, "loss": 1.0}
            | {
                f"moe/layer_{layer}/load": values[step - 1]
                for layer, values in loads.items()
                if values[step - 1] is not None
            }
        )
        for step in (1, 2, 3)
    ]
    record = run_record("a run", [*log, json.dumps({"step": 4, "loss": 1.0})])
    expected = {"layers": [0, 12], "steps": [1, 2, 3], "loads": list(loads.values())}
    assert record["expert_loads"] == expected
    (run,) = report["runs"]
    assert run["expert_loads"]["loads"] == [[1.5] * 30]
    text = browser.run("return document.querySelector('#experts').textContent")
    assert "layer 1 was least even; at step 1 its busiest expert had 1.50 × an even share" in text
    pixel = (
        "const canvas = document.querySelector('#experts canvas');"
        "return [...canvas.getContext('2d').getImageData(canvas.width - 4, 8, 1, 1).data]"
    )
    red, green, blue, _ = browser.run(pixel)
    assert red > 1.5 * max(green, blue)


def test_a_second_schedule_and_the_second_layout(browser, report):
    names = browser.run(
        "return [...document.querySelectorAll('#pipeline option')].map((each) => each.value)"
    )
    assert "1f1b" in names and "gpipe" in names
    browser.run("view.other = '1f1b'; change({})")
    assert browser.run("return document.querySelectorAll('#pipeline canvas').length") == 2
    text = browser.run("return document.querySelector('#compare').textContent")
    assert (
        all(words in text for words in report["differences"])
        and "tp: 2 → 1" in report["differences"]
    )
    browser.run("document.querySelectorAll('#layouts button')[1].click()")
    assert (
        browser.run("return document.querySelector('#sentence').textContent")
        == report["layouts"][1]["sentence"]
    )
    browser.run("document.querySelectorAll('#layouts button')[0].click()")


def test_figures_open_their_formula(browser):
    browser.run("document.querySelector('#memory button.figure').click()")
    assert browser.run("return document.querySelector('#source-file').textContent").endswith(
        "memory/forecast.py"
    )
    browser.run("document.querySelector('#source').close()")


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows(browser, width):
    browser.resize(width)
    wide = browser.run("return document.documentElement.scrollWidth")
    assert wide <= width


def test_no_error_and_no_request(browser):
    assert [
        entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE"
    ] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    requests = [
        event["params"] for event in events if event["method"] == "Network.requestWillBeSent"
    ]
    urls = [
        entry["request"]["url"] for entry in requests if entry["documentURL"].startswith("file:")
    ]
    assert len(urls) == 1 and urls[0].endswith("report.html")  # the page itself
