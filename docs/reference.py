"""Write the page of the public names with their signatures, from the source alone.

The site's hook calls `page`. Nothing is imported but Python's own library, so the site needs
neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTRO = """\
# Every public name

Every public name of TLT with its signature, as the source has it.
[API](api.md) groups the names, and says what each of them promises.
"""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names() -> dict[str, tuple[str, str]]:
    """Return the module of each public name, and what the name is called there."""
    tree = ast.parse((ROOT / "src" / "tlt" / "__init__.py").read_text())
    return {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }


def promised() -> dict[str, list[str]]:
    """Return the methods and attributes that the page of the API promises, by class."""
    found: dict[str, list[str]] = {}
    for name, member in re.findall(r"`(\w+)\.(\w+)`", (ROOT / "docs" / "api.md").read_text()):
        if member not in found.setdefault(name, []):
            found[name].append(member)
    return found


def source(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return ast.parse(file.read_text())


def definition(module: str, name: str) -> ast.stmt:
    """Return the statement that defines a name, wherever a module has it from."""
    for node in source(module).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(target, ast.Name) and target.id == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
    raise LookupError(f"{module} defines no {name}")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return a function's head, on several lines if one is too long."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    given = list(arguments(node.args))
    line = f"{word} {name}({', '.join(given)}){returns}"
    if len(line) < 90:
        return line
    lines = "".join(f"    {each},\n" for each in given)
    return f"{word} {name}(\n{lines}){returns}"


def arguments(args: ast.arguments) -> Iterator[str]:
    """Return the arguments of a function one by one, as the source has them."""
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    for argument, default in zip(plain, [*defaults, *args.defaults], strict=True):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if args.vararg:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a class, with the names of settings left to their own page."""
    return [
        ast.unparse(each)
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not each.target.id.startswith("_")
    ]


def methods(module: str, node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the methods of a class, and those of its bases that TLT defines."""
    found: dict[str, ast.stmt] = {}
    for base in node.bases:
        try:
            above = definition(module, ast.unparse(base))
        except (LookupError, FileNotFoundError):
            continue  # a class of another library
        if isinstance(above, ast.ClassDef):
            found |= methods(module, above)
    return found | {each.name: each for each in node.body if isinstance(each, Definition)}


def code(name: str, module: str, node: ast.stmt, members: list[str]) -> str:
    """Return what a reader needs of a definition: heads, fields and promised methods."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return signature(node, name)
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {ast.unparse(node.annotation)}"
    if not isinstance(node, ast.ClassDef):
        return ast.unparse(node)
    has = methods(module, node)
    if "Protocol" in map(ast.unparse, node.bases):
        members = members or [each for each in has if not each.startswith("_")]
    lines = fields(node)
    for member in ("__init__", *members):
        method = has.get(member)
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue  # a field, or a class that needs no `__init__`
        decorators = [f"@{ast.unparse(each)}" for each in method.decorator_list]
        text = "\n".join([*decorators, signature(method, member)])
        said = (inspect.cleandoc(ast.get_docstring(method) or "").split("\n\n")[0]).split("\n")
        lines.append(text + (f"\n    # {' '.join(said)}" if said != [""] else ""))
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {name}({bases})" if bases else f"class {name}"
    body = "\n".join(lines).replace("\n", "\n    ")
    return f"{head}\n    {body}" if lines else head


def page() -> str:
    """Return the page, in Markdown."""
    parts = [INTRO]
    members = promised()
    for name, (module, there) in sorted(names().items(), key=lambda item: item[0].lower()):
        node = definition(module, there)
        said = (ast.get_docstring(node) if isinstance(node, Definition) else "") or ""
        if name.endswith("Config"):
            more = "[Settings](configuration.md) lists its fields."
        else:
            more = f"```python\n{code(name, module, node, members.get(name, []))}\n```"
        text = f"{said}\n\n{more}".strip()
        parts.append(f"## {name}\n{text}\n")
    return "\n".join(parts)
