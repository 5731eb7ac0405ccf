"""Recorded versions of upstreams, and what the check says of code that changed in one place."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from gracetune.integrations.check import Finding, Status, UpstreamReport, check
from gracetune.integrations.facts import FactsError, UpstreamFacts, read_facts, write_facts
from gracetune.integrations.points import Point, Upstream
from gracetune.integrations.survey import narrow_facts, survey
from gracetune.integrations.trees import open_tree
from gracetune.integrations.upstreams import AI_TOOLKIT, SIMPLETUNER, UPSTREAMS
from unit.integrations.stand_in import RECORDED, build, recorded

MISSING = Status.MISSING
NO_SOUND = {"audio.video_name": MISSING, "audio.from_video": MISSING, "vae_cache.audio": MISSING}
NOT_YET = dict.fromkeys(
    ("trainer.end_of_step", "embeddings.cache_all", "embeddings.path", "embeddings.read", "embeddings.write",
     "optimizer.automagic", "wan22.save_lora", "wan22.load_lora", "wan22.experts"),
    MISSING,
)  # fmt: skip
GOLDEN: dict[str, tuple[bool, dict[str, Status]]] = {
    # Whether the overlay can attach, and every point that is not simply there.
    "simpletuner-4.10.1": (True, {}),
    "simpletuner-4.8.0": (True, {}),
    "simpletuner-4.4.1": (True, {}),
    "simpletuner-4.0.6": (True, {}),
    "simpletuner-3.3.4": (False, NO_SOUND),
    "simpletuner-3.1.6": (False, {**NO_SOUND, "text_cache.active": MISSING}),
    "ai-toolkit-public-files": (True, {}),
    "ai-toolkit-0.2.7": (False, NOT_YET),
}
TRAINER = "simpletuner/helpers/training/trainer.py"
LOCAL = "simpletuner/helpers/data_backend/local.py"


def upstream_of(facts: UpstreamFacts) -> Upstream:
    return UPSTREAMS[facts.upstream]


def checked(root: Path, upstream: Upstream = SIMPLETUNER) -> UpstreamReport:
    with open_tree(upstream, root) as (tree, origin):
        return check(survey(tree, upstream, origin), upstream.points)


def finding(report: UpstreamReport, name: str) -> Finding:
    return next(one for one in report.findings if one.point.name == name)


def others_are_present(report: UpstreamReport, *names: str) -> bool:
    return all(one.status is Status.PRESENT for one in report.findings if one.point.name not in names)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """SimpleTuner 4.10.1 with nothing in its functions."""
    return build(recorded("simpletuner-4.10.1"), tmp_path / "upstream")


def change(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the stand-in"
    (root / file).write_text(text.replace(old, new))


class TestRecordedVersions:
    def test_each_has_its_row(self) -> None:
        existing = {file.stem for file in RECORDED.glob("*.json") if not file.stem.endswith("-hooks")}
        assert existing == set(GOLDEN)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_say_what_they_always_said(self, name: str) -> None:
        facts = recorded(name)
        report = check(facts, upstream_of(facts).points)
        ok, differing = GOLDEN[name]
        found = {one.point.name: one.status for one in report.findings if one.status is not Status.PRESENT}
        assert (report.ok, found) == (ok, differing)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_code_with_those_names_says_the_same(self, name: str, tmp_path: Path) -> None:
        facts = recorded(name)
        report = checked(build(facts, tmp_path), upstream_of(facts))
        expected = check(facts, upstream_of(facts).points)
        assert [(one.point.name, one.status, one.file) for one in report.findings] == [
            (one.point.name, one.status, one.file) for one in expected.findings
        ]

    @pytest.mark.parametrize("name", [name for name in GOLDEN if name != "ai-toolkit-public-files"])
    def test_whatever_is_there_has_a_file_and_a_line(self, name: str) -> None:
        facts = recorded(name)
        for one in check(facts, upstream_of(facts).points).findings:
            if one.status is not Status.MISSING:
                assert one.file in facts.modules
                assert one.line is not None
                assert one.line >= 1

    @pytest.mark.parametrize("name", GOLDEN)
    def test_hold_no_text_of_upstream(self, name: str) -> None:
        """Names, parameters, lines: nothing long enough to be a sentence but our own note on where it is from."""
        facts = recorded(name)
        for file, module in facts.modules.items():
            assert " " not in file
            for definition, one in module.definitions.items():
                assert " " not in definition
                assert all(value.default in (..., value.empty) and value.annotation is value.empty
                           for value in (one.signature.parameters.values() if one.signature else ()))  # fmt: skip

    def test_one_from_before_a_point_was_added_is_rejected(self) -> None:
        facts = recorded("simpletuner-4.10.1")
        with pytest.raises(FactsError, match=r"simpletuner\.new:Name"):
            check(facts, [*SIMPLETUNER.points, Point("new", "something", "simpletuner.new", "Name")])

    def test_survive_being_written_and_read(self, tmp_path: Path) -> None:
        facts = recorded("simpletuner-4.10.1")
        write_facts(facts, tmp_path / "facts.json")
        assert read_facts(tmp_path / "facts.json") == facts

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"facts": 2}', '{"facts": 1}', '{"facts": 1, "modules": []}', "\ud800", "nonsense"]
    )
    def test_damaged_ones_are_rejected(self, text: str, tmp_path: Path) -> None:
        file = tmp_path / "facts.json"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(FactsError, match=r"facts\.json"):
            read_facts(file)


class TestPoints:
    @pytest.mark.parametrize("upstream", UPSTREAMS.values(), ids=lambda one: one.name)
    def test_have_names_of_their_own(self, upstream: Upstream) -> None:
        names = [point.name for point in upstream.points]
        assert len(set(names)) == len(names)
        assert all(point.needed_for for point in upstream.points)
        assert all(point.signature is not None for point in upstream.points if point.parameters is not None)

    def test_narrowing_keeps_every_answer(self, tree: Path) -> None:
        (tree / "simpletuner/unrelated.py").write_text("def unrelated(): ...\n")
        change(tree, LOCAL, "class LocalDataBackend(BaseDataBackend):", "class LocalDataBackend(Shared):")
        change(tree, LOCAL, "def write(self", "def scribble(self")
        (tree / "simpletuner/shared.py").write_text(
            "class Shared(Below): pass\nclass Below:\n    def write(self, filepath, data): ...\n"
        )
        with open_tree(SIMPLETUNER, tree) as (opened_tree, origin):
            whole = survey(opened_tree, SIMPLETUNER, origin)
        kept = narrow_facts(whole, SIMPLETUNER.points)
        assert "simpletuner/unrelated.py" in whole.modules
        assert "simpletuner/unrelated.py" not in kept.modules
        assert check(kept, SIMPLETUNER.points).findings == check(whole, SIMPLETUNER.points).findings
        assert finding(check(kept, SIMPLETUNER.points), "data.write").file == "simpletuner/shared.py"


class TestChanges:
    def test_unchanged_code_has_everything(self, tree: Path) -> None:
        report = checked(tree)
        assert report.ok
        assert others_are_present(report)

    def test_a_renamed_method_is_missing(self, tree: Path) -> None:
        change(tree, TRAINER, "def prepare_batch(", "def ready_batch(")
        report = checked(tree)
        one = finding(report, "trainer.prepare_batch")
        assert (one.status, one.file, report.ok) == (Status.MISSING, TRAINER, False)
        assert "class Trainer is there without it" in one.detail
        assert others_are_present(report, "trainer.prepare_batch")

    def test_a_renamed_method_nothing_needs_is_no_failure(self, tree: Path) -> None:
        change(tree, TRAINER, "def init_hooks(", "def setup_hooks(")
        report = checked(tree)
        assert finding(report, "trainer.init_hooks").status is Status.MISSING
        assert report.ok

    def test_a_lost_parameter_is_a_changed_signature(self, tree: Path) -> None:
        change(tree, LOCAL, "def torch_save(self, data, original_location)", "def torch_save(self, data)")
        report = checked(tree)
        one = finding(report, "data.torch_save")
        assert (one.status, one.detail, report.ok) == (Status.CHANGED, "original_location was removed", False)
        assert others_are_present(report, "data.torch_save")

    def test_a_new_required_parameter_is_a_changed_signature(self, tree: Path) -> None:
        change(tree, LOCAL, "def torch_load(self, filename)", "def torch_load(self, filename, device, dtype=None)")
        one = finding(checked(tree), "data.torch_load")
        assert (one.status, one.detail) == (Status.CHANGED, "device is new and required")

    def test_a_new_optional_parameter_is_no_change(self, tree: Path) -> None:
        change(tree, LOCAL, "def torch_load(self, filename)", "def torch_load(self, filename, device=None, **more)")
        assert others_are_present(checked(tree))

    def test_a_method_made_a_property_or_async_is_changed(self, tree: Path) -> None:
        change(tree, TRAINER, "    def train(self):", "    async def train(self):")
        change(tree, TRAINER, "    def resume_and_prepare(", "    @property\n    def resume_and_prepare(")
        report = checked(tree)
        assert finding(report, "trainer.train").detail == "is an async function now"
        assert finding(report, "trainer.resume_and_prepare").detail == "is a property now"
        assert not report.ok

    def test_a_moved_module_is_found_and_said_to_be_out_of_reach(self, tree: Path) -> None:
        (tree / "simpletuner/engine").mkdir()
        (tree / TRAINER).rename(tree / "simpletuner/engine/trainer.py")
        report = checked(tree)
        one = finding(report, "trainer.prepare_batch")
        assert (one.status, one.file, one.reachable) == (Status.MOVED, "simpletuner/engine/trainer.py", False)
        assert one.line is not None
        assert finding(report, "trainer.module").status is Status.MOVED
        assert not report.ok  # no hook finds it there
        assert others_are_present(
            report, *(one.point.name for one in report.findings if one.point.module.endswith("trainer"))
        )

    def test_a_moved_module_of_another_name_is_found_by_what_is_in_it(self, tree: Path) -> None:
        (tree / TRAINER).rename(tree / "simpletuner/loop.py")
        report = checked(tree)
        assert finding(report, "trainer.train").file == "simpletuner/loop.py"
        assert finding(report, "trainer.module").status is Status.MISSING
        assert not report.ok

    def test_a_moved_class_that_the_old_module_imports_is_within_reach(self, tree: Path) -> None:
        (tree / TRAINER).rename(tree / "simpletuner/engine.py")
        (tree / TRAINER).write_text("from simpletuner.engine import Trainer\n")
        report = checked(tree)
        one = finding(report, "trainer.prepare_batch")
        assert (one.status, one.file, one.reachable) == (Status.MOVED, "simpletuner/engine.py", True)
        assert TRAINER in one.detail
        assert report.ok

    def test_a_method_that_only_a_namesake_has_is_out_of_reach(self, tree: Path) -> None:
        change(tree, LOCAL, "class LocalDataBackend(BaseDataBackend):", "class LocalDataBackend:")
        change(tree, LOCAL, "def write(self", "def scribble(self")
        namesake = "class LocalDataBackend:\n    def write(self, filepath, data): ...\n"
        (tree / "simpletuner/other.py").write_text(namesake)
        report = checked(tree)
        one = finding(report, "data.write")
        assert (one.status, one.file, one.reachable) == (Status.MOVED, "simpletuner/other.py", False)
        assert not report.ok

    def test_what_nothing_needs_may_go_out_of_reach(self, tree: Path) -> None:
        fields = "simpletuner/simpletuner_sdk/server/services/field_registry/registry.py"
        (tree / fields).rename(tree / "simpletuner/fields.py")
        report = checked(tree)
        assert not finding(report, "config.field_registry").reachable
        assert report.ok

    def test_a_class_under_its_old_name_is_within_reach(self, tree: Path) -> None:
        (tree / TRAINER).rename(tree / "simpletuner/engine.py")
        (tree / TRAINER).write_text("import simpletuner.engine\nTrainer = simpletuner.engine.Trainer\n")
        assert finding(checked(tree), "trainer.prepare_batch").reachable

    def test_a_method_taken_from_a_base_class_is_found_there(self, tree: Path) -> None:
        change(
            tree,
            LOCAL,
            "class LocalDataBackend(BaseDataBackend):",
            "class LocalDataBackend(mixins.Shared[int], Other):",
        )
        change(tree, LOCAL, "    def write(self, filepath, data):\n        pass\n", "")
        (tree / "simpletuner/mixins.py").write_text("class Shared:\n    def write(self, filepath, data): ...\n")
        one = finding(checked(tree), "data.write")
        assert (one.status, one.file, one.line, one.reachable) == (Status.MOVED, "simpletuner/mixins.py", 2, True)

    def test_a_loop_of_base_classes_ends(self, tree: Path) -> None:
        change(tree, LOCAL, "class LocalDataBackend(BaseDataBackend):", "class LocalDataBackend(A):")
        change(tree, LOCAL, "def write(self", "def scribble(self")
        (tree / "simpletuner/mixins.py").write_text("class A(B): pass\nclass B(A, LocalDataBackend): pass\n")
        assert finding(checked(tree), "data.write").status is Status.MISSING

    def test_moved_and_changed_is_changed(self, tree: Path) -> None:
        (tree / TRAINER).rename(tree / "simpletuner/engine.py")
        change(tree, "simpletuner/engine.py", "def prepare_batch(self, batch):", "def prepare_batch(self):")
        one = finding(checked(tree), "trainer.prepare_batch")
        assert one.status is Status.CHANGED
        assert "batch was removed" in one.detail
        assert "simpletuner/engine.py" in one.detail

    def test_a_call_that_went_to_another_method_has_moved(self, tree: Path) -> None:
        calls = "        self.prepare_batch()\n        self.accelerator.accumulate()\n"
        change(tree, TRAINER, calls, "        self.window()\n")
        (tree / TRAINER).write_text((tree / TRAINER).read_text() + f"    def window(self):\n{calls}")
        one = finding(checked(tree), "trainer.accumulate")
        assert (one.status, one.file) == (Status.MOVED, TRAINER)
        assert "Trainer.window calls" in one.detail

    def test_a_call_no_longer_made_is_missing(self, tree: Path) -> None:
        change(tree, TRAINER, "self.accelerator.accumulate()", "accumulate()")
        report = checked(tree)
        one = finding(report, "trainer.accumulate")
        assert (one.status, report.ok) == (Status.MISSING, False)
        assert "does not call accelerator.accumulate" in one.detail

    def test_calls_in_another_order_are_a_change(self, tree: Path) -> None:
        change(tree, TRAINER, "        self.prepare_batch()\n        self.accelerator.accumulate()\n",
               "        self.accelerator.accumulate()\n        self.prepare_batch()\n")  # fmt: skip
        report = checked(tree)
        one = finding(report, "trainer.accumulate")
        assert (one.status, report.ok) == (Status.CHANGED, False)
        assert "another order" in one.detail

    def test_a_name_no_longer_imported_is_missing(self, tree: Path) -> None:
        change(tree, LOCAL, "from somewhere import load_image", "import somewhere")
        report = checked(tree)
        assert finding(report, "data.load_image").status is Status.MISSING
        assert not report.ok

    def test_a_name_handed_on_lazily_is_there(self, tree: Path) -> None:
        package = tree / "simpletuner/helpers/audio/__init__.py"
        assert "__getattr__" in package.read_text()
        one = finding(checked(tree), "audio.name")
        assert (one.status, one.file) == (Status.PRESENT, "simpletuner/helpers/audio/load.py")
        package.write_text("")
        assert finding(checked(tree), "audio.name").status is Status.MISSING

    @pytest.mark.parametrize(
        "around",
        [
            "if x:\n pass\nelse:",
            "try:",
            "try:\n pass\nexcept ImportError:",
            "with x:",
            "match x:\n case 1:",
            "for y in x:",
        ],
    )
    def test_a_definition_inside_a_block_counts(self, around: str, tree: Path) -> None:
        inside = textwrap.indent((tree / LOCAL).read_text(), "  ")
        after = "finally: pass\n" if around == "try:" else ""
        (tree / LOCAL).write_text(f"{around}\n{inside}{after}")
        assert others_are_present(checked(tree))

    def test_a_definition_inside_a_function_does_not(self, tree: Path) -> None:
        (tree / LOCAL).write_text("def later():\n" + textwrap.indent((tree / LOCAL).read_text(), "  "))
        assert finding(checked(tree), "data.write").status is Status.MISSING


class TestFilesThatAreNoPython:
    @pytest.mark.parametrize(
        ("content", "calls"),
        [
            (b"def broken(:\n", "line 1"),
            (b"\xff\xfe not text \x80", "line 1"),
            (b"# coding: utf-8\nx = '\xff'\n", "utf-8"),
            (b"x = 1\0", "null bytes"),
            (b"def twice(self, self): ...\nclass Trainer:\n    def train(self, a, a): ...\n", "duplicate"),
            (b"x = " + b"(" * 400 + b")" * 400, ""),
        ],
        ids=["syntax", "not text", "not utf-8", "null", "two of a name", "too deep"],
    )
    def test_what_was_in_them_is_missing_with_the_reason(self, content: bytes, calls: str, tree: Path) -> None:
        (tree / TRAINER).write_bytes(content)
        report = checked(tree)
        one = finding(report, "trainer.prepare_batch")
        assert (one.status, one.file, report.ok) == (Status.MISSING, TRAINER, False)
        assert "cannot be read as Python" in one.detail
        assert calls in one.detail
        assert [file for file, _ in report.unreadable] == [TRAINER]
        assert finding(report, "data.write").status is Status.PRESENT

    def test_an_unrelated_one_is_listed_and_harms_nothing(self, tree: Path) -> None:
        (tree / "simpletuner/odd.py").write_text("def (")
        report = checked(tree)
        assert report.ok
        assert others_are_present(report)
        assert [file for file, _ in report.unreadable] == ["simpletuner/odd.py"]

    def test_other_encodings_that_say_so_are_read(self, tree: Path) -> None:
        text = (tree / LOCAL).read_text()
        (tree / LOCAL).write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n" + text.encode("latin-1"))
        assert others_are_present(checked(tree))


class TestJson:
    def test_has_what_was_promised(self) -> None:
        facts = replace(recorded("simpletuner-3.3.4"), version=None)
        value = check(facts, SIMPLETUNER.points).as_json()
        assert (value["upstream"], value["version"], value["ok"]) == ("simpletuner", None, False)
        assert {"name", "status", "file", "line", "needed_for"} <= set(value["points"][0])
        assert {one["status"] for one in value["points"]} == {"present", "missing"}


def test_another_upstreams_tree_lacks_everything_but_is_no_crash(tmp_path: Path) -> None:
    root = build(recorded("ai-toolkit-public-files"), tmp_path / "a")
    shutil.rmtree(root / "toolkit")
    (root / "toolkit").mkdir()
    report = checked(root, AI_TOOLKIT)
    assert not report.ok
    assert finding(report, "optimizer.factory").status is Status.MISSING
