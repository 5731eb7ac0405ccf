from __future__ import annotations

import importlib
import json
import sys
from inspect import getattr_static, signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gracetune_simpletuner.errors import HookError
from gracetune_simpletuner.hooks import AfterImport, Installer, Target, check_modules, check_reads
from gracetune_simpletuner.points import HOOKS, READS, USES, Hook, hooks_of

from gracetune.integrations.signatures import parse

FACTS = Path(__file__).parents[3] / "golden" / "upstream" / "simpletuner-4.10.1.json"
LOCAL = "simpletuner.helpers.data_backend.local"


def twice(original: Any, *arguments: Any, **options: Any) -> Any:
    return [original(*arguments, **options)] * 2


def hook(target: str, **more: Any) -> Hook:
    return Hook(target, "caches", "a test", **more)


def test_a_method_is_wrapped_for_objects_made_before(tmp_path: Path) -> None:
    backend = importlib.import_module(LOCAL).LocalDataBackend(None, "a")
    installer = Installer()
    installer.wrap(hook(f"{LOCAL}:LocalDataBackend.exists"), twice)
    assert backend.exists(str(tmp_path)) == [True, True]
    assert backend.exists(filepath=str(tmp_path / "none")) == [False, False]
    installer.undo()
    assert backend.exists(str(tmp_path)) is True


def test_a_static_method_stays_one() -> None:
    module = importlib.import_module(LOCAL)
    installer = Installer()
    installer.wrap(hook(f"{LOCAL}:LocalDataBackend.from_instance_representation"), twice)
    assert [one.id for one in module.LocalDataBackend.from_instance_representation({"id": "a"})] == ["a", "a"]
    installer.undo()
    assert isinstance(getattr_static(module.LocalDataBackend, "from_instance_representation"), staticmethod)
    assert module.LocalDataBackend.from_instance_representation({"id": "a"}).id == "a"


def test_a_function_and_an_entry_of_a_table_are_wrapped(job: Path) -> None:
    loader = importlib.import_module("simpletuner.helpers.configuration.loader")
    plain = loader.helpers["cmd"]
    installer = Installer()
    installer.wrap(hook("simpletuner.helpers.configuration.loader:helpers[cmd]"), twice)
    installer.wrap(hook(f"{LOCAL}:load_image"), twice)
    assert [one.train_batch_size for one in loader.load_config()] == [2, 2]
    assert importlib.import_module(LOCAL).LocalDataBackend(None, "a").read_image(str(job / "pictures/p0.png")) == [
        bytes(10),
        bytes(10),
    ]
    installer.undo()
    assert loader.helpers["cmd"] is plain


def test_two_hooks_of_one_name_nest_and_an_inherited_one_leaves_the_base_alone() -> None:
    module = importlib.import_module(LOCAL)

    class Sub(module.LocalDataBackend):  # type: ignore[misc,name-defined]
        pass

    module.Sub = Sub  # type: ignore[attr-defined]
    installer = Installer()
    installer.wrap(hook(f"{LOCAL}:Sub.exists"), twice)
    installer.wrap(hook(f"{LOCAL}:Sub.exists"), lambda original, *rest: ["outer", original(*rest)])
    assert Sub(None, "a").exists("/") == ["outer", [True, True]]
    assert module.LocalDataBackend(None, "a").exists("/") is True
    installer.undo()
    assert "exists" not in vars(Sub)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("simpletuner.moved:Class.method", "no module simpletuner.moved"),
        (f"{LOCAL}:Renamed.exists", "no Renamed"),
        (f"{LOCAL}:LocalDataBackend.gone", "nothing of that name"),
        (f"{LOCAL}:Path.__module__", "a str"),
        ("simpletuner.helpers.configuration.loader:helpers[yaml]", "no entry 'yaml'"),
    ],
)
def test_a_name_that_is_not_there_is_said(target: str, found: str) -> None:
    with pytest.raises(HookError) as rejected:
        Installer().wrap(hook(target), twice)
    text = str(rejected.value)
    assert found in text
    assert target in text
    assert "gracetune overlay check simpletuner" in text


