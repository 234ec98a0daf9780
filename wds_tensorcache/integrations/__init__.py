"""Adapters to webdataset, torch's data loaders and files of `torch.save`.

Untrusted `.npz`, `.gz`, `.npy` and pictures are checked in `safe_members.py`; the zip of a `.pth` file is read in `pth.py`.
"""
