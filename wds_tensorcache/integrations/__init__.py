"""Adapters to webdataset, torch's data loaders and files of `torch.save`.

Untrusted members are decoded in `safe_members.py`, pickles and `.pth` files in `pickles.py`, `.npz` and `.npy` in `arrays.py`.
"""
