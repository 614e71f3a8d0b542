"""Which instances to believe in, given what the agent answers: plain decisions, no socket, no clock.

An agent that comes back after a failure may have lost everything: it then says "nobody", and says one instance after
the other as each finds out, at its next beat, that it must register again. One that kept its data but was away for
longer than a TTL says "critical" of everybody until the next beats. Neither is evidence against an instance. So after
any break in the conversation nothing is removed for a while (`hold_s`: five beats, as long as registering again may
take); what is still missing or critical then is gone. Without a break the agent is taken at its word, also when it says
"nobody": whoever deregisters must be gone at once.

The price: an instance that ended during the break stays in the set for `hold_s`. Routing does not send to it, because
its stream is broken, and that is the stronger evidence; the other error, dropping those that work, nothing would mend.
"""

from collections.abc import Mapping

from tensorline.discovery.consul.entry import Entry
from tensorline.discovery.registry import ServiceInstance

__all__ = ["TokenBucket", "View"]


class View:
    """The instances believed in, from answer to answer."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._believed: dict[str, ServiceInstance] = {}
        self._is_in_doubt = False
        self._hold_until: float | None = None

    def doubt(self) -> None:
        """A query failed, or the index went back: the next answer may come from an agent that lost its data."""
        self._is_in_doubt = True

    def answered(self, entries: Mapping[str, Entry], now: float) -> frozenset[ServiceInstance]:
        if self._is_in_doubt:
            self._is_in_doubt = False
            self._hold_until = now + self._hold_s
        healthy = {key: entry.instance for key, entry in entries.items() if entry.is_healthy}
        held: dict[str, ServiceInstance] = {}
        if self._hold_until is not None and now < self._hold_until:
            held = self._not_replaced(healthy)
        if not held:
            self._hold_until = None
        self._believed = held | healthy
        return frozenset(self._believed.values())

    def hold_left_s(self, now: float) -> float | None:
        """Until what is held must be looked at again; None when nothing is."""
        return None if self._hold_until is None else max(0.0, self._hold_until - now)

    def _not_replaced(self, healthy: Mapping[str, ServiceInstance]) -> dict[str, ServiceInstance]:
        """Those believed in that the agent does not show, unless another has their address: a process started anew."""
        places = {place for instance in healthy.values() for place in _places(instance)}
        return {
            key: instance
            for key, instance in self._believed.items()
            if key not in healthy and places.isdisjoint(_places(instance))
        }


def _places(instance: ServiceInstance) -> set[tuple[str, str]]:
    # A Unix path means something on its host only.
    local = f"{instance.host} {instance.local_address}" if instance.local_address else ""
    return {place for place in (("tcp", instance.address), ("unix", local)) if place[1]}


class TokenBucket:
    """How often the agent may be called: `burst` calls at once, then `per_s`."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def spend(self, now: float) -> float:
        """Take a token, one of the future if need be.

        Returns:
            Seconds until it is due. A call that cannot wait (a beat) goes ahead; those that wait then wait longer.
        """
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_s)
