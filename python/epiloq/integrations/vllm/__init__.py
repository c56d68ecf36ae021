"""epiloq in vLLM (0.26): its kernels for ordinary checkpoints, and checkpoints of epiloq's own format.

vLLM calls `register` by itself in every process, through the entry point ``vllm.general_plugins`` of the installed
package. docs/guide/engines.md shows how to use and to restrict it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register ``quantization="epiloq"``, and epiloq's kernels before vLLM's own for the layers that are chosen.

    On a CPU the linear kernels come after vLLM's own, for what those do not run. With ``VLLM_BATCH_INVARIANT``
    epiloq's sums are batch-invariant, too, in this process. It may be called any number of times.

    Raises ValueError for an ``EPILOQ_ENGINE_LAYERS`` that names no kinds of layers.
    """
    import vllm.envs as envs

    import epiloq
    from epiloq import _core
    from epiloq.integrations.engines.choice import VARIABLE, chosen_layers
    from epiloq.integrations.vllm import checkpoint, experts, kernels

    chosen_layers()
    # vLLM keeps compiled graphs on disk under a digest of these variables. Without this entry, a graph compiled with
    # epiloq's kernels would be loaded for weights that are packed for other kernels, and the reverse.
    envs.environment_variables[VARIABLE] = lambda: (epiloq.__version__, _core.source_hash(), *chosen_layers())
    if envs.VLLM_BATCH_INVARIANT:
        epiloq.set_batch_invariant()
    kernels.register()
    experts.register()
    checkpoint.register()
