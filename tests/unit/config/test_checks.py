"""Every check refuses a configuration made to fail it, stays silent on a sound one, and is healed
by its own fix."""

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
BREAKS = (Path(__file__).parent / "refused_by_checks.txt").read_text()
CASES = {line.split(": ")[0]: line.split(": ", 1)[1] for line in BREAKS.splitlines()}
BY_ID = {check.id: check for check in CHECKS}


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch, request):
    """Makes a folder with one dataset, a release and a locked folder the working directory.

    What is installed must not matter, nor that root may write everywhere.
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
    absent = {
        "amp_C",
        *(name for name in ("wandb", "tensorboard") if f"{name}-installed" in request.node.name),
    }
    monkeypatch.setattr(
        "megatron5d.config.checks.training.find_spec",
        lambda name: None if name in absent else object(),
    )


def changed(values: dict[str, object]) -> Config:
    data = to_dict(Config())
    for key, value in {"data.train": ["corpus"], **values}.items():
        *path, last = key.split(".")
        node = data
        for name in path:
            node = node[name]
        assert last in node, key
        node[last] = value
    return from_dict(data)


def parsed(text: str) -> dict[str, object]:
    return {
        key: json.loads(value)
        for key, _, value in (pair.partition("=") for pair in re.split(r" (?=[a-z_.0-9]+=)", text))
    }


def broken_ids(values: dict[str, object], world: int = 8) -> list[str]:
    return [fault.id for fault in run_checks(changed(values), world)]


def test_each_check_has_one_case_and_each_case_a_check():
    assert sorted(CASES) == sorted(check.id for check in CHECKS)
    assert len(BY_ID) == len(CHECKS)


def test_ids_are_kebab_case_and_knobs_are_keys():
    for check in CHECKS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
        assert check.knobs and set(check.knobs) <= set(leaves())
        assert set(check.needs) <= set(BY_ID)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"log.dir": "runs/n", "log.jsonl": "runs/./n"},
            "log.jsonl=runs/./n must be a file .got a folder of log.dir",
        ),
        (
            {"checkpoint.dir": "runs/n/ck", "log.jsonl": "runs/n"},
            "got a folder of checkpoint.dir=runs/n/ck",
        ),
        (
            {"log.profile": "link/p", "log.jsonl": "released/p"},
            "got a folder of log.profile=link/p",
        ),
        ({"log.jsonl": "corpus.bin"}, "would replace a file of the data"),
        (
            {"data.valid_sets": ["web corpus"], "log.jsonl": "corpus.idx"},
            "would replace a file of the data",
        ),
        (
            {"data.tokenizer": "empty.bin", "log.jsonl": "empty.bin"},
            "would replace a file of data.tokenizer",
        ),
        ({"log.dir": "runs", "log.jsonl": "runs/config.yaml"}, "would replace a file of log.dir"),
        (
            {"checkpoint.dir": "runs", "log.jsonl": "runs/latest"},
            "would replace a file of checkpoint.dir",
        ),
        ({"checkpoint.dir": "old/step-00000010"}, "lies in .*old/step-00000010, a checkpoint"),
        (
            {"log.jsonl": "old/step-00000010.left/log.jsonl"},
            "lies in .*old/step-00000010.left, a checkpoint",
        ),
    ],
)
def test_paths_that_are_in_each_others_way(values, told):
    Path("link").symlink_to("released")
    (fault,) = run_checks(changed(values), 1)
    assert fault.id == "paths-apart" and re.search(told, fault.reason), fault
    key, _, path = fault.fix.partition("=")
    assert broken_ids({**values, key: path}, 1) == []
    assert (
        broken_ids({"log.dir": "runs", "checkpoint.dir": "runs", "log.jsonl": "runs/log.jsonl"}, 1)
        == []
    )


@pytest.mark.parametrize(
    "knob", ["checkpoint.dir", "log.dir", "log.jsonl", "log.profile", "data.cache_dir"]
)
def test_a_link_whose_target_is_gone_is_called_so(knob):
    Path("dangling").symlink_to("gone")
    for path in ("dangling", "dangling/inside"):
        (fault,) = run_checks(changed({knob: path}), 1)
        assert re.search(r"dangling, a link whose target gone does not exist", fault.reason), fault
        assert broken_ids({knob: fault.fix.partition("=")[2].removesuffix(", or null")}, 1) == []


def test_a_device_is_neither_replaced_nor_a_folder():
    (fault,) = run_checks(changed({"log.jsonl": "/dev/null"}), 1)
    assert fault.id == "log-jsonl-path" and "neither a file nor a folder" in fault.reason
    assert broken_ids({"checkpoint.dir": "/dev/null/inside"}) == ["checkpoint-dir-path"]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_no_check_refuses_the_defaults(world):
    assert broken_ids({}, world) == []


@pytest.mark.parametrize("id", CASES)
def test_check_refuses_and_names_its_knob(id):
    values = parsed(CASES[id])
    faults = {fault.id: fault for fault in run_checks(changed(values), 8)}
    assert id in faults, f"{values} failed only {sorted(faults)}"
    fault = faults[id]
    written = [knob for knob in BY_ID[id].knobs if knob in values]
    assert any(knob.rpartition(".")[2] in fault.reason for knob in written), fault.reason
    assert re.search(r"[a-z_0-9.]+=\S|use \d", fault.fix), fault.fix


def healing(fix: str) -> dict[str, object] | None:
    """The overrides of the first way out that a fix offers; None where the user must fill in a
    name."""
    first = re.match(r"((?:[a-z_.0-9]+=(?:'[^']*'|\[[^]]*\]|[^\s,]+) ?)+)", fix)
    assert first, fix
    if re.search(r"\b(DIR|PREFIX|FILE|NAME|PATH)\b", first.group(1)):
        return None
    overrides = [
        OverridesParser.create().parse_override(text) for text in shlex.split(first.group(1))
    ]
    return {override.key_or_group: override.value() for override in overrides}


@pytest.mark.parametrize("id", CASES)
def test_fix_passes_its_check_and_fails_no_other(id):
    values = parsed(CASES[id])
    before = run_checks(changed(values), 8)
    fix = healing(next(fault.fix for fault in before if fault.id == id))
    if fix is not None:
        after = broken_ids({**values, **fix})
        assert id not in after, fix
        # Values first: what a single illegal value hid may come to light, but nothing about the
        # fixed knobs themselves.
        new = set(after) - {fault.id for fault in before}
        assert not [id for id in new if set(BY_ID[id].knobs) <= set(fix)], (fix, new)


def test_several_failed_checks_are_told_at_once():
    found = broken_ids(
        {
            "train.gbs": 13,
            "optim.lr": -1.0,
            "model.norm": "rms",
            "parallel.grad_reduce": "per_step",
            "data.train": [],
        }
    )
    assert {
        "gbs-splits",
        "optim-lr",
        "model-norm",
        "reduce-needs-sharded-gradients",
        "data-train-given",
    } <= set(found)


def test_a_check_is_not_run_on_a_value_that_is_illegal_by_itself():
    """tp = 0 would divide by zero in every check of tp."""
    assert broken_ids({"parallel.tp": 0}) == ["parallel-tp"]
    assert broken_ids({"parallel.zero": 7}) == ["parallel-zero"]


@pytest.mark.parametrize(
    ("values", "world", "fix"),
    [
        ({"train.gbs": 30, "train.mbs": 2}, 8, "train.gbs=16 or 32"),
        ({"train.gbs": 3}, 8, "train.gbs=8"),
        ({"parallel.tp": 4, "parallel.sp": True, "train.gbs": 9}, 9, "use 8 or 12 ranks"),
        (
            {
                "parallel.tp": 6,
                "model.num_heads": 12,
                "model.num_kv_heads": 6,
                "model.ffn_hidden_size": 180,
            },
            16,
            "parallel.tp=2, or use 12 or 18 ranks",
        ),
        (
            {"parallel.tp": 8, "model.num_heads": 4, "model.num_kv_heads": 2, "train.gbs": 2},
            16,
            "parallel.tp=4",
        ),
        ({"parallel.dp_replicate": 5}, 8, "parallel.dp_replicate=4"),
        ({"optim.schedule": "wsd", "train.steps": 400}, 8, "optim.decay_steps=40"),
        (
            {"pipeline.layout": [2, 1, 2], "parallel.pp": 3, "model.num_layers": 7},
            12,
            "pipeline.layout=[3,2,2]",
        ),
        (
            {
                "pipeline.layout": [3, 3, 4],
                "parallel.pp": 3,
                "model.num_layers": 7,
                "model.num_mtp_layers": 2,
            },
            12,
            "pipeline.layout=[3,2,2]",
        ),
        ({"parallel.pp": 2, "parallel.vpp": 4, "model.num_layers": 5}, 8, "parallel.vpp=2"),
        ({"parallel.pp": 4, "model.num_layers": 3}, 4, "parallel.pp=2 parallel.vpp=1"),
        (
            {"parallel.pp": 6, "parallel.tp": 2, "parallel.cp": 2, "model.num_layers": 5},
            24,
            "parallel.pp=3 parallel.vpp=1",
        ),
    ],
)
def test_fix_is_the_nearest_legal_value(values, world, fix):
    assert fix in [fault.fix for fault in run_checks(changed(values), world)]


@pytest.mark.parametrize(
    "steps", [["5-2"], ["10-9"], ["1", "300-299"], ["0"], ["0-3"], ["-3"], ["abc"]]
)
def test_steps_that_no_run_passes_over_are_refused(steps):
    assert broken_ids({"data.skip_steps": steps}) == ["data-skip-steps"]
    assert broken_ids({"data.skip_steps": ["2-5", "9-10", "7-7", "3"]}) == []


def test_a_data_file_with_its_ending_is_understood(tmp_path):
    (tmp_path / "web.bin").touch()
    broken = run_checks(changed({"data.train": [f"0.5 {tmp_path}/web.bin"]}), 1)
    (fix,) = [fault.fix for fault in broken if fault.id == "data-train-files"]
    assert fix == f"data.train=[{tmp_path}/web]"


VALID = {
    # whole on every rank without sp
    "sequence-splits-over-tp": {"parallel.tp": 4, "train.seq_len": 126},
    # no zigzag
    "sequence-splits-over-cp": {
        "parallel.cp": 4,
        "parallel.cp_method": "ulysses",
        "train.seq_len": 132,
    },
    # of one group
    "top2-needs-two": {"model.num_experts": 1, "model.top_k": 1, "model.group_score": "top2_sum"},
    # not cut: 16 is enough
    "fp8-dims": {"precision.fp8": "blockwise", "model.ffn_hidden_size": 144},
    "stages-have-layers": {
        "parallel.pp": 8,
        "pipeline.schedule": "auto",
        "pipeline.balance": "auto",
    },  # stages of parts
}


@pytest.mark.parametrize("id", VALID)
def test_what_a_check_does_not_refuse(id):
    """What lies just beside what it does."""
    assert id not in broken_ids(VALID[id] | {"train.gbs": 8})


@pytest.mark.parametrize("implementation", ["torch", "kernel"])
def test_no_implementation_but_ours_rounds_at_random(implementation):
    without = {"precision.master_weights": False, "precision.dtype": "bf16"}
    assert "master-free-updates-itself" in broken_ids(
        {**without, "optim.implementation": implementation}
    )


def test_where_the_ranks_do_not_fit_nobody_asks_for_their_replicas():
    assert broken_ids({"parallel.tp": 4, "parallel.dp_replicate": 2}, world=6) == ["world-fits"]


def test_kv_heads_may_be_fewer_than_tp():
    """One KV head on four ranks is replicated; three on two cannot be shared."""
    assert broken_ids({"parallel.tp": 4, "model.num_kv_heads": 1, "train.gbs": 8}) == []
    assert "kv-heads-split-over-tp" in broken_ids(parsed(CASES["kv-heads-split-over-tp"]))


def test_a_constant_rate_has_no_minimum():
    assert broken_ids({"optim.lr": 1e-5, "optim.schedule": "constant"}) == []


@pytest.mark.parametrize("split", ["969,30,1", "1", "0.9, .1", "99,1,0"])
def test_splits_that_megatron_accepts(split):
    assert broken_ids({"data.split": split}) == []


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "-1,2", "0,0,0", "1e2,3", "1,,2"])
def test_splits_that_are_no_shares(split):
    assert broken_ids({"data.split": split}) == ["data-split-numbers"]


SMALL = [-2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 16, 128]
FLOATS = [-1.0, 0.0, 1e-5, 0.5, 1.0, 4.0, 1e30]
TEXTS = [
    "none",
    "auto",
    "llama3",
    "yarn",
    "wsd",
    "learned",
    "bf16",
    "full",
    "blockwise",
    "file:x",
    "1,2",
    "0:4 1K:8",
    "corpus",
    "best:2",
    "last",
    ".",
]


def anything(random: Random, key: str) -> object:
    """A value of the key's type, legal or not."""
    kind, optional = str(keys()[key]), "None" in str(keys()[key])
    if optional and random.random() < 0.3:
        return None
    if "list[" in kind:
        pool = SMALL if "int" in kind else FLOATS if "float" in kind else TEXTS
        return [random.choice(pool) for _ in range(random.randrange(4))]
    return random.choice({int: SMALL, float: FLOATS, bool: [True, False], str: TEXTS}[kind_of(key)])


