"""The ComfyUI nodes, loaded as ComfyUI loads them, with the structures that its dataset nodes pass and its trainer uses."""

from __future__ import annotations

import copy
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import imported
from tests.importers.test_comfyui import make_set, save_set
from tests.same import assert_same

FOLDER = Path(__file__).parent.parent.parent / "examples" / "comfyui_nodes"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the folder by its path, as ComfyUI does; `folder_paths` is the module that tells where the output folder is."""
    (tmp_path / "comfy").mkdir()
    (tmp_path / "output").mkdir()
    (tmp_path / "comfy" / "folder_paths.py").write_text(
        f"def get_output_directory():\n    return {str(tmp_path / 'output')!r}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "comfy"))
    name = str(FOLDER).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("folder_paths", None)


def run(nodes: ModuleType, name: str, **inputs: Any) -> Any:
    """Run a node as ComfyUI does: in inference mode, with all inputs in lists if it wants lists; its result is copied."""
    node = nodes.NODE_CLASS_MAPPINGS[name]
    assert set(node.INPUT_TYPES()["required"]) == set(inputs)
    if getattr(node, "INPUT_IS_LIST", False):
        inputs = {key: value if isinstance(value, list) else [value] for key, value in inputs.items()}
    with torch.inference_mode():
        results = getattr(node(), node.FUNCTION)(**inputs)
    if getattr(node, "OUTPUT_NODE", False):
        return results
    assert len(results) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    joined: list[list[Any]] = [[] for _ in results]
    for into, values in zip(joined, results, strict=True):
        into.extend(values)
    return joined


def loaded(nodes: ModuleType, value: Any) -> Any:
    return nodes._map(value, lambda leaf: leaf.load() if isinstance(leaf, nodes.DeferredTensor) else leaf)


@pytest.mark.parametrize("lazy", [True, False])
def test_saved_sets_are_loaded(tmp_path: Path, nodes: ModuleType, lazy: bool) -> None:
    """With masks, empty texts and small values; and sets that were imported."""
    latents, conditioning = make_set(9)
    shown = run(nodes, "SaveTensorCache", latents=latents, conditioning=conditioning, folder_name="set")
    assert shown == {"ui": {"text": ["9 samples saved in set"]}}
    assert tc.verify(tmp_path / "output" / "set").ok
    found = run(nodes, "LoadTensorCache", folder_name="set", lazy=lazy)
    tensor = found[0][1]["noise_mask"]
    assert (type(tensor) is nodes.DeferredTensor) == lazy
    assert_same([latents, conditioning], loaded(nodes, found))
    save_set(tmp_path / "in", latents, conditioning, shard_size=2)
    imported(tmp_path / "in", tmp_path / "output" / "a")
    found = run(nodes, "LoadTensorCache", folder_name="a", lazy=lazy)
    assert_same([latents, conditioning], loaded(nodes, found))


def test_loading_reads_no_tensor(tmp_path: Path, nodes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    latents, conditioning = make_set(6)
    nodes.save_training_set(str(tmp_path / "set"), latents, conditioning)
    names = []
    load = tc.LazyTensor.load

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self.name)
        return load(self, *args, **options)

    monkeypatch.setattr(tc.LazyTensor, "load", spy)
    found, conditions = nodes.load_training_set(str(tmp_path / "set"))
    tensors = [each["samples"] for each in found]
    assert {(each.shape, each.dtype, each.ndim, len(each)) for each in tensors} == {
        (torch.Size([1, 4, 8, width]), torch.float32, 4, 1) for width in (8, 9, 10)
    }
    assert [each.numel() * each.element_size() for each in tensors[:2]] == [1024, 1152]
    assert tensors[0].device == torch.device("cpu")
    assert "shape=[1, 77, 5]" in repr(conditions[0][0][0])
    assert names == []
    tensors[2].to(torch.bfloat16)
    assert names == ["latents.samples"]
    assert tensors[0].clone().equal(tensors[0].clone())
    assert tensors[0].kept is None  # nothing is kept


def test_training_as_the_trainer_does(tmp_path: Path, nodes: ModuleType) -> None:
    """The node Train LoRA joins latents, copies and clones conditioning, and computes gradients outside of inference mode."""
    _, conditioning = make_set(4)
    latents = [{"samples": torch.randn(1, 4, 8, 8)} for _ in conditioning]
    whole = torch.cat([each["samples"] for each in latents])
    run(nodes, "SaveTensorCache", latents=latents, conditioning=conditioning, folder_name="set")
    found, conditions = run(nodes, "LoadTensorCache", folder_name="set", lazy=True)
    with torch.inference_mode():
        assert_same(whole.double(), torch.cat([each["samples"].to(torch.float64) for each in found], dim=0))
        rows = [each["samples"][0] for each in found]  # as in the node Resolution Bucket
        assert_same(whole, torch.stack(rows, dim=0))
    with torch.inference_mode(False):
        weight = torch.ones(5, requires_grad=True)
        states, more = conditions[0][0]
        more = {**more, "cross_attn": states}
        cloned = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in more.items()}
        loss = (cloned["cross_attn"] * weight).sum() + (states.to(weight) @ weight).sum()
        (loss + (found[0]["samples"] * weight[0]).sum()).backward()
    expected = 2 * conditioning[0][0][0].sum(dim=(0, 1))
    expected[0] += latents[0]["samples"].sum()
    assert torch.allclose(weight.grad, expected, atol=1e-4)


@pytest.mark.parametrize("inference", [True, False])
def test_changes_are_not_lost(tmp_path: Path, nodes: ModuleType, inference: bool) -> None:
    """In place, through views, and through numpy."""
    latents = [{"samples": torch.zeros(1, 4, 8, 8)} for _ in range(7)]
    nodes.save_training_set(str(tmp_path / "set"), latents, [[[torch.ones(1), {}]] for _ in latents])
    found = [each["samples"] for each in nodes.load_training_set(str(tmp_path / "set"))[0]]
    with torch.inference_mode(inference):
        found[0].add_(1)
        found[1][0, 0] = 1
        found[2][0].add_(1)
        found[3].numpy()[:] = 1
        torch.add(found[0], 1, out=found[4])
        found[5] += found[0]
        found[6].view(-1)[:5].fill_(1)
        assert [float(each.sum()) for each in found] == [256, 64, 256, 256, 512, 256, 5]


def test_copies_are_ordinary_tensors(tmp_path: Path, nodes: ModuleType) -> None:
    latents, conditioning = make_set(2)
    nodes.save_training_set(str(tmp_path / "set"), latents, conditioning)
    found = nodes.load_training_set(str(tmp_path / "set"))
    out = io.BytesIO()
    torch.save(found[0], out)  # the node Save Training Dataset
    assert_same(latents, torch.load(io.BytesIO(out.getvalue()), weights_only=True))
    assert_same(conditioning, copy.deepcopy(found[1]))
    assert_same(latents, pickle.loads(pickle.dumps(found[0])))
    tensor = found[0][0]["samples"]
    assert np.array_equal(np.asarray(tensor), latents[0]["samples"].numpy())
    assert tensor.tolist() == latents[0]["samples"].tolist()
    assert torch.is_tensor(tensor)
    assert torch.equal(torch.nn.functional.interpolate(tensor, scale_factor=2.0)[:, :, ::2, ::2], latents[0]["samples"])


class HookGroup:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2).to_sparse(), "sparse"),
        ([{"deep": HookGroup()}], r"\['hooks'\]\[0\]\['deep'\] is a HookGroup"),
        ({HookGroup: 1}, "the key .* is a type"),
        (np.float32(1), "a float32 of numpy"),
    ],
)
def test_objects_are_refused_by_name(tmp_path: Path, nodes: ModuleType, value: Any, what: str) -> None:
    """Before anything is written."""
    latents, conditioning = make_set(3)
    conditioning[2][0][1]["hooks"] = value
    with pytest.raises(TypeError, match=what) as caught:
        nodes.save_training_set(str(tmp_path / "set"), latents, conditioning)
    assert "conditioning[2][0][1]['hooks']" in str(caught.value)
    assert not (tmp_path / "set").exists()


def test_other_refusals(tmp_path: Path, nodes: ModuleType) -> None:
    latents, conditioning = make_set(2)
    path = str(tmp_path / "set")
    endless: list[Any] = []
    endless.append(endless)
    for bad_latents, bad_conditioning, error in (
        (latents, conditioning[:1], ValueError),
        ([], [], ValueError),
        ([*latents, {"noise_mask": torch.ones(2)}], [*conditioning, conditioning[0]], TypeError),
        (latents, [conditioning[0], "text"], TypeError),
        (latents, [conditioning[0], endless], TypeError),
    ):
        with pytest.raises(error, match=r"latents|conditioning"):
            nodes.save_training_set(path, bad_latents, bad_conditioning)
    assert not os.path.exists(path)
    nodes.save_training_set(path, latents, conditioning)
    with pytest.raises(FileExistsError, match=r"already contains a cache; enter another folder_name$"):
        nodes.save_training_set(path, latents[:1], conditioning[:1])
    assert len(nodes.load_training_set(path)[0]) == 2
    with tc.ShardWriter(tmp_path / "other") as writer:
        writer.write("a", {"latents": torch.ones(2)})
    with pytest.raises(ValueError, match="sample 'a' is not of a training set"):
        nodes.load_training_set(str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        nodes.load_training_set(str(tmp_path / "missing"))


def test_folders_outside_of_the_output_are_refused(tmp_path: Path, nodes: ModuleType) -> None:
    latents, conditioning = make_set(2)
    for name in ("../models", "..", "", ".", "a/../../x", f"{tmp_path}/elsewhere"):
        with pytest.raises(ValueError, match="folder_name"):
            run(nodes, "SaveTensorCache", latents=latents, conditioning=conditioning, folder_name=name)
        with pytest.raises(ValueError, match="folder_name"):
            run(nodes, "LoadTensorCache", folder_name=name, lazy=True)
    assert sorted(os.listdir(tmp_path)) == ["comfy", "output"]
    assert os.listdir(tmp_path / "output") == []


def test_a_new_cache_is_loaded_again(tmp_path: Path, nodes: ModuleType) -> None:
    latents, conditioning = make_set(2)
    run(nodes, "SaveTensorCache", latents=latents, conditioning=conditioning, folder_name="set")
    node = nodes.LoadTensorCache
    first = node.IS_CHANGED(folder_name="set", lazy=True)
    assert first == node.IS_CHANGED(folder_name="set", lazy=True)
    for path in (tmp_path / "output" / "set").glob("*"):
        path.unlink()
    run(nodes, "SaveTensorCache", latents=latents[:1], conditioning=conditioning[:1], folder_name="set")
    assert first != node.IS_CHANGED(folder_name="set", lazy=True)
