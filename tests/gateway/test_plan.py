"""Pipelines as graphs: what is refused at load, and that a run does each step once and frees each tensor once."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.plan import Plan, Run, compile_plan
from tensorline.config.model import EnsembleStep, ModelConfig, TensorSpec
from tensorline.errors import BackendError, ConfigError, InvalidTensorError, OverloadedError
from tensorline.tensor import Tensor

Specs = tuple[TensorSpec, ...]


def spec(name: str, datatype: str = "FP32", dims: tuple[int, ...] = (4,), optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, dims, optional=optional)


IN, OUT, X, Y = ((spec(name),) for name in ("in", "out", "x", "y"))


def model(name: str, inputs: Specs = IN, outputs: Specs = OUT, **changes: object) -> ModelConfig:
    settings_: dict[str, object] = {"max_batch_size": 0, **changes}
    return ModelConfig(name, "identity", "", inputs=inputs, outputs=outputs, **settings_)  # type: ignore[arg-type]


def step(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> EnsembleStep:
    return EnsembleStep(name, version, inputs, outputs)


def ensemble(*steps: EnsembleStep, inputs: Specs = X, outputs: Specs = Y, max_batch_size: int = 0) -> ModelConfig:
    return ModelConfig("chain", "", "ensemble", max_batch_size, inputs, outputs, steps=steps)


def finding(*models: ModelConfig) -> Callable[[str, int], ModelConfig | None]:
    by_name = {config.name: config for config in models}
    return lambda name, version: by_name.get(name)


def tensor(name: str, shape: tuple[int, ...] = (4,)) -> Tensor:
    return Tensor(name, "FP32", shape, b"\0" * 16)


CHAIN = ensemble(
    step("pre", {"in": "x"}, {"out": "a"}),
    step("net", {"in": "a"}, {"out": "b"}),
    step("post", {"in": "b"}, {"out": "y"}),
)
MODELS = (model("pre"), model("net"), model("post"))


def test_a_plan_says_who_writes_and_who_reads() -> None:
    plan = compile_plan(CHAIN, finding(*MODELS))
    assert [(each.model, each.version, each.inputs, each.outputs) for each in plan.steps] == [
        ("pre", -1, (("in", "x"),), (("out", "a"),)),
        ("net", -1, (("in", "a"),), (("out", "b"),)),
        ("post", -1, (("in", "b"),), (("out", "y"),)),
    ]
    assert {name: (use.producer, use.consumers, use.is_output) for name, use in plan.tensors.items()} == {
        "x": (-1, (0,), False),
        "a": (0, (1,), False),
        "b": (1, (2,), False),
        "y": (2, (), True),
    }
    assert plan.source_of("y") == (2, "out")
    assert not plan.is_decoupled


def test_a_run_renames_releases_and_answers() -> None:
    run = Run(compile_plan(CHAIN, finding(*MODELS)))
    x, a, b, y = tensor("x"), tensor("out"), tensor("out"), tensor("out")
    assert run.start([x]) == [0]
    assert run.step_inputs(0) == [Tensor("in", "FP32", (4,), x.data)]
    assert run.step_outputs(0) == ("out",)
    assert (run.complete(0, [a]), run.released) == ([1], [x])
    assert (run.complete(1, [b]), run.released) == ([2], [a])
    assert not run.is_finished
    assert (run.complete(2, [y]), run.released) == ([], [b])
    assert run.is_finished
    assert run.outputs == [Tensor("y", "FP32", (4,), y.data)]


@pytest.mark.parametrize(
    ("config", "models", "wanted"),
    [
        (CHAIN, (MODELS[0],), "ensemble chain contains models that are not available or ambiguous: net, post"),
        (
            ensemble(step("pre", {"in": "x"}, {"out": "y"}, version=7)),
            (),
            "contains models that are not available or ambiguous: pre version 7",
        ),
        (
            ensemble(step("pre", {"nope": "x"}, {"out": "y"})),
            MODELS,
            "step 0 (model 'pre') maps tensor 'x' to input 'nope', which the model does not have",
        ),
        (
            ensemble(step("pre", {"in": "x"}, {"nope": "y"})),
            MODELS,
            "step 0 (model 'pre') maps output 'nope' to tensor 'y', but the model has no such output",
        ),
        (
            ensemble(step("pre", {"in": "x"}, {"out": "y"})),
            (model("pre", inputs=(spec("in"), spec("scale"))),),
            "step 0 (model 'pre') leaves out input 'scale', which the model requires",
        ),
        (
            ensemble(step("pre", {"in": "x"}, {"out": "y"})),
            (model("pre", outputs=(spec("out", "INT8"),)),),
            "in ensemble chain, ensemble tensor y: inconsistent data type: INT8 for output 'out' of step 0 "
            "(model 'pre'), FP32 for the ensemble's output",
        ),
        (
            ensemble(step("pre", {"in": "x"}, {"out": "y"})),
            (model("pre", inputs=(spec("in", dims=(5,)),)),),
            "in ensemble chain, ensemble tensor x: inconsistent shape: [4] for the ensemble's input, [5] for input "
            "'in' of step 0 (model 'pre')",
        ),
        (
            ensemble(step("pre", {"in": "x"}, {"out": "y"}), max_batch_size=8),
            (model("pre", max_batch_size=4),),
            "max_batch_size is 8, must be at most 4, that of step 0 (model 'pre')",
        ),
        (
            ensemble(
                step("one", {"in": "x"}, {"out": "a"}),
                step("two", {"in": "x"}, {"out": "b"}),
                step("join", {"left": "a", "right": "b"}, {"out": "y"}),
            ),
            (
                model("one", decoupled=True),
                model("two", decoupled=True),
                model("join", inputs=(spec("left"), spec("right"))),
            ),
            "step 2 (model 'join') takes tensors that stem from two decoupled steps, step 0 (model 'one') and step 1",
        ),
        (ensemble(step("chain", {"in": "x"}, {"out": "y"})), MODELS, "step 0 runs the ensemble itself"),
        (model("pre"), (), "model 'pre' is no ensemble"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(
    config: ModelConfig, models: tuple[ModelConfig, ...], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_plan(config, finding(*models))
    assert wanted in str(caught.value)
    assert config.name in str(caught.value)


def test_pipelines_may_nest_but_not_in_a_circle() -> None:
    inner = ModelConfig(
        "inner", "", "ensemble", 0, (spec("in"),), (spec("out"),), steps=(step("pre", {"in": "in"}, {"out": "out"}),)
    )
    outer = ensemble(step("inner", {"in": "x"}, {"out": "y"}))
    assert compile_plan(outer, finding(inner, *MODELS)).steps[0].model == "inner"
    assert compile_plan(outer, finding(inner, model("pre", decoupled=True))).is_decoupled
    circle = ModelConfig(
        "inner", "", "ensemble", 0, (spec("in"),), (spec("out"),), steps=(step("chain", {"x": "in"}, {"y": "out"}),)
    )
    with pytest.raises(ConfigError, match="ensembles form a cycle: chain -> inner -> chain"):
        compile_plan(outer, finding(circle, outer))


@pytest.mark.parametrize(
    ("first_batches", "second_batches", "made", "taken"),
    [
        (0, 8, (4,), (1, 4)),
        (0, 8, (3, 4), (3, 4)),
        (8, 0, (1, 4), (4,)),
        (8, 0, (3, 4), (3, 4)),
        (8, 8, (2, 4), (2, 4)),
        (0, 0, (4,), (4,)),
    ],
)
def test_a_batch_dimension_is_added_or_dropped_between_models(
    first_batches: int, second_batches: int, made: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    config = ensemble(step("pre", {"in": "x"}, {"out": "a"}), step("net", {"in": "a"}, {"out": "y"}))
    models = (model("pre", max_batch_size=first_batches), model("net", max_batch_size=second_batches))
    run = Run(compile_plan(config, finding(*models)))
    run.start([tensor("x")])
    run.complete(0, [tensor("out", made)])
    assert run.step_inputs(1)[0].shape == taken


BRANCHED = ensemble(
    step("pre", {"in": "x"}, {"out": "a"}),
    step("side", {"in": "extra"}, {"out": "s1"}),
    step("side", {"in": "s1"}, {"out": "s2"}),
    step("join", {"main": "a", "side": "s2"}, {"out": "y"}),
    inputs=(spec("x"), spec("extra", optional=True)),
)
BRANCHED_MODELS = (
    model("pre"),
    model("side"),
    model("join", inputs=(spec("main"), spec("side", optional=True))),
)


def test_an_input_that_is_left_out_leaves_out_its_branch() -> None:
    plan = compile_plan(BRANCHED, finding(*BRANCHED_MODELS))
    run = Run(plan)
    assert run.start([tensor("x"), tensor("extra")]) == [0, 1]
    run = Run(plan)
    assert run.start([tensor("x")]) == [0]
    assert run.complete(0, [tensor("out")]) == [3]
    assert [each.name for each in run.step_inputs(3)] == ["main"]
    run.complete(3, [tensor("out")])
    assert run.is_finished
    assert [each.name for each in run.outputs] == ["y"]


def test_an_output_that_a_step_does_not_make_is_absent_for_the_next() -> None:
    run = Run(compile_plan(BRANCHED, finding(*BRANCHED_MODELS)))
    run.start([tensor("x"), tensor("extra")])
    run.complete(0, [tensor("out")])
    assert run.complete(1, []) == [2]  # its model requires the input, and says so
    assert run.step_inputs(2) == []
    assert run.complete(2, []) == [3]
    assert [each.name for each in run.step_inputs(3)] == ["main"]


def test_a_pipeline_that_makes_nothing_says_so() -> None:
    run = Run(compile_plan(CHAIN, finding(*MODELS)))
    run.start([tensor("x")])
    run.complete(0, [])
    run.complete(1, [])
    run.complete(2, [])
    assert run.is_finished
    with pytest.raises(InvalidTensorError, match="in ensemble 'chain', unexpected deadlock"):
        _ = run.outputs


def test_the_first_failure_is_the_answer_once_nothing_is_in_flight() -> None:
    config = ensemble(
        step("pre", {"in": "x"}, {"out": "a"}),
        step("net", {"in": "x"}, {"out": "b"}),
        step("join", {"main": "a", "side": "b"}, {"out": "y"}),
    )
    run = Run(compile_plan(config, finding(*MODELS, *BRANCHED_MODELS)))
    x, b = tensor("x"), tensor("out")
    assert run.start([x]) == [0, 1]
    error = run.fail(0, OverloadedError("Exceeds maximum queue size"))
    assert str(error) == "in ensemble 'chain', model 'pre': Exceeds maximum queue size"
    assert isinstance(error, OverloadedError)
    assert (run.released, run.is_finished) == ([], False)  # net still reads x
    assert run.complete(1, [b]) == []
    assert sorted(map(id, run.released)) == sorted(map(id, [x, b]))
    assert run.is_finished
    assert run.error is error


def test_a_failure_frees_what_was_made_for_the_answer() -> None:
    config = ensemble(
        step("pre", {"in": "x"}, {"out": "y"}),
        step("net", {"in": "x"}, {"out": "z"}),
        outputs=(spec("y"), spec("z")),
    )
    run = Run(compile_plan(config, finding(*MODELS)))
    x, y = tensor("x"), tensor("out")
    run.start([x])
    run.complete(0, [y])
    assert run.released == []
    run.fail(1, BackendError("bad row"))
    assert sorted(map(id, run.released)) == sorted(map(id, [x, y]))
    assert run.is_finished


def test_outputs_that_nobody_asked_for_are_released_as_they_come() -> None:
    run = Run(compile_plan(CHAIN, finding(*MODELS)))
    run.start([tensor("x")])
    surplus = tensor("debug")
    run.complete(0, [tensor("out"), surplus])
    assert any(each is surplus for each in run.released)


# ---- Random graphs against an executor that knows nothing of plans


@dataclass
class Graph:
    config: ModelConfig
    models: dict[str, ModelConfig]
    requested: frozenset[str]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A pipeline of up to 10 steps; each reads up to 3 tensors made before it, all that is made is used."""
    inputs = [f"i{k}" for k in range(draw(st.integers(1, 3)))]
    available, unread = list(inputs), set(inputs)
    steps, models = [], {}
    for k in range(draw(st.integers(1, 10))):
        reads = draw(st.lists(st.sampled_from(available), min_size=1, max_size=3))
        if draw(st.booleans()) and unread:
            reads[0] = draw(st.sampled_from(sorted(unread)))
        writes = [f"t{k}_{j}" for j in range(draw(st.integers(1, 3)))]
        steps.append(
            step(
                f"m{k}", {f"in{j}": name for j, name in enumerate(reads)}, {f"out{j}": n for j, n in enumerate(writes)}
            )
        )
        ins = tuple(spec(f"in{j}") for j in range(len(reads)))
        models[f"m{k}"] = model(f"m{k}", inputs=ins, outputs=tuple(spec(f"out{j}") for j in range(len(writes))))
        unread -= set(reads)
        available += writes
        unread |= set(writes)
    lost = [name for name in inputs if name in unread]
    inputs = [name for name in inputs if name not in unread] or inputs[:1]
    if set(inputs) & set(lost):  # nothing reads any input: the first step shall
        steps[0] = step("m0", {"in0": inputs[0]}, steps[0].outputs)
        models["m0"] = model("m0", inputs=(spec("in0"),), outputs=models["m0"].outputs)
    made = [name for each in steps for name in each.outputs.values()]
    read = {name for each in steps for name in each.inputs.values()}
    outputs = sorted(
        {name for name in made if name not in read} | set(draw(st.lists(st.sampled_from(made), max_size=3)))
    )
    order = draw(st.permutations(range(len(steps))))
    config = ModelConfig(
        "random",
        "",
        "ensemble",
        0,
        tuple(spec(name) for name in sorted({n for n in read if n.startswith("i")})),
        tuple(spec(name) for name in outputs),
        steps=tuple(steps[at] for at in order),
    )
    asked = draw(st.sets(st.sampled_from(outputs)))
    return Graph(config, models, frozenset(asked))


