"""Small files that are expensive to read: every known way to make one, in every format."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gracetune.config.limits import LARGEST_FILE

OURS = "gracetune: 1\nname: a\noutput_dir: out\nmodel: {family: flux}\ndatasets: [{id: a, path: p}]\n"
JOB = {
    "job": "extension",
    "config": {"name": "a", "process": [{"type": "sd_trainer", "model": {"name_or_path": "x", "arch": "flux"}}]},
}
FULL = LARGEST_FILE - 200


def up_to(unit: str, size: int = FULL) -> str:
    return unit * (size // len(unit))


def hostile_files() -> Iterator[tuple[str, str]]:
    """Name and text of each. A name with a folder in it is a file that `<folder>/config.json` names."""
    for kind, cases in (("json", _json()), ("yaml", _yaml()), ("toml", _toml()), ("env", _env())):
        for number, text in enumerate(cases):
            yield f"{kind}-{number:03}.{kind}", text
    for option in ("data_backend_config", "lycoris_config", "user_prompt_library"):
        for number, text in enumerate(_sidecars()):
            yield f"{option}-{number:03}/named.json", text
            config = {"model_family": "flux", "lora_type": "lycoris", "output_dir": "o", option: "named.json"}
            yield f"{option}-{number:03}/config.json", json.dumps(config)


def _sidecars() -> Iterator[str]:
    for unit in (
        "[",
        "{",
        '\\"',
        '{"a":',
        "[],",
        '{"a": 1},',
        '{"prompt": "x"},',
        '{"id": "a", "dataset_type": "video"},',
    ):
        yield f"[{up_to(unit)}1]"
        yield f'{{"a": "{up_to(unit)}'
    for unit in ({"id": "a", "instance_data_dir": "x"}, {"id": "{id}" * 8_000, "instance_data_dir": "{id}" * 8_000}):
        yield json.dumps([unit] * 900)[: LARGEST_FILE - 2] if len(json.dumps(unit)) < 500 else json.dumps([unit] * 7)
    yield json.dumps({f"prompt{one}": "x" for one in range(15_000)})
    yield json.dumps({f"prompt{one}": {"promt": "x"} for one in range(7_000)})
    yield json.dumps(
        {"algo": "lora", "apply_preset": {"module_algo_map": {f"A{one}": {"dmi": 1} for one in range(7_000)}}}
    )


def _json() -> Iterator[str]:
    for unit in ("\\", '\\"', '"', "/*", "//", "/", ",", ", ", ",}", "[", "{", '{"a":', "[]", "1,", "é"):
        yield f'{{"a": "{up_to(unit)}'
        yield f'{{"a": {up_to(unit)}'
        yield f'{{"a": "{up_to(unit)}"}}'
        yield up_to(unit, 60_000)
    yield f"[{up_to('1,')}1]"
    yield f"[{up_to('[],')}1]"
    yield f'{{"model_family": "flux", {up_to(" ")} "a": 1}}'
    yield f'{{"a": {"9" * 4000}, "b": 1e{"9" * 4000}, "c": {"1" * 100_000}.0}}'
    yield json.dumps({str(one): 1 for one in range(40_000)})
    yield json.dumps({"model_family": "flux"} | {f"--lear_{one}": 1 for one in range(19_000)})
    yield json.dumps({"model_family": "flux"} | {f"learning_ratee{one}": 1 for one in range(9_000)})
    yield json.dumps({"model_family": "flux", "k" * 500_000: 1})
    yield json.dumps({"a": 1, "b" * 100_000: {"a": 1, "c": 1}}).replace('"c"', '"a"')
    entries: list[dict[str, object]] = [
        {}, {"id": "a"}, {"id": "a", "instance_data_dir": "x"}, {"id": "a", "dataset_type": "text_embeds"},
        {"id": "a", "dataset_type": "imagee"}, {"id": "a", "instance_data_dir": "x", "resolutoin": 1},
    ]  # fmt: skip
    for entry in entries:
        for count in (900, 15_000 // (len(entry) + 1)):
            yield json.dumps({"model_family": "flux", "datasets": [entry] * count})
    filled = "{output_dir}" * 2_000
    yield json.dumps({
        "model_family": "flux", "output_dir": "o" * 30_000,
        "datasets": [{"id": str(one), "instance_data_dir": filled} for one in range(18)],
    })  # fmt: skip
    yield json.dumps({"model_family": "flux", "lora_rank": "9" * 30_000, "learning_rate": "1" * 30_000})
    yield json.dumps({"model_family": "flux", "user_prompt_library": "[" * 30_000})
    yield _job(name="n" * 30_000, training_folder="[name]" * 5_000)
    yield _job(sample={"prompts": ["--a " * 8_000] * 14})
    yield _job(sample={"prompts": ["[trigger]" * 3_600] * 14}, trigger_word="t" * 30_000)
    yield _job(datasets=[{"folder_path": "x", "resolution": [one]} for one in range(6_000)])
    yield _job(**{f"trian{one}": 1 for one in range(18_000)})
    yield f'{json.dumps(JOB)[:-1]}, "a": "{up_to("${")}"}}'
    yield f'{json.dumps(JOB)[:-1]}, "a": "{up_to("${A}")}"}}'
    yield f'{json.dumps(JOB)[:-1]}, "a": "{up_to(" ")}{up_to("${HOME}", 100_000)}"}}'


def _job(**process: object) -> str:
    inner = {**JOB["config"]["process"][0], **process}  # type: ignore[index]
    return json.dumps({**JOB, "config": {"name": process.get("name", "a"), "process": [inner]}})


def _yaml() -> Iterator[str]:
    units = (
        "[", "{", "- ", "? ", "a: ", "- a\n", "1,", "[],", "# x\n", "\n", " ", "\t", "'", '"', "|", "&a ", "*a ",
        "!!x ", "---\n", "%", "a\n", ": ", "::", "\\", "é", "x ",
    )  # fmt: skip
    for unit in units:
        yield f"{OURS}x: {up_to(unit)}"
        yield f"{OURS}x: [{up_to(unit, 200_000)}]"
        yield f"{OURS}{up_to(unit, 200_000)}"
        yield up_to(unit, 200_000)
    scalars = (
        "1" + ":59" * 90_000, "!!int 1" + ":59" * 90_000, "!!float 1" + ":59" * 90_000 + ".5", "1" + ":59" * 200 + ".5",
        "9" * 400_000, "0x" + "f" * 400_000, "0" + "7" * 400_000, "0b" + "1" * 400_000, "1_" * 200_000,
        "1" * 200_000 + "." + "1" * 200_000, "1" * 200_000 + "e" + "9" * 200_000, "." + "1" * 400_000,
        "1e" + "9" * 400_000, "!!float " + "1" * 400_000, "2025-01-01 " + " " * 400_000 + "x",
        "!!binary " + "A" * 400_000, "|\n" + " x\n" * 150_000, ">\n" + " x\n" * 150_000,
        '"' + "\\x41" * 100_000 + '"', '"' + "\\n" * 200_000 + '"',
    )  # fmt: skip
    for text in scalars:
        yield f"{OURS}x: {text}\n"
    yield OURS + "".join(f"key_{one}: 1\n" for one in range(40_000))
    yield OURS + "".join(f"key_{one}: 1\n" for one in range(19_000))
    yield OURS + "training: {" + ",".join(f"batch_siz{one}: 1" for one in range(19_000)) + "}\n"
    yield OURS.replace("[{id: a, path: p}]", f"[{up_to('{},', 50_000)}]")
    yield OURS.replace("[{id: a, path: p}]", f"[{','.join('{id: a, path: p}' for _ in range(6_000))}]")
    yield OURS.replace("[{id: a, path: p}]", f"[{','.join('{id: a, path: p, batch_siz: 1}' for _ in range(4_000))}]")
    yield OURS.replace("[{id: a, path: p}]", f"[{{id: a, path: p, conditioning: [{up_to('aa,', 50_000)}]}}]")
    yield OURS.replace("path: p", f"path: p, resolution: [{up_to('aa,', 50_000)}]")
    yield (
        OURS
        + "".join(f"a{one}: &a{one} 1\n" for one in range(15_000))
        + f"x: [{','.join(f'*a{n}' for n in range(15_000))}]"
    )
    yield "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40))  # fmt: skip
    yield "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 40)
    )
    many = ", ".join(f"k{one}: 1" for one in range(9_000))
    yield f"a: &a {{{many}}}\nb: {{<<: [{', '.join(['*a'] * 9_000)}]}}\n"
    yield f"a: &a {{{many}}}\n" + "".join(f"b{one}: {{<<: *a}}\n" for one in range(5_000))
    yield "a: &a {<<: *a}\n"
    yield "a: &a [*a]\n"
    yield f"a: &a\n  {up_to('? ', 1_000)}*a\n"


def _toml() -> Iterator[str]:
    units = (
        ".a", "[", "[a", "{a=", "{", ".", '"', "'", '"""', "'''", "\\", "#", "=", "\n", " ", ",", "a=1\n", "[a]\n",
        "[[a]]\n", "1.", '".', "''.", '"""".',
    )  # fmt: skip
    for unit in units:
        yield f"model_family = 'flux'\na{up_to(unit)} = 1\n"
        yield f"a = {up_to(unit)}"
        yield f"[a{up_to(unit)}]\n"
        yield f"a = {{b = 1, a{up_to(unit)} = 1}}"
        yield f'a = {{b = """x"""", a{up_to(unit)} = 1}}'
        yield f'a = "{up_to(unit)}"'
        yield f'a = """{up_to(unit)}'
        yield up_to(unit) + "\\"
    yield "".join(f"key_{one} = 1\n" for one in range(30_000))
    yield "".join(f"[a.b{one}.c]\nx = 1\n" for one in range(9_000))
    yield "".join(f"a.b{one}.c.d.e.f = 1\n" for one in range(9_000))
    yield "[[a]]\n[[a.b]]\n" * 9_000
    yield f"a = [{up_to('1,')}]"
    yield f"a = {'9' * 4_000}\nb = 0x{'f' * 400_000}\nc = {'1' * 200_000}.5"


