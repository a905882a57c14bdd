"""Completion of pretrain.py's keys and options in bash and zsh, generated from the schema."""

from collections.abc import Mapping, Sequence

from megatron5d.config.convert import described, kind_of, leaves

SHELLS = ("bash", "zsh")
# Bash splits words at `=`, so a value stands two words behind its key.
_BASH = """\
_megatron5d() {{
    local words=" ${{COMP_WORDS[*]}} " word=${{COMP_WORDS[COMP_CWORD]}}
    local before=${{COMP_WORDS[COMP_CWORD-1]}} key=
    [[ $words == *pretrain* || $words == *local.sh* || $words == *slurm.sbatch* ]] || return 0
    [[ $word == = ]] && key=$before word=
    [[ $before == = ]] && key=${{COMP_WORDS[COMP_CWORD-2]}}
    case $key in
{values}
    "")
        compopt -o nospace
        COMPREPLY=($(compgen -S = -W '{names}' -- "$word")) ;;
    esac
}}
complete -o default -o bashdefault -F _megatron5d pretrain.py megatron5d-pretrain \\
    python python3 bash torchrun sbatch
"""


def completion_script(shell: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Script that a shell evaluates to complete keys, groups and their values.

    Args:
        shell: one of `SHELLS`.
        groups: options of each group.
    """
    values = dict(groups)
    for key in leaves():
        if kind_of(key) is bool:
            values[key] = ["true", "false"]
        elif choices := described(key).choices:
            values[key] = [str(choice) for choice in choices]
    lines = [
        f"    {key}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$word\")) ;;"
        for key, words in values.items()
    ]
    script = _BASH.format(values="\n".join(lines), names=" ".join([*groups, *leaves()]))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"
