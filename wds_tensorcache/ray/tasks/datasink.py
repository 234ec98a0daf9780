"""The datasink of `tc.ray.write_ray`: each task writes its own shards, the driver collects what the tasks return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.data import Datasink

from wds_tensorcache.ray.tasks.jobs import Part, WriteJob
from wds_tensorcache.ray.tasks.parts import write_part


class CacheDatasink(Datasink[Part]):  # type: ignore[misc]
    """A datasink that writes shards into the folder of a job.

    Attributes:
        parts: Results of the tasks, on the driver, after the write; None if it has not ended.

    Threads/fork/pickle: tasks get a copy, which only refers to the job.
    """

    def __init__(self, job: WriteJob, min_samples: int | None) -> None:
        self._job, self._min_samples = job, min_samples
        self.parts: list[Part] | None = None

    def get_name(self) -> str:
        return "Tensorcache"

    @property
    def min_rows_per_write(self) -> int | None:
        return self._min_samples

    def write(self, blocks: Iterable[Any], ctx: Any) -> Part:
        # With the reading fused into this task, `ctx` and the schema are those of the whole operator.
        return write_part(self._job, blocks, ctx.task_idx)

    def on_write_complete(self, write_result: Any) -> None:
        self.parts = list(write_result.write_returns)
