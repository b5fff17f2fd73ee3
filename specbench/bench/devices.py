"""Named GPUs, with the figures of their maker's data sheets. To add one, add a line to `DEVICES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbench.errors import UsageError, decimal, unknown


@dataclass(frozen=True)
class Device:
    """bandwidth: GB/s of its memory; memory: GB, 0 if unknown; operations: 1e12 per second in products of dense
    matrices, by number format, None if unknown."""

    bandwidth: float
    memory: float
    operations: Mapping[str, float] | None = None


def _nvidia(bandwidth: float, memory: float, half: float, single: float) -> Device:
    """half: dense matrices in bfloat16 or float16 with sums in float32; single: float32 without tensor cores."""
    return Device(bandwidth, memory, {"bfloat16": half, "float16": half, "float32": single})


#: From NVIDIA's data sheets (the SXM form if there are several): A100 (June 2021), H100, H200, L40S, and for the RTX
#: 4090 the Ada white paper (appendix A). B200 is an eighth of a DGX or HGX B200 (1,440 GB, 64 TB/s).
DEVICES = {
    "rtx4090": _nvidia(1008, 24, 165, 82.6),
    "l40s": _nvidia(864, 48, 362, 91.6),
    "a100_40": _nvidia(1555, 40, 312, 19.5),
    "a100": _nvidia(2039, 80, 312, 19.5),
    "h100": _nvidia(3350, 80, 989, 67),
    "h200": _nvidia(4800, 141, 989, 67),
    "b200": _nvidia(8000, 180, 2250, 75),
}


def of_bandwidth(text: str | None) -> Mapping[str, Device]:
    """The devices of `bench.bandwidth=`: a known name, or the GB/s of a device whose memory is unknown; default: all
    known devices. Raises UsageError for anything else."""
    if text is None:
        return DEVICES
    if text in DEVICES:
        return {text: DEVICES[text]}
    try:
        speed = decimal(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1e6:
        raise UsageError(
            f"bench.bandwidth must be GB/s, above 0 and at most 1e6, or one of {', '.join(DEVICES)} (got {text})"
        )
    return {"device": Device(speed, 0)}


def named(name: str) -> dict[str, Device]:
    """The device with a name; a bare number means the RTX card. UsageError for an unknown name."""
    name = name.lower()
    full = f"rtx{name}" if f"rtx{name}" in DEVICES else name
    if full not in DEVICES:
        raise unknown("device_for", name, DEVICES)
    return {full: DEVICES[full]}


def of_name(device_name: str) -> str:
    """The name in `DEVICES` of a device by its driver's name, or this name if the device is not known."""
    squeezed = device_name.lower().replace(" ", "")
    known = [name for name in DEVICES if all(part in squeezed for part in name.split("_"))]
    return max(known, key=len, default=device_name)


def only_dry(device_for: object, dry_run: bool) -> None:
    """UsageError if a dry run's device is given without --dry-run."""
    if device_for and not dry_run:
        raise UsageError("device_for= goes with --dry-run; use device= to choose where a run decodes")
