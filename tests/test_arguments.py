"""Wrong arguments, and arguments in another form: every path may be a `PathLike`, and every error names the remedy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.shards.tars import build

ZSTD, LZ4 = b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "a.tar", {f"{i}": {"x": torch.arange(3.0) + i, "i": i} for i in range(4)}))


class Named:
    """A path that is not a text; `os.fspath` accepts it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


def test_every_path_may_be_pathlike(shard: Path, tmp_path: Path) -> None:
    path, folder = Named(str(shard)), Named(str(tmp_path))
    pattern, manifest = Named(str(tmp_path / "?.tar")), Named(str(tmp_path / "manifest.json"))
    sources: list[Any] = [path, folder, pattern, manifest, [path], [folder]]
    for source in sources:
        assert len(tc.open(source)) == 4
        assert tc.verify(source).ok
        assert len(list(tc.ResumablePipeline(source))) == 4
    assert len(list(tc.ResumablePipeline([path, str(shard)]))) == 8
    shards = [{"url": path}]
    (sample, *_) = found = list(tc.tarfile_to_samples()(shards))
    assert len(found) == 4
    assert sample["__url__"] == str(shard)
    assert len(tc.write_index(path).keys) == 4
    assert tc.repair(path, Named(str(tmp_path / "repaired"))).ok


@pytest.mark.parametrize("call", [tc.open, tc.verify, tc.ResumablePipeline])
def test_bytes_are_not_where_shards_are(call: Any) -> None:
    with pytest.raises(TypeError, match=r"expected .*path|a pattern or a folder") as raised:
        call(b"a.tar")
    assert "bytes" in str(raised.value) or "b'a.tar'" in str(raised.value)


def test_a_path_is_never_a_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for urls in (Path("pipe:touch owned"), [Path("pipe:touch owned")]):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            list(tc.ResumablePipeline(urls))
    with pytest.raises(FileNotFoundError):
        list(tc.tarfile_to_samples()([{"url": Path("pipe:touch owned")}]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("head", "name"),
    [(ZSTD, "zstd"), (LZ4, "lz4"), (b"\x1f\x8b\x08", "gzip"), (b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz")],
)
def test_compressed_tars_say_by_what_and_what_to_do(head: bytes, name: str, tmp_path: Path) -> None:
    content = head + bytes(range(256)) * 6
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    calls: list[Any] = [lambda: tc.open(path), lambda: tc.write_index(path)]
    if name in ("zstd", "lz4"):  # no module of Python 3.10 reads it
        calls.append(lambda: list(tc.tarfile_to_samples()([{"url": "a.tar", "stream": io.BytesIO(content)}])))
    unpacker = {"gzip": "gunzip", "bzip2": "bunzip2"}.get(name, f"un{name}")
    source = rf"\['pipe:{name} -dc PATH', …\]" if name in ("zstd", "lz4") else "PATH"
    remedy = rf"unpack it with `{unpacker}`, or read it as a stream: tc\.ResumablePipeline\({source}\)"
    for call in calls:
        with pytest.raises(tc.TarFormatError, match=f"a.tar: byte 0: {name}: a compressed tar .*{remedy}") as raised:
            call()
        assert raised.value.kind == "compressed"
    assert name in str(tc.verify(path))


@pytest.mark.parametrize("first", ["safetensors", "skel.pyd"])
def test_members_of_a_sample_apart(tmp_path: Path, first: str) -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.arange(3.0)})
    halves = sorted({"safetensors": tensors, "skel.pyd": skeleton}.items(), key=lambda half: half[0] != first)
    path = tmp_path / "a.tar"
    path.write_bytes(build([(f"{key}.{suffix}", half) for suffix, half in halves for key in "ab"]))
    stream = [{"url": "a.tar", "stream": io.BytesIO(path.read_bytes())}]
    for call in (lambda: tc.open(path), lambda: list(tc.decode()(tc.tarfile_to_samples()(stream)))):
        with pytest.raises(tc.FormatError, match=r"sample 'a': .* is missing, but .*--sort=name") as raised:
            call()
        assert raised.value.kind == "missing"


# --- masks ---


MASK = [True, False, True, False]


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_mask_chooses_as_in_numpy(shard: Path, is_joined: bool) -> None:
    cache = tc.join([shard]) if is_joined else tc.open(shard)
    for kind in (np.array, list, torch.tensor):
        view = cache[kind(MASK)]
        assert list(view.keys()) == ["0", "2"]
        assert list(view[kind([False, True])].keys()) == ["2"]
        assert len(cache[kind([False] * 4)]) == 0
        assert cache.read_batch(kind(MASK))["i"].tolist() == [0, 2]
        for wrong in ([True] * 3, [True] * 5, [False]):
            with pytest.raises(TypeError, match="indices must be .* a mask of 4 bools, got"):
                cache[kind(wrong)]
            with pytest.raises(TypeError, match="a mask of 4 bools"):
                cache.read_batch(kind(wrong))
    for patterns in (MASK, np.array(MASK), [0, 1], 3):
        with pytest.raises(TypeError, match=r"select takes names of tensors.*for samples, cache\[…\]"):
            cache.select(patterns)


# --- devices ---


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda")], ids=str)
def test_no_gpu(shard: Path, device: Any) -> None:
    cache = tc.open(shard)
    for call in (
        lambda: cache.read_batch([0], device),
        lambda: cache.read_batch([0], device, collate=list),
        lambda: cache.read_tensors([0], device),
        lambda: tc.join([shard]).read_batch([0], device),
        lambda: next(iter(tc.Loader(cache, 1, device=device))),
        lambda: tc.realize(cache[0], device),
        lambda: cache[0]["x"].load(device),
    ):
        with pytest.raises(RuntimeError, match="torch sees no GPU; leave it out"):
            call()
    with pytest.raises(RuntimeError, match="pin_memory=True requires"):
        cache.read_batch([0], pin_memory=True)


# --- damage ---


def test_damage_is_not_mended_by_allow() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.arange(3.0)})
    texts = []
    for at in range(43, len(skeleton)):
        for byte in (b"b", b"\x81", b"c", b"\xff"):
            try:  # some damage is another text or number
                tc.decode_sample(skeleton[:at] + byte + skeleton[at + 1 :], tensors)
            except tc.FormatError as exc:
                texts.append(str(exc))
    assert len(texts) > 50
    assert not [text for text in texts if "allow" in text]


