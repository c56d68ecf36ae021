"""Layers whose weight the code of a parent module reads, or changes, instead of calling the layer; found in the source.

The methods that ``forward`` reaches are searched for ``self.layer.weight``, ``self.layers[i].weight`` and the like.
Dead branches are skipped if the condition depends only on attributes that no method changes (``self.training`` is taken
as false, because models are quantised for inference).
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

_UNKNOWN = object()
_EACH = "*"
"""Stands in a path for every module of a list."""
# Methods that construct a module, and code shared by all modules.
_MAKING, _BASES = ("__init__", "post_init"), ("torch.nn.modules.", "transformers.modeling_utils")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def read_by_parents(model: nn.Module) -> dict[str, str]:
    """Modules, by name, whose ``weight`` is read by a parent module, and the parent's class."""
    found: dict[str, str] = {}
    for prefix, search in _searches(model):
        for path in search.found:
            found.setdefault(_joined(prefix, path), type(search.module).__name__)
    return found


def changed_by_parents(model: nn.Module) -> dict[str, str]:
    """Modules, by name, to whose ``weight`` a parent module writes when it runs, and what does: the parent's class,
    with the condition on its configuration under which it does so, if there is one."""
    found: dict[str, str] = {}
    for prefix, search in _searches(model):
        for path, condition in search.changed.items():
            when = f" if {condition}" if condition else ""
            found.setdefault(_joined(prefix, path), f"{type(search.module).__name__}{when}")
    return found


def initialisation_reads(model: nn.Module, layers: Collection[str]) -> bool:
    """Whether transformers' initialisation of a model reads the ``weight`` of any of these layers, by name.

    `from_pretrained` runs it on every module, also on those that files have in a layout without a tensor of that name.
    It is run here, on a copy without values.
    """
    if not hasattr(model, "initialize_weights"):
        return False
    with torch.device("meta"):
        outline: Any = type(model)(copy.deepcopy(model.config))
    for name, module in outline.named_modules():
        module._is_hf_initialized = False
        if name in layers:
            module._parameters.pop("weight", None)
    try:
        outline.initialize_weights()
    except AttributeError as error:
        if "'weight'" not in str(error):
            raise
        return True
    return False


def _searches(model: nn.Module) -> Iterator[tuple[str, _Search]]:
    """What the methods that ``forward`` reaches do, with the names of the modules that they belong to."""
    modules = dict(model.named_modules())
    pending = [(name, "forward") for name, module in modules.items() if module._modules]
    seen = set(pending)
    while pending:
        prefix, method = pending.pop()
        module = modules[prefix]
        tree = _source(_function(type(module), method))
        if tree is None:
            continue
        search = _Search(module)
        search.visit(tree)
        yield prefix, search
        others = {(_joined(prefix, path), name) for path, name in search.methods} - seen
        pending += sorted(others)
        seen |= others


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _function(kind: type, name: str) -> Any:
    """A method, or a property's getter, of a module, without decorators."""
    found = inspect.getattr_static(kind, name, None)
    if found is inspect.getattr_static(nn.Module, name, None):
        return None
    found = found.fget if isinstance(found, property) else found
    return inspect.unwrap(found) if inspect.isfunction(found) else None


