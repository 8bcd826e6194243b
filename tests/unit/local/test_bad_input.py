"""What local steps refuse, on all ranks alike and before a parameter travels.

Where bad input and the bugs of published code are tested:

| bad input or published bug | test |
|---|---|
| numbers out of range, of another type, in contradiction | here |
| more fragments than buckets | here |
| arguments of torchft and OpenDiLoCo | here |
| ``SyncBatchNorm``, torch's too | here |
| cohorts above the clients, sparsity below 2 or above the cohort | here; one rank is one client |
| shares, scores and labels of the area under the curve | here |
| closures, scalers, ``join()``, new parameters | ``test_local_optimizer``, ``test_scaffnew`` |
| settings that differ between ranks | ``test_local_optimizer``, ``test_scaffnew`` |
| states of another model, step or phase | the same, and ``test_auc`` |
| NaN or infinity on one rank | ``test_local_optimizer``, ``test_scaffnew`` |
| a batch of one class | ``test_auc``: warns once, and ``alpha`` stays |
| settings of ``dear-train`` | ``train/settings``; those of ``federate`` in ``test_federation`` |
| flower's TAMUNA moves control variates late | ``test_client_rounds``: it leads elsewhere |
| LibAUC's second margin loss scales one mean | ``test_auc``: sample by sample, and numbers of v1 |
| CODA_Plus fails where all take part | ``test_federation``: cohorts of all clients |
| CODASCA divides its first sum too early | ``test_auc``: corrections are means |
| CODASCA steps clipped and sums unclipped | as before |
| a mean of ranks' areas (Lightning) | ``test_auc``: of all ranks |
| averaged gradients with stale momenta (torch) | ``test_local_optimizer``: ``sync_after`` |
| one outer optimizer for all fragments (torchft) | ``test_torchft``, ``test_local_optimizer`` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import (
    AucLoss,
    BalancedBatches,
    Codasca,
    EngineConfig,
    LocalOptimizer,
    PrimalDual,
    Scaffnew,
    auc_of,
    convert_sync_batchnorm,
)
from dearmpi.comm.world import World
from dearmpi.errors import ArgumentError, ConfigError, DearError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.engine.sync.test_equal_start import join, posted

SIZE = 3
NOT_A_NUMBER = float("nan")


class Net(nn.Module):
    """Two buckets' worth of parameters, with batch normalisation between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(90, 80), nn.BatchNorm1d(80), nn.Linear(80, 70))


def local(model: Any, world: World, **settings: Any) -> Any:
    return LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, world=world, **settings)


