"""One decode step of a batch, in a CUDA graph where there is a GPU."""

from __future__ import annotations

from typing import Any

from fkjit.errors import ParameterError
from fkjit.models import plan as plans
from fkjit.models.network import Attend, Fused, Network
from fkjit.models.plan import StepPlan
from fkjit.models.readback import Launched, Readback
from fkjit.models.sampling import GREEDY, Logits, pick
from fkjit.models.slots import Slots, State
from fkjit.models.whole_step import WholeStep, has_whole
from fkjit.ops.attention.decode.call import paged_attention
from fkjit.ops.attention.decode.settled import fits as has_settled
from fkjit.ops.attention.decode.settled import settled_attention
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.kv.slots import kv_slots
from fkjit.ops.op import torch_ops
from fkjit.ops.op.request import arch_of
from fkjit.ops.rope.frequencies import rope_table
from fkjit.ops.step.logits import pick_largest
from fkjit.runtime import pdl, workspace
from fkjit.runtime.interop import view

COUNTERS = 1 << 12  # an eighth of those that are there for all kernels of one graph
_REPLAYS = 20  # of a graph that is timed
LOGITS = "logits"  # a way of sampling: the caller takes the logits, and gives the next tokens


def window_of(network: Network, layer: int) -> tuple[int, int] | None:
    """A layer's window as attention takes it."""
    seen = network.config.windows[layer]
    return None if seen is None else (seen - 1, 0)


