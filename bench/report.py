"""The bench's table, as Markdown."""

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CHAIN", "FLOOR", "Report"]

FLOOR = "floor: an empty grpc.aio call, no mesh"
CHAIN = "(b) chain of three empty steps"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


@dataclass
class Report:
    machine: str
    date: str
    _loads: list[str] = field(default_factory=list)
    _sizes: list[str] = field(default_factory=list)
    _rest: list[str] = field(default_factory=list)
    _rates: dict[str, float] = field(default_factory=dict)
    """Answers a second of the last, largest load of each title."""

    def load(
        self,
        title: str,
        in_flight: int,
        result: dict[str, float],
        *,
        outside: float | None = None,
        cores: float | None = None,
    ) -> None:
        notes = []
        self._rates[title] = result["rate"]
        if outside is not None:
            notes.append(f"{outside:.0%} of the time outside decode, network and top-k")
        if cores is not None:
            notes.append(f"{cores:.2f} cores used by the mesh")
        self._loads.append(
            f"| {title} | {in_flight} | {result['rate']:,.0f} | {result['p50_ms']:.2f} | {result['p99_ms']:.2f} "
            f"| {'; '.join(notes)} |"
        )

    def size(self, title: str, size: str, result: dict[str, float], *, made_ms: float, moved: float) -> None:
        self._sizes.append(
            f"| {title} | {size} | {result['p50_ms']:.2f} | {made_ms:.2f} | {result['p50_ms'] - made_ms:.2f} "
            f"| {moved / 1024:.1f} |"
        )

    def tracing(self, off: float, on: float) -> None:
        self._rest.append(
            f"(d) Every trace exported against none, 16 in flight, in turns: {on:,.0f} against {off:,.0f} answers/s, "
            f"{1 - on / off:+.1%} of throughput."
        )

    def start(self, ready_s: float, rss_mb: dict[str, float]) -> None:
        sizes = ", ".join(f"{name} {size:.0f} MB" for name, size in rss_mb.items())
        self._rest.append(
            f"(e) From start to ready with the example models: {ready_s:.1f} s. Resident after load, shared pages "
            f"counted in each: {sizes}."
        )

    def text(self) -> str:
        parts = [f"{self.machine}, {self.date}."]
        if self._loads:
            parts.append(
                "| what | in flight | answers/s | p50 ms | p99 ms | |\n|---|---|---|---|---|---|\n"
                + "\n".join(self._loads)
            )
            parts += self._shares()
        if self._sizes:
            parts.append(
                "(c) One step makes a tensor, two hand it on or copy it, a fourth looks at it; one request in flight; "
                "the answer is eight bytes.\n\n"
                "| steps | tensor | p50 ms | of it making the tensor | the rest | KB through sockets |\n"
                "|---|---|---|---|---|---|\n" + "\n".join(self._sizes)
            )
        return "\n\n".join([*parts, *self._rest])

    def _shares(self) -> list[str]:
        """The chain against the floor: what counts beside the numbers of one machine."""
        if FLOOR not in self._rates or CHAIN not in self._rates:
            return []
        share = self._rates[CHAIN] / self._rates[FLOOR]
        return [f"At the most in flight the chain of three gives {share:.2f} of the answers of an empty gRPC call."]

    def write(self, path: Path) -> None:
        """Replace what stands between the marks."""
        text = path.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        path.write_text(f"{head}{BEGIN}\n\n{self.text()}\n\n{END}{tail}")
