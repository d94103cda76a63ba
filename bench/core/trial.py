"""One case: every candidate prepared, checked, timed in turns, and checked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from fkjit.errors import DeviceError

from .accuracy import Accuracy, Expected
from .cases import Case
from .ceilings import rates
from .device import Device
from .method import Effort, Runner, first_line, host_microseconds, pace, time_in_turns, warm_up
from .op import Candidate, Refused

_PHASES = 1.5  # a mode's time again, for preparing, warm-up, host time: what a budget allows for


class Trial:
    """Makes the records of one case. `limits` are the run's ceilings, or None."""

    def __init__(
        self, device: Device, case: Case, effort: Effort, limits: dict[str, Any] | None
    ) -> None:
        self.device, self.case, self.effort, self.limits = device, case, effort, limits
        self.records: list[dict[str, Any]] = []
        self.runners: dict[str, Runner] = {}
        self.by_name: dict[str, dict[str, Any]] = {}

    def run(
        self, candidates: Sequence[Candidate], seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """A record for each candidate: times, or `error`, or `missing`.

        `seconds` is what the whole case may take, preparation included; iterations are reduced to
        fit, never below the least. DeviceError when the device itself no longer works.
        """
        device = self.device
        begin = device.now()
        arrays = self.case.op.inputs(self.case.problem, device)
        expected = self.case.op.expected(self.case.problem, arrays)
        for candidate in candidates:
            self._admit(candidate, arrays, expected)
        effort = self._shortened(seconds, device.now() - begin)
        runners = [self.runners[name] for name in self.runners]
        for runner in runners:
            self._steady(runner, effort)
        for _ in time_in_turns(device, runners, effort, effort.seconds):
            self._alive()
        for runner in runners:
            self._finish(runner, expected, effort)
        runners.clear()
        self.runners.clear()
        device.release()
        return self.records

    def _admit(self, candidate: Candidate, arrays: Any, expected: Expected) -> None:
        """Prepare a candidate and check it; only if it is right it becomes a runner."""
        device, record = self.device, self._record(candidate)
        missing = candidate.missing()
        if missing:
            record["missing"] = missing
            return
        device.release()
        free, begin = device.free_bytes(), device.now()
        try:
            prepared = candidate.prepare(self.case.problem, arrays)
            output = prepared.output(prepared.call())
            device.synchronize()
            record["prepare_s"] = device.now() - begin
            record["memory"] = {"driver_bytes": free - device.free_bytes()}
            device.spoil(output)  # the next output is likely to get this very memory
            del output
            accuracy = expected.judge(prepared.output(prepared.call()))
            record["memory"]["peak_bytes"] = device.peak_bytes(prepared.call)
            runner = Runner(candidate.name, prepared)
            pace(device, runner)
        except Refused as error:
            record["missing"] = str(error)
        except Exception as error:
            record["error"] = first_line(error)
            self._alive()
        else:
            self._judged(record, accuracy)
            if "error" not in record:
                self.runners[candidate.name] = runner

    def _record(self, candidate: Candidate) -> dict[str, Any]:
        case = self.case
        record: dict[str, Any] = {
            "record": "cell",
            "op": case.op.name,
            "case": case.label,
            "candidate": candidate.name,
            "kind": candidate.kind,
            "version": candidate.version(),
            "problem": dict(case.problem),
            "flops": case.op.flops(case.problem),
            "bytes": case.op.bytes(case.problem),
        }
        self.records.append(record)
        self.by_name[candidate.name] = record
        return record

    def _judged(self, record: dict[str, Any], accuracy: Accuracy) -> None:
        record["accuracy"] = asdict(accuracy)
        wrong = accuracy.why_wrong()
        if wrong:
            record["error"] = wrong

    def _shortened(self, seconds: float | None, spent: float) -> Effort:
        """The effort for what is left of a case's time."""
        if seconds is None or not self.runners:
            return self.effort
        share = (seconds - spent) / len(self.runners) / (len(self.effort.modes) + _PHASES)
        return replace(self.effort, seconds=max(min(self.effort.seconds, share), 1e-3))

    def _steady(self, runner: Runner, effort: Effort) -> None:
        """Warm-up and host time."""
        device, record = self.device, self.by_name[runner.name]
        record["gpu"] = {"before": device.state()}
        try:
            with device.span(f"{self.case.label} {runner.name} warm-up"):
                record["warmup"] = warm_up(device, runner, effort)
            pace(device, runner)
            record["host_us"] = host_microseconds(device, runner, 0.2 * effort.seconds)
        except Exception as error:
            runner.error = first_line(error)

    def _finish(self, runner: Runner, expected: Expected, effort: Effort) -> None:
        """The times of a runner that is still right, into its record."""
        device, record = self.device, self.by_name[runner.name]
        record["gpu"] |= {"during": runner.during(), "after": device.state()}
        if runner.error is None:
            self._check_again(runner, expected, record)
        if runner.error is not None:
            record["error"] = runner.error
        if "error" in record:
            return
        results = runner.results()
        for found in results.values():
            if "p50" in found:
                found |= rates(
                    found["p50"] * 1e-3,
                    record["flops"],
                    record["bytes"],
                    self.case.problem.get("dtype"),
                    self.limits,
                )
        record |= results
        record["asked"] = {"iterations": effort.iterations, "seconds": effort.seconds}
        self._describe(runner, record)

    def _check_again(self, runner: Runner, expected: Expected, record: dict[str, Any]) -> None:
        """After timing, the call and what its graph left: races and stale results show here."""
        try:
            output = runner.prepared.output
            for made in [runner.prepared.call(), *([runner.output] if runner.copies else [])]:
                if record.get("error") is None and made is not None:
                    self._judged(record, expected.judge(output(made)))
        except Exception as error:
            runner.error = first_line(error)

    def _describe(self, runner: Runner, record: dict[str, Any]) -> None:
        """How our variant was built; a failure there costs no time that was measured."""
        if runner.prepared.variant is not None:
            try:
                record["variant"] = self.device.variant(*runner.prepared.variant)
            except Exception as error:
                record["variant"] = {"error": first_line(error)}

    def _alive(self) -> None:
        """DeviceError when nothing can run any more: an illegal access spoils the process."""
        try:
            self.device.synchronize()
        except Exception as error:
            raise DeviceError(
                f"bench: the device is in an error state after {self.case.label}: "
                f"{first_line(error)}; what is done is kept"
            ) from error
