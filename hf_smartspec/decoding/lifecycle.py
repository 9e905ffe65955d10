"""Beginning and end of requests in the decoding loop: their cache rows, sources, recorders, and the length policy."""

from collections.abc import Callable

from ..candidates.forwarding import unwrapped
from ..goodput.policy import LengthPolicy
from .call import Request
from .learning import guarded
from .source_guard import GuardedSources, release


class RequestLifecycle:
    """
    Begins and ends requests in all that keeps state of them.

    Args:
        policy (`LengthPolicy`): The loop's policy.
        sources (`GuardedSources`): Sources of all requests.
        release_row (`Callable`, *optional*): Gets a finished request, whose cache row it keeps or removes; it calls
            `source_guard.release` when a row is gone. By default, the row is removed.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        sources: GuardedSources,
        release_row: Callable[[Request], None] | None = None,
    ):
        self.policy, self.sources = policy, sources
        self._release_row, self._keeps_rows = release_row or _remove_row, release_row is not None

    def begin(self, request: Request) -> None:
        """Begin a request, with a new cache row if it has none."""
        call = request.call
        request.row = request.row or call.forward.add()
        call.set_lengths(request)
        self._renew(request)
        self.sources.start(request)
        is_greedy, encoded = request.seed is None, call.encoded_text(request)
        for recorder in request.chain.recorders:
            guarded(recorder.start, request.request_id, request.prompt, is_greedy, encoded)

    def _renew(self, request: Request) -> None:
        """Give sources whose weights have changed a new chance, in spite of what they cost before."""
        for source, cost in zip(request.chain.sources, request.chain.costs):
            if number := unwrapped(source).num_renewals:
                self.policy.renew(cost.source, number)
                self.sources.renew(cost.source, number)

    def retire(self, request: Request) -> None:
        """End a request that needs no further tokens, and release its row, while its call goes on."""
        request.tree = request.logits = None
        self._forget(request)
        self._give_up_row(request)

    def end(self, request: Request) -> None:
        """End a request of a call that is removed, finished or not, and release its row if it has one."""
        request.tree = request.logits = None
        has_row = request.row is not None
        if has_row:
            self._give_up_row(request)
        self._forget(request, has_row)

    def _give_up_row(self, request: Request) -> None:
        if not request.call.keeps_cache:
            self._release_row(request)
            request.row = None

    def _forget(self, request: Request, has_row: bool = True) -> None:
        """Delete a request from recorders, sources and policy; data of its row only once that is gone."""
        for recorder in request.chain.recorders:
            guarded(recorder.stop, request.request_id)
        is_known_to_source = request.is_known_to_source
        self.sources.stop(request)  # their gate has state of requests that it has refused
        self.policy.forget(request.request_id)
        if is_known_to_source:
            request.fed = request.verified = None
            if not (self._keeps_rows and has_row):
                release(request.source_request.on_release)


def _remove_row(request: Request) -> None:
    request.call.forward.remove(request.cache_row)
