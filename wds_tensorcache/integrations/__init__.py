"""Adapters to webdataset, torch's data loaders, Lightning and accelerate; exports, and decoders of untrusted files.

Untrusted members are decoded in `safe_members.py`, pickles and `.pth` files in `pickles.py`, `.npz` and `.npy` in `arrays.py`.
"""
