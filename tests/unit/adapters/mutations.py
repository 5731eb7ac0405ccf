"""Small adapter files of every format and algorithm, and seeded ways to spoil them."""

from __future__ import annotations

import functools
import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gracetune.adapters.adapter_files import save
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.record import FORMATS
from unit.adapters.formats import making

SHAPES: dict[str, making.Shapes] = {
    "wan": {"blocks.0.attn1.to_q": (16, 16), "blocks.1.ffn.net.0.proj": (32, 16), "patch_embedding": (16, 4, 1, 2, 2)},
    "flux": {
        **{f"transformer_blocks.0.attn.{name}": (16, 16) for name in ("to_q", "to_k", "to_v")},
        "single_transformer_blocks.0.proj_out": (16, 80),
        "norm_out.linear": (32, 16),
    },
    "sdxl": {
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (16, 16),
        "down_blocks.1.resnets.0.conv1": (16, 8, 3, 3),
    },
}
OPTIONS = {"lokr": ((), ("decomposed",), ("both",), ("tucker",)), "loha": ((), ("tucker", "dora")),
           "locon": ((), ("tucker",), ("dora",)), "full_delta": ((), ("bias",)), "diag_oft": ((), ("rescale",)),
           "ia3": ((), ("on_input",))}  # fmt: skip


@dataclass(frozen=True)
class Valid:
    family: str
    kind: str
    format: str
    content: bytes = field(repr=False)


@functools.cache
def valid_files(folder: Path) -> tuple[Valid, ...]:
    """Files in every format, of every algorithm and form that the format can hold."""
    found = []
    for family, shapes in SHAPES.items():
        for kind in making.ALGORITHMS:
            for options in OPTIONS.get(kind, ((),)):
                state = making.state(family, shapes, kind, options=options)
                for format in FORMATS:
                    path = folder / f"{len(found)}.safetensors"
                    try:
                        save(path, state, format, torch.float32)  # type: ignore[arg-type]
                    except CannotHoldError:
                        continue
                    found.append(Valid(family, kind, format, _without_hash(path.read_bytes())))
    return tuple(found)


def _without_hash(content: bytes) -> bytes:
    """The file without its hash. With it, the hash check would find every mutation, and no later check would run."""
    parsed = _parse(content)
    assert parsed is not None
    header, data = parsed
    del header["__metadata__"]["sshs_model_hash"]
    return _serialize(header, data)


