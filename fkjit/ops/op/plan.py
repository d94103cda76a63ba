"""The plan cache: a geometry seen before is checked no more. What is left of such a call is to
allocate the outputs, put addresses into the arguments and launch.

Four steps, the cheapest first. Most calls are like one of the last with the same options:
`try_last` asks their plans, whose guards are PyTorch's own. Other geometries are looked up
(`lookup`). A new geometry may do with a plan for all sizes (`try_dynamic`; dynamic_plan.py). When
it is met for the second time it gets a plan of its own (`meet`, `store`): lengths that are new at
every step leave nothing behind.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import Pair, extent
from fkjit.ops.op.dynamic_plan import DynamicPlans
from fkjit.ops.op.plan_function import ADDRESS, ALIGNMENT, MISSED, compiled, steps
from fkjit.ops.op.request import Request
from fkjit.runtime.device import LoadedKernel

MAX_LAST = 4  # plans that a call's options had last
MAX_PLANS = 512  # of a generation: the last two are kept
MAX_MET = 8192  # geometries that were met once
MAX_APART = 4096  # distances between two arrays that were checked

MAX_KEYS = 128  # of plans for all sizes

Key = tuple[Any, ...]
# The addresses, and all else that a plan depends on: traits of the arrays, and their shapes and
# strides; None for an array that is not there.
Geometry = tuple[list[int], tuple[Key, Key]]


# What a plan depends on, of an array. A subclass of torch's or CuPy's class has a type of its own,
# and no plan.
_TRAITS = {
    "torch": "type({x}), {x}.dim(), {x}.dtype, {x}.get_device(), {x}.is_neg(), {x}.requires_grad",
    "cupy": "type({x}), {x}.ndim, {x}.dtype, {x}.data.device_id",
}
_SIZES = {"torch": "({x}.shape, {x}.stride())", "cupy": "({x}.shape, {x}.strides)"}
_WANTS_GRAD = 5  # among the traits of a tensor


@lru_cache(maxsize=64)
def geometry(kind: str, count: int) -> Callable[..., Geometry]:
    """What makes a geometry of `count` arrays, some of them None.

    Each call goes through it, so it is written out array by array: a loop takes half as long again.
    """
    names, pointers, traits, sizes = [f"x{i}" for i in range(count)], [], [], []
    for i, x in enumerate(names):
        pointers.append(f"p{i} := 0 if {x} is None else {ADDRESS[kind].format(x=x)}")
        own = _TRAITS[kind].format(x=x)
        traits.append(f"None if {x} is None else ({own}, p{i} & {ALIGNMENT})")
        sizes.append(f"None if {x} is None else {_SIZES[kind].format(x=x)}")
    made = f"[{', '.join(pointers)}], (({', '.join(traits)},), ({', '.join(sizes)},))"
    return eval(f"lambda {', '.join(names)}: ({made})")


@lru_cache(maxsize=1)
def _guards() -> Callable[..., Any] | None:
    """PyTorch's test whether a tensor is like another one as far as graphs of it are concerned: its
    type, dispatch keys, dtype, device, shape, strides, and whether gradients are wanted. None where
    this PyTorch has another test."""
    torch = sys.modules["torch"]

    def guard(x: Any) -> Callable[[Any], bool]:
        exact = {"dynamic_dims_sizes": [list(x.shape)], "dynamic_dims_strides": [list(x.stride())]}
        return torch._C._dynamo.guards.TensorGuards(x, **exact).check

    x = torch.zeros(2, 3, device="cpu")
    others = (x[:1], x.t(), x.t().contiguous().t(), x.double(), torch._neg_view(x), x.to("meta"), 0)
    try:
        fits = guard(x)
        return guard if fits(x.clone()) and not any(map(fits, others)) else None
    except Exception:
        return None


def _types(kind: str) -> tuple[type, ...]:
    """The types that have plans; what a subclass means, nobody knows."""
    framework = sys.modules.get(kind)
    try:
        if kind == "torch":
            return framework.Tensor, framework.nn.Parameter  # type: ignore[union-attr]
        return (framework.ndarray,)  # type: ignore[union-attr]
    except AttributeError:  # not imported, or by another thread that is at it
        return ()


def _is_plain(option: Any) -> bool:
    """Whether equal keys mean equal options: a tensor is hashed by identity and may change."""
    if isinstance(option, tuple):
        return all(map(_is_plain, option))
    return type(option) in (bool, int, float, str, type(None))


_all: weakref.WeakSet[Plans] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child process GPUs may not work: calls are to be checked again."""
    for plans in _all:
        plans.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Plans:
    """The plans of one op, by geometry and options.

    Those used least recently go first: plans are in two generations, a plan that is used moves to
    the young one, and when that is full the old one is dropped.
    """

    def __init__(
        self, call: str, names: tuple[str, ...], outputs: tuple[str, ...] = (), lengths: int = 0
    ) -> None:
        """`names`: of all arrays, the outputs last. `lengths`: as `Op` has them."""
        self.call, self.names, self.outputs, self.lengths = call, names, outputs, lengths
        self.young: dict[Key, Plan] = {}
        self.old: dict[Key, Plan] = {}
        self.last: dict[Any, tuple[Plan, ...]] = {}  # by options: what they had last
        # By the type of the first array: what makes a geometry, and whose arrays these are.
        self.geometries: dict[type, Callable[..., Geometry]] = {}
        self.kinds: dict[type, str] = {}
        self.dynamic: dict[Key, DynamicPlans] = {}  # by traits and options that are no lengths
        self._met: set[int] = set()
        _all.add(self)

    @property
    def known(self) -> list[Plan]:
        """Every plan there is."""
        return [*self.young.values(), *self.old.values()]

    def forget(self) -> None:
        """Drop every plan (for tests): the next call is checked."""
        for kept in (self.young, self.old, self.last, self.dynamic, self.geometries, self._met):
            kept.clear()

    def try_last(self, arrays: Sequence[Any], options: Any) -> Any:
        """What the call returns, if its arrays are like some that these options had last; else
        MISSED. (`Op.__call__` has these lines too.)"""
        for plan in self.last.get(options, ()):
            made = plan.try_arrays(*arrays)
            if made is not MISSED:
                return made
        return MISSED

    def sight(self, arrays: Sequence[Any]) -> Geometry | None:
        """Addresses and traits of the arrays; None where they are of no type that has plans."""
        find = self.geometries.get(type(arrays[0]))
        if find is None:
            find = self._introduced(arrays)
        try:
            return None if find is None else find(*arrays)
        except (AttributeError, TypeError, RuntimeError):  # whatever it is, the check explains it
            return None

    def _introduced(self, arrays: Sequence[Any]) -> Callable[..., Geometry] | None:
        """What makes the geometry of a framework's arrays that are met for the first time."""
        kind = next((kind for kind in ADDRESS if type(arrays[0]) in _types(kind)), None)
        if kind is None:
            return None
        find = geometry(kind, len(arrays))
        self.kinds.update(dict.fromkeys(_types(kind), kind))
        self.geometries.update(dict.fromkeys(_types(kind), find))
        return find

    def are_plain(self, seen: Geometry) -> bool:
        """Whether all arrays are of types that have plans: none stands for another one."""
        kinds = self.kinds
        return all([traits is None or traits[0] in kinds for traits in seen[1][0]])

    def lookup(
        self, arrays: Sequence[Any], options: Any, seen: Geometry | None = None
    ) -> Plan | None:
        """The plan for these arrays, or None: then the call is checked."""
        seen = seen or self.sight(arrays)
        if seen is None:
            return None
        key = (seen[1], options)
        try:
            plan = self.young.get(key) or (self._rejuvenated(key) if self.old else None)
        except TypeError:  # an option that is no key
            return None
        if plan is None or (plan.guarded and plan.refuses(seen[0])):
            return None
        if plan.expects(arrays):
            last = self.last.get(options, ())
            if plan not in last:
                self.last[options] = (plan, *last[: MAX_LAST - 1])
        return plan

    def _rejuvenated(self, key: Key) -> Plan | None:
        plan = self.old.pop(key, None)
        if plan is not None:
            self._put(key, plan)
        return plan

    def _put(self, key: Key, plan: Plan) -> None:
        if len(self.young) >= MAX_PLANS:
            self.old, self.young, self.last = self.young, {}, {}
        self.young[key] = plan  # last: other threads take it from here

    def try_dynamic(self, arrays: Sequence[Any], options: Any, seen: Geometry) -> Any:
        """What the call returns, if a plan for all sizes takes it; else MISSED."""
        pointers, (traits, sizes) = seen
        lengths = options[: self.lengths]
        try:
            plans = self.dynamic.get((traits, options[self.lengths :] if lengths else options))
        except TypeError:  # an option that is no key
            return MISSED
        if plans is None or not all([type(one) is int for one in lengths]):
            return MISSED
        return plans.run((*sizes, *lengths), pointers, arrays)

    def dynamic_for(self, options: Any, seen: Geometry) -> DynamicPlans | None:
        """Where a plan for all sizes would stand, if one is worth making for a geometry."""
        traits, lengths = seen[1][0], options[: self.lengths]
        if not (_is_plain(options) and all([type(one) is int for one in lengths])):
            return None
        key = (traits, options[self.lengths :])
        plans = self.dynamic.get(key)
        if plans is None:
            if len(self.dynamic) >= MAX_KEYS:
                self.dynamic.clear()
            wants_grad = any([one is not None and one[_WANTS_GRAD] for one in traits])
            plans = self.dynamic.setdefault(key, DynamicPlans(wants_grad))
        return plans if plans.wants_trace() else None

    def meet(self, traits: Key, options: Any) -> bool:
        """Note that a geometry was met; whether it had been, so that a plan is worth making."""
        try:
            key = hash((traits, options))
        except TypeError:
            return False
        if key in self._met:
            self._met.discard(key)
            return True
        if len(self._met) >= MAX_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def store(
        self,
        arrays: Sequence[Any],
        options: Any,
        request: Request,
        kernels: Sequence[LoadedKernel],
        pairs: Sequence[Pair],
    ) -> None:
        """The next call with arrays of this geometry takes the warm path."""
        kind = request.like.kind
        if kind not in ("torch", "cupy") or not _is_plain(options):
            return
        types = _types(kind)
        seen = self.sight(arrays)
        if seen is None or not all(x is None or type(x) in types for x in arrays):
            return
        key = (seen[1], options)
        plan = self.young.get(key) or self.old.get(key)
        if plan is None:
            plan = Plan(self, arrays, options, request, kernels)
        plan.allow(pairs)
        self.old.pop(key, None)
        self._put(key, plan)


