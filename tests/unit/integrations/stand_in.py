"""An upstream's tree made from recorded facts: its names and parameters with nothing in them, for tests to break."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gracetune.integrations.facts import Definition, DefinitionKind, UpstreamFacts, UpstreamModule, read_facts
from gracetune.integrations.signatures import parameters_text

RECORDED = Path(__file__).parents[2] / "golden" / "upstream"


@cache
def recorded(name: str) -> UpstreamFacts:
    return read_facts(RECORDED / f"{name}.json")


def build(facts: UpstreamFacts, root: Path) -> Path:
    for file, module in facts.modules.items():
        place = root / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source(module))
    return root


def source(module: UpstreamModule) -> str:
    lines = [f"from somewhere import {name}" for name in module.imports]
    for name, one in module.definitions.items():
        if "." not in name:
            lines += _lines(name, one, module, "")
    return "\n".join(lines) + "\n"


def _lines(name: str, one: Definition, module: UpstreamModule, indent: str) -> list[str]:
    last = name.rpartition(".")[2]
    if one.kind is DefinitionKind.VALUE:
        return [f"{indent}{last} = None"]
    if one.kind is DefinitionKind.CLASS:
        lines = [f"{indent}class {last}({', '.join(one.bases)}):", f"{indent}    pass"]
        for other, inner in module.definitions.items():
            if other.rpartition(".")[0] == name:
                lines += _lines(other, inner, module, f"{indent}    ")
        return lines
    decorator = [f"{indent}@property"] if one.kind is DefinitionKind.PROPERTY else []
    word = "async def" if one.kind is DefinitionKind.ASYNC_FUNCTION else "def"
    parameters = "*args, **kwargs" if one.signature is None else parameters_text(one.signature)
    calls = [f"{indent}    self.{call}()" for call, _ in sorted(one.calls.items(), key=lambda item: item[1])]
    return [*decorator, f"{indent}{word} {last}({parameters}):", *(calls or [f"{indent}    pass"])]