def test_a_hook_can_wait_for_the_import_of_its_module(job: Path) -> None:
    target = hook("simpletuner.helpers.audio.load:load_audio", on_import=True)
    installer = Installer()
    installer.wrap(target, twice)
    assert "simpletuner.helpers.audio.load" not in sys.modules
    load = importlib.import_module("simpletuner.helpers.audio").load_audio
    assert load(job / "pictures/p0.txt") == [b"picture 0", b"picture 0"]
    assert installer.installed == [target]


def test_after_import_acts_once_and_in_the_order_of_imports() -> None:
    seen: list[str] = []

    def note(module: ModuleType) -> None:
        seen.append(module.__name__)

    names = ["simpletuner.helpers.caching.vae", "simpletuner.helpers.configuration.json_file"]
    sys.meta_path.insert(0, AfterImport(dict.fromkeys(names, note)))
    importlib.import_module("simpletuner.helpers.configuration.loader")
    assert seen == [names[1]]
    importlib.import_module("simpletuner.helpers.training.trainer")
    assert seen == [names[1], names[0]]


def test_modules_are_looked_for_without_importing_them() -> None:
    check_modules(hooks_of("raw_config"))
    assert not [name for name in sys.modules if name.startswith("simpletuner")]
    with pytest.raises(HookError, match="no module simpletuner"):
        check_modules([hook("simpletuner.helpers.configuration.yaml_file:load")])
    with pytest.raises(HookError, match="no package"):
        check_modules([hook("not_installed_at_all:load")])


@pytest.mark.parametrize("what", READS)
def test_an_object_without_what_we_read_is_said(what: str) -> None:
    whole = dict.fromkeys(READS[what])
    check_reads(what, whole)
    check_reads(what, SimpleNamespace(**whole))
    *_, last = whole
    del whole[last]
    for lacking in (whole, SimpleNamespace(**whole)):
        with pytest.raises(HookError) as rejected:
            check_reads(what, lacking)
        assert str(rejected.value).startswith(f"{what}: {last}\n  found     a {type(lacking).__name__} without it\n")
        assert "gracetune overlay check simpletuner" in str(rejected.value)


@pytest.mark.parametrize("text", ["no colon", "a:b[", "a b:c", ""])
def test_a_target_is_a_module_and_a_name(text: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        Target.parse(text)


def _targets() -> list[str]:
    named = [one.target for one in HOOKS] + list(USES)
    return sorted({one.partition("[")[0] for one in named if one.startswith("simpletuner.")})


@pytest.mark.parametrize("target", _targets())
def test_the_stand_in_takes_what_upstream_takes(target: str) -> None:
    """Else the other tests of this folder would be about a program of our own."""
    parsed = Target.parse(target)
    files = json.loads(FACTS.read_text())["modules"]
    stem = parsed.module.replace(".", "/")
    recorded = files.get(f"{stem}.py") or files[f"{stem}/__init__.py"]
    owner: Any = importlib.import_module(parsed.module)
    for part in (*parsed.owner, parsed.name):
        owner = getattr_static(owner, part)
    name = ".".join((*parsed.owner, parsed.name))
    if name not in recorded["definitions"]:
        assert name in recorded["imports"]  # defined elsewhere, and bound in this module as here
        return
    written = recorded["definitions"][name].get("parameters")
    if written is None:
        assert isinstance(owner, dict | type)
        return
    plain = owner.__func__ if isinstance(owner, staticmethod | classmethod) else owner
    ours, theirs = signature(plain), parse(written)
    assert list(ours.parameters) == list(theirs.parameters)
    assert [one.kind for one in ours.parameters.values()] == [one.kind for one in theirs.parameters.values()]
