"""Print the tables of scale.md: `python -m benchmarks.scale`."""

from __future__ import annotations

from benchmarks.scale.tables import tables


def main() -> None:
    """Print the tables, each after its title."""
    for title, text in tables().items():
        print(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
