from __future__ import annotations

import pytest
import torch

from gracetune.train.guards import _Norm, _failure_reason
from gracetune.train.position import Position
from gracetune.train.training_state import ResumePoint


@pytest.mark.parametrize(("step", "stated"), [(0, "so nothing is saved"), (7, "saved at step 7")])
def test_only_what_was_learnt_is_said_to_be_saved(step: int, stated: str) -> None:
    """A run that has not learnt anything writes no checkpoint (`Saving`)."""
    before = ResumePoint(Position(step=step), {}, step, 0)
    assert stated in _failure_reason(_Norm(step + 1, torch.tensor(torch.nan), None, (), before), 1, step)
