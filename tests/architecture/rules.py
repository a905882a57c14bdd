"""The limits of the house. Each rule takes the source and returns what breaks it, one line a
place."""

from __future__ import annotations

import ast
import fnmatch
import os
import re

from architecture.source import File, Source, is_standard

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_KERNEL_LINES = 120
MAX_POSITIONAL = 8
MAX_LOADED_FILES, MAX_LOADED_LINES = 118, 19_400  # by `import megatron5d.train.loop`
BOUND = ("self", "cls", "ctx")  # given by Python or by autograd, not by the caller
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
SISTERS = {
    f"megatron5d/{name}_parallel" for name in ("tensor", "context", "expert", "pipeline", "data")
}
FLOORS = {
    "megatron5d": 0,  # the version, nothing else
    "kernels": 1,
    "megatron5d/config": 1,
    "megatron5d/topology": 2,
    "megatron5d/phases": 2,
    "megatron5d/comm": 3,
    "megatron5d/precision": 3,
    "megatron5d/checkpoint": 3,
    **dict.fromkeys(SISTERS, 4),
    "megatron5d/model": 5,
    "megatron5d/data": 5,
    "megatron5d/optim": 5,
    "megatron5d/train": 6,
    "megatron5d/planning": 7,
    "megatron5d/parity": 8,  # trains what the door would train, on the layout that planning finds
    "tools": 9,  # programs like pretrain.py: they may use all of the package, nothing may use them
    "pretrain.py": 9,
    "launch": 9,
}
TOP_LEVEL = {
    *(
        ".ci",
        ".git",
        ".github",
        ".gitignore",
        ".mypy.ini",
        ".pre-commit-config.yaml",
        ".pytest.ini",
        ".ruff.toml",
    ),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *(".mkdocs.yml", "pyproject.toml", "setup.py", "pretrain.py"),
    *("conf", "docs", "kernels", "launch", "megatron5d", "tests", "tools"),
}


def files_are_short(source: Source) -> list[str]:
    return [
        f"{file.path}: {file.num_lines} lines, at most {MAX_FILE_LINES}"
        for file in source.files
        if file.num_lines > MAX_FILE_LINES
    ]


def functions_are_short(source: Source) -> list[str]:
    broken = []
    for file in source.files:
        for function in file.walk(ast.FunctionDef, ast.AsyncFunctionDef):
            limit = MAX_KERNEL_LINES if _is_kernel(function) else MAX_FUNCTION_LINES
            length = function.end_lineno - function.lineno + 1
            if length > limit:
                broken.append(
                    f"{_place(file, function)}: {function.name} has {length} lines, at most {limit}"
                )
    return broken


def _is_kernel(function: ast.FunctionDef) -> bool:
    """Decorated with triton.jit, under whatever name it was imported."""
    names = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(
        (n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "")) == "jit" for n in names
    )


def parameters_are_few(source: Source) -> list[str]:
    """Counts what a caller can pass by position; a kernel's pointers and strides are its launcher's
    business."""
    broken = []
    for file in source.files:
        for function in file.walk(ast.FunctionDef, ast.AsyncFunctionDef):
            names = [
                a.arg for a in function.args.posonlyargs + function.args.args if a.arg not in BOUND
            ]
            if len(names) > MAX_POSITIONAL and not _is_kernel(function):
                broken.append(
                    f"{_place(file, function)}: {function.name} has {len(names)} positional parameters, "
                    f"at most {MAX_POSITIONAL}; make the rest keyword-only, or an object"
                )
    return broken


def no_global_statements(source: Source) -> list[str]:
    return [
        f"{_place(file, node)}: global {', '.join(node.names)}; pass it, or put it into an object"
        for file in source.files
        for node in file.walk(ast.Global)
    ]


def no_global_arguments(source: Source) -> list[str]:
    return [
        f"{_place(file, node)}: {node.name}() gives every caller everything; pass what is needed"
        for file in source.files
        for node in file.walk(ast.FunctionDef)
        if node.name in ("get_args", "get_config", "set_args")
    ]


