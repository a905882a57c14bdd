"""`--help WORD` and shell completion, generated from the schema; options of habit in tools."""

import subprocess

import pytest

from megatron5d.config.command_line import OptionParser, answer, parse_arguments

COMPLETE = """
compopt() {{ :; }}
{script}
COMP_WORDS=({words}); COMP_CWORD=$(({count} - 1)); _megatron5d; echo "${{COMPREPLY[*]}}"
"""


def text_of(*words):
    text = answer(parse_arguments(words))
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("optim.lr", ["optim.lr"]),
        ("tp", ["parallel.tp"]),
        ("warmup", ["optim.lr", "optim.warmup_steps"]),
        ("--micro-batch-size", ["--micro-batch-size", "train.mbs"]),
        ("--hidden-dropout", ["--hidden-dropout"]),
    ],
)
def test_help_on_a_word_lists_its_keys(topic, keys):
    lines = text_of(f"--help={topic}")
    assert [line.split(":")[0] for line in lines.splitlines() if line[0] != " "] == keys


def test_help_on_a_group_and_on_nothing():
    assert text_of("--help", "optim").startswith("optim:\n    # The optimizer")
    assert "no key's description has the word qqqqq" in text_of("--help", "qqqqq")
    assert text_of("--help", "model=nonsense").startswith("pretrain.py [flags]")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python pretrain.py parallel.grad_", "parallel.grad_reduce="),
        ("python pretrain.py model.activation = ge", "geglu_tanh gelu gelu_tanh"),
        ("python pretrain.py optim.name =", "adamw muon"),
        ("bash launch/local.sh 8 experiment = quicks", "quickstart"),
        ("python other.py parallel.grad_", ""),
    ],
)
def test_bash_completes(words, expected):
    script = text_of("--completion", "bash")
    program = COMPLETE.format(script=script, words=words, count=len(words.split()))
    run = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, expected, "")


def test_required_options_may_be_words(capsys):
    parser = OptionParser()
    command = parser.add_subparsers(dest="command").add_parser("to-hf")
    command.add_argument("--checkpoint", required=True)
    command.add_argument("--out", required=True)
    command.add_argument("--dtype", choices=["bf16", "fp32"])
    for words in ("to-hf A B", "to-hf A -o B", "to-hf --out B A", "to-hf --checkpoint A B"):
        parsed = parser.parse_args(words.split())
        assert (parsed.checkpoint, parsed.out) == ("A", "B")
    for words, message in (
        ("to-hf A", "required: -o/--out"),
        ("to-hf A B --dtpye bf16", "did you mean --dtype?"),
        ("to-hf A B --dtype bf1", "did you mean bf16?"),
        ("to-fh A B", "did you mean to-hf?"),
    ):
        with pytest.raises(SystemExit) as end:
            parser.parse_args(words.split())
        assert end.value.code == 2 and message in capsys.readouterr().err
