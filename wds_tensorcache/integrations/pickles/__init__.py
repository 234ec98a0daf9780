"""Read pickles, and files of `torch.save`, without running them."""
