"""Use of this node's GPUs during a training step, as nvidia-smi reports it."""

import logging
import shutil
import statistics
import subprocess
import threading
from collections import defaultdict

from nemo_rl.tracing import record_counter

logger = logging.getLogger(__name__)

PERIOD_S = 10.0  # between two samples
TIMEOUT_S = 30.0  # per sample: the driver answers slowly while GPUs start
MIB_PER_GIB = 1024
FIELDS = ("utilization.gpu", "memory.used", "power.draw", "temperature.gpu")
METRICS = ("util", "mem_gb", "power_w", "temperature_c")


class GpuMonitor:
    """Samples the GPUs in a thread of its own until it is closed, or until nvidia-smi fails."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_closed, name="gpu-monitor", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the mean of each metric since the last call, by its full name; {} without a sample since then."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in samples.items()}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(TIMEOUT_S)

    def _sample_until_closed(self) -> None:
        while not self._closed.is_set():
            try:
                sample = query_gpus()
            except (OSError, subprocess.SubprocessError) as error:
                logger.warning("stopped monitoring GPUs: nvidia-smi failed: %s", error)
                return
            with self._lock:
                for name, value in sample.items():
                    self._samples[name].append(value)
                    record_counter(name, value)
            self._closed.wait(self._period_s)


def start_gpu_monitor() -> GpuMonitor | None:
    """Return a monitor; None on a machine without nvidia-smi."""
    return None if shutil.which("nvidia-smi") is None else GpuMonitor()


def query_gpus() -> dict[str, float]:
    """Return `gpu/<index>/<metric>` of each GPU that the driver shows; values that it does not know are omitted.

    Raises OSError or SubprocessError if nvidia-smi fails.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(('index', *FIELDS))}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = {}
    for row in filter(str.strip, done.stdout.splitlines()):
        index, *values = (part.strip() for part in row.split(","))
        for metric, value in zip(METRICS, values, strict=False):
            try:
                number = float(value)
            except ValueError:  # "[N/A]": a partitioned GPU, or one that shares the host's memory
                continue
            found[f"gpu/{index}/{metric}"] = number / MIB_PER_GIB if metric == "mem_gb" else number
    return found
