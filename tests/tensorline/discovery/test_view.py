"""Whom to believe after what the agent said, without an agent or a clock."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.discovery import ServiceInstance
from tensorline.discovery.consul.entry import Entry
from tensorline.discovery.consul.view import TokenBucket, View

HOLD_S = 15.0


def instance(name: str, address: str = "") -> ServiceInstance:
    return ServiceInstance(id=name, service="model", address=address or f"host-{name}:1")


def answer(names: str, critical: str = "") -> dict[str, Entry]:
    return {name: Entry(instance(name), is_healthy=name not in critical) for name in names}


def ids(seen: frozenset[ServiceInstance]) -> str:
    return "".join(sorted(each.id for each in seen))


def believing(names: str) -> View:
    view = View(HOLD_S)
    view.answered(answer(names), 0)
    return view


def test_an_agent_in_conversation_is_taken_at_its_word() -> None:
    view = believing("abc")
    assert ids(view.answered(answer("abc", critical="b"), 1)) == "ac"
    assert ids(view.answered(answer("a"), 2)) == "a"
    assert ids(view.answered({}, 3)) == ""
    assert view.hold_left_s(3) is None


def test_after_a_break_nobody_is_removed_by_an_agent_that_lost_its_data() -> None:
    view = believing("abc")
    view.doubt()
    assert ids(view.answered({}, 100)) == "abc"
    assert view.hold_left_s(100) == HOLD_S
    assert ids(view.answered(answer("b"), 101)) == "abc"
    assert ids(view.answered(answer("abd"), 103)) == "abcd"
    assert ids(view.answered(answer("abcd"), 104)) == "abcd"
    assert view.hold_left_s(104) is None


def test_nor_by_one_that_calls_everybody_critical_until_the_next_beat() -> None:
    view = believing("ab")
    view.doubt()
    assert ids(view.answered(answer("ab", critical="ab"), 100)) == "ab"


def test_who_does_not_register_again_in_time_is_gone() -> None:
    view = believing("ab")
    view.doubt()
    view.answered(answer("a"), 100)
    assert ids(view.answered(answer("a"), 100 + HOLD_S)) == "a"
    assert view.hold_left_s(100 + HOLD_S) is None


def test_once_all_are_back_the_agent_is_believed_again() -> None:
    view = believing("ab")
    view.doubt()
    view.answered(answer("ab"), 100)
    assert ids(view.answered(answer("a"), 101)) == "a"


def test_another_break_begins_the_hold_anew() -> None:
    view = believing("ab")
    view.doubt()
    view.answered(answer("a"), 100)
    view.doubt()
    assert ids(view.answered(answer("a"), 100 + HOLD_S)) == "ab"


def test_a_process_started_anew_during_the_break_is_there_once() -> None:
    view = believing("ab")
    view.doubt()
    successor = {"new": Entry(instance("new", "host-a:1"), is_healthy=True)}
    assert ids(view.answered(successor, 100)) == "bnew"


def test_one_socket_path_on_two_hosts_is_two_places() -> None:
    here, there = (
        ServiceInstance(id=name, service="", address="", local_address="unix:/run/a.sock", host=name) for name in "ab"
    )
    view = View(HOLD_S)
    view.answered({"a": Entry(here, is_healthy=True)}, 0)
    view.doubt()
    assert ids(view.answered({"b": Entry(there, is_healthy=True)}, 1)) == "ab"


steps = st.lists(
    st.tuples(st.sampled_from(["answer", "doubt"]), st.text("abcde", max_size=5), st.text("abcde"), st.floats(0, 20)),
    max_size=20,
)


@given(steps)
@settings(deadline=None)
def test_the_view_holds_to_its_rules_whatever_comes(steps: list[tuple[str, str, str, float]]) -> None:
    view, now, believed, in_doubt = View(HOLD_S), 0.0, set[str](), False
    hold_until: float | None = None
    for kind, names, critical, pause_s in steps:
        now += pause_s
        if kind == "doubt":
            view.doubt()
            in_doubt = True
            continue
        if in_doubt:
            hold_until, in_doubt = now + HOLD_S, False
        healthy = set(names) - set(critical)
        seen = set(ids(view.answered(answer(names, critical), now)))
        if hold_until is not None and now < hold_until:
            assert seen == healthy | believed
        else:
            assert seen == healthy
        if believed <= healthy:
            hold_until = None
        believed = seen


def test_calls_beyond_the_burst_are_due_one_a_second() -> None:
    bucket = TokenBucket(per_s=1.0, burst=2)
    assert [bucket.spend(10.0) for _ in range(4)] == [0.0, 0.0, 1.0, 2.0]
    assert bucket.spend(13.0) == 0.0
    assert bucket.spend(100.0) == 0.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
@settings(deadline=None)
def test_calls_that_wait_keep_to_the_rate_in_any_window(pauses: list[float]) -> None:
    bucket, now, due = TokenBucket(per_s=1.0, burst=2), 0.0, []
    for pause_s in pauses:
        now += pause_s
        now += bucket.spend(now)
        due.append(now)
    for first, start in enumerate(due):
        for last in range(first, len(due)):
            assert last - first + 1 <= 2 + (due[last] - start) + 1e-6