def names_say_something(source: Source) -> list[str]:
    broken = []
    for file in source.files:
        vague = VAGUE_NAMES & {part.removesuffix(".py") for part in file.path.split("/")}
        broken += [
            f"{file.path}: '{name}' names no subject; say what is in it" for name in sorted(vague)
        ]
    return broken


def floors_hold(source: Source) -> list[str]:
    """A file imports lower floors or its own room. The sisters of floor 4 are rooms like all
    others."""
    broken = []
    for file in source.code:
        floor = FLOORS.get(file.room)
        if floor is None:
            broken.append(
                f"{file.path}: the room {file.room} has no floor in tests/architecture/rules.py"
            )
            continue
        for line, to in source.edges(file):
            other = FLOORS.get(to.room, 0)
            if to.room != file.room and other >= floor:
                kind = (
                    "sisters never import each other"
                    if {file.room, to.room} <= SISTERS
                    else "only lower ones"
                )
                broken.append(
                    f"{file.path}:{line}: {file.room} (floor {floor}) imports {to.module} (floor {other}); {kind}"
                )
    return broken


def no_circles(source: Source) -> list[str]:
    """Deferred imports count: a circle that is only entered later is still one."""
    after = {file.path: sorted({to.path for _, to in source.edges(file)}) for file in source.code}
    done: set[str] = set()
    broken: list[str] = []

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            broken.append(" -> ".join([*trail[trail.index(path) :], path]))
        elif path not in done:
            for following in after[path]:
                visit(following, [*trail, path])
            done.add(path)

    for start in after:
        visit(start, [])
    return broken


def second_derivatives_are_refused(source: Source) -> list[str]:
    """What a collective or a kernel does in a backward is not recorded: its own gradient would
    silently lack terms."""
    return [
        f"{_place(file, function)}: {function.name} is not a FirstOrderFunction (kernels/dispatch.py)"
        for file in source.code
        if file.path != "kernels/dispatch.py"
        for function in file.walk(ast.ClassDef)
        if any(ast.unparse(base).endswith("autograd.Function") for base in function.bases)
    ]


def environment_is_read_in_topology(source: Source) -> list[str]:
    """kernels/ may look at TRITON_INTERPRET, which Triton itself reads at import; launchers make
    environments."""
    broken = []
    for file in source.code:
        if (
            file.room in ("megatron5d/topology", "launch")
            or file.path == "megatron5d/parity/local_ranks.py"
        ):
            continue
        allowed = {'"TRITON_INTERPRET"', "'TRITON_INTERPRET'"} if file.room == "kernels" else set()
        for line in _environment_reads(file):
            text = file.text.splitlines()[line - 1]
            if not any(name in text for name in allowed):
                broken.append(
                    f"{file.path}:{line}: reads the environment; pass the value from the door"
                )
    return broken


def _environment_reads(file: File) -> list[int]:
    lines = [
        node.lineno
        for node in file.walk(ast.Attribute)
        if node.attr in ("environ", "environb", "getenv", "putenv")
        and getattr(node.value, "id", "") == "os"
    ]
    lines += [
        line for line, name in file.imports() if name in ("os.environ", "os.getenv", "os.environb")
    ]
    return sorted(set(lines))


def hydra_ends_at_the_door(source: Source) -> list[str]:
    return [
        f"{file.path}:{line}: imports {name}; only megatron5d/config/load.py knows Hydra"
        for file in source.code
        if file.path != "megatron5d/config/load.py"
        for line, name in file.imports()
        if name.split(".")[0] in ("hydra", "omegaconf")
    ]


def ground_floor_is_light(source: Source) -> list[str]:
    """kernels/ needs torch and Triton, config/ nothing."""
    broken = []
    for file in source.code:
        if file.room == "kernels":
            allowed = {"megatron5d", "torch", "triton"}
        elif file.room == "megatron5d/config":
            allowed = {"megatron5d"} | (
                {"hydra", "omegaconf"} if file.path.endswith("/load.py") else set()
            )
        else:
            continue
        for line, name in file.imports():
            if name.split(".")[0] not in allowed and not is_standard(name):
                broken.append(
                    f"{file.path}:{line}: imports {name}; allowed: {', '.join(sorted(allowed))}, the standard library"
                )
    return broken


