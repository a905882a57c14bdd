"""Resources and instructions of a compiled kernel, read from its binary with tools of Triton's
wheel."""

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
"""KiB per block on every GPU that a table serves: sm_80's serves 8.6 and 8.9 too (99, not 163)."""
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
ADDRESSES = re.compile(r"\[R1\b|^\S+ R1,|R2UR")  # its legitimate uses: an address, or a move
# PTX without one of these has none of INSTRUCTIONS either.
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
    names_start = sections[names][4]
    (text,) = (s for s in sections if cubin.startswith(b".text.", names_start + s[0]))
    return cubin[text[4] : text[4] + text[5]]


def disassemble(cubins: list[bytes], architecture: str) -> list[str]:
    """A listing of each, made at once: the disassembler takes 0.4 s to start and little more."""
    if not cubins:
        return []
    sections = [_instructions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(sections))
        file.flush()
        name = architecture.replace("sm_", "SM") + ("" if architecture == "sm_80" else "a")
        listing = _run("nvdisasm", "--binary", name, "--no-dataflow", "--no-vliw", file.name)
    lines = listing.splitlines()
    matches = (re.match(r"\s*/\*([0-9a-f]{4,})\*/\s", line) for line in lines)
    addresses = [int(match[1], 16) if match else -1 for match in matches]
    bounds = list(accumulate(map(len, sections), initial=0))
    assert max(addresses) + 16 == bounds[-1], (
        f"nvdisasm has not read {architecture} to its end: {lines[-1:]}"
    )
    return [
        "\n".join(line for line, address in zip(lines, addresses) if start <= address < stop)
        for start, stop in zip(bounds, bounds[1:])
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
    """Figures of speed, by a model of the binary.

    Returns:
        ctas: programs that share a multiprocessor, by registers (allocated in eights), shared
            memory and warps.
        barriers: of the block, outside loops; loop_barriers: in the innermost loop with most of
            them.
        drains: places in loops where a warp group waits for all its GEMMs: with one CTA nothing
            else runs meanwhile.
        narrow: exchanges through shared memory of fewer than 4 bytes per instruction.
    """

    def count(pattern: str, text: str) -> int:
        return len(re.findall(pattern, text))

    barrier, drain = r"\bbar(?:rier)?\.sync", r"wgmma\.wait_group\.sync\.aligned\s+0;"
    loops = _loops(ptx)
    innermost = [one for one in loops if not any(two in one for two in loops if two is not one)]
    loop_barriers = [count(barrier, loop) for loop in innermost]
    by_registers = REGISTERS_OF_SM // (-(-registers // 8) * 8 * 32 * num_warps)
    return {
        "ctas": min(by_registers, SHARED_OF_SM // (shared + 1024), WARPS_OF_SM // num_warps, 32),
        "barriers": count(barrier, ptx) - sum(loop_barriers),
        "loop_barriers": max(loop_barriers, default=0),
        "drains": sum(count(drain, loop) for loop in innermost),
        "narrow": count(r"\b(?:st|ld)\.shared\.b(?:8|16)\b", ptx),
    }


def _beside(listing: str) -> int:
    """Number of exponentials between a GEMM's start and the wait for it."""
    count, running = 0, False
    for operation in re.findall(r"\bHGMMA|\bWARPGROUP\.DEPBAR|\bMUFU\.EX2", listing):
        if operation == "MUFU.EX2":
            count += running
        else:
            running = operation == "HGMMA"
    return count


def stack_pointer_as_number(listing: str) -> int:
    """Number of instructions that compute with the stack pointer's value.

    ptxas 12.8 does so where it merges two casts to FP8 into a register of which it has written
    neither half. The results are wrong, and nothing else shows it.
    """
    lines = (
        re.sub(r"^\s*/\*\w+\*/\s*(?:@!?U?P\w+\s+)?", "", line) for line in listing.splitlines()
    )
    return sum(bool(STACK_POINTER.search(line)) and not ADDRESSES.search(line) for line in lines)


def _amd(assembly: str) -> tuple[int, int, str]:
    def value(name: str) -> int:
        match = re.search(rf"\.{name}: +(\d+)", assembly)
        return int(match[1]) if match else 0

    stack = value("vgpr_spill_count") + value("private_segment_fixed_size")
    return value("vgpr_count"), stack, assembly


def examine(launches: list[Launch], architecture: str, count: bool) -> list[dict]:
    """Resources and instructions of compiled launches.

    Args:
        launches: from `capture`.
        architecture: the target they were compiled for.
        count: whether to count instructions (slower).

    Returns:
        For each: registers and stack bytes (spills, local arrays) per thread, shared bytes per
        block, instruction counts (BESIDE: exponentials computed while a GEMM runs), the number of
        groups of asynchronous GEMMs that the assembler closes beyond those that the program
        commits, and `stack_pointer_as_number`.
    """
    binaries = [launch.compiled.asm for launch in launches]
    if architecture.startswith("gfx"):
        return [_report(launch, *_amd(asm["amdgcn"])) for launch, asm in zip(launches, binaries)]
    cubins = [
        asm["cubin"]
        for asm in binaries
        if count and COUNTED_IN_PTX.search(asm["ptx"]) or CASTS_TO_FP8.search(asm["ptx"])
    ]
    listings = dict(zip(cubins, disassemble(cubins, architecture)))
    return [
        _report(launch, *_usage(asm["cubin"]), listings.get(asm["cubin"], ""))
        for launch, asm in zip(launches, binaries)
    ]


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
