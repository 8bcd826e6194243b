"""Which way should a gradient take into its flat buffer?

view: ``param.grad`` is a view of the flat buffer, zeroed before each backprop; autograd adds to it.
copy: ``param.grad`` is None; autograd hands over its tensor and a hook copies it into the buffer.

Usage: python benchmarks/gradient_path.py [WIDTH] [LAYERS] [BATCH]
Prints the time of a backprop per parameter byte for both, interleaved, medians and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

ROUNDS = 31


def main() -> None:
    width, layers, batch = map(int, [*sys.argv[1:], *("1024", "12", "8")[len(sys.argv) - 1 :]])
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    views, start = [], 0
    for param in params:
        views.append(flat[start : start + param.numel()].view_as(param))
        start += param.numel()
    batch_data = torch.randn(batch, width)
    times: dict[str, list[float]] = {"view": [], "copy": []}
    for _ in range(ROUNDS):
        times["view"].append(backprop_into_views(model, batch_data, flat, params, views))
        times["copy"].append(backprop_with_copies(model, batch_data, params, views))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {seconds * 1e3:.2f} ms for {flat.numel() * 4 / 1e6:.0f} MB of gradients")
    print(f"copy takes {medians['copy'] / medians['view']:.2f} of the time of view")


def backprop_into_views(
    model: nn.Module,
    data: torch.Tensor,
    flat: torch.Tensor,
    params: list[nn.Parameter],
    views: list[torch.Tensor],
) -> float:
    """Seconds for zeroing the buffer and a backprop that accumulates into it."""
    for param, view in zip(params, views, strict=True):
        param.grad = view
    loss = model(data).square().mean()
    start = time.perf_counter()
    flat.zero_()
    loss.backward()
    return time.perf_counter() - start


def backprop_with_copies(
    model: nn.Module, data: torch.Tensor, params: list[nn.Parameter], views: list[torch.Tensor]
) -> float:
    """Seconds for a backprop whose gradients a hook copies into the buffer."""
    handles = []
    for param, view in zip(params, views, strict=True):
        param.grad = None

        def hook(p: torch.Tensor, view: torch.Tensor = view) -> None:
            assert p.grad is not None
            view.copy_(p.grad)
            p.grad = None

        handles.append(param.register_post_accumulate_grad_hook(hook))
    loss = model(data).square().mean()
    start = time.perf_counter()
    loss.backward()
    seconds = time.perf_counter() - start
    for handle in handles:
        handle.remove()
    return seconds


if __name__ == "__main__":
    main()
