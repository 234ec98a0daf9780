"""ComfyUI nodes that save a training set as a cache of tensors, and load it lazily.

Copy this folder into ComfyUI's `custom_nodes`. README.md describes the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

import wds_tensorcache as tc

_PLAIN = (type(None), bool, int, float, str)
_MAX_DEPTH = 32


def save_training_set(path: str, latents: list[Any], conditioning: list[Any]) -> int:
    """Write one sample for each latent and its conditioning, and return the number of samples.

    Nothing is written if an item cannot be stored.

    Args:
        path: New folder of the cache.
        latents: Dicts with "samples" [1, C, H, W], and perhaps masks, as the node Make Training Dataset returns them.
        conditioning: For each latent, a list of pairs of a tensor and a dict.

    Raises:
        ValueError: The lists are empty or have different lengths.
        TypeError: An item is an object that a cache cannot store, for example hooks or a control net.
        FileExistsError: The folder contains a cache.
    """
    if not latents or len(latents) != len(conditioning):
        raise ValueError(
            f"{len(latents)} latents and {len(conditioning)} conditionings, expected equally many of both, at least one"
        )
    for number, (latent, condition) in enumerate(zip(latents, conditioning, strict=True)):
        if not isinstance(latent, dict) or not isinstance(latent.get("samples"), torch.Tensor):
            raise TypeError(f"latents[{number}] has no tensor 'samples', and a cache of a training set needs one")
        if not isinstance(condition, list):
            raise TypeError(f"conditioning[{number}] is a {type(condition).__name__}, expected a list")
        for where, item in ((f"latents[{number}]", latent), (f"conditioning[{number}]", condition)):
            for at, value in _leaves(item, where):
                _check(value, at)
    try:
        writer = tc.ShardWriter(path, fingerprint={"format": "comfyui"})
    except FileExistsError:
        # Hazard: the library advises to overwrite, but a workflow may still read from the folder.
        raise FileExistsError(f"{path} already contains a cache; enter another folder_name") from None
    with writer:
        for number, (latent, condition) in enumerate(zip(latents, conditioning, strict=True)):
            writer.write(f"{number:08d}", _map({"latents": latent, "conditioning": condition}, _as_stored))
    return len(latents)


def load_training_set(path: str, lazy: bool = True) -> tuple[list[Any], list[Any]]:
    """Return the latents and the conditioning of a cache, in the order in which they were saved.

    Args:
        path: Folder of a cache that `save_training_set` or `tensorcache import --format comfyui` has written.
        lazy: Return `DeferredTensor` objects; otherwise, load all tensors now.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: A sample is not one of a training set.
    """
    cache = tc.open(path)
    latents, conditioning = [], []
    for key in list(cache.keys()):
        sample = cache[key]
        kinds = (dict, list)
        parts = [sample.get(name) if isinstance(sample, dict) else None for name in ("latents", "conditioning")]
        if not all(map(isinstance, parts, kinds)):
            raise ValueError(
                f"{path}: sample {key!r} is not of a training set: it has no dict 'latents' or no list 'conditioning'"
            )
        parts = [_map(part, DeferredTensor.of) for part in parts] if lazy else [tc.realize(part) for part in parts]
        latents.append(parts[0])
        conditioning.append(parts[1])
    return latents, conditioning


class DeferredTensor(torch.Tensor):
    """A tensor of a cache that is read from its shard whenever it is used.

    It is a `torch.Tensor` for `isinstance`. Its shape and dtype are known without reading. Any other use reads the tensor, and
    works with what was read; results are ordinary tensors.

    Memory: what was read is not kept, unless a result aliases it or it may have been modified. In these cases, for example
        after `x += 1`, `x[0]` or `x.numpy()`, the object keeps it.

    Threads/fork/pickle: pickled and copied as an ordinary tensor.
    """

    lazy: tc.LazyTensor
    kept: torch.Tensor | None

    @staticmethod
    def of(value: Any) -> Any:
        """Return a deferred tensor for a lazy one, and other values loaded."""
        if not isinstance(value, tc.LazyTensor):
            return value.load() if isinstance(value, tc.LazyArray) else value
        self = torch.Tensor._make_wrapper_subclass(DeferredTensor, value.shape, dtype=value.dtype, device="cpu")
        self.lazy, self.kept = value, None
        return self

    def load(self) -> torch.Tensor:
        """Return the values as an ordinary tensor. Memory: the kept memory if there is some, otherwise new memory."""
        if self.kept is not None:
            return self.kept
        with torch.inference_mode(False):  # ComfyUI trains outside of the inference mode in which it runs nodes
            return self.lazy.load()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN and isinstance(args[0], cls) and args[0].kept is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._call(func, args, kwargs)

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch with the loaded tensors."""
        loaded: dict[int, tuple[DeferredTensor, torch.Tensor]] = {}

        def load(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            return loaded.setdefault(id(value), (value, value.load()))[1]

        result = func(*_map(list(args), load), **_map(dict(kwargs or {}), load))
        for deferred, value in loaded.values():
            # Hazard: a change of memory that is not kept would be lost
            if not _has_other_memory(result, value):
                deferred.kept = value
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredTensor(shape={list(self.shape)}, dtype={self.dtype})"


_KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("is_cuda", "is_sparse", "is_quantized", "is_meta", "itemsize", "nbytes")
    ),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex")),
}


