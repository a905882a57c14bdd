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
    """Returns the global names of a model's weights, which do not depend on the layout."""
    whole = replace(config, parallel=ParallelConfig())
    with without_memory():
        return [
            spec_of(tensor).name for tensor in GPT(whole, build_mesh(resolve(1)), "meta").weights()
        ]


def glob_faults(config: Config, world: int) -> list[Fault]:
    """Globs of parameter names that match none of the model's: they would mean nothing; or that
    freeze all of them."""
    optim, default = config.optim, OptimConfig()
    asked = {
        key: getattr(optim, key) for key in ("decay_exclude", "freeze", "lr_scale", "decay_scale")
    }
    if optim.name == "muon" and optim.muon_exclude != default.muon_exclude:
        asked["muon_exclude"] = optim.muon_exclude
    if not any(asked.values()):
        return []
    names, found = parameter_names(config), []
    for key, entries in asked.items():  # of scales, each with a factor before the glob
        if lost := [
            entry for entry in entries if not fnmatch.filter(names, entry.split(maxsplit=1)[-1])
        ]:
            kept = ",".join(f"'{entry}'" for entry in entries if entry not in lost)
            reason = f"optim.{key}: {' and '.join(lost)} matches no parameter; there are for example {names[0]}, "
            shown = names[len(names) // 2]
            found.append(
                Fault(
                    "optim-globs-match",
                    (f"optim.{key}",),
                    f"{reason}{shown}",
                    f'"optim.{key}=[{kept}]"',
                    False,
                )
            )
    if all(any(fnmatch.fnmatch(name, glob) for glob in optim.freeze) for name in names):
        reason = (
            f"optim.freeze = {optim.freeze} freezes every parameter, and nothing is left to train"
        )
        found.append(
            Fault("optim-freeze-some", ("optim.freeze",), reason, "optim.freeze=[]", False)
        )
    return found
