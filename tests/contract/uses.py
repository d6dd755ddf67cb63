"""What our plug-in uses of vLLM, found by reading our sources.

The walk follows imports, base classes, assignments and vLLM's own annotations (`infer`).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from contract.infer import SETTINGS, by_role, classes, types_of_members
from contract.sources import Definition, Function, Module, Sources, is_property, own_members


@dataclass
class Found:
    """What a walk has found: names of vLLM with their signatures, and what does not fit."""

    names: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def uses(folder: Path, vllm: Sources) -> Found:
    """Return what the modules of a folder use of vLLM."""
    found = Found()
    ours = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    mixed = _mixed_bases(ours)
    own = [n for t in ours.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    added = set().union(*map(own_members, own))
    for path, tree in ours.items():
        _Walk(path, tree, vllm, found, mixed, added).walk()
    return found


def environment(folder: Path, vllm: Sources) -> dict[str, str]:
    """Return the environment variables that we name and that vLLM reads."""
    module = vllm.module("vllm.envs")
    assert module is not None
    known = {n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant)}
    named = {
        node.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"VLLM_[A-Z0-9_]+", node.value)
    }
    return {f"${name}": "read by vLLM" for name in sorted(named) if name in known}


def _dotted_module(path: Path) -> str:
    """Return the name by which our other modules import a file."""
    return ".".join(path.with_suffix("").parts).rpartition(".src.")[2]


def _mixed_bases(ours: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Return the classes of vLLM that each class of ours is mixed with, by its dotted name."""
    found: dict[str, list[str]] = {}
    for path, tree in ours.items():
        imports = _imports(tree)
        for cls in [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]:
            names = [ast.unparse(base) for base in cls.bases]
            bases = [imports[n] for n in names if imports.get(n, "").startswith("vllm.")]
            for name in names:
                own = imports.get(name, f"{_dotted_module(path)}.{name}")
                found.setdefault(own, []).extend(bases)
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    return Module("", tree, False).imports


