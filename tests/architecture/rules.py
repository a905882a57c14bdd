"""The limits of the architecture. Each rule takes the source and returns what breaks it."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
from collections import Counter

from architecture.source import FUNCTIONS, File, Source, is_standard

# Counted in tokens, because a limit of lines is met by packing them. The total is raised only
# together with a feature, which the commit names.
MAX_PRODUCT_TOKENS = 427_000
MAX_FUNCTION_TOKENS = 350
MAX_KERNEL_TOKENS = 950
MAX_FILE_LINES = 500
MAX_POSITIONAL = 8
MAX_VAGUE_NAMES = 0.005  # of all names that the product binds
MAX_TYPE_IGNORES = 15
# by `import megatron5d.train.loop`
MAX_LOADED_FILES, MAX_LOADED_TOKENS = 125, 150_000

BOUND = ("self", "cls", "ctx")  # passed by Python or by autograd, not by the caller
VAGUE_FILES = {"util", "utils", "helper", "helpers", "common", "misc"}
# A name says what the thing is: `bucket`, `measured`, `local_rows`, never one of these.
VAGUE_NAMES = frozenset(
    """
    found each held here mine told said made asked given rest others kept left owed wanted where
    seen due near far ahead behind whole part parts own lacking ways place places turn way chosen
    taken got had there trouble less bare once again together alone
    """.split()  # noqa: SIM905
)
CLOCKS = re.compile(r"\btime\.\w+\(\)|\b(?:monotonic|perf_counter|process_time|getrusage)\(")
PARALLEL = {
    f"megatron5d/{name}_parallel" for name in ("tensor", "context", "expert", "pipeline", "data")
}
LAYERS = {
    "megatron5d": 0,  # the version, nothing else
    "kernels": 1,
    "megatron5d/config": 1,
    "megatron5d/topology": 2,
    "megatron5d/phases": 3,
    "megatron5d/comm": 4,
    "megatron5d/precision": 4,
    "megatron5d/checkpoint": 4,
    **dict.fromkeys(PARALLEL, 5),
    "megatron5d/model": 6,
    "megatron5d/data": 6,
    "megatron5d/optim": 6,
    "megatron5d/train": 7,
    "megatron5d/planning": 8,
    "megatron5d/parity": 9,  # trains what pretrain.py would train, on the layout that is planned
    "pretrain.py": 9,
    "tools": 10,  # programs: they may use all of the package, and nothing may use them
    "launch": 10,
}
TOP_LEVEL = {
    *(".ci", ".git", ".github", ".gitignore", ".mypy.ini", ".pre-commit-config.yaml"),
    *(".pytest.ini", ".ruff.toml", ".mkdocs.yml", "pyproject.toml", "setup.py", "pretrain.py"),
    *("AGENTS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *("conf", "docs", "kernels", "launch", "megatron5d", "tests", "tools"),
}


def product_is_light(source: Source) -> list[str]:
    total = sum(file.num_tokens() for file in source.product)
    if total <= MAX_PRODUCT_TOKENS:
        return []
    return [f"the product has {total:,} tokens, at most {MAX_PRODUCT_TOKENS:,}"]


def files_are_short(source: Source) -> list[str]:
    return [
        f"{file.path}: {len(file.lines)} lines, at most {MAX_FILE_LINES}"
        for file in source.files
        if len(file.lines) > MAX_FILE_LINES
    ]


def functions_are_short(source: Source) -> list[str]:
    broken = []
    for file in source.product:
        for function in file.walk(*FUNCTIONS):
            limit = MAX_KERNEL_TOKENS if _is_kernel(function) else MAX_FUNCTION_TOKENS
            size = file.num_tokens(function)
            if size > limit:
                where = _where(file, function)
                broken.append(f"{where}: {function.name} has {size} tokens, at most {limit}")
    return broken


def _is_kernel(function: ast.FunctionDef) -> bool:
    """Whether it is decorated with triton.jit, under whatever name that was imported."""
    names = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(getattr(name, "attr", getattr(name, "id", "")) == "jit" for name in names)


def parameters_are_few(source: Source) -> list[str]:
    """Counts what a caller can pass by position. Kernels are exempt: their launcher alone calls."""
    broken = []
    for file in source.files:
        for function in file.walk(*FUNCTIONS):
            arguments = function.args.posonlyargs + function.args.args
            names = [argument.arg for argument in arguments if argument.arg not in BOUND]
            if len(names) > MAX_POSITIONAL and not _is_kernel(function):
                broken.append(
                    f"{_where(file, function)}: {function.name} has {len(names)} positional "
                    f"parameters, at most {MAX_POSITIONAL}; make some keyword-only, or an object"
                )
    return broken


def no_global_statements(source: Source) -> list[str]:
    return [
        f"{_where(file, node)}: global {', '.join(node.names)}; pass it, or put it into an object"
        for file in source.files
        for node in file.walk(ast.Global)
    ]


def no_global_arguments(source: Source) -> list[str]:
    return [
        f"{_where(file, node)}: {node.name}() gives every caller everything; pass what it needs"
        for file in source.files
        for node in file.walk(ast.FunctionDef)
        if node.name in ("get_args", "get_config", "set_args")
    ]


def file_names_say_something(source: Source) -> list[str]:
    return [
        f"{file.path}: '{name}' names no subject; say what is in it"
        for file in source.files
        for name in sorted(
            VAGUE_FILES & {part.removesuffix(".py") for part in file.path.split("/")}
        )
    ]


def names_say_something(source: Source) -> list[str]:
    """Compares the share of vague names with its limit, and lists the commonest ones."""
    bound: Counter[str] = Counter()
    for file in source.product:
        names = [n.id for n in file.walk(ast.Name) if isinstance(n.ctx, ast.Store)]
        bound.update([*names, *(n.arg for n in file.walk(ast.arg))])
    vague = Counter({name: count for name, count in bound.items() if name in VAGUE_NAMES})
    if vague.total() <= MAX_VAGUE_NAMES * bound.total():
        return []
    worst = ", ".join(f"{name} {count}" for name, count in vague.most_common(12))
    share = vague.total() / bound.total()
    return [f"{share:.1%} of the bound names say nothing, at most {MAX_VAGUE_NAMES:.1%}: {worst}"]


def types_are_known(source: Source) -> list[str]:
    ignores = [
        f"{file.path}:{number}"
        for file in source.product
        for number, line in enumerate(file.lines, 1)
        if "# type: ignore" in line
    ]
    if len(ignores) <= MAX_TYPE_IGNORES:
        return []
    return [f"{len(ignores)} type: ignore, at most {MAX_TYPE_IGNORES}: {', '.join(ignores)}"]


def formatting_has_no_exceptions(source: Source) -> list[str]:
    return [
        f"{file.path}:{number}: a formatter pragma"
        for file in source.files
        for number, line in enumerate(file.lines, 1)
        if "# fmt" + ":" in line
    ]


def imports_point_down(source: Source) -> list[str]:
    """A file imports lower layers or its own package; layer 5's five packages not each other."""
    broken = []
    for file in source.product:
        layer = LAYERS.get(file.package)
        if layer is None:
            broken.append(
                f"{file.path}: no layer for {file.package} in tests/architecture/rules.py"
            )
            continue
        for line, to in source.edges(file):
            other = LAYERS.get(to.package, 0)
            if to.package != file.package and other >= layer:
                siblings = {file.package, to.package} <= PARALLEL
                rule = "they never import each other" if siblings else "only lower ones"
                broken.append(
                    f"{file.path}:{line}: {file.package} (layer {layer}) imports {to.module} "
                    f"(layer {other}); {rule}"
                )
    return broken


