"""megatron5d: pretraining of GPT and mixture-of-experts models in five parallel dimensions."""

__version__ = "0.1.0"
