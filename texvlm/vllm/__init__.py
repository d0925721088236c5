"""Qwen3-VL and Qwen3.5 in vLLM with a budget of groups: the choice is made before the vision tower, and vLLM stays as it is.

    vllm serve Qwen/Qwen3-VL-2B-Instruct --mm-processor-kwargs '{"texvlm_keep": 273}'

    llm = vllm.LLM("Qwen/Qwen3-VL-2B-Instruct", mm_processor_kwargs={"texvlm_keep": 273})
    llm.generate({"prompt": ..., "multi_modal_data": {"image": picture}, "mm_processor_kwargs": {"texvlm_keep": 64}})

Where texvlm is installed beside vLLM, vLLM finds it by its entry point (`vllm.general_plugins`). It takes the place of the architectures
in `ARCHITECTURES` under their own names, so that all that vLLM knows them by holds (Qwen3.5 is set up by its name); without a budget they
do what vLLM's own do. `VLLM_PLUGINS`, vLLM's list of the plugins to load, can leave it out. What can be said in `mm_processor_kwargs`:

    texvlm_keep       server, request: groups of 32 x 32 pixels (tokens) that each picture, and each frame of a video, keeps: a number from
                      1, "auto" (`texvlm.qwen.auto_budget`), or None: all that the server allows. A request whose pictures are no videos
                      may bring a list, one for each.
    texvlm_path       server, request: what chooses: a path of `select` that keeps tokens of one level ("learned" if not said), or
                      "uniform". The server may also name an object of its own, "package.module:name": an `Allocator`, a
                      `CascadeConfig`, a function as `QwenVLAdapter` takes it.
    texvlm_query      server, request: what is asked for, for what takes it (`texvlm_path="query"`): a text, a vector as a list of
                      numbers, or None; of a request, also a list of texts, one for each picture. vLLM's processors do not see the prompt.
    texvlm_max        server: the most that a request may keep, `texvlm_keep` if not said; what is asked beyond is cut to it.
    texvlm_embedding  server: what reads queries: "digits", or "package.module:name" of an `Embedding` or what it takes.

A request says its own in `mm_processor_kwargs` too; vLLM's server takes that from clients it trusts (`--trust-request-mm-kwargs`).
Refused by name: `video_pruning_rate` and `mm_encoder_tp_mode="data"` together with a budget, and tokens of several levels. Encoder CUDA
graphs (`cudagraph_mm_encoder`, off unless asked for) are not used where the plugin is. Run with vLLM 0.32 on a CPU, and no other so far.
"""

from __future__ import annotations

__all__ = ["ARCHITECTURES", "register"]

ARCHITECTURES = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""What `register` takes the place of."""

OLDEST = (0, 32)


def register() -> None:
    """Takes the place of vLLM's own `ARCHITECTURES`; vLLM calls it in each of its processes, by the entry point.

    Nothing but names is registered: models, and what they import, come when vLLM looks for one of them. Called twice, it does the same.

    Raises:
        ImportError: no vLLM, or one older than 0.32 (vLLM then logs it, and goes on with its own).

    Example:
        >>> import texvlm.vllm
        >>> "Qwen3VLForConditionalGeneration" in texvlm.vllm.ARCHITECTURES
        True
    """
    try:
        import vllm
    except ImportError:
        raise ImportError("texvlm.vllm needs vllm >= 0.32, got none") from None
    numbers = tuple(int(part) if part.isdigit() else 0 for part in vllm.__version__.split(".")[:2])
    if numbers < OLDEST:
        raise ImportError(f"texvlm.vllm needs vllm >= 0.32, got {vllm.__version__}")
    there = vllm.ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name in there:
            vllm.ModelRegistry.register_model(name, f"texvlm.vllm.models:{name}")
