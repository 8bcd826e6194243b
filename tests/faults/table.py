"""Faults that are put into the package one at a time, and the tests of the fast set that find them.

Each replaces one text of one file, which must occur in it once. ``tests`` run in one process,
unless they are tests of all ranks, which run on ``ranks``. tests/faults/run.py puts them in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` goes wrong where ``old`` becomes ``new`` in ``file`` of the package."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    ranks: int = 2


LOCAL = "tests/unit/local"
ENGINE = "tests/unit/engine"
FAULTS = (
    Fault(
        "gradients are summed and not averaged",
        "engine/bucket/bucket.py",
        "self.gradients.shard.div_(self.spec.world_size)",
        "self.gradients.shard.div_(1)",
        (f"{ENGINE}/test_gradients.py::test_gradients_of_two_backprops_add_up",),
    ),
    Fault(
        "a second backprop replaces the first one's gradients",
        "engine/bucket/bucket.py",
        "            shard.add_(self._carried)\n",
        "",
        (f"{ENGINE}/test_gradients.py::test_gradients_of_two_backprops_add_up",),
    ),
    Fault(
        "a parameter without gradient keeps that of an earlier step",
        "engine/bucket/bucket.py",
        "                view.zero_()\n            else:\n                self.take_gradient(slot)",
        "                pass\n            else:\n                self.take_gradient(slot)",
        (f"{ENGINE}/test_gradients.py::test_backprops_that_use_different_branches_add_up",),
    ),
    Fault(
        "an old graph does not notice that parameters have changed",
        "engine/bucket/bucket.py",
        "torch.autograd.graph.increment_version(changed)",
        "list(changed)",
        (
            f"{ENGINE}/test_refusals.py"
            "::test_a_backprop_through_a_graph_from_before_the_step_is_torchs_error",
        ),
    ),
    Fault(
        "a parameter that has been moved is not noticed",
        "engine/bucket/bucket.py",
        "if param.data_ptr() != address and not self._take_back(slot):",
        "if False:",
        (f"{ENGINE}/test_failures.py::test_parameters_moved_out_of_their_storage_are_noticed",),
    ),
    Fault(
        "zero_grad(set_to_none=False) counts as no gradient",
        "engine/bucket/grad_tracker.py",
        "frozenset(none - self._zeroed)",
        "frozenset(none)",
        ("tests/mpi/test_zero_grad.py",),
    ),
    Fault(
        "a norm is the sum of the powers, without the root",
        "engine/scaling.py",
        "norm = norm ** (1.0 / norm_type)",
        "norm = norm * 1.0",
        (f"{ENGINE}/test_gradients.py::test_a_backprop_after_clipping_adds_to_what_is_clipped",),
    ),
    Fault(
        "a norm is the largest rank's, not that over all",
        "engine/scaling.py",
        'world.all_reduce([part, has_any], "sum")',
        'world.all_reduce([part, has_any], "max")',
        (f"{ENGINE}/test_gradients.py::test_a_backprop_after_clipping_adds_to_what_is_clipped",),
    ),
    Fault(
        "an overflow on one rank is one rank's own affair",
        "engine/scaling.py",
        'return world.all_reduce([float(is_finite)], "min")[0] > 0',
        "return is_finite",
        ("tests/mpi/test_semantics_precision.py",),
    ),
    Fault(
        "learning rates that differ between ranks are not told",
        "engine/agreement/step_agreement.py",
        "if high - low > 1:",
        "if high - low > 40000:",
        (f"{ENGINE}/test_alike.py",),
    ),
    Fault(
        "a bucket that backprop does not fill holds up the others",
        "engine/iteration/engine_state.py",
        "past = list(self._agreements)[:-1]",
        "past = list(self._agreements)[:0]",
        (f"{ENGINE}/iteration/test_engine_state.py",),
    ),
    Fault(
        "buckets are reduced as their gradients come, not in the plan's order",
        "engine/iteration/backprop.py",
        "            if bucket.state is not BucketState.READY:\n                return\n",
        "            if bucket.state is not BucketState.READY:\n                continue\n",
        (f"{ENGINE}/test_order.py",),
    ),
    Fault(
        "buffers of ranks without batches count in the mean",
        "engine/sync/model_buffers.py",
        "        if not counts:\n            sums.zero_()\n",
        "",
        (f"{ENGINE}/agreement/test_join.py",),
    ),
    Fault(
        "optimizer state that was gathered once is handed out for ever",
        "engine/facade.py",
        "        self._gathered = None\n        self._watched.clear()\n",
        "        self._watched.clear()\n",
        ("tests/mpi/test_semantics_options.py",),
    ),
    Fault(
        "state that is cut for one parameter each is cut at the wrong place",
        "engine/update/shard_update.py",
        "start, stop = piece.start - run.start, piece.stop - run.start",
        "start, stop = 0, piece.stop - piece.start",
        (f"{ENGINE}/test_gradients_that_do_not_come.py", f"{ENGINE}/test_state.py"),
    ),
    Fault(
        "a ring overwrites a partial sum instead of adding to it",
        "comm/algorithms/ring.py",
        "self._part(self._lead + number).add_(",
        "self._part(self._lead + number).copy_(",
        ("tests/unit/comm/algorithms/test_ring.py::test_every_rank_gets_its_shard_of_the_sum",),
    ),
    Fault(
        "a ring sends a chunk before it has come in",
        "comm/algorithms/ring.py",
        "self._lead + self._num_arrived)",
        "2 * self._lead + self._num_arrived)",
        (
            "tests/unit/comm/algorithms/test_ring.py::test_an_all_gather_gives_every_rank_every_shard",
        ),
    ),
    Fault(
        "ranks follow each other by number, whichever host they are on",
        "comm/algorithms/ring.py",
        "key=lambda rank: first[hosts[rank]])",
        "key=lambda rank: rank)",
        ("tests/unit/comm/algorithms/test_ring.py::test_ranks_of_a_host_follow_each_other",),
    ),
    Fault(
        "a lane posts one operation more than its window",
        "comm/progress/lane.py",
        "while self.queue and len(self.in_flight) < self.window:",
        "while self.queue and len(self.in_flight) <= self.window:",
        (f"{ENGINE}/test_order.py::test_no_more_than_the_window_is_in_flight",),
    ),
    Fault(
        "half precision is added in half precision",
        "comm/algorithms/scratch.py",
        "into.copy_(parts[0]) if is_wide else parts[0].float()",
        "into.copy_(parts[0]) if is_wide else parts[0].clone()",
        ("tests/mpi/collectives/test_half_precision.py",),
        ranks=3,
    ),
    Fault(
        "scratch memory is used again while an operation still uses it",
        "comm/algorithms/scratch.py",
        "return free.pop(index)",
        "return free[index]",
        ("tests/unit/comm/algorithms/test_scratch.py",),
    ),
    Fault(
        "a call that never returns does not end the process",
        "comm/process.py",
        "        os._exit(self._exit_code)\n",
        "",
        ("tests/unit/comm/test_process.py",),
    ),
    Fault(
        "an exchange of local steps is waited for at its start",
        "local/local_optimizer.py",
        "self._under_way = Merge(names, self.num_steps + self.exchanges.delay)",
        "self._under_way = Merge(names, self.num_steps + self.exchanges.delay); "
        "self.outer.synchronize()",
        (f"{LOCAL}/test_torchft.py::test_a_rank_goes_on_while_its_exchange_travels",),
    ),
    Fault(
        "the outer optimizer climbs",
        "local/anchor.py",
        "shared[name] - values[name].to(shared[name].dtype) for",
        "values[name].to(shared[name].dtype) - shared[name] for",
        (f"{LOCAL}/test_torchft.py::test_ranks_train_as_torchfts_replicas",),
    ),
    Fault(
        "control variates follow by the whole change",
        "local/client_rounds.py",
        "alpha=rule.eta / rule.lr",
        "alpha=1 / rule.lr",
        (f"{LOCAL}/test_client_rounds.py",),
    ),
    Fault(
        "a coordinate is sent by one client too many",
        "local/client_rounds.py",
        "% cohort < sparsity",
        "% cohort <= sparsity",
        (f"{LOCAL}/test_client_rounds.py::test_masks_share_the_work",),
    ),
    Fault(
        "a tie counts as a pair in order",
        "local/area.py",
        "(2 * below + of_negative)",
        "(2 * below + 2 * of_negative)",
        (f"{LOCAL}/test_auc.py::test_the_area_counts_pairs_and_half_of_ties",),
    ),
)
