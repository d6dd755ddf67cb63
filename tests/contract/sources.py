"""Definitions in a tree of Python sources, found by reading: nothing is imported.

`Sources` answers for a dotted name what it is: a module, a class, a function with its signature, or
an attribute. It follows re-exports and base classes, but only inside the tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

_EMPTY = {"ABC", "Generic", "Protocol", "NamedTuple", "object"}
"""Base classes outside the tree that add no members of interest."""


@dataclass(frozen=True)
class Definition:
    """The place where a name is defined. `node` is None for a module."""

    module: str
    node: Any

    @property
    def name(self) -> str:
        """Dotted name of a class, a function or a module."""
        return f"{self.module}.{self.node.name}" if hasattr(self.node, "name") else self.module


class Sources:
    """The sources of one package: `root` is the folder that holds the package's folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._module)
        self.find = cache(self._find)
        self.members = cache(self._members)
        self.classes = cache(self._classes)

    def _path(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.exists():
                return path
        return None

    def _module(self, module: str) -> Module | None:
        path = self._path(module)
        if path is None:
            return None
        return Module(module, ast.parse(path.read_text()), path.name == "__init__.py")

    def _find(self, dotted: str) -> Definition | None:
        """Find a module, or a class, function or variable at the top level of one."""
        if self._path(dotted) is not None:
            return Definition(dotted, None)
        module, _, name = dotted.rpartition(".")
        return self.named(module, name) if module else None

    def named(self, module: str, name: str) -> Definition | None:
        """Find what a name means inside a module."""
        found = self.module(module)
        if found is None:
            return None
        if name in found.definitions:
            return Definition(module, found.definitions[name])
        imported = found.imports.get(name, f"{module}.{name}")
        return self.find(imported) if imported != f"{module}.{name}" else None

    def _classes(self, owner: Definition) -> list[Definition]:
        """Return a class and its base classes inside the tree, nearest first."""
        assert isinstance(owner.node, ast.ClassDef)
        found = [owner]
        for base in owner.node.bases:
            b = self.named(owner.module, _plain(base))
            if b is not None and isinstance(b.node, ast.ClassDef):
                found += [c for c in self.classes(b) if c not in found]
        return found

    def is_whole(self, owner: Definition) -> bool:
        """Return whether all base classes of a class are in the tree, so that nothing is missed."""
        return all(
            ast.unparse(base).split("[")[0] in _EMPTY or self.named(cls.module, _plain(base))
            for cls in self.classes(owner)
            for base in cls.node.bases
        )

    def _members(self, owner: Definition) -> dict[str, Definition]:
        """Return the methods, class variables and instance variables of a class."""
        found: dict[str, Definition] = {}
        for cls in self.classes(owner):
            for name, node in own_members(cls.node).items():
                found.setdefault(name, Definition(cls.module, node))
        return found

    def member(self, owner: Definition, name: str) -> Definition | None:
        """Return the definition of a member of a class, which may be in a base class."""
        return self.members(owner).get(name)

    def fields(self, owner: Definition) -> list[ast.AnnAssign]:
        """Return the fields of a dataclass or a named tuple, those of base classes first."""
        found: dict[str, ast.AnnAssign] = {}
        for cls in reversed(self.classes(owner)):
            for node in cls.node.body:
                is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                if is_field and "ClassVar" not in ast.unparse(node.annotation):
                    found[node.target.id] = node
        return list(found.values())


@dataclass(frozen=True)
class Module:
    """The top level of one module."""

    name: str
    tree: ast.Module
    is_package: bool

    @cached_property
    def definitions(self) -> dict[str, ast.AST]:
        """Classes, functions and variables by name; the first definition counts."""
        found: dict[str, ast.AST] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.ClassDef | Function):
                found.setdefault(node.name, node)
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, node)
        return found

    @cached_property
    def imports(self) -> dict[str, str]:
        """Dotted names of what is imported anywhere in the module, by the name used in it."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                source = self._source(node)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, f"{source}.{alias.name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    own = alias.asname or alias.name.split(".")[0]
                    found.setdefault(own, alias.name if alias.asname else own)
        return found

    def _source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        package = package[: len(package) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])


def is_property(node: ast.AST) -> bool:
    """Return whether a function is read like an attribute."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(d).split(".")[-1] in ("property", "cached_property") for d in decorators)


def _plain(base: ast.expr) -> str:
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements of a body, also those inside `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _targets(node: ast.AST) -> list[ast.expr]:
    targets = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets.append(node.target)
    return [t for x in targets for t in (x.elts if isinstance(x, ast.Tuple) else [x])]


def own_members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the methods and variables that a class defines itself."""
    found: dict[str, ast.AST] = {}
    for node in _statements(cls.body):
        if isinstance(node, Function):
            found.setdefault(node.name, node)
        for target in _targets(node):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, node)
    for node in ast.walk(cls):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.setdefault(target.attr, node)
    return found