class Plan:
    """What is left to do for one geometry.

    run: (*arrays) -> what the call returns, for arrays of this geometry. try_arrays: the same, or
    MISSED for any others; only after `expects`.
    """

    def __init__(
        self,
        plans: Plans,
        arrays: Sequence[Any],
        options: Any,
        request: Request,
        kernels: Sequence[LoadedKernel],
    ) -> None:
        self.names, self.kind = plans.names, request.like.kind
        self.wants_grad = any(getattr(x, "requires_grad", False) for x in arrays)
        self.apart: dict[tuple[int, int], tuple[int, int, set[int]]] = {}
        inputs = len(plans.names) - len(plans.outputs)
        self.steps = steps(plans.call, plans.names, inputs, arrays, options, request, kernels)
        self.run: Callable[..., Any] = compiled(self.steps.shape, False)(self.steps, (), None)
        self.try_arrays: Callable[..., Any] = _missed
        pointers = geometry(self.kind, len(arrays))(*arrays)[0]
        self.alignments = tuple(p & ALIGNMENT for p in pointers)

    @property
    def guarded(self) -> bool:
        """Whether it may refuse arrays of its geometry."""
        return self.wants_grad or bool(self.apart)

    def expects(self, arrays: Sequence[Any]) -> bool:
        """Have `try_arrays`, as calls like this one come again. (Not where autocast has made the
        arrays: the next ones would be like those that it was given.)"""
        if self.try_arrays is not _missed:
            return True
        if self.kind != "torch" or torch_ops.autocasting():
            return False
        guard = _guards()
        if guard is None:
            return False
        fits = tuple(None if x is None else guard(x) for x in arrays)
        shape = self.steps.shape._replace(guarded=self.guarded, aligned=not any(self.alignments))
        self.try_arrays = compiled(shape, True)(self.steps, fits, self)
        return True

    def allow(self, pairs: Sequence[Pair]) -> None:
        """Arrays as far apart as these do not overlap in a harmful way: that was checked."""
        if pairs and not self.apart:
            self.try_arrays = _missed  # which asks nothing yet
        for name, view, other, beside in pairs:
            one, two = self.names.index(name), self.names.index(other)
            (low, high), (low2, high2) = extent(view), extent(beside)
            near = self.apart.setdefault((one, two), (low2 - high, high2 - low, set()))
            if len(near[2]) < MAX_APART:
                near[2].add(view.pointer - beside.pointer)

    def refuses(self, pointers: Sequence[int]) -> bool:
        """Whether autograd has to see the call, or arrays that the caller gave may overlap in a way
        that was not checked yet."""
        if self.wants_grad and sys.modules["torch"].is_grad_enabled():
            return True
        for (one, two), (low, high, harmless) in self.apart.items():
            apart = pointers[one] - pointers[two]
            if low < apart < high and apart not in harmless:
                return True
        return False


def _missed(*arrays: Any) -> Any:
    return MISSED
