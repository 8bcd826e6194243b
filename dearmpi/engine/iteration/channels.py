"""Channels: the communicators of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.engine.device.comm_stream import SideStream


@dataclass(frozen=True, slots=True)
class Channels:
    """One for each kind of operation."""

    reduces: Channel
    gathers: Channel
    control: Channel

    @classmethod
    def open(cls, world: World, side: SideStream, *, window: int) -> Channels:
        """New ones (collective), for tensors where ``side`` is.

        What carries a device's tensors keeps to ``window`` on the network, and to this order.
        """
        reduces, gathers = (
            world.open_channel(name, window=window + side.num_ahead, wrap=side.carry)
            for name in ("reduce-scatter", "all-gather")
        )
        return cls(reduces, gathers, world.open_channel("roll call", window=1))

    def close(self) -> None:
        """Give them back once they are empty (collective)."""
        for channel in (self.reduces, self.gathers, self.control):
            channel.close()
