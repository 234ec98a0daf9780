"""What is measured, one file for each scenario or for those that share their rows."""
