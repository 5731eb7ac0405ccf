"""Credentials: found in addresses and in what other programs say, and shown by none of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config import Environment, load
from gracetune.config.secrets import hide_credentials, split_address
from gracetune.errors import ConfigError

WORD = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", min_size=8, max_size=20)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://me:SECRET@host/x failed", "404, url='https://host/x?X-Amz-Signature=SECRET&b=1'",
        "Authorization: Bearer SECRET", "{'aws_secret_access_key': 'SECRET'}", "password=SECRET, next",
        "X-Amz-Credential=SECRET",
    ],
)  # fmt: skip
@given(WORD)
def test_what_a_library_says_holds_none(text: str, secret: str) -> None:
    assert secret not in hide_credentials(text.replace("SECRET", secret))


def test_plain_text_stays() -> None:
    for text in ("https://host/folder/x.png is not there", "5 tokens of 7", "hf://datasets/a/b@v1", "a?b", ""):
        assert hide_credentials(text) == text
    assert "hf_abcdefghijklmnop" not in hide_credentials("token hf_abcdefghijklmnop is wrong")


@given(WORD, WORD, WORD)
def test_addresses_are_taken_apart(user: str, password: str, query: str) -> None:
    found = split_address(f"https://{user}:{password}@host/x.tar?{query}")
    assert found == ("https://host/x.tar", {"user": user, "password": password, "query": query})
    assert split_address(f"s3://{user}/x?y") == (f"s3://{user}/x?y", {})


def test_a_wrong_value_of_a_secret_is_not_shown(tmp_path: Path) -> None:
    config = {"gracetune": 1, "name": "x", "output_dir": "o", "model": {"family": "sdxl"}, "training": {"max_steps": 1},
              "datasets": [{"id": "a", "path": "s3://b", "storage": {"secret_access_key": 123456789}}]}  # fmt: skip
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        load(path, environment=Environment({}))
    assert "datasets[0].storage.secret_access_key" in str(refused.value)
    assert "123456789" not in str(refused.value)