def top_level_is_fixed(source: Source) -> list[str]:
    ignored = [line.rstrip("/") for line in (source.root / ".gitignore").read_text().split()]
    return [
        f"{name}: not a part of the top level; put it into one of its folders"
        for name in sorted(os.listdir(source.root))
        if name not in TOP_LEVEL and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    ]


VERB = re.compile(r"[A-Z][a-z]+(s|es)\b")
NO_VERBS = {
    "Axes",
    "Bytes",
    "Gradients",
    "Is",
    "Its",
    "Names",
    "Numbers",
    "Ranks",
    "Rows",
    "Sizes",
    "This",
    "Times",
    "Tokens",
    "Values",
    "Weights",
}


def docstrings_begin_with_a_verb(source: Source) -> list[str]:
    """Returns the functions whose docstring does not say what they do: "Returns ...". A property is
    a noun."""
    return [
        f"{_place(file, function)}: the docstring of {function.name} begins with {words[0]!r}, not with a verb"
        for file in source.code
        for function in file.walk(ast.FunctionDef, ast.AsyncFunctionDef)
        if (words := (ast.get_docstring(function) or "").split())
        if not any(ast.unparse(each).endswith("property") for each in function.decorator_list)
        if not VERB.match(words[0]) or words[0].rstrip(",.:;") in NO_VERBS
    ]


# today's word: what the field calls it
RETIRED = {
    r"matrix products?|(8-bit|FP8|grouped) products?|products of matrices": "GEMM",
    r"\w*eight_?bits?\w*|8[- ]bit (copies|kernels|weights|floats|training|operations)|in 8 bits": "fp8",
    r"laws?|lawful": "check, valid",
    r"fp8_turn\w*|TURNED|\w+_turned": "transpose",
    r"(mail|in|out)?box(es)?|Mailbox": "symmetric-memory buffer, send or receive channel",
    r"(tp|cp|ep|dp|pp) lines?|lines? of ranks|lines_of|\w+_LINES(?<!_BAD_LINES)(?<!_LOADED_LINES)": "process group",
    r"LineLost|PeerLost|(Group)?Passage|Relay|(Direct|Node)?Trip|Places|Inbox|Outbox": "its own, now gone",
    r"ticket|receipts?|stand_in|carried_by|eight_bits|collective_notes|forked_ranks|flat_memory": "handle, completion",
    r"assembl(y|ies)|arms?|hollow\w*|wire|mirrored rank|arithmetic\.py": "gather, islands, fake CUDA, encoded, replica",
    r"goes on|brings back|hands on|handed on|whoever|comes home|so many": "continues, restores, passes",
}
KEPT = {  # file: the retired words that it needs
    "megatron5d/planning/memory/rank_memory.py": ("boxes",),  # a key of JSON records
    "docs/memory.md": ("boxes",),  # the same
    "megatron5d/tools/plots/schedule.py": ("box",),  # of an SVG
}


def words_are_the_fields(source: Source) -> list[str]:
    """Returns where the product, its configuration and its guides use a word that nobody else in
    the field does."""
    words = [(re.compile(rf"\b({old})\b"), new) for old, new in RETIRED.items()]
    texts = {file.path: file.text for file in source.code}
    for name in ("conf/**/*.yaml", "README.md", "CONTRIBUTING.md", "docs/**/*.md"):
        texts |= {
            path.relative_to(source.root).as_posix(): path.read_text()
            for path in source.root.glob(name)
        }
    return [
        f"{path}:{number}: {match[0]!r}; the field says {new}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for word, new in words
        for match in word.finditer(line)
        if match[0] not in KEPT.get(path, ())
    ]


RULES = (
    docstrings_begin_with_a_verb,
    words_are_the_fields,
    files_are_short,
    functions_are_short,
    parameters_are_few,
    no_global_statements,
    no_global_arguments,
    names_say_something,
    floors_hold,
    no_circles,
    second_derivatives_are_refused,
    environment_is_read_in_topology,
    hydra_ends_at_the_door,
    ground_floor_is_light,
    top_level_is_fixed,
)


def _place(file: File, node: ast.stmt) -> str:
    return f"{file.path}:{node.lineno}"
