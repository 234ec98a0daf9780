"""Web servers: requests, ranges of bodies, and faults of servers."""
