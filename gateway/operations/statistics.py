"""What the models have done so far, as Triton counts it: the sum over all workers behind the port.

Source: protocol.md §10, observability.md §2.
"""

from collections.abc import Iterable, Sequence
from urllib.parse import urlencode

from gateway.models import Models
from gateway.siblings import Siblings
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.telemetry.counters import ModelCounters
from tensorline.telemetry.recorder import Recorder

__all__ = ["STATISTICS_PATH", "Statistics", "merge_statistics", "own_statistics"]

STATISTICS_PATH = "/internal/statistics"
"""Where a worker tells the others its own."""


class Statistics:
    """Args:
    siblings: The other workers of this gateway.
    """

    def __init__(self, models: Models, recorder: Recorder, siblings: Siblings) -> None:
        self._models = models
        self._recorder = recorder
        self._siblings = siblings

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        wanted = self._wanted(request.name, request.version)
        pages = [own_statistics(self._recorder, request.name)]
        for body in await self._siblings.ask(f"{STATISTICS_PATH}?{urlencode({'model': request.name})}"):
            pages.append(pb.ModelStatisticsResponse.FromString(body))
        return merge_statistics(pages, wanted)

    def _wanted(self, name: str, version: str) -> list[tuple[str, str]]:
        """Ready models and versions.

        Raises:
            InvalidTensorError: no such model or version, or none of it is ready.
        """
        if not name:
            return [(each, str(number)) for each in self._models.names for number in self._models.versions(each)]
        versions = self._models.versions(name)
        if not versions:
            raise InvalidTensorError(f"requested model '{shown(name)}' is not available")
        if not version:
            return [(name, str(number)) for number in versions]
        if not self._models.is_ready(name, version):
            raise InvalidTensorError(f"requested model version is not available for model '{name}'")
        return [(name, str(int(version)))]


def own_statistics(recorder: Recorder, name: str = "") -> pb.ModelStatisticsResponse:
    """What this process has counted, with every request that has ended; of one model, or of all."""
    recorder.settle()
    answer = pb.ModelStatisticsResponse()
    for model, version, row in recorder.metrics.models:
        if name in ("", model):
            _fill(answer.model_stats.add(name=model, version=version), row)
    return answer


def merge_statistics(
    pages: Iterable[pb.ModelStatisticsResponse], wanted: Sequence[tuple[str, str]]
) -> pb.ModelStatisticsResponse:
    """The sum of several processes' rows, one for each of `wanted` and in its order: zeros where nothing ran."""
    answer = pb.ModelStatisticsResponse()
    rows: dict[tuple[str, str], pb.ModelStatistics] = {}
    for name, version in wanted:
        rows[name, version] = row = answer.model_stats.add(name=name, version=version)
        row.inference_stats.SetInParent()
    for page in pages:
        for theirs in page.model_stats:
            ours = rows.get((theirs.name, theirs.version))
            if ours is not None:
                _add(ours, theirs)
    for row in rows.values():
        row.batch_stats.sort(key=lambda batch: batch.batch_size)
    return answer


def _fill(into: pb.ModelStatistics, row: ModelCounters) -> None:
    into.last_inference = row.last_inference_ms
    into.inference_count = row.inference_count
    into.execution_count = row.execution_count
    stats = into.inference_stats
    for duration, count, ns in (
        (stats.success, row.success_count, row.success_ns),
        (stats.fail, row.fail_count, row.fail_ns),
        (stats.queue, row.queue_count, row.queue_ns),
        (stats.compute_input, row.compute_count, row.compute_input_ns),
        (stats.compute_infer, row.compute_count, row.compute_infer_ns),
        (stats.compute_output, row.compute_count, row.compute_output_ns),
        (stats.cache_hit, 0, 0),  # there is no response cache
        (stats.cache_miss, 0, 0),
    ):
        duration.count, duration.ns = count, ns
    for batch_size, batch in sorted(row.batches.items()):
        entry = into.batch_stats.add(batch_size=batch_size)
        entry.compute_input.count = entry.compute_infer.count = entry.compute_output.count = batch.count
        entry.compute_input.ns = batch.compute_input_ns
        entry.compute_infer.ns = batch.compute_infer_ns
        entry.compute_output.ns = batch.compute_output_ns
    for number, response in enumerate(row.responses):
        told = into.response_stats[str(number)]
        for name in ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"):
            duration = getattr(told, name)
            duration.count, duration.ns = getattr(response, name)


def _add(ours: pb.ModelStatistics, theirs: pb.ModelStatistics) -> None:
    ours.last_inference = max(ours.last_inference, theirs.last_inference)
    ours.inference_count += theirs.inference_count
    ours.execution_count += theirs.execution_count
    _add_durations(ours.inference_stats, theirs.inference_stats)
    sizes = {batch.batch_size: batch for batch in ours.batch_stats}
    for batch in theirs.batch_stats:
        known = sizes.get(batch.batch_size)
        if known is None:
            ours.batch_stats.add().CopyFrom(batch)
        else:
            _add_durations(known, batch)
    for number, response in theirs.response_stats.items():
        _add_durations(ours.response_stats[number], response)


def _add_durations(
    ours: pb.InferStatistics | pb.InferBatchStatistics | pb.InferResponseStatistics,
    theirs: pb.InferStatistics | pb.InferBatchStatistics | pb.InferResponseStatistics,
) -> None:
    """Of two messages of one kind, each field that is a duration."""
    for field, value in theirs.ListFields():
        if field.message_type is not None:
            duration = getattr(ours, field.name)
            duration.SetInParent()
            duration.count += value.count
            duration.ns += value.ns
