"""Who asks for routers that learn and gives them nothing to learn from is told."""

import pytest

from megatron5d.config.schema import Config, ModelConfig, MoeConfig
from megatron5d.train.preflight.warnings import idle_routers


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
    notes = idle_routers(Config(model=ModelConfig(num_experts=4), moe=MoeConfig(**moe)))
    assert len(notes) == len(told) and all(each in note for each, note in zip(told, notes))
    assert idle_routers(Config(moe=MoeConfig(**moe))) == []


@pytest.mark.parametrize(("top_k", "divided", "told"), [(1, True, 1), (1, False, 0), (2, True, 0)])
def test_a_single_choice_divided_by_itself_is_told(top_k, divided, told):
    model = ModelConfig(num_experts=4, top_k=top_k, norm_topk_prob=divided)
    assert sum("norm_topk_prob" in note for note in idle_routers(Config(model=model))) == told
