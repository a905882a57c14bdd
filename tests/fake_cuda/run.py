#!/usr/bin/env python3
"""Runs a command on GPUs that compute nothing, where there is no GPU.

    python tests/fake_cuda/run.py pretrain.py model=llama3_1b data.train=[...]
        one GPU
    CUDA_VISIBLE_DEVICES=0,1 PYTHON=tests/fake_cuda/run.py bash launch/local.sh 2 ...
        two GPUs, with NCCL between them
    FAKE_CUDA_GB=40 FAKE_CUDA_CAPABILITY=80 python tests/fake_cuda/run.py ...
        another GPU than an H200

It requires a build of torch for CUDA, g++, and the CUDA headers of torch's packages or
/usr/local/cuda. All of torch and Triton above the driver is real: the allocator and its counts,
streams and events, pinned memory, launchers and descriptors, the order of NCCL's calls. Kernels are
compiled and launched, and do nothing. What a GPU would refuse, and ranks that disagree, are
reported on stderr as FAKE CUDA FAULT.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / ".cache/fake_cuda"
SOURCES = ["streams.cpp", "memory.cpp", "graphs.cpp", "runtime.cpp", "driver.cpp", "nccl.cpp"]
IMITATED = re.compile(r"\b(cuda[A-Z]\w+|__cuda\w+|cublas\w+|nccl[A-Z]\w+)")


def symbols(library: Path, which: str) -> set[str]:
    """Names that a library imports (`--undefined-only`) or exports (`--defined-only`)."""
    command = ["nm", "-D", which, library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {match[1] for line in listing.splitlines() if (match := IMITATED.search(line))}


def build(packages: Path) -> Path:
    """The library, rebuilt if a source has changed: our imitations, and success for all other calls
    of torch."""
    library = BUILD / "libcuda.so.1"
    newest = max((HERE / name).stat().st_mtime for name in os.listdir(HERE))
    if library.exists() and library.stat().st_mtime > newest:
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    include = [path for path in (packages / "nvidia").glob("*/include") if path.is_dir()]
    include += [packages / "triton/backends/nvidia/include", Path("/usr/local/cuda/include")]
    unfinished = BUILD / f"{os.getpid()}.so"  # several ranks may build at once
    stubs = BUILD / f"{os.getpid()}.cpp"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-o", str(unfinished)]
    command += [f"-I{path}" for path in include] + [str(HERE / name) for name in SOURCES]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    libraries = (packages / "torch/lib").glob("*.so")
    imported = set().union(*(symbols(path, "--undefined-only") for path in libraries))
    missing = sorted(imported - symbols(unfinished, "--defined-only"))
    stubs.write_text("".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in missing))
    subprocess.run([*command, str(stubs), "-ldl", "-lpthread"], check=True)
    stubs.unlink()
    unfinished.rename(library)
    management = library.with_name("libnvidia-ml.so.1")
    if not management.is_symlink():
        management.symlink_to(library.name)
    return library


def sweep(messages: Path = Path("/dev/shm/fake_cuda")) -> None:
    """Removes messages of communicators whose creator, whose id begins the name, has ended."""
    for folder in messages.glob("*-*-*"):
        if not Path("/proc", folder.name.partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    sweep()
    library = build(Path(sysconfig.get_path("platlib")))
    paths = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "FAKE_CUDA_LIBRARY": str(library),
        "LD_LIBRARY_PATH": str(BUILD),
        "TRITON_LIBCUDA_PATH": str(BUILD),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