def average(model: Any, world: World, **settings: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return LocalOptimizer.average(inner, model, world=world, **settings)


def codasca(model: Any, world: World, **settings: Any) -> Any:
    return Codasca(torch.optim.SGD(model.parameters(), 0.1), model, world=world, **settings)


def scaffnew(model: Any, world: World, **settings: Any) -> Any:
    return Scaffnew(model.parameters(), model, world=world, **{"lr": 0.1, **settings})


RANGE, TYPE, CONTRADICT = "out-of-range", "wrong-type", "settings-contradict"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (local, {"sync_every": 0}, RANGE),
    (local, {"sync_every": -3}, RANGE),
    (local, {"sync_every": 2.5}, TYPE),
    (local, {"sync_every": True}, TYPE),
    (local, {"sync_every": 8, "delay": 8}, CONTRADICT),
    (local, {"sync_every": 8, "delay": 9, "fragments": 1}, CONTRADICT),
    (local, {"sync_every": 6, "fragments": 2, "delay": 3}, CONTRADICT),
    (local, {"delay": -1}, RANGE),
    (local, {"fragments": 0}, RANGE),
    (local, {"fragments": 7, "delay": 0}, RANGE),
    (local, {"fragments": 6, "config": EngineConfig(bucket_cap_mb=25.0)}, RANGE),
    (local, {"sync_every": 5, "fragments": 6}, CONTRADICT),
    (local, {"mix": 1.0}, RANGE),
    (local, {"mix": 1.5}, RANGE),
    (local, {"mix": -0.1}, RANGE),
    (local, {"mix": NOT_A_NUMBER}, RANGE),
    (local, {"mix": "0", "delay": 1}, TYPE),
    (local, {"mix": 0.5, "delay": 0}, CONTRADICT),
    (local, {"mix": 0.5, "sync_every": 1}, CONTRADICT),
    (local, {"outer_lr": 0}, RANGE),
    (local, {"outer_lr": -0.7}, RANGE),
    (local, {"outer_lr": NOT_A_NUMBER}, RANGE),
    (local, {"outer_lr": float("inf")}, RANGE),
    (local, {"outer_lr": "0.7"}, TYPE),
    (local, {"outer_lr": True}, TYPE),
    (local, {"outer_momentum": 1.0}, RANGE),
    (local, {"outer_momentum": -0.1}, RANGE),
    (local, {"outer_momentum": None}, TYPE),
    (local, {"sync_after": -1}, RANGE),
    (local, {"state": "mean"}, "unknown-choice"),
    (local, {"state": None}, TYPE),
    (local, {"compress": "int3"}, "unknown-choice"),
    (local, {"compress": "auto"}, CONTRADICT),
    (local, {"config": EngineConfig(eager=True)}, CONTRADICT),
    (local, {"config": EngineConfig(buffers="average")}, CONTRADICT),
    (local, {"local_steps": 5}, "unknown-argument"),
    (local, {"fragment_sync_delay": 5}, "unknown-argument"),
    (average, {"sync_every": 0}, RANGE),
    (average, {"outer_lr": 0.5}, CONTRADICT),
    (codasca, {"sync_every": 0}, RANGE),
    (scaffnew, {"lr": None}, "setting-missing"),
    (scaffnew, {"lr": 0.0}, RANGE),
    (scaffnew, {"lr": NOT_A_NUMBER}, RANGE),
    (scaffnew, {"p": 0.0}, RANGE),
    (scaffnew, {"p": 1.5}, RANGE),
    (scaffnew, {"cohort": SIZE + 1}, RANGE),
    (scaffnew, {"cohort": 1}, RANGE),
    (scaffnew, {"sparsity": 1}, RANGE),
    (scaffnew, {"sparsity": 3, "cohort": 2}, RANGE),
    (scaffnew, {"sparsity": 2.0}, TYPE),
    (scaffnew, {"lr": "0.1"}, TYPE),
    (scaffnew, {"p": "0.1"}, TYPE),
    (scaffnew, {"smoothness": 4.0}, TYPE),
    (scaffnew, {"smoothness": (4.0, 0.1, 0.0)}, TYPE),
    (scaffnew, {"smoothness": ("4.0", 0.1)}, TYPE),
    (scaffnew, {"smoothness": (1.0, 2.0)}, RANGE),
    (scaffnew, {"smoothness": (1.0, 0.0)}, RANGE),
]


def refusals(build: Callable[[World], Any], size: int = SIZE) -> list[DearError]:
    """What ``build`` raises on each rank, once it is seen that no parameter has travelled."""
    hub = join(["here"] * size)

    def start(world: World) -> DearError:
        with pytest.raises(DearError) as caught:
            build(world)
        world.barrier()
        values, others = posted(hub)
        assert values == 0 and others < 4096, "parameters have travelled"
        world.barrier()
        return caught.value

    return run_ranks(size, start, hub=hub)


@pytest.mark.parametrize(("make", "settings", "code"), REFUSED)
def test_settings_are_refused_alike_before_a_parameter_travels(
    make: Callable[..., Any], settings: dict[str, Any], code: str
) -> None:
    first, *others = refusals(lambda world: make(Net(), world, **settings))
    assert first.code == code
    kinds = {"unknown-argument": ArgumentError}
    assert type(first) is kinds.get(code, ConfigError)
    assert all((one.code, str(one)) == (code, str(first)) for one in others)


