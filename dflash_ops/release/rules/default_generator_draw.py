"""Random numbers from a device's default generator, in a worker, outside the gate.

Measured on torch 2.11 with 12 threads on one GPU: a draw while another worker captures ends that worker with "Offset
increment outside graph capture encountered unexpectedly". Elsewhere the numbers depend on which thread is first, and a
compile in any thread puts the generators back, so that others draw the same numbers twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, is_none, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

# on the CPU where no device is given
_FACTORIES = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm")}
_LIKE_INPUT = {
    f"torch.{name}"
    for name in ("rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson")
}
_INIT = {
    f"torch.nn.init.{name}"
    for name in (
        "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
        "kaiming_normal_", "orthogonal_", "sparse_",
    )
}  # fmt: skip
_MODULES = {
    f"torch.nn.{name}"
    for name in (
        "Linear", "Bilinear", "Embedding", "EmbeddingBag", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention",
        "LSTM", "GRU", "RNN", "Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer",
    )
}  # fmt: skip
_METHODS = {
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_",
}  # fmt: skip
_DROPOUTS = {
    f"torch.nn.functional.{name}"
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
        "gumbel_softmax",
    )
}  # fmt: skip
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_WHY = (
    "draws from a default generator in a worker thread: while another worker captures, that capture dies ('Offset\n"
    "increment outside graph capture', torch 2.11); else the numbers depend on which thread is first."
)
_WHY_CPU = (
    "draws from the CPU's default generator in a worker thread: which numbers it gets depends on which thread is\n"
    "first, and a compile in any thread puts the generator back, so that numbers are drawn twice."
)
_WHY_DROPOUT = (
    "draws from the device's default generator in a worker thread, and takes no other: while another worker captures,\n"
    "that capture dies ('Offset increment outside graph capture', torch 2.11)."
)
_FIX = "give it a torch.Generator of the worker's own (generator=...), or draw inside the gate"
_FIX_DROPOUT = "make the mask with a generator of the worker's own: (torch.rand(shape, generator=own) > p) / (1 - p)"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        call = place.node
        if place.gated or not isinstance(call, ast.Call):
            continue
        name = module.name(call.func) or ""
        if name in _DROPOUTS or name == _ATTENTION:
            if _drops(module, call, name):
                yield hit_at(call, Severity.WARNING, _WHY_DROPOUT, _FIX_DROPOUT)
        elif _draws(module, call, name) and not _has_generator(module, call):
            device = _device(module, call, name)
            if device == "cpu":
                yield hit_at(call, Severity.WARNING, _WHY_CPU, _FIX)
            elif device != "meta":
                yield hit_at(call, Severity.ERROR if threads.spell_graphs else Severity.WARNING, _WHY, _FIX)


def _draws(module: Module, call: ast.Call, name: str) -> bool:
    if name in _FACTORIES | _LIKE_INPUT | _INIT | _MODULES:
        return True
    # a method of a tensor, whatever the tensor's name is
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS and module.name(call.func) is None


def _has_generator(module: Module, call: ast.Call) -> bool:
    given = module.keywords(call)
    if "generator" in given:
        return not is_none(module.value(given["generator"]))
    # a ** whose keys are not known may bring one
    return any(keyword.arg is None and not module.items(keyword.value) for keyword in call.keywords)


def _device(module: Module, call: ast.Call, name: str) -> str | None:
    """The device's type; None: not known, which in a worker of a trainer is taken for a GPU."""
    given = module.keywords(call).get("device")
    if given is not None:
        return _device_type(module, given)
    if name in _FACTORIES | _MODULES:
        return "cpu"
    made = module.value(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if isinstance(made, ast.Call) and (module.name(made.func) or "") in {"torch.empty", "torch.zeros", "torch.ones"}:
        device = module.keywords(made).get("device")
        return "cpu" if device is None else _device_type(module, device)
    return None


def _device_type(module: Module, node: ast.expr) -> str | None:
    node = module.value(node)
    if isinstance(node, ast.Call) and module.name(node.func) == "torch.device" and node.args:
        node = module.value(node.args[0])
    named = text(node)
    return named.split(":")[0] if named is not None else None


def _drops(module: Module, call: ast.Call, name: str) -> bool:
    given = module.keywords(call)
    if name == _ATTENTION:
        share = given.get("dropout_p", call.args[4] if len(call.args) > 4 else None)
        return share is not None and not _is_zero(module, share)
    if name.endswith("gumbel_softmax"):
        return True
    share = given.get("p", call.args[1] if len(call.args) > 1 else None)
    training = given.get("training", call.args[2] if len(call.args) > 2 else None)
    shown = module.value(training) if training is not None else None
    return not (isinstance(shown, ast.Constant) and shown.value is False) and not (
        share is not None and _is_zero(module, share)
    )


def _is_zero(module: Module, node: ast.expr) -> bool:
    shown = module.value(node)
    return isinstance(shown, ast.Constant) and shown.value in {0}


RULE = Rule("default-generator-draw", find)