def spoiled(content: bytes, chance: random.Random) -> bytes:
    """The file after one to three mutations."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = chance.choice(MUTATIONS)(content, chance)
    return content


# -- bytes ------------------------------------------------------------------------------------------------------------


def _parse(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) else None


def _serialize(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    if changed:
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _lengthen(content: bytes, chance: random.Random) -> bytes:
    return content + bytes(chance.randrange(1, 64))


def _lie_about_the_length(content: bytes, chance: random.Random) -> bytes:
    length = chance.choice((0, 1, 2, 2**63, 2**64 - 1, 100_000_001, chance.randrange(2**20)))
    return length.to_bytes(8, "little") + content[8:]


# -- the header -------------------------------------------------------------------------------------------------------

_NAMES: tuple[Callable[[str], str], ...] = (
    lambda name: name.replace("0", "00", 1),
    lambda name: name.replace("0", "\N{FULLWIDTH DIGIT ZERO}", 1),
    lambda name: name.replace("0", "#", 1),
    lambda name: name.replace("0", str(10**30), 1),
    lambda name: name.replace(".", "..", 1),
    lambda name: name.replace(".", "$$"),
    lambda name: name + "\n\x1b[2J",
    lambda name: "x" * 20_000 + name,
    lambda name: "",
    lambda name: name.upper(),
    lambda name: name.rpartition(".")[0],
    lambda name: name.replace("lora_A", "lora_B"),
    lambda name: name.replace("w1", "w2"),
    lambda name: f"transformer_2.{name}",
    lambda name: f"lora_te1_{name}",
    lambda name: name.rpartition(".")[0] + ".alpha",
    lambda name: name.rpartition(".")[0] + ".dora_scale",
    lambda name: name.rpartition(".")[0] + ".diff",
)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**70, "x", [], {}, "NaN", [[]], "\x1b[31m", math.nan, 10**400, "F8_E4M3", "BOOL", "I64",
)  # fmt: skip
_HEADERS: tuple[dict[str, Any], ...] = (
    *({"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": value, "unet.lora_alpha": value})}
      for value in (True, "8", None, [], 10**400, 0, -1, 1e308)),
    {"lora_adapter_metadata": '{"transformer.lora_alpha": NaN}'},
    {"lora_adapter_metadata": "["},
    {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 1,
                                          "transformer.alpha_pattern": {".?" * 30 + "!": 2, "(": 1}})},
    {"gracetune.algorithm": "lora"}, {"gracetune.algorithm": "locon,dora"}, {"gracetune.stage": "low_noise"},
    {"gracetune.family": "flux"}, {"gracetune.dora": "base"}, {"sshs_model_hash": "0"}, {"ss_output_name": "\x07" * 99},
    {"x": 1},
)  # fmt: skip


def _header(content: bytes, chance: random.Random) -> bytes:
    parsed = _parse(content)
    if parsed is None or not parsed[0]:
        return _flip(content, chance)
    header, data = parsed
    names = [name for name in header if name != "__metadata__"] or list(header)
    name = chance.choice(names)
    entry = header[name]
    what = chance.choice((0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 5, 5, 6, 7, 7))
    if what == 0:
        header[chance.choice(_NAMES)(name)] = header.pop(name)
    elif what == 1:
        header["__metadata__"] = {**(header.get("__metadata__") or {}), **chance.choice(_HEADERS)}
    elif what == 2:
        header[name] = chance.choice(_VALUES)
    elif what == 3 and isinstance(entry, dict) and entry:
        entry[chance.choice(list(entry))] = chance.choice(_VALUES)
    elif what == 4 and isinstance(entry, dict):
        entry["shape"] = _another_shape(entry.get("shape"), chance)
    elif what == 5:
        other = chance.choice(names)
        header[name], header[other] = header[other], header[name]
    elif what == 6 and isinstance(entry, dict):
        begin, end = chance.randrange(2**12), chance.choice((0, 2**12, 2**40, 2**64))
        entry["data_offsets"] = [begin, end]
    else:
        tensors = _tensors(header, data)
        tensors.pop(name, None)
        return _written(tensors, header.get("__metadata__") if chance.random() < 0.8 else None)
    return _serialize(header, data)


def _another_shape(shape: Any, chance: random.Random) -> list[Any]:
    """Another shape, mostly with the same element count: a header that contradicts the file's size fails early."""
    if not isinstance(shape, list) or not all(isinstance(side, int) for side in shape):
        return [1]
    count = math.prod(shape)
    return chance.choice((
        [count], [1, count], [count, 1], [1] * 4 + [count], [1] * 40 + [count], list(reversed(shape)), [*shape, 1],
        [*shape, 1, 1], [1, *shape], [2, count // 2] if count % 2 == 0 else [count],
        chance.choice(([side * 2 for side in shape], [0, *shape], [-1, count], [2**40, 2**40])),
    ))  # fmt: skip


# -- the tensors ------------------------------------------------------------------------------------------------------

_NUMBERS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 0.0, 1e30, 65504.0)


def _tensor(content: bytes, chance: random.Random) -> bytes:
    """Replace a tensor of the file: other values, another size or another precision. The rest stays unchanged."""
    parsed = _parse(content)
    tensors = {} if parsed is None else _tensors(*parsed)
    if parsed is None or not tensors:
        return _flip(content, chance)
    name = chance.choice([key for key in tensors if key.endswith("alpha")] * 3 + list(tensors))
    dtype, shape, data = tensors[name]
    what = chance.randrange(5)
    if what == 0 and len(data) >= 4:
        place = 4 * chance.randrange(len(data) // 4)
        data = data[:place] + struct.pack("<f", chance.choice(_NUMBERS)) + data[place + 4 :]
    elif what == 1:
        data = struct.pack("<f", chance.choice(_NUMBERS)) * (len(data) // 4)
    elif what == 2 and shape:
        side = chance.randrange(len(shape))
        shape = [*shape[:side], shape[side] * 2, *shape[side + 1 :]]
        data = data * 2
    elif what == 3:
        sizes = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "BOOL": 1, "I64": 8, "U8": 1, "I32": 4}
        dtype = chance.choice(list(sizes))
        data = bytes(chance.randrange(2) for _ in range(math.prod(shape) * sizes[dtype]))
    else:
        shape, data = chance.choice((([0], b""), ([0, *shape], b""), ([], data[:4]), ([3], data[:4] * 3)))
        dtype = "F32"
    tensors[name] = (dtype, shape, data)
    return _written(tensors, parsed[0].get("__metadata__"))


def _tensors(header: dict[str, Any], data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], data[begin:end])
        except (KeyError, TypeError, ValueError):
            continue
    return {name: one for name, one in found.items() if isinstance(one[1], list) and _is_small(one[1])}


def _is_small(shape: list[Any]) -> bool:
    return all(isinstance(side, int) and 0 <= side < 2**12 for side in shape) and math.prod(shape) < 2**16


def _written(tensors: dict[str, tuple[str, list[int], bytes]], metadata: Any) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end, parts = 0, []
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
        parts.append(data)
    return _serialize(header, b"".join(parts))


MUTATIONS = (_flip, _cut, _lengthen, _lie_about_the_length, *(_header,) * 12, *(_tensor,) * 12)
