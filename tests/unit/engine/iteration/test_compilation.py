"""What is known of a frame that torch is about to compile."""

from __future__ import annotations

from dearmpi.engine.iteration.compilation import CompiledFrame


def test_a_graph_of_which_torch_shows_nothing_may_hold() -> None:
    """So that whoever runs it is taken for one that waits for nobody."""
    code = test_a_graph_of_which_torch_shows_nothing_may_hold.__code__
    assert CompiledFrame(code, {}, made=[object()]).holds()
    assert not CompiledFrame(code, {}, made=[]).holds()
