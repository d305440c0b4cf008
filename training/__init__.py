"""Trainers of Megatron-Core models. Importing the package makes Megatron importable without CUDA."""

from cpu.megatron import install

install()