def test_no_configuration_of_the_right_types_makes_a_check_stumble():
    """Zero sizes, empty lists and odd words, many at once and beside what fails a check: none ever
    raises."""
    seen = set()
    for seed in range(900):
        random = Random(seed)
        share = random.choice([0.02, 0.05, 0.3, 1.0])
        values = parsed(CASES[random.choice(sorted(CASES))])
        values |= {key: anything(random, key) for key in leaves() if random.random() < share}
        for fault in run_checks(changed(values), random.choice([1, 2, 3, 8, 64])):
            assert fault.reason and fault.fix and fault.knobs
            seen.add(fault.id)
    assert len(seen) > 0.9 * len(CHECKS), set(BY_ID) - seen


def test_what_a_resumed_run_has_behind_it_is_not_judged(tmp_path):
    """A ramp that is over, and where the first weights came from; a ramp under way keeps its check
    with another fix."""
    ramp = {
        "train.gbs_ramp": [4, 4, 8],
        "train.gbs": 8,
        "init.from_hf": "gone",
        "checkpoint.dir": "saved",
    }
    known = {"ramp-splits", "init-from-hf-folder"}
    assert known <= set(broken_ids(ramp))
    for step, consumed, broken in ((1, 4, {"ramp-splits"}), (2, 12, set())):
        folder = tmp_path / "saved" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(
            json.dumps({"progress": {"step": step, "consumed_samples": consumed}})
        )
        faults = {fault.id: fault for fault in run_checks(changed(ramp), 8)}
        assert faults.keys() & known == broken
        if broken:
            assert (
                "fewer data-parallel ranks until 8 samples are consumed (4 are)"
                in faults["ramp-splits"].fix
            )
    assert known <= set(broken_ids(ramp | {"checkpoint.resume": "none"}))
