"""Function signatures read from source: parse them, print them, and check whether a changed one still takes our
calls."""

from __future__ import annotations

import ast
from inspect import Parameter, Signature

from gracetune.errors import GracetuneError

POSITIONAL_ONLY = Parameter.POSITIONAL_ONLY
NORMAL = Parameter.POSITIONAL_OR_KEYWORD
REST = Parameter.VAR_POSITIONAL
KEYWORD_ONLY = Parameter.KEYWORD_ONLY
KEYWORDS = Parameter.VAR_KEYWORD


class SignatureError(GracetuneError):
    """A text is not a valid parameter list."""


def of_arguments(arguments: ast.arguments) -> Signature:
    """The signature of a `def`. Default values are replaced by `...`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [
        _parameter(
            one.arg, POSITIONAL_ONLY if at < len(arguments.posonlyargs) else NORMAL, optional=at >= first_default
        )
        for at, one in enumerate(positional)
    ]
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg.arg, REST, optional=False))
    found += [
        _parameter(one.arg, KEYWORD_ONLY, optional=default is not None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg.arg, KEYWORDS, optional=False))
    return Signature(found)


def parse(text: str) -> Signature:
    """Parse a parameter list such as `self, path, mode=..., *, quiet=..., **rest`."""
    try:
        body = ast.parse(f"def f({text}): ...").body
        if len(body) == 1 and isinstance(body[0], ast.FunctionDef):
            return of_arguments(body[0].args)
    except (SyntaxError, ValueError) as error:
        raise SignatureError(f"not a parameter list: {text!r}: {error}") from error
    raise SignatureError(f"not a parameter list: {text!r}")


def parameters_text(signature: Signature) -> str:
    """The parameter list as text that `parse` reads back."""
    words: list[str] = []
    parameters = list(signature.parameters.values())
    for at, one in enumerate(parameters):
        before = parameters[at - 1].kind if at else None
        if before is POSITIONAL_ONLY and one.kind is not POSITIONAL_ONLY:
            words.append("/")
        if one.kind is KEYWORD_ONLY and before not in (KEYWORD_ONLY, REST):
            words.append("*")
        stars = "*" if one.kind is REST else "**" if one.kind is KEYWORDS else ""
        words.append(f"{stars}{one.name}{'' if one.default is Parameter.empty else '=...'}")
    if parameters and parameters[-1].kind is POSITIONAL_ONLY:
        words.append("/")
    return ", ".join(words)


def differences(expected: Signature, found: Signature) -> tuple[str, ...]:
    """Reasons why a call that `expected` accepts may fail with `found`, or bind a value to another parameter.

    New parameters with a default are not a difference. No reasons mean that every such call still works.
    """
    theirs = found.parameters
    reasons = [*_lost_rests(expected, found)]
    positions = [one.name for one in theirs.values() if one.kind in (POSITIONAL_ONLY, NORMAL)]
    takes_rest = _has(found, REST)
    takes_keywords = _has(found, KEYWORDS)
    at = -1
    for one in expected.parameters.values():
        if one.kind in (REST, KEYWORDS):
            continue
        current = theirs.get(one.name)
        named = current is not None and current.kind not in (REST, KEYWORDS)
        if one.kind in (POSITIONAL_ONLY, NORMAL):
            at += 1
            by_position = positions[at] == one.name if at < len(positions) else takes_rest and not named
            if not by_position:
                reasons.append(_misplaced(one.name, current if named else None))
                continue
        if one.kind in (NORMAL, KEYWORD_ONLY):
            by_keyword = named and current is not None and current.kind in (NORMAL, KEYWORD_ONLY)
            if not by_keyword and not (takes_keywords and not named):
                reasons.append(f"{one.name} cannot be given by name" if named else f"{one.name} was removed")
                continue
        if named and current is not None and _required(current) and not _required(one):
            reasons.append(f"{one.name} is required now")
    reasons += [
        f"{one.name} is new and required"
        for one in theirs.values()
        if _required(one) and not _names(expected, one.name)
    ]
    if _has(expected, REST):
        late = positions[at + 1 :]
        reasons += [f"{name} takes its place in *args" for name in late if _names(expected, name)]
    return tuple(dict.fromkeys(reasons))


def _parameter(name: str, kind: object, *, optional: bool) -> Parameter:
    return Parameter(name, kind, default=... if optional else Parameter.empty)  # type: ignore[arg-type]  # an enum without a public name


def _has(signature: Signature, kind: object) -> bool:
    return any(one.kind is kind for one in signature.parameters.values())


def _names(signature: Signature, name: str) -> bool:
    one = signature.parameters.get(name)
    return one is not None and one.kind not in (REST, KEYWORDS)


def _required(one: Parameter) -> bool:
    return one.default is Parameter.empty and one.kind not in (REST, KEYWORDS)


def _lost_rests(expected: Signature, found: Signature) -> list[str]:
    lost = []
    if _has(expected, REST) and not _has(found, REST):
        lost.append("takes no *args any more")
    if _has(expected, KEYWORDS) and not _has(found, KEYWORDS):
        lost.append("takes no **kwargs any more")
    return lost


def _misplaced(name: str, current: Parameter | None) -> str:
    if current is None:
        return f"{name} was removed"
    return f"{name} is keyword-only now" if current.kind is KEYWORD_ONLY else f"{name} has another position"
