"""Folders of small samples, which are gathered from maps, and of large ones, which are not."""

from tests.reading.batches import LARGE, SMALL, folder_of

small = folder_of(SMALL)
large = folder_of(LARGE)
