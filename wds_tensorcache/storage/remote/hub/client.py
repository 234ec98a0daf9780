"""Files in repositories of a hub (`hf://datasets/ORG/NAME@REVISION/path`), through fsspec."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from wds_tensorcache.storage.remote.client import ObjectInfo, fill_buffers, read_tail_by_stat
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import TRANSIENT_STATUSES, Attempts, Target, TransientError, check_cancelled

_PART = 4 << 20
_Result = TypeVar("_Result")


class HubClient:
    """Reads files in repositories of a hub; see `Client`. fsspec and `huggingface_hub` find the credentials and the address.

    A branch is resolved to its commit when it is first read, and the commit cannot change. So this process reads one version,
    and the tag is the hash of the file's content. A request that is under way does not end early when it is cancelled.

    Threads/fork/pickle: as `Client`.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.pace = Pace()
        try:
            import fsspec
            import huggingface_hub
        except ImportError as missing:
            need = "reading hf:// needs fsspec and huggingface_hub"
            raise ImportError(f"{need}: pip install 'wds-tensorcache[remote]' huggingface_hub") from missing
        endpoint = os.environ.get("HF_ENDPOINT") or None
        # another instance may have connections that a forked child must not use
        self._fs: Any = fsspec.filesystem("hf", endpoint=endpoint, skip_instance_cache=True)
        self._api = huggingface_hub.HfApi(endpoint=endpoint)
        self._commits: dict[tuple[str, str, str], str] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HubClient({self.origin!r})"

    def _try(self, call: Callable[[], _Result], attempts: Attempts) -> _Result:
        """Return the result of a call; repeat it while its errors may pass."""
        while True:
            failed: BaseException
            check_cancelled()
            try:
                return call()
            except (TypeError, AttributeError, TransientError):
                raise  # a mistake in the code of the call, which no other attempt repairs
            except Exception as exc:
                failed = exc
            # Out of the handler, so that the caught error, whose text may have a signed url, is not the context of another.
            status = getattr(getattr(failed, "response", None), "status_code", None)
            if isinstance(failed, FileNotFoundError) or status in (404, 410):
                raise attempts.target.missing()
            name = type(failed).__name__
            if isinstance(failed, (ValueError, NotImplementedError, IsADirectoryError)):
                raise attempts.target.error(f"this is not a file in a repository ({name})", status)
            if status is not None and status not in TRANSIENT_STATUSES:
                hint = "; check the token" if status in (401, 403) else ""
                raise attempts.target.error(f"the hub responds with status {status} ({name}){hint}", status)
            attempts.pause(TransientError(f"the request failed ({name})", status))

    def _path(self, url: str, attempts: Attempts) -> str:
        """Return the path of a file at a fixed commit."""
        path = url.partition("://")[2]
        resolved = self._try(lambda: self._fs.resolve_path(path), attempts)
        key = resolved.repo_type, resolved.repo_id, resolved.revision
        commit = self._commits.get(key)
        if commit is None:
            repository = self._try(
                lambda: self._api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision),
                attempts,
            )
            with self._lock:
                commit = self._commits.setdefault(key, str(repository.sha))
        prefix = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
        return f"{prefix}{resolved.repo_id}@{commit}/{resolved.path_in_repo}"

    def _info(self, url: str, attempts: Attempts) -> tuple[str, ObjectInfo]:
        path = self._path(url, attempts)
        info = self._try(lambda: self._fs.info(path), attempts)
        if info["type"] != "file":
            raise attempts.target.missing()
        return path, _state(info)

    def stat(self, url: str, /) -> ObjectInfo:
        return self._info(url, Attempts(Target(url)))[1]

    def read_tail(self, url: str, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        return read_tail_by_stat(self, url, nbytes)

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, /) -> ObjectInfo:
        end = begin + sum(map(len, buffers))
        target = Target(url, begin, end)
        target.check_inside(expected)
        if begin == end:
            return expected
        attempts = Attempts(target, end - begin)
        path, state = self._info(url, attempts)
        target.check_same(state, expected)
        begun = time.monotonic()
        content = memoryview(self._try(lambda: self._range(path, begin, end), attempts))
        self.pace.begin(time.monotonic() - begun).end(len(content))
        check_cancelled()
        fill_buffers(buffers, content)
        return state

    def _range(self, path: str, begin: int, end: int) -> bytes:
        # With another type of cache, fsspec reads 5 MB more.
        with self._fs.open(path, "rb", cache_type="none", block_size=_PART) as file:
            file.seek(begin)
            content = file.read(end - begin)
        if len(content) != end - begin:
            raise ConnectionError("a body of another length")
        return bytes(content)

    def read_whole(self, url: str, max_nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        state = self.stat(url)
        if state.nbytes > max_nbytes:
            raise Target(url).error(f"the object has {state.nbytes} bytes, more than {max_nbytes}")
        content = bytearray(state.nbytes)
        view = memoryview(content)
        for begin in range(0, state.nbytes, _PART):
            self.read_into(url, [view[begin : begin + _PART]], begin, state)
        return state, bytes(content)

    def list_objects(self, folder: str, /) -> Iterator[tuple[str, ObjectInfo]]:
        attempts = Attempts(Target(folder))
        path = self._path(folder.rstrip("/"), attempts)
        entries = self._try(lambda: self._fs.ls(path, detail=True), attempts)
        for entry in sorted(
            (entry for entry in entries if entry["type"] == "file"), key=lambda entry: str(entry["name"])
        ):
            yield f"{folder.rstrip('/')}/{entry['name'].rpartition('/')[2]}", _state(entry)


def _state(info: dict[str, Any]) -> ObjectInfo:
    """Return the state of a file from the record that fsspec returns."""
    large = info.get("lfs")
    tag = large.get("sha256") if large else None
    return ObjectInfo(int(info["size"]), tag or info.get("blob_id"))
