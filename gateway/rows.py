"""Which models have counters, and when these begin anew: followed from what the stages say they host."""

import re
from collections.abc import Mapping

from gateway.mesh import Mesh
from gateway.models import Models
from tensorline.config import ModelConfig
from tensorline.config.values import config_to_message
from tensorline.errors import TensorlineError
from tensorline.rpc.hosted import READY
from tensorline.telemetry.counters import ModelTraits
from tensorline.telemetry.recorder import Recorder

__all__ = ["CounterRows", "traits_of"]

TAGS_LIMIT = 16
TAG_VALUE_LIMIT = 128
BUCKETS_LIMIT = 64
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"

NOT_IN_A_LABEL = re.compile(r"\W", re.ASCII)


class CounterRows:
    """Gives each model that became ready its counters, so that a refusal that comes before any success is counted too;
    sets them back when a stage has loaded the version again, and takes them away when it has unloaded it.

    A stage that dies takes nothing away: its models' failures must be seen.
    """

    def __init__(self, recorder: Recorder, models: Models, mesh: Mesh) -> None:
        self._recorder = recorder
        self._models = models
        self._mesh = mesh
        self._loads: dict[tuple[str, str, str], int] = {}

    def follow(self) -> None:
        """To be called after the mesh's table changed."""
        loads = {
            (connection.instance_id, hosted.name, hosted.version): hosted.load
            for connection, models in self._mesh.hosted
            for hosted in models
            if hosted.load and hosted.state == READY
        }
        live = {connection.instance_id for connection, _ in self._mesh.hosted}
        served = {(name, version) for _, name, version in loads}
        for key, load in self._loads.items():
            instance_id, name, version = key
            if key not in loads and instance_id in live and (name, version) not in served:
                self._recorder.forget(name, version)
            elif loads.get(key, load) != load:
                self._recorder.restart(name, version, self._traits(name, version))
        self._loads = loads
        self._declare()

    def _declare(self) -> None:
        table = self._recorder.metrics.models
        for name in self._models.names:
            for version in self._models.versions(name):
                if table.get(name, str(version)) is None:
                    table.declare(name, str(version), self._traits(name, str(version)))

    def _traits(self, name: str, version: str) -> ModelTraits:
        try:
            config, _ = self._models.config(name, version)
        except TensorlineError:  # it went meanwhile
            return ModelTraits()
        return traits_of(config)


def traits_of(config: ModelConfig) -> ModelTraits:
    """Labels and buckets that the configuration asks for, bounded: they are copied into each row of the page."""
    traits = ModelTraits(_tags(config.metric_tags), config.decoupled)
    for control in config_to_message(config).model_metrics.metric_control:
        buckets = sorted({round(bound * 1000) for bound in control.histogram_options.buckets if 0 < bound < 1e9})
        if control.metric_identifier.family == FIRST_RESPONSE and buckets:
            traits = ModelTraits(traits.tags, traits.is_decoupled, tuple(buckets[:BUCKETS_LIMIT]))
    return traits


def _tags(given: Mapping[str, str]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for key in sorted(given)[:TAGS_LIMIT]:
        # A label of Prometheus has letters, digits and underscores alone.
        tags.setdefault(f"_{NOT_IN_A_LABEL.sub('_', key)}", given[key][:TAG_VALUE_LIMIT])
    return tags
