"""What a compiled kernel costs and which instructions it uses, read from its binary with tools of
Triton's wheel."""

import re
import struct
import subprocess
import tempfile
from itertools import accumulate
from pathlib import Path

import triton
from kernel_lab.capture import Launch

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_LIMIT = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB that a block may have on every GPU that a table serves: that of sm_80 is also for 8.6 and 8.9, 99 for its 163."""
INSTRUCTIONS = {
    "wgmma": r"\b[HIQ]GMMA",
    "fp8 wgmma": r"\bQGMMA",
    "mma": r"\b[HIQ]MMA",
    "tcgen05": r"\bUTC\w*MMA",
    "bulk load": r"\bUTMALDG",
    "bulk store": r"\bUTMASTG",
    "async copy": r"\bLDGSTS",
    "mfma": r"\bv_mfma",
    "system acquire": r"\bLDG\S*STRONG\.SYS",
    "system release": r"\bMEMBAR\S*\.SYS",
}
BESIDE = "exp2 beside wgmma"
CASTS_TO_FP8 = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2")
STACK_POINTER = re.compile(r"\bR1\b")
ADDRESSES = re.compile(r"\[R1\b|^\S+ R1,|R2UR")  # what it is for: an address, or to be moved
# without one of these there are none of INSTRUCTIONS either
COUNTED_IN_PTX = re.compile(r"mma|cp\.async|\.sys\b")
REGISTERS_OF_SM, WARPS_OF_SM, SHARED_OF_SM = 65536, 64, 228 * 1024
MORE_IS_BETTER = ("ctas",)
_CLOSED = re.compile(r"\b[HIQ]GMMA.*gsb0")


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "-res-usage", file.name))
        assert usage, "cuobjdump printed no resource usage"
    return int(usage[1]), int(usage[2])


def _instructions(cubin: bytes) -> bytes:
    """The section of an ELF file that holds its kernel's instructions."""
    (table,), (size, number, names) = (
        struct.unpack_from("<Q", cubin, 0x28),
        struct.unpack_from("<3H", cubin, 0x3A),
    )
    # name, …, start, bytes
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * n) for n in range(number)]
    (found,) = (
        each for each in sections if cubin.startswith(b".text.", sections[names][4] + each[0])
    )
    return cubin[found[4] : found[4] + found[5]]


def disassemble(cubins: list[bytes], architecture: str) -> list[str]:
    """A listing for each: of all at once, as the disassembler takes 0.4 s to start and hardly any
    to read a kernel."""
    if not cubins:
        return []
    parts = [_instructions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(parts))
        file.flush()
        name = architecture.replace("sm_", "SM") + ("" if architecture == "sm_80" else "a")
        lines = _run(
            "nvdisasm", "--binary", name, "--no-dataflow", "--no-vliw", file.name
        ).splitlines()
    at = [
        int(found[1], 16) if (found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s", line)) else -1
        for line in lines
    ]
    ends = list(accumulate(map(len, parts)))
    assert max(at) + 16 == ends[-1], (
        f"nvdisasm has not read {architecture} to its end: {lines[-1:]}"
    )
    return [
        "\n".join(line for line, place in zip(lines, at) if end - len(part) <= place < end)
        for part, end in zip(parts, ends)
    ]


def _loops(ptx: str) -> list[str]:
    """The bodies of loops: from a label to a branch back to it."""
    lines, labels, bodies = ptx.splitlines(), {}, []
    for at, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\d+_\d+):", line.strip()):
            labels[label[1]] = at
        if (branch := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)", line)) and branch[
            1
        ] in labels:
            bodies.append("\n".join(lines[labels[branch[1]] : at]))
    return bodies


