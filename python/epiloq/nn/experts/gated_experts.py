"""GatedExperts: the experts of a layer with quantised weights, run as two grouped products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq._torch.parameters import FrozenParameter
from epiloq.nn.base.frozen import wants_gradient
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import K_MULTIPLE
from epiloq.nn.base.quantized_layer import convert_input
from epiloq.nn.experts.biases import BIAS, NAMES, added, fitting_bias, register
from epiloq.nn.experts.expert_linears import (
    ExpertLinears,
    Projections,
    Routing,
    check_routing,
    own_part,
    with_identities,
)
from epiloq.nn.experts.gating import gate_of, gated
from epiloq.nn.experts.kind import Kind
from epiloq.nn.experts.row_experts import ExpertRows, Experts


class GatedExperts(nn.Module):
    """``sum_j w_j down_e(act(gate_e(x)) * up_e(x))``, e = index_j, with quantised weights and activations.

    Without gate_e it is ``down_e(act(up_e(x)))``. An ``OwnGate`` as `act_fn` combines both itself.

    Replaces the experts of a transformers model, with the same interface: ``hidden_states`` ``[T, H]`` (float32,
    float16 or bfloat16), ``top_k_index`` ``[T, top_k]`` from 0 to E - 1 and ``top_k_weights`` ``[T, top_k]`` give
    ``[T, H]``. Rows (a token and an expert each) are sorted by expert and quantised, multiplied by gate and up in one
    ``epiloq.grouped_mm``, gated and quantised (in one pass if `act_fn` is one of the gates of
    ``epiloq.silu_and_mul``), multiplied by down in another, and summed in fp32 in a fixed order. Nothing is read back
    to the host, except with low-bit weights (`PackedExperts`, `PackedFp4Experts`) where `epiloq.grouped_packed_mm`
    does so. Raises ValueError for other shapes, and on a CPU for invalid expert indices.

    The tensors of all experts are stored together, gate before up, in `gate_up` and `down`, and so they are in the
    state dict. Loading also accepts one matrix per expert, as returned by `file_state` and stored in checkpoints: the
    tensors of the linear layers of `kind`, with names like ``7.gate_proj.weight``. Layers with one activation scale
    per tensor (``Fp8Linear`` with activation "tensor") run with a scale per token, which is finer.

    identities
        Number of experts after these that return their tokens.
    part, whole
        The range of experts in this process and their total number, under expert parallelism: see
        ``epiloq.parallel``.
    """

    part: range | None = None
    whole: int | None = None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        kind: Kind,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        act_fn: nn.Module | None = None,
        projections: Projections = Projections(),  # noqa: B008 (immutable)
        identities: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.experts, self.hidden, self.intermediate = kind, experts, hidden, intermediate
        self.projections, self.identities = projections, identities
        # Up begins at its own scale, and at a multiple of 16 bytes in rows of the product.
        multiple = max(kind.experts.ROWS_PER_SCALE, K_MULTIPLE)
        self.up_begins = -(-intermediate // multiple) * multiple
        matrices = len(projections.names) - 1
        self.gate_up = kind.stacked(experts, hidden, matrices * self.up_begins, matrices, device)
        self.down = kind.stacked(experts, intermediate, hidden, 1, device)
        register(self, kind.bias, ((experts, matrices * self.up_begins), (experts, hidden)), device)
        self.act_fn = act_fn or nn.SiLU()
        self._gate = gate_of(self.act_fn) if projections.gate else None
        self.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]

    @classmethod
    @torch.no_grad()
    def from_linears(cls, linears: ExpertLinears) -> GatedExperts | None:
        """Convert experts to be computed together; None unless all layers are of the same supported kind."""
        first: Any = linears.layers(0)[0]
        kind = Kind.of(first) if linears.post_expert_norm is None else None
        # The last layer is checked first: it is still float if this is called while layers are being quantised.
        if kind is None or Kind.of(linears.layers(linears.experts - 1)[-1]) != kind:
            return None
        found = [linears.layers(expert) for expert in range(linears.experts)]
        if any(Kind.of(layer) != kind for layers in found for layer in layers):
            return None
        device = first.weight_q.device
        module = cls(
            kind,
            linears.experts,
            first.in_features,
            first.out_features,
            act_fn=linears.act_fn,
            projections=linears.projections,
            identities=linears.identities,
            device=device,
        )
        if device.type != "meta":
            for expert, layers in enumerate(found):
                for projection, layer in zip(linears.projections.names, layers, strict=True):
                    state = layer.state_dict()
                    for part, place in module._places(expert, projection).items():
                        place.copy_(state[part])
            module._clear_padding()
            module._settle()
        module.part, module.whole = linears.part, linears.whole
        return module.train(linears.training)

    def linears(self, device: torch.device | str | None = None) -> Iterator[tuple[str, nn.Module]]:
        """The corresponding linear layers by their names in the state dict; on "meta" without values."""
        for expert in range(self.experts):
            for projection in self.projections.names:
                rows, columns = self.hidden, self.intermediate
                if projection != self.projections.down:
                    rows, columns = columns, rows
                where = self.down.weight_q.device if device is None else torch.device(device)
                layer = self.kind.linear(columns, rows, self.down_bias is not None, **self.kind.options, device=where)
                if where.type != "meta":
                    tensors = self._tensors(expert, projection)
                    layer.load_state_dict(tensors)
                    # The bias keeps its dtype, which may differ from that of scales.
                    layer._store(BIAS, tensors[BIAS].clone() if BIAS in tensors else None)
                    layer._settle()
                yield f"{expert}.{projection}", layer

    def file_state(self) -> dict[str, Tensor]:
        """The tensors of each expert's layers by their names in files: views of the parameters, for FP4 copies."""
        names = {name: given for given, name in self.kind.linear.RENAMED.items()}
        found = {}
        for expert in range(self.experts):
            for projection in self.projections.names:
                experts, _, rows = self._place(projection)
                tensors = self._tensors(expert, projection)
                bias = tensors.pop(BIAS, None)
                if bias is not None:
                    found[f"{expert}.{projection}.{BIAS}"] = bias.detach()
                for part, tensor in experts.as_in_files(tensors, rows).items():
                    found[f"{expert}.{projection}.{names.get(part, part)}"] = tensor.detach()
        return found

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if is_symbolic(hidden_states):
            return as_leaf(self, hidden_states, top_k_index, top_k_weights)
        hidden_states = convert_input(self, hidden_states)
        # The width is checked here, since kernels see only padded widths and would accept some others.
        count = self.whole or self.experts
        check_routing("GatedExperts", hidden_states, top_k_index, top_k_weights, self.hidden, count + self.identities)
        y = self._combined(hidden_states, top_k_index, top_k_weights)
        return with_identities(self, y, hidden_states, top_k_index, top_k_weights)

    def _combined(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Each token's weighted sum over the outputs of its experts that have layers."""
        part = own_part(self)
        if wants_gradient(hidden_states):
            routing = Routing.of(top_k_index, self.experts, part)
            if routing.partial:
                raise NotImplementedError("GatedExperts: gradients: expected all experts in one process, with layers")
            return self._one_by_one(hidden_states, routing, top_k_weights)
        first = self.gate_up
        measure = {**first.quantize_options, "pad_to": K_MULTIPLE} if first.quantize_options else {}
        routing, q, scale = Routing.gather(hidden_states, top_k_index, self.experts, part, first.quantise, measure)
        rows = ExpertRows(routing.ends)
        gate_up = self.gate_up.multiply(q, scale, hidden_states.dtype, rows)
        gate_up = added(gate_up, self.gate_up_bias, routing.ends)
        if self._gate is not None and self.down.quantize_options:
            q, scale = epiloq.silu_and_mul_quant(gate_up, **self._gate, **self.down.quantize_options)
        else:
            q, scale = self.down.quantise(self._gated(gate_up))
        # The padding of each half is zero, and so are its products.
        y = self.down.multiply(q[:, : self.down.padded_in_features], scale, hidden_states.dtype, rows)
        return routing.combined(added(y[:, : self.hidden], self.down_bias, routing.ends), top_k_weights)

    def _one_by_one(self, hidden_states: Tensor, routing: Routing, top_k_weights: Tensor) -> Tensor:
        """Compute the result from separate layers, which have gradients; gated rows are rounded before quantisation."""
        gate_up = added(self.gate_up(hidden_states[routing.tokens], offs=routing.ends), self.gate_up_bias, routing.ends)
        y = self.down(self._gated(gate_up), offs=routing.ends)
        return routing.combined(added(y, self.down_bias, routing.ends), top_k_weights)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """The input of down, in the dtype of `gate_up`."""
        if self._gate is not None and gate_up.is_cuda and not wants_gradient(gate_up):
            return epiloq.silu_and_mul(gate_up, **self._gate)[..., : self.intermediate]
        parts = gate_up.split(self.up_begins, -1)
        return gated(self.act_fn, *(part[:, : self.intermediate] for part in parts))

    def _settle(self) -> None:
        for experts in (self.gate_up, self.down):
            experts._settle()

    def _begin(self, device: torch.device) -> None:
        """Replace tensors on "meta" by zeros on a device."""
        for experts in (self.gate_up, self.down):
            for part in experts.held_parts:
                held = experts.get_parameter(part)
                if held.is_meta:
                    experts._store(part, torch.zeros_like(held, device=device))
        for name in NAMES:
            bias = getattr(self, name)
            if bias is not None and bias.is_meta:
                self.register_parameter(name, FrozenParameter(torch.zeros_like(bias, device=device)))

    def _clear_padding(self) -> None:
        """Zero the padding of gate and up, which no expert's matrix covers."""
        for begin in range(0, self.gate_up.out_features, self.up_begins):
            self.gate_up.clear(begin + self.intermediate, begin + self.up_begins)

    def _place(self, projection: str) -> tuple[Experts, int, int]:
        """The layers that hold a projection's matrices, the matrix's first row within an expert, and its rows."""
        if projection == self.projections.down:
            return self.down, 0, self.hidden
        follows = bool(self.projections.gate) and projection == self.projections.up
        return self.gate_up, self.up_begins if follows else 0, self.intermediate

    def _places(self, expert: int, projection: str) -> dict[str, Tensor]:
        """Views of the tensors of one linear layer, by the last part of their names."""
        experts, begin, rows = self._place(projection)
        bias = self.down_bias if experts is self.down else self.gate_up_bias
        places = experts.places(expert, begin, rows)
        return places if bias is None else places | {BIAS: bias.detach()[expert, begin : begin + rows]}

    def _tensors(self, expert: int, projection: str) -> dict[str, Tensor]:
        """The tensors of one linear layer."""
        found = self._places(expert, projection)
        if self.kind.options.get("weight") == "tensor":  # the scale is repeated for every row
            found[self.down.SCALE] = found[self.down.SCALE][:1]
        return found

    def extra_repr(self) -> str:
        return f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}"


