"""A training step as one CUDA graph: forward pass, backward pass and optimizer."""

from __future__ import annotations

from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op import torch_ops
from fkjit.runtime import workspace

_CALL = "CapturedStep"
_EAGER = 3  # steps before the capture: they compile, and make the optimizer's state
_COUNTERS = 1 << 13  # an eighth of those that are there for all kernels of the graph


class CapturedStep:
    """A training step that the host starts with one call, for models whose kernels are short.

        fkjit.models.patch(model, loss=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
        step = fkjit.models.CapturedStep(model, optimizer)
        for batch in batches:  # tensors of one shape
            loss = step(input_ids=batch, labels=batch)

    The first three calls are steps as usual; the fourth captures, and from then on every call
    copies its tensors and replays. On a CPU all are steps as usual. What is no tensor stays as it
    was when captured: a learning rate that changes is a tensor (`lr=torch.tensor(…)`, `fill_`).

    Args:
        model: a transformers model, or anything that is called with the step's tensors by name and
            returns something with a `loss`.
        optimizer: on a GPU one that can be captured (capturable=True).
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._graph: Any = None
        self._tensors: dict[str, Any] = {}
        self._loss: Any = None
        self._calls = 0

    def __call__(self, **tensors: Any) -> Any:
        """The loss before the step, a tensor without gradient, as it came from the model.
        ParameterError for tensors of other names, shapes or dtypes than those of the capture, and
        where the model makes no loss of them; ArgumentTypeError for what is no tensor."""
        torch = torch_ops.torch_seen()
        for name, given in (tensors or {"step": None}).items():
            if torch is None or not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(
                    f"{_CALL}: {name} is a {type(given).__name__}; allowed: the model's torch "
                    "tensors, by name"
                )
        self._calls += 1
        if not next(iter(tensors.values())).is_cuda:
            return self._step(tensors)
        if self._calls <= _EAGER:
            stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):  # as PyTorch asks for before a capture
                loss = self._step(tensors)
            stream.wait_stream(side)
            return loss
        if self._graph is None:
            self._graph = self._captured(tensors)
        self._check(tensors)
        for name, own in self._tensors.items():
            own.copy_(tensors[name])
        self._graph.replay()
        return self._loss.clone()

    def _step(self, tensors: dict[str, Any]) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        loss = getattr(self._model(**tensors), "loss", None)
        if loss is None:
            raise ParameterError(
                f"{_CALL}: of {', '.join(tensors)} the model makes no loss; allowed: tensors among "
                "which are what it takes for one, as labels=…"
            )
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _captured(self, tensors: dict[str, Any]) -> Any:
        torch = torch_ops.torch_seen()
        self._tensors = {name: x.clone() for name, x in tensors.items()}
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        workspace.reserve(next(iter(tensors.values())).device.index, _COUNTERS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._step(self._tensors)
        return graph

    def _check(self, tensors: dict[str, Any]) -> None:
        def kinds(of: dict[str, Any]) -> dict[str, Any]:
            return {name: (tuple(x.shape), x.dtype) for name, x in of.items()}

        if kinds(tensors) != kinds(self._tensors):
            raise ParameterError(
                f"{_CALL}: {kinds(tensors)}; allowed: {kinds(self._tensors)}, as captured"
            )
