"""Every kernel compiles for every target within its budget, and the gate detects what it should."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from forks import Fork

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import TRITON_VERSION

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3600 if tiers.NIGHTLY else 900  # with an empty cache, beside other tests


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_every_kernel_is_within_its_budget(tmp_path):
    command = [sys.executable, "-m", "kernel_lab.compile_gate", "--json", tmp_path / "reports.json"]
    if tiers.NIGHTLY:
        command += ["--all", "--targets", "sm_80,sm_90,sm_100,sm_120,gfx942"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = "tests"
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    failures = [line for line in run.stdout.splitlines() if line[:4] != "ok  "]
    assert run.returncode == 0, "\n".join(failures) + run.stderr
    by_case = json.loads((tmp_path / "reports.json").read_text())
    reports = [report for by_target in by_case.values() for report in by_target.values()]
    assert all(report["launches"] for report in reports)
    compiled = {launch["kernel"] for report in reports for launch in report["launches"]}
    sources = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.py"))
    assert compiled == set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)), (
        "a case compiles every kernel"
    )


PERFORMANCE = {"ctas": 3, "loop_barriers": 4, "drains": 1, "narrow": 0}


def report(**changes) -> dict:
    launch = {"kernel": "k", "num_warps": 8, "registers": 100, "stack": 0, "shared": 1000}
    launch |= {"serialised": 0, "wrong": 0, "performance": PERFORMANCE}
    return {"launches": [launch | {"instructions": {"wgmma": 4}} | changes]}


def errors_of(monkeypatch, report, budget, promises=None, target="sm_90") -> list[str]:
    from kernel_lab import compile_gate, gate_cases

    case = gate_cases.Case(lambda: None, promises or {})
    monkeypatch.setitem(compile_gate.CASES, "case", case)
    budget = {"case": {target: {"3.6": budget, "99.0": {"registers": 0, "shared": 0}}}}
    return compile_gate.errors_of("case", target, report, budget)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"stack": 8}, "spills 8 bytes"),
        ({"registers": 101}, "101 registers, the budget is 100"),
        ({"shared": 300 * 1024}, "requires 307200 bytes"),
        ({"instructions": {"mma": 4}}, "no kernel contains wgmma"),
        ({"serialised": 3}, "waits for each of its GEMMs"),
        ({"wrong": 2}, "computes with the stack pointer in 2 places"),
        ({"performance": PERFORMANCE | {"ctas": 1}}, "has 1 ctas by the model"),
        ({"performance": PERFORMANCE | {"loop_barriers": 5}}, "has 5 loop_barriers"),
        ({"performance": PERFORMANCE | {"drains": 2}}, "has 2 drains"),
        ({"performance": PERFORMANCE | {"ctas": 4, "narrow": 8}}, "has 8 narrow"),
    ],
)
def test_the_gate_reports_what_is_wrong(changes, message, monkeypatch):
    budget = {"registers": 100, "shared": 2**30, "performance": {"k": PERFORMANCE}}
    errors = errors_of(monkeypatch, report(**changes), budget, {"sm_90": ("wgmma",)})
    assert (not errors) if message is None else (len(errors) == 1 and message in errors[0])


def test_spills_and_waits_in_the_budget_are_granted(monkeypatch):
    budget = {"registers": 100, "shared": 2**30, "stack": 8, "serialised": 3}
    assert not errors_of(monkeypatch, report(stack=8, serialised=3), budget)
    assert len(errors_of(monkeypatch, report(stack=16, serialised=4), budget)) == 2


@pytest.mark.parametrize(
    "instruction, wrong",
    [
        ("/*1fc0*/        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R58, R67, R30, R1.reuse ;", 1),
        ("/*62b0*/   @!P0 LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT ;", 1),
        ("/*0000*/        LDC R1, c[0x0][0x28] ;", 0),
        ("/*0010*/        IADD3 R1, R1, -0x10, RZ ;", 0),
        ("/*0020*/    @P1 STL.64 [R1+0x8], R12 ;", 0),
        ("/*0030*/        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R58, R67, R30, R11 ;", 0),
    ],
)
def test_computing_with_the_stack_pointer_is_detected(instruction, wrong):
    """The first two come from kernels that were wrong on an H200; emulating PTX cannot show it."""
    from kernel_lab.binary import stack_pointer_as_number

    assert stack_pointer_as_number(f"        {instruction}\n") == wrong


def test_an_argument_that_no_launcher_accepts_is_refused():
    """Triton compiles a descriptor inside a tuple, and fails when the kernel is launched."""
    from kernel_lab.capture import assert_launchable

    assert_launchable("k", {"x": "tensordesc<bf16[64,64]>", "sizes": ("i32", "*fp32")})
    with pytest.raises(AssertionError, match="k compiles, but no launcher accepts its argument y"):
        assert_launchable("k", {"y": ("tensordesc<bf16[64,64]>", "i32")})


def test_the_table_of_8_6_and_8_9_is_held_to_their_shared_memory(monkeypatch):
    budget = {"registers": 255, "shared": 2**30}
    for target in {tuning.nearest(name) for name in ("sm_80", "sm_86", "sm_89")}:
        errors = errors_of(monkeypatch, report(shared=100 * 1024), budget, target=target)
        assert "requires" in errors[0]


@pytest.fixture
def other_compiler(monkeypatch):
    """Makes the tables those of another version of Triton."""

    def forget():
        tuning.table.cache_clear()
        tuning.is_since.cache_clear()

    def use(*version):
        monkeypatch.setattr(tuning, "TRITON_VERSION", version)
        forget()

    yield use
    monkeypatch.undo()
    forget()


def test_tables_and_budgets_are_kept_by_the_compiler_s_version(other_compiler):
    from kernel_lab import compile_gate

    budget = {"case": {"sm_90": {"3.6": {"registers": 1}, "3.10": {"registers": 2}}}}
    for version, is_ahead, registers in ((3, 7), True, 1), ((3, 9), False, 1), ((3, 11), False, 2):
        other_compiler(*version)
        entries = tuning.table("sm_90")["attention_forward"]
        config = tuning.first_fitting(entries, {"head_dim": 192, "cut": 1, "split": 0})
        assert config["AHEAD"] == is_ahead
        assert sum(entry.get("up_to") == {"head_dim": 192} for entry in entries) == 1
        assert compile_gate.limits_of(budget, "case", "sm_90") == {"registers": registers}
    other_compiler(3, 5)
    assert compile_gate.limits_of(budget, "case", "sm_90") is None


def test_the_newest_older_table_serves_an_architecture_without_one():
    nearest = {"sm_89": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120"}
    assert {name: tuning.nearest(name) for name in nearest} == nearest
    with pytest.raises(ValueError, match="no kernel configurations for sm_75"):
        tuning.nearest("sm_75")


def test_a_case_without_a_budget_and_errors_are_reported():
    from kernel_lab.compile_gate import errors_of

    assert "no entry" in errors_of("moe", "sm_90", report(), {})[0]
    assert errors_of("moe", "sm_90", {"error": "it died"}, {}) == ["it died"]


def test_an_entry_that_no_case_reaches_is_reported():
    from kernel_lab import compile_gate

    missing = compile_gate.unselected({"moe": {"sm_90": {"selected": [["moe_topk", 0]]}}}, "sm_90")
    assert "moe_topk[0]" not in missing and "rope[0]" in missing


def test_other_numbers_of_an_experts_rows_do_not_recompile():
    """They change from step to step; a kernel specialized on whether 16 divides them would stop
    training for seconds. That 16 need not divide them must not cost the wide stores either.
    """
    compiled = """
