"""Whatever a file holds, reading it ends in a RunConfig or in our own error: in two seconds and 300 MB at most.

`measured_reading.py` reads each in a process of its own. Seconds are those of the CPU: other tests run beside these.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from gracetune.config import Environment, load
from gracetune.config.limits import LARGEST_FILE
from gracetune.errors import ConfigError
from unit.config.aitoolkit_jobs import job
from unit.config.hostile_files import OURS, hostile_files
from unit.config.simpletuner_files import GOOD
from unit.config.test_simpletuner_mutations import DATASETS, RICH

MOST_SECONDS, MOST_KIB = 2.0, 300 * 1000
REPOSITORY = Path(__file__).parents[3]
WORST = (
    "json-007", "json-014", "json-066", "yaml-104", "yaml-106", "yaml-107", "yaml-124", "yaml-138", "toml-000",
    "toml-003", "env-001", "env-048", "data_backend_config-018",
)  # fmt: skip
"""Those that took longest before there were limits, one for each reason."""


def measured(paths: Iterable[Path]) -> list[str]:
    """What is wrong with how these files were read."""
    script = Path(__file__).with_name("measured_reading.py")
    names = "\n".join(map(str, paths))
    done = subprocess.run([sys.executable, str(script)], input=names, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(names.splitlines())
    return [
        f"{Path(row['file']).name}: {row['cpu']:.2f} s, {row['kib']:,} KiB, {row['outcome']}"
        for row in rows
        if row["cpu"] > MOST_SECONDS or row["kib"] > MOST_KIB or row["outcome"] not in ("read", "refused")
    ]


def write(folder: Path, files: Iterable[tuple[str, str]]) -> list[Path]:
    """The configs among them."""
    paths = []
    for name, text in files:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        paths.append(path)
    return [path for path in paths if path.name != "named.json"]


def test_the_worst_hostile_files(tmp_path: Path) -> None:
    chosen = [(name, text) for name, text in hostile_files() if name.startswith(WORST)]
    assert len({name.partition("/")[0] for name, _ in chosen}) >= len(WORST)
    assert measured(write(tmp_path, chosen)) == []


@pytest.mark.full
def test_all_hostile_files(tmp_path: Path) -> None:
    assert measured(write(tmp_path, hostile_files())) == []


# -- files of ours, changed at random ---------------------------------------------------------------------------------

SPLICES = (
    "[", "]", "{", "}", "\"", "'", "\\", "\n", " ", "\t", ":", ",", "-", "--", "#", "//", "/*", "*/", "&a ", "*a",
    "<<: ", "!!", "|\n", "? ", "${A}", "${", "{env:A}", "{id}", "[name]", "$A", "=", ".", "\x00", "\ufeff", "é",
    "\u2028", "1e999", "9" * 5000, "0x" + "f" * 300, "1:59:59", "null", "true", "---\n", "%YAML 9\n", '"""', "'''",
    "\r", "\x85",
)  # fmt: skip


def sources() -> list[tuple[str, str]]:
    """Suffix and text of configs in every format and dialect."""
    files = [*REPOSITORY.glob("examples/*.*"), *REPOSITORY.glob("config/examples/**/*.*")]
    found = [(path.suffix, path.read_text()) for path in sorted(files) if path.suffix in (".json", ".yaml", ".toml")]
    env = "".join(f"{name.upper()}='{value}'\n" for name, value in GOOD.items() if isinstance(value, str))
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in GOOD.items())
    rest = [(".json", json.dumps(one)) for one in (RICH, {**GOOD, "datasets": DATASETS}, job())]
    return [*found, *rest, (".env", env), (".toml", toml), (".yaml", OURS)]


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 5))):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        chunk = text[start : min(end, start + rng.choice((1, 10, 200)))]
        many = rng.choice((1, 2, 50, 5_000, 200_000))
        splice = rng.choice((rng.choice(SPLICES), chunk, chunk[::-1]))
        splice = (splice * many)[: rng.choice((100, 10_000, LARGEST_FILE))]
        kept = rng.choice((start, start + len(chunk), end))
        text = (text[:start] + splice + text[kept:])[: 2 * LARGEST_FILE]
    return text


def fuzzed(count: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    texts = sources()
    chosen = [rng.choice(texts) for _ in range(count)]
    return [(f"{seed}-{number}{suffix}", mutated(text, rng)) for number, (suffix, text) in enumerate(chosen)]


def test_sources_are_of_every_format() -> None:
    assert {suffix for suffix, _ in sources()} == {".json", ".yaml", ".toml", ".env"}


def test_files_changed_at_random(tmp_path: Path) -> None:
    assert measured(write(tmp_path, fuzzed(40, seed=1))) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_files_changed_at_random(tmp_path: Path, seed: int) -> None:
    assert measured(write(tmp_path, fuzzed(500, seed))) == []


# -- what is no text in a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.max_steps=" + "[" * 30_000],
        ["training.max_steps=" + "[1," * 10_000],
        ["a" + ".a" * 16_000 + "=1"],
        ["a" * 400_000 + "=1"],
        ["name=" + "x" * 400_000],
        ["datasets[" + "9" * 5_000 + "]=1"],
        ["training.max_steps=1" + ":59" * 10_000],
        ["training.max_steps=!!float 1" + ":59" * 10_000],
        [f"training.max_step{number}=1" for number in range(10_000)],
        [f"datasets[0].resolutoin{number}=1" for number in range(3_000)],
        ["x=" + "&a [" * 1_000 + "*a" + "]" * 1_000],
    ],
    ids=range(11),
)
def test_flags(tmp_path: Path, overrides: Sequence[str]) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OURS)
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({}), overrides=overrides)
    assert time.process_time() - began < MOST_SECONDS
    assert all(one.found and one.expected and one.hint for one in caught.value.problems)
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize("device", ["zero", "random"])
def test_a_device_is_not_read_to_its_end(tmp_path: Path, device: str) -> None:
    path = tmp_path / f"{device}.yaml"
    path.symlink_to(f"/dev/{device}")
    with pytest.raises(ConfigError, match="more than 512 KiB of text"):
        load(path, environment=Environment({}))


def test_a_file_that_is_something_else_is_not_listed_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text(OURS + "".join(f"key_{number}: 1\n" for number in range(1_000)))
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({}))
    *listed, last = caught.value.problems
    assert len(listed) == 200
    assert (last.key, last.found) == ("(file)", "more than 200 problems")
