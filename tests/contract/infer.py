"""Classes of vLLM that a value belongs to, by vLLM's own annotations."""

from __future__ import annotations

import ast

from contract.roles import ROLES
from contract.sources import Definition, Function, Sources, is_property


def types_of_members(vllm: Sources, owners: list[Definition], name: str) -> list[Definition]:
    """Return the classes that a member of these classes belongs to, by vLLM's annotations."""
    found: list[Definition] = []
    for owner in owners:
        member = vllm.member(owner, name)
        if member is None:
            continue
        cls, node = member
        if isinstance(node, Function):
            found += annotated(vllm, cls.module, node.returns) if is_property(node) else []
        elif isinstance(node, ast.AnnAssign):
            found += annotated(vllm, cls.module, node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found += annotated(vllm, cls.module, node.value.func)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            found += _role_of(vllm, node.value)
    return [d for place, d in enumerate(found) if d not in found[:place]]


def _role_of(vllm: Sources, value: ast.Name | ast.Attribute) -> list[Definition]:
    name = value.id if isinstance(value, ast.Name) else value.attr
    found = [vllm.find(dotted) for dotted in ROLES.get(name, ())]
    if not found and name.endswith("_config"):
        config = vllm.find("vllm.config.vllm.VllmConfig")
        assert config is not None
        return types_of_members(vllm, [config], name)
    return [d for d in found if d is not None]


def annotated(vllm: Sources, module: str, node: ast.expr | None) -> list[Definition]:
    """Return the classes that an annotation names, without those inside brackets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        return [*annotated(vllm, module, node.left), *annotated(vllm, module, node.right)]
    if not isinstance(node, ast.Name):
        return []
    definition = vllm.named(module, node.id)
    return classes(definition)


def classes(definition: Definition | None) -> list[Definition]:
    """Return a definition in a list if it is a class; an empty list otherwise."""
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        return []
    return [definition]
