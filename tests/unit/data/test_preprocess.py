"""Preprocessing end to end: the right tokens, the same bytes after any kill, and clear refusals."""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from preprocessing import ROOT, TEXTS, WORDS, contents, summary_of, tool

from megatron5d.data import preprocess
from megatron5d.data.corpus import kinds_of, list_files, units
from megatron5d.data.documents import Recipe, documents
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.preprocess import Journal
from megatron5d.data.tokenizer import load_tokenizer

pytest.importorskip("sentencepiece")


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_become_their_tokens(tmp_path, tokenizer_file, corpus_file, workers):
    summary = summary_of(
        *("--input", corpus_file, "--tokenizer", tokenizer_file, "--out", tmp_path / "o"),
        *("--append-eod", "--workers", workers),
    )
    tokenizer = load_tokenizer(tokenizer_file)
    data = IndexedDataset(tmp_path / "o")
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS]
    assert [data.document(i).tolist() for i in range(data.num_documents)] == expected
    assert summary["documents"] == len(TEXTS) and summary["tokens"] == sum(map(len, expected))
    assert summary["dtype"] == "uint16" and summary["bad_lines"] == 0
    assert sorted(p.name for p in tmp_path.glob("o*")) == ["o.bin", "o.idx", "o.preprocess.json"]


def test_documents_begin_with_the_begin_of_text_token_where_asked(tmp_path, corpus_file):
    """Which the tokenizer or --bos names; the hash of a job without it is what it was before there
    was one."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {w: i for i, w in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"
        )
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    common = [
        "--input",
        corpus_file,
        "--tokenizer",
        tmp_path / "tokenizer.json",
        "--workers",
        1,
        "--append-eod",
    ]
    found = summary_of(*common, "--prepend-bos", "--out", tmp_path / "o")
    data, tokenizer = IndexedDataset(tmp_path / "o"), load_tokenizer(tmp_path)
    assert (found["bos"], found["eod"], found["eod_token"]) == (9, 10, "</s>")
    assert [data.document(i).tolist() for i in range(9)] == [
        [9, *tokenizer.encode(text), 10] for text in TEXTS[:9]
    ]
    done = tool(
        *common, "--prepend-bos", "--bos", "alpha", "--eod", "beta", "--out", tmp_path / "other"
    )
    assert (
        IndexedDataset(tmp_path / "other").document(0)[0] == 1
        and "end-of-document token: 2 beta" in done.stdout
    )
    assert "token 1 ('alpha') is in every document that spells it" in done.stderr
    job = preprocess.Job((corpus_file,), "o", Recipe(str(tmp_path)))
    assert job.fingerprint(10, 9) == job.fingerprint(10, None)
    begun = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, prepend_bos=True))
    assert len({job.fingerprint(10, 9), begun.fingerprint(10, 9), begun.fingerprint(10, 1)}) == 3
    os.remove(tmp_path / "tokenizer.json")
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    refused = tool(*common, "--prepend-bos", "--out", tmp_path / "none")
    assert (
        refused.returncode == 2 and "no begin-of-text token; name one with --bos" in refused.stderr
    )


def test_a_tokenizer_that_does_not_keep_the_text_is_told(tmp_path, tokenizer_file, corpus_file):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    common = ["--input", corpus_file, "--workers", 1, "--out", tmp_path / "o", "--overwrite"]
    noted = tool(*common, "--tokenizer", tmp_path / "m.model").stderr
    assert "WARNING" in noted and "does not keep line breaks, tabs, runs of spaces: " in noted
    assert "WARNING" not in tool(*common, "--tokenizer", tokenizer_file).stderr


def test_a_second_run_has_nothing_to_do_and_another_job_is_refused(
    tmp_path, tokenizer_file, corpus_file
):
    arguments = [
        "--input",
        corpus_file,
        "--tokenizer",
        tokenizer_file,
        "--out",
        tmp_path / "o",
        "--workers",
        1,
    ]
    assert summary_of(*arguments)["up_to_date"] is False
    before = os.stat(tmp_path / "o.idx").st_mtime_ns
    assert summary_of(*arguments)["up_to_date"] is True
    assert os.stat(tmp_path / "o.idx").st_mtime_ns == before
    refused = tool(*arguments, "--append-eod")
    assert (
        refused.returncode == 2
        and "o.idx is there already" in refused.stderr
        and "--overwrite" in refused.stderr
    )
    assert summary_of(*arguments, "--append-eod", "--overwrite")["up_to_date"] is False


def test_another_share_for_validation_is_another_job(tmp_path, tokenizer_file, corpus_file):
    """Its outputs have other names; the summary has one."""
    arguments = [
        "--input",
        corpus_file,
        "--tokenizer",
        tokenizer_file,
        "--out",
        tmp_path / "o",
        "--workers",
        1,
    ]
    assert summary_of(*arguments, "--valid-fraction", 0.2)["up_to_date"] is False
    refused = tool(*arguments)
    assert refused.returncode == 2 and "o_train.idx is there already" in refused.stderr
    assert summary_of(*arguments, "--valid-fraction", 0.2)["up_to_date"] is True


def test_outputs_among_the_inputs_are_not_taken_for_texts(tmp_path, tokenizer_file, corpus_file):
    arguments = [
        "--input",
        tmp_path,
        "--tokenizer",
        tokenizer_file,
        "--out",
        tmp_path / "o",
        "--workers",
        1,
    ]
    first = summary_of(*arguments)
    (tmp_path / "other.preprocess.partial.json").write_text("{}")
    assert summary_of(*arguments)["up_to_date"] is True and first["files"] == 1


def test_another_end_of_document_is_another_job(tmp_path, corpus_file):
    """It may be said beside the tokenizer's file, which is the same."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "tok"
    folder.mkdir()
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<a>": 0, "<b>": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    model.save(str(folder / "tokenizer.json"))
    job = preprocess.Job((corpus_file,), str(tmp_path / "o"), Recipe(str(folder), append_eod=True))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<a>"}')
    assert preprocess.preprocess(job, workers=1)["eod"] == 0
    assert preprocess.preprocess(job, workers=1)["up_to_date"] is True
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<b>"}')
    with pytest.raises(ValueError, match="is there already, from other inputs or settings"):
        preprocess.preprocess(job, workers=1)


