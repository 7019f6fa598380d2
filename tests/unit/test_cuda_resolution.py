"""The CUDA versions of resolved packages, from lines of `uv pip compile`."""

import runpy
from pathlib import Path

CHECK = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "acceptance" / "cuda_resolution.py"))


def test_the_cuda_version_is_in_the_name_or_that_of_the_package() -> None:
    lines = ["cuda-bindings==13.4.4", "cuda-python==12.6.2.post1", "nvidia-nccl-cu13==2.29.7", "torch==2.13.0", ""]
    lines += ["nvidia-cutlass-dsl-libs-cu12==4.8.0", "nvidia-curand==10.4.0.35", "nvidia-cudnn-cu13==9.20.0.48"]
    assert CHECK["cuda_majors"](lines) == {
        "cuda-bindings": 13,
        "cuda-python": 12,
        "nvidia-nccl-cu13": 13,
        "nvidia-cudnn-cu13": 13,
    }
