"""Statistics of speculation in one line."""

from ....decoding.statistics import GenerationStatistics


def summary(statistics: GenerationStatistics) -> str:
    """Return tokens, seconds, tokens per step and drafts as one line."""
    count, seconds = statistics.generated_tokens, statistics.seconds_total
    speed = f" in {seconds:.1f} s, {count / seconds:.0f} a second" if seconds > 0 else ""
    drafts = (
        f"{statistics.drafted_tokens} drafted, {statistics.accepted_tokens} accepted"
        if statistics.drafted_tokens
        else "nothing drafted"
    )
    return f"{count} tokens{speed}; {statistics.mean_accepted_length:.2f} a step; {drafts}"
