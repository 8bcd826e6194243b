"""What ranks without batches take over from those that train."""

from __future__ import annotations

import pytest
import torch

from dearmpi.engine.join import pack, unpack


@pytest.mark.parametrize("betas", [(0.9, 0.99), [0.9, 0.99]])
def test_numbers_arrive_in_the_form_that_they_had(betas: tuple[float, ...] | list[float]) -> None:
    trains = {"lr": 0.25, "betas": type(betas)(beta / 2 for beta in betas), "amsgrad": True}
    waits = {"lr": torch.tensor(0.5), "betas": betas, "amsgrad": True}
    sent = torch.maximum(pack([trains], joined=False), pack([waits], joined=True))
    [taken] = unpack([waits], sent)
    assert taken == trains
    assert type(taken["betas"]) is type(betas)
    assert isinstance(taken["lr"], torch.Tensor)
