"""Latents drawn from cached moments, dropped texts, and the normal numbers that both loaders and devices agree on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write


def info_of(indices: Any) -> tc.BatchInfo:
    indices = np.asarray(indices, np.int64)
    return tc.BatchInfo(indices, torch.zeros(len(indices), dtype=torch.bool))


def noise(indices: Any, shape: tuple[int, ...], name: str = "x") -> torch.Tensor:
    """Return the noise of rows: their latents, if all means are 0 and all deviations 1."""
    whole = (len(indices), *shape)
    batch = {"mean": torch.zeros(whole), "std": torch.ones(whole)}
    latents: torch.Tensor = tc.sample_moments("mean", "std", to=name)(batch, info_of(indices))[name]
    return latents


def digest(rows: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(rows.numpy().tobytes())


def test_golden_bits() -> None:
    """The same bits on every machine and in every release."""
    golden = [[-1105113848, 1063885504, 1048932608], [1052241018, 1053735382, -1095084535]]
    assert noise([5, 6], (3,)).view(torch.int32).tolist() == golden
    assert digest(noise([5, 6, 7], (200_007,))) == "23b4f1f024be5532"


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
@pytest.mark.long
def test_the_same_bits_with_all_vector_instructions(capability: str) -> None:
    """torch has kernels for each kind of processor; on a processor without such instructions, it takes the best ones it has."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    code = "from tests.training.test_transforms import digest, noise; print(digest(noise([5, 6, 7], (200_007,))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "23b4f1f024be5532\n", done.stderr


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (131_079,)])
def test_a_row_depends_only_on_its_seed(shape: tuple[int, ...]) -> None:
    indices = [7, 0, 7, 1 << 40]
    whole = noise(indices, shape)
    assert whole.shape == (4, *shape)
    for row, index in zip(whole, indices, strict=True):
        assert torch.equal(noise([index], shape)[0], row)


def test_the_numbers_are_normal() -> None:
    """Kolmogorov and Smirnov's test on a million numbers, moments, and the number of those far out."""
    rows = noise(range(4), (250_001,), "test").double()
    flat = rows.flatten().sort().values
    count = len(flat)
    expected = (torch.arange(count) + 0.5) / count
    # exceeded with a probability of 1 in 5,000 by normal numbers; the seeds are fixed
    assert (torch.special.ndtr(flat) - expected).abs().max() * count**0.5 < 2.2
    assert abs(flat.mean()) * count**0.5 < 4
    assert abs(flat.square().mean() - 1) * (count / 2) ** 0.5 < 4
    assert 32 <= int((flat.abs() > 4).sum()) <= 95  # 63 expected
    assert flat.abs().max() < 6.3
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() * 500 < 5
    assert abs(torch.corrcoef(torch.stack([rows[0, 1:], rows[0, :-1]]))[0, 1]) * 500 < 5
    other = noise(range(4), (250_001,), "other").double()
    assert abs((rows * other).mean()) * count**0.5 < 5


def moments(batch_size: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(batch_size, channels, 4, 5, generator=generator)
    return mean, torch.rand(batch_size, channels, 4, 5, generator=generator)


def test_the_forms_of_moments_agree() -> None:
    mean, std = moments(4)
    info = info_of([3, 1, 2, 1])
    expected = mean + std * noise([3, 1, 2, 1], (3, 4, 5), "latent")
    both = torch.cat([mean, std], 1)
    logvar = 2 * std.log()
    found = [
        tc.sample_moments("m", to="latent")({"m": both.clone()}, info),
        tc.sample_moments("m", "d", to="latent")({"m": mean.clone(), "d": std.clone()}, info),
        tc.sample_moments("latent", "d")({"latent": mean.clone(), "d": std.clone()}, info),
        tc.sample_moments("m", to="latent", logvar=True)({"m": torch.cat([mean, logvar], 1)}, info),
        tc.sample_moments("m", to="latent")({"m": list(both.clone())}, info),
    ]
    for batch in found:
        assert list(batch) == ["latent"]
        latent = batch["latent"] if isinstance(batch["latent"], torch.Tensor) else torch.stack(batch["latent"])
        torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0]["latent"], expected)
    assert not torch.equal(found[0]["latent"][1] - mean[1], found[0]["latent"][3] - mean[3])
    assert torch.equal(torch.stack(found[4]["latent"]), expected)