@dataclass
class Watch:
    """What happened to each tensor object, checked as it happens."""

    reading: dict[int, set[int]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    keep: list[Tensor] = field(default_factory=list)

    def made(self, made: Tensor) -> Tensor:
        self.keep.append(made)
        return made


def needed_steps(config: ModelConfig, outputs: frozenset[str]) -> set[int]:
    """By asking again and again which steps write what is needed."""
    needed: set[int] = set()
    names = set(outputs)
    while True:
        more = {k for k, each in enumerate(config.steps) if names & set(each.outputs.values())}
        if more == needed:
            return needed
        needed = more
        names |= {name for k in needed for name in config.steps[k].inputs.values()}


@settings(max_examples=120, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_random_pipelines(graph: Graph, dice: random.Random) -> None:
    plan = compile_plan(graph.config, lambda name, version: graph.models[name])
    outputs = graph.requested or frozenset(each.name for each in graph.config.outputs)
    expected = needed_steps(graph.config, outputs)
    assert set(plan.select(graph.requested).steps) == expected
    run, watch, ran = Run(plan, graph.requested), Watch(), set[int]()
    holder: dict[str, Tensor] = {each.name: watch.made(value(each.name)) for each in graph.config.inputs}
    flying: dict[int, list[Tensor]] = {}

    def take(ready: list[int]) -> None:
        for released in run.released:
            assert id(released) not in watch.released, "released twice"
            watch.released.add(id(released))
            name = next(name for name, held in holder.items() if held is released)
            assert name not in outputs, "a requested output was released"
            later = expected - ran - set(flying)
            assert not any(name in graph.config.steps[k].inputs.values() for k in (*later, *flying, *ready)), (
                "too early"
            )
        for index in ready:
            assert index not in ran
            assert index not in flying, "started twice"
            each = graph.config.steps[index]
            got = {arrived.name: arrived.data for arrived in run.step_inputs(index)}
            assert got == {name: holder[source].data for name, source in each.inputs.items()}
            flying[index] = []

    take(run.start(list(holder.values())))
    while flying:
        index = dice.choice(sorted(flying))
        del flying[index]
        ran.add(index)
        each = graph.config.steps[index]
        made = []
        for name, target in each.outputs.items():
            if name in run.step_outputs(index) or dice.random() < 0.3:
                holder[target] = watch.made(value(target, name))
                made.append(holder[target])
        dice.shuffle(made)
        take(run.complete(index, made))
    assert run.is_finished
    assert ran == expected
    assert [each.name for each in run.outputs] == [s.name for s in graph.config.outputs if s.name in outputs]
    assert {each.name: each.data for each in run.outputs} == {name: holder[name].data for name in outputs}
    kept = {id(holder[name]) for name in outputs}
    assert watch.released == {id(each) for each in watch.keep} - kept


@settings(max_examples=60, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_random_pipelines_that_fail_free_everything_once(graph: Graph, dice: random.Random) -> None:
    run = Run(compile_plan(graph.config, lambda name, version: graph.models[name]), graph.requested)
    made = [value(each.name) for each in graph.config.inputs]
    released: list[Tensor] = []
    flying = run.start(made)
    released += run.released
    while flying:
        index = flying.pop(dice.randrange(len(flying)))
        if dice.random() < 0.3:
            run.fail(index, BackendError("no"))
        else:
            fresh = [value(name, name) for name in run.step_outputs(index)]
            made += fresh
            flying += run.complete(index, fresh)
        released += run.released
    assert run.is_finished
    assert len({id(each) for each in released}) == len(released)
    if run.error is not None:
        assert {id(each) for each in released} == {id(each) for each in made}


def value(identity: str, name: str | None = None) -> Tensor:
    return Tensor(name or identity, "FP32", (4,), identity.encode())


def test_selections_are_kept_and_bounded() -> None:
    plan: Plan = compile_plan(CHAIN, finding(*MODELS))
    assert plan.select() is plan.select(frozenset({"y"}))


def test_a_fork_goes_its_own_way() -> None:
    """Of a step that gives several responses: each goes on from the same point."""
    plan = compile_plan(CHAIN, finding(MODELS[0], model("net", decoupled=True), MODELS[2]))
    assert (plan.is_decoupled, plan.decoupled) == (True, frozenset({1}))
    base = Run(plan)
    assert base.start([tensor("x")]) == [0]
    assert not base.is_at(1)
    assert base.complete(0, [tensor("out")]) == [1]
    assert base.is_at(1)
    for shape in ((1,), (2,)):
        run = base.fork()
        assert run.complete(1, [tensor("out", shape)]) == [2]
        assert run.step_inputs(2)[0].shape == shape
        assert run.complete(2, [tensor("out", shape)]) == []
        assert run.is_finished
        assert run.outputs[0].shape == shape
    assert base.is_at(1)
    assert base.step_inputs(1)[0].name == "in"
    assert str(base.fail(1, BackendError("no luck"))) == "in ensemble 'chain', model 'net': no luck"
