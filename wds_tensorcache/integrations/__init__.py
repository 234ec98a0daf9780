"""Adapters to webdataset, torch's data loaders and files of `torch.save`."""
