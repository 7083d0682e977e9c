"""A pretended GPU: CPU tensors that say that they are on "cuda:0" and refuse to mix with others, as a GPU's do.

    python tests/product/pretend_gpu.py spirl_rainbow.py --device cuda ...     # runs it; prints where it waits, by step

It finds tensors that are left on the wrong device, and the places where the processor waits for the GPU: each copy to
the processor (`.cpu()`, `.tolist()`, `.item()`, a number or a truth value made of a tensor). It says nothing about
speed or rounding. A PyTorch built without CUDA has no such device, so inside "meta" stands for it.
"""

import collections
import runpy
import sys
import traceback
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
WAITS = collections.Counter()  # (step, "file:line text"): how often; step is the script's variable, None without one
aten = torch.ops.aten
# Those that may be given tensors of both devices: indices may be on the CPU, copies go between them.
MIXED = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
    aten.copy_.default, aten._to_copy.default, aten._unsafe_index.Tensor,
}
WRITES = {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


def wait():
    """Count a copy to the processor, under the script's line that asked for it."""
    for frame in reversed(traceback.extract_stack()):
        if "spirl_" in frame.filename:
            step = vars(sys.modules["__main__"]).get("step")
            WAITS[step, f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"] += 1
            return


class OnGpu(torch.Tensor):
    """A tensor on the pretended GPU; `inner` is the CPU tensor that it really is."""

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=META, requires_grad=False)
        tensor.inner = inner
        return tensor

    device, is_cuda, is_cpu, is_meta = (property(lambda self, v=v: v) for v in (CUDA, True, False, False))

    def tolist(self):
        wait()
        return self.inner.tolist()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def dispatch(func, args, kwargs):
    """Refuse what a GPU would refuse, count what waits, and compute on the CPU."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    others = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    if on_gpu and others and func not in MIXED and "detach" not in str(func):
        raise RuntimeError(f"{func}: expected all tensors on the same device, found cuda:0 and cpu")
    if func in WRITES | {aten.index.Tensor} and on_gpu and not isinstance(args[0], OnGpu):
        raise RuntimeError(f"{func}: a CPU tensor with indices or values on cuda:0")
    if func in WRITES and isinstance(args[0], OnGpu) and not isinstance(args[2], OnGpu) and args[2].dim() > 0:
        raise RuntimeError(f"{func}: CPU values into a tensor on cuda:0")

    device = kwargs.get("device")
    to_gpu = device is not None and torch.device(device).type == "meta"
    to_cpu = device is not None and torch.device(device).type == "cpu"
    masked = func is aten.index.Tensor and any(ids is not None and ids.dtype == torch.bool for ids in args[1])
    leaves = func is aten.copy_.default and not isinstance(args[0], OnGpu) or func is aten._to_copy.default and to_cpu
    counts = func in (aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default) or masked
    if on_gpu and (leaves or counts):
        wait()
    if func is aten._fused_sdp_choice.default:
        return 0

    if to_gpu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(tensor.inner): tensor for tensor in on_gpu}
    args, kwargs = tree_map(lambda value: value.inner if isinstance(value, OnGpu) else value, (args, kwargs))
    result = func(*args, **kwargs)
    if not (to_gpu or on_gpu and not leaves):
        return result

    def moved(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, OnGpu):
            return value
        return known[id(value)] if id(value) in known else OnGpu(value)

    return tree_map(moved, result)


def meta_for_cuda(value):
    is_device = isinstance(value, str | torch.device)
    return META if is_device and str(value).startswith("cuda") else value


class Devices(TorchFunctionMode):
    """Every function of PyTorch is told "meta" where it was told "cuda"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            there = meta_for_cuda(kwargs.pop("device", None)) == META
            made = func(*args, **kwargs)
            return OnGpu(made) if there else made
        return func(*map(meta_for_cuda, args), **{name: meta_for_cuda(value) for name, value in kwargs.items()})


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def install():
    """From here on there is one GPU."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda._lazy_init = lambda: None

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    def inner(value):
        if isinstance(value, torch.Tensor) and isinstance(value.data, OnGpu):
            value = value.data
        return value.inner if isinstance(value, OnGpu) else value

    save, load = torch.save, torch.load

    def load_there(path, map_location=None, **kwargs):
        there = map_location is not None and torch.device(map_location).type == "cuda"
        content = load(path, map_location="cpu", **kwargs)
        return tree_map(lambda value: OnGpu(value) if there and isinstance(value, torch.Tensor) else value, content)

    torch.Generator = Generator
    torch.load = load_there
    torch.save = lambda content, path: save(tree_map(inner, content), path)
    Devices().__enter__()
    Dispatch().__enter__()


if __name__ == "__main__":
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    install()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        for (step, place), times in WAITS.items():
            print(f"wait\t{step}\t{times}\t{place}")