def performance(ptx: str, registers: int, shared: int, num_warps: int) -> dict[str, int]:
    """What a model of the binary says of speed.

    Returns:
        ctas: how many programs share a multiprocessor, by registers (given out in eights), shared
            memory and warps.
        barriers: of the block, outside loops; loop_barriers: in the innermost loop that has most of
            them.
        drains: places in loops where a warp group waits for all its GEMMs: with one CTA nothing
            runs beside the rest.
        narrow: exchanges through shared memory of fewer than 4 bytes by an instruction.
    """
    barrier, bodies = r"\bbar(?:rier)?\.sync", _loops(ptx)
    innermost = [
        one for one in bodies if not any(other in one for other in bodies if other is not one)
    ]
    threads = 32 * num_warps
    by_registers = REGISTERS_OF_SM // (-(-registers // 8) * 8 * threads)
    return {
        "ctas": min(by_registers, SHARED_OF_SM // (shared + 1024), WARPS_OF_SM // num_warps, 32),
        "barriers": len(re.findall(barrier, ptx))
        - sum(len(re.findall(barrier, one)) for one in innermost),
        "loop_barriers": max((len(re.findall(barrier, one)) for one in innermost), default=0),
        "drains": sum(
            len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+0;", one)) for one in innermost
        ),
        "narrow": len(re.findall(r"\b(?:st|ld)\.shared\.b(?:8|16)\b", ptx)),
    }


def _beside(listing: str) -> int:
    """How many exponentials stand between a GEMM's start and the wait for it."""
    found, waiting = 0, False
    for operation in re.findall(r"\bHGMMA|\bWARPGROUP\.DEPBAR|\bMUFU\.EX2", listing):
        if operation == "MUFU.EX2":
            found += waiting
        else:
            waiting = operation == "HGMMA"
    return found


def stack_pointer_as_number(listing: str) -> int:
    """How many instructions compute with the stack pointer's value.

    ptxas 12.8 does so where it merges two casts to FP8 into a register of which it has written no
    half: the results are wrong, and nothing else tells.
    """
    lines = (
        re.sub(r"^\s*/\*\w+\*/\s*(?:@!?U?P\w+\s+)?", "", line) for line in listing.splitlines()
    )
    return sum(bool(STACK_POINTER.search(line)) and not ADDRESSES.search(line) for line in lines)


def _amd(assembly: str) -> tuple[int, int, str]:
    def value(name: str) -> int:
        found = re.search(rf"\.{name}: +(\d+)", assembly)
        return int(found[1]) if found else 0

    return (
        value("vgpr_count"),
        value("vgpr_spill_count") + value("private_segment_fixed_size"),
        assembly,
    )


def examine(launches: list[Launch], architecture: str, count: bool) -> list[dict]:
    """Resources and instructions of compiled launches.

    Args:
        launches: from `capture`.
        architecture: the target they were compiled for.
        count: whether to count instructions (slower).

    Returns:
        for each: registers a thread, stack bytes a thread (spills, local arrays), shared bytes a
        block, instruction counts (BESIDE: exponentials taken while a GEMM is under way), how many
        groups of asynchronous GEMMs the assembler closes beyond those that the program commits, and
        `stack_pointer_as_number`.
    """
    if architecture.startswith("gfx"):
        return [_report(launch, *_amd(launch.compiled.asm["amdgcn"])) for launch in launches]
    made = [
        (launch, launch.compiled.asm["cubin"], launch.compiled.asm["ptx"]) for launch in launches
    ]
    read = [
        cubin
        for _, cubin, ptx in made
        if count and COUNTED_IN_PTX.search(ptx) or CASTS_TO_FP8.search(ptx)
    ]
    listings = dict(zip(read, disassemble(read, architecture)))
    return [_report(launch, *_usage(cubin), listings.get(cubin, "")) for launch, cubin, _ in made]


def _report(launch: Launch, registers: int, stack: int, listing: str) -> dict:
    counts = {name: len(re.findall(pattern, listing)) for name, pattern in INSTRUCTIONS.items()}
    counts[BESIDE] = _beside(listing)
    shared, ptx = launch.compiled.metadata.shared, launch.compiled.asm.get("ptx", "")
    return {
        "kernel": launch.name,
        "num_warps": launch.num_warps,
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "performance": performance(ptx, registers, shared, launch.num_warps) if ptx else {},
        "instructions": {name: n for name, n in counts.items() if n},
        "wrong": stack_pointer_as_number(listing),
        "serialised": max(0, len(_CLOSED.findall(listing)) - ptx.count("wgmma.commit_group")),
    }
