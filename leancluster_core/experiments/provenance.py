"""Where numbers come from: versions, device and commit, recorded with every run."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from leancluster_core.experiments.config import NUMERICS_VERSION


def provenance(device: torch.device) -> dict[str, Any]:
    """Plain values that say how a result was made: versions, device, threads, commit, time."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "numerics": NUMERICS_VERSION,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def device_name(device: torch.device) -> str:
    """The device in words, as "AMD EPYC (CPU)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpu_facts = Path("/proc/cpuinfo")
    if cpu_facts.exists():
        models = [x for x in cpu_facts.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name} (CPU)"


@cache
def commit() -> str:
    """Short commit of the package, with "+" if files of it differ; "unknown" outside git.

    As it was at the first call of this process, which holds the code that it loaded until it ends.
    """
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
