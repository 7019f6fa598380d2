"""Peaks of devices by their makers' data sheets: dense bfloat16 operations, and bytes of their memory."""

import re
from dataclasses import dataclass

DEVICE_NAMES = ("A10", "A10G", "A100", "B200", "GB200", "GH200", "H20", "H100", "H200", "L4", "L40", "L40S")


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """The most that a device does in a second."""

    flops: float  # bfloat16 operations with float32 sums, without sparsity
    memory_bytes: float  # read from its memory


PEAKS: tuple[tuple[str, DevicePeaks], ...] = (  # the first pattern that a device's name has
    (r"GB200|GB300", DevicePeaks(2.5e15, 8.0e12)),
    (r"B200|B300", DevicePeaks(2.25e15, 8.0e12)),
    (r"GH200", DevicePeaks(989.4e12, 4.0e12)),
    (r"H200", DevicePeaks(989.4e12, 4.8e12)),
    (r"H100.*PCIe", DevicePeaks(756e12, 2.0e12)),
    (r"H100|H800", DevicePeaks(989.4e12, 3.35e12)),
    (r"H20\b", DevicePeaks(148e12, 4.0e12)),
    (r"A100.*40GB", DevicePeaks(312e12, 1.555e12)),
    (r"A100|A800", DevicePeaks(312e12, 2.039e12)),
    (r"L40S", DevicePeaks(362e12, 0.864e12)),
    (r"L40\b", DevicePeaks(181e12, 0.864e12)),
    (r"L4\b", DevicePeaks(121e12, 0.3e12)),
    (r"A10G", DevicePeaks(70e12, 0.6e12)),
    (r"A10\b", DevicePeaks(125e12, 0.6e12)),
)


def peaks_of(device_name: str) -> DevicePeaks | None:
    """Return the peaks of a device by its name, as CUDA tells it; None for one that is not listed.

    Example: peaks_of("NVIDIA H100 80GB HBM3").flops is 989.4e12.
    """
    return next((peaks for pattern, peaks in PEAKS if re.search(pattern, device_name)), None)
