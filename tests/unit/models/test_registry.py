from __future__ import annotations

import subprocess
import sys

import pytest

from gracetune.config.families import FAMILIES
from gracetune.errors import ConfigError
from gracetune.models.registry import spec_of


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_bundle(family: str) -> None:
    assert spec_of(family).family == family


def test_unknown_family_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"found     wam\n  expected  wan, .*\n  try       wan"):
        spec_of("wam")


def test_the_registry_itself_imports_no_torch() -> None:
    code = "import sys, gracetune.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
