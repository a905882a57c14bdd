"""Compile every kernel for GPUs that are not here, and hold each to its promises.

    PYTHONPATH=tests python -m kernel_lab.compile_gate

A case fails when a kernel does not compile, takes more registers or shared memory than
`budget.json` grants it, does not fit the target, lacks an instruction it promised, spills, or waits
for each GEMM before it starts the next: the assembler puts such waits in, with no more than a
remark, where it cannot follow the accumulators. (Spills and waits are in the budget of what was
measured to be faster with them.) So does one that casts to FP8 and that the assembler has made
wrong. An entry of a configuration table that no case selects fails too. Each compilation runs in a
forked child with a time limit, because the compiler can hang or crash. Triton's cache makes the
second run fast.
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

PERFORMANCE = ("sm_90", "sm_100")  # targets whose speed is budgeted too
BUDGET = Path(__file__).with_name("budget.json")
DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100")
# by autograd Functions and the compiler
_IMPORTED_LATE = ("torch._dynamo", "triton.experimental.gluon.nvidia.hopper")
# the assembler zeroes a slot beside each bulk copy there, and never reads it: no spill
FRAME_BYTES = {"sm_120": 8}


def compile_case(name: str, target: str) -> dict:
    """Compiles one case in this process and reports its launches and the configuration entries it
    selected."""
    case = CASES[name]
    with capture(target) as (launches, selected):
        case.run()
    reports = examine(launches, target, count=target in case.promises)
    return {"launches": _distinct(reports), "selected": sorted(selected)}


def _distinct(reports: list[dict]) -> list[dict]:
    return list({json.dumps(r, sort_keys=True): r for r in reports}.values())


def _causes(error: BaseException) -> str:
    """The error and what led to it: Triton wraps the reason in one compilation error per call."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(f"{type(cause).__name__}: {str(cause)[-600:]}")
        cause = cause.__cause__
    return " <- ".join(said)


def _in_child(name: str, target: str, limit_s: float) -> dict:
    """`compile_case` in a forked child; a crash or a hang becomes an error of that case alone."""
    started = time.monotonic()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        signal.alarm(int(limit_s))
        try:
            answer = compile_case(name, target)
        except BaseException as error:
            answer = {"error": _causes(error), "trace": traceback.format_exc()[-3000:]}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        cause = (
            "ran past its time limit"
            if os.WTERMSIG(status) == signal.SIGALRM
            else f"died with status {status}"
        )
        return {"error": f"the compiler {cause}", "seconds": round(time.monotonic() - started, 1)}
    return {**json.loads(text), "seconds": round(time.monotonic() - started, 1)}


def faults(name: str, target: str, report: dict, budget: dict) -> list[str]:
    """What is wrong with a case's report; empty when it passes."""
    if "error" in report:
        return [report["error"]]
    found, limits = [], budget.get(name, {}).get(target)
    for launch in report["launches"]:
        who = f"{launch['kernel']} ({launch['num_warps']} warps)"
        if launch["stack"] > max(FRAME_BYTES.get(target, 0), (limits or {}).get("stack", 0)):
            found.append(f"{who} spills {launch['stack']} bytes a thread")
        if launch["wrong"]:
            found.append(
                f"{who} computes with the stack pointer in {launch['wrong']} places: ptxas has made it wrong"
            )
        if launch["shared"] > SHARED_LIMIT[target] * 1024:
            found.append(
                f"{who} wants {launch['shared']} bytes of shared memory; {target} has {SHARED_LIMIT[target]} KiB"
            )
        for resource in ("registers", "shared"):
            if limits and launch[resource] > limits[resource]:
                found.append(
                    f"{who} takes {launch[resource]} {resource}, the budget is {limits[resource]}"
                )
        found += slower(
            who,
            launch["performance"],
            (limits or {}).get("performance", {}).get(launch["kernel"], {}),
        )
        if launch["serialised"] > (limits or {}).get("serialised", 0):
            found.append(
                f"{who} waits for each of its GEMMs (ptxas C7510, C7515): no two run side by side"
            )
    if limits is None:
        found.append("budget.json has no entry: review the figures, then run with --write-budget")
    for instruction in CASES[name].promises.get(target, ()):
        if not any(instruction in launch["instructions"] for launch in report["launches"]):
            found.append(f"no kernel contains {instruction}, which the case promises")
    return found


def slower(who: str, performance: dict, budget: dict) -> list[str]:
    """Where the model of a binary says that it is slower than the budget."""
    worse = [
        n for n in budget if (performance[n] - budget[n]) * (-1 if n in MORE_IS_BETTER else 1) > 0
    ]
    return [
        f"{who} has {performance[n]} {n} by the model of its binary, the budget is {budget[n]}"
        for n in worse
    ]


def _slowest(launches: list[dict]) -> dict[str, dict]:
    """The performance of each kernel: of several launches the worst figure of each kind."""
    found: dict[str, dict] = {}
    for launch in launches:
        figures = found.setdefault(launch["kernel"], dict(launch["performance"]))
        for name, value in launch["performance"].items():
            figures[name] = (min if name in MORE_IS_BETTER else max)(figures[name], value)
    return found