def test_rows_of_different_shapes_and_dtypes() -> None:
    rows = [torch.ones(4, 2, 2).half(), torch.ones(4, 6, 1).half()]
    (first, second) = tc.sample_moments("x.0")({"x": [rows]}, info_of([0, 1]))["x"][0]
    assert (first.shape, second.shape, first.dtype) == ((2, 2, 2), (2, 6, 1), torch.float16)
    whole = torch.stack([rows[0]] * 2)
    assert torch.equal(tc.sample_moments("x.0")({"x": [whole]}, info_of([0, 1]))["x"][0][0], first)
    # limits of diffusers: a deviation of e^10 at most
    batch = {"x": torch.zeros(1, 9), "v": torch.full((1, 9), 99.0)}
    assert 0 < tc.sample_moments("x", "v", logvar=True)(batch, info_of([0]))["x"].abs().max() < 6.3 * np.exp(10)
    with pytest.raises(TypeError, match="logvar='v', expected a bool"):
        tc.sample_moments("m", logvar="v")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "names", "error", "message"),
    [
        ({"x": torch.zeros(2, 4)}, ("y",), KeyError, "no 'y'; there are 'x'"),
        ({"x": {"z": 1}}, ("x.y.z",), KeyError, "no 'x.y.z'; there are 'z'"),
        ({"x": [1]}, ("x.y.z",), KeyError, "no 'x.y.z'; there is a list"),
        ({f"n{i}": 1 for i in range(999)} | {"mean": 1}, ("maen",), KeyError, "there are 'mean', 'n0', .*and 992 more"),
        ({"x": torch.zeros(2, 3)}, ("x",), ValueError, r"\[2, 3\]"),
        ({"x": torch.zeros(2)}, ("x",), ValueError, r"\[2\]"),
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}, ("x", "y"), ValueError, r"\[2, 3\].*\[2, 4\]"),
        ({"x": torch.zeros(2, 4, dtype=torch.int64)}, ("x",), TypeError, "int64"),
        ({"x": np.zeros((2, 4))}, ("x",), TypeError, "ndarray"),
    ],
)
def test_wrong_moments(batch: Any, names: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        tc.sample_moments(*names)(batch, info_of([0, 1]))


def test_texts_are_dropped_together() -> None:
    count = 2000
    text, pooled = torch.ones(count, 3, 2), torch.ones(count, 4)
    transform = tc.drop_text(0.1, {"cond.text": torch.full((2, 2), 7.0), "pooled": 0, "prompt": ""}, mark="is_dropped")
    transform = pickle.loads(pickle.dumps(transform))
    prompts = [f"p{i}" for i in range(count)]
    batch = transform({"cond": {"text": text, "n": 1}, "pooled": pooled, "prompt": prompts}, info_of(range(count)))
    dropped = batch["is_dropped"]
    assert dropped.dtype == torch.bool
    assert 0.07 < dropped.double().mean() < 0.13
    assert batch["cond"]["text"][dropped].unique(dim=0).tolist() == [[[7, 7], [7, 7], [0, 0]]]
    assert (batch["cond"]["text"][~dropped] == 1).all()
    assert batch["pooled"].any(1).tolist() == (~dropped).tolist()
    assert [prompt == "" for prompt in batch["prompt"]] == dropped.tolist()
    # rows are independent of the batch
    few = {"cond": {"text": torch.ones(3, 3, 2)}, "pooled": torch.ones(3, 4), "prompt": [1] * 3}
    some = transform(few, info_of([9, 5, 1]))
    assert some["is_dropped"].tolist() == dropped[[9, 5, 1]].tolist()
    other = tc.drop_text(0.1, {"pooled": 0}, mark="m")({"pooled": torch.ones(count, 1)}, info_of(range(count)))["m"]
    assert (other & dropped).sum() < 45  # independent draws: 20 expected


def test_always_and_never() -> None:
    for p in (0, 1):
        texts = [torch.ones(2, 3), torch.ones(5, 3).half()]
        transform = tc.drop_text(p, {"text": torch.zeros(4, 3), "n": 2.0})
        batch = transform({"text": texts, "n": torch.ones(2)}, info_of([1, 2]))
        assert [tuple(text.shape) for text in batch["text"]] == ([(4, 3)] * 2 if p else [(2, 3), (5, 3)])
        assert [text.dtype for text in batch["text"]] == [torch.float32, torch.float16]
        assert batch["n"].tolist() == [1 + p] * 2
        assert "is_dropped" not in batch


def test_texts_under_an_empty_key(tmp_path: Path) -> None:
    cache = tc.open(write(tmp_path, [{"": torch.ones(2)}, {"": torch.ones(2)}]))
    assert next(iter(tc.Loader(cache, 2, transform=tc.drop_text(1, {"%": 0}))))[""].tolist() == [[0, 0], [0, 0]]


def test_nothing_is_read_back_from_the_device() -> None:
    """Tensors of the device `meta` have no values, so it raises an error where a GPU would wait."""
    transforms: list[Any] = [
        tc.sample_moments("moments"),
        tc.sample_moments("listed", logvar=True),
        tc.drop_text(1, {"text": torch.ones(2, 3), "number": 7, "scalar": torch.tensor(2.0)}, mark="mark"),
        tc.drop_text(1, {"texts": torch.ones(2, 3), "numbers": 7, "scalars": torch.tensor(2.0)}),
    ]
    with torch.device("meta"):
        batch = {name: torch.empty(2, 4, 3) for name in ("moments", "text", "number", "scalar")}
        batch |= {name: [torch.empty(4, 3) for _ in range(2)] for name in ("listed", "texts", "numbers", "scalars")}
    info = tc.BatchInfo(np.arange(2), torch.zeros(2, dtype=torch.bool, device="meta"), 0, 0, None, None)
    for transform in transforms:
        batch = transform(batch, info)
    tensors = [tensor for each in batch.values() for tensor in (each if isinstance(each, list) else [each])]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch["mark"].shape == (2,)


def test_wrong_replacements(tmp_path: Path) -> None:
    for p, value in ((-0.1, {"x": 0}), (1.1, {"x": 0}), (0.1, {}), (0.1, 0), (0.1, {0: 0})):
        with pytest.raises(ValueError, match="expected"):
            tc.drop_text(p, value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mark=True, expected a name"):
        tc.drop_text(0.1, {"x": 0}, mark=True)  # type: ignore[arg-type]
    for shape, message in (
        ((4, 2), r"a row \[3, 2\]; use collate={'x': tc.pad\(to=4\)} or a greater length$"),
        ((2, 3), r"'x' has shape \[2, 3\], but a row \[3, 2\]$"),
        ((2,), r"'x' has shape \[2\], but a row \[3, 2\]$"),
    ):
        with pytest.raises(ValueError, match=message):
            tc.drop_text(1, {"x": torch.zeros(shape)})({"x": torch.ones(2, 3, 2)}, info_of([0, 1]))
    short = tc.drop_text(1, {"x": torch.zeros(1, 2)})
    with tc.SharedDataset([{"x": torch.ones(3, 2)}] * 2, "short", directory=tmp_path) as data:
        message = r"\[1, 2\], but a row \[3, 2\]; for texts, collate={'x': 'pad'} allows shorter"
        with pytest.raises(RuntimeError, match=message):
            next(iter(tc.Loader(data, 2, transform=short)))
        (batch,) = tc.Loader(data, 2, transform=short, collate={"x": "pad"})
        assert not batch["x"].any()
    with pytest.raises(KeyError, match="no 'x'"):
        tc.drop_text(0, {"x": 0})({"y": 1}, info_of([0]))
    for texts in (np.zeros((2, 3)), [np.zeros(3)] * 2):
        with pytest.raises(TypeError, match="drop_text replaces tensors and lists, but 'x'"):
            tc.drop_text(1, {"x": 0})({"x": texts}, info_of([0, 1]))
    for value in ([0, 0], "", None):
        with pytest.raises(TypeError, match="a tensor 'x', but its replacement is a (list|str|NoneType)"):
            tc.drop_text(1, {"x": value})({"x": torch.ones(2, 3)}, info_of([0, 1]))
    batch = {"text": torch.ones(1, 2), "mean": torch.ones(1, 2), "std": torch.ones(1, 2)}
    for transform in (tc.drop_text(0.5, {"text": 0}, mark="mean"), tc.sample_moments("mean", "std", to="text")):
        with pytest.raises(ValueError, match="the batch has '(mean|text)' already; choose a new name"):
            transform(dict(batch), info_of([0]))
    for transform in (tc.drop_text(0.5, {"text": 0}, mark="xs.0"), tc.sample_moments("text", to="xs.1")):
        with pytest.raises(ValueError, match="already; choose a new name"):
            transform({"text": torch.ones(1, 2), "xs": [torch.ones(1), torch.ones(1)]}, info_of([0]))
    moved = tc.sample_moments("xs.0", "xs.1", to="xs.1")({"xs": [torch.ones(1, 2)] * 2}, info_of([0]))
    assert moved["xs"][0] is None
    assert moved["xs"][1].shape == (1, 2)
    assert set(tc.sample_moments("mean", "std", to="std")(dict(batch), info_of([0]))) == {"text", "std"}


def test_rows_of_samples_that_lack_a_tensor(tmp_path: Any) -> None:
    """They stay None, in the same batch and in one where no sample has the tensor."""
    names = ("text", "number", "moments", "mean", "std")
    whole = [{name: torch.ones(2, 2).half() for name in names} | {"prompt": f"p{i}"} for i in range(4)]
    write(tmp_path, [sample if i % 2 else dict.fromkeys(sample) for i, sample in enumerate(whole)])
    transforms: list[Any] = [
        tc.drop_text(1, {"text": torch.zeros(1, 2), "number": 0, "prompt": ""}),
        tc.sample_moments("moments"),
        tc.sample_moments("mean", "std", to="latent"),
    ]
    with tc.open(tmp_path) as cache:
        for some, collate in ((cache, "list"), (cache[[0, 2]], "stack"), (cache[[0, 2]], "list")):
            info = info_of(range(len(some)))
            batch = some.read_batch(range(len(some)), collate=collate)
            for transform in transforms:
                batch = transform(batch, info)
            assert list(batch["prompt"]) == ([None, "", None, ""] if some is cache else [None, None])
            for name in ("text", "number", "moments", "latent"):
                dtypes = [None if row is None else row.dtype for row in batch[name]]
                assert dtypes == ([None, torch.float16] * 2 if some is cache else [None] * 2)
        batch = cache.read_batch([0, 1], collate="list")
        batch["std"][1] = None
        with pytest.raises(ValueError, match="'mean': a row has means, but no deviations 'std'"):
            transforms[2](batch, info_of([0, 1]))


def test_damage_in_a_transform_stays_damage(tmp_path: Any) -> None:
    """A transform that looks at the values of a damaged sample raises what the sample raises, with a note of the step."""

    def look(batch: Any, info: tc.BatchInfo) -> Any:
        batch["prompt"].tolist()
        return batch

    path = tmp_path / "x.tar"
    write(path, [{"x": torch.zeros(1), "prompt": f"photo {i}"} for i in range(4)])
    path.write_bytes(path.read_bytes().replace(b"photo 2", b"phot\xff 2"))
    for made in (tc.Loader(tc.open(path), 1, transform=look), tc.torch_loader(tc.open(path), 1, transform=look)):
        iterator = iter(made)
        next(iterator), next(iterator)
        with pytest.raises(tc.FormatError, match="02") as caught:
            next(iterator)
        assert caught.value.kind == "damaged"
        if hasattr(caught.value, "__notes__"):
            assert "look failed at step 2 of epoch 0" in caught.value.__notes__[0]


def test_a_transform_that_writes_into_its_mask_does_not_change_that_of_training(cache: Any) -> None:
    def invert(batch: Any, info: tc.BatchInfo) -> Any:
        info.is_padding.logical_not_()
        return batch

    for call in (tc.Loader, tc.torch_loader):
        loader = call(cache.select("x"), 22, last_batch="pad", transform=invert)
        masks = [info.is_padding.tolist() for _, info in loader.with_info()]
        assert masks == [[False] * 22, [False] + [True] * 21]


# --- `info.mask` and `info.shapes` after `drop_text` and `sample_moments`: those of what the batch holds ---

EMPTY = torch.full((2, 3), -1.0)
DROP = tc.drop_text(0.5, {"cond.text": EMPTY}, mark="is_dropped")
PAD = {"cond.text": tc.pad(to=8), "*": "pad"}


def with_text(i: int) -> dict[str, Any]:
    """A sample with a text of 3 to 6 rows; sample 7 has none."""
    text, mean = torch.ones(3 + i % 4, 3), torch.zeros(3 + i % 4, 2)
    return {
        "cond": {"text": None if i == 7 else text},
        "moments": torch.zeros(4, 2, 2),
        "mean": mean,
        "std": mean + 1,
    }


texts = folder_of([with_text(i) for i in range(16)], max_samples=16)


@pytest.fixture
def masked(texts: str) -> Iterator[Any]:
    with tc.open(texts) as opened:
        yield opened


def lengths(batch: Any) -> list[int]:
    """Return the number of rows that are not padding, which is 0, of each text in a batch."""
    return [0 if text is None else int(text.any(1).sum()) for text in batch["cond"]["text"]]


def is_right(batch: Any, info: tc.BatchInfo) -> None:
    assert 0 < int(batch["is_dropped"].sum()) < 8
    for each in (info, pickle.loads(pickle.dumps(info)), info.to("cpu")):
        mask = each.mask("cond.text")
        assert mask.sum(1).tolist() == lengths(batch)
        assert each.shapes["cond.text"][:, 0].tolist() == lengths(batch)
        text = batch["cond"]["text"]
        assert mask.shape == (text.shape[:2] if isinstance(text, torch.Tensor) else (8, max(lengths(batch))))


def pairs(how: str, cache: Any, transform: Any, collate: Any) -> list[tuple[Any, tc.BatchInfo]]:
    options = {"collate": collate, "transform": transform}
    if how == "StepDataset":
        sampler = tc.StepSampler(cache, 8)
        dataset = tc.StepDataset(sampler, with_info=True, **options)
        return [dataset[step] for step in sampler]
    if how == "Loader":
        with tc.Loader(cache, 8, **options) as loader:
            return list(loader.with_info())
    with closing(tc.torch_loader(cache, 8, num_workers=1, **options)) as workers:
        return list(workers.with_info())


@pytest.mark.parametrize("way", [PAD, "pad", "list"], ids=str)
@pytest.mark.parametrize("how", ["Loader", "StepDataset", "torch_loader"])
def test_masks_of_loaders(masked: Any, how: str, way: Any) -> None:
    batches = pairs(how, masked, [DROP], way)
    assert len(batches) == 2
    for batch, info in batches:
        is_right(batch, info)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_torch_loader_refuses_wrong_masks(masked: Any, num_workers: int) -> None:
    """It cannot know that a function has dropped texts. Without records, it need not."""

    def drop(batch: Any, info: tc.BatchInfo) -> Any:
        return DROP(batch, info)

    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "transform": drop}
    with closing(tc.torch_loader(masked, 8, collate="pad", **options)) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"called DropText\(.*info\.mask and info\.shapes would be wrong"):
                next(iter(loader.with_info()))
            assert len(list(loader)) == 2