def test_allow_is_named_only_where_it_helps() -> None:
    for opcode in (b"\x81", b"\x92", b"b"):
        with pytest.raises(tc.UnsafeSkeletonError, match="allow="):
            tc.decode_sample(b"\x80\x04)" + opcode + b".", tc.encode_sample(0)[1])
    for opcode in (b"\xff", b"c", b"q\x00", b"\x82\x01", b"P"):
        with pytest.raises(tc.UnsafeSkeletonError) as raised:
            tc.decode_sample(b"\x80\x04)" + opcode + b".", tc.encode_sample(0)[1])
        assert "allow" not in str(raised.value)


# --- numbers and options ---


def test_an_argument_is_named(shard: Path, tmp_path: Path) -> None:
    cache, made = tc.open(shard), tmp_path / "made"

    def build(**options: Any) -> None:
        tc.build([1], lambda items: [{}], made, fingerprint={}, **options)

    calls: list[tuple[Any, dict[str, Any], str]] = [
        (tc.Loader, {"repeats": 2.5}, r"^repeats=2.5, expected an integer"),
        (tc.Loader, {"num_threads": "2"}, r"^num_threads='2', expected an integer"),
        (tc.Loader, {"suffle": True}, r"^Loader has no argument 'suffle'; there are 'shuffle'"),
        (tc.Loader, {"bucket_by": lambda entry: [1]}, r"unhashable type: 'list'"),
        (tc.Loader, {"bucket_by": ["x"]}, r"^bucket_by=\['x'\], expected the name of a tensor, tc.by_length"),
        (tc.torch_loader, {"num_threads": 2}, r"^torch_loader has no argument 'num_threads'; there are '"),
    ]
    for name, remedy in {
        "sampler": "choose samples by weights=",
        "batch_sampler": "pass batch_size=",
        "drop_last": "pass last_batch='drop'",
        "generator": "pass seed=",
        "collate_fn": "pass collate=",
    }.items():
        calls += [
            (loader, {name: None}, f"^{loader.__name__} has no argument '{name}': .*{remedy}")
            for loader in (tc.Loader, tc.torch_loader)
        ]
    for call, options, message in calls:
        with pytest.raises(TypeError, match=message):
            call(cache, 2, **options)
    with pytest.raises(ValueError, match=r"^bounds=64, expected ascending lengths"):
        tc.by_length("x", 64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^max_nbytes='5', expected a number"):
        tc.ShardWriter(made, max_nbytes="5")  # type: ignore[arg-type]
    with tc.ShardWriter(made, max_samples=float("inf"), max_nbytes=1e9):
        pass
    for options, message in (
        ({"batch_size": "4"}, "^batch_size='4', expected an integer"),
        ({"num_workers": 0.5}, "^num_workers=0.5, expected an integer"),
        ({"skip_errors": True}, "^build has no argument 'skip_errors'; there are 'on_error'"),
    ):
        with pytest.raises(TypeError, match=message):
            build(**options)
    assert not list(made.iterdir())


def test_misuse_says_what_to_pass(shard: Path, tmp_path: Path) -> None:
    cache, new, api = tc.open(shard), tmp_path / "new", cast("Any", tc)
    for call, error, message in (
        (lambda: api.build([1], "new", list, fingerprint={}), TypeError, "^fn='new', expected a function .*fn, out"),
        (lambda: api.merge("a.tar", new), TypeError, "^sources='a.tar', expected a list of caches"),
        (lambda: api.StepDataset(cache), TypeError, r"expected a tc\.StepSampler .*, got TensorCache"),
        (lambda: api.nest(cache[0], {}), TypeError, r"expected a list of samples, .*pass \[sample\]"),
        (lambda: api.SharedDataset("cache", "n"), TypeError, r"expected a map-style dataset .*, got str"),
        (lambda: api.SharedDataset(cache, "n", max_nbytes="1G"), TypeError, "^max_nbytes='1G', expected an integer"),
        (lambda: api.open(shard, allow=Named), TypeError, "allow= takes a list of classes, got <class"),
        (lambda: api.open(shard, cache="x"), KeyError, "no cache 'x'; there are ''; '' is the one without a name"),
        (lambda: cache.read_batch([0], collate=tc.pad), ValueError, r"as collate=, call it: tc\.pad\(\)"),
        (lambda: api.export_cache(cache, new, "zip"), ValueError, "^kind='zip', expected one of 'pt'"),
        (lambda: tc.write_index(tmp_path), tc.FormatError, "is a folder, expected a tar; `tensorcache index"),
    ):
        with pytest.raises(error, match=message):
            call()


# --- shapes, texts and keys ---


def test_a_batch_of_several_shapes_says_what_helps(tmp_path: Path) -> None:
    samples = {f"{i}": {"x": torch.zeros(shape)} for i, shape in enumerate(((2, 3), (4, 3), (2, 5)))}
    write(tmp_path / "%06d.tar", samples)
    cache = tc.open(tmp_path)
    by_shape = r"'list', or batches of one shape: Loader\(…, bucket_by='x'\)$"
    with pytest.raises(tc.BatchError, match=rf"'0', but \[4, 3\] in '1'; use collate='pad' or {by_shape}"):
        cache.read_batch([0, 1])
    with pytest.raises(tc.BatchError, match=rf"'1', and only the first dimension is padded; use collate={by_shape}"):
        cache.read_batch([2, 1], collate="pad")
    assert len(list(tc.Loader(cache, 2, bucket_by="x"))) == 3


def test_names_that_are_elsewhere() -> None:
    remedies = {"LoaderStats": "; docs/reading.md lists", "read_ray": "; functions for Ray are in tc.ray", "opn": "$"}
    for name, remedy in remedies.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{remedy}"):
            getattr(tc, name)


def test_a_file_name_instead_of_a_key(tmp_path: Path) -> None:
    name = "set a/IMG 1.JPG"
    write(tmp_path / "%06d.tar", {tc.safe_key(name): {"x": torch.zeros(1)}, "0": {"x": torch.zeros(1)}})
    for cache in (tc.open(tmp_path), tc.join([tmp_path])):
        for wanted, remedy in (
            (name, r"pass tc\.safe_key\('set a/IMG 1\.JPG'\)"),
            ("IGM 1.JPG", r"tc\.safe_key\(name\) is the"),
        ):
            with pytest.raises(KeyError, match=rf"; there are 'set a/IMG 1\.JPG', '0'; {remedy}"):
                cache[wanted]
