"""Trace settings: which requests they choose (observability.md §4)."""

from tensorline.telemetry.trace_rules import GLOBAL, TraceRules


def chosen(rules: TraceRules, model: str, requests: int) -> list[int]:
    """Numbers, from 1, of the requests that were chosen."""
    return [number for number in range(1, requests + 1) if rules.sample(model)]


def test_nothing_is_decided_while_nothing_is_set() -> None:
    rules = TraceRules()
    assert not rules.is_active
    assert not rules.decides("m")
    assert not rules.is_off("m")
    assert rules.value("m", "trace_level") == ("TIMESTAMPS",)
    assert rules.shown_count("m") == -1


def test_every_rate_th_request_is_chosen_the_first_is_number_rate() -> None:
    rules = TraceRules({"trace_rate": 3})
    assert chosen(rules, "m", 10) == [3, 6, 9]
    rules.change(GLOBAL, {"trace_rate": 1})
    assert chosen(rules, "m", 3) == [1, 2, 3]
    rules.change(GLOBAL, {"trace_rate": 0})
    assert chosen(rules, "m", 3) == []


def test_the_count_runs_out() -> None:
    rules = TraceRules()
    rules.change(GLOBAL, {"trace_rate": 2, "trace_count": 2})
    assert chosen(rules, "m", 10) == [2, 4]
    assert rules.shown_count("m") == 0
    rules.change(GLOBAL, {"trace_rate": 1})
    assert chosen(rules, "m", 3) == []
    rules.change(GLOBAL, {"trace_count": 1})
    assert rules.shown_count("m") == 1
    assert chosen(rules, "m", 3) == [1]


def test_a_models_own_setting_has_its_own_counter() -> None:
    rules = TraceRules({"trace_level": ("TIMESTAMPS",), "trace_rate": 2})
    rules.change("m", {"trace_rate": 3})
    assert chosen(rules, "m", 6) == [3, 6]
    assert chosen(rules, "other", 3) == [2]
    assert rules.sample("another")  # the fourth of those that have nothing of their own


def test_unset_fields_of_a_model_follow_the_global_ones_also_later() -> None:
    rules = TraceRules()
    rules.change("m", {"trace_level": ("OFF",)})
    rules.change(GLOBAL, {"trace_rate": 7})
    assert rules.value("m", "trace_rate") == 7
    assert rules.is_off("m")
    assert not rules.is_off("n")


def test_clearing_goes_back_one_step() -> None:
    rules = TraceRules({"trace_rate": 1000})
    rules.change(GLOBAL, {"trace_rate": 10})
    rules.change("m", {"trace_rate": 5})
    rules.change("m", {"trace_rate": None})
    assert rules.value("m", "trace_rate") == 10
    rules.change(GLOBAL, {"trace_rate": None})
    assert rules.value("m", "trace_rate") == 1000
    rules = TraceRules()
    rules.change("m", {"trace_count": 1})
    rules.change("m", {"trace_count": None})
    assert not rules.is_active


def test_what_other_workers_chose_counts() -> None:
    rules = TraceRules()
    rules.change("m", {"trace_count": 5})
    assert chosen(rules, "m", 2) == [1, 2]
    assert rules.taken == {"m": 2}
    rules.note_elsewhere("m", 2)
    assert rules.shown_count("m") == 1
    assert chosen(rules, "m", 3) == [1]