@cache
def _source(function: Any) -> ast.AST | None:
    """None if there is no source, as for functions created at run time."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _functions(kind: type) -> list[tuple[str, Any]]:
    members = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return [(name, value) for name, value in members.items() if inspect.isfunction(value)]


@cache
def _changed(kind: type) -> frozenset[str]:
    """Attributes that methods of a class assign, other than constructors."""
    found = set[str]()
    for name, function in _functions(kind):
        if name in _MAKING or function.__module__.startswith(_BASES):
            continue
        tree = _source(inspect.unwrap(function))
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                found |= {node.attr} if node.value.id == "self" else set()
    return frozenset(found)


class _Search(ast.NodeVisitor):
    """Collects from a module's methods the paths whose weight is read, and other methods that are used."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: set[str] = set()
        self.changed: dict[str, str] = {}
        """Paths whose weight is written, and the condition on the configuration under which it is, or ""."""
        self.setting = ""
        """The innermost condition on the configuration that the visited code is under."""
        self.methods: set[tuple[str, str]] = set()
        """Paths of modules, from this one, and methods of theirs."""
        self.aliases: dict[str, list[str]] = {}

    def visit_If(self, node: ast.If) -> None:
        known = self._value(node.test)
        if known is _UNKNOWN:
            self._visit_all([node.test, *node.body, *node.orelse])
            return
        test = ast.unparse(node.test)
        outer, self.setting = self.setting, test if "self.config." in test else self.setting
        self._visit_all(node.body if known else node.orelse)
        self.setting = outer

    def visit_IfExp(self, node: ast.IfExp) -> None:
        known = self._value(node.test)
        self._visit_all(
            [node.test, node.body, node.orelse] if known is _UNKNOWN else [node.body if known else node.orelse]
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        path = self._path(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and path:
                self.aliases[target.id] = path
            self._note_assignment(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note_assignment(node.target)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Bind the loop variables of ``for child in self.children``, also through ``enumerate`` and ``zip``."""
        pairs = [(node.target, node.iter)]
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            numbered = node.iter.func.id == "enumerate"
            pairs = list(zip(targets[numbered:], node.iter.args, strict=False))
        for target, values in pairs:
            path = self._path(values)
            if isinstance(target, ast.Name) and path:
                self.aliases[target.id] = [*path, _EACH]
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
            return
        if any(part.endswith("_") for part in path):  # torch's names of methods that change a tensor
            self._note_write(path)
        for end, part in enumerate(path):
            for name, held in self._held(path[:end]):
                if end and part == "weight":
                    self.found.add(name)
                elif _function(type(held), part) is not None:
                    self.methods.add((name, part))

    def _note_assignment(self, target: ast.AST) -> None:
        path = None if isinstance(target, ast.Name) else self._path(target)
        self._note_write(path or [])

    def _note_write(self, path: list[str]) -> None:
        """Note a write to what is at a path, if it is the weight of a module or a part of it."""
        if "weight" in path[1:]:
            for name, _ in self._held(path[: path.index("weight", 1)]):
                self.changed.setdefault(name, self.setting)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _held(self, path: list[str]) -> list[tuple[str, nn.Module]]:
        """The modules at a path, by their own paths; several if the path passes through every module of a list."""
        found: list[tuple[str, nn.Module]] = [("", self.module)]
        for part in path:
            children = ((prefix, name, child) for prefix, held in found for name, child in held._modules.items())
            found = [(_joined(p, name), c) for p, name, c in children if c is not None and part in (name, _EACH)]
        return found

    def _path(self, node: ast.AST) -> list[str] | None:
        """The names in ``self.a.b`` or ``self.a[i].b``, resolving local aliases."""
        names: list[str] = []
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            if isinstance(node, ast.Attribute):
                names.append(node.attr)
            elif not isinstance(node.slice, ast.Slice):
                names.append(_EACH)
            node = node.value
        if not isinstance(node, ast.Name) or (node.id != "self" and node.id not in self.aliases):
            return None
        return [*self.aliases.get(node.id, []), *reversed(names)]

    def _value(self, node: ast.AST) -> Any:
        """The value of an expression, if it follows from the module's attributes."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._value(node.operand)
            return inner if inner is _UNKNOWN else not inner
        if isinstance(node, ast.BoolOp):
            return self._combined(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = self._value(node.left), self._value(node.comparators[0])
            return _UNKNOWN if _UNKNOWN in sides else self._compared(node.ops[0], *sides)
        path = self._path(node)
        return self._attribute(path) if path else _UNKNOWN

    def _combined(self, node: ast.BoolOp) -> Any:
        values, decisive = [self._value(value) for value in node.values], isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) == decisive for value in values):
            return decisive
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decisive

    def _compared(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        try:
            return bool(_COMPARISONS[type(op)](left, right))
        except TypeError:
            return _UNKNOWN

    def _attribute(self, path: list[str]) -> Any:
        if path == ["training"]:
            return False
        kind: Any = type(self.module)
        if path[0] in _changed(kind):
            return _UNKNOWN
        value: Any = self.module
        for name in path:
            value = getattr(value, name, _UNKNOWN)
        return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN
