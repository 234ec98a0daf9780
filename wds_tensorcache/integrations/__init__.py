"""Adapters to webdataset, torch, Lightning and accelerate, exports, and safe decoders.

Untrusted members are decoded in `safe_members.py`, pickles and `.pth` files in `pickles.py`, `.npz` and `.npy` in `arrays.py`.
"""
