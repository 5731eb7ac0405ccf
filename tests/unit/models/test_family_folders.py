"""A family is one folder: its names occur nowhere else, and every folder has the same files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune.config.families import FAMILIES, PACKAGES, names_of

SOURCE = Path(__file__).resolve().parents[3] / "src" / "gracetune"
OURS = tuple(family for family in FAMILIES if not PACKAGES.is_installed(family))
FILES = {"names", "spec", "load", "encode", "predict", "footprint", "geometry", "published", "keys", "tiny"}

ALLOWED = {
    "config/families.py": "the list of our folders",
    "config/dialects/aitoolkit/model.py": "stands in for an unknown arch, so that the other keys are still checked",
    "data/copies/splits.py": "`dev` is a name of a split as well",
    "train/demo.py": "what the demo trains",
    "train/demo_wan.py": "what the demo trains with --wan",
}
"""Files that name a family, with the reason. Benches may as well: they say what they measure."""


OTHER_MEANING = {"proposal": {"edit"}, "adapters": {"base"}, "hardware": {"raw"}}
"""Folder -> words that are also flavours: `edit` is a purpose of training there, `base` the model under an adapter,
`raw` a value as the driver returned it."""


def words_of_families() -> set[str]:
    """Families, flavours, and what the peers call either."""
    found = set(OURS)
    for names in map(names_of, OURS):
        found |= {flavour.name for flavour in names.flavours}
        found |= set(names.simpletuner.flavours) | set(names.simpletuner.untrained_flavours)
        found |= set(names.aitoolkit.archs)
    return found


def is_bench(path: Path) -> bool:
    return any(part == "bench" or part.startswith("bench_") or part.endswith("_bench") for part in path.parts)


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).with_suffix(""), ast.parse(path.read_text(encoding="utf-8"))


def test_no_code_outside_a_familys_folder_knows_its_name() -> None:
    words, found = words_of_families(), set()
    for path, tree in modules():
        if (path.parts[0] == "models" and path.parts[1] in OURS) or is_bench(path):
            continue
        names = words - OTHER_MEANING.get(path.parts[0], set())
        if any(isinstance(node, ast.Constant) and node.value in names for node in ast.walk(tree)):
            found.add(f"{path}.py")
    assert found == set(ALLOWED)


def test_names_are_neither_compared_nor_looked_up_where_they_are_allowed() -> None:
    """The files above may name a family but not branch on its name."""
    for path, tree in modules():
        if f"{path}.py" not in ALLOWED:
            continue
        compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
        words = [node.value for one in compared for node in ast.walk(one) if isinstance(node, ast.Constant)]
        assert not words_of_families() & set(words), path


@pytest.mark.parametrize("family", OURS)
def test_every_folder_has_the_same_files(family: str) -> None:
    found = {path.stem for path in (SOURCE / "models" / family).glob("*.py")}
    assert not FILES - found


@pytest.mark.parametrize("family", OURS)
def test_names_import_only_config_and_errors(family: str) -> None:
    """Importing them imports no torch, because config reads them before any model code is needed."""
    for file in ("names.py", "__init__.py", "../__init__.py"):
        tree = ast.parse((SOURCE / "models" / family / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Import)
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").startswith(("gracetune.config.", "gracetune.errors", "__future__"))


@pytest.mark.parametrize("family", OURS)
def test_names_agree_with_each_other(family: str) -> None:
    names = names_of(family)
    flavours = {flavour.name for flavour in names.flavours}
    peer = names.simpletuner
    assert names.family == family
    assert set(peer.flavours.values()) <= flavours
    assert {*peer.rejected_flavours, *peer.forced_expert_shifts, *peer.flavours_without_shift} <= flavours
    assert not set(peer.untrained_flavours) & (flavours | set(peer.flavours))
    assert peer.default_flavour is None or peer.default_flavour in {*flavours, *peer.flavours, *peer.untrained_flavours}
    for arch in names.aitoolkit.archs.values():
        assert set(arch.flavours) <= flavours
        assert set(arch.tags.values()) <= set(arch.flavours)
