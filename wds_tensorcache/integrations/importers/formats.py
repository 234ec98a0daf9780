"""All formats that can be imported, and the choice of the one that fits a folder."""

from __future__ import annotations

from wds_tensorcache.errors import unknown_name
from wds_tensorcache.integrations.importers.generic import file_folder
from wds_tensorcache.integrations.importers.source import Format
from wds_tensorcache.integrations.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.importers.trainers import diffusion_pipe, ltx, nemo, onetrainer, simpletuner

__all__ = ["FORMATS", "choose_format"]

FORMATS: tuple[Format, ...] = (
    diffusion_pipe.FORMAT,
    file_folder.FORMAT,
    ltx.FORMAT,
    nemo.FORMAT,
    onetrainer.FORMAT,
    simpletuner.FORMAT,
)


def choose_format(folder: SourceFolder, name: str = "auto") -> Format:
    """Return the format with a name; for "auto", the one that recognizes the most files of a folder.

    Raises:
        ValueError: There is no such format; or no format, or more than one, fits the folder.
    """
    if name != "auto":
        found = next((each for each in FORMATS if each.name == name), None)
        if found is None:
            raise ValueError(unknown_name("format", name, [each.name for each in FORMATS]))
        return found
    counts = [(each, each.recognize(folder)) for each in FORMATS]
    for is_generic in (False, True):
        fitting = [(each, count) for each, count in counts if count and each.is_generic == is_generic]
        best = max((count for _, count in fitting), default=0)
        names = [each.name for each, count in fitting if count == best]
        if len(names) > 1:
            raise ValueError(
                f"{folder.path}: the {best:,} files may be of {' or '.join(names)}; pass one of them as --format (format=)"
            )
        if names:
            return next(each for each, _ in fitting if each.name == names[0])
    raise ValueError(
        f"{folder.path}: none of its {len(folder.names):,} files belongs to a known format; --list-formats lists them"
    )
