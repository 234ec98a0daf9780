"""Programs that scenarios run in separate processes, to measure their memory and their first steps."""
