"""Qwen models with eyes (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, dense or MoE) that pay for the places which matter.

    adapter = texvlm.qwen.QwenVLAdapter(model, selector="learned", k=273)
    batch = adapter.prepare(processor(text=..., images=..., return_tensors="pt"))
    adapter.generate(batch, max_new_tokens=64)

Needs transformers >= 5.9: pip install 'texvlm[qwen]'.
"""

from texvlm.qwen import _needs as _needs  # isort: skip  # first: it says in one line what is missing
from texvlm.qwen.adapter import QwenVLAdapter
from texvlm.qwen.batch import PreparedBatch
from texvlm.qwen.coarse import CoarseAttention
from texvlm.qwen.families import FAMILIES
from texvlm.qwen.selectors import Choice, auto_budget
from texvlm.qwen.tiny import tiny_batch, tiny_families, tiny_model

__all__ = [
    "FAMILIES",
    "Choice",
    "CoarseAttention",
    "PreparedBatch",
    "QwenVLAdapter",
    "auto_budget",
    "tiny_batch",
    "tiny_families",
    "tiny_model",
]
