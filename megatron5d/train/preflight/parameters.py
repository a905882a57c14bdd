"""Names of parameters, and the globs of a configuration that match none of them."""

import fnmatch
from dataclasses import replace

from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config, OptimConfig, ParallelConfig
from megatron5d.model.gpt import GPT
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of, without_memory


def parameter_names(config: Config) -> list[str]:
    """Global names of a model's weights, which do not depend on the layout."""
    config = replace(config, parallel=ParallelConfig())
    with without_memory():
        model = GPT(config, build_mesh(resolve(1)), "meta")
        return [spec_of(weight).name for weight in model.weights()]


def glob_faults(config: Config, world: int) -> list[Fault]:
    """Globs that match no parameter of the model, or that freeze all of them."""
    optim = config.optim
    keys = ["decay_exclude", "freeze", "lr_scale", "decay_scale"]
    if optim.name == "muon" and optim.muon_exclude != OptimConfig().muon_exclude:
        keys.append("muon_exclude")
    if not any(getattr(optim, key) for key in keys):
        return []
    names, faults = parameter_names(config), []
    examples = f"{names[0]}, {names[len(names) // 2]}"
    for key in keys:
        entries = getattr(optim, key)
        # An entry of a scale has a factor before its glob.
        matching = [
            entry for entry in entries if fnmatch.filter(names, entry.split(maxsplit=1)[-1])
        ]
        if wrong := [entry for entry in entries if entry not in matching]:
            reason = f"optim.{key}: {' and '.join(wrong)} matches no parameter (such as {examples})"
            fix = ",".join(f"'{entry}'" for entry in matching)
            fix = f'"optim.{key}=[{fix}]"'
            faults.append(Fault("optim-globs-match", (f"optim.{key}",), reason, fix, False))
    if all(any(fnmatch.fnmatch(name, glob) for glob in optim.freeze) for name in names):
        reason = f"optim.freeze = {optim.freeze} freezes every parameter"
        fix = "optim.freeze=[]"
        faults.append(Fault("optim-freeze-some", ("optim.freeze",), reason, fix, False))
    return faults
