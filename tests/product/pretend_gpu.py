"""A pretended GPU: CPU tensors that say that they are on "cuda:0" and refuse to mix with others, as a GPU's do.

    python tests/product/pretend_gpu.py spirl_rainbow.py --device cuda ...  # a new run; prints where it waits, by step

It finds tensors that are left on the wrong device, and the places where the processor waits for the GPU: each copy to
the processor (`.cpu()`, `.tolist()`, `.item()`, a number or a truth value made of a tensor). It says nothing about
speed or rounding. A PyTorch built without CUDA has no such device, so inside "meta" stands for it.
"""

import collections
import runpy
import sys
import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
WAITS = collections.Counter()  # (step, line of the script): how often; step is the script's variable, None without one
COPIES = "copy_", "_to_copy"  # go between the devices
INDEXING = "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"
MADE_OF_VALUES = "nonzero", "masked_select", "_local_scalar_dense"  # how large the result is, or a number


def wait():
    """Count a copy to the processor, under the script's line that asked for it."""
    frame = next((frame for frame in reversed(traceback.extract_stack()) if "spirl_" in frame.filename), None)
    if frame:
        WAITS[vars(sys.modules["__main__"]).get("step"), frame.line] += 1


def dispatch(_, func, types, args=(), kwargs=None):
    """Refuse what a GPU would refuse, count what waits, and compute on the CPU."""
    kwargs, name = kwargs or {}, func.overloadpacket.__name__
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    if name in INDEXING and isinstance(args[0], OnGpu):
        tensors = [args[0], *args[2:3]]  # with the values; indices may be on the CPU
    others = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    if on_gpu and others and name not in COPIES:
        raise RuntimeError(f"{func}: expected all tensors on the same device, found cuda:0 and cpu")

    device = kwargs.get("device")
    leaves = name == "copy_" and not isinstance(args[0], OnGpu) or name == "_to_copy" and device == CPU
    masked = name == "index" and any(ids is not None and ids.dtype == torch.bool for ids in args[1])
    if on_gpu and (leaves or masked or name in MADE_OF_VALUES):
        wait()
    if name == "_fused_sdp_choice":
        return 0
    known = {id(tensor.inner): tensor for tensor in on_gpu}
    args, kwargs = tree_map_only(OnGpu, lambda tensor: tensor.inner, (args, kwargs))
    result = func(*args, **kwargs | ({"device": CPU} if device == META else {}))
    if device != META and (leaves or not on_gpu):
        return result
    return tree_map_only(torch.Tensor, lambda value: known[id(value)] if id(value) in known else OnGpu(value), result)


class OnGpu(torch.Tensor):
    """A tensor on the pretended GPU; `inner` is the CPU tensor that it really is."""

    def __new__(cls, inner):
        places = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = cls._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=META, **places)
        tensor.inner = inner
        return tensor

    device, is_cuda, is_cpu, is_meta = (property(lambda self, v=v: v) for v in (CUDA, True, False, False))
    __torch_dispatch__ = classmethod(dispatch)

    def tolist(self):
        wait()
        return self.inner.tolist()


class Dispatch(TorchDispatchMode):
    __torch_dispatch__ = dispatch


def meta_for_cuda(value):
    return META if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class Devices(TorchFunctionMode):
    """Every function of PyTorch is told "meta" where it was told "cuda"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: meta_for_cuda(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor):
            there = kwargs.pop("device", None) == META
            made = func(*args, **kwargs)
            return OnGpu(made) if there else made
        return func(*map(meta_for_cuda, args), **kwargs)


class Generator(torch.Generator):
    def __new__(cls, device):
        return super().__new__(cls, "cpu")


if __name__ == "__main__":
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda._lazy_init = lambda: None
    torch.Generator = Generator
    save, inner = torch.save, lambda value: getattr(value.data, "inner", value)
    torch.save = lambda content, path: save(tree_map_only(torch.Tensor, inner, content), path)
    with Devices(), Dispatch():
        runpy.run_path(script, run_name="__main__")
    for (step, line), times in WAITS.items():
        print(f"wait\t{step}\t{times}\t{line}")
