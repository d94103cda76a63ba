"""A call of ours as one node of PyTorch's autograd: forward and backward, written as functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from fkjit.errors import ParameterError

Tensors = tuple[Any, ...]  # tensors, and None for what is not there


class Differentiable:
    """A call with gradients.

    Args:
        name: of the node, as PyTorch shows it in `grad_fn`.
        forward: (inputs, options) -> (results, saved): what the caller gets, and what `backward`
            wants to see again, any of inputs, results and other tensors.
        backward: (saved, gradients, needed, options) -> gradients of the inputs. `gradients` has
            one for each result, None for a result that nothing depends on; `needed` says of each
            input whether its gradient is wanted, and None is given where it is not.

        once: gradients of gradients are refused by PyTorch. False where `backward` is made of calls
            that have gradients themselves.

    Works eagerly, under torch.func's transforms, and where a graph is traced.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Tensors, Any], tuple[Tensors, Tensors]],
        backward: Callable[[Tensors, Tensors, Tensors, Any], Sequence[Any]],
        *,
        once: bool = True,
    ) -> None:
        self.name, self.forward, self.backward, self.once = name, forward, backward, once

    def __call__(self, inputs: Tensors, options: Any) -> Tensors:
        """The results, with a graph behind them. An input is a torch tensor."""
        if not sys.modules["torch"]._C._are_functorch_transforms_active():
            return self._apply(options, *inputs)
        layout = _Layout()
        return self._transformed.apply(options, layout, *inputs)[: layout.results]

    @cached_property
    def _apply(self) -> Callable[..., Tensors]:
        """`apply` of `_eager` as it is in C++: PyTorch's own, in Python, asks again whether a
        transform is active, which takes as long."""
        torch = sys.modules["torch"]
        try:
            apply = super(torch.autograd.Function, self._eager).apply
            alive = torch._C._functorch.unwrap_if_dead
        except AttributeError:  # of another PyTorch
            return self._eager.apply

        def applied(options: Any, *inputs: Any) -> Tensors:
            return apply(options, *[None if x is None else alive(x) for x in inputs])

        return applied

    @cached_property
    def _eager(self) -> Any:
        """PyTorch's Function whose forward sees `ctx`: applying it takes half as long."""

        def forward(ctx: Any, options: Any, *inputs: Any) -> Tensors:
            results, saved = self.forward(inputs, options)
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            ctx.options = options
            return results

        def backward(ctx: Any, *gradients: Any) -> Tensors:
            needed = ctx.needs_input_grad[1:]
            return None, *self.backward(ctx.saved_tensors, gradients, needed, ctx.options)

        return self._function(forward=forward, backward=backward)

    @cached_property
    def _transformed(self) -> Any:
        """The form that torch.func asks for: what is saved has to be an input or a result."""

        def forward(options: Any, layout: _Layout, *inputs: Any) -> Tensors:
            results, saved = self.forward(inputs, options)
            return (*results, *layout.note(inputs, results, saved))

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.options, layout, *arrays = inputs
            ctx.save_for_backward(*layout.saved(arrays, output))
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[layout.results :])
            ctx.results = layout.results

        def backward(ctx: Any, *gradients: Any) -> Tensors:
            of_results, needed = gradients[: ctx.results], ctx.needs_input_grad[2:]
            found = self.backward(ctx.saved_tensors, of_results, needed, ctx.options)
            return None, None, *found

        return self._function(forward=forward, setup_context=setup_context, backward=backward)

    def _function(self, **methods: Callable[..., Any]) -> Any:
        """One of PyTorch's Functions, of this name from the start: its node takes it then."""
        autograd = sys.modules["torch"].autograd
        if self.once:
            methods["backward"] = _once(methods["backward"])
        made = {method: staticmethod(function) for method, function in methods.items()}
        return type(autograd.Function)(self.name, (autograd.Function,), made)


def is_last() -> bool:
    """Within a backward pass: whether the engine drops what was saved, as nobody will ask for these
    gradients again, so that a node may write over it. False where PyTorch does not say."""
    torch = sys.modules["torch"]
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return keeps is not None and not traced and not keeps()


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's once_differentiable, which would also keep the engine from recording where it does
    not."""
    torch = sys.modules["torch"]
    recorded, records = torch.autograd.function.once_differentiable(backward), torch.is_grad_enabled

    def once(ctx: Any, *gradients: Any) -> Any:
        return (recorded if records() else backward)(ctx, *gradients)

    return once


class _Layout:
    """Where what is saved stands among inputs and outputs, which the two halves of a transformed
    forward see as different objects."""

    def __init__(self) -> None:
        self.results = 0
        self._places: list[tuple[str, int]] = []

    def note(self, inputs: Tensors, results: Tensors, saved: Tensors) -> list[Any]:
        """Remember it; those of `saved` that are neither an input nor a result."""
        others: list[Any] = []
        self.results = len(results)
        of_inputs = {id(x): ("input", at) for at, x in enumerate(inputs) if x is not None}
        of_results = {id(x): ("output", at) for at, x in enumerate(results)}
        for x in saved:
            place = ("none", 0) if x is None else of_inputs.get(id(x)) or of_results.get(id(x))
            if place is None:
                place = ("output", len(results) + len(others))
                others.append(x)
            self._places.append(place)
        return others

    def saved(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """What was noted, out of the other half's objects."""
        rows = {"input": inputs, "output": outputs, "none": (None,)}
        return [rows[kind][at] for kind, at in self._places]


def as_tuple(found: Any) -> Tensors:
    """What an `Op` returned: its one result in a tuple, too."""
    return found if isinstance(found, tuple) else (found,)


def autograd_of(call: str, differentiable: Differentiable) -> Callable[..., Any]:
    """The `autograd` of an `Op` whose results have gradients where it makes them itself.

    ParameterError where the caller gave an array for one.
    """

    def with_gradients(inputs: Tensors, outputs: Tensors, options: Any) -> Any:
        if any(given is not None for given in outputs):
            raise ParameterError(
                f"{call}: out is given and an input requires grad; call it under torch.no_grad(), "
                "or without out"
            )
        results = differentiable(inputs, options)
        return results[0] if len(results) == 1 else results

    return with_gradients
