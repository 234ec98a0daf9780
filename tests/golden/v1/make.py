"""Write the members in this folder: `python -m tests.golden.v1.make`, run once with the release that froze format version 1.

The members never change. A change of the format gets its own folder.
"""

from __future__ import annotations

from pathlib import Path

import wds_tensorcache as tc
from tests.interop.other_python import tensor_samples

if __name__ == "__main__":
    folder = Path(__file__).parent
    for name, sample in tensor_samples().items():
        skeleton, tensors = tc.encode_sample(sample)
        (folder / f"{name}.skel.pyd").write_bytes(skeleton)
        (folder / f"{name}.safetensors").write_bytes(tensors)