import torch
from megatron5d.kernels.fp8.quantize_tensor import amax_of_rows, quantize_by_row
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.gemm import grouped_matmul
from kernel_lab.capture import capture
from kernel_lab.gate_cases import fp8_rows, meta
offsets, weight = meta(65, dtype=torch.int64), meta(64, 1408, 2048)
with capture("sm_90") as (launches, _):
    for rows in (8192, 8200, 8197, 1):
        grouped_matmul(meta(rows, 2048), weight, offsets)
        fp8_transpose(fp8_rows(rows, 2048), offsets)
        quantize_by_row(meta(rows, 2048), amax_of_rows(meta(rows, 2048)))
print(len({id(launch.compiled) for launch in launches}), len(launches))
# of fp8_transpose: values stored byte by byte
print("st.global.b8" in launches[1].compiled.asm["ptx"])
"""
    run = Fork(lambda: exec(compiled, {}), ROOT).wait()
    assert run.stdout.split() == ["4", "16", "False"], run.stdout + run.stderr


def test_slow_choices_fail(tmp_path):
    """Tiles of 128×128 leave one FP8 GEMM per multiprocessor; a transpose by bytes exchanges
    single bytes, which Triton 3.8 packs, unlike others."""
    compiled = """
import json, sys
import torch
from kernel_lab import compile_gate
from kernel_lab.binary import examine
from kernel_lab.capture import capture
from kernel_lab.gate_cases import CASES, meta
from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import jit, tl

