"""Web servers: requests, ranges of bodies, and what servers get wrong."""