def test_a_result_that_has_lost_its_tokens_is_made_again(tmp_path, tokenizer_file, corpus_file):
    """Its .idx alone would be taken for the result, by a copy that stopped half-way as well."""
    job = preprocess.Job(
        (corpus_file,), str(tmp_path / "o"), Recipe(str(tokenizer_file)), valid_fraction=0.1
    )
    preprocess.preprocess(job, workers=1)
    whole = contents(tmp_path, "o_*")
    (tmp_path / "o_train.bin").unlink()
    assert preprocess.preprocess(job, workers=1)["up_to_date"] is False
    (tmp_path / "o_valid.bin").write_bytes(b"")
    assert preprocess.preprocess(job, workers=1)["up_to_date"] is False
    assert (
        contents(tmp_path, "o_*") == whole
        and preprocess.preprocess(job, workers=1)["up_to_date"] is True
    )


def test_validation_documents_are_held_out(tmp_path, tokenizer_file, corpus_file):
    common = ["--input", corpus_file, "--tokenizer", tokenizer_file, "--workers", 1]
    summary_of(*common, "--out", tmp_path / "all")
    summary = summary_of(*common, "--out", tmp_path / "o", "--valid-fraction", 0.2)
    parts = [IndexedDataset(tmp_path / f"o_{part}") for part in ("train", "valid")]
    train, valid = (
        [part.document(i).tolist() for i in range(part.num_documents)] for part in parts
    )
    whole = IndexedDataset(tmp_path / "all")
    in_order = [whole.document(i).tolist() for i in range(whole.num_documents)]
    assert 50 <= len(valid) <= 110  # 80 expected, 8 the standard deviation
    merged, left = [], list(valid)
    for document in in_order:  # each part keeps the corpus's order
        if (
            left
            and document == left[0]
            and (len(merged) >= len(train) or document != train[len(merged)])
        ):
            left.pop(0)
        else:
            merged.append(document)
    assert merged == train and not left
    assert summary["documents"] == len(TEXTS)


