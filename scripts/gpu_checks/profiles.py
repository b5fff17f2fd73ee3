"""The ten most expensive kernels of recorded steps. Without a device the steps are done on small shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_checks import gates, results

#: Target, drafter, window, context, and a rule of stage 3 (default: exact).
CASES = {
    "XL vanilla": ("xl", "none", 0, None),
    "XL EAGLE tree of 26": ("xl", "tree", 0, None),
    "XL LANTERN tree of 26": ("xl", "tree", 0, None, "lantern"),
    "7B vanilla at 2,400 keys": ("7b", "none", 0, 2400),
    "7B SJD 64 at 2,400 keys": ("7b", "sjd", 64, 2400),
}
STEPS = 10


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    for name, case in CASES.items():
        if not fast or case[0] == "xl":
            check = partial(_most_expensive, *case)
            yield name, check if cuda else partial(gates.dry, check)


@torch.inference_mode()
def _most_expensive(
    name: str, drafter: str, window: int, context: int | None, rule: str | None = None
) -> dict[str, Any]:
    """By name: microseconds and launches a step."""
    _, step, _ = gates.recorded(name, drafter, window, context, rule=rule)
    cuda = gates.device().type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    step()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS if cuda else 1):
            step()
        synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    most = sorted(spent.items(), key=lambda item: -sum(item[1]))
    table = [[kernel[:100], round(sum(us) / STEPS, 2), len(us) / STEPS] for kernel, us in most[:10]]
    for kernel, us, count in table:
        print(f"      {us:9.2f} us  {count:6.1f} x  {kernel}")
    total = sum(sum(us) for us in spent.values()) / STEPS / 1e3
    return {"kernels": table, "note": f"{total:.3f} ms in {sum(map(len, spent.values())) / STEPS:.0f} launches a step"}
