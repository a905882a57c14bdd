"""Install megatron5d: `pip install -e .` (add `[dev]` for the test-suite and the linters)."""

from setuptools import find_packages, setup

setup(
    name="megatron5d",
    version="0.1.0",
    description="Pretraining of GPT and mixture-of-experts models in five parallel dimensions",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron5d*", "kernels*"]),
    install_requires=[
        "torch>=2.11",
        "numpy",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "sentencepiece",
        "safetensors",
        "isal",
        "wandb",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "gpu": ["triton>=3.6"],
        "data": ["tokenizers", "tiktoken", "zstandard", "pyarrow"],
        "search": ["numba"],
        "dev": [
            "pytest",
            "tensorboard",
            "pytest-timeout",
            "pytest-xdist",
            "transformers",
            "triton",
            "ruff",
            "mypy",
            "hypothesis",
        ],
    },
)