@jit
def _transpose_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out_ptr + column * rows + row, tl.load(x_ptr + row * columns + column))

old = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 4}
tuning.table("sm_90")["fp8_matmul"][0]["config"] |= old
with capture("sm_90") as (launches, _):
    CASES["fp8-weight-grad"].run()
    x = meta(4096, 7168, dtype=torch.uint8)
    _transpose_kernel[(32, 56)](x, x.t().contiguous(), 4096, 7168, 128)
reports = examine(launches, "sm_90", count=False)
budget = json.loads(compile_gate.BUDGET.read_text())
budget = compile_gate.limits_of(budget, "fp8-weight-grad", "sm_90")["performance"]
budget["_transpose_kernel"] = budget["_fp8_transpose_kernel"]
for one in (reports[-2], reports[-1]):
    print(*compile_gate.slower(one["performance"], budget[one["kernel"]]), sep="; ")
"""
    script = tmp_path / "slow.py"  # a kernel's source is read from its file
    script.write_text(compiled)
    run = Fork(lambda: runpy.run_path(str(script)) and 0, ROOT).wait()
    gemm, transpose = run.stdout.splitlines()
    assert "has 1 ctas" in gemm, run.stdout + run.stderr
    assert ("narrow" in transpose) != (TRITON_VERSION == (3, 8)), run.stdout + run.stderr


def test_attention_on_hopper_computes_no_product_twice():
    """Two groups of warps over 64 keys would both compute all scores."""
    compiled = """
import re
from megatron5d.kernels import tuning
from kernel_lab.capture import capture
from kernel_lab.gate_cases import CASES
with capture("sm_90") as (launches, _):
    CASES["attention-128"].run()
# two loops, with a mask and without; the forward makes one GEMM before them
for operation, kernel, gemms in (
    ("forward", "_forward_kernel", 5),
    ("backward_keys", "_key_value_kernel", 8),
    ("backward_queries", "_query_kernel", 6),
):
    entries = tuning.table("sm_90")[f"attention_{operation}"]
    config = next(entry["config"] for entry in entries if entry["up_to"]["head_dim"] == 128)
    (launch,) = [each for each in launches if each.name == kernel]
    made = re.findall(r"wgmma.mma_async.sync.aligned.m64n(\\d+)k16", launch.compiled.asm["ptx"])
    work = sum(64 * int(n) * 16 for n in made) * launch.num_warps // 4
    print(work / (gemms * config["BLOCK_M"] * config["BLOCK_N"] * 128))
"""
    run = Fork(lambda: exec(compiled, {}), ROOT).wait()
    assert run.stdout.split() == ["1.0", "1.0", "1.0"], run.stdout + run.stderr
