"""Aliasing: which results in a data flow are memory of their own, and who else sees a tensor that is overwritten."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules import batchnorm, conv, normalization, pooling

from actswap.dataflow import function_name

_MAKERS = (
    nn.Linear, conv._ConvNd, batchnorm._NormBase, normalization.LayerNorm, normalization.GroupNorm,
    normalization.RMSNorm, pooling._MaxPoolNd, pooling._AvgPoolNd,
)  # fmt: skip
"""Modules whose result is new memory, also when a subclass calls the same kernels."""

_MAKING = frozenset({
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "add", "sub", "mul", "div", "truediv",
    "cat", "stack", "matmul", "bmm", "einsum", "embedding", "max_pool2d", "avg_pool2d", "clone",
})  # fmt: skip
"""Functions and methods whose result is new memory."""


def is_new(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a node's result is memory that it made itself."""
    if node.op == "call_module":
        return isinstance(owner.get_submodule(str(node.target)), _MAKERS)
    return node.op in ("call_function", "call_method") and function_name(node) in _MAKING


def is_private(owner: nn.Module, node: fx.Node) -> bool:
    """Whether nothing but this node sees what it reads, and its own result is used: then it may as well make a copy.

    Walks back to where the memory was made; every value on the way must have one user.
    """
    return bool(node.users) and all(_only(owner, source) for source in node.all_input_nodes)


def _only(owner: nn.Module, node: fx.Node) -> bool:
    if len(node.users) != 1 or node.op in ("placeholder", "get_attr"):
        return False
    return is_new(owner, node) or all(_only(owner, source) for source in node.all_input_nodes)
