"""Plan for a traced network: which results are passed on as int8, on which grids, and the required graph changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from epiloq.nn import Int8Conv2d, Int8Quantize, Int8Table
from epiloq.nn.int8_table import quantized
from epiloq.observers import quantizer
from epiloq.quantize.int8_graph import kinds
from epiloq.weights.prepared_int8_weight import Quantizer

# Number of points of a range at which a function is evaluated.
_PLACES = 4096


class Chain(NamedTuple):
    """A chain of pointwise nodes, each of them the only reader of the previous one, and the first one's source."""

    source: Node
    nodes: tuple[Node, ...]

    def of(self, model: GraphModule, values: Tensor) -> Tensor:
        """The composed function of each value."""
        found = {self.source: values}
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), lambda argument: found[argument].clone())
            module = kinds.module_of(model, node)
            if module is not None:
                found[node] = module(*args, **kwargs)
            elif node.op == "call_method":
                found[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                found[node] = node.target(*args, **kwargs)
        return found[self.nodes[-1]]


class Plan:
    """Plan that is decided backwards, from the grids that readers expect, and then applied forwards.

    `layers` may have int8 output; `ranges` are the measured ranges of their results.
    """

    def __init__(self, model: GraphModule, layers: Mapping[Node, Int8Conv2d], ranges: Mapping[Node, Tensor]) -> None:
        self._model, self._layers = model, layers
        self._ranges = dict(ranges)  # results of moves have the ranges of their inputs
        self._able = set(layers)  # nodes that may have int8 output
        self._grids: dict[Node, Quantizer] = {}  # nodes that have int8 output, with its grid
        self._tables: dict[Node, Chain] = {}
        for node in model.graph.nodes:
            self._follow(node)
        for node in reversed(model.graph.nodes):
            self._decide(node)

    def _follow(self, node: Node) -> None:
        rule, chain = kinds.move(self._model, node), self._chain(node)
        if rule is not None:
            sources = kinds.moved(node)
            if rule.grows or self._able.issuperset(sources):
                self._able.add(node)
            if all(source in self._ranges for source in sources):
                ends = torch.stack([self._ranges[source] for source in sources])
                self._ranges[node] = torch.stack((ends[:, 0].min(), ends[:, 1].max()))
        elif chain is not None and chain.source in self._able and chain.source in self._ranges:
            self._able.add(node)

    def _chain(self, last: Node) -> Chain | None:
        nodes: list[Node] = []
        node = last
        while (source := kinds.pointwise(self._model, node)) is not None and (not nodes or len(node.users) == 1):
            nodes.insert(0, node)
            node = source
        return Chain(node, tuple(nodes)) if nodes and len(node.users) == 1 else None

    def _decide(self, node: Node) -> None:
        expected = {self._expected(user, node) for user in node.users if not kinds.is_about_size(user)}
        if node not in self._able or len(expected) != 1 or (grid := expected.pop()) is None:
            return
        self._grids[node] = grid
        chain = self._chain(node)
        if chain is not None:
            self._tables[node] = chain

    def _expected(self, reader: Node, node: Node) -> Quantizer | None:
        """The grid on which a reader expects int8."""
        layer = kinds.module_of(self._model, reader)
        if isinstance(layer, Int8Conv2d):
            return layer.input
        if reader in self._grids and kinds.move(self._model, reader) is not None:
            return self._grids[reader]
        for last, chain in self._tables.items():
            if chain.source is node and chain.nodes[0] is reader:
                return self._input_grid(chain, self._grids[last])
        return None

    def _input_grid(self, chain: Chain, output: Quantizer) -> Quantizer:
        """Grid for the range of a chain's input, without the ends in which the result is constant."""
        ends = self._ranges[chain.source]
        places = torch.linspace(float(ends[0]), float(ends[1]), _PLACES)
        results = quantized(chain.of(self._model, places), output)
        first, last = (results != results[0]).nonzero(), (results != results[-1]).nonzero()
        if len(first):
            places = places[int(first[0]) - 1 : int(last[-1]) + 2]
        scale, zero = quantizer(places[[0, -1]])
        assert zero is not None
        return float(scale), int(zero)

    def carry_out(self) -> None:
        for node, grid in list(self._grids.items()):
            if node in self._layers:
                self._layers[node].set_quantizers(output=grid)
        for node in list(self._model.graph.nodes):
            if node in self._tables:
                self._tabulate(node)
            elif node in self._grids and node not in self._layers:
                self._move(node)

    def _tabulate(self, node: Node) -> None:
        chain = self._tables[node]
        table = Int8Table.from_function(
            lambda values: chain.of(self._model, values), input=self._grids[chain.source], output=self._grids[node]
        )
        instead = self._called(node, table, chain.source)
        self._grids[instead] = self._grids[node]
        node.replace_all_uses_with(instead)
        for gone in reversed(chain.nodes):
            self._model.graph.erase_node(gone)

    def _move(self, node: Node) -> None:
        rule, graph, grid = kinds.move(self._model, node), self._model.graph, self._grids[node]
        carrier = None if rule is None else rule.carrier
        cast = "view" if carrier == torch.uint8 else "to"
        for source in dict.fromkeys(kinds.moved(node)):
            given = source if source in self._grids else self._called(node, Int8Quantize(grid), source)
            with graph.inserting_before(node):
                carried = given if carrier is None else graph.call_method(cast, (given, carrier))
            node.replace_input_with(source, carried)
        if carrier is not None:
            with graph.inserting_after(node):
                instead = graph.call_method(cast, (node, torch.int8))
            node.replace_all_uses_with(instead, delete_user_cb=lambda user: user is not instead)
            self._grids[instead] = grid

    def _called(self, before: Node, module: torch.nn.Module, source: Node) -> Node:
        device = next(iter(self._layers.values())).weight.device
        name = f"int8_{before.name}_{source.name}"
        self._model.add_submodule(name, module.to(device).eval())
        with self._model.graph.inserting_before(before):
            return self._model.graph.call_module(name, (source,))