@torch.no_grad()
def _take(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Copy the matrices of a state dict with one per expert to their positions; stacked ones are loaded as usual."""
    assert isinstance(module, GatedExperts)
    apart = re.compile(rf"{re.escape(prefix)}\d+\.({'|'.join(map(re.escape, module.projections.names))})\.")
    first = next((tensor for name, tensor in state.items() if apart.match(name)), None)
    if first is None:
        return
    if metadata.get("assign_to_params_buffers", False):
        module._begin(first.device)
    if not any(tensor.is_meta for tensor in module.parameters()):
        # After `to_empty` the padding may contain any value.
        module._clear_padding()
    for expert in range(module.experts):
        for projection in module.projections.names:
            places, wanted = module._places(expert, projection), module._tensors(expert, projection)
            experts, _, rows = module._place(projection)
            for part, place in places.items():
                key = f"{prefix}{expert}.{projection}.{part}"
                given = state.pop(key if key in state else key.removesuffix("_q"), None)  # the name in files
                if given is None:
                    missing.append(key)
                    continue
                fitting = fitting_bias if part == BIAS else experts.fitting
                found = fitting(part, given, wanted[part], rows)
                if isinstance(found, str):
                    errors.append(f"GatedExperts: {key}: {found}")
                else:
                    place.copy_(found)
    if module.down.IN_PANELS and not errors:
        module._clear_padding()  # loaded panels include padding
    for name, experts in (("gate_up", module.gate_up), ("down", module.down)):
        for part in experts.held_parts:
            state.setdefault(f"{prefix}{name}.{part}", experts.get_parameter(part).detach())
    for name in NAMES:
        if getattr(module, name) is not None:
            state.setdefault(f"{prefix}{name}", module.get_parameter(name).detach())
