"""Who asks for balanced experts and gives no strength is told."""

import pytest

from megatron5d.config.schema import Config, ModelConfig, MoeConfig
from megatron5d.train.build import idle_balancing


@pytest.mark.parametrize(
    ("moe", "told"),
    [
        ({"balance": ["none"]}, []),
        ({"balance": ["seq_aux"], "aux_coef": 1e-3}, []),
        ({"balance": ["aux", "bias"], "bias_rate": 1e-3}, ["moe.aux_coef = 0"]),
        ({"balance": ["global_aux", "bias"]}, ["moe.aux_coef = 0", "moe.bias_rate = 0"]),
    ],
)
def test_what_does_nothing_is_told(moe, told):
    notes = idle_balancing(Config(model=ModelConfig(num_experts=4), moe=MoeConfig(**moe)))
    assert len(notes) == len(told) and all(each in note for each, note in zip(told, notes))
    assert idle_balancing(Config(moe=MoeConfig(**moe))) == []