@pytest.mark.parametrize("text_per", ["line", "file"])
@pytest.mark.parametrize(
    ("documents", "fraction"), [(201, 0.01), (201, 0.05), (2, 0.5), (30, 0.001), (40, 0.99)]
)
def test_few_documents_are_held_out_in_the_share_asked_for(
    tmp_path, tokenizer_file, documents, fraction, text_per
):
    """And at least one of two; whatever their numbers alone would draw, and when a run is killed
    drawing anew."""
    (tmp_path / "c").mkdir()
    for name in range(documents if text_per == "file" else 1):
        (tmp_path / "c" / f"{name}.txt").write_text(
            "alpha\n" * (1 if text_per == "file" else documents)
        )
    files = tuple(sorted((tmp_path / "c").iterdir()))
    job = preprocess.Job(
        files, str(tmp_path / "o"), Recipe(str(tokenizer_file)), text_per, fraction
    )
    wanted = min(max(1, round(documents * fraction)), documents - 1)
    with suppress(ZeroDivisionError):
        preprocess.preprocess(
            job, 1, preprocess.Reporting(lambda _, progress: 1 / (progress.draw is None))
        )
    counts = [output["documents"] for output in preprocess.preprocess(job, 1)["outputs"].values()]
    assert sum(counts) == documents and abs(counts[1] - wanted) <= 0.2 * wanted


def test_bad_lines_stop_the_run_or_are_counted(tmp_path, tokenizer_file, corpus_file):
    lines = corpus_file.read_text().splitlines()
    lines[250] = '{"text": 7}'
    lines[300] = "nonsense"
    corpus_file.write_text("\n".join(lines))
    arguments = ["--input", corpus_file, "--tokenizer", tokenizer_file, "--out", tmp_path / "o"]
    refused = tool(*arguments)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{corpus_file}:251: field 'text' is a int, not a string" in refused.stderr
    assert not (tmp_path / "o.idx").exists()
    counted = summary_of(*arguments, "--skip-bad")  # the refused run continues
    assert (counted["bad_lines"], counted["documents"]) == (2, 398)


def test_a_job_of_which_an_output_is_gone_is_not_finished(tmp_path):
    outputs = [str(tmp_path / name) for name in ("train", "valid")]
    journal = Journal(str(tmp_path / "o"), "this job", outputs)
    for output in outputs:
        Path(f"{output}.idx").touch()
        Path(f"{output}.bin").write_bytes(bytes(6))
    journal.close({"dtype": "uint16", "outputs": {output: {"tokens": 3} for output in outputs}})
    assert journal.finished()
    Path(f"{outputs[1]}.idx").unlink()
    with pytest.raises(ValueError, match=r"train\.idx is there already"):
        journal.finished()


def test_a_damaged_journal_is_named(tmp_path):
    journal = Journal(str(tmp_path / "o"), "", [str(tmp_path / "o")])
    journal.path.write_text("")  # as a loss of power leaves a file that was never put on disk
    with pytest.raises(ValueError, match=r"o.preprocess.partial.json is damaged .*--overwrite"):
        journal.resume()


def test_empty_documents_are_counted_and_not_written(tmp_path, tokenizer_file):
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "alpha"}\n{"text": ""}\n')
    common = ["--tokenizer", tokenizer_file, "--append-eod", "--workers", 1]
    summary = summary_of("--input", tmp_path / "c.jsonl", "--out", tmp_path / "o", *common)
    assert (summary["documents"], summary["empty"]) == (1, 2)
    assert IndexedDataset(tmp_path / "o").num_documents == 1


