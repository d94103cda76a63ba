"""An operation without a file of its own, out of the specs of its kernels alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.spec import KernelSpec, Params, Problem, registered

from .accuracy import LIMITS, Expected
from .op import Arrays, Op

_PARAMS = "params"  # where a case keeps the parameters that its problem was made for


def operation(op: str) -> Op:
    """Every kernel of `op` on the problems its specs name: `bench`, else `problems`."""
    specs = registered(op)
    return Op(
        name=op,
        sets={"default": [problem for spec in specs for problem in _problems(spec)]},
        label=_label if len(specs) == 1 else _label_of_kernel,
        inputs=_inputs,
        expected=_expected,
        choose=_choose,
    )


def _problems(spec: KernelSpec) -> Iterator[Problem]:
    """For each value of the parameters that are not free, the first legal variant's problems."""
    seen = set()
    for params in spec.variants():
        fixed = {p.name: params[p.name] for p in spec.params if not p.tunable}
        key = tuple(fixed.values())
        if key not in seen:
            seen.add(key)
            for problem in spec.work.bench(params) or spec.verification.problems(params, "full"):
                yield {**problem, **fixed, _PARAMS: fixed, "kernel": spec.name}


def with_values(problem: Problem, values: Mapping[str, Any]) -> Problem:
    """The same problem with other values, also where a kernel's parameters are kept in it."""
    made = {**problem, **values}
    if _PARAMS in problem:
        kept = problem[_PARAMS]
        made[_PARAMS] = {**kept, **{n: v for n, v in values.items() if n in kept}}
    return made


def _label(problem: Problem) -> str:
    shown = {k: v for k, v in problem.items() if k not in (_PARAMS, "kernel", "dtype")}
    words = [f"{name}={value}" for name, value in shown.items()]
    return " ".join([*([problem["dtype"]] if "dtype" in problem else []), *words])


def _label_of_kernel(problem: Problem) -> str:
    """Where several kernels have the same problems."""
    return f"{problem['kernel']} {_label(problem)}"


def _choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """The first legal variant with the problem's fixed parameters."""
    wanted = problem[_PARAMS]
    for params in spec.variants(arch):
        if all(params[name] == value for name, value in wanted.items() if name in params):
            return params
    raise ParameterError(f"{spec.id} has no variant for {wanted} on {arch.name}")


def _spec(problem: Problem) -> tuple[KernelSpec, Params]:
    """The kernel that the problem comes from, in any variant that fits."""
    for found in registered():
        if found.name == problem["kernel"]:
            for params in found.variants():
                if all(params.get(name) == value for name, value in problem[_PARAMS].items()):
                    return found, params
    raise ParameterError(f"bench: no kernel {problem['kernel']!r} for {problem[_PARAMS]}")


def _inputs(problem: Problem, device: Any) -> Arrays:
    spec, params = _spec(problem)
    made = spec.verification.inputs(params, problem, np.random.default_rng())
    return {name: device.array(values) for name, values in made.items()}


def _expected(problem: Problem, arrays: Arrays) -> Expected:
    """The whole first output, from the reference on the CPU."""
    spec, params = _spec(problem)
    if spec.verification.reference is None:
        raise ParameterError(f"{spec.id} has no reference, and what is not checked is not timed")
    first = next(iter(spec.verification.outputs(params, problem)))
    want = spec.verification.reference(
        problem, {name: _numpy(array) for name, array in arrays.items()}
    )[first]
    like = next(iter(arrays.values()))
    return Expected([(..., _like(want, like))], LIMITS.get(problem.get("dtype", ""), 1e-6))


def _numpy(array: Any) -> np.ndarray:
    """A CPU copy, of bfloat16 in float32 (which holds each of its values)."""
    if isinstance(array, np.ndarray):
        return array
    found = array.detach().cpu()
    return (found.float() if str(found.dtype) == "torch.bfloat16" else found).numpy()


def _like(values: np.ndarray, array: Any) -> Any:
    """Float64 values where `array` is."""
    if isinstance(array, np.ndarray):
        return values
    return array.new_tensor(values, dtype=array.double().dtype)
