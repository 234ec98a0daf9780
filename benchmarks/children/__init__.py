"""Programs that measure memory; scenarios run each in a separate process."""