class Steps:
    """Steps of the first slots. A graph is captured when a number of slots (rounded up to a power
    of two) and a way of sampling are met for the first time.

    plan: of all steps; None: the usual one of each number of slots, "measured": the fastest.
    `plans`: those in use. ParameterError: a plan to be measured without graphs.
    """

    def __init__(
        self, network: Network, cache: PagedKVCache, slots: Slots, graphs: bool,
        plan: StepPlan | str | None = None,
    ) -> None:  # fmt: skip
        self.network, self.cache, self.slots = network, cache, slots
        self._most = slots.state.tokens.shape[0]
        self._on_gpu = slots.state.tokens.is_cuda
        self._graphs: dict[tuple[int, str], Any] | None = {} if graphs and self._on_gpu else None
        self._pool: Any = None
        self._angles: Fused | None = None
        self._one_launch: WholeStep | None = None
        self._plan, self.plans = plan, dict[int, StepPlan]()
        if plan == plans.MEASURED and self._graphs is None:
            raise ParameterError(
                "Decoder: plan='measured' without CUDA graphs; allowed on a GPU with graphs=True"
            )
        vocabulary, device = network.config.vocabulary, slots.state.tokens.device
        self._logits = Logits(self._most, vocabulary, device)
        self._readback = Readback(self._most, device)

    def launch(self, count: int, mode: str, read: bool = True) -> Launched:
        """A step of the first `count` slots; nothing waits for it. read: False, and LOGITS, sends
        no tokens to the host."""
        size = min(1 << (count - 1).bit_length(), self._most)
        self.cache.flush()
        if self._graphs is None:
            self.run(size, mode)
        else:
            self.graph(size, mode).replay()
        tokens = self.slots.state.tokens[:count]
        return self.send(tokens) if read and mode != LOGITS else Launched(tokens, None)

    def send(self, tokens: Any) -> Launched:
        """Tokens as they are now, on their way to the host."""
        return self._readback.send(tokens)

    def run(self, size: int, mode: str, plan: StepPlan | None = None) -> None:
        """The step itself: the sequences' tokens and positions become the next ones."""
        network, cache, state = self.network, self.cache, self.slots.first(size)
        plan = plan or self._planned(size)
        if plan.whole and has_whole(network, size):
            logits, advances = self._logits.rows(size), {LOGITS: 1, GREEDY: 2}.get(mode, 0)
            best = self._whole()(state, logits, advance=advances)
            if not advances:
                self._pick(state, logits, mode, best)
            return

        if plan.streamed and self._streams(size):
            return self._run_streamed(state, mode)
        attend = self._attend(state)
        slots = kv_slots(cache, state.rows)
        fused = self._fused() if plan.fused and network.fits(size) else None
        stream = network.hidden(state.tokens, state.positions, slots, cache, attend, plan, fused)
        logits = network.logits(stream, out=self._logits.rows(size), plan=plan)
        best = None if mode == LOGITS else self._logits.largest(size)
        self._pick(state, logits, mode, best)

    def logits(self, count: int) -> Any:
        """fp32 [count, vocabulary] of the last step; the next one overwrites them."""
        return self._logits.rows(count)

    def _pick(self, state: State, logits: Any, mode: str, best: Any) -> None:
        if mode != LOGITS:
            draws = None if mode == GREEDY else state.draws()
            state.tokens.copy_(pick(logits, draws, mode, best))
        state.positions.add_(state.active)

    def graph(self, size: int, mode: str) -> Any:
        """The step as a torch.cuda.CUDAGraph."""
        assert self._graphs is not None
        found = self._graphs.get((size, mode))
        if found is None:
            plan = self._planned(size)
            found = self._graphs[size, mode] = self._captured(size, mode, plan)
        return found

    def _planned(self, size: int) -> StepPlan:
        """The plan of steps of so many slots."""
        if size not in self.plans:
            self.plans[size] = self._new_plan(size)
        return self.plans[size]

    def _new_plan(self, size: int) -> StepPlan:
        if isinstance(self._plan, StepPlan):
            return self._plan
        if self._plan == plans.MEASURED:
            return plans.best(lambda one: self._timed(size, one))
        torch, device = torch_ops.torch_seen(), self.slots.state.tokens.device
        capability = torch.cuda.get_device_capability(device) if self._on_gpu else None
        return plans.usual(self.network.config, size, self.network.codes, capability)

    def _captured(self, size: int, mode: str, plan: StepPlan, timed: bool = False) -> Any:
        """Steps without sequences come first: they compile and load every kernel. timed: what the
        graph's replays take, in place of the graph."""
        torch, state = torch_ops.torch_seen(), self.slots.first(size)
        kept = (state.tokens.clone(), state.positions.clone(), state.rows.clone())
        state.rows.fill_(-1)
        try:
            for _ in range(2):
                self.run(size, mode, plan)
                state.positions.copy_(kept[1])
            torch.cuda.synchronize()
            workspace.reserve(state.tokens.device.index, COUNTERS)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with pdl.starting(plan.early), torch.cuda.graph(graph, pool=self._pool):
                self.run(size, mode, plan)
            return replayed(graph) if timed else graph
        finally:
            for own, was in zip((state.tokens, state.positions, state.rows), kept, strict=True):
                own.copy_(was)

    def _streams(self, size: int) -> bool:
        seen = view(self.network.weights.embedding, "Decoder", "weights")
        return self.network.streams(size, arch_of(seen))

    def _attend(self, state: State, settled: bool = False) -> Attend:
        """settled: keys before the new ones may be read while kernels ahead are not over."""
        network, cache = self.network, self.cache
        config = network.config
        settled = settled and has_settled(config.head_dim, config.heads_q // config.heads_kv)

        def attend(q: Any, layer: int) -> Any:
            window = window_of(network, layer)
            if settled and window is None:
                return settled_attention(q, cache, state.rows, state.positions, layer)
            return paged_attention(q, cache, rows=state.rows, layer=layer, window=window)

        return attend

    def _run_streamed(self, state: State, mode: str) -> None:
        logits, greedy = self._logits.rows(len(state.tokens)), mode == GREEDY
        attend, table = self._attend(state, settled=True), self._fused().table
        largest = self.network.streamed(state, self.cache, table, attend, logits)
        best = pick_largest(largest, state.tokens, state.positions, state.active, greedy)
        if not greedy:
            self._pick(state, logits, mode, best)

    def _whole(self) -> WholeStep:
        if self._one_launch is None:
            self._one_launch = WholeStep(self.network, self.cache, self.slots.length)
        return self._one_launch

    def _fused(self) -> Fused:
        """With angles of all positions that the cache has room for."""
        if self._angles is None:
            config, like = self.network.config, self.slots.state.temperature
            length = self.slots.length
            self._angles = Fused(
                None
                if config.theta is None
                else rope_table(
                    length, config.head_dim, theta=config.theta, scaling=config.scaling, like=like
                )
            )
        return self._angles

    def _timed(self, size: int, plan: StepPlan) -> float:
        """Seconds of a step whose slots are all empty, so without attention."""
        if plan.fused and not self.network.fits(size):
            raise ParameterError(f"Decoder: no five launches a layer for {size} sequences")
        if plan.streamed and not self._streams(size):
            raise ParameterError(f"Decoder: no streamed products for {size} sequences")
        if plan.whole and not has_whole(self.network, size):
            raise ParameterError(f"Decoder: no step of one launch for {size} sequences")
        return self._captured(size, GREEDY, plan, timed=True)


def replayed(graph: Any) -> float:
    """Seconds of a graph, by events: the median."""
    torch, times = torch_ops.torch_seen(), []
    graph.replay()
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[_REPLAYS // 2]
