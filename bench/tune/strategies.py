"""kernel_tuner's search strategies over our variants, timed by our own method.

Its backends compile sources and launch them with arrays for arguments: neither cubins that were
built before nor tensor maps pass through them. Its spaces, strategies and budgets do not care what
a runner does, so the runner here is a `Session`. Needs `pip install 'fkjit[tune]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fkjit.errors import FkjitError, ParameterError, ToolchainError
from fkjit.spec import Params

from .session import OutOfTime, Record, Session, cost
from .task import Task

ALL = "all"  # our own: every variant, those of a trial in turns


def search(task: Task, session: Session, strategy: str, evaluations: int | None) -> list[Record]:
    """What a strategy tried; the default is always among it.

    ParameterError for an unknown strategy, ToolchainError without kernel_tuner.
    """
    if strategy == ALL:
        return session.results(task, task.variants)
    check(strategy)
    names = [param.name for param in task.spec.params if param.tunable]
    # Strategies reckon with numbers: each value goes by its place in the declared order.
    values = {p.name: p.values for p in task.spec.params if p.tunable}
    places = {name: list(range(len(values[name]))) for name in names}
    by_place = {
        tuple(values[name].index(params[name]) for name in names): params
        for params in task.variants
    }
    runner, tried = _runner(task, session, names, by_place)
    session.results(task, [task.default])
    _run(strategy, runner, places, by_place, evaluations)
    return session.results(task, [task.default, *(p for p in tried if p != task.default)])


def check(strategy: str) -> None:
    """ParameterError for an unknown strategy, ToolchainError without kernel_tuner."""
    if strategy == ALL:
        return
    try:
        known = import_module("kernel_tuner.interface").strategy_map
    except ImportError as error:
        raise ToolchainError(
            f"tune: --strategy {strategy} is kernel_tuner's: pip install 'fkjit[tune]', or leave "
            "it out to time every variant"
        ) from error
    if strategy not in known:
        raise ParameterError(
            f"tune: --strategy {strategy!r} is not one of {', '.join([ALL, *sorted(known)])}"
        )


def _runner(
    task: Task, session: Session, names: Sequence[str], by_place: dict[tuple[int, ...], Params]
) -> tuple[Any, list[Params]]:
    """What kernel_tuner asks for times, and the variants that it asked for so far."""
    base = import_module("kernel_tuner.runners.runner").Runner
    failed = import_module("kernel_tuner.util").RuntimeFailedConfig
    tried: list[Params] = []

    class SessionRunner(base):
        dev = SimpleNamespace(name=session.device.name, max_threads=1024)

        def get_device_info(self) -> Any:
            return self.dev

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:
            return {"device_name": self.dev.name}

        def run(self, parameter_space: Any, tuning_options: Any) -> list[dict[str, Any] | None]:
            made = []
            for place in map(tuple, parameter_space):
                if tuning_options.budget.is_done():
                    made.append(None)
                    continue
                params = by_place[place]
                if params not in tried:
                    tried.append(params)
                    tuning_options.budget.add_evaluations(1)
                made.append(dict(zip(names, place, strict=True)) | self.outcome(params))
            return made

        def outcome(self, params: Params) -> dict[str, Any]:
            """{"time": …} relative to the default's, or an error."""
            default, own = session.results(task, [task.default]), session.results(task, [params])
            value = cost(own[0], [*default, *own])
            return {"__error__": failed()} if value is None else {"time": value}

    return SessionRunner(), tried


def _run(
    strategy: str,
    runner: Any,
    places: dict[str, list[int]],
    by_place: dict[tuple[int, ...], Params],
    evaluations: int | None,
) -> None:
    """Let the strategy ask until it is through, or has had so many variants."""
    interface, util = import_module("kernel_tuner.interface"), import_module("kernel_tuner.util")
    legal = {str(place): dict(zip(places, place, strict=True)) for place in by_place}
    space = import_module("kernel_tuner.searchspace").Searchspace(
        None, None, None, from_cache={"tune_params": places, "cache": legal}
    )
    most = min(evaluations or space.size, space.size)
    options = _options(strategy, places, most)
    try:
        interface.strategy_map[strategy].tune(space, runner, options)
    except util.StopCriterionReached:
        pass
    except (FkjitError, OutOfTime):
        raise
    except Exception as error:  # some need more packages, some fail on spaces as small as ours
        raise ToolchainError(
            f"tune: kernel_tuner's --strategy {strategy} failed ({type(error).__name__}: {error}); "
            "what it measured is kept: choose another, or leave it out to time every variant"
        ) from error


def _options(strategy: str, places: dict[str, list[int]], most: int) -> Any:
    """What a strategy reads of kernel_tuner's own options."""
    interface, util = import_module("kernel_tuner.interface"), import_module("kernel_tuner.util")
    return interface.Options(
        tune_params=places,
        restrictions=[],
        strategy=strategy,
        seed=None,
        objective=["time"],
        objective_higher_is_better=[False],
        metrics=None,
        strategy_options=interface.Options(
            {} if strategy == "brute_force" else {"max_fevals": most}
        ),
        max_fevals=most,
        budget=util.TuningBudget(None, most),
        cache={},
        cachefile=None,
        verbose=False,
    )
