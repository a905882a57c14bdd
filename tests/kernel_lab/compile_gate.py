"""Compiles every kernel for GPUs that are not here, and checks each against its budget.

    PYTHONPATH=tests python -m kernel_lab.compile_gate

A case fails if a kernel does not compile, takes more registers or shared memory than `budget.json`
grants it with this version of Triton, does not fit the target, lacks a promised instruction, spills, or waits for each GEMM
before it starts the next: where the assembler cannot follow the accumulators, it inserts such waits
with no more than a remark. (The budget contains spills and waits where measurements were faster
with them.) It also fails if the assembler made a kernel wrong that casts to FP8, or if no case
selects an entry of a configuration table. Each compilation runs in a forked child with a time
limit, because the compiler can hang or crash. Triton's cache makes the second run fast.
"""

import argparse
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from kernel_lab.binary import MORE_IS_BETTER, SHARED_LIMIT, examine
from kernel_lab.capture import TARGETS, capture
from kernel_lab.gate_cases import CASES
from kernel_lab.interpreter_types import translate_faster
from triton.runtime.cache import triton_key

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import TRITON_VERSION

Reports = dict[str, dict[str, dict]]
"""Case -> target -> report of `compile_case`, or an error."""
PERFORMANCE = ("sm_90", "sm_100")  # targets whose speed is budgeted as well
BUDGET = Path(__file__).with_name("budget.json")  # case -> target -> version of Triton -> limits
VERSION = ".".join(map(str, TRITON_VERSION))
DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100")
# Modules that autograd Functions and the compiler would import in every child.
_IMPORTED_LATE = ("torch._dynamo", "triton.experimental.gluon.nvidia.hopper")
# There the assembler zeroes a slot with each bulk copy and never reads it, which is no spill.
FRAME_BYTES = {"sm_120": 8}


def compile_case(name: str, target: str) -> dict:
    """Compiles one case in this process; its launches, and the configuration entries selected."""
    case = CASES[name]
    with capture(target) as (launches, selected):
        case.run()
    reports = examine(launches, target, count=target in case.promises)
    distinct = {json.dumps(report, sort_keys=True): report for report in reports}
    return {"launches": list(distinct.values()), "selected": sorted(selected)}


def _with_causes(error: BaseException | None) -> str:
    """The error and its causes: Triton wraps the reason in one compilation error per call."""
    messages = []
    while error is not None:
        messages.append(f"{type(error).__name__}: {str(error)[-600:]}")
        error = error.__cause__
    return " <- ".join(messages)


def _in_child(name: str, target: str, limit_s: float) -> dict:
    """`compile_case` in a forked child; a crash or a hang becomes an error of that case alone."""
    start = time.monotonic()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        signal.alarm(int(limit_s))
        try:
            report = compile_case(name, target)
        except BaseException as error:
            report = {"error": _with_causes(error), "trace": traceback.format_exc()[-3000:]}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(report, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    timed_out = os.WTERMSIG(status) == signal.SIGALRM
    cause = "ran past its time limit" if timed_out else f"died with status {status}"
    report = json.loads(text) if text else {"error": f"the compiler {cause}"}
    return {**report, "seconds": round(time.monotonic() - start, 1)}


def errors_of(name: str, target: str, report: dict, budget: dict) -> list[str]:
    """What is wrong with a case's report; empty if it passes."""
    if "error" in report:
        return [report["error"]]
    limits = limits_of(budget, name, target)
    errors = [
        f"{launch['kernel']} ({launch['num_warps']} warps) {error}"
        for launch in report["launches"]
        for error in _launch_errors(launch, target, limits or {})
    ]
    if limits is None:
        errors.append("budget.json has no entry: review the figures, then run with --write-budget")
    for instruction in CASES[name].promises.get(target, ()):
        if not any(instruction in launch["instructions"] for launch in report["launches"]):
            errors.append(f"no kernel contains {instruction}, which the case promises")
    return errors


def limits_of(budget: dict, name: str, target: str) -> dict | None:
    """Limits of a case for the newest version of Triton that is not newer than the present one."""
    rows = budget.get(name, {}).get(target, {})
    versions = [version for version in rows if tuning.is_since(version)]
    return rows[max(versions, key=lambda v: tuple(map(int, v.split("."))))] if versions else None


def _launch_errors(launch: dict, target: str, limits: dict) -> list[str]:
    errors = []
    if launch["stack"] > max(FRAME_BYTES.get(target, 0), limits.get("stack", 0)):
        errors.append(f"spills {launch['stack']} bytes a thread")
    if places := launch["wrong"]:
        errors.append(f"computes with the stack pointer in {places} places: ptxas made it wrong")
    if launch["shared"] > SHARED_LIMIT[target] * 1024:
        errors.append(
            f"requires {launch['shared']} bytes of shared memory; "
            f"{target} has {SHARED_LIMIT[target]} KiB"
        )
    for resource in ("registers", "shared"):
        if limits and launch[resource] > limits[resource]:
            errors.append(f"takes {launch[resource]} {resource}, the budget is {limits[resource]}")
    budget = limits.get("performance", {}).get(launch["kernel"], {})
    errors += slower(launch["performance"], budget)
    if launch["serialised"] > limits.get("serialised", 0):
        errors.append("waits for each of its GEMMs (ptxas C7510, C7515): no two run side by side")
    return errors


def slower(performance: dict, budget: dict) -> list[str]:
    """Where the model of a binary says that it is slower than the budget."""
    return [
        f"has {performance[name]} {name} by the model of its binary, the budget is {limit}"
        for name, limit in budget.items()
        if (performance[name] - limit) * (-1 if name in MORE_IS_BETTER else 1) > 0
    ]


def _slowest(launches: list[dict]) -> dict[str, dict]:
    """Performance of each kernel: of several launches the worst figure of each kind."""
    by_kernel: dict[str, dict] = {}
    for launch in launches:
        figures = by_kernel.setdefault(launch["kernel"], dict(launch["performance"]))
        for name, value in launch["performance"].items():
            figures[name] = (min if name in MORE_IS_BETTER else max)(figures[name], value)
    return by_kernel


def unselected(reports: Reports, target: str) -> list[str]:
    """Entries of the target's configuration table that no compiled case selected."""
    selected = {
        tuple(entry)
        for by_target in reports.values()
        for entry in by_target.get(target, {}).get("selected", ())
    }
    return [
        f"{operation}[{index}]"
        for operation, entries in tuning.table(tuning.nearest(target)).items()
        for index in range(len(entries))
        if (operation, index) not in selected
    ]


def _warm_up() -> None:
    """Does what every child would repeat, which takes longer than compiling."""
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    translate_faster()
    triton_key()  # a hash of the compiler itself, part of each key of its cache
    # loads torch's meta kernels
    torch.empty(2, 2, device="meta", requires_grad=True).float().sum(0).sum().backward()


def run_gate(cases: list[tuple[str, str]], limit_s: float, jobs: int) -> Reports:
    """Reports of pairs (case, target)."""
    _warm_up()
    reports: Reports = {}
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda case: _in_child(*case, limit_s), cases)
        for (name, target), report in zip(cases, results):
            print(f"compiled {name} {target} in {report['seconds']} s", file=sys.stderr, flush=True)
            reports.setdefault(name, {})[target] = report
    return reports


