"""Fail for words that docs/glossary.md rules out, and for public classes of gracetune with the same name.

    python scripts/check_words.py [PATH ...]     part of `make lint`; with paths, only what is below them

The first table of the glossary is the standard, for identifiers and for the phrases of comments, docstrings, messages
and docs. What may stay is listed in scripts/words_allowed.txt with its reason. Words of an interface stay there:
configuration keys, event fields, options of commands.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = "docs/glossary.md"
ALLOWED = "scripts/words_allowed.txt"
PACKAGE = "src/gracetune/"
NOT_OURS = ("tests/unit/overlays/ai_toolkit/standin/", "tests/unit/overlays/simpletuner/standin/", "tests/fixtures/",
            "tests/golden/", "benchmarks/results/", "docs/LOG.md", GLOSSARY, "scripts/check_words.py",
            "tests/unit/scripts/test_check_words.py")  # fmt: skip
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True)
class Glossary:
    words: dict[str, str] = field(default_factory=dict)
    """A word of an identifier, in lower case -> what to use."""
    names: dict[str, str] = field(default_factory=dict)
    """A whole identifier, without leading underscores -> what to use."""
    phrases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    found: str
    expected: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: found {self.found}, expected {self.expected}"


def read_glossary(text: str) -> Glossary:
    """The first table whose header is `say | not | meaning`."""
    glossary = Glossary()
    body = text.partition("| say | not | meaning |")[2].partition("\n\n")[0]
    for row in body.splitlines()[2:]:
        say, banned, *_ = (cell.strip() for cell in row.strip().strip("|").split("|"))
        for word, alone in re.findall(r"`(\w+)`( alone)?", banned):
            (glossary.names if alone or "_" in word else glossary.words)[word] = say
        for phrase in re.findall(r'"([^"]+)"', banned):
            glossary.phrases[phrase.lower()] = say
    return glossary


def definitions(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Each name that the code defines: the name, its line and what it is."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, "function"
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, "parameter"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in imported:
            yield node.id, node.lineno, "variable"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, "attribute"
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno, "variable"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.asname and alias.asname != alias.name:
                    yield alias.asname, node.lineno, "imported name"


def check_name(name: str, glossary: Glossary) -> tuple[str, str] | None:
    """The word that is ruled out and what to say; None for a good name."""
    bare = name.strip("_").lower()
    for banned, say in glossary.names.items():
        if bare == banned or ("_" in banned and banned in bare):
            return banned, say
    for word in WORD.findall(name):
        expected = glossary.words.get(word.lower())
        if expected is not None:
            return word.lower(), expected
    return None


def check_identifiers(file: str, text: str, glossary: Glossary) -> Iterator[Finding]:
    module = Path(file).stem
    bad = check_name(module, glossary) if module != "__init__" else None
    if bad is not None:
        yield Finding(file, 1, f"module `{module}` (`{bad[0]}`)", bad[1], module)
    for name, line, kind in definitions(ast.parse(text)):
        if kind == "function" and name.startswith("test_"):
            continue  # the name of a test is a sentence
        bad = check_name(name, glossary)
        if bad is not None:
            yield Finding(file, line, f"{kind} `{name}` (`{bad[0]}`)", bad[1], name)


def check_classes(sources: dict[str, str]) -> Iterator[Finding]:
    """Public classes of the package whose name another one has."""
    homes: dict[str, list[tuple[str, int]]] = {}
    for file, text in sources.items():
        if file.startswith(PACKAGE):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append((file, node.lineno))
    for name, places in homes.items():
        for file, line in places[1:]:
            other = ":".join(map(str, places[0]))
            yield Finding(file, line, f"class `{name}`", f"a name of its own: {other} has this one", name)


# -- text -------------------------------------------------------------------------------------------------------------


def prose_of(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Lines of comments, docstrings and messages, or of a page without its code.

    Other strings of a test are data: captions, file contents, what a library prints.
    """
    if file.endswith(".md"):
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, line
        return
    only_docstrings = docstring_lines(text) if file.startswith("tests/") else None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_read = only_docstrings is None or token.start[0] in only_docstrings
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string and is_read):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def docstring_lines(text: str) -> set[int]:
    """Where strings stand alone: docstrings, and descriptions below an attribute."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def check_phrases(file: str, text: str, glossary: Glossary) -> Iterator[Finding]:
    if not glossary.phrases:
        return
    # Not "Windows" where "windows" is meant by accident of case: a phrase is written small or begins a sentence.
    spellings = {spelling for phrase in glossary.phrases for spelling in (phrase, phrase[0].upper() + phrase[1:])}
    either = "|".join(re.escape(phrase) for phrase in sorted(spellings, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({either})(?![\w-])")
    for line, prose in prose_of(file, text):
        for match in pattern.finditer(re.sub(r"`[^`]*`|\{[^{}]*\}", "`", prose)):
            phrase = match[1].lower()
            yield Finding(file, line, f'"{match[1]}"', glossary.phrases[phrase], f'"{phrase}"')


# -- files ------------------------------------------------------------------------------------------------------------


def tracked(root: Path, *endings: str) -> dict[str, str]:
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return {
        name: (root / name).read_text(encoding="utf-8")
        for name in dict.fromkeys(listed)
        if name.endswith(endings) and not name.startswith(NOT_OURS) and (root / name).is_file()
    }


def allowed(text: str) -> list[tuple[str, str]]:
    """`path pattern  identifier or "phrase"  reason` in each line."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            row = re.fullmatch(r'(\S+)\s+("[^"]+"|\S+)\s+\S.*', line)
            if row is None:
                raise SystemExit(f"{ALLOWED}:{number}: found no reason, expected `path identifier reason`")
            rows.append((row[1], row[2]))
    return rows


def check(root: Path) -> list[Finding]:
    """What may not stay, in the order of the checks."""
    glossary = read_glossary((root / GLOSSARY).read_text(encoding="utf-8"))
    sources = tracked(root, ".py")
    found = [one for file, text in sources.items() for one in check_identifiers(file, text, glossary)]
    found += check_classes(sources)
    found += [one for file, text in tracked(root, ".py", ".md").items() for one in check_phrases(file, text, glossary)]
    rows = allowed((root / ALLOWED).read_text(encoding="utf-8")) if (root / ALLOWED).is_file() else []
    used: set[tuple[str, str]] = set()
    kept = []
    for one in found:
        permits = [row for row in rows if row[1] == one.name and fnmatch.fnmatchcase(one.file, row[0])]
        used.update(permits)
        if not permits:
            kept.append(one)
    unused = [row for row in rows if row not in used]
    return kept + [Finding(ALLOWED, 0, f"`{' '.join(row)}`", "a line that is needed") for row in unused]


def main(paths: list[str]) -> int:
    below = [path.rstrip("/") for path in paths]
    found = [one for one in check(ROOT) if not below or any(f"{one.file}/".startswith(f"{path}/") for path in below)]
    for one in found:
        print(one)
    if found:
        print(f"{len(found)} words do not follow {GLOSSARY}: change them, or list them in {ALLOWED} with a reason")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
