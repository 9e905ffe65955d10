"""transformers' continuous batching, as the benches call it."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.kit.ways import continuous_config, serve_lengths


def test_there_are_pages_for_the_longest_text_of_every_row():
    config = continuous_config(3, 65, use_cuda_graph=True)
    assert config.page_size == 32 and config.num_blocks == 9 and config.use_cuda_graph
    assert continuous_config(3, 257, page=256, use_cuda_graph=False).num_blocks == 6


class Manager:
    """Answers the requests from the last to the first, so many of them."""

    def __init__(self, num: int):
        self.num, self.lengths = num, {}

    def add_request(self, prompt, max_new_tokens, eos_token_id):
        name = f"request {len(self.lengths)}"
        self.lengths[name] = max_new_tokens
        return name

    def get_result(self, timeout):
        if not self.num:
            return None
        self.num -= 1
        name = list(self.lengths)[self.num]
        return SimpleNamespace(request_id=name, generated_tokens=[5] * self.lengths[name], is_finished=lambda: True)

    def is_running(self):
        return bool(self.num)


@pytest.mark.parametrize(("num", "lengths"), [(3, [1, 2, 3]), (2, [1, 2]), (0, [])])
def test_answers_come_in_the_order_of_the_requests_and_may_be_missing(num, lengths):
    found = serve_lengths(Manager(num), [np.arange(4)] * 3, [1, 2, 3])
    assert [len(output.generated_tokens) for output in found.values()] == lengths
