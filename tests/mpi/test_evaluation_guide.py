"""docs/how-to/evaluate.md: its function gives the numbers of one process with all samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dearmpi.comm.world import World

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "evaluate.md"


@pytest.mark.parametrize("samples", [1, 7, 600])
def test_the_guides_evaluation_is_that_of_one_process(world: World, samples: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    inputs = torch.randn(samples, 4, dtype=torch.float64)
    labels = torch.randint(3, (samples,))
    loss = nn.functional.cross_entropy
    found = names["evaluate"](world, model, TensorDataset(inputs, labels), loss)
    outputs = model(inputs)
    accuracy = (outputs.argmax(dim=1) == labels).double().mean().item()
    assert found == pytest.approx((loss(outputs, labels).item(), accuracy), abs=1e-12)