def test_each_key_is_a_dataset_of_its_own(tmp_path, tokenizer_file):
    (tmp_path / "c.jsonl").write_text(
        '{"q": "alpha", "a": "beta gamma"}\n{"q": "", "a": "delta"}\n'
    )
    common = ["--tokenizer", tokenizer_file, "--json-keys", "q", "a", "--workers", 1]
    summary_of("--input", tmp_path / "c.jsonl", "--out", tmp_path / "o", *common)
    tokenizer = load_tokenizer(tokenizer_file)
    for key, texts in {"q": ["alpha"], "a": ["beta gamma", "delta"]}.items():
        data = IndexedDataset(tmp_path / f"o_{key}")
        assert [data.document(i).tolist() for i in range(data.num_documents)] == [
            tokenizer.encode(t) for t in texts
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--input": "/nowhere"}, "/nowhere: no such file or folder"),
        ({"--tokenizer": "/nowhere.model"}, "/nowhere.model: no such tokenizer file"),
        ({"--valid-fraction": "1.5"}, "--valid-fraction requires 0 <= fraction < 1 (got 1.5)"),
        ({"--workers": "0"}, "--workers: 0 is below 1"),
        ({"--eod": "<nope>"}, "'<nope>' is not in the vocabulary"),
        ({"--out": "somewhere/"}, "--out: somewhere/ does not end in a file name"),
        ({"--json-keys": "text", "text": "text"}, "--json-keys text text text"),
    ],
)
def test_wrong_arguments_are_refused_with_code_2(
    tmp_path, tokenizer_file, corpus_file, change, message
):
    settings = {
        "--input": corpus_file,
        "--tokenizer": tokenizer_file,
        "--out": tmp_path / "o",
        **change,
    }
    refused = tool(*(part for pair in settings.items() for part in pair))
    assert (
        refused.returncode == 2 and message in refused.stderr and "Traceback" not in refused.stderr
    )
    assert not list(tmp_path.glob("o*"))


def test_a_folder_of_sources(tmp_path, tokenizer_file):
    folder = ROOT / "megatron5d" / "data"
    summary = summary_of(
        *("--input", folder, "--glob", "*.py", "--exclude", "loader.py", "__pycache__"),
        *("--tokenizer", tokenizer_file, "--out", tmp_path / "o", "--workers", 2),
    )
    sources = [p for p in sorted(folder.glob("*.py")) if p.name != "loader.py" and p.stat().st_size]
    tokenizer, data = load_tokenizer(tokenizer_file), IndexedDataset(tmp_path / "o")
    assert summary["files"] >= data.num_documents == len(sources)
    assert [tokenizer.decode(data.document(i).tolist()) for i in range(len(sources))] == [
        p.read_text() for p in sources
    ]


def read_all(path, keys):
    files = list_files([str(path)])
    return [
        document
        for unit in units(files, kinds=kinds_of(files, keys=keys))
        for document in documents(unit, keys)
    ]


RECORDS = [
    {"text": "a", "metadata": {"text": "b", "inner": {"text": "c"}, "x.y": "d"}},
    {"text": "e", "metadata": {"text": "f", "inner": {"text": "g"}, "x.y": "h"}},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_key_with_dots_names_a_field_within_another(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    records = [{**record, "a.b": record["text"] * 2} for record in RECORDS]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    keys = ["metadata.inner.text", "text", "metadata.text", "metadata.x.y", "a.b"]
    assert read_all(path, keys) == [("c", "a", "b", "d", "aa"), ("g", "e", "f", "h", "ee")]
    for missing in ("metadata.title", "text.text", "metadata.inner.text.x", "metadata."):
        if kind == "parquet":
            with pytest.raises(ValueError, match=f"no column '{missing}'"):
                read_all(path, [missing])
        else:
            assert f"no field '{missing}'" in str(read_all(path, [missing])[0])


def test_integers_of_any_length_stand_in_other_fields(tmp_path):
    """Python converts at most 4,300 digits by itself."""
    path, digits = tmp_path / "a.jsonl", "1" * 5000
    path.write_text(
        f'{{"text": "a", "n": {digits}}}\n{{"text": "b", "m": {{"n": [-{digits}]}}}}\n'
        f'{{"text": {digits}}}\n'
    )
    a, b, bad = read_all(path, ["text"])
    assert (a, b) == (("a",), ("b",))
    assert "not a string" in str(bad) and "set_int_max_str_digits" not in str(bad)