def _has_other_memory(result: Any, value: torch.Tensor) -> bool:
    """Return whether a result is a tensor that does not alias `value`."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    return result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with the function's results for everything else."""
    cls = type(value)
    if cls is dict:
        return {key: _map(item, function) for key, item in value.items()}
    return cls(_map(item, function) for item in value) if cls in (list, tuple) else function(value)


def _leaves(value: Any, where: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise TypeError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if type(value) in (dict, list, tuple):
        items = value.items() if type(value) is dict else enumerate(value)
        for key, item in items:
            _check(key, f"the key {key!r:.80} in {where}")
            yield from _leaves(item, f"{where}[{key!r}]", depth + 1)
    else:
        yield where, value


def _check(value: Any, where: str) -> None:
    cls = type(value)
    if cls in _PLAIN or cls is DeferredTensor:
        return
    if cls not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        what = (
            f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {cls.__name__} of {cls.__module__}"
        )
        raise TypeError(f"{where} is {what}, which a cache cannot store; remove it before the node that saves")


def _as_stored(value: Any) -> Any:
    if isinstance(value, DeferredTensor):
        return value.load()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _folder(name: str) -> str:
    """Return the path of a folder in ComfyUI's output folder."""
    import folder_paths  # ComfyUI's module

    base = os.path.realpath(folder_paths.get_output_directory())
    path = os.path.realpath(os.path.join(base, name))
    # Hazard: workflows come from other people, and a name such as `../models` would lead out of the folder
    if path == base or not path.startswith(os.path.join(base, "")):
        raise ValueError(f"folder_name={name!r:.200}, expected the name of a folder inside {base}")
    return path


class SaveTensorCache:
    """The node Save Tensor Cache. Its inputs are lists, also the widgets."""

    CATEGORY = "dataset"
    DESCRIPTION = "Saves latents and conditioning as WebDataset shards with safetensors in them."
    FUNCTION = "save"
    INPUT_IS_LIST = True
    OUTPUT_NODE = True
    RETURN_TYPES = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs, as ComfyUI asks for them."""
        folder_name = ("STRING", {"default": "tensor_cache", "tooltip": "New folder, inside the output folder."})
        return {"required": {"latents": ("LATENT",), "conditioning": ("CONDITIONING",), "folder_name": folder_name}}

    def save(self, latents: list[Any], conditioning: list[Any], folder_name: list[str]) -> dict[str, Any]:
        """Save the training set."""
        count = save_training_set(_folder(folder_name[0]), latents, conditioning)
        return {"ui": {"text": [f"{count:,} samples saved in {folder_name[0]}"]}}


class LoadTensorCache:
    """The node Load Tensor Cache. It returns two lists of equal length."""

    CATEGORY = "dataset"
    DESCRIPTION = (
        "Loads latents and conditioning; tensors are read when they are used. "
        "Resolution Bucket uses all of them at once, so it loads the whole training set into memory."
    )
    FUNCTION = "load"
    OUTPUT_IS_LIST = (True, True)
    RETURN_NAMES = ("latents", "conditioning")
    RETURN_TYPES = ("LATENT", "CONDITIONING")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs, as ComfyUI asks for them."""
        folder_name = ("STRING", {"default": "tensor_cache", "tooltip": "Folder inside the output folder."})
        lazy = ("BOOLEAN", {"default": True, "tooltip": "Read tensors when they are used, and not now."})
        return {"required": {"folder_name": folder_name, "lazy": lazy}}

    @classmethod
    def IS_CHANGED(cls, folder_name: str, lazy: bool) -> list[tuple[str, int, int]]:
        """Return a value that changes with the shards, so that ComfyUI runs the node again."""
        with os.scandir(_folder(folder_name)) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries if entry.name.endswith(".tar"))
        return [(name, status.st_size, status.st_mtime_ns) for name, status in files]

    def load(self, folder_name: str, lazy: bool) -> tuple[list[Any], list[Any]]:
        """Load the training set."""
        return load_training_set(_folder(folder_name), lazy)


NODE_CLASS_MAPPINGS = {"SaveTensorCache": SaveTensorCache, "LoadTensorCache": LoadTensorCache}
NODE_DISPLAY_NAME_MAPPINGS = {"SaveTensorCache": "Save Tensor Cache", "LoadTensorCache": "Load Tensor Cache"}
