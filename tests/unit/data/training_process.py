"""One rank of a run, as a process of its own: takes and decodes batches, writes down each and its state.

Arguments: a JSON object with `folder`, `work` (its own folder), `rank`, `world_size`, `schedule`, `batches`, and
optionally `state` (a file to go on from) and `pause` (seconds between batches).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gracetune.config.run_config import RunConfig
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.geometry import Geometry
from gracetune.data.index import DataIndex
from gracetune.data.index_builder import build_index
from gracetune.data.loader import Loader
from gracetune.data.media.image import decode_image
from gracetune.data.refs import BatchRef, SampleRef


def config_for(folder: str) -> RunConfig:
    common = {"path": folder, "captions": {"dropout": 0.2}, "corrupt_threshold": 0.2}
    return RunConfig.model_validate(
        {
            "name": "process",
            "output_dir": folder,
            "model": {"family": "sdxl"},
            "training": {"max_steps": 10, "batch_size": 2, "seed": 11},
            "datasets": [
                {"id": "a", "resolution": 64.0, "repeats": 1, "augmentation": {"flip_x": True}, **common},
                {"id": "b", "resolution": 96.0, "probability": 3.0, "crop": {"enabled": True}, **common},
            ],
        }
    )


def written(outcome: object) -> dict[str, Any]:
    kind = type(outcome).__name__
    return {"kind": kind, **json.loads(json.dumps(asdict(outcome)))}  # type: ignore[call-overload]


def decode(index: DataIndex, ref: SampleRef) -> None:
    """An image without a tensor: these processes need not wait for torch."""
    assert ref.fit is not None
    try:
        decode_image(index.backend_of(ref.dataset).read(ref.path), ref.path, ref.fit, ref.bucket)
    except UnreadableMediaError as error:
        raise UnreadableMediaError(error.path, error.reason, ref.dataset) from error


def main(arguments: dict[str, Any]) -> None:
    index = build_index(config_for(arguments["folder"]), Geometry("image", side_multiple=16))
    loader = Loader(index, batch_size=2, rank=arguments["rank"], world_size=arguments["world_size"])
    done = 0
    if arguments.get("state"):
        saved = json.loads(Path(arguments["state"]).read_text())
        loader.load_state_dict(saved["loader"])
        done = saved["done"]
    work = Path(arguments["work"])
    with (work / "log").open("a") as log:
        while done < arguments["batches"]:
            try:
                size = arguments["schedule"][done % len(arguments["schedule"])]
                coming = loader.peek(1, size)[0]
                for ref in coming.samples if isinstance(coming, BatchRef) else ():
                    decode(index, ref)
                outcome = loader.next_batch(size)
            except UnreadableMediaError as error:
                assert error.dataset is not None
                loader.exclude({error.dataset: {error.path: error.reason}})
                continue
            done += 1
            log.write(json.dumps({"done": done, **written(outcome)}) + "\n")
            log.flush()
            scratch = work / "state.part"
            scratch.write_text(json.dumps({"done": done, "loader": loader.state_dict()}))
            os.replace(scratch, work / "state")  # noqa: PTH105
            assert isinstance(outcome, BatchRef) or outcome.samples
            time.sleep(arguments.get("pause", 0.0))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
