"""`tensorline infer`: requests to a gateway, as any client would send them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tensorline.cli.client import Answer, Client, Request, RequestFailedError
from tensorline.cli.questions import Question, questions_of

__all__ = ["Reply", "ask", "ask_streaming"]

Reply = tuple[str, Answer | RequestFailedError]
"""What the request was about, and what came of it."""


def ask(client: Client, model: str, question: Question, *, is_traced: bool) -> Iterator[Reply]:
    """One request after the other; one that the gateway refuses does not keep the next from being sent.

    Args:
        model: "name" or "name/version".
    Raises:
        CommandError: the gateway does not answer.
        UsageError: what stands on the command line does not fit the model; nothing was sent.
    """
    name, version, requests = _requests(client, model, question)
    for about, request in requests:
        try:
            yield about, client.infer(name, version, request, is_traced=is_traced)
        except RequestFailedError as error:
            yield about, error


def ask_streaming(client: Client, model: str, question: Question, *, is_traced: bool) -> Iterator[Reply]:
    """All requests on one stream, each answer as it comes; a decoupled model may give several to each request.

    Raises: as `ask`.
    """
    name, version, requests = _requests(client, model, question)
    # Told apart by their ids: those of the user where there are, else the requests' numbers.
    sent = {request.id or str(number): (about, request) for number, (about, request) in enumerate(requests, 1)}
    messages = [replace(request, id=identity) for identity, (_, request) in sent.items()]
    for reply in client.stream(name, version, messages, is_traced=is_traced):
        about = sent[reply.id][0] if reply.id in sent else ""
        yield about, reply


def _requests(client: Client, model: str, question: Question) -> tuple[str, str, Sequence[tuple[str, Request]]]:
    name, _, version = model.partition("/")
    return name, version, list(questions_of(question, client.inputs(name, version)))