def unselected(reports: dict[str, dict[str, dict]], target: str) -> list[str]:
    """Entries of the target's configuration table that no compiled case reached."""
    reached = {
        tuple(s)
        for by_target in reports.values()
        for s in by_target.get(target, {}).get("selected", ())
    }
    table = tuning.table(tuning.nearest(target))
    return [
        f"{op}[{i}]"
        for op, entries in table.items()
        for i in range(len(entries))
        if (op, i) not in reached
    ]


def _warm_up() -> None:
    """Does what every child would do again, and take longer for than to compile."""
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    translate_faster()
    triton_key()  # a hash of the whole compiler, part of each key of its cache
    # torch's meta kernels
    torch.empty(2, 2, device="meta", requires_grad=True).float().sum(0).sum().backward()


def run_gate(work: list[tuple[str, str]], limit_s: float, jobs: int) -> dict[str, dict[str, dict]]:
    """Reports by case and target, of pairs of these."""
    _warm_up()
    with ThreadPoolExecutor(jobs) as pool:
        answers = []
        for (name, target), answer in zip(
            work, pool.map(lambda item: _in_child(item[0], item[1], limit_s), work)
        ):
            print(f"compiled {name} {target} in {answer['seconds']} s", file=sys.stderr, flush=True)
            answers.append(answer)
    reports: dict[str, dict[str, dict]] = {}
    for (name, target), answer in zip(work, answers):
        reports.setdefault(name, {})[target] = answer
    return reports


def write_budget(reports: dict[str, dict[str, dict]]) -> None:
    """Grants every reported case what it takes now, keeping the entries of cases that were not
    run."""
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    for name, by_target in reports.items():
        for target, report in by_target.items():
            if "launches" in report:
                most = {
                    r: max(launch[r] for launch in report["launches"])
                    for r in ("registers", "shared")
                }
                for fault, allowed in (("stack", FRAME_BYTES.get(target, 0)), ("serialised", 0)):
                    if (worst := max(launch[fault] for launch in report["launches"])) > allowed:
                        most[fault] = worst
                if target in PERFORMANCE:
                    most["performance"] = _slowest(report["launches"])
                budget.setdefault(name, {})[target] = most
    text = json.dumps({n: budget[n] for n in sorted(budget) if n in CASES}, indent=1)
    BUDGET.write_text(re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), text) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("substrings", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument(
        "--targets", help=f"of {', '.join(TARGETS)}; by default {', '.join(DEFAULT_TARGETS)}"
    )
    parser.add_argument(
        "--all", action="store_true", help="the nightly cases too, and no unreached configuration"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="time limit of one compilation"
    )
    parser.add_argument("--json", type=Path, help="write the reports here")
    parser.add_argument("--write-budget", action="store_true", help="accept the present figures")
    args = parser.parse_intermixed_args()
    if unknown := [each for each in args.substrings if not any(each in name for name in CASES)]:
        parser.error(f"no case has {unknown[0]!r} in its name: {', '.join(CASES)}")
    if unknown := [
        each for each in (args.targets or DEFAULT_TARGETS[0]).split(",") if each not in TARGETS
    ]:
        parser.error(f"no target {unknown[0]!r}: {', '.join(TARGETS)}")
    return args


def main() -> int:
    args = _arguments()
    targets = args.targets.split(",") if args.targets else list(DEFAULT_TARGETS)
    wanted = [n for n, c in CASES.items() if args.all or not c.nightly]
    if args.substrings:
        wanted = [n for n in wanted if any(s in n for s in args.substrings)]
    work = [
        (name, target) for name in wanted for target in targets if target in CASES[name].targets
    ]
    if not (args.all or args.targets):
        work = [(name, target) for name, target in work if target in CASES[name].daily]
    reports = run_gate(work, args.limit_s, args.jobs)
    if args.write_budget:
        write_budget(reports)
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    failed = 0
    for name, by_target in reports.items():
        for target, report in by_target.items():
            report["faults"] = faults(name, target, report, budget)
            failed += bool(report["faults"])
            _print(name, target, report)
    if args.all and not args.substrings:
        missing = {t: m for t in targets if (m := unselected(reports, t))}
        failed += len(missing)
        print("\n".join(f"no case reaches {', '.join(m)} of {t}" for t, m in missing.items()))
    if args.json:
        args.json.write_text(json.dumps(reports))
    return min(failed, 100)


def _print(name: str, target: str, report: dict) -> None:
    verdict = "FAIL" if report["faults"] else "ok"
    print(f"{verdict:4} {name} {target} {report.get('seconds', 0)} s")
    for launch in report.get("launches", ()):
        used = (
            f"{launch['registers']} registers, {launch['stack']} stack, {launch['shared']} shared"
        )
        print(
            f"       {launch['kernel']} {launch['num_warps']} warps: {used} {launch['instructions'] or ''}"
        )
    for fault in report["faults"]:
        print(f"     - {fault}")


if __name__ == "__main__":
    sys.exit(main())
