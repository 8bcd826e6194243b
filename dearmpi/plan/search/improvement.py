"""Improvement: from good drafts to better ones by small steps, for models of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from operator import attrgetter

from dearmpi.config import MIB, EngineConfig
from dearmpi.plan.data.layout import fuse_by_cap
from dearmpi.plan.data.schedule import AllGather, Wait
from dearmpi.plan.search.problem import PATIENCES, BucketStarts, Draft, Drafts, Problem

_NUM_CAPS = (3, 5, 8, 12, 18, 27, 40, 60, 90)  # buckets that a model is cut into, about
_ENDS = (1.0, 0.25, 1 / 16)  # size of the first and last buckets, in caps
_GROWTHS = (0.25, 1.0)  # how fast they grow, per byte before or behind
_FIXED_CAPS_MIB = (1, 2, 4, 8, 16, 25, 64)
_MOST_BUCKETS = 400  # beyond, a plan costs seconds to make, and each bucket time to run
_WINDOWS = (1, 2, 3, 4)
_NUM_KEPT = 4  # layouts that are looked at more closely, and as many of those of few buckets
_FEW_BUCKETS = 30
_NUM_STARTS = 8
_LEAST_GAIN = 1e-5
_NEXT_TO_NOTHING = 2e-3  # less than simulations are off
_MOST_EVENTS = 200_000  # of all simulations together: about a second
_MOST_EVENTS_OF_MERGING = 60_000  # in addition


_merit = attrgetter("merit")


def improve(problem: Problem, *, enough_s: float) -> Draft:
    """The best draft that is found before the effort is spent, or one within ``enough_s``.

    Where serial or WFBP takes the same time, overlap of the feed-forward is preferred: what comes
    late then holds up less.

    The first drafts are the buckets of fixed caps with every plain schedule, unless a cap makes
    more than 400 buckets. So no plan is worse. Others grow from both ends of the model to a cap:
    what is reduced last and gathered first is exposed, what is reduced first leaves the wire idle
    until then. Then some of these (``_starts``) are changed as long as that helps: single cuts
    move, go and come, and single gathers are tied to another reduce-scatter. At the end buckets are
    merged that gain almost nothing by being two. This must not lose the plan's gain over DeAR's own
    order, serial and WFBP.
    """
    drafts = Drafts(problem)
    first = sorted(_first_drafts(problem, drafts), key=_merit)
    starts = _starts(drafts, first)
    best = min((first[0], *starts), key=_merit)
    for draft in starts:
        climb = _Climb(problem, draft, enough_s=enough_s)
        climb.move_cuts()
        climb.move_ties()
        best = min(best, climb.best, key=_merit)
        if climb.over:
            break
    plainest_s = min(draft.seconds for draft in first if draft.patience is None)
    climb = _Climb(problem, best, enough_s=enough_s)
    climb.merge_buckets(min(best.seconds * (1 + _NEXT_TO_NOTHING), plainest_s))
    return climb.best


def capped_cuts(problem: Problem, cap: float, *, ends: float, growth: float) -> BucketStarts:
    """Buckets that are closed once they hold their target, ``cap`` bytes in the middle.

    ends: the target of the first and the last bucket, in caps. growth: what it grows by per byte
    between the bucket and its end of the model.
    """
    total = sum(problem.nbytes)
    cuts, size, before = [], 0, 0
    for number, nbytes in enumerate(problem.nbytes):
        behind = max(0.0, total - before - cap)
        target = min(cap, ends * cap + growth * before, ends * cap + growth * behind)
        too_much = size > 0 and size + nbytes > 2 * target and nbytes > target
        if number in problem.forced or size >= target or too_much:
            cuts.append(number)
            before += size
            size = 0
        size += nbytes
    return tuple(cuts)


def fused_cuts(problem: Problem, cap_bytes: int) -> BucketStarts:
    """The buckets that a fixed cap makes (``fuse_by_cap``)."""
    specs = [tensor.spec for tensor in problem.tensors]
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    return tuple(sorted(numbers[group[0].name] for group in fuse_by_cap(specs, cap_bytes)))


def _first_drafts(problem: Problem, drafts: Drafts) -> Iterator[Draft]:
    total = sum(problem.nbytes)
    model_bytes = sum(spec.nbytes for spec in problem.profile.workload.params())
    default = EngineConfig().cap_bytes(model_bytes, world_size=problem.costs.world_size)
    caps = (default, *(mib * MIB for mib in _FIXED_CAPS_MIB))
    fused = [fused_cuts(problem, cap_bytes) for cap_bytes in caps]
    fixed = dict.fromkeys(cuts for cuts in fused if len(cuts) <= _MOST_BUCKETS)
    for cuts in fixed:
        yield from drafts.plain(cuts, window=2)
    grown = dict.fromkeys(
        capped_cuts(problem, total / count, ends=ends, growth=growth)
        for count, ends, growth in product(_NUM_CAPS, _ENDS, _GROWTHS)
    )
    for cuts in fixed | grown:
        yield drafts.dear(cuts, window=2)
        for window, patience in product((1, 2), (0.0, 0.5)):
            yield drafts.interleaved(cuts, window=window, patience=patience)


def _starts(drafts: Drafts, first: Sequence[Draft]) -> list[Draft]:
    """Where to climb from, in this order: the best draft; the best of few buckets with each window
    and patience; the best of other layouts. A climb from many buckets costs ten times as much, and
    often ends with small ones that no single step gets rid of. first: what there is, best first.
    """
    best = list(dict.fromkeys(draft.cuts for draft in first))[:_NUM_KEPT]
    small = [draft.cuts for draft in first if _is_small(draft) and draft.cuts not in best]
    kept = [*best, *list(dict.fromkeys(small))[:_NUM_KEPT]]
    few: dict[tuple[int, float | None], Draft] = {}
    layouts: dict[tuple[BucketStarts, int], Draft] = {}
    for draft in sorted(_siblings(drafts, kept), key=lambda draft: draft.seconds):
        if _is_small(draft):
            few.setdefault((draft.window, draft.patience), draft)
        layouts.setdefault((draft.cuts, draft.window), draft)
    others = list(layouts.values())[:_NUM_STARTS]
    return list(dict.fromkeys([*others[:1], *list(few.values())[:_NUM_KEPT], *others[1:]]))


def _is_small(draft: Draft) -> bool:
    return draft.patience is not None and len(draft.cuts) <= _FEW_BUCKETS


def _siblings(drafts: Drafts, many: Sequence[BucketStarts]) -> Iterator[Draft]:
    """The same cuts with every window and schedule, the plain ones last."""
    for cuts, window in product(many, _WINDOWS):
        yield drafts.dear(cuts, window=window)
        for patience in PATIENCES:
            yield drafts.interleaved(cuts, window=window, patience=patience)
        yield from drafts.plain(cuts, window=window)


class _Climb:
    """Goes from the best draft to a better neighbour, until there is none or effort is spent."""

    def __init__(self, problem: Problem, best: Draft, *, enough_s: float) -> None:
        self._problem, self._drafts = problem, Drafts(problem)
        self._enough_s = enough_s
        self.best = best

    @property
    def over(self) -> bool:
        """Whether there is nothing more to gain or to spend."""
        return self.best.seconds <= self._enough_s or self._problem.num_events > _MOST_EVENTS

    def move_cuts(self) -> None:
        """Remove, move and add cuts, one at a time, from the first layers on."""
        gained = True
        while gained:
            gained = False
            number = 0
            while number < len(self.best.cuts):
                for cuts in _neighbours(self._problem, self.best.cuts, number):
                    if self.over:
                        return
                    gained |= self._take(self._redo(cuts))
                number += 1

    def move_ties(self) -> None:
        """Tie gathers to the reduce-scatter before or behind, and swap neighbours."""
        gained = self.best.schedule.wait is Wait.FEED_FORWARD
        while gained:
            gained = False
            for number in range(len(self.best.cuts)):
                gathers = self.best.schedule.all_gathers
                for other in _other_ties(gathers, self.best.schedule.reduce_scatters, number):
                    if self.over:
                        return
                    gained |= self._take(
                        self._drafts.tied(self.best.cuts, other, window=self.best.window)
                    )

    def merge_buckets(self, most_s: float) -> None:
        """Remove cuts as long as an iteration takes no more than ``most_s``, between small buckets
        first: each costs ranks that share a machine more than its simulated time.
        """
        most_events = self._problem.num_events + _MOST_EVENTS_OF_MERGING
        refused = set(self._problem.forced)
        while self._problem.num_events < most_events:
            cuts = self.best.cuts
            sizes = self._problem.sizes(cuts)
            merged = {
                cut: before + behind
                for cut, before, behind in zip(cuts[1:], sizes, sizes[1:], strict=False)
                if cut not in refused
            }
            if not merged:
                return
            least = min(merged, key=lambda cut: merged[cut])
            draft = self._reorder(tuple(cut for cut in cuts if cut != least))
            if draft.seconds <= most_s:
                self.best = draft
            else:
                refused.add(least)

    def _take(self, draft: Draft) -> bool:
        if draft.seconds >= self.best.seconds * (1 - _LEAST_GAIN):
            return False
        self.best = draft
        return True

    def _reorder(self, cuts: BucketStarts) -> Draft:
        """As ``_redo``, but where single gathers were tied, with the best order for these cuts."""
        draft = self._redo(cuts)
        if draft.patience is not None or draft.schedule.wait is not Wait.FEED_FORWARD:
            return draft
        window = self.best.window
        orders = (self._drafts.interleaved(cuts, window=window, patience=p) for p in PATIENCES)
        return min((draft, *orders), key=_merit)

    def _redo(self, cuts: BucketStarts) -> Draft:
        """What the best draft is, with other cuts."""
        window, patience = self.best.window, self.best.patience
        if patience is not None:
            return self._drafts.interleaved(cuts, window=window, patience=patience)
        if self.best.schedule.wait is Wait.FEED_FORWARD:
            return self._drafts.dear(cuts, window=window)
        same = (
            draft
            for draft in self._drafts.plain(cuts, window=window)
            if draft.schedule.name == self.best.schedule.name
        )
        return next(same, self.best)


def _neighbours(problem: Problem, cuts: BucketStarts, number: int) -> Iterator[BucketStarts]:
    """Cuts without the given one, with it moved by a tensor, and with another one behind it."""
    here = cuts[number]
    stop = cuts[number + 1] if number + 1 < len(cuts) else len(problem.tensors)
    if here not in problem.forced:
        yield (*cuts[:number], *cuts[number + 1 :])
        for moved in (here - 1, here + 1):
            if cuts[number - 1] < moved < stop:
                yield (*cuts[:number], moved, *cuts[number + 1 :])
    if stop - here > 1:
        sums = [*accumulate(problem.nbytes[here:stop])]
        middle = min(range(1, stop - here), key=lambda at: abs(2 * sums[at - 1] - sums[-1]))
        yield (*cuts[: number + 1], here + middle, *cuts[number + 1 :])


def _other_ties(
    gathers: Sequence[AllGather], order: Sequence[int], number: int
) -> Iterator[tuple[AllGather, ...]]:
    gather = gathers[number]
    at = order.index(gather.after)
    for moved in (at - 1, at + 1):
        if 0 <= moved < len(order):
            other = AllGather(gather.bucket, order[moved])
            yield (*gathers[:number], other, *gathers[number + 1 :])
    if number + 1 < len(gathers):
        behind = gathers[number + 1]
        yield (*gathers[:number], behind, gather, *gathers[number + 2 :])