def _env() -> Iterator[str]:
    units = (
        "A=1\n", "A+=xxxxxxxxxx\n", "A='", 'A="', "\\", "$A", "${A}", "A", "export ", "#\n", " ", "A=$A$A\n", "\n", "=",
        "MODEL_FAMILYY=1\n", "TRAINER_EXTRA_ARGS+=' --lr'\n",
    )  # fmt: skip
    for unit in units:
        yield f"MODEL_FAMILY=flux\n{up_to(unit)}"
        yield f"MODEL_FAMILY=flux\nA={up_to(unit)}"
        yield f"MODEL_FAMILY=flux\nA='{up_to(unit, 30_000)}'\n"
    yield "MODEL_FAMILY=flux\nA=xxxxxxxxxx\n" + "A=$A$A\n" * 200
    yield "MODEL_FAMILY=flux\nA=xxxxxxxxxx\n" + "".join(f"B{one}=$A$A$A\nA=$B{one}\n" for one in range(200))
    yield "MODEL_FAMILY=flux\n" + "".join(f"LEARNING_RATEE{one}=1\n" for one in range(19_000))
    yield f"MODEL_FAMILY=flux\nTRAINER_EXTRA_ARGS='{up_to('--lora_rankk=1 ', 32_000)}'\n"
    yield f"MODEL_FAMILY=flux\nTRAINER_EXTRA_ARGS='{up_to('a b ', 32_000)}'\n"
    yield f"MODEL_FAMILY=flux\nPYTORCH_CUDA_ALLOC_CONF='{up_to('use_uvm:', 32_000)}'\n"
    yield f"MODEL_FAMILY=flux\nPYTORCH_CUDA_ALLOC_CONF='{up_to('[,', 32_000)}'\n"
