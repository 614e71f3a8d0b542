"""The model repositories that the bench serves: chains of steps that do nothing, or make, pass on and copy a tensor."""

from pathlib import Path

__all__ = ["STEP_SERVICES", "write_chains"]

STEP_SERVICES = ("preprocess", "model", "postprocess")

_EMPTY = """backend: "identity"
input [{ name: "INPUT", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "OUTPUT", data_type: TYPE_FP32, dims: [ -1 ] }]
"""

# BIG travels on; SIZE comes along so that the answer to the client is eight bytes.
_CARRY = """backend: "identity"
input {{ name: "BIG_INPUT", data_type: TYPE_FP32, dims: [ -1 ] }}
input {{ name: "SIZE_INPUT", data_type: TYPE_INT64, dims: [ 1 ] }}
output {{ name: "BIG_OUTPUT", data_type: TYPE_FP32, dims: [ -1 ] }}
output {{ name: "SIZE_OUTPUT", data_type: TYPE_INT64, dims: [ 1 ] }}
parameters {{ key: "mode" value: {{ string_value: "{mode}" }} }}
"""

_MAKE = """backend: "generate"
input [{ name: "SIZE", data_type: TYPE_INT64, dims: [ 1 ] }]
output [{ name: "BIG", data_type: TYPE_FP32, dims: [ -1 ] }]
"""

_LAST = """backend: "identity"
input { name: "BIG", data_type: TYPE_FP32, dims: [ -1 ] }
input { name: "SIZE_INPUT", data_type: TYPE_INT64, dims: [ 1 ] }
output { name: "SIZE_OUTPUT", data_type: TYPE_INT64, dims: [ 1 ] }
"""


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def _ensemble(inputs: str, outputs: str, steps: list[str]) -> str:
    return f'platform: "ensemble"\n{inputs}\n{outputs}\nensemble_scheduling {{ step [ {", ".join(steps)} ] }}\n'


def write_chains(folder: Path) -> Path:
    """`chain`: three empty steps. `pass_on` and `write_anew`: the first step makes a tensor, two hand it on or copy it,
    and a last one answers with its size alone.

    Each service has a repository of its own, so that a chain crosses three processes.
    """
    models: dict[str, dict[str, str]] = {service: {} for service in STEP_SERVICES}
    gateway: dict[str, str] = {}
    for service in STEP_SERVICES:
        models[service][f"empty_{service}"] = _EMPTY
        for mode in ("pass", "copy"):
            models[service][f"{mode}_{service}"] = _CARRY.format(mode=mode)
    models["preprocess"]["make"] = _MAKE
    models["postprocess"]["last"] = _LAST
    names = ["INPUT", "a", "b", "OUTPUT"]
    gateway["chain"] = _ensemble(
        'input [{ name: "INPUT", data_type: TYPE_FP32, dims: [ -1 ] }]',
        'output [{ name: "OUTPUT", data_type: TYPE_FP32, dims: [ -1 ] }]',
        [
            _step(f"empty_{service}", {"INPUT": names[k]}, {"OUTPUT": names[k + 1]})
            for k, service in enumerate(STEP_SERVICES)
        ],
    )
    for name, mode in (("pass_on", "pass"), ("write_anew", "copy")):
        steps = [_step("make", {"SIZE": "SIZE"}, {"BIG": "big0"})]
        carriers = STEP_SERVICES[1:]  # the first service made it
        for k, service in enumerate(carriers):
            steps.append(
                _step(
                    f"{mode}_{service}",
                    {"BIG_INPUT": f"big{k}", "SIZE_INPUT": "SIZE" if not k else f"size{k}"},
                    {"BIG_OUTPUT": f"big{k + 1}", "SIZE_OUTPUT": f"size{k + 1}"},
                )
            )
        end = len(carriers)
        steps.append(_step("last", {"BIG": f"big{end}", "SIZE_INPUT": f"size{end}"}, {"SIZE_OUTPUT": "DONE"}))
        gateway[name] = _ensemble(
            'input [{ name: "SIZE", data_type: TYPE_INT64, dims: [ 1 ] }]',
            'output [{ name: "DONE", data_type: TYPE_INT64, dims: [ 1 ] }]',
            steps,
        )
    for service, configs in {**models, "gateway": gateway}.items():
        for model, text in configs.items():
            path = folder / service / model
            (path / "1").mkdir(parents=True, exist_ok=True)
            (path / "config.pbtxt").write_text(text)
    return folder
