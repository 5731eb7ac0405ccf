from __future__ import annotations

import pytest
import torch

from gracetune.train.guards import _failure_reason, _Norm
from gracetune.train.training_state import Position, ResumePoint


@pytest.mark.parametrize(("step", "stated"), [(0, "so nothing is saved"), (7, "saved at step 7")])
def test_the_reason_of_a_failure_names_a_saved_step_only_if_there_is_one(step: int, stated: str) -> None:
    """A run that fails at its first step writes no checkpoint (`Saving`)."""
    before = ResumePoint(Position(step=step), {}, step, 0)
    assert stated in _failure_reason(_Norm(step + 1, torch.tensor(torch.nan), None, (), before), 1, step)
