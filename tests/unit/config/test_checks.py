"""Every check rejects a configuration made to fail it, accepts a valid one, and its fix passes."""

import json
import re
import shlex
from pathlib import Path
from random import Random

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron5d.config.checks import CHECKS, run_checks
from megatron5d.config.convert import from_dict, keys, kind_of, leaves, to_dict
from megatron5d.config.schema import Config

# lines of `id: the values that fail the check, as JSON`, for 8 ranks
LINES = (Path(__file__).parent / "refused_by_checks.txt").read_text().splitlines()
CASES = dict(line.split(": ", 1) for line in LINES)
BY_ID = {check.id: check for check in CHECKS}


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch, request):
    """Makes a folder with one dataset, a release and a locked folder the working directory.

    Tests do not depend on installed packages, nor on root, who may write everywhere.
    """
    for name, content in (("corpus", b"\0\0"), ("empty", b"")):
        (tmp_path / f"{name}.bin").write_bytes(content)
        (tmp_path / f"{name}.idx").write_bytes(b"")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(
        "megatron5d.config.checks.files.os.access", lambda path, mode: "locked" not in str(path)
    )
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    absent = {name for name in ("wandb", "tensorboard") if f"{name}-inst" in request.node.name}
    monkeypatch.setattr(
        "megatron5d.config.checks.training.find_spec",
        lambda name: None if name in {"amp_C", *absent} else object(),
    )


def config_with(values: dict[str, object]) -> Config:
    data = to_dict(Config())
    for key, value in {"data.train": ["corpus"], **values}.items():
        *path, last = key.split(".")
        node = data
        for name in path:
            node = node[name]
        assert last in node, key
        node[last] = value
    return from_dict(data)


def parse(text: str) -> dict[str, object]:
    pairs = [pair.split("=", 1) for pair in re.split(r" (?=[a-z_.0-9]+=)", text)]
    return {key: json.loads(value) for key, value in pairs}


def failed_ids(values: dict[str, object], world: int = 8) -> list[str]:
    return [fault.id for fault in run_checks(config_with(values), world)]


def only_fault(values: dict[str, object]):
    (fault,) = run_checks(config_with(values), 1)
    return fault


def test_each_check_has_one_case_and_each_case_a_check():
    assert sorted(CASES) == sorted(check.id for check in CHECKS)
    assert len(BY_ID) == len(CHECKS)


def test_ids_are_kebab_case_and_knobs_are_keys():
    for check in CHECKS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
        assert check.knobs and set(check.knobs) <= set(leaves())
        assert set(check.needs) <= set(BY_ID)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('log.dir="runs/n" log.jsonl="runs/./n"', "runs/./n must be a file .got a folder of log.d"),
        ('checkpoint.dir="runs/n/ck" log.jsonl="runs/n"', "a folder of checkpoint.dir=runs/n/ck"),
        ('log.profile="link/p" log.jsonl="released/p"', "got a folder of log.profile=link/p"),
        ('log.jsonl="corpus.bin"', "would replace a file of the data"),
        (
            'data.valid_sets=["web corpus"] log.jsonl="corpus.idx"',
            "would replace a file of the data",
        ),
        ('data.tokenizer="empty.bin" log.jsonl="empty.bin"', "replace a file of data.tokenizer"),
        ('log.dir="runs" log.jsonl="runs/config.yaml"', "would replace a file of log.dir"),
        ('checkpoint.dir="runs" log.jsonl="runs/latest"', "replace a file of checkpoint.dir"),
        ('checkpoint.dir="old/step-00000010"', "lies in .*old/step-00000010, a checkpoint"),
        (
            'log.jsonl="old/step-00000010.left/log.jsonl"',
            "lies in .*old/step-00000010.left, a checkpoint",
        ),
    ],
)
def test_conflicting_paths(text, reason):
    Path("link").symlink_to("released")
    values = parse(text)
    fault = only_fault(values)
    assert fault.id == "paths-apart" and re.search(reason, fault.reason), fault
    key, _, path = fault.fix.partition("=")
    assert failed_ids({**values, key: path}, 1) == []
    valid = 'log.dir="runs" checkpoint.dir="runs" log.jsonl="runs/log.jsonl"'
    assert failed_ids(parse(valid), 1) == []


@pytest.mark.parametrize(
    "knob", ["checkpoint.dir", "log.dir", "log.jsonl", "log.profile", "data.cache_dir"]
)
def test_link_without_target(knob):
    Path("dangling").symlink_to("gone")
    for path in ("dangling", "dangling/inside"):
        fault = only_fault({knob: path})
        assert "dangling, a link whose target gone does not exist" in fault.reason
        fix = fault.fix.partition("=")[2].removesuffix(", or null")
        assert failed_ids({knob: fix}, 1) == []


