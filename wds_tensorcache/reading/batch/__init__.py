"""A batch: which tensors, where they go, which reads fetch them, and what is returned."""
