"""The steps of `read_batch`: find tensors, place them, read them, nest them."""
