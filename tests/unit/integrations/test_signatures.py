"""Whether a function still takes our calls, judged by its parameters alone."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import BoundArguments, Parameter, Signature
from itertools import chain, combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gracetune.integrations.signatures import (
    KEYWORD_ONLY,
    KEYWORDS,
    NORMAL,
    POSITIONAL_ONLY,
    REST,
    SignatureError,
    differences,
    parameters_text,
    parse,
)

NAMES = ("a", "b", "c", "d")


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    kinds = sorted(draw(st.lists(st.sampled_from([POSITIONAL_ONLY, NORMAL, KEYWORD_ONLY]),
                                 min_size=len(names), max_size=len(names))))  # fmt: skip
    parameters: list[Parameter] = []
    optional = False
    for name, kind in zip(names, kinds, strict=True):
        # After one with a default, those that can be given by position have one too.
        wants = draw(st.booleans())
        optional = wants or (optional and kind is not KEYWORD_ONLY)
        parameters.append(Parameter(name, kind, default=... if optional else Parameter.empty))
    if draw(st.booleans()):
        at = next((at for at, one in enumerate(parameters) if one.kind is KEYWORD_ONLY), len(parameters))
        parameters.insert(at, Parameter("rest", REST))
    if draw(st.booleans()):
        parameters.append(Parameter("more", KEYWORDS))
    return Signature(parameters)


def calls(signature: Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Every way of calling it that differs: how many by position, which by name, and what is left over."""
    by_position = [one.name for one in signature.parameters.values() if one.kind in (POSITIONAL_ONLY, NORMAL)]
    by_name = [one.name for one in signature.parameters.values() if one.kind in (NORMAL, KEYWORD_ONLY)]
    extra = ["extra"] * (len(NAMES) + 1 if "rest" in signature.parameters else 0)  # more than any other could name
    subsets = list(chain.from_iterable(combinations(by_name, size) for size in range(len(by_name) + 1)))
    for count in range(len(by_position) + len(extra) + 1):
        # The value says whose it is, so that one that lands elsewhere is seen.
        values = [*by_position, *extra][:count]
        for names in subsets:
            named = {name: name for name in names}
            yield values, named
            if "more" in signature.parameters:
                yield values, {**named, "unknown": "extra"}


def bound(signature: Signature, values: list[str], named: dict[str, str]) -> BoundArguments | None:
    try:
        return signature.bind(*values, **named)
    except TypeError:
        return None


def takes_every_call(expected: Signature, found: Signature) -> bool:
    for values, named in calls(expected):
        if bound(expected, values, named) is None:
            continue
        current = bound(found, values, named)
        if current is None:
            return False
        for name, value in current.arguments.items():
            kind = found.parameters[name].kind
            if kind in (REST, KEYWORDS):
                swallowed = [*value.values()] if kind is KEYWORDS else [*value]
                if any(one in found.parameters for one in swallowed):
                    return False  # it has that parameter, and the value went past it
            elif value not in ("extra", name):
                return False
    return True


class TestDifferences:
    @given(signatures(), signatures())
    @settings(max_examples=120)
    @example(parse("a, b=..."), parse("a, *rest, b=..."))
    @example(parse("a"), parse("a, /, **more"))
    @example(parse("*rest, a"), parse("a"))
    @example(parse("*rest, a"), parse("a, *rest"))
    @example(parse("a, b"), parse("*rest, **more"))
    @example(parse("a=..."), parse("a"))
    def test_are_none_exactly_when_every_call_still_lands_where_it_did(
        self, expected: Signature, found: Signature
    ) -> None:
        assert (not differences(expected, found)) == takes_every_call(expected, found), differences(expected, found)

    @given(signatures())
    @settings(max_examples=40)
    def test_are_none_to_itself(self, signature: Signature) -> None:
        assert differences(signature, signature) == ()

    @pytest.mark.parametrize(
        ("expected", "found", "stated"),
        [
            ("self, batch", "self, batch, step=...", ()),
            ("self, batch", "self, *args, **kwargs", ()),
            ("self, batch", "self, samples", ("batch was removed", "samples is new and required")),
            ("self, batch", "self", ("batch was removed",)),
            ("self, batch", "self, batch, step", ("step is new and required",)),
            ("self, batch", "self, *, batch", ("batch is keyword-only now",)),
            ("self, a, b", "self, b, a", ("a has another position", "b has another position")),
            ("self, suffix=...", "self, suffix", ("suffix is required now",)),
            ("path", "path, /", ("path cannot be given by name",)),
            ("self, **kwargs", "self", ("takes no **kwargs any more",)),
            ("self, *args", "self", ("takes no *args any more",)),
        ],
    )
    def test_are_said_by_name(self, expected: str, found: str, stated: tuple[str, ...]) -> None:
        assert differences(parse(expected), parse(found)) == stated


class TestText:
    @given(signatures())
    @settings(max_examples=40)
    def test_what_is_shown_is_read_back(self, signature: Signature) -> None:
        assert parse(parameters_text(signature)) == signature

    @pytest.mark.parametrize("text", ["a,,b", "a): pass\ndef g(", "a=", "1", "a, a", "a\0"])
    def test_what_is_no_parameter_list_is_rejected(self, text: str) -> None:
        with pytest.raises(SignatureError, match="not a parameter list"):
            parse(text)