@dataclass
class _Walk:
    """The walk over one module of ours."""

    _path: Path
    _tree: ast.Module
    _vllm: Sources
    _found: Found
    _mixed: dict[str, list[str]]
    _added: set[str]
    _bases: list[Definition] = field(default_factory=list)
    _own: set[str] = field(default_factory=set)
    _locals: dict[str, list[Definition]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = _imports(self._tree).items()
        self._imports = {name: of for name, of in named if of.split(".")[0] == "vllm"}

    def walk(self) -> None:
        for dotted in self._imports.values():
            if (definition := self._vllm.find(dotted)) is None:
                self._fault(f"imports {dotted}, which vLLM does not have")
            elif dotted != "vllm":
                self._list(dotted, definition)
        self._settings()
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
            else:
                self._visit(node)

    # --- classes --------------------------------------------------------------------------------

    def _class(self, cls: ast.ClassDef) -> None:
        names = [ast.unparse(b.value if isinstance(b, ast.Subscript) else b) for b in cls.bases]
        dotted = [self._imports[n] for n in names if n in self._imports]
        dotted += self._mixed.get(f"{_dotted_module(self._path)}.{cls.name}", [])
        self._bases = [d for name in dotted for d in classes(self._vllm.find(name))]
        self._own = set(own_members(cls))
        for node in cls.body:
            if isinstance(node, Function):
                self._override(node)
            self._visit(node)
        self._bases, self._own = [], set()

    def _override(self, method: Function) -> None:
        """List the method of vLLM that ours replaces; ours must take the same arguments."""
        for base in self._bases:
            member = self._vllm.member(base, method.name)
            if member is None or not isinstance(member.node, Function):
                continue
            self._list(f"{base.name}.{method.name}", member)
            ours, theirs = method.args, member.node.args
            if method.name == "__init__" or ours.vararg is not None:
                continue
            names, wanted = _positional(ours), _positional(theirs)
            if len(names) < len(wanted) and ours.kwarg is None:
                self._fault(f"{method.name} takes {names}, but vLLM's takes {wanted}")

    # --- expressions ----------------------------------------------------------------------------

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, Function):
            before = dict(self._locals)
            for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                self._locals[argument.arg] = self._parameter(argument)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            self._locals[node.target.id] = by_role(self._vllm, node.target.id)
        for child in ast.iter_child_nodes(node):
            self._visit(child)
        if isinstance(node, Function):
            self._locals = before
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._locals[target.id] = self._types(node.value)
        elif isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.Call):
            self._call(node)

    def _parameter(self, argument: ast.arg) -> list[Definition]:
        """Return the classes of a parameter: by its role, or by its annotation if it has one."""
        text = "Any" if argument.annotation is None else ast.unparse(argument.annotation)
        if text == "Any":
            return by_role(self._vllm, argument.arg)
        return classes(self._vllm.find(self._imports.get(text, "no.module")))

    def _types(self, node: ast.expr) -> list[Definition]:
        """Return the classes of vLLM that an expression's value may belong to."""
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, [])
        if isinstance(node, ast.Call):
            return classes(self._callee(node))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            return by_role(self._vllm, f"{node.value.attr}[]")
        if not isinstance(node, ast.Attribute):
            return []
        owners = self._owners(node)
        if not owners and not _is_self(node.value):
            return []
        return types_of_members(self._vllm, owners, node.attr) or by_role(self._vllm, node.attr)

    def _attribute(self, node: ast.Attribute) -> None:
        """List an attribute of a module, of `self`, of `super()` or of an object of vLLM."""
        dotted = self._dotted(node)
        if dotted is not None:
            definition = self._vllm.find(dotted)
            if definition is not None:
                self._list(dotted, definition)
            elif (owner := self._vllm.find(dotted.rpartition(".")[0])) is not None:
                if isinstance(owner.node, ast.ClassDef):
                    self._member([owner], node)
                elif owner.node is None:
                    self._fault(f"uses {dotted}, which vLLM does not have")
            return
        if owners := self._owners(node):
            self._member(owners, node)

    def _owners(self, node: ast.Attribute) -> list[Definition]:
        """Return the classes of vLLM that an attribute may be a member of."""
        if _is_super(node.value):
            return self._bases
        if _is_self(node.value):
            return [] if node.attr in self._own else self._bases
        return self._types(node.value)

    def _member(self, owners: list[Definition], node: ast.Attribute) -> None:
        if node.attr.startswith(("__", "tlt_")):
            return
        having = {o.name: m for o in owners if (m := self._vllm.member(o, node.attr))}
        is_known = all(self._vllm.is_whole(owner) for owner in owners)
        if not having and is_known and node.attr not in self._added:
            names = " or ".join(owner.name for owner in owners)
            self._fault(f"uses {node.attr!r}, which {names} does not have")
        for name, member in having.items():
            self._list(f"{name}.{node.attr}", member)

    def _dotted(self, node: ast.Attribute) -> str | None:
        """Return the dotted name of an attribute of something that was imported from vLLM."""
        value = node.value
        if isinstance(value, ast.Name) and value.id in self._imports:
            return f"{self._imports[value.id]}.{node.attr}"
        return None

    # --- calls ----------------------------------------------------------------------------------

    def _callee(self, call: ast.Call) -> Definition | None:
        """Return the class, function or method of vLLM that a call reaches, if it is known."""
        func = call.func
        if isinstance(func, ast.Name) and func.id in self._imports:
            return _callable(self._vllm.find(self._imports[func.id]))
        if not isinstance(func, ast.Attribute):
            return None
        dotted = self._dotted(func)
        if dotted is not None and (definition := self._vllm.find(dotted)) is not None:
            return _callable(definition)
        of_class = dotted and classes(self._vllm.find(dotted.rpartition(".")[0]))
        for owner in of_class or self._owners(func):
            member = self._vllm.member(owner, func.attr)
            if member is not None and isinstance(member.node, Function):
                return member
        return None

    def _call(self, call: ast.Call) -> None:
        """Check the arguments of a call, and list the fields that it sets by keyword."""
        is_replace = isinstance(call.func, ast.Name) and call.func.id == "replace"
        if is_replace and (owners := self._types(call.args[0])):
            self._keywords(call, owners)
        callee = self._callee(call)
        if callee is None:
            return
        if isinstance(callee.node, ast.ClassDef):
            init = self._vllm.member(callee, "__init__")
            if init is None:
                self._constructor(call, callee)
                return
            self._list(f"{callee.name}.__init__", init)
            callee = init
        is_method = isinstance(call.func, ast.Attribute) or callee.node.name == "__init__"
        assert isinstance(callee.node, Function)
        if not is_property(callee.node):
            self._arguments(call, callee.node, is_method)

    def _constructor(self, call: ast.Call, callee: Definition) -> None:
        fields = self._vllm.fields(callee)
        if not fields:
            return
        if call.args:
            text = ", ".join(ast.unparse(f) for f in fields)
            self._found.names[f"{callee.name}()"] = f"({text})"
        self._keywords(call, [callee])

    def _keywords(self, call: ast.Call, owners: list[Definition]) -> None:
        for keyword in call.keywords:
            if keyword.arg is not None:
                name = ast.Attribute(ast.Name("object"), keyword.arg)
                self._member(owners, ast.copy_location(name, call))

    def _arguments(self, call: ast.Call, function: Function, is_method: bool) -> None:
        theirs = function.args
        has_self = is_method and bool(theirs.args) and theirs.args[0].arg in ("self", "cls")
        names = _positional(theirs)[has_self:]
        known = {*names, *(a.arg for a in theirs.kwonlyargs)}
        given = [k.arg for k in call.keywords]
        if theirs.kwarg is None and (unknown := [k for k in given if k and k not in known]):
            self._fault(f"calls {function.name} with {unknown}, but it takes {sorted(known)}")
        is_whole = None not in given and not any(isinstance(a, ast.Starred) for a in call.args)
        if theirs.vararg is None and is_whole and len(call.args) > len(names):
            self._fault(f"calls {function.name} with {len(call.args)} of {len(names)} arguments")
        required = names[: len(names) - len(theirs.defaults)]
        missing = [n for n in required[len(call.args) :] if n not in given]
        if is_whole and missing:
            self._fault(f"calls {function.name} without {missing}")

    def _settings(self) -> None:
        """List the arguments that we hand to vLLM as keys of a dict."""
        for variable, dotted in SETTINGS.get(self._path.name, {}).items():
            owner = self._vllm.find(dotted)
            assert owner is not None, dotted
            for key in _keys_of(self._tree, variable):
                attribute = ast.Attribute(ast.Name(variable), key, lineno=1)
                self._member([owner], attribute)

    # --- results --------------------------------------------------------------------------------

    def _list(self, name: str, definition: Definition) -> None:
        """List a name with what it is, as vLLM's source has it."""
        node = definition.node
        text = "module" if node is None else "variable"
        if isinstance(node, ast.ClassDef):
            text = f"class({', '.join(map(ast.unparse, node.bases))})"
        elif isinstance(node, Function) and is_property(node):
            text = "property"
        elif isinstance(node, Function):
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            text = f"({ast.unparse(node.args)}){result}"
        elif isinstance(node, ast.AnnAssign):
            text = f": {ast.unparse(node.annotation)}"
        self._found.names[name] = text

    def _fault(self, text: str) -> None:
        self._found.faults.append(f"{self._path.name} {text}")


def _keys_of(tree: ast.Module, variable: str) -> set[str]:
    """Return the keys that a dict of this name gets anywhere in a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        target = getattr(node, "target", None)
        targets = node.targets if isinstance(node, ast.Assign) else [target]
        for each in targets:
            if isinstance(each, ast.Name) and each.id == variable and isinstance(value, ast.Dict):
                found |= {str(k.value) for k in value.keys if isinstance(k, ast.Constant)}
            elif isinstance(each, ast.Subscript) and ast.unparse(each.value) == variable:
                found.add(str(ast.literal_eval(each.slice)))
    return found


def _positional(arguments: ast.arguments) -> list[str]:
    return [a.arg for a in [*arguments.posonlyargs, *arguments.args]]


def _callable(definition: Definition | None) -> Definition | None:
    is_one = definition is not None and isinstance(definition.node, ast.ClassDef | Function)
    return definition if is_one else None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
