"""An independent oracle: the original model, with every Python-level call of relu answered by another function.

It knows nothing of sites: it stands between the model's code and PyTorch, and sees F.relu, torch.relu, tensor methods
and nn.ReLU alike. It does not see the `apply` of an autograd.Function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

OUT_OF_PLACE = {F.relu, torch.relu, torch.Tensor.relu}
IN_PLACE = {torch.relu_, torch.Tensor.relu_, F.relu_}
CLAMPS = {torch.clamp, torch.Tensor.clamp}


class Answering(TorchFunctionMode):
    """Answers relu with `new`; counts how often."""

    def __init__(self, new, clamps=True):
        super().__init__()
        self.new, self.clamps, self.count = new, clamps, 0

    def __enter__(self):
        # A mode does not reach what a checkpoint computes again in the backward, so here nothing is checkpointed.
        self.checkpoint = torch.utils.checkpoint.checkpoint
        torch.utils.checkpoint.checkpoint = lambda function, *args, use_reentrant: function(*args)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.utils.checkpoint.checkpoint = self.checkpoint
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        in_place = func in IN_PLACE or (func is F.relu and (kwargs.get("inplace") or args[1:2] == (True,)))
        clamp = self.clamps and func in CLAMPS and kwargs == {"min": 0}
        if func in OUT_OF_PLACE or in_place or clamp:
            self.count += 1
            x = args[0] if args else kwargs["input"]
            return x.copy_(self.new(x.clone())) if in_place else self.new(x)
        return func(*args, **kwargs)


def outputs_and_gradients(model, x, training):
    """A run of a model, its gradients taken with respect to its parameters and its input; the model keeps its mode."""
    flags = {module: module.training for module in model.modules()}
    model.train(training)
    leaf = x.clone().requires_grad_()
    out = model(leaf.clone())
    leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).reshape(out.shape), allow_unused=True)
    for module, flag in flags.items():
        module.training = flag
    return [out.detach(), *(g for g in grads if g is not None)]
