"""Ray Data, as `tc.ray`: caches as datasets, and datasets as caches.

Without Ray, `tc.ray` raises ImportError.
"""

try:
    import ray.data  # noqa: F401
except ImportError as exc:
    raise ImportError(f"Ray Data cannot be imported ({exc}): pip install 'wds-tensorcache[ray]'") from exc

from wds_tensorcache.ray.batches import ray_collate, ray_from_torch, ray_sample, ray_table, ray_to_torch
from wds_tensorcache.ray.build import build_ray
from wds_tensorcache.ray.read import read_ray
from wds_tensorcache.ray.write import write_ray

__all__ = [
    "build_ray",
    "ray_collate",
    "ray_from_torch",
    "ray_sample",
    "ray_table",
    "ray_to_torch",
    "read_ray",
    "write_ray",
]
