"""Files in Hugging Face repositories (`hf://datasets/ORG/NAME@REVISION/path`), read at one commit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import unquote

from wds_tensorcache.storage.remote.http import HttpClient
from wds_tensorcache.storage.remote.http_transport import Response
from wds_tensorcache.storage.remote.retry import TRANSIENT_STATUSES, Request, TransientError
from wds_tensorcache.storage.urls import origin_of, web_url

_URL = re.compile(r"hf://(?:(dataset|space|model)s/)?([^/@]+/[^/@]+)(?:@((?:refs/(?:pr|convert)/)?[^/]+))?(?:/(.*))?")
_Result = TypeVar("_Result")


class HubClient(HttpClient):
    """A client of the repositories of a hub; see `Client`. `huggingface_hub` finds the token and the commits.

    A branch is resolved to a commit once, at the first request. So this process reads one version. The tag of a file is the
    hash of its content. The hub redirects to other servers, which have other tags and do not get the token.
    """

    def __init__(self) -> None:
        try:
            import huggingface_hub
        except ImportError as missing:
            install = "pip install 'wds-tensorcache[remote]' huggingface_hub"
            raise ImportError(f"reading hf:// needs huggingface_hub: {install}") from missing
        self._hub = huggingface_hub
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        token = huggingface_hub.get_token()
        super().__init__(origin_of(self._api.endpoint), f"Bearer {token}" if token else None)
        self._commits: dict[tuple[str, str, str | None], str] = {}

    def _parse(self, request: Request) -> tuple[str, str, str, str]:
        """Return a repository's type, name and commit, and the path in it."""
        match = _URL.fullmatch(request.url)
        if match is None:
            raise request.error("expected hf://datasets/ORG/NAME/path, or hf://datasets/ORG/NAME@REVISION/path")
        kind, name, revision = match[1] or "model", match[2], unquote(match[3]) if match[3] else None
        commit = self._commits.get((kind, name, revision))
        if commit is None:
            repository = self._ask(request, lambda: self._api.repo_info(name, repo_type=kind, revision=revision))
            commit = self._commits.setdefault((kind, name, revision), str(repository.sha))
        return kind, name, commit, (match[4] or "").rstrip("/")

    def _ask(self, request: Request, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except Exception as exc:
            failed = exc
        # raised here, so that the caught error, whose text may have a signed url, is not the context of another
        status, name = getattr(getattr(failed, "response", None), "status_code", None), type(failed).__name__
        if status in (404, 410) or isinstance(failed, self._hub.errors.RepositoryNotFoundError):
            raise request.missing_error()
        if isinstance(failed, (ValueError, TypeError)):
            raise request.error(f"this is not a file in a repository ({name})", status)
        if status is None or status in TRANSIENT_STATUSES:
            raise TransientError(f"the request to the hub failed ({name})", status)
        hint = "; check the token" if status in (401, 403) else ""
        raise request.error(f"the hub responds with status {status} ({name}){hint}", status)

    def _locate(self, request: Request) -> str:
        kind, name, commit, path = self._parse(request)
        return web_url(self._hub.hf_hub_url(name, path, repo_type=kind, revision=commit, endpoint=self._api.endpoint))

    def _tag(self, response: Response) -> str | None:
        headers = response.first_headers
        tag: str | None = headers.get("X-Linked-Etag") or headers.get("ETag")
        return tag

    def _conditions(self, request: Request) -> Mapping[str, str]:
        return {}  # a commit does not change

    def list_objects(self, request: Request, /) -> list[str]:
        kind, name, commit, path = self._parse(request)
        entries = self._ask(
            request,
            lambda: list(self._api.list_repo_tree(name, path or None, repo_type=kind, revision=commit)),
        )
        names = [entry.path.rpartition("/")[2] for entry in entries if hasattr(entry, "size")]
        return [f"{request.url.rstrip('/')}/{name}" for name in sorted(names)]
