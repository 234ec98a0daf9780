"""How users of other packages read one tensor of every sample from a server: webdataset, HF datasets, litdata, MDS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import safetensors.torch
import torch

from benchmarks.peers.webdataset import SHARD
from benchmarks.workloads import Workload

# its addresses of huggingface.co are constants
WEBSHART = "webshart reads folders and https://huggingface.co alone, no other server (0.4.6)"
Pass = Callable[[], Iterator[tuple[int, torch.Tensor]]]  # yields index and tensor of each sample, in any order


def passes(
    url: str, stores: Path, scratch: Path, ours: str, workload: Workload, names: set[str]
) -> dict[str, Callable[[], Pass]]:
    """Return a function for each peer that imports it, and returns its pass over all samples.

    Args:
        url: Server of the folder `stores`; to clients of S3, its folders are buckets.
        scratch: Folder for the peers' caches. It is emptied before each pass.
        ours: Folder of our shards in `stores`, which HF datasets reads.
        names: Names of the peers whose stores were written.
    """
    name = workload.one[0]

    def webdataset() -> Pass:
        import webdataset as wds

        shard = f"pipe:curl -sf {url}/{quote('webdataset .pyd')}/{SHARD}"

        def read() -> Iterator[tuple[int, torch.Tensor]]:
            for sample in wds.DataPipeline(wds.SimpleShardList(shard), wds.tarfile_to_samples(), wds.decode()):
                tensors, small = workload.split(sample["pyd"])
                yield small["index"], tensors[name]

        return read

    def datasets() -> Pass:
        from datasets import disable_progress_bars, load_dataset

        disable_progress_bars()
        files = [f"{url}/{ours}/{path.name}" for path in sorted((stores / ours).glob("*.tar"))]

        def read() -> Iterator[tuple[int, torch.Tensor]]:
            stream = load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)
            for sample in stream:
                found = safetensors.torch.load(sample["safetensors"])
                yield int(sample["__key__"]), found[workload.one[1]]

        return read

    def litdata() -> Pass:
        from litdata import StreamingDataset
        from litdata.streaming import downloader

        # its client refuses servers without TLS, and has no option for it
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

        def read() -> Iterator[tuple[int, torch.Tensor]]:
            options = {"endpoint_url": url, "aws_access_key_id": "a", "aws_secret_access_key": "b"}
            cache = str(_empty(scratch / "litdata"))
            dataset = StreamingDataset("s3://litdata", cache_dir=cache, storage_options=options, batch_decode=1)
            for index, sample in enumerate(dataset):  # at random, each sample would wait for a chunk
                yield index, sample[name].view(workload.dtypes[name])

        return read

    def mds() -> Pass:
        from benchmarks.peers.base import as_tensor
        from benchmarks.peers.mds import StreamingDataset, clean_stale_shared_memory

        def read() -> Iterator[tuple[int, torch.Tensor]]:
            os.environ["S3_ENDPOINT_URL"] = url
            clean_stale_shared_memory()
            local = str(_empty(scratch / "mds"))
            dataset = StreamingDataset(remote="s3://MDS", local=local, shuffle=False, batch_size=1)
            for index in range(len(dataset)):
                yield index, as_tensor(dataset[index][name], workload.dtypes[name])

        return read

    found = {"webdataset .pyd": webdataset, "litdata": litdata, "MDS": mds}
    chosen = {peer: make for peer, make in found.items() if peer in names}
    return {**chosen, "HF datasets": datasets} if names else {}


def set_credentials(scratch: Path) -> None:
    """Let clients of S3 use any key, and folders for buckets."""
    config = scratch / "aws"
    config.write_text("[default]\nregion = us-east-1\ns3 =\n  addressing_style = path\n")
    os.environ |= {"AWS_CONFIG_FILE": str(config), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