def no_circles(source: Source) -> list[str]:
    """Deferred imports count: a circle that is only entered later is still one."""
    imported = {
        file.path: sorted({to.path for _, to in source.edges(file)}) for file in source.product
    }
    done: set[str] = set()
    broken: list[str] = []

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            broken.append(" -> ".join([*trail[trail.index(path) :], path]))
        elif path not in done:
            for target in imported[path]:
                visit(target, [*trail, path])
            done.add(path)

    for path in imported:
        visit(path, [])
    return broken


def second_derivatives_are_refused(source: Source) -> list[str]:
    """Autograd does not record what a collective or a kernel does in a backward pass, so its own
    gradient would silently lack terms."""
    return [
        f"{_where(file, node)}: {node.name} is not a FirstOrderFunction (kernels/dispatch.py)"
        for file in source.product
        if file.path != "kernels/dispatch.py"
        for node in file.walk(ast.ClassDef)
        if any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
    ]


def environment_is_read_in_topology(source: Source) -> list[str]:
    """kernels/ may read TRITON_INTERPRET, as Triton does on import; launchers make environments."""
    broken = []
    for file in source.product:
        if file.package in ("megatron5d/topology", "launch"):
            continue
        if file.path == "megatron5d/parity/local_ranks.py":
            continue
        allowed = ("TRITON_INTERPRET",) if file.package == "kernels" else ()
        for line in _environment_reads(file):
            if not any(name in file.lines[line - 1] for name in allowed):
                broken.append(f"{file.path}:{line}: reads the environment; pass the value instead")
    return broken


