"""Says in one line that transformers is missing or too old, before anything of it is imported."""

from texvlm.qwen.families import transformers_version

transformers_version()