def write_budget(reports: Reports) -> None:
    """Grants every reported case what it takes now with this version of Triton, and keeps the rows
    of others; a row that equals that of the version before is left out."""
    budget = json.loads(BUDGET.read_text())
    for name, by_target in reports.items():
        for target, report in by_target.items():
            if launches := report.get("launches"):
                granted = _granted(launches, target)
                if granted != limits_of(budget, name, target):
                    budget.setdefault(name, {}).setdefault(target, {})[VERSION] = granted
    text = json.dumps({n: budget[n] for n in sorted(budget) if n in CASES}, indent=1)
    BUDGET.write_text(re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), text) + "\n")


def _granted(launches: list[dict], target: str) -> dict:
    def most(figure: str) -> int:
        return max(launch[figure] for launch in launches)

    limits: dict = {resource: most(resource) for resource in ("registers", "shared")}
    for figure, free in (("stack", FRAME_BYTES.get(target, 0)), ("serialised", 0)):
        if most(figure) > free:
            limits[figure] = most(figure)
    if target in PERFORMANCE:
        limits["performance"] = _slowest(launches)
    return limits


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets, default = ", ".join(TARGETS), ", ".join(DEFAULT_TARGETS)
    parser.add_argument("substrings", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--targets", help=f"of {targets}; by default {default}")
    parser.add_argument(
        "--all", action="store_true", help="nightly cases too, and no unselected configuration"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of a compilation")
    parser.add_argument("--json", type=Path, help="write the reports here")
    parser.add_argument("--write-budget", action="store_true", help="accept the present figures")
    args = parser.parse_intermixed_args()
    for text in args.substrings:
        if not any(text in name for name in CASES):
            parser.error(f"no case has {text!r} in its name: {', '.join(CASES)}")
    for target in (args.targets or default).replace(" ", "").split(","):
        if target not in TARGETS:
            parser.error(f"no target {target!r}: {targets}")
    return args


def _selected_cases(args: argparse.Namespace) -> list[tuple[str, str]]:
    targets = args.targets.split(",") if args.targets else DEFAULT_TARGETS
    return [
        (name, target)
        for name, case in CASES.items()
        if (args.all or not case.nightly)
        and (not args.substrings or any(text in name for text in args.substrings))
        for target in targets
        if target in case.targets and (args.all or args.targets or target in case.daily)
    ]


def main() -> int:
    args = _arguments()
    reports = run_gate(_selected_cases(args), args.limit_s, args.jobs)
    if args.write_budget:
        write_budget(reports)
    budget, failed = json.loads(BUDGET.read_text()), 0
    for name, by_target in reports.items():
        for target, report in by_target.items():
            report["faults"] = errors_of(name, target, report, budget)
            failed += bool(report["faults"])
            _print(name, target, report)
    if args.all and not args.substrings:
        for target in args.targets.split(",") if args.targets else DEFAULT_TARGETS:
            if entries := unselected(reports, target):
                failed += 1
                print(f"no case selects {', '.join(entries)} of {target}")
    if args.json:
        args.json.write_text(json.dumps(reports))
    return min(failed, 100)


def _print(name: str, target: str, report: dict) -> None:
    verdict = "FAIL" if report["faults"] else "ok"
    print(f"{verdict:4} {name} {target} {report.get('seconds', 0)} s")
    for launch in report.get("launches", ()):
        print(
            f"       {launch['kernel']} {launch['num_warps']} warps: {launch['registers']} "
            f"registers, {launch['stack']} stack, {launch['shared']} shared "
            f"{launch['instructions'] or ''}"
        )
    for error in report["faults"]:
        print(f"     - {error}")


if __name__ == "__main__":
    sys.exit(main())
