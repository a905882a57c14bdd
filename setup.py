"""Installs megatron5d; pyproject.toml says what and with which packages."""

from setuptools import setup

setup()
