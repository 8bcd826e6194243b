"""Updates of all buckets: of one kind, chosen by what is gathered.

With ``gather="parameters"`` every bucket has an update of this rank's shard, with ``"gradients"``
one of its whole parameters; nobody has both.
"""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.engine.update.shard_update import ShardUpdate
from dearmpi.engine.update.whole_update import WholeUpdate

Updates = Sequence[ShardUpdate] | Sequence[WholeUpdate]


def shards_of(updates: Updates) -> list[ShardUpdate]:
    """All of them where they are of shards, else none."""
    return [update for update in updates if isinstance(update, ShardUpdate)]


def wholes_of(updates: Updates) -> list[WholeUpdate]:
    """All of them where they are of whole parameters, else none."""
    return [update for update in updates if isinstance(update, WholeUpdate)]
