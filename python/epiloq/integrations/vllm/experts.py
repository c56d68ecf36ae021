"""Mixtures of experts in vLLM on epiloq's grouped products: compressed-tensors, GPTQ, AWQ, FP8 and GPT-OSS checkpoints.

vLLM's own method creates and loads the weights. After loading they become an ``epiloq.nn.GatedExperts`` (GPT-OSS:
`Fp4Experts`), and the original tensors are released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up

from epiloq.integrations.engines.experts import Sizes, routed_to_part
from epiloq.integrations.vllm.device import supported
from epiloq.integrations.vllm.expert_offers import GATES, OFFERS, Offer
from epiloq.nn.experts.fp4_experts import Fp4Experts
from epiloq.nn.experts.gated_experts import GatedExperts

# Below "vllm", so that it has the level and the handler of vLLM's loggers.
logger = init_logger("vllm.epiloq.experts")


class EpiloqRoutedExperts(RoutedExperts):
    """vLLM's experts, with methods that run on epiloq where it supports them."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        describe = OFFERS.get(type(method))
        if describe is None:
            return method
        sizes = Sizes(moe_config.num_local_experts, moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        offer, name = describe(method, sizes), type(method).__name__
        sizes = replace(sizes, intermediate=round_up(sizes.intermediate, offer.multiple))
        possible, reason = supported(offer.kind, experts=moe_config.num_experts)
        if not possible:
            logger.debug_once("epiloq leaves experts to vLLM's %s: %s", name, reason)
            return method
        reason = reason_against(self, moe_config, offer.activations, offer.has_bias)
        reason = reason or sizes.reason_against() or offer.reason
        if reason is not None:
            logger.warning_once("epiloq leaves %s to vLLM's %s: %s", offer.kind, name, reason)
            return method
        logger.info_once("Selected epiloq's %s for the experts of vLLM's %s", offer.kind, name)
        # vLLM's loaders look at the name of the method's class, so it is kept.
        own: Any = method
        theirs: Any = type(method)
        own.__class__, own.epiloq = _subclass(theirs), offer
        return method

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        own = getattr(self.quant_method, "load_weights", None)
        return super().load_weights(weights) if own is None else own(self, weights)


def reason_against(
    layer: Any, moe: Any, activations: Collection[MoEActivation] = tuple(GATES), has_bias: bool = False
) -> str | None:
    """Why epiloq cannot run a layer of experts, apart from its weights; None if it can."""
    parallel = moe.moe_parallel_config
    unsupported = {
        f"the backend {moe.moe_backend} was asked for": moe.moe_backend != "auto",
        f"expected the activation {' or '.join(known.value for known in activations)}, got "
        f"{moe.activation.value}": moe.activation not in activations,
        "expected no limits of the activation in the configuration": any(
            value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
        ),
        f"expected {'biases' if has_bias else 'no biases'}": moe.has_bias != has_bias,
        "expected router weights on outputs, not on inputs": layer.apply_router_weight_on_input,
        "expected no LoRA adapters": moe.is_lora_enabled,
        "expected no load balancing of experts": parallel.enable_eplb,
        "expected tensor or expert parallelism alone": parallel.dp_size > 1
        or parallel.pcp_size > 1
        or parallel.is_sequence_parallel,
        f"expected 16-bit activations, got {moe.in_dtype}": current_platform.is_cuda()
        and moe.in_dtype not in (torch.float16, torch.bfloat16),
    }
    return next((reason for reason, applies in unsupported.items() if applies), None)


class ExpertsMethod(FusedMoEMethodBase):
    """Runs a layer of experts as its module `epiloq`. Base class."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sizes, without the padding that vLLM's kernels need."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's kernels are not used."""

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """None, for the same reason."""

    @property
    def is_monolithic(self) -> bool:
        """False: vLLM's router chooses the experts."""
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: nn.Module | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """``[T, H]`` of `x` ``[T, H]`` and weights and expert numbers ``[T, top_k]``, without shared experts, which
        vLLM's runner adds."""
        ids = topk_ids.long()
        if layer.expert_map is not None:
            here = layer.expert_map[ids].long()
            ids = torch.where(here < 0, layer.local_num_experts, here)
        result: Tensor = layer.epiloq(x, ids, topk_weights)
        return result


class EpiloqExperts(ExpertsMethod):
    """Runs experts that another method of vLLM's creates and loads."""

    epiloq: Offer

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, round_up(intermediate_size_per_partition, self.epiloq.multiple)

    def process_weights_after_loading(self, layer: Any) -> None:
        sizes = Sizes(layer.local_num_experts, layer.hidden_size, layer.intermediate_size_per_partition)
        settle(layer, self.epiloq.read(layer, sizes))


def settle(layer: Any, module: GatedExperts | Fp4Experts) -> None:
    """Let a layer run as `module`, and release the tensors that vLLM loaded."""
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
        delattr(layer, name)
    layer.workspace = None
    layer.epiloq = module if layer.expert_map is None else routed_to_part(module)


@cache
def _subclass(method: Any) -> Any:
    """A method of vLLM's with weights of its own and everything else from `EpiloqExperts`, under the same name."""
    return type(method.__name__, (EpiloqExperts, method), {"__module__": __name__})


def register() -> None:
    """Let vLLM create `EpiloqRoutedExperts`, unless another plug-in has a class of its own for experts. May be called
    any number of times."""
    if RoutedExperts.__name__ not in op_registry_oot:
        RoutedExperts.register_oot(name=RoutedExperts.__name__)(EpiloqRoutedExperts)
