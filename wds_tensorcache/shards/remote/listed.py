"""Manifests at urls: which shards they list, and which entries are refused."""

from __future__ import annotations

import re

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.manifest import MAX_NBYTES, Found, check_inside, parse_entry, parse_manifest
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.fetch import run
from wds_tensorcache.storage.urls import is_web, join_url, keep_secrets, shown

__all__ = ["read_remote_manifest", "shard_url"]

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*\Z").match
_COMMAND = re.compile(r"(?i:pipe|file|data):")


def read_remote_manifest(url: str) -> list[Found]:
    """Return the shards that the manifest at `url` lists. One request.

    Raises:
        FileNotFoundError: There is no manifest, or it lists no shards.
        FormatError: The object is not a manifest, or lists a shard that is not in the folder of the manifest.
        RemoteError: The request failed.
    """
    _, content = run(lambda: client_for(url).read_whole(url, MAX_NBYTES))
    try:
        entries, extra = parse_manifest(content)
        folder = keep_secrets(url, url.rpartition("/")[0])
        found: dict[str, Found] = {}
        first: dict[str, str] = {}
        for entry in entries:
            shard = shard_url(folder, entry.url)
            if first.setdefault(shard, entry.url) != entry.url:
                what = f"{entry.url!r:.200} is the same shard as {first[shard]!r:.200}; list it once"
                raise FormatError(what, kind="duplicate")
            found[shard] = parse_entry(shard, entry, extra, manifest=url, is_remote=True)
    except FormatError as exc:
        raise exc.at(url) from exc
    if not found:
        raise FileNotFoundError(f"{url} lists no shards")
    return list(found.values())


def shard_url(folder: str, listed: str) -> str:
    """Return the url of a shard that a manifest in the folder at url `folder` lists.

    Hazard: the manifest may be hostile. It must not make readers send requests, perhaps with credentials, to another host or to
    another folder, run a command, or open local files.

    Args:
        listed: Path of the shard relative to the folder, as a local manifest has it, not percent-encoded; or the url of an
            object in the folder.

    Raises:
        FormatError: `listed` names anything else.
    """
    if _PLAIN(listed):  # most shards of large manifests
        return keep_secrets(folder, f"{folder}/{listed}")
    check_inside(listed)
    name = listed
    if "://" in listed:
        if not listed.startswith(f"{folder}/"):
            what = f"lists {shown(listed)!r:.200}, which is not in the folder of the manifest"
            raise FormatError(f"{what}; pass the urls of such shards to tc.open, in a list", kind="index")
        name = listed[len(folder) + 1 :]
    parts = [part for part in name.split("/") if part != "."]
    if (
        _COMMAND.match(name)
        or "\\" in name
        or not (parts and all(parts))
        or (name != listed and is_web(folder) and re.search("[?#]|%2[eEfF]|%5[cC]", name))
    ):
        what = f"lists {shown(listed)!r:.200}, expected the path of a shard in the folder of the manifest"
        raise FormatError(f"{what}: relative, with '/' between names and without '..'", kind="index")
    path = "/".join(parts)
    return keep_secrets(folder, f"{folder}/{path}") if name != listed else join_url(folder, path)
