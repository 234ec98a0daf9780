"""Looking at caches: structure, statistics, differences, and pages that show them."""
