"""megatron5d: pretraining of GPT and mixture-of-experts models in five parallel dimensions."""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"


def _check_kernels() -> None:
    """Hugging Face publishes another package called `kernels`; whichever Python finds first would be imported."""
    found = find_spec("kernels")
    ours = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != ours:
        where = "nothing" if found is None else found.origin or list(found.submodule_search_locations or [])
        raise ImportError(
            f"`import kernels` finds {where}, not {ours}: run from the checkout or install it with `pip install -e .`, "
            f"and put it before (or uninstall) any other package called kernels"
        )


_check_kernels()
