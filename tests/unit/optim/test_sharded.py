from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing

from unit.optim.sharded_process import run


@pytest.mark.full
def test_sharded_parameters_train_as_whole_ones_do_and_resume(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run, args=(str(tmp_path / "rendezvous"),), nprocs=2)
