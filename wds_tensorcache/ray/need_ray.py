"""Import Ray on first use, with a message that says how to install it."""

from __future__ import annotations

from typing import Any


def need_ray() -> Any:
    """Return the module `ray`, with `ray.data` imported.

    Raises:
        ImportError: Ray is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise ImportError(f"Ray Data cannot be imported ({exc}): pip install 'wds-tensorcache[ray]'") from exc
    return ray
