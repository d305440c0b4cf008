"""Megatron-Core models that are trained. Importing anything of it makes Megatron importable where there is no CUDA."""

from cpu.megatron import install

install()
