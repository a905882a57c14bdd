"""Tests on the fake CUDA runtime need torch for CUDA, no real GPU, and a compiler."""

import shutil

import torch

if torch.version.cuda is None or torch.cuda.is_available() or shutil.which("g++") is None:
    collect_ignore = ["test_fake_cuda.py"]
