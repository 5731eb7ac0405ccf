from __future__ import annotations

from unit.scripts.conftest import SCRIPTS, load_file

BAR = 24
"""What the longest chain was before every concept had one home."""


def test_the_longest_chain_is_found_and_a_cycle_counts_as_one() -> None:
    imports = {"a": {"b", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"d"}}
    found = load_file(SCRIPTS / "import_chain.py").longest_chain(imports)
    assert found == [frozenset("a"), frozenset("bc"), frozenset("d")]


def test_ours_is_shorter_than_it_was() -> None:
    script = load_file(SCRIPTS / "import_chain.py")
    chain = script.longest_chain(script.imports_at_load("gracetune"))
    assert 1 < len(chain) < BAR, "\n".join(", ".join(sorted(cycle)) for cycle in chain)
