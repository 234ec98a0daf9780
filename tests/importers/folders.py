"""Import a folder in a test, and compare what the cache has with what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wds_tensorcache as tc
from wds_tensorcache.integrations.importers.import_cache import import_cache
from wds_tensorcache.integrations.importers.report import ImportReport

__all__ = ["imported"]


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], ImportReport]:
    """Return the imported samples by their original names, and the report; the cache is intact."""
    report = import_cache(source, out, **options)
    assert tc.verify(out).ok
    assert report.num_read == report.num_written + report.num_present + report.num_skipped
    with tc.open(out) as cache:
        return {tc.original_name(key): tc.realize(cache[key]) for key in list(cache.keys())}, report
