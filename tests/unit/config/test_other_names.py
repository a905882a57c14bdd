"""Names of other code bases: the table is sound, complete, and never suggests a wrong key."""

from pathlib import Path

import pytest
from unit.config import other_names_tables

from megatron5d.config.convert import described, kind_of, leaves
from megatron5d.config.errors import ConfigError
from megatron5d.config.load import load_config
from megatron5d.config.other_names import advice, find_name, table

HERE = Path(__file__).parent
MEGATRON = [
    flag
    for line in (HERE / "megatron_flags.txt").read_text().splitlines()
    if line.startswith("--")
    for flag in line.split()
]


def fault(*argv):
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    (only,) = error.value.faults
    return only


def values_of(row):
    """Our keys and the values that a row gives them; None where it is the user's."""
    key, colon, pairs = row.ours.partition(": ")
    if colon:
        yield from ((key, pair.rsplit("=", 1)[1]) for pair in pairs.split())
    words = [*(() if colon else row.ours.split()), *row.default.partition(" if ")[0].split()]
    for word in words if "=" in row.default or row.kind == "key" else ():
        key, _, value = word.partition("=")
        if "." in key and not key[0].isdigit():
            yield key, None if value in ("", "?", "[*]") else value


def is_legal(key, text):
    kind, choices = kind_of(key), described(key).choices
    if kind is bool:
        return text in ("true", "false")
    if kind in (int, float):
        return text == "null" or kind(text) is not None
    items = text.strip("[]").split(",") if kind is list else [text]
    return not choices or set(items) <= set(map(str, choices)) | {"null"}


def test_keys_exist_and_their_values_are_legal():
    rows = [(row.names[0], *pair) for row in table() for pair in values_of(row)]
    wrong = [
        (name, key, value)
        for name, key, value in rows
        if key not in leaves() or (value is not None and not is_legal(key, value))
    ]
    assert len(rows) > 400 and not wrong


def test_every_row_has_an_answer():
    for row in table():
        assert row.names and (row.kind == "key" or row.note), row


def test_almost_all_flags_of_a_gpt_run_have_an_answer():
    unknown = [flag for flag in MEGATRON if find_name(flag, "megatron") is None]
    assert len(MEGATRON) > 600 and len(unknown) <= 0.05 * len(MEGATRON), unknown


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--recompute-num-layers 2", "recompute.num_layers=2"),
        ("--eval-interval 5", "train.eval_every=5"),
        ("--rotary-base 500000", "model.rope_theta=500000"),
        ("--normalization RMSNorm", "model.norm=rmsnorm"),
        ("--position-embedding-type rope", "model.position=rope"),
        ("--recompute-activations", "recompute.mode=selective recompute.parts=[attention]"),
        ("--recompute-method block", "recompute.num_layers=... recompute.group_layers=..."),
        ("--reset-position-ids", "data.document_mask=..."),
        ("--reset-attention-mask", "data.document_mask=true"),
        ("--attention-softmax-in-fp32", "leave it out"),
        ("--attention-backend fused", "kernels.attention=auto"),
        ("--group-query-attention", "model.num_kv_heads=..."),
        ("--vocab-file vocab.json", "data.tokenizer=..."),
        ("--lr-decay-iters 300", "train.steps=..."),
        ("--overlap-grad-reduce", "leave it out"),
        ("--ckpt-format torch_dist", "leave it out"),
        ("--fp8-format hybrid", "precision.fp8=tensorwise"),
        ("--bf16", "precision.dtype=bf16"),
        ("--swiglu", "model.activation=swiglu"),
        ("--adam-beta1 0.9", "optim.betas=..."),
        ("--use-distributed-optimizer", "parallel.zero=1"),
        ("--num-layers-per-virtual-pipeline-stage 2", "parallel.vpp=..."),
        ("--moe-router-topk 8", "model.top_k=8"),
        ("--untie-embeddings-and-output-weights", "model.tie_embeddings=false"),
        ("--disable-bias-linear", "model.mlp_bias=false"),
        ("--lr-warmup-fraction 0.01", "optim.warmup_steps=..."),
        ("--use-flash-attn", "leave it out"),
        ("--moe-token-dispatcher-type alltoall", "leave it out"),
        ("--overlap-param-gather", "leave it out"),
        ("--exit-duration-in-mins 230", "not here; SLURM's time limit"),
        ("--attention-dropout 0.1", "not here; there is no dropout"),
        ("--hidden-dropout 0.0", "leave it out: there is no dropout"),
        ("--fp16", "not here; precision.dtype=bf16 needs no loss scaling"),
        ("--data-path 0.5 /d/a 0.5 /d/b", "data.train=..."),
        ("--tensor-model-parallel-size=8", "parallel.tp=8"),
        ("--parallelism.tensor_parallel_degree 8", "parallel.tp=8"),
        ("--training.local_batch_size 2", "train.mbs=2"),
        ("--mtp-num-layers 1", "model.num_mtp_layers=1"),
        ("tokens.train_steps=5", "did you mean train.steps?"),
        ("parallelism.pp_engine=1f1b", "did you mean pipeline.schedule?"),
        ("num_hidden_layers=5", "did you mean model.num_layers?"),
        ("torch_dtype=bfloat16", "did you mean precision.dtype?"),
        ("bf16=true", "did you mean precision.dtype=bf16?"),
        ("untie_embeddings_and_output_weights=true", "did you mean model.tie_embeddings=false?"),
        ("model.attention_dropout=0.1", "there is no dropout"),
    ],
)
def test_names_of_other_code_bases_get_their_key_and_value(words, fix):
    assert fix in fault(*words.split()).fix


@pytest.mark.parametrize(
    "word",
    [
        "--foo-bar",
        "--attention-mask-type",
        "--no-such-layers",
        "--moe-router-color",
        "--optimizer-state-dtype",
        "--lr-of-embeddings",
        "--norm-position",
        "--context-size",
        "--use-attention",
        "--model-type-id",
        "--activation-bits",
        "--save-precision",
        "--weights-only",
        "--head-count",
        "--window-length",
        "--tensor-layout",
    ],
)
def test_no_key_is_suggested_for_a_flag_that_nobody_has(word):
    assert advice(word) is None
    text = fault(word).fix
    assert "the flags are --help" in text and "=..." not in text


@pytest.mark.parametrize("name", other_names_tables.PAGES)
def test_the_pages_have_the_table(name):
    written = (other_names_tables.DOCS / name).read_text()
    assert written == other_names_tables.page(name), (
        "run python tests/unit/config/other_names_tables.py"
    )
