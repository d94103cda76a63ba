"""membar and fence: lanes run in lock step on one memory, so only the race finder needs them."""

from __future__ import annotations

from fkjit.interp.core.ptx import Instruction, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode
from fkjit.interp.race.finder import race_of

_SCOPES = words("cta cluster gpu sys gl")
_SEMANTICS = words("sc acq_rel acquire release")
_PROXIES = words(
    "alias async global shared::cta shared::cluster async.global async.shared::cta "
    "async.shared::cluster tensormap::generic async::generic sync_restrict::shared::cta "
    "sync_restrict::shared::cluster"
)


@opcode("membar", "fence")
def fence(d: Decoder, ins: Instruction) -> Step:
    """membar.scope, fence{.sem}.scope, fence.mbarrier_init, fence.proxy.kind."""
    only(ins, (*_SCOPES, *_SEMANTICS, *_PROXIES, "proxy", "mbarrier_init"))
    race = race_of(d)
    if race is None:
        return lambda group: None
    if ins.has("async"):
        return lambda group: race.proxy_fence(group.lanes)
    if not _SCOPES.intersection(ins.op):  # fence.proxy.alias
        return lambda group: None
    return lambda group: race.fence(group.lanes, ins)
