"""A Megatron-Core model that is trained. With this, megatron.core can be imported without CUDA."""

from cpu.megatron import install

install()
