"""What a figure must stand beside: the machine, the versions, the commit, the memory that was used."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from eyas.native import cpu_features, threads_in_use


def machine() -> dict[str, object]:
    """The processor, what it can do, and how many threads work on it."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.processor()
    )
    features = [name for name, found in (cpu_features() or {}).items() if found]
    return {"cpu": model, "features": features, "system": platform.platform(), "threads": threads_in_use()}


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def versions() -> dict[str, str]:
    """Versions that figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eyas": _version(),
    }


def _version() -> str:
    try:
        return version("eyas")
    except PackageNotFoundError:  # run from a source folder that was never installed
        return "unknown"


def commit() -> str:
    """The commit that this code was checked out from, `-dirty` where files differ; the version where there is none."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        # an install inside some other project's checkout is not that project's code
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], check=True, capture_output=True, timeout=10)
        named = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(named, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return _version()


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
