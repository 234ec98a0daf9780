"""The parts of a dataset that run on the cluster: tasks that read and write, and the commit on the driver."""
