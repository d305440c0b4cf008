"""Short stand-ins that treat turns as published chat templates do (the files of chat_templates)."""

from pathlib import Path

FILES = Path(__file__).parent / "chat_templates"
CODER = (FILES / "coder.jinja").read_text()
GEMMA = (FILES / "gemma.jinja").read_text()
LLAMA3 = (FILES / "llama3.jinja").read_text()
MISTRAL = (FILES / "mistral.jinja").read_text()
QWEN25 = (FILES / "qwen25.jinja").read_text()
QWEN3 = (FILES / "qwen3.jinja").read_text()