def test_masks_in_other_transforms(masked: Any) -> None:
    """A transform before `drop_text` gets the mask of the stored texts, one after it the mask of the batch."""

    def mask_in(name: str) -> Callable[[Any, tc.BatchInfo], Any]:
        return lambda batch, info: batch | {name: info.mask("cond.text").sum(1)}

    for batch, info in pairs("Loader", masked, [mask_in("before"), DROP, mask_in("after")], PAD):
        stored = [0 if i == 7 else 3 + i % 4 for i in info.indices.tolist()]
        assert batch["before"].tolist() == stored
        dropped = zip(stored, batch["is_dropped"], strict=True)
        assert batch["after"].tolist() == [2 if drop else n for n, drop in dropped]


def test_texts_that_samples_lack(masked: Any) -> None:
    always = tc.drop_text(1, {"cond.text": EMPTY})
    for indices, collate, expected in (([7, 7], PAD, [2, 2]), ([7, 6], "list", [0, 2])):
        batch, info = masked.read_batch_with_info(indices, collate=collate)
        always(batch, info)
        assert info.mask("cond.text").sum(1).tolist() == lengths(batch) == expected


def test_masks_after_moments(masked: Any) -> None:
    transforms = [tc.sample_moments("moments"), tc.sample_moments("mean", "std", to="latent")]
    for batch, info in pairs("Loader", masked, transforms, {"mean": tc.pad(to=9), "std": tc.pad(to=9), "*": "list"}):
        for each in (info, pickle.loads(pickle.dumps(info))):
            assert each.shapes["moments"].tolist() == [[2, 2, 2]] * 8
            assert each.mask("moments").shape == (8, 2)
            assert not {"mean", "std"} & set(each.shapes)
            mask = each.mask("latent")
            assert mask.sum(1).tolist() == [3 + i % 4 for i in info.indices.tolist()]
            assert mask.shape == batch["latent"].shape[:2] == (8, 9)


def test_numbers_keep_the_shapes(masked: Any) -> None:
    batch, info = masked.read_batch_with_info(range(4), collate="list")
    before = info.mask("cond.text").tolist()
    tc.drop_text(1, {"cond.text": torch.tensor(2.0)})(batch, info)
    assert info.mask("cond.text").tolist() == before
