"""Pictures of Programs: every action is drawn once, at its time, on its rank."""

import xml.etree.ElementTree as xml

import pytest

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.tools.plots.schedule import chrome_trace, draw_png, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name, p=4, m=8, costs=Costs()):  # noqa: B008
    program = build_program(name, p, m)
    return program, simulate(program, costs)


def test_terminal_by_hand():
    program, result = simulated("1f1b", 2, 2)
    assert draw_text(program, result, width=27).splitlines()[1:] == [
        "  0 F0 F1 ······B0    ···B1    ",
        "  1 ···F0 B0    F1 B1    ······",
    ]
    assert result.makespan == 9


def test_terminal_shortens_names_to_letters():
    line = draw_text(*simulated("gpipe", 2, 8), width=27).splitlines()[1]
    assert line == "  0 FFFFFFFF···B0B1B2B3B4B5B6B7"


def test_colors_do_not_change_the_text():
    program, result = simulated("zb_v")
    colored = draw_text(program, result, colored=True)
    for code in (*(f"\x1b[30;{color}m" for color in (44, 42, 43, 104, 102, 103)), "\x1b[0m"):
        assert code in colored
        colored = colored.replace(code, "")
    assert colored == draw_text(program, result)


def test_chunks_and_idle_time_are_distinguishable():
    program, result = simulated("zb_v", 2, 2)
    letters = set("".join(draw_text(program, result).splitlines()[1:])) & set("FIWBfiwb")
    assert letters == set("FIWfiw")
    svg = draw_svg(program, result)
    for name in ("F forward", "F forward, later stages", "idle"):
        assert f">{name}</text>" in svg
    assert "second direction</text>" in draw_svg(*simulated("dualpipe"))


@pytest.mark.parametrize("name", ["gpipe", "zb_v", "dualpipe", "interleaved_overlap"])
def test_pictures_have_one_box_per_action(name):
    program, result = simulated(name, costs=Costs(F=1, I=1.25, W=0.75, comm=0.125))
    num_slots = sum(len(line) for line in program.ranks)
    num_actions = sum(len(slot) for line in program.ranks for slot in line)
    events = chrome_trace(program, result)["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == num_actions
    root = xml.fromstring(draw_svg(program, result, width=800))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == num_actions
    ends = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert max(ends) == pytest.approx(860, abs=0.1)
    assert len({box.find(f"{SVG}title").text.split()[0] for box in boxes}) == num_slots
    assert len({(float(box.get("y")) - 50) // 26 for box in boxes}) == program.num_ranks


def test_png_is_written(tmp_path):
    draw_png(*simulated("dualpipe"), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
