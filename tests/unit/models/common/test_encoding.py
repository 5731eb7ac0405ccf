from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import weight_norm

from gracetune.models.common.encoding import latent_mask, release
from gracetune.models.fingerprint import files_digest


def test_release_frees_every_tensor() -> None:
    layer = weight_norm(nn.Conv1d(4, 4, 3))  # weight norm keeps the derived weight next to its parameters
    layer.register_buffer("table", torch.zeros(8), persistent=False)
    model = nn.Sequential(layer, nn.Linear(4, 4))
    own = [*model.parameters(), *model.buffers(), vars(layer)["weight"]]
    assert len(own) == 7  # g, v, their product, two biases, the table, the linear layer's weight
    held = [weakref.ref(tensor) for tensor in own]
    del own
    release([model])
    assert [tensor for reference in held if (tensor := reference()) is not None and not tensor.is_meta] == []


def test_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return files_digest(folder)

    first = digest({"a": "one", "b": "two"})
    assert digest({"b": "two", "a": "one"}) == first
    others = [{"a": "one", "c": "two"}, {"a": "two", "b": "one"}, {"a": "on", "b": "etwo"}, {"a": "one"}, {}]
    assert len({first, *map(digest, others)}) == 6


def test_latent_mask_averages_pixels() -> None:
    mask = torch.rand(1, 24, 40)
    expected = mask.reshape(1, 3, 8, 5, 8).mean(dim=(2, 4))
    torch.testing.assert_close(latent_mask(mask, (3, 5)), expected)