@pytest.mark.parametrize("make", [local, average, codasca, scaffnew])
@pytest.mark.parametrize(
    "convert", [convert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm]
)
@pytest.mark.parametrize("size", [1, SIZE])
def test_batch_normalisation_over_all_ranks_is_refused(
    make: Callable[..., Any], convert: Callable[..., Any], size: int
) -> None:
    """It would wait for ranks that train alone; outside a cohort there is no forward at all."""

    def build(world: World) -> Any:
        model = Net()
        ours = convert is convert_sync_batchnorm
        return make(convert(model, world) if ours else convert(model), world)

    for one in refusals(build, size):
        assert one.code == "module-not-served" and "layers.1" in str(one)


@pytest.mark.parametrize("settings", [{"cohort": 2}, {"sparsity": 2}])
def test_one_rank_is_one_client(settings: dict[str, Any]) -> None:
    """Alone it takes gradient steps, as ``test_scaffnew`` shows; it has no others to share with."""
    assert [one.code for one in refusals(lambda w: scaffnew(Net(), w, **settings), 1)] == [RANGE]


def scored(*scores: float, margin: float | None = None) -> Tensor:
    found: Tensor = AucLoss(0.5, margin)(torch.tensor(scores), torch.tensor([1, 0]))
    return found


OF_AREA: list[tuple[Callable[[], Any], str]] = [
    (lambda: AucLoss(0.0), RANGE),
    (lambda: AucLoss(1.0), RANGE),
    (lambda: AucLoss(NOT_A_NUMBER), RANGE),
    (lambda: AucLoss(0.5, margin=0.0), RANGE),
    (lambda: scored(0.5, 1.25), RANGE),
    (lambda: scored(-0.25, 0.5), RANGE),
    (lambda: BalancedBatches([1, 0], 1), RANGE),
    (lambda: BalancedBatches([1, 0], 2, 0.0), RANGE),
    (lambda: BalancedBatches([1, 0], 2, 1.0), RANGE),
    (lambda: BalancedBatches([1, 0], 2.0), TYPE),  # type: ignore[arg-type]
    (lambda: BalancedBatches([1, 0], 2, size=0), RANGE),
    (lambda: BalancedBatches([1, 0] * 4, 2, rank=2, size=2), RANGE),
    (lambda: BalancedBatches([1, 0] * 4, 2, rank=-1, size=2), RANGE),
    (lambda: BalancedBatches([1, 1, 1], 2), "data-insufficient"),
    (lambda: BalancedBatches([0, 0, 0], 2), "data-insufficient"),
    (lambda: BalancedBatches([1, 0, 0], 2, size=2), "data-insufficient"),
    (lambda: PrimalDual([nn.Parameter(torch.zeros(1))], lr=0.0), RANGE),
    (lambda: PrimalDual([nn.Parameter(torch.zeros(1))], gamma=0.0), RANGE),
    (lambda: PrimalDual([nn.Parameter(torch.zeros(1))], stage_steps=0), RANGE),
    (lambda: PrimalDual([nn.Parameter(torch.zeros(1))], decay=0.5), RANGE),
    (lambda: auc_of(torch.zeros(3), torch.zeros(2)), TYPE),
    (lambda: AucLoss(0.5)(torch.zeros(3, 1), torch.tensor([1, 0, 1])), TYPE),
    (lambda: AucLoss(0.5, margin=1.0)(torch.zeros(0), torch.zeros(0)), TYPE),
]


@pytest.mark.parametrize(("build", "code"), OF_AREA)
def test_what_has_no_area_is_refused(build: Callable[[], Any], code: str) -> None:
    with raises(ConfigError, code):
        build()


def test_any_score_has_a_loss_with_a_margin() -> None:
    assert torch.isfinite(scored(-3.0, 4.0, margin=1.0))
    assert torch.isfinite(scored(0.0, 1.0))
    assert scored(NOT_A_NUMBER, 0.5).isnan()  # which the finite check tells with its step
