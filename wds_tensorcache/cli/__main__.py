"""`python -m wds_tensorcache.cli` is the command `tensorcache`."""

from wds_tensorcache.cli import main

main()