def _environment_reads(file: File) -> list[int]:
    lines = [
        node.lineno
        for node in file.walk(ast.Attribute)
        if node.attr in ("environ", "environb", "getenv", "putenv")
        and getattr(node.value, "id", "") == "os"
    ]
    from_os = ("os.environ", "os.getenv", "os.environb")
    return sorted({*lines, *(line for line, name in file.imports() if name in from_os)})


def hydra_ends_at_the_entry_point(source: Source) -> list[str]:
    return [
        f"{file.path}:{line}: imports {name}; only megatron5d/config/load.py knows Hydra"
        for file in source.product
        if file.path != "megatron5d/config/load.py"
        for line, name in file.imports()
        if name.split(".")[0] in ("hydra", "omegaconf")
    ]


def lowest_layer_is_light(source: Source) -> list[str]:
    """kernels/ needs torch and Triton, config/ nothing."""
    broken = []
    for file in source.product:
        if file.package == "kernels":
            allowed = {"megatron5d", "torch", "triton"}
        elif file.path == "megatron5d/config/load.py":
            allowed = {"megatron5d", "hydra", "omegaconf"}
        elif file.package == "megatron5d/config":
            allowed = {"megatron5d"}
        else:
            continue
        for line, name in file.imports():
            if name.split(".")[0] not in allowed and not is_standard(name):
                names = ", ".join(sorted(allowed))
                broken.append(
                    f"{file.path}:{line}: imports {name}; allowed: {names}, the standard library"
                )
    return broken


def measured_times_are_compared_alone(source: Source) -> list[str]:
    """A test fails on a slow machine if time it measured must stay below a number: such tests are
    marked `timing`. Waits that end at a deadline may say so."""
    broken = []
    for file in source.files:
        if file.path.startswith("tests/") and not _is_timing(file.walk(ast.Assign)):
            for function in file.walk(ast.FunctionDef):
                if not any("mark.timing" in ast.unparse(d) for d in function.decorator_list):
                    broken += [
                        f"{_where(file, node)}: compares a measured time; mark the test `timing`"
                        for node in _bounded_times(function)
                    ]
    return sorted(set(broken))


def _is_timing(assignments: list[ast.Assign]) -> bool:
    """Whether `pytestmark` marks the file's tests."""
    return any("mark.timing" in ast.unparse(node.value) for node in assignments)


def _bounded_times(function: ast.FunctionDef) -> list[ast.Assert]:
    """Assertions that a time span, read off a clock in this function, is below something."""
    waits = {
        n for loop in ast.walk(function) if isinstance(loop, ast.While) for n in ast.walk(loop)
    }
    measured = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _reads_clock(node.value, set())
        for target in ast.walk(node.targets[0])
        if isinstance(target, ast.Name)
    }
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assert) and node not in waits
        for compared in ast.walk(node.test)
        if isinstance(compared, ast.Compare)
        for less, op, more in _pairs(compared)
        if _reads_clock(less if isinstance(op, ast.Lt | ast.LtE) else more, measured)
    ]


def _pairs(compared: ast.Compare) -> list[tuple]:
    sides = [compared.left, *compared.comparators]
    ordered = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    triples = zip(sides, compared.ops, sides[1:])
    return [(a, op, b) for a, op, b in triples if isinstance(op, ordered)]


def _reads_clock(node: ast.expr, measured: set[str]) -> bool:
    """Whether it is the difference of two times, or one of these names."""
    if isinstance(node, ast.Name):
        return node.id in measured
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and bool(CLOCKS.search(ast.unparse(node)))
    )


def top_level_is_fixed(source: Source) -> list[str]:
    ignored = [line.rstrip("/") for line in (source.root / ".gitignore").read_text().split()]
    return [
        f"{name}: not part of the top level; put it into one of its folders"
        for name in sorted(os.listdir(source.root))
        if name not in TOP_LEVEL and not any(fnmatch.fnmatch(name, glob) for glob in ignored)
    ]


def _where(file: File, node: ast.stmt) -> str:
    return f"{file.path}:{node.lineno}"


RULES = (
    product_is_light,
    files_are_short,
    functions_are_short,
    parameters_are_few,
    no_global_statements,
    no_global_arguments,
    file_names_say_something,
    names_say_something,
    types_are_known,
    formatting_has_no_exceptions,
    imports_point_down,
    no_circles,
    second_derivatives_are_refused,
    environment_is_read_in_topology,
    hydra_ends_at_the_entry_point,
    lowest_layer_is_light,
    measured_times_are_compared_alone,
    top_level_is_fixed,
)
