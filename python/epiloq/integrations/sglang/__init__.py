"""epiloq in SGLang (0.5.23): checkpoints of epiloq's own format, and its products in int8 and FP8 layers.

SGLang calls `register` by itself in every process, through the entry point ``sglang.srt.plugins`` of the installed
package. docs/guide/engines.md shows how to use and to restrict it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register ``quantization="epiloq"``, and hooks that hand the chosen layers' products to epiloq.

    It may be called any number of times; hooks take effect with ``HookRegistry.apply_hooks``, which SGLang calls.

    Raises ValueError for an ``EPILOQ_ENGINE_LAYERS`` that names no kinds of layers.
    """
    from epiloq.integrations.engines.choice import chosen_layers
    from epiloq.integrations.sglang import checkpoint, products

    chosen_layers()
    checkpoint.register()
    products.register()
