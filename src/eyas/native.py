"""The way to eyas's compiled module, which an install without a C++ compiler lacks."""

from __future__ import annotations


def cpu_features() -> dict[str, bool] | None:
    """Which vector instruction sets the CPU offers (off x86 none), or None without the compiled module."""
    try:
        from eyas import _native  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return None
    return _native.cpu_features()