def test_device_is_neither_file_nor_folder():
    fault = only_fault({"log.jsonl": "/dev/null"})
    assert fault.id == "log-jsonl-path" and "neither a file nor a folder" in fault.reason
    assert failed_ids({"checkpoint.dir": "/dev/null/inside"}) == ["checkpoint-dir-path"]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_defaults_pass_all_checks(world):
    assert failed_ids({}, world) == []


@pytest.mark.parametrize("id", CASES)
def test_check_rejects_and_names_its_knob(id):
    values = parse(CASES[id])
    faults = {fault.id: fault for fault in run_checks(config_with(values), 8)}
    assert id in faults, f"{values} failed only {sorted(faults)}"
    fault = faults[id]
    names = [knob.rpartition(".")[2] for knob in BY_ID[id].knobs if knob in values]
    assert any(name in fault.reason for name in names), fault.reason
    assert re.search(r"[a-z_0-9.]+=\S|use \d", fault.fix), fault.fix


def first_fix(fix: str) -> dict[str, object] | None:
    """Overrides of the first suggestion of a fix; None where the user must fill in a name."""
    match = re.match(r"((?:[a-z_.0-9]+=(?:'[^']*'|\[[^]]*\]|[^\s,]+) ?)+)", fix)
    assert match, fix
    if re.search(r"\b(DIR|PREFIX|FILE|NAME|PATH)\b", match[1]):
        return None
    overrides = map(OverridesParser.create().parse_override, shlex.split(match[1]))
    return {override.key_or_group: override.value() for override in overrides}


@pytest.mark.parametrize("id", CASES)
def test_fix_passes_its_check_and_fails_no_other(id):
    values = parse(CASES[id])
    faults = run_checks(config_with(values), 8)
    fix = first_fix(next(fault.fix for fault in faults if fault.id == id))
    if fix is not None:
        remaining = failed_ids({**values, **fix})
        assert id not in remaining, fix
        # A fixed illegal value may reveal other faults, but none of the fixed knobs alone.
        new = set(remaining) - {fault.id for fault in faults}
        assert not [id for id in new if set(BY_ID[id].knobs) <= set(fix)], (fix, new)


@pytest.mark.parametrize("text", ["parallel.tp=0", "parallel.zero=7"])
def test_check_is_skipped_for_a_value_that_is_illegal_by_itself(text):
    """tp = 0 would divide by zero in every check of tp."""
    ((key, value),) = parse(text).items()
    assert failed_ids({key: value}) == [key.replace(".", "-")]


@pytest.mark.parametrize(
    ("text", "world", "fix"),
    [
        ("train.gbs=30 train.mbs=2", 8, "train.gbs=16 or 32"),
        ("train.gbs=3", 8, "train.gbs=8"),
        ("parallel.tp=4 parallel.sp=true train.gbs=9", 9, "use 8 or 12 ranks"),
        (
            "parallel.tp=6 model.num_heads=12 model.num_kv_heads=6 model.ffn_hidden_size=180",
            16,
            "parallel.tp=2, or use 12 or 18 ranks",
        ),
        (
            "parallel.tp=8 model.num_heads=4 model.num_kv_heads=2 train.gbs=2",
            16,
            "parallel.tp=4",
        ),
        ("parallel.dp_replicate=5", 8, "parallel.dp_replicate=4"),
        ('optim.schedule="wsd" train.steps=400', 8, "optim.decay_steps=40"),
        (
            "pipeline.layout=[2,1,2] parallel.pp=3 model.num_layers=7",
            12,
            "pipeline.layout=[3,2,2]",
        ),
        (
            "pipeline.layout=[3,3,4] parallel.pp=3 model.num_layers=7 model.num_mtp_layers=2",
            12,
            "pipeline.layout=[3,2,2]",
        ),
        ("parallel.pp=2 parallel.vpp=4 model.num_layers=5", 8, "parallel.vpp=2"),
        ("parallel.pp=4 model.num_layers=3", 4, "parallel.pp=2 parallel.vpp=1"),
        (
            "parallel.pp=6 parallel.tp=2 parallel.cp=2 model.num_layers=5",
            24,
            "parallel.pp=3 parallel.vpp=1",
        ),
    ],
)
def test_fix_is_the_nearest_legal_value(text, world, fix):
    assert fix in [fault.fix for fault in run_checks(config_with(parse(text)), world)]


def test_data_file_with_its_suffix_is_understood(tmp_path):
    (tmp_path / "web.bin").touch()
    faults = run_checks(config_with({"data.train": [f"0.5 {tmp_path}/web.bin"]}), 1)
    (fix,) = [fault.fix for fault in faults if fault.id == "data-train-files"]
    assert fix == f"data.train=[{tmp_path}/web]"


