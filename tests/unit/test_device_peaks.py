"""Names of devices, as CUDA tells them, find the peaks of their data sheets."""

import pytest

from nemo_rl.device_peaks import peaks_of


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
    ],
)
def test_peak_of_a_device(name: str, flops: float) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.flops == flops


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA GeForce GT 710", "Tesla V100-SXM2-32GB"])
def test_a_device_that_is_not_listed_has_none(name: str) -> None:
    assert peaks_of(name) is None


def test_a_gh200_is_no_h200() -> None:
    found = peaks_of("NVIDIA GH200 480GB"), peaks_of("NVIDIA H200")
    assert [peaks and peaks.memory_bytes for peaks in found] == [4.0e12, 4.8e12]
