"""Random and hostile requests to the pages of data, new runs, queue and machine: never a server error."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unit.data.folders import images, write
from unit.studio.clients import StudioClient, client_of
from unit.studio.test_datasets import run_folder
from unit.studio.test_new_run import NATIVE, job

REQUESTS = 1200
TEXTS = (
    NATIVE,
    "gracetune: 1\na: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c, *c, *c]\n",
    "gracetune: 1\n" + "{a: " * 200 + "}" * 200,
    "gracetune: 1\nname: !!python/object/apply:os.system ['true']\n",
    "gracetune: 1\nname: a\nname: b\n",
    "gracetune: 1\n<<: {a: 1}\n? [1, 2]\n: 3\n",
    "gracetune: 1\ndatasets: [1, null, {id: 3}]\nmodel: sdxl\nadapter: [lora]\n",
    "gracetune: {}\n", "gracetune: 1", "[" * 3000, "\ufeff", "\x00", "null", "{}", "- 1", "a: 1e999\nb: .nan",
    '{"model_family": 3, "data_backend_config": "/etc/passwd"}', "export A=B\n", "gracetune: 1\nname: \ud800\n",
    "x" * 600_000, json.dumps(job(Path("/nowhere"))),
)  # fmt: skip
KEYS = ("name", "model", "datasets[0].path", "datasets[3].path", "adapter.rank", "datasets", "datasets[0]", "a.b.c.d",
        "[0]", "", "gracetune", "model.family.x", "datasets[photos].path", "adapter..rank", "validation.prompts[0]",
        "x" * 300, "optimizer.options.a b", "é")  # fmt: skip


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(12 if depth < 3 else 9)
    if kind == 9:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind > 9:
        return {chance.choice(KEYS): random_value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(
        (None, True, False, 0, -1, 10**30, 1.5, 1e308, "", "x", "\ud83d", "../../etc/passwd", "a\0b", "x" * 5000,
         "<script>alert(1)</script>", "ünïcode", 2**63, chance.choice(TEXTS), "0" * 12, "-1e5")
    )  # fmt: skip


def mutated(chance: random.Random, text: str) -> str:
    letters = list(text[:3000])
    for _ in range(chance.randrange(6)):
        at = chance.randrange(len(letters) + 1)
        letters[at : at + chance.randrange(3)] = chance.choice(["", ":", "{", "- ", "\n", "\t", "'", "&a ", "*a", "\0"])
    return "".join(letters)


def requests(chance: random.Random, client: StudioClient) -> Iterator[tuple[str, str, Any]]:
    run = client.get("runs")["runs"][0]["id"]
    data = f"runs/{run}/data"
    key = client.get(f"{data}/photos/items?limit=1")["items"][0]["key"]
    queue = client.post("queue", {"config": str(client.studio.root / "cats.yaml")})["id"]
    while True:
        value = random_value(chance)
        text = mutated(chance, chance.choice(TEXTS)) if chance.random() < 0.6 else value
        changes = {chance.choice(KEYS): random_value(chance) for _ in range(chance.randrange(4))}
        name = chance.choice(["cats.yaml", "a.json", "b.toml", ".env", "../x.yaml", "a.exe", value])
        yield "POST", "new/check", {"text": text, "name": name}
        yield "POST", "new/check", {"text": mutated(chance, NATIVE), "name": "a.yaml", "set": changes}
        yield "POST", "new/check", {"text": NATIVE, "name": "a.yaml", "set": chance.choice([changes, value])}
        yield "POST", "new/check", {"text": text, "name": name, "files": chance.choice([value, {"a.json": "[]"}])}
        yield "POST", "new/save", {"text": text, "file_name": name, "start": chance.choice([False, value, True])}
        yield "POST", "new/propose", {"folder": chance.choice([value, ""]) if not isinstance(value, str) else ""}
        yield "POST", "new/plan", {"text": value if not isinstance(value, str) else 5}
        yield "POST", "queue", chance.choice([value, {"config": value}])
        yield "POST", f"queue/{chance.choice([queue, '0' * 12, 'x%2f..'])}/{chance.choice(['up', 'down', 'x'])}", value
        edit = {"text": value, "was": chance.choice([value, "", None, "picture 0"])}
        yield "PUT", f"{data}/photos/items/{chance.choice([key, 'x', '%00'])}/caption", chance.choice([edit, value])
        yield "POST", f"{data}/photos/undo", chance.choice([{"undo": value}, value])
        offset, limit = chance.choice(["-5", "9" * 30, "٣", "1", ""]), chance.choice(["0", "x", "7"])
        sort = chance.choice(["name", "loss", "x", "%00"])
        yield (
            "GET",
            f"{data}/{chance.choice(['photos', '%2e%2e'])}/items?offset={offset}&limit={limit}&sort={sort}",
            None,
        )
        yield "GET", f"{data}/photos/items/{chance.choice([key, '..', 'x' * 300])}/thumbnail", None
        yield (
            chance.choice(["GET", "DELETE", "PUT", "POST"]),
            chance.choice(["form", "queue/x", "baselines", data]),
            None,
        )


@pytest.fixture
def client(tmp_path: Path) -> StudioClient:
    write(tmp_path / "photos", images(3))
    folder = run_folder(tmp_path, {"id": "photos", "path": str(tmp_path / "photos")})
    text = (folder / "config.yaml").read_text()
    (tmp_path / "runs" / "cats.yaml").write_text(text.replace(str(folder), f"{folder}-2"))
    return client_of(tmp_path / "runs")


def test_random_requests_are_answered_without_a_server_error(client: StudioClient, tmp_path: Path) -> None:
    chance = random.Random(25)
    before = sorted(path.name for path in tmp_path.iterdir())
    counts: dict[int, int] = {}
    stream = requests(chance, client)
    for number in range(REQUESTS):
        method, path, body = next(stream)
        content = json.dumps(body).encode() if body is not None else b""
        if chance.random() < 0.1:  # not JSON
            content = content[: len(content) // 2] + bytes(chance.randrange(256) for _ in range(5))
        reply = client.http.request(method, f"/api/{path}", content=content)
        assert reply.status_code < 500, (number, method, path, body, reply.text)
        assert "Traceback" not in reply.text
        if reply.status_code >= 400 and reply.content:
            assert {"found", "expected", "hint"} == {*reply.json()["error"]}, (method, path)
        counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
    assert counts[200] > REQUESTS / 20  # not everything is rejected at the door
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert {path.name for path in (tmp_path / "runs").iterdir()} <= {"cats", "cats.yaml", "configs", ".studio"}


def test_a_body_beyond_the_limit_is_rejected(client: StudioClient) -> None:
    reply = client.http.post("/api/new/check", content=b'{"text": "' + b"x" * (9 << 20) + b'"}')
    assert reply.status_code == 413