@pytest.mark.parametrize(
    ("id", "text"),
    [
        # whole on every rank without sp
        ("sequence-splits-over-tp", "parallel.tp=4 train.seq_len=126"),
        # no zigzag
        (
            "sequence-splits-over-cp",
            'parallel.cp=4 parallel.cp_method="ulysses" train.seq_len=132',
        ),
        # of one group
        ("top2-needs-two", 'model.num_experts=1 model.top_k=1 model.group_score="top2_sum"'),
        # not sharded: 16 is enough
        ("fp8-dims", 'precision.fp8="blockwise" model.ffn_hidden_size=144'),
        # the search may leave stages empty
        ("stages-have-layers", 'parallel.pp=8 pipeline.schedule="auto" pipeline.balance="auto"'),
        # one KV head on four ranks is replicated
        ("kv-heads-split-over-tp", "parallel.tp=4 model.num_kv_heads=1"),
        # a constant rate has no minimum
        ("min-lr-below-lr", 'optim.lr=1e-5 optim.schedule="constant"'),
        ("data-skip-steps", 'data.skip_steps=["2-5", "9-10", "7-7", "3"]'),
        *(("data-split-numbers", f'data.split="{s}"') for s in ("969,30,1", "1", "0.9, .1")),
    ],
)
def test_check_accepts(id, text):
    """Configurations that are similar to rejected ones."""
    assert id not in failed_ids(parse(text) | {"train.gbs": 8})


@pytest.mark.parametrize(
    ("id", "text"),
    [
        *(("data-split-numbers", f'data.split="{s}"') for s in ("a,b", "1,2,3,4", "-1,2", "0,0")),
        *(("data-split-numbers", f'data.split="{s}"') for s in ("1e2,3", "1,,2")),
        *(("data-skip-steps", f'data.skip_steps=["1", "{s}"]') for s in ("5-2", "10-9", "0")),
        *(("data-skip-steps", f'data.skip_steps=["{s}"]') for s in ("0-3", "-3", "abc")),
    ],
)
def test_only_this_check_rejects(id, text):
    assert failed_ids(parse(text)) == [id]


def test_replicas_are_not_checked_while_dp_is_unknown():
    assert failed_ids({"parallel.tp": 4, "parallel.dp_replicate": 2}, world=6) == ["world-fits"]


INTEGERS = [-2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 16, 128]
FLOATS = [-1.0, 0.0, 1e-5, 0.5, 1.0, 4.0, 1e30]
TEXTS = ["none", "auto", "llama3", "yarn", "wsd", "learned", "bf16", "full", "blockwise", "file:x"]
TEXTS += ["1,2", "0:4 1K:8", "corpus", "best:2", "last", "."]


def random_value(random: Random, key: str) -> object:
    """A value of the key's type, legal or not."""
    kind = str(keys()[key])
    if "None" in kind and random.random() < 0.3:
        return None
    if "list[" in kind:
        pool = INTEGERS if "int" in kind else FLOATS if "float" in kind else TEXTS
        return [random.choice(pool) for _ in range(random.randrange(4))]
    pools = {int: INTEGERS, float: FLOATS, bool: [True, False], str: TEXTS}
    return random.choice(pools[kind_of(key)])


KEYS = [key for key in leaves() if key != "plugins"]  # whose files would be run


def test_no_configuration_of_the_right_types_makes_a_check_raise():
    """Zero sizes, empty lists and odd words, many at once and together with failing values."""
    reached = set()
    for seed in range(900):
        random = Random(seed)
        share = random.choice([0.02, 0.05, 0.3, 1.0])
        values = parse(CASES[random.choice(sorted(CASES))])
        values |= {key: random_value(random, key) for key in KEYS if random.random() < share}
        for fault in run_checks(config_with(values), random.choice([1, 2, 3, 8, 64])):
            assert fault.reason and fault.fix and fault.knobs
            reached.add(fault.id)
    assert len(reached) > 0.9 * len(CHECKS), set(BY_ID) - reached


def test_finished_parts_of_a_resumed_run_are_not_checked(tmp_path):
    """A ramp that is over, and the source of the initial weights.

    A ramp that continues keeps its check with another fix.
    """
    values = parse('train.gbs_ramp=[4,4,8] train.gbs=8 init.from_hf="gone" checkpoint.dir="saved"')
    ids = {"ramp-splits", "init-from-hf-folder"}
    assert ids <= set(failed_ids(values))
    for step, consumed, expected in ((1, 4, {"ramp-splits"}), (2, 12, set())):
        folder = tmp_path / "saved" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        progress = {"step": step, "consumed_samples": consumed}
        (folder / "run.json").write_text(json.dumps({"progress": progress}))
        faults = {fault.id: fault for fault in run_checks(config_with(values), 8)}
        assert faults.keys() & ids == expected
        if expected:
            fix = "fewer data-parallel ranks until 8 samples are consumed (4 are)"
            assert fix in faults["ramp-splits"].fix
    assert ids <= set(failed_ids(values | {"checkpoint.resume": "none"}))
