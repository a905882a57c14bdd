"""The report in a real browser: switches and panes work, and the page sends no request."""

import json
import re
from collections import Counter

import pytest
from browser import SHIFT, TAB, Browser

from megatron5d.planning.clusters import cluster_called
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.planned_config import planned_config
from megatron5d.planning.time.predict import Estimator
from megatron5d.tools.report.collect import SWITCHES, grid_record
from megatron5d.tools.report.layer import key_of
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
    return report_of(options) | {"runs": [run_record("a run", log, saved=[20])]}


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page = folder / "report.html"
    page.write_text(page_of(report))
    assert page.stat().st_size < 2e6
    with Browser(folder / "profile") as browser:
        browser.open(page)
        yield browser


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
    assert timeline["makespan"] == cost.simulation.makespan
    slots = [len(line) for line in cost.program.ranks]
    assert [len(line) for line in timeline["slots"]] == slots


def test_world_and_events_are_read_from_the_log(report):
    (run,) = report["runs"]
    assert run["world"] == 16 and run["events"] == [{"step": 20, "what": "checkpoint saved"}]
    assert run["exposed_s"] == {"tp": 0.04, "pp": 0.125, "dp": 0.01}


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
    (waited,) = [row for row in rows if row[0] == "tp exposed tp" and row[-1] == "40.0 ms"]
    predicted = numbers["sent_bytes"][0]["tp"], numbers["seconds"]["tp"]
    assert [sent[1], waited[1]] == [
        browser.run("return bytes(arguments[0])", predicted[0]),
        browser.run("return seconds(arguments[0])", predicted[1]),
    ]
    ends = [[row[0], row[-1]] for row in rows]
    assert ["pp bubble", "125 ms"] in ends and ["dp exposed dp and ZeRO", "10.0 ms"] in ends
    drawn = browser.run(
        "return [...document.querySelectorAll('#step svg title')].map((each) => each.textContent)"
    )
    assert "exposed tp, measured: 40.0 ms" in drawn
    assert f"exposed tp, predicted: {waited[1]}" in drawn


def test_every_set_of_switches_is_shown_by_keyboard_alone(browser, report):
    """In the order of a Gray code: each set follows from the last by one key on one switch."""
    layout = report["layouts"][0]
    switches, base = layout["switches"], layout["variants"][""]
    assert switches == list(SWITCHES)
    off, seen = set(), set()
    for number in range(1, 2 ** len(switches)):
        flipped = switches[(number & -number).bit_length() - 1]
        if flipped == "sp" and "tp" in off:
            assert browser.run("return document.querySelector('[data-switch=sp]').disabled")
        else:
            _focus_switch(browser, flipped)
            browser.press(" ")
            assert browser.run("return document.activeElement.dataset.switch") == flipped
        off ^= {flipped}
        key = key_of([name for name in switches if name in off])
        if flipped == "sp" and "tp" in off:
            browser.run("change({off: arguments[0]})", [name for name in switches if name in off])
        variant, page = layout["variants"][key], browser.run(STATE)
        assert page["sentence"] == variant["sentence"]
        assert not re.search(r"NaN|undefined|Infinity|not computed", page["text"])
        assert page["pressed"] == [name not in variant["off"] for name in switches]
        if "refused" in variant:
            assert variant["refused"] in page["layer"] and "not valid" in page["facts"]
        else:
            assert (
                f"memory × {variant['needed_bytes'] / base['needed_bytes']:.2f}"[:10]
                in (page["layer"])
            )
            sizes = variant["microbatch"]["sizes"]
            dims = [f"{name} {sizes[name]}" for name in ("dp", "tp", "cp", "pp", "ep")]
            assert all((dim in page["facts"]) == (not dim.endswith(" 1")) for dim in dims)
            assert f"ZeRO {sizes['zero']}" in page["facts"]
            assert ("bubble, mean of" in page["pipeline"]) == (sizes["pp"] > 1)
        seen.add(key)
    assert seen == set(layout["variants"]) - {""}
    browser.run("change({off: []})")


STATE = """
    const text = (id) => document.getElementById(id).textContent;
    return {
      sentence: text('sentence'), facts: text('facts'), text: text('panes'), layer: text('layer'),
      pipeline: text('pipeline'), pressed: [...document.querySelectorAll('[data-switch]')].map(
        (node) => node.getAttribute('aria-pressed') === 'true')
    };"""


def _focus_switch(browser, name):
    """Reaches a switch with the Tab key, forward or backward."""
    order = list(SWITCHES)
    for _ in range(20):
        current = browser.run("return document.activeElement.dataset.switch ?? null")
        if current == name:
            return
        backward = current is not None and order.index(current) > order.index(name)
        browser.press(*((SHIFT,) if backward else ()), TAB)
    raise AssertionError(f"Tab does not reach the switch {name}")


@pytest.mark.parametrize("selector", ["#memory g", "#pipeline button", "#grid [role=application]"])
def test_controls_keep_the_focus(browser, selector):
    controls = browser.run("return document.querySelectorAll(arguments[0]).length", selector)
    for place in range(controls):
        focus = "document.querySelectorAll(arguments[0])[arguments[1]].focus();"
        browser.run(focus, selector, place)
        browser.press(" ")
        place_now = "[...document.querySelectorAll(arguments[0])].indexOf(document.activeElement)"
        if not browser.run("return document.querySelector('#source').open"):
            assert browser.run(f"return {place_now}", selector) == place
        browser.run("document.querySelector('#source').close()")
    browser.run("change({rank: 0})")


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
        "asIs().microbatch.grid = arguments[0]",
        {"dense": grid_record(dense), "expert": grid_record(expert)},
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


CLIPPED = """
    const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    return [...document.querySelectorAll('body *')].filter(own).flatMap((node) => {
      const box = node.getBoundingClientRect(), svg = node.closest('svg')?.getBoundingClientRect();
      const size = parseFloat(getComputedStyle(node).fontSize);
      if (!box.width || node.closest('script, style, title, select, #five')) return [];
      const outside = box.left < -0.5 || box.right > innerWidth + 0.5
        || (svg && (box.left < svg.left - 0.5 || box.right > svg.right + 0.5));
      return outside || size < 11 ? [`${node.textContent.slice(0, 40)} ${box.left} ${box.right} ${size}`] : [];
    });"""


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows(browser, width):
    """Texts lie inside the window and their drawing, at 11 pixels or more."""
    browser.resize(width)
    for off in [[], ["zero"], ["tp"], ["pp"], ["ep", "cp"]]:
        browser.run("change({off: arguments[0]})", off)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(CLIPPED) == []
    browser.run("change({off: []})")


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
