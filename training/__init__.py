"""Megatron-Core models that are trained; to import any of it is to make Megatron importable without CUDA."""

from cpu.megatron import install

install()
